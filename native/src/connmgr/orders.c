/* orders: a batch of what the router decided is carried out, and messages are let go.
 *
 * A batch is one step: its deliveries are appended to the output of their connections, then
 * committed together with `applied` = its sequence number (J5); after that the messages it
 * finished are relinquished, then `done` is stored. A crash before the commit leaves nothing
 * of it, one after it repeats only the relinquishing, which compares generations.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"

#include <errno.h>

/* A consumer on some connmgr is crowded, and this connection publishes to it. */
static void hold_publisher(struct connmgr *cm, const struct order_hold *o)
{
    if (o->publisher < cm->journal->conns_high)
        unread_for_consumer(cm, &cm->conns[o->publisher], o->consumer, o->consumer_uid);
}

static void session_opened(struct connmgr *cm, const struct order_opened *o)
{
    struct conn *c = &cm->conns[o->conn];

    if (c->uid != o->uid || c->phase != PHASE_OPENING)
        return;
    reply_greet(cm, c);
    conn_set_phase(cm, c, PHASE_GREETED);
}

static void session_passed(struct connmgr *cm, const struct order_conn *o)
{
    struct conn *c = &cm->conns[o->conn];

    if (c->uid != o->uid || !c->served || c->reason)
        return;
    reply_say(cm, c, REPLY_PONG);
    if (!(c->unread & UNREAD_ANSWER))
        return;
    unread_clear(cm, c, UNREAD_ANSWER);
    conn_put_phase(cm, c);
    input_wake(cm, c);
}

static void sub_gone(struct connmgr *cm, const struct order_sub *o)
{
    uint32_t sub = (uint32_t)o->sub;

    if (sub >= cm->journal->subs_high || sub_handle(cm, sub) != o->sub)
        return;
    uint64_t word = cm->subs[sub].word;

    /* Asked for, or a queue member that has had its maximum. */
    if (word & SUB_DYING || (word & SUB_ACTIVE && !(word & SUB_PLAIN)))
        subtable_free(cm, sub);
}

/* The router has no room for it. With the step of the batch: a PONG behind it must not come first. */
static void sub_refused(struct connmgr *cm, const struct order_sub *o)
{
    uint32_t sub = (uint32_t)o->sub;

    if (sub >= cm->journal->subs_high || sub_handle(cm, sub) != o->sub ||
        !(cm->subs[sub].word & SUB_ACTIVE))
        return;
    struct conn *c = &cm->conns[o->conn];

    if (c->served)
        conn_end(cm, c, CLOSE_SUBSCRIPTIONS);
}

static inline void note(struct connmgr *cm, const struct order *o)
{
    struct let_go *l = &cm->let_go[cm->let_go_count];
    uint64_t limit = ledger_limit(o->limit), handle = order_handle(o);

    if (cm->let_go_count && l[-1].handle + l[-1].count == handle && l[-1].limit == limit) {
        l[-1].count += order_messages(o);
        return;
    }
    cm->let_go_count++;
    l->handle = handle;
    l->limit = limit;
    l->count = order_messages(o);
}

/* Only one message of a source can have a list that goes on: the router orders one source's
 * messages one after the other. */
static inline void set_open(struct connmgr *cm, uint32_t source, uint64_t handle)
{
    if (cm->open_handle[source] == handle)
        return;
    if (cm->open_handle[source] && source == cm->conf.index) /* what it closes is not all there was (F2) */
        flow_never(&cm->conns[arena_entries(cm->pool.arena)[handle_entry(cm->open_handle[source])].conn]);
    cm->open_handle[source] = handle;
    redo_put(&cm->redo, &cm->journal->open_handle[source], handle);
}

/* The recipients so far have the message: are they all? */
static inline void delivered(struct connmgr *cm, const struct order *o)
{
    set_open(cm, handle_source(order_handle(o)), o->type & ORDER_MORE ? order_handle(o) : 0);
    if (!(o->type & ORDER_MORE))
        note(cm, o);
}

/* Those for the same recipients go together. Returns where the next order is, and where the last of them was. */
static uint32_t apply_deliveries(struct connmgr *cm, const struct batch *b, uint32_t at, uint32_t *ret_last)
{
    uint32_t next = deliver_orders(cm, b, at, (uint32_t)b->seq);

    while (at < next) {
        const struct order *o = batch_order(b, at);

        *ret_last = at;
        delivered(cm, o);
        at += o->type == ORDER_DELIVER ? order_deliver_bytes(order_recipients(o)) : order_bytes(o);
    }
    return next;
}

