/* redo: makes a set of 64-bit words of one segment change together.
 *
 * A step works on private copies and appends data past committed lengths. When it is
 * finished it puts (word, value) pairs here, and redo_commit makes them all valid at once.
 *
 * Created by:   the owner of the segment the log lies in. Written by: that owner only.
 * Commit point: the store of `count` (named "redo.commit"). Before it nothing happened,
 *               after it everything did: the values are absolute, so applying them again
 *               is harmless.
 * After a crash: redo_recover applies a log whose count is not zero, then clears it.
 */
#ifndef MIDAIR_REDO_H
#define MIDAIR_REDO_H

#include "base/api.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* The largest step is an order batch of 8 KiB: 2040 recipients, four words each. */
#define REDO_PAIRS_MAX 16384
/* A step that can stop early (parsing) does so here, leaving room for its last frame. */
#define REDO_PAIRS_SOFT 12288

#define REDO_ARENA (1ULL << 63)

API struct redo_pair {
    uint64_t offset; /* of the word, from the start of its segment; REDO_ARENA: of the arena */
    uint64_t value;
};

API struct redo_log {
    _Atomic uint64_t count; /* 0: nothing committed and unapplied */
    uint64_t pad[7];
    struct redo_pair pairs[REDO_PAIRS_MAX];
};

API struct redo {            /* private to the process */
    struct redo_log *log;
    char *base;          /* of the segment the log lies in */
    char *arena;         /* of the arena its owner also owns, or NULL */
    uint32_t count;
};

API static inline void redo_put(struct redo *r, uint64_t *word, uint64_t value)
{
    struct redo_pair *p = &r->log->pairs[r->count++];

    p->offset = (uint64_t)((char *)word - r->base);
    p->value = value;
}

/* The same for a word of the arena. */
API static inline void redo_put_arena(struct redo *r, uint64_t *word, uint64_t value)
{
    struct redo_pair *p = &r->log->pairs[r->count++];

    p->offset = (uint64_t)((char *)word - r->arena) | REDO_ARENA;
    p->value = value;
}

API void redo_commit(struct redo *r);
/* At start: finishes a committed step. Returns how many words it stored. */
API uint32_t redo_recover(struct redo *r);

#endif
