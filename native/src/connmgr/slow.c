/* slow: consumers that do not read as fast as others publish.
 *
 * More than max_pending bytes wait for such a connection. What happens then is the policy of the
 * listener it came through (enum slow_policy). One that takes nothing for write_deadline_ns is told
 * and closed whatever its policy is: what waits for it may be what the arena is full of.
 *
 * Backpressure: the consumer is marked in the connection table (`crowded`, written by its connmgr
 * alone), and the publisher of the message at hand is told: on this connmgr directly, on another
 * one by way of the router (REF_HOLD, ORDER_HOLD). That word is a hint. It may be lost, or come too
 * late; the next message to the consumer says it again. What counts is the mark: a publisher waits
 * while the mark is there (unread.c).
 *
 * After a crash the marks are set right from what waits in the journal (slow_recover). Nobody knows
 * who was told; it is said again. `dropped` is in the journal, so no loss goes untold.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"
#include "base/hash.h"

#define SAY_AGAIN_NS 5000000ULL

static _Atomic uint64_t *mark_of(struct connmgr *cm, const struct conn *c)
{
    return &cm->table->slots[c->slot].crowded;
}

static uint64_t pending(const struct conn *c) { return c->end - c->sent; }

static void set_crowded(struct connmgr *cm, struct conn *c, uint8_t on)
{
    c->crowded = on;
    atomic_store_explicit(mark_of(cm, c), on ? c->uid : 0, memory_order_release); /* "slow.crowded" */
    CRASH(SLOW_CROWDED);
}

/* Tells the publisher of this message that it has to wait for `c`. */
static void say_hold(struct connmgr *cm, const struct conn *c, uint64_t handle)
{
    uint32_t source = handle_source(handle);
    uint32_t publisher = arena_entries(cm->port.arenas[source])[handle_entry(handle)].conn;
    uint64_t name = (uint64_t)source << 32 | publisher;
    struct hold_said *said =
        &cm->holds_said[((c->uid ^ name) * HASH_SPREAD >> 32) % CONNMGR_HOLDS_SAID];

    if (said->consumer_uid == c->uid && said->publisher == name && cm->now_ns - said->when_ns < SAY_AGAIN_NS)
        return;
    if (source == cm->conf.index) {
        unread_for_consumer(cm, &cm->conns[publisher], c->slot, c->uid);
    } else {
        if (cm->holds_due_count == CONNMGR_HOLDS_DUE)
            return;
        cm->holds_due[cm->holds_due_count++] =
            (struct hold_due){.consumer_uid = c->uid, .consumer = c->slot, .publisher = publisher, .connmgr = source};
    }
    *said = (struct hold_said){.consumer_uid = c->uid, .publisher = name, .when_ns = cm->now_ns};
}

int slow_may_deliver(struct connmgr *cm, struct conn *c, uint64_t handle)
{
    switch (c->slow) {
    case SLOW_BACKPRESSURE:
        if (!c->crowded)
            set_crowded(cm, c, 1);
        if (handle) /* no client published what the router wrote */
            say_hold(cm, c, handle);
        return 1;
    case SLOW_DROP:
        c->dropped++;
        cm->stats.dropped++;
        output_mark(cm, c); /* the count is committed with the step */
        return 0;
    default:
        conn_end(cm, c, CLOSE_SLOW_BYTES);
        return 0;
    }
}

/* Half of it: so that publishers do not stop and go with every write. */
void slow_written(struct connmgr *cm, struct conn *c)
{
    if (atomic_load_explicit(mark_of(cm, c), memory_order_relaxed) != c->uid)
        return;
    if (!c->served || pending(c) <= cm->conf.max_pending / 2)
        set_crowded(cm, c, 0);
}

void slow_recover(struct connmgr *cm, struct conn *c)
{
    if (c->slow == SLOW_BACKPRESSURE && c->served && pending(c) > cm->conf.max_pending / 2)
        set_crowded(cm, c, 1);
    else
        slow_written(cm, c);
}
