/* orders: what the router decided is carried out, as far as clients are concerned.
 *
 * A batch is one step (P1): its deliveries are appended to the output of their connections, and committed
 * together with its number by port_process(), which then lets go of its messages. Orders that free slots
 * come after that (apply_late), and may be carried out again after a crash.
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

/* The router says it again while there is reason to, and when there is none any more. */
static void wait_for_router(struct connmgr *cm, const struct order_conn *o, int on)
{
    struct conn *c = &cm->conns[o->conn];

    if (c->uid != o->uid || !c->served)
        return;
    if (on) {
        unread_set(c, UNREAD_ROUTER);
    } else if (c->unread & UNREAD_ROUTER) {
        unread_clear(cm, c, UNREAD_ROUTER);
        input_wake(cm, c);
    }
}

/* The same about ports that take no orders. */
static void wait_for_ports(struct connmgr *cm, const struct order_wait *o)
{
    if (o->conn < cm->journal->conns_high)
        unread_for_ports(cm, &cm->conns[o->conn], (uint32_t)o->ports);
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
    if (o->settle)
        c->settled = o->settle;
    else
        reply_say(cm, c, REPLY_PONG);
    if (!(c->unread & UNREAD_ANSWER) || (!o->settle && !(c->options & CONN_VERBOSE)))
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

/* The router has no room for it. With the step of the batch: an answer behind it must not come first. */
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

/* The recipients so far have the message: are they all? What a list that goes on ends with is not all there was
 * (F2). */
static inline void delivered(struct connmgr *cm, const struct order *o)
{
    struct port *p = &cm->port;
    uint64_t handle = order_handle(o), open = p->open_handle[handle_source(handle)];

    if (__builtin_expect(open != 0, 0) && handle_source(handle) == p->index && (open != handle || !(o->type & ORDER_MORE)))
        flow_never(&cm->conns[port_entry(p, open)->conn]);
    port_delivered(p, o);
}

/* Those for the same recipients go together. Returns where the next order is, and where the last of them was. */
static uint32_t apply_deliveries(struct connmgr *cm, const struct batch *b, uint32_t at, uint32_t *ret_last)
{
    uint32_t next = deliver_orders(cm, b, at, (uint32_t)b->seq), last = at;

    while (at < next) {
        const struct order *o = batch_order(b, at);

        last = at;
        at += o->type == ORDER_DELIVER ? order_deliver_bytes(order_recipients(o)) : order_bytes(o);
        if (o->type == ORDER_DELIVER && !cm->port.open_handle[handle_source(order_handle(o))])
            port_note_some(&cm->port, o, 1); /* as delivered() does if no list goes on */
        else
            delivered(cm, o);
    }
    *ret_last = last;
    return next;
}

static void apply(struct connmgr *cm, const struct order *o, uint32_t stamp)
{
    switch (o->type & ~ORDER_MORE) {
    case ORDER_NO_RESPONDERS:
        deliver_no_responders(cm, (const struct order_no_responders *)o);
        port_note(&cm->port, o);
        return;
    case ORDER_DELETE:
        port_note(&cm->port, o);
        return;
    case ORDER_MODE:
        modes_deliver(cm, (const struct order_mode *)o, stamp);
        delivered(cm, o);
        return;
    case ORDER_TOPIC:
        modes_topic(cm, (const struct order_topic *)o, stamp);
        delivered(cm, o);
        return;
    case ORDER_TEXT:
        modes_text(cm, (const struct order_text *)o, stamp);
        return;
    case ORDER_STATUS:
        modes_status(cm, (const struct order_text *)o, stamp);
        return;
    case ORDER_NAME_TAKEN:
        names_taken(cm, (const struct order_conn *)o);
        return;
    case ORDER_NAME_GIVEN:
        names_given(cm, (const struct order_conn *)o);
        return;
    case ORDER_NAME_ASKED:
        names_asked(cm, (const struct order_name *)o);
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
    case ORDER_WAIT:
    case ORDER_GO_ON:
        wait_for_router(cm, (const struct order_conn *)o, o->type == ORDER_WAIT);
        return;
    case ORDER_HOLD:
        hold_publisher(cm, (const struct order_hold *)o);
        return;
    case ORDER_STILL:
        wait_for_ports(cm, (const struct order_wait *)o);
        return;
    case ORDER_STILL_OVER:
        unread_go_on(cm, (uint32_t)((const struct order_wait *)o)->ports);
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

/* Whether apply_late() does something about it. */
static int is_late(const struct order *o)
{
    return o->type == ORDER_CLOSED || o->type == ORDER_UNSUBSCRIBED;
}

static int apply_batch(void *owner, const struct batch *b)
{
    struct connmgr *cm = owner;

    cm->late = 0;
    cm->last_delivery = b->bytes;
    trace_batch(cm, b);
    cm->in_step = 1;
    for (uint32_t at = BATCH_HEAD; at < b->bytes;) {
        const struct order *o = batch_order(b, at);
        uint32_t next = at + order_bytes(o);

        if (next > b->bytes)
            return -EBADMSG;
        if ((o->type & ~ORDER_MORE) == ORDER_DELIVER || o->type == ORDER_RUN) {
            at = apply_deliveries(cm, b, at, &cm->last_delivery);
            continue;
        }
        at = next;
        if (is_late(o))
            cm->late = 1;
        apply(cm, o, (uint32_t)b->seq);
    }
    conn_tell_ending(cm);
    output_put(cm);
    return 0;
}

static void batch_committed(void *owner, const struct batch *b)
{
    struct connmgr *cm = owner;

    cm->in_step = 0;
    flow_learn(cm, b, cm->last_delivery);
}

/* What was applied by a predecessor may have been of any kind. */
static void finish_batch(void *owner, const struct batch *b, int again)
{
    struct connmgr *cm = owner;
    int late = again || cm->late;

    if (late)
        for (uint32_t at = BATCH_HEAD; at < b->bytes; at += order_bytes(batch_order(b, at)))
            apply_late(cm, batch_order(b, at));
    conn_settle_ending(cm);
    if (late)
        CRASH(ORDERS_LATE);
}

int orders_process(struct connmgr *cm)
{
    static const struct port_owner owner = {.apply = apply_batch, .committed = batch_committed, .finish = finish_batch};
    int err = port_process(&cm->port, &owner, cm);

    cm->stats.order_batches += err == 0;
    return err;
}
