/* segment: the first bytes of every shared-memory segment.
 *
 * Created by:   the role that owns the segment, under its lease, through posix-ipc; or, from one
 *               of the layout before, by a migration (migrate/migrate.h).
 * Written by:   that creator, once; nobody writes the header again.
 * Invariants, of segments and of the roles that write them:
 *   S1  Every segment begins with `struct segment_header`: magic, kind, layout version,
 *       fingerprint of its struct sizes, size. A process that meets anything but what it
 *       was compiled and configured for says so and ends with LAYOUT_MISMATCH. It never
 *       guesses.
 *   S2  The magic is stored last. A segment without it, or of size 0, was never used: it is
 *       made anew. What is written when a segment is made does not depend on who makes it.
 *   S3  Every word has one writer role, or is one atomic word with a stated protocol. At
 *       most one process acts in a role. The role ends with the process, by whatever means
 *       it ends.
 *   S4  The router maps its own segments only (routing, statistics): never a body, a ledger
 *       word or a journal. With `router.user` set the operating system enforces this.
 *       Without it nothing does.
 *   S5  Memory that `mq_receive` writes into is resident before the call: `segment_map()`
 *       faults it in, and locks it if the limit on locked memory allows. A process killed
 *       inside `mq_receive` while the page is not there loses the message.
 */
#ifndef MIDAIR_SEGMENT_H
#define MIDAIR_SEGMENT_H

#include "base/api.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SEGMENT_MAGIC 0x3152494144494dULL /* "MIDAIR1" */
#define SEGMENT_RELEASE_MAX 24u

API enum segment_kind {
    SEGMENT_CONNTABLE = 1, /* who is connected: dispatcher and connmgrs */
    SEGMENT_ARENA = 2,     /* bodies and ledger of one connmgr: all connmgrs */
    SEGMENT_JOURNAL = 3,   /* primary state of one connmgr: that connmgr alone */
    SEGMENT_ROUTING = 4,   /* primary state of the router: the router alone */
    SEGMENT_STATS = 5,     /* counters of one component, for monitors */
    SEGMENT_TRACE = 6,     /* trace records of one connmgr: that connmgr; read-only: the tracer */
    SEGMENT_TRACE_CONTROL = 7, /* what is traced: the tracer; read-only: connmgrs */
    SEGMENT_PORT = 8,      /* primary state of a port without clients: that port alone */
};

struct segment_header {
    _Atomic uint64_t magic;  /* creator, last */
    uint32_t kind;           /* creator, once: enum segment_kind */
    uint32_t layout;         /* creator, once: layout version of that kind */
    uint64_t fingerprint;    /* creator, once: sizes of the structs inside */
    uint64_t bytes;          /* creator, once: whole segment */
    char release[SEGMENT_RELEASE_MAX]; /* creator, once: its version as text, NUL-terminated */
    uint32_t migrated_from;  /* creator, once: the layout it was converted from; 0: made anew */
    uint32_t reserved;
};
_Static_assert(sizeof(struct segment_header) == 64, "one cache line");
_Static_assert(offsetof(struct segment_header, release) == 32, "the same in every layout of every kind");

/* A number that differs if any of the sizes (of structs, of what they are dimensioned by) does. */
uint64_t segment_fingerprint(const uint64_t *sizes, uint32_t count);
#define SEGMENT_FINGERPRINT(...) \
    segment_fingerprint((const uint64_t[]){__VA_ARGS__}, sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t))
static inline uint64_t page_up(uint64_t n) { return (n + 4095) & ~4095ULL; }

/* Writes the header of a fresh, zeroed segment. */
API void segment_format(void *seg, uint32_t kind, uint32_t layout, uint64_t fingerprint, uint64_t bytes);

/* 0: usable. -ENODATA: never finished. -EPROTO: not ours, or another kind, layout,
 * fingerprint or size: the caller says so and stops, it never guesses. */
API int segment_check(const void *seg, uint32_t kind, uint32_t layout, uint64_t fingerprint, uint64_t bytes);

/* Maps fd shared. The first `hot` bytes are faulted in now and locked if the limit on locked
 * memory allows (inboxes must be resident, see batch.h). NULL with errno set on failure. */
API void *segment_map(int fd, uint64_t bytes, uint64_t hot);
/* The same for who only looks: read-only, nothing faulted in. */
API void *segment_view(int fd, uint64_t bytes);
API void segment_unmap(void *seg, uint64_t bytes);

#endif
