/* refer: the references that are not of messages, and those no client frame brings. See refer.h. */
#include "connmgr/refer.h"
#include "base/crash.h"

/* ---- runs, and how much a batch stands for ---- */

#define RECORD_BYTES (REF_BYTES_MIN + 8) /* of the smallest record of a message */

static uint64_t sent_so_far(const struct connmgr *cm)
{
    return atomic_load_explicit(&cm->port.log->refs.sent, memory_order_relaxed);
}

/* Of the batches that were sent those that are not in the queue any more were taken by the router, and it is done
 * with all of them but the last. */
static void refer_forget(struct connmgr *cm)
{
    struct mq_attr queue = {0};
    uint32_t kept = 0;

    if (mq_getattr(cm->port.refs.queue, &queue) != 0)
        return;
    for (uint32_t i = 0; i < cm->large_count; i++)
        if (cm->large[i] + (uint64_t)queue.mq_curmsgs >= sent_so_far(cm))
            cm->large[kept++] = cm->large[i];
    cm->large_count = kept;
    refer_settle_room(cm);
}

static int is_large(const struct connmgr *cm)
{
    return cm->large_count && cm->large[cm->large_count - 1] == cm->port.refs.seq;
}

/* More is to go into the batch being filled than may: it becomes a large one, if it may. Asked once for each. */
static void refer_look(struct connmgr *cm)
{
    struct batch_out *refs = &cm->port.refs;

    if (cm->looked_seq == refs->seq || refs->seq != sent_so_far(cm) + 1)
        return;
    cm->looked_seq = refs->seq;
    if (cm->large_count)
        refer_forget(cm);
    if (cm->large_count == CONNMGR_LARGE_MAX)
        return;
    cm->large[cm->large_count++] = refs->seq;
    refs->load /= CONNMGR_LARGE_BODIES;
    refer_settle_room(cm);
}

static uint32_t joiner_load(const struct connmgr *cm, uint32_t size)
{
    return refer_load(size) / (is_large(cm) ? CONNMGR_LARGE_BODIES : 1);
}

/* Messages of that size that may still join the one that the record of `bytes` is about, in the batch being filled.
 * Each record stands for one that does not join another. */
static uint32_t joiners_left(const struct connmgr *cm, uint32_t bytes, uint32_t size)
{
    const struct batch_out *refs = &cm->port.refs;
    uint32_t most = is_large(cm) ? CONNMGR_LARGE_MESSAGES : CONNMGR_BATCH_MESSAGES;
    uint32_t used = refs->bytes + refs->load + bytes + refer_load(size), load = joiner_load(cm, size);
    uint32_t count = (refs->bytes + bytes) / RECORD_BYTES + (refs->seq == cm->joined_seq ? cm->joined : 0);

    if (used >= BATCH_BYTES || count >= most)
        return 0;
    return load && (BATCH_BYTES - used) / load < most - count ? (BATCH_BYTES - used) / load : most - count;
}

uint32_t refer_most(struct connmgr *cm, uint32_t bytes, uint32_t size, uint32_t wanted)
{
    struct batch_out *refs = &cm->port.refs;

    if (refs->bytes + refs->load + bytes > BATCH_BYTES)
        batch_out_turn(refs, cm->now_ns);
    uint32_t most = joiners_left(cm, bytes, size);

    if (wanted > most) {
        refer_look(cm);
        most = joiners_left(cm, bytes, size);
    }
    return wanted < most ? wanted : most;
}

void refer_join(struct connmgr *cm, struct ref_message *r, uint32_t more, uint32_t size)
{
    struct ref_run *run = (struct ref_run *)r;
    struct batch_out *refs = &cm->port.refs;

    run->messages = (uint16_t)(more + 1);
    run->flags |= REF_RUN;
    run->size_all += more * size;
    if (cm->joined_seq != refs->seq) {
        cm->joined_seq = refs->seq;
        cm->joined = 0;
    }
    cm->joined += more;
    refs->load += more * joiner_load(cm, size);
    if (joiners_left(cm, RECORD_BYTES, 0) == 0) /* nothing more goes into it, not even by itself */
        refs->load = BATCH_BYTES;
}

void refer_mode(struct connmgr *cm, const struct conn *c, uint64_t handle, uint32_t size, uint8_t flags,
                const struct refer_texts *t, const struct ref_mode *mode, const char *topics)
{
    uint32_t more = (uint32_t)sizeof(*mode) + batch_pad(mode->topics_len);
    struct ref_message *r = refer_message(cm, c, handle, size, flags | REF_MODE, t, more);
    char *to = r->text + batch_pad(t->subject_len + t->reply_len);

    memcpy(mempcpy(to, mode, sizeof(*mode)), topics, mode->topics_len);
    cm->modes++;
}

void refer_subscribe(struct connmgr *cm, const struct conn *c, uint32_t sub, const uint8_t *p, const struct frame *f)
{
    port_refer_subscribe(&cm->port, c->slot, sub_handle(cm, sub), p + f->subject, f->subject_len, p + f->queue, f->queue_len,
                         p + f->sid, f->sid_len < REF_SID_MAX ? f->sid_len : REF_SID_MAX, cm->now_ns);
    cm->subscribed++;
}

void refer_unsubscribe(struct connmgr *cm, uint32_t conn, uint32_t sub, uint64_t max)
{
    port_refer_unsubscribe(&cm->port, conn, sub_handle(cm, sub), max, cm->now_ns);
}

void refer_ping(struct connmgr *cm, const struct conn *c, uint16_t settle)
{
    struct ref_ping *r = batch_out_append(&cm->port.refs, sizeof(*r), cm->now_ns);

    *r = (struct ref_ping){.type = REF_PING, .settle = settle, .bytes = sizeof(*r), .conn = c->slot, .uid = c->uid};
}

