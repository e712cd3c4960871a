/* conntable: every client connection of the instance, one 128-byte slot each.
 *
 * Created by:   dispatcher or connmgr, the first to start. Mapped by dispatcher and connmgrs.
 * Written by:   per field, below. `state` is one atomic word that walks a ring:
 *                 FREE -> ASSIGNED   dispatcher (after all other fields are written)
 *                 ASSIGNED -> ACTIVE connmgr    (the socket has arrived and is served)
 *                 ASSIGNED|ACTIVE -> CLOSED     connmgr (router has confirmed the end)
 *                 ASSIGNED -> FREE   dispatcher (the hand-off was never sent)
 *                 CLOSED -> FREE     dispatcher (reap)
 * Invariants:
 *   T1  A uid is given once in the life of an instance, and uids only grow: the counter
 *       moves before the uid is used.
 *   T2  The fields of a slot are written while it is FREE, and published by the one store
 *       that makes it ASSIGNED. Until it is FREE again they do not change.
 *   T3  The state of a slot walks a ring, and each step has one writer. Dispatcher: FREE to
 *       ASSIGNED, CLOSED to FREE, and ASSIGNED back to FREE for a hand-off that was never
 *       sent, by compare and swap. Connmgr: ASSIGNED to ACTIVE, and ASSIGNED or ACTIVE to
 *       CLOSED.
 *   T4  A slot ASSIGNED to a connmgr whose hand-off was lost is found by that connmgr in
 *       the table when it starts, or sent again by a dispatcher when that starts. The
 *       socket is in the keeper.
 */
#ifndef MIDAIR_CONNTABLE_H
#define MIDAIR_CONNTABLE_H

#include "base/api.h"
#include "base/limits.h"
#include "shm/segment.h"

#define CONNTABLE_LAYOUT 3

API enum conn_state {
    CONN_FREE = 0,
    CONN_ASSIGNED = 1,
    CONN_ACTIVE = 2,
    CONN_CLOSED = 3,
};

API struct conntable_slot {
    _Atomic uint32_t state;     /* see the ring above */
    uint32_t connmgr;           /* dispatcher: index of the connmgr that serves it */
    uint64_t uid;               /* dispatcher: unique in the life of the instance */
    uint64_t accepted_ns;       /* dispatcher: CLOCK_REALTIME */
    uint16_t listener;          /* dispatcher: which listening socket (order of LISTEN_FDS) */
    uint16_t port;              /* dispatcher: peer's port */
    char ip[46];                /* dispatcher: peer's address as text, NUL-terminated */
    uint8_t pad[6];
    uint64_t cookie;            /* dispatcher: the kernel's number of the socket (SO_COOKIE) */
    _Atomic uint64_t crowded;   /* the connmgr that serves it: its uid while publishers are to wait
                                 * for it (slow.c), else anything else. Read by all connmgrs */
    uint16_t protocol;          /* dispatcher: 0. What is spoken follows from `listener`, and is kept in conn_rec */
    uint16_t transport;         /* dispatcher: enum of transport.h; 0: plain */
    uint32_t kind;              /* dispatcher: what is at the other end; 0: a client */
    uint64_t reserved[3];
};
_Static_assert(sizeof(struct conntable_slot) == 128, "two cache lines");

API struct conntable {
    struct segment_header header;
    uint32_t capacity;              /* creator, once */
    uint32_t pad;
    _Atomic uint64_t next_uid;      /* dispatcher: only grows; bumped before the uid is used */
    _Atomic uint64_t high;          /* dispatcher: only grows, raised before use: slots at or past
                                     * it were never used, and nobody looks at them */
    uint64_t reserved[5];
    struct conntable_slot slots[];  /* capacity of them */
};

API uint64_t conntable_bytes(uint32_t capacity);
API uint64_t conntable_fingerprint(void);
API void conntable_format(struct conntable *t, uint32_t capacity);

/* Derived state of the dispatcher: a stack of free slots, rebuilt at start and when empty. */
API struct conntable_free {
    uint32_t count;
    uint32_t capacity;
    uint32_t slots[];
};
API struct conntable_free *conntable_free_new(uint32_t capacity); /* at start only */
API void conntable_free_delete(struct conntable_free *f);

/* Turns CLOSED slots FREE and rebuilds the stack (also what a restarted dispatcher does
 * first). Also raises next_uid above every uid seen. Returns how many are free. */
API uint32_t conntable_reap(struct conntable *t, struct conntable_free *f);

/* Takes a slot and a uid, fills it, and assigns it to connmgr. Reaps when the stack is empty,
 * and now and then, so that low slots are used again. -ENOSPC: the table is full. */
API int conntable_assign(struct conntable *t, struct conntable_free *f, uint32_t connmgr,
                         uint16_t listener, const char *ip, uint16_t port, uint64_t accepted_ns,
                         uint64_t cookie, uint32_t *ret_slot, uint64_t *ret_uid);
/* The hand-off could not be sent: ASSIGNED -> FREE. */
API void conntable_unassign(struct conntable *t, struct conntable_free *f, uint32_t slot);

/* Slots of one connmgr (or of all: PORTS_MAX) that are not FREE, ascending.
 * Returns how many there are; at most `room` are written. */
API uint32_t conntable_list(const struct conntable *t, uint32_t connmgr, uint32_t room,
                            uint32_t *ret_slots);

/* Connections per connmgr (ASSIGNED or ACTIVE), counted afresh. O(capacity). */
API void conntable_count(const struct conntable *t, uint32_t ret_counts[PORTS_MAX]);

API static inline void conntable_set_state(struct conntable *t, uint32_t slot, uint32_t state)
{
    atomic_store_explicit(&t->slots[slot].state, state, memory_order_release);
}

#endif
