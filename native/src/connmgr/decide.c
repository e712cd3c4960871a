/* decide: what the router decided is repeated while nothing that it depends on has changed. See decide.h.
 *
 * Who publishes to one subject would have the router find the same recipients for each message. At
 * low load the way there and back is most of a message's time, at high load a third of its work. So
 * its connmgr remembers the last decision (a flow), and repeats it without asking: the frames go into the
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
 *       is gone, one is slow, has a maximum or a long sid) happens where the router's orders are carried out.
 */
#include "connmgr/decide.h"
#include "base/crash.h"

#define FLOW_BATCH_BYTES 1024u /* of orders: of a larger batch only the last one is learned from */
#define FLOW_FRAME_MORE 64u    /* bytes that a frame may grow by: its sid, a letter */
#define FLOW_BLOCKS_MAX 1024u  /* of output, for what is repeated at once */
_Static_assert(FLOW_FRAME_MORE > PROTOCOL_SID_SHORT + 2, "see above");

void decide_begin(struct connmgr *cm, const struct conn *c)
{
    const struct flow *f = &cm->flows[c->slot];

    cm->step = (struct step){.subscribed = cm->subscribed, .modes = cm->modes, .payload_in = cm->stats.payload_in};
    if (c->has_flow && !c->routing && !c->chained && f->subscribed == cm->subscribed) /* F1, F3 */
        cm->step.flow = f;
}

void decide_ask_now(struct connmgr *cm, const struct conn *c)
{
    struct step *s = &cm->step;

    for (uint32_t i = 0; i < s->count; i++) {
        const struct taken *t = &cm->taken[i];

        for (uint32_t left = t->count; left; left--) {
            uint32_t bytes = ref_bytes(t->texts.subject_len + t->texts.reply_len);
            uint32_t more = left > 1 ? refer_most(cm, bytes, t->size, left - 1) : 0;
            struct ref_message *r = refer_message(cm, c, t->handle + t->count - left, t->size, t->flags, &t->texts, 0);

            if (more)
                refer_join(cm, r, more, t->size);
            left -= more;
        }
    }
    s->flow = NULL;
    s->count = 0;
}

/* The router has been asked about the messages before `last`. */
static void asked(struct connmgr *cm, struct conn *c, uint32_t chunk, uint32_t last)
{
    struct arena *a = cm->port.pool.arena;
    uint32_t entry = chunk * ARENA_CHUNK_MESSAGES + last - 1;

    if (!cm->flows_on)
        return;
    c->routing = 1;
    c->routed_last = handle_make(a->owner, atomic_load_explicit(&arena_words(a)[entry], memory_order_relaxed), entry);
    c->routed_subscribed = cm->subscribed;
    /* A subscription of the same step may be behind the message. One of a mode may get another decision. */
    if (cm->step.subscribed != cm->subscribed || cm->step.modes != cm->modes)
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

/* F4: whether every recipient just takes `bytes` more. */
static int all_take_it(const struct connmgr *cm, const struct flow *f, uint64_t bytes)
{
    for (uint32_t i = 0; i < f->count; i++) {
        const struct sub_rec *s = &cm->subs[f->subs[i]];
        const struct conn *c = &cm->conns[(uint32_t)s->word];

        if (!(s->word & SUB_ACTIVE) || s->max || !c->served || c->dropped || s->sid_len > PROTOCOL_SID_SHORT ||
            c->end - c->sent + bytes * f->count > cm->conf.max_pending) /* it may be there several times */
            return 0;
    }
    return output_has_room(cm);
}

/* Delivers what was taken as it was decided before. 0: nothing was done. */
static int repeat(struct connmgr *cm, struct conn *c, uint32_t chunk, uint32_t first)
{
    const struct step *s = &cm->step;
    const struct flow *f = s->flow;
    uint32_t messages = cm->chunk_messages[chunk] - first;
    uint64_t bytes = c->in_pos - cm->recs[c->slot].in_pos + messages * FLOW_FRAME_MORE;
    /* For each recipient: a block of copies is half full at least; a body that is kept has one before and after it. */
    uint64_t blocks = s->bodies == BODIES_KEPT ? 2 * messages : 2 * bytes / JOURNAL_BLOCK_BYTES + 2;

    if (s->bodies == BODIES_BOTH || f->count * blocks > FLOW_BLOCKS_MAX || !all_take_it(cm, f, bytes))
        return 0;
    if (TRACE_IF(cm->trace.on))
        trace_flow(cm, messages);
    deliver_taken(cm, f->subs, f->count, cm->taken, s->count, (uint32_t)(cm->port.log->applied + 1));
    for (uint32_t i = 0; i < f->count; i++)
        redo_put(&cm->port.redo, &cm->subs[f->subs[i]].base, cm->subs[f->subs[i]].delivered);
    if (s->bodies == BODIES_COPIED)
        cm->chunk_messages[chunk] = first; /* nobody needs them: they are not even entries */
    else
        port_own_alone(&cm->port, chunk * ARENA_CHUNK_MESSAGES + first, messages);
    cm->stats.repeated += messages;
    CRASH(FLOW_APPLIED);
    return 1;
}

void decide_end(struct connmgr *cm, struct conn *c, uint32_t chunk, uint32_t first)
{
    uint32_t last = cm->chunk_messages[chunk];

    if (last == first)
        return;
    cm->stats.messages_in += last - first;
    c->messages_in += last - first;
    c->payload_in += cm->stats.payload_in - cm->step.payload_in;
    if (!cm->step.flow || !repeat(cm, c, chunk, first)) {
        decide_ask(cm, c);
        asked(cm, c, chunk, last);
    }
    if (cm->chunk_messages[chunk] > first)
        redo_put_arena(&cm->port.redo, arena_messages(cm->port.pool.arena, chunk), last);
}