static void apply(struct connmgr *cm, const struct order *o, uint32_t stamp)
{
    switch (o->type & ~ORDER_MORE) {
    case ORDER_NO_RESPONDERS:
        deliver_no_responders(cm, (const struct order_no_responders *)o, stamp);
        note(cm, o);
        return;
    case ORDER_DELETE:
        note(cm, o);
        return;
    case ORDER_MODE:
        modes_deliver(cm, (const struct order_mode *)o, stamp);
        delivered(cm, o);
        return;
    case ORDER_TEXT:
        modes_text(cm, (const struct order_text *)o, stamp);
        return;
    case ORDER_STATUS:
        modes_status(cm, (const struct order_text *)o, stamp);
        return;
    case ORDER_NAME_TAKEN:
        modes_name_taken(cm, (const struct order_conn *)o);
        return;
    case ORDER_REFUSED:
        sub_refused(cm, (const struct order_sub *)o);
        return;
    case ORDER_OPENED:
        session_opened(cm, (const struct order_opened *)o);
        return;
    case ORDER_PASSED:
        session_passed(cm, (const struct order_conn *)o);
        return;
    case ORDER_HOLD:
        hold_publisher(cm, (const struct order_hold *)o);
        return;
    case ORDER_TRACE:
        trace_mark(cm, (const struct order_trace *)o);
        return;
    default:
        return; /* those that free slots come after the commit */
    }
}

static void apply_late(struct connmgr *cm, const struct order *o)
{
    const struct order_conn *about = (const struct order_conn *)o;

    switch (o->type) {
    case ORDER_CLOSED:
        conn_ended(cm, about->conn, about->uid);
        return;
    case ORDER_UNSUBSCRIBED:
        sub_gone(cm, (const struct order_sub *)o);
        return;
    default:
        return;
    }
}

/* Lets go of the messages of the committed batch; those with bodies still being written are
 * let go when the last of them is (output.c). */
static void relinquish_all(struct connmgr *cm, int redo)
{
    for (uint32_t i = 0; i < cm->let_go_count; i++) {
        const struct let_go *l = &cm->let_go[i];
        uint32_t source = handle_source(l->handle);
        const uint32_t *local = &cm->local[source][handle_entry(l->handle)];
        struct arena_pool *pool = source == cm->conf.index ? &cm->pool : NULL;

        uint64_t handle = l->handle, end = handle + l->count;

        do {
            uint64_t add = l->limit | (*local++ ? 0 : cm->my_bit);

            if (add)
                (void)arena_relinquish(cm->arenas[source], pool, handle, add, redo);
        } while (++handle != end);
        if (i == cm->let_go_count / 2)
            CRASH(ORDERS_RELINQUISHING);
    }
    cm->let_go_count = 0;
}

/* Whether apply_late() does something about it. */
static int is_late(const struct order *o)
{
    return o->type == ORDER_CLOSED || o->type == ORDER_UNSUBSCRIBED;
}

int orders_process(struct connmgr *cm, const struct batch *b)
{
    struct journal *j = cm->journal;
    int redo = j->applied == b->seq; /* committed before a crash */
    int late = 0;
    uint32_t last = b->bytes;

    trace_batch(cm, b);
    cm->in_step = !redo;
    for (uint32_t at = BATCH_HEAD; at < b->bytes;) {
        const struct order *o = batch_order(b, at);
        uint32_t next = at + order_bytes(o);

        if (next > b->bytes)
            return -EBADMSG;
        if (!redo && ((o->type & ~ORDER_MORE) == ORDER_DELIVER || o->type == ORDER_RUN)) {
            at = apply_deliveries(cm, b, at, &last);
            continue;
        }
        at = next;
        if (is_late(o))
            late = 1;
        if (redo) {
            if (order_has_message(o) && !(o->type & ORDER_MORE))
                note(cm, o);
            continue;
        }
        apply(cm, o, (uint32_t)b->seq);
    }
    if (!redo) {
        CRASH(ORDERS_APPLIED);
        conn_tell_ending(cm);
        output_put(cm);
        redo_put(&cm->redo, &j->applied, b->seq);
        redo_commit(&cm->redo);
        cm->in_step = 0;
        CRASH(ORDERS_COMMITTED);
        flow_learn(cm, b, last);
    }
    relinquish_all(cm, redo);
    CRASH(ORDERS_RELINQUISHED);
    if (late)
        for (uint32_t at = BATCH_HEAD; at < b->bytes; at += order_bytes(batch_order(b, at)))
            apply_late(cm, batch_order(b, at));
    conn_settle_ending(cm);
    if (late)
        CRASH(ORDERS_LATE);
    j->done = b->seq; /* "orders.done" */
    CRASH(ORDERS_DONE);
    cm->stats.order_batches++;
    return 0;
}
