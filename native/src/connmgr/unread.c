/* unread: why a connection is not read (enum unread of conn.h), and the only place that watches sockets.
 *
 * A connection whose set of causes is empty is in the input epoll. One whose set is not leaves the epoll
 * when its socket turns out to be readable, not before (unread_seen): most causes are gone sooner.
 *
 * Three causes have a list here. UNREAD_RATE: the connection sent more than max_messages_s or max_bytes_s
 * allow, and its allowance has to grow back. UNREAD_CONSUMER: it publishes to a connection whose policy is
 * backpressure, and which has too much waiting (slow.c): until that one's mark in the connection table is
 * gone, or it is. UNREAD_PORT: it publishes to clients of a port that takes no orders, until the router says
 * that it does again. Those that wait for room have lists of their own (stalled.c).
 *
 * Private memory of the connmgr. After a crash nobody is held and every allowance is full: a
 * connection is read once, and then held again if there is still reason to. So nobody is held for
 * longer than the reason is there, even if a process dies.
 *
 * The allowance is kept as the time until which it is used up: it grows with what is received, and
 * the clock catches up with it. A connection may be BURST_NS ahead.
 */
#include "connmgr/connmgr.h"

#define BURST_NS 1000000000ULL /* a second's worth at once */
#define LOOK_NS 1000000ULL     /* between two looks at all that are held */

_Static_assert(UNREAD_PORT <= UINT16_MAX, "conn.unread has 16 bits");
void unread_set(struct conn *c, uint32_t causes) { c->unread |= (uint16_t)causes; }

void unread_clear(struct connmgr *cm, struct conn *c, uint32_t causes)
{
    c->unread &= (uint16_t)~causes;
    if (c->unread || c->watched || c->fd < 0)
        return;
    c->watched = 1;
    (void)connmgr_epoll(cm->epoll_in, c->fd, EPOLLIN, c->slot);
}

void unread_seen(struct connmgr *cm, struct conn *c)
{
    if (!c->watched)
        return;
    c->watched = 0;
    (void)epoll_ctl(cm->epoll_in, EPOLL_CTL_DEL, c->fd, NULL);
}

/* ---- those that are held ---- */

static void hold(struct connmgr *cm, struct conn *c, uint32_t cause)
{
    if (!(c->unread & UNREAD_HELD)) {
        c->prev_held = CONNMGR_NONE;
        c->next_held = cm->held_first;
        if (cm->held_first != CONNMGR_NONE)
            cm->conns[cm->held_first].prev_held = c->slot;
        cm->held_first = c->slot;
    }
    unread_set(c, cause);
}

static void leave_list(struct connmgr *cm, struct conn *c)
{
    if (c->prev_held == CONNMGR_NONE)
        cm->held_first = c->next_held;
    else
        cm->conns[c->prev_held].next_held = c->next_held;
    if (c->next_held != CONNMGR_NONE)
        cm->conns[c->next_held].prev_held = c->prev_held;
}

void unread_forget(struct connmgr *cm, struct conn *c)
{
    unread_set(c, UNREAD_PHASE); /* first: it is not to be watched again */
    if (c->unread & UNREAD_ROOM)
        stalled_remove(cm, c);
    if (c->unread & UNREAD_HELD)
        leave_list(cm, c);
    c->unread = UNREAD_PHASE;
    c->ports = 0;
}

static uint64_t used_up(uint64_t until, uint64_t now, uint64_t count, uint64_t each_second)
{
    if (!each_second)
        return 0;
    return (until > now ? until : now) + (uint64_t)((double)count * 1e9 / (double)each_second);
}

static int over_rate(const struct connmgr *cm, const struct conn *c)
{
    return c->paid_messages_ns > cm->now_ns + BURST_NS || c->paid_bytes_ns > cm->now_ns + BURST_NS;
}

/* Counts what was received against the rates of the connection. */
void unread_charge(struct connmgr *cm, struct conn *c, uint64_t messages, uint64_t bytes)
{
    c->paid_messages_ns = used_up(c->paid_messages_ns, cm->now_ns, messages, cm->conf.max_messages_s);
    c->paid_bytes_ns = used_up(c->paid_bytes_ns, cm->now_ns, bytes, cm->conf.max_bytes_s);
    if (!over_rate(cm, c) || !conn_is_heard(c) || c->unread & UNREAD_DECISION)
        return;
    if (cm->conf.rate_closes) {
        conn_end(cm, c, CLOSE_RATE);
        return;
    }
    cm->stats.throttled++;
    hold(cm, c, UNREAD_RATE);
}

static int is_crowded(const struct connmgr *cm, uint32_t slot, uint64_t uid)
{
    const struct conntable_slot *t = &cm->table->slots[slot];

    return slot < cm->table->capacity && atomic_load_explicit(&t->crowded, memory_order_acquire) == uid &&
           t->uid == uid && atomic_load_explicit(&t->state, memory_order_acquire) == CONN_ACTIVE;
}

/* Holds a publisher. One consumer at a time: if there are more, it is told again by the next. */
void unread_for_consumer(struct connmgr *cm, struct conn *c, uint32_t consumer, uint64_t uid)
{
    if (!conn_is_heard(c) || c->unread & UNREAD_CONSUMER || !is_crowded(cm, consumer, uid))
        return;
    c->consumer = consumer;
    c->consumer_uid = uid;
    cm->stats.held++;
    hold(cm, c, UNREAD_CONSUMER);
}

void unread_for_ports(struct connmgr *cm, struct conn *c, uint32_t ports)
{
    if (!c->served)
        return;
    c->ports |= ports;
    if (c->unread & UNREAD_PORT)
        return;
    cm->stats.held++;
    hold(cm, c, UNREAD_PORT);
}

void unread_go_on(struct connmgr *cm, uint32_t ports)
{
    for (uint32_t slot = cm->held_first; slot != CONNMGR_NONE; slot = cm->conns[slot].next_held)
        cm->conns[slot].ports &= ~ports;
    cm->held_looked_ns = 0;
}

/* Lets go of those that have waited long enough. */
void unread_retry(struct connmgr *cm)
{
    if (cm->now_ns - cm->held_looked_ns < LOOK_NS)
        return;
    cm->held_looked_ns = cm->now_ns;
    for (uint32_t slot = cm->held_first; slot != CONNMGR_NONE;) {
        struct conn *c = &cm->conns[slot];
        uint32_t over = 0;

        slot = c->next_held;
        if (c->unread & UNREAD_RATE && !over_rate(cm, c))
            over |= UNREAD_RATE;
        if (c->unread & UNREAD_CONSUMER && !is_crowded(cm, c->consumer, c->consumer_uid))
            over |= UNREAD_CONSUMER;
        if (c->unread & UNREAD_PORT && !c->ports)
            over |= UNREAD_PORT;
        if (!over)
            continue;
        if (!(c->unread & UNREAD_HELD & ~over))
            leave_list(cm, c);
        unread_clear(cm, c, over);
        input_wake(cm, c);
    }
}
