/* flow: what the router decided is repeated while nothing that it depends on has changed.
 *
 * Who publishes to one subject would have the router find the same recipients for each message. At
 * low load the way there and back is most of a message's time, at high load a third of its work. So
 * its connmgr remembers the last decision, and repeats it without asking: the frames go into the
 * output of the recipients in the very step that takes them from the publisher. Such a message has no
 * reference. If bodies are copied they are not even kept: their entries are not committed. Larger ones
 * stay in the arena, with a limit of 1 from the beginning, until the last recipient has them; a step has
 * the ones or the others. One that lies along a chain goes by way of the router: then its connmgr reads on
 * before it writes, which is faster.
 *
 * The structure: one struct flow for each connection that published, with what was decided for its
 *               last messages. Private to the process: a successor asks the router again.
 * After a crash: the step was committed, or was not. Counts of subscriptions: with the stamp of the
 *               batch of orders that comes next; the step commits `base` with them, so neither a
 *               repeated batch nor one that never came takes anything back.
 * Invariants, of private memory: what is in a segment is as if the router had been asked.
 *   F1  A decision holds while the router has not been told of a subscription since the message it was
 *       made for (`subscribed`). All of them pass here, as there is one port; with several there are
 *       no flows. The slot of one that ended is not given to another without such news.
 *   F2  Only what every plain message would get is remembered: all recipients, none of a queue group,
 *       nothing that was decided for a message of a mode or under other options of its sender.
 *   F3  Nothing is repeated while an earlier message of the same connection is with the router
 *       (`routing`): messages of a publisher stay in order.
 *   F4  It is repeated if each recipient just takes it. Whatever else may happen (one has unsubscribed or
 *       is gone, one is slow, has a maximum) happens where the router's orders are carried out.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"

#define FLOW_BATCH_BYTES 1024u /* of orders: of a larger batch only the last one is learned from */
#define FLOW_FRAME_MORE 64u    /* bytes that a frame may grow by: its sid, a letter */
#define FLOW_BLOCKS_MAX 1024u  /* of output, for what is repeated at once */
_Static_assert(FLOW_FRAME_MORE > PROTOCOL_SID_MAX + 2, "see above");

struct flow_mark flow_mark(const struct connmgr *cm)
{
    return (struct flow_mark){.seq = cm->port.refs.seq, .bytes = cm->port.refs.bytes, .subscribed = cm->subscribed,
                              .modes = cm->modes};
}

void flow_asked(struct connmgr *cm, struct conn *c, const struct flow_mark *m, uint32_t chunk, uint32_t last)
{
    struct arena *a = cm->port.pool.arena;
    uint32_t entry = chunk * ARENA_CHUNK_MESSAGES + last - 1;

    if (!cm->flows_on)
        return;
    c->routing = 1;
    c->routed_last = handle_make(a->owner, atomic_load_explicit(&arena_words(a)[entry], memory_order_relaxed), entry);
    c->routed_subscribed = cm->subscribed;
    /* A subscription of the same step may be behind the message. One of a mode may get another decision. */
    if (m->subscribed != cm->subscribed || m->modes != cm->modes)
        flow_never(c);
}

/* ---- learning ---- */

static void remember(struct connmgr *cm, struct conn *c, const struct order *o, const struct arena_entry *e)
{
    const uint32_t *subs = order_subs(o);
    uint32_t count = order_recipients(o);

    if (!count || count > FLOW_SUBS_MAX || e->subject_len > FLOW_SUBJECT_MAX)
        return;
    for (uint32_t i = 0; i < count; i++)
        if (!(cm->subs[subs[i]].word & SUB_PLAIN)) /* F2 */
            return;
    struct flow *f = &cm->flows[c->slot];

    c->has_flow = 1;
    f->subscribed = cm->subscribed;
    f->subject_len = e->subject_len;
    memcpy(f->subject, arena_data(cm->port.pool.arena, e->chunk) + e->subject, e->subject_len);
    f->count = (uint16_t)count;
    memcpy(f->subs, subs, count * 4u);
}

void flow_learn(struct connmgr *cm, const struct batch *b, uint32_t last_at)
{
    if (!cm->flows_on)
        return;
    for (uint32_t at = b->bytes > FLOW_BATCH_BYTES ? last_at : BATCH_HEAD; at < b->bytes;) {
        const struct order *o = batch_order(b, at);

        at += order_bytes(o);
        if (!order_has_message(o) || o->type & ORDER_MORE)
            continue;
        uint64_t last = order_handle(o) + order_messages(o) - 1;
        const struct arena_entry *e = &arena_entries(cm->port.pool.arena)[handle_entry(last)];
        struct conn *c = &cm->conns[e->conn];

        if (!c->routing || c->routed_last != last)
            continue;
        c->routing = 0;
        if ((o->type == ORDER_DELIVER || o->type == ORDER_RUN) && c->routed_subscribed == cm->subscribed)
            remember(cm, c, o, e);
    }
}

/* ---- repeating ---- */

/* F4, for so many bytes at most. */
static int all_take_it(const struct connmgr *cm, const struct flow *f, uint64_t bytes)
{
    for (uint32_t i = 0; i < f->count; i++) {
        const struct sub_rec *s = &cm->subs[f->subs[i]];
        const struct conn *c = &cm->conns[(uint32_t)s->word];

        if (!(s->word & SUB_ACTIVE) || s->max || !c->served || c->dropped ||
            c->end - c->sent + bytes * f->count > cm->conf.max_pending) /* it may be there several times */
            return 0;
    }
    return output_has_room(cm);
}

