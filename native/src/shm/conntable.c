/* conntable: the table of client connections. Structure, writers, invariants and what a
 * crash leaves are in conntable.h.
 *
 * The dispatcher alone calls everything here that writes; it holds the dispatcher's lease.
 * A slot is published by one release store of its state, after all its other fields, so a
 * reader that has seen ASSIGNED with an acquire load sees the fields of that assignment.
 * Killed before that store, the dispatcher leaves a FREE slot with scribbled fields and a
 * uid that nobody will ever get: both harmless.
 */
#include "shm/conntable.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(offsetof(struct conntable_slot, state) == 0, "conntable.py reads it there");
_Static_assert(offsetof(struct conntable_slot, connmgr) == 4, "layout 3");
_Static_assert(offsetof(struct conntable_slot, uid) == 8, "layout 3");
_Static_assert(offsetof(struct conntable_slot, accepted_ns) == 16, "layout 3");
_Static_assert(offsetof(struct conntable_slot, listener) == 24, "layout 3");
_Static_assert(offsetof(struct conntable_slot, port) == 26, "layout 3");
_Static_assert(offsetof(struct conntable_slot, ip) == 28, "layout 3");
_Static_assert(offsetof(struct conntable_slot, cookie) == 80, "layout 3");
_Static_assert(offsetof(struct conntable_slot, crowded) == 88, "layout 3");
_Static_assert(offsetof(struct conntable_slot, protocol) == 96, "layout 3");
_Static_assert(offsetof(struct conntable, capacity) == 64, "layout 3");
_Static_assert(offsetof(struct conntable, next_uid) == 72, "layout 3");
_Static_assert(offsetof(struct conntable, slots) == 128, "layout 3");

#define REAP_EVERY 1024u /* assignments */

uint64_t conntable_bytes(uint32_t capacity)
{
    return sizeof(struct conntable) + (uint64_t)capacity * sizeof(struct conntable_slot);
}

uint64_t conntable_fingerprint(void)
{
    return SEGMENT_FINGERPRINT(sizeof(struct conntable), sizeof(struct conntable_slot), CONN_CLOSED);
}

void conntable_format(struct conntable *t, uint32_t capacity)
{
    t->capacity = capacity;
    uint64_t none = 0; /* nobody's uid; two processes may format at once, one may be ahead */
    atomic_compare_exchange_strong(&t->next_uid, &none, 1);
    segment_format(t, SEGMENT_CONNTABLE, CONNTABLE_LAYOUT, conntable_fingerprint(),
                   conntable_bytes(capacity));
}

struct conntable_free *conntable_free_new(uint32_t capacity)
{
    struct conntable_free *f =
        malloc(sizeof(struct conntable_free) + (size_t)capacity * sizeof(uint32_t));

    if (!f)
        return NULL;
    f->count = 0;
    f->capacity = capacity;
    return f;
}

void conntable_free_delete(struct conntable_free *f)
{
    free(f);
}

uint32_t conntable_reap(struct conntable *t, struct conntable_free *f)
{
    uint64_t next = atomic_load_explicit(&t->next_uid, memory_order_relaxed);

    /* From the top, so that the lowest slots lie on top of the stack and are used first:
     * what is in use then stays together at the beginning of the table. */
    f->count = 0;
    uint32_t high = (uint32_t)atomic_load_explicit(&t->high, memory_order_relaxed);
    for (uint32_t i = t->capacity; i-- > high && f->count < f->capacity;)
        f->slots[f->count++] = i;
    for (uint32_t i = high; i-- > 0;) {
        struct conntable_slot *s = &t->slots[i];
        uint32_t state = atomic_load_explicit(&s->state, memory_order_acquire);

        if (state != CONN_FREE && s->uid >= next)
            next = s->uid + 1;
        if (state == CONN_CLOSED) {
            conntable_set_state(t, i, CONN_FREE);
            state = CONN_FREE;
        }
        if (state == CONN_FREE && f->count < f->capacity)
            f->slots[f->count++] = i;
    }
    atomic_store_explicit(&t->next_uid, next, memory_order_relaxed);
    return f->count;
}

int conntable_assign(struct conntable *t, struct conntable_free *f, uint32_t connmgr,
                     uint16_t listener, const char *ip, uint16_t port, uint64_t accepted_ns,
                     uint64_t cookie, uint32_t *ret_slot, uint64_t *ret_uid)
{
    uint32_t slot;
    uint64_t uid;
    size_t length = strnlen(ip, sizeof t->slots[0].ip);

    if (connmgr >= PORTS_MAX || length == sizeof t->slots[0].ip)
        return -EINVAL;
    uid = atomic_load_explicit(&t->next_uid, memory_order_relaxed);
    if ((f->count == 0 || uid % REAP_EVERY == 0) && conntable_reap(t, f) == 0)
        return -ENOSPC;
    slot = f->slots[--f->count];
    if (slot >= atomic_load_explicit(&t->high, memory_order_relaxed))
        atomic_store_explicit(&t->high, slot + 1, memory_order_release);

    /* The counter moves before the uid is used: a crash in between skips a uid, which is
     * allowed; giving one twice is not. */
    uid = atomic_fetch_add_explicit(&t->next_uid, 1, memory_order_relaxed);

    struct conntable_slot *s = &t->slots[slot];
    s->connmgr = connmgr;
    s->uid = uid;
    s->accepted_ns = accepted_ns;
    s->listener = listener;
    s->port = port;
    s->cookie = cookie;
    s->protocol = s->transport = 0;
    s->kind = 0;
    memset(s->ip, 0, sizeof s->ip);
    memcpy(s->ip, ip, length);
    conntable_set_state(t, slot, CONN_ASSIGNED);

    *ret_slot = slot;
    *ret_uid = uid;
    return 0;
}

void conntable_unassign(struct conntable *t, struct conntable_free *f, uint32_t slot)
{
    uint32_t expected = CONN_ASSIGNED;

    /* Compare and swap, not a store: should a connmgr have taken the slot after all, it is
     * the connmgr's to close. */
    if (slot < t->capacity &&
        atomic_compare_exchange_strong_explicit(&t->slots[slot].state, &expected, CONN_FREE,
                                                memory_order_acq_rel, memory_order_acquire) &&
        f->count < f->capacity)
        f->slots[f->count++] = slot;
}

void conntable_count(const struct conntable *t, uint32_t ret_counts[PORTS_MAX])
{
    memset(ret_counts, 0, PORTS_MAX * sizeof ret_counts[0]);
    uint32_t high = (uint32_t)atomic_load_explicit(&t->high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++) {
        const struct conntable_slot *s = &t->slots[i];
        uint32_t state = atomic_load_explicit(&s->state, memory_order_acquire);

        if ((state == CONN_ASSIGNED || state == CONN_ACTIVE) &&
            s->connmgr < PORTS_MAX)
            ret_counts[s->connmgr]++;
    }
}

uint32_t conntable_list(const struct conntable *t, uint32_t connmgr, uint32_t room,
                        uint32_t *ret_slots)
{
    uint32_t high = (uint32_t)atomic_load_explicit(&t->high, memory_order_acquire);
    uint32_t count = 0;

    for (uint32_t i = 0; i < high; i++) {
        const struct conntable_slot *s = &t->slots[i];

        if (atomic_load_explicit(&s->state, memory_order_acquire) == CONN_FREE ||
            (connmgr < PORTS_MAX && s->connmgr != connmgr))
            continue;
        if (count < room)
            ret_slots[count] = i;
        count++;
    }
    return count;
}
