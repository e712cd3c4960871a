/* migrate: a segment of the layout before becomes one of today's layout.
 *
 * A table of (kind, layout before) -> converter. What the converter reads is described by frozen
 * copies of the structs of that release (release_0_1.h), which share nothing with the living ones;
 * what it writes by the living ones. The next change of a layout adds a row and a frozen header.
 *
 * Called by:    the owner of the segment, under its lease, while no process of the release before
 *               is left (midair/process/standstill.py).
 * Written:      `from` only by segment_finish(), by the rules of its own layout; `to` is a fresh,
 *               zeroed segment beside it that nobody has heard of.
 * Commit point: the rename of the new segment over the old one (in native/migrate.py). Killed before
 *               it, the owner leaves the old one whole, and its successor begins anew; killed
 *               after it, the new one.
 * Invariants:
 *   M1  Numbers stay: slots, entries and their generations, epochs, sequence numbers, positions. So
 *       a handle, an order or a reference that is on its way means the same before and after.
 *   M2  What lies in rings, inboxes, chunks and output blocks is copied byte for byte.
 *   M3  A step that was committed is finished by the rules of the old layout before its segment is
 *       converted (redo logs hold offsets); a journal is converted after the arena its log names.
 *   M4  A field the layout before did not have is zero: as before.
 */
#ifndef MIDAIR_MIGRATE_H
#define MIDAIR_MIGRATE_H

#include "base/api.h"

#include <stdint.h>

API enum segment_age {
    SEGMENT_FOREIGN = 0,    /* neither: of a release that is older still, or newer */
    SEGMENT_CURRENT = 1,
    SEGMENT_CONVERTIBLE = 2, /* there is a converter for it */
};
/* Of a header with these three words: enum segment_age. */
API int segment_age(uint32_t kind, uint32_t layout, uint64_t fingerprint);

/* Finishes a step that was committed in `from`, by the rules of its layout; again is the same.
 * `other`: the arena that belongs to a journal, or NULL if that has been converted already. -EPROTO:
 * not what its header says, or a step that needs an arena that is not given. */
API int segment_finish(void *from, uint64_t from_bytes, void *other, uint64_t other_bytes);

/* Size of what it becomes, for its own capacities. -EPROTO: no converter, or not what its header says. */
API int64_t segment_migrated_bytes(const void *from, uint64_t from_bytes);

/* Fills `to`, zeroed, of that size. `from_fd` is open on `from`: holes of a sparse segment are not
 * looked at, which would make them real memory. -EPROTO as above, also when a step is unfinished. */
API int segment_migrate(const void *from, uint64_t from_bytes, int from_fd, void *to);

#endif