struct place { /* in the references of a step */
    uint64_t seq;
    uint32_t at;
};

/* The reference at the place, which moves behind it; NULL: there are no more. */
static const struct ref *next_ref(const struct connmgr *cm, struct place *p)
{
    const struct batch_out *o = &cm->port.refs;
    const struct batch *b = batch_slot(o->ring, p->seq);

    while (p->seq < o->seq && p->at == b->bytes) {
        b = batch_slot(o->ring, ++p->seq);
        p->at = BATCH_HEAD;
    }
    if (p->seq == o->seq && p->at == o->bytes)
        return NULL;
    const struct ref *r = batch_ref(b, p->at);

    p->at += r->bytes;
    return r;
}

enum flow_bodies { FLOW_NONE = 0, FLOW_COPIED = 1, FLOW_KEPT = 2, FLOW_BOTH = 3 };

/* What the bodies of the step are like; FLOW_NONE: not all messages are of the flow. */
static enum flow_bodies all_of_flow(const struct connmgr *cm, const struct flow *f, struct place p)
{
    int bodies = 0;

    for (const struct ref *head; (head = next_ref(cm, &p));) {
        const struct ref_message *r = (const struct ref_message *)head;

        if (r->type != REF_MESSAGE || r->flags & REF_MODE || r->subject_len != f->subject_len ||
            memcmp(r->text, f->subject, f->subject_len) != 0)
            return FLOW_NONE;
        bodies |= r->size / ref_messages(r) > CONNMGR_COPY_MAX ? FLOW_KEPT : FLOW_COPIED;
    }
    return (enum flow_bodies)bodies;
}

/* The messages from `first` on are to be let go of by us alone. They are not committed: nobody knows them. */
static void set_limits(struct connmgr *cm, uint32_t chunk, uint32_t first)
{
    ledger_word *words = &arena_words(cm->port.pool.arena)[chunk * ARENA_CHUNK_MESSAGES];

    for (uint32_t n = first; n < cm->chunk_messages[chunk]; n++)
        (void)ledger_or_own(&words[n], ledger_limit(1));
}

/* Appends the order that the router would have given. */
static void append_order(struct batch *b, const struct flow *f, const struct ref_message *r)
{
    void *at = (char *)b + b->bytes;
    uint32_t messages = ref_messages(r);

    if (messages > 1) {
        struct order_run *o = at;

        *o = (struct order_run){.type = ORDER_RUN, .limit = 1, .recipients = f->count, .messages = messages, .first = r->handle};
        memcpy(o->subs, f->subs, f->count * 4u);
        b->bytes += order_run_bytes(f->count);
    } else {
        struct order_deliver *o = at;

        *o = (struct order_deliver){.type = ORDER_DELIVER, .limit = 1, .recipients = f->count, .only = f->subs[0],
                                    .handle = r->handle};
        if (f->count > 1)
            memcpy(o->subs, f->subs, f->count * 4u);
        b->bytes += order_deliver_bytes(f->count);
    }
}

static void deliver_all(struct connmgr *cm, struct batch *b)
{
    for (uint32_t at = BATCH_HEAD; at < b->bytes;)
        at = deliver_orders(cm, b, at, (uint32_t)(cm->port.log->applied + 1));
    b->bytes = BATCH_HEAD;
}

static void deliver_flow(struct connmgr *cm, const struct flow *f, struct place p)
{
    struct batch *b = &cm->flow_orders;

    b->bytes = BATCH_HEAD;
    for (const struct ref *r; (r = next_ref(cm, &p));) {
        if (b->bytes + order_run_bytes(f->count) > BATCH_BYTES)
            deliver_all(cm, b);
        append_order(b, f, (const struct ref_message *)r);
    }
    deliver_all(cm, b);
    for (uint32_t i = 0; i < f->count; i++) {
        struct sub_rec *s = &cm->subs[f->subs[i]];

        redo_put(&cm->port.redo, &s->base, s->delivered);
    }
}

int flow_repeat(struct connmgr *cm, struct conn *c, const struct flow_mark *m, uint32_t chunk, uint32_t first)
{
    const struct flow *f = &cm->flows[c->slot];

    if (!c->has_flow || c->routing || c->chained || f->subscribed != cm->subscribed)
        return 0;
    uint32_t messages = cm->chunk_messages[chunk] - first;
    uint64_t bytes = c->in_pos - cm->recs[c->slot].in_pos + messages * FLOW_FRAME_MORE;
    struct place p = {.seq = m->seq, .at = m->bytes};

    enum flow_bodies bodies = all_take_it(cm, f, bytes) ? all_of_flow(cm, f, p) : FLOW_NONE;
    /* For each recipient: a block of copies is half full at least; a body that is kept has one before and after it. */
    uint64_t blocks = bodies == FLOW_KEPT ? 2 * messages : 2 * bytes / JOURNAL_BLOCK_BYTES + 2;

    if ((bodies != FLOW_COPIED && bodies != FLOW_KEPT) || f->count * blocks > FLOW_BLOCKS_MAX)
        return 0;
    if (TRACE_IF(cm->trace.on))
        trace_flow(cm, messages);
    deliver_flow(cm, f, p);
    cm->port.refs.seq = m->seq;
    cm->port.refs.bytes = m->bytes;
    if (bodies == FLOW_COPIED)
        cm->chunk_messages[chunk] = first;
    else
        set_limits(cm, chunk, first);
    cm->stats.repeated += messages;
    CRASH(FLOW_APPLIED);
    return 1;
}