/* ---- what no client frame brings ----
 *
 * Opening, greeting and ending a connection come of the dispatcher's hand-offs, and are never counted
 * against its clients: ten thousand of them may be due while the router is away. They are asked for from
 * the records of the connections, a few batches at a time. */

#define DUE_BYTES_MAX 128u
_Static_assert(REF_BYTES_MIN + JOURNAL_NAME_MAX <= DUE_BYTES_MAX && REF_BYTES_MIN + sizeof(((struct conntable_slot *)0)->ip) <= DUE_BYTES_MAX &&
                   sizeof(struct ref_unsubscribe) <= DUE_BYTES_MAX && sizeof(struct ref_hold) <= DUE_BYTES_MAX &&
                   sizeof(struct ref_name_kept) <= DUE_BYTES_MAX, "see has_room()");

static void refer_hold(struct connmgr *cm, const struct hold_due *h)
{
    struct ref_hold *r = batch_out_append(&cm->port.refs, sizeof(*r), cm->now_ns);

    *r = (struct ref_hold){.type = REF_HOLD, .port_len = sizeof(r->publisher_port), .bytes = sizeof(*r), .conn = h->consumer,
                           .publisher = h->publisher, .uid = h->consumer_uid, .publisher_port = h->connmgr};
}

static void refer_ready(struct connmgr *cm, const struct conn *c)
{
    const char *name = cm->recs[c->slot].name;
    uint32_t len = (uint32_t)strlen(name), bytes = ref_bytes(len);
    struct ref_ready *r = batch_out_append(&cm->port.refs, bytes, cm->now_ns);

    *r = (struct ref_ready){.type = REF_READY, .flags = len ? REF_NAMED : 0, .name_len = (uint16_t)len,
                            .bytes = (uint16_t)bytes, .conn = c->slot, .options = c->options, .uid = c->uid};
    memcpy(r->name, name, len);
}

static void refer_name_kept(struct connmgr *cm, const struct conn *c)
{
    const struct name_question *q = &c->question;
    struct ref_name_kept *r = batch_out_append(&cm->port.refs, sizeof(*r), cm->now_ns);

    *r = (struct ref_name_kept){.type = REF_NAME_KEPT, .asker_len = sizeof(*r) - REF_BYTES_MIN, .bytes = sizeof(*r),
                                .conn = c->slot, .asker = q->asker, .uid = c->uid, .asker_port = q->asker_port,
                                .asker_uid = q->asker_uid};
    CRASH(NAME_KEPT);
}

/* The first thing that the connection has to ask; what a closed one still had to is forgotten. */
static void refer_asked(struct connmgr *cm, struct conn *c)
{
    if (c->asked & ASK_CLOSE) {
        port_refer_close(&cm->port, c->slot, c->uid, cm->now_ns);
        c->asked = 0;
    } else if (c->asked & ASK_OPEN) {
        port_refer_open(&cm->port, c->slot, c->uid, cm->table->slots[c->slot].ip, cm->now_ns);
        c->asked &= (uint8_t)~ASK_OPEN;
    } else if (c->asked & ASK_READY) {
        refer_ready(cm, c);
        c->asked &= (uint8_t)~ASK_READY;
    } else {
        refer_name_kept(cm, c);
        c->asked = 0;
    }
}

void refer_sent(struct connmgr *cm)
{
    uint64_t sent = atomic_load_explicit(&cm->port.log->refs.sent, memory_order_relaxed);
    uint32_t kept = 0;

    for (uint32_t i = 0; i < cm->due_count; i++)
        if (cm->due[i] > sent)
            cm->due[kept++] = cm->due[i];
    cm->due_count = kept;
    if (cm->port.refs.blocked && cm->large_count)
        refer_forget(cm); /* nobody looks while there is always more than one in the ring */
    refer_settle_room(cm);
}

/* Whether one more fits the batches that may be used: those before `end`, and the last one but for a record. */
static int has_room(const struct connmgr *cm, uint64_t end)
{
    return cm->port.refs.seq + 1 < end || (cm->port.refs.seq < end && cm->port.refs.bytes + DUE_BYTES_MAX <= BATCH_BYTES);
}

void refer_due(struct connmgr *cm)
{
    struct batch_out *refs = &cm->port.refs;

    if (cm->due_count == CONNMGR_DUE_AHEAD)
        return;
    if (refs->bytes > BATCH_HEAD) /* what clients said is in another batch */
        batch_out_turn(refs, cm->now_ns);
    uint64_t first = refs->seq, end = first + CONNMGR_DUE_AHEAD - cm->due_count;

    while (cm->asked_first != CONNMGR_NONE && has_room(cm, end)) {
        struct conn *c = &cm->conns[cm->asked_first];

        refer_asked(cm, c);
        if (c->asked)
            continue;
        cm->asked_first = c->next_asked;
        if (cm->asked_first == CONNMGR_NONE)
            cm->asked_last = CONNMGR_NONE;
    }
    while (cm->sub_due_count && has_room(cm, end)) {
        uint32_t sub = cm->sub_due[--cm->sub_due_count];

        if (cm->subs[sub].word & SUB_DYING)
            refer_unsubscribe(cm, (uint32_t)cm->subs[sub].word, sub, 0);
    }
    while (cm->holds_due_count && has_room(cm, end))
        refer_hold(cm, &cm->holds_due[--cm->holds_due_count]);
    if (refs->bytes > BATCH_HEAD)
        batch_out_turn(refs, cm->now_ns);
    for (; first < refs->seq; first++)
        cm->due[cm->due_count++] = first;
    refer_settle_room(cm);
    batch_out_put(refs, &cm->port.redo);
    redo_commit(&cm->port.redo);
}
