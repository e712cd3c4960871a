/* orders: what the router decided becomes bytes for clients, and messages are let go.
 *
 * A batch is one step: its deliveries are appended to the output of their connections, then
 * committed together with `applied` = its sequence number (J5); after that the messages it
 * finished are relinquished, then `done` is stored. A crash before the commit leaves nothing
 * of it, one after it repeats only the relinquishing, which compares generations.
 */
#include "connmgr.h"
#include "crash.h"
#include "put.h"

#include <errno.h>

struct delivery { /* the frame of one message, as far as it is the same for everyone */
    uint64_t handle;
    const struct arena_entry *entry;
    const uint8_t *subject, *reply, *body;
    int inline_body;
    /* filled when there are several recipients: "MSG subject " and everything after the sid */
    uint32_t head_len, tail_len;
    const uint8_t *head, *tail;
};

void orders_relinquish(struct connmgr *cm, uint64_t handle, uint64_t add, int redo)
{
    uint32_t source = handle_source(handle);

    (void)arena_relinquish(cm->arenas[source], source == cm->conf.index ? &cm->pool : NULL, handle,
                           add, redo);
}

/* What follows the sid: " [reply] [header_len] total\r\n". */
static uint8_t *put_sizes(uint8_t *to, const struct delivery *d, int headers)
{
    const struct arena_entry *e = d->entry;

    *to++ = ' ';
    if (e->reply_len) {
        to = put_text(to, d->reply, e->reply_len);
        *to++ = ' ';
    }
    if (headers) {
        to = put_number(to, e->header_len);
        *to++ = ' ';
        to = put_number(to, e->total_len);
    } else {
        to = put_number(to, e->total_len - e->header_len);
    }
    *to++ = '\r';
    *to++ = '\n';
    return to;
}

static uint8_t *put_verb(uint8_t *to, const struct delivery *d, int headers)
{
    if (headers)
        *to++ = 'H';
    memcpy(to, "MSG ", 4);
    to = put_text(to + 4, d->subject, d->entry->subject_len);
    *to++ = ' ';
    return to;
}

/* Counts the delivery on the subscription; 0 if it has had all it asked for. */
static int count_delivery(struct connmgr *cm, struct sub_rec *s, uint32_t sub, uint32_t stamp)
{
    uint64_t max = s->word & SUB_PLAIN ? s->max : 0; /* of queue members the router keeps it */

    if (max && s->delivered >= max)
        return 0;
    if (s->stamp != stamp) {
        s->base = s->delivered;
        s->stamp = stamp;
    }
    s->delivered++;
    if (max && s->delivered >= max && s->word & SUB_ACTIVE) {
        subtable_die(cm, sub);
        cm->sub_due[cm->sub_due_count++] = sub;
    }
    return 1;
}

static void mark_ending(struct connmgr *cm, struct conn *c)
{
    c->next_marked = cm->marked_first;
    cm->marked_first = c->slot;
}

struct conn *orders_recipient(struct connmgr *cm, uint32_t sub, uint32_t stamp, uint64_t handle)
{
    struct sub_rec *s = &cm->subs[sub];

    /* One that is dying is still served: what was routed to it came before its end. */
    if (!(s->word & (SUB_ACTIVE | SUB_DYING)))
        return NULL;
    struct conn *c = &cm->conns[(uint32_t)s->word];

    if (c->phase != PHASE_OPEN || c->failed || !count_delivery(cm, s, sub, stamp))
        return NULL;
    if (c->end - c->sent <= cm->conf.max_pending || slow_may_deliver(cm, c, handle))
        return c;
    if (c->failed)
        mark_ending(cm, c);
    return NULL;
}

/* One recipient, formatted in place. */
static void deliver(struct connmgr *cm, struct conn *c, const struct sub_rec *s, const struct delivery *d)
{
    const struct arena_entry *e = d->entry;
    int headers = e->header_len && c->options & CONN_HEADERS;
    uint32_t skip = headers ? 0 : e->header_len;
    uint32_t body = e->total_len - skip;
    uint32_t most = 5 + e->subject_len + 1 + s->sid_len + 1 + e->reply_len + 1 + 24 +
                    (d->inline_body ? body + 2 : 0);
    uint8_t *at = output_reserve(cm, c, most), *to = at;

    to = put_verb(to, d, headers);
    to = put_text(to, s->sid, s->sid_len);
    to = put_sizes(to, d, headers);
    if (d->inline_body) {
        to = put_text(to, d->body + skip, body);
        *to++ = '\r';
        *to++ = '\n';
    }
    c->write_at = to;
    c->end += (uint64_t)(to - at);
    if (!d->inline_body) {
        output_append_body(cm, c, d->handle, skip, body);
        output_append(cm, c, "\r\n", 2);
    }
    cm->stats.messages_out++;
    c->messages_out++;
}

/* A message to a client that must be told how many before it were left out: a header line more.
 * 0: this one cannot carry it, because its headers do not end as they should. */
static int deliver_telling(struct connmgr *cm, struct conn *c, const struct sub_rec *s, const struct delivery *d)
{
    static const char line[] = "Midair-Dropped: ", start[] = "NATS/1.0\r\n";
    const struct arena_entry *e = d->entry;
    uint32_t kept = e->header_len ? e->header_len - 2 : 0; /* all but the last line end */
    uint8_t more[sizeof(start) + sizeof(line) + 16], *to = more;

    if (e->header_len && (e->body + e->header_len > ARENA_CHUNK_BYTES || e->header_len < 4 ||
                          memcmp(d->body + kept - 2, "\r\n\r\n", 4) != 0))
        return 0;
    if (!e->header_len)
        to = put_text(to, start, sizeof(start) - 1);
    to = put_text(to, line, sizeof(line) - 1);
    to = put_number(to, c->dropped > UINT32_MAX ? UINT32_MAX : (uint32_t)c->dropped);
    to = put_text(to, "\r\n\r\n", 4);
    uint32_t added = (uint32_t)(to - more), rest = e->total_len - e->header_len;
    struct arena_entry shown = *e;
    struct delivery as = *d;
    uint8_t *at = output_reserve(cm, c, 5 + e->subject_len + 1 + s->sid_len + 1 + e->reply_len + 1 + 24);

    shown.header_len = kept + added;
    shown.total_len = shown.header_len + rest;
    as.entry = &shown;
    to = put_verb(at, &as, 1);
    to = put_text(to, s->sid, s->sid_len);
    to = put_sizes(to, &as, 1);
    c->write_at = to;
    c->end += (uint64_t)(to - at);
    if (!d->inline_body) {
        if (kept)
            output_append_body(cm, c, d->handle, 0, kept);
        output_append(cm, c, more, added);
        output_append_body(cm, c, d->handle, e->header_len, rest);
    } else {
        output_append(cm, c, d->body, kept);
        output_append(cm, c, more, added);
        output_append(cm, c, d->body + e->header_len, rest);
    }
    output_append(cm, c, "\r\n", 2);
    c->dropped = 0;
    cm->stats.messages_out++;
    c->messages_out++;
    return 1;
}

/* The usual case: everything after the sid is as the publisher wrote it. */
static inline void deliver_usual(struct connmgr *cm, struct conn *c, const struct sub_rec *s,
                                 const struct delivery *d)
{
    const struct arena_entry *e = d->entry;
    uint32_t tail = e->body + e->total_len + 2 - e->subject - e->subject_len;
    uint8_t *at = output_reserve(cm, c, 6 + e->subject_len + s->sid_len + PUT_SHORT_MAX + tail), *to = at;

    if (e->header_len)
        *to++ = 'H';
    memcpy(to, "MSG ", 4);
    to = put_short(to + 4, d->subject, e->subject_len);
    *to++ = ' ';
    to = put_short(to, s->sid, s->sid_len);
    to = put_text(to, d->subject + e->subject_len, tail);
    c->write_at = to;
    c->end += (uint64_t)(to - at);
    cm->stats.messages_out++;
    c->messages_out++;
}

/* The same when the frame was prepared for many and the client takes headers (or there are
 * none): two copies and the sid. */
static void deliver_prepared(struct connmgr *cm, struct conn *c, const struct sub_rec *s,
                             const struct delivery *d)
{
    uint8_t *at = output_reserve(cm, c, d->head_len + s->sid_len + PUT_SHORT_MAX + d->tail_len), *to = at;

    to = put_short(to, d->head, d->head_len);
    to = put_short(to, s->sid, s->sid_len);
    to = put_text(to, d->tail, d->tail_len);
    c->write_at = to;
    c->end += (uint64_t)(to - at);
    cm->stats.messages_out++;
    c->messages_out++;
}

static void prepare(struct connmgr *cm, struct delivery *d)
{
    int headers = d->entry->header_len != 0;
    uint8_t *to;

    to = put_verb(cm->scratch, d, headers);
    d->head = cm->scratch;
    d->tail = to;
    d->head_len = (uint32_t)(d->tail - d->head);
    if (d->entry->usual) {
        d->tail = d->subject + d->entry->subject_len;
        d->tail_len = d->entry->body + d->entry->total_len + 2 - d->entry->subject - d->entry->subject_len;
        return;
    }
    to = put_sizes(to, d, headers);
    to = put_text(to, d->body, d->entry->total_len);
    *to++ = '\r';
    *to++ = '\n';
    d->tail_len = (uint32_t)(to - d->tail);
}

static void describe(struct connmgr *cm, uint64_t handle, struct delivery *d)
{
    struct arena *a = cm->arenas[handle_source(handle)];
    const struct arena_entry *e = &arena_entries(a)[handle_entry(handle)];
    const uint8_t *data = arena_data(a, e->chunk);

    d->handle = handle;
    d->entry = e;
    d->subject = data + e->subject;
    d->reply = d->subject + e->reply;
    d->body = data + e->body;
    d->inline_body = e->total_len <= CONNMGR_COPY_MAX;
}

static void deliver_all(struct connmgr *cm, const struct order *o, uint32_t stamp)
{
    const uint32_t *subs = o->count == 1 ? &o->one : o->subs;
    struct delivery d;
    int prepared = 0;

    describe(cm, o->handle, &d);
    if (o->count > 1 && d.inline_body) {
        prepare(cm, &d);
        prepared = 1;
    }
    for (uint32_t i = 0; i < o->count; i++) {
        struct conn *c = orders_recipient(cm, subs[i], stamp, o->handle);

        if (!c)
            continue;
        int whole = !d.entry->header_len || c->options & CONN_HEADERS;

        if (c->dropped && c->options & CONN_HEADERS && deliver_telling(cm, c, &cm->subs[subs[i]], &d))
            ;
        else if (prepared && whole)
            deliver_prepared(cm, c, &cm->subs[subs[i]], &d);
        else if (d.entry->usual && d.inline_body && whole)
            deliver_usual(cm, c, &cm->subs[subs[i]], &d);
        else
            deliver(cm, c, &cm->subs[subs[i]], &d);
        if (TRACE_IF(cm->trace.on))
            trace_deliver(cm, c, o->handle);
    }
}

void orders_deliver_as(struct connmgr *cm, const struct order *o, const struct order_mode *as, uint32_t stamp)
{
    struct conn *c = orders_recipient(cm, o->one, stamp, o->handle);
    struct delivery d;

    if (!c)
        return;
    describe(cm, o->handle, &d);
    struct arena_entry entry = *d.entry;

    if (as->subject_len) {
        entry.subject_len = as->subject_len;
        d.subject = (const uint8_t *)as->text;
    }
    if (as->reply_len) {
        entry.reply_len = as->reply_len;
        d.reply = (const uint8_t *)as->text + as->subject_len;
    }
    d.entry = &entry;
    deliver(cm, c, &cm->subs[o->one], &d);
    if (TRACE_IF(cm->trace.on))
        trace_deliver(cm, c, o->handle);
}

/* "Nobody is listening": a status frame to the sender's own subscription. */
static void deliver_no_responders(struct connmgr *cm, const struct order *o, uint32_t stamp)
{
    struct conn *c = orders_recipient(cm, o->one, stamp, o->handle);
    struct delivery d;

    if (!c)
        return;
    describe(cm, o->handle, &d);
    const struct sub_rec *s = &cm->subs[o->one];
    uint8_t *at = output_reserve(cm, c, 8 + d.entry->reply_len + s->sid_len + 32), *to = at;

    to = put_text(to, "HMSG ", 5);
    to = put_text(to, d.reply, d.entry->reply_len);
    *to++ = ' ';
    to = put_text(to, s->sid, s->sid_len);
    to = put_text(to, " 16 16\r\nNATS/1.0 503\r\n\r\n\r\n", 26);
    c->write_at = to;
    c->end += (uint64_t)(to - at);
}

/* A consumer on some connmgr is crowded, and this connection publishes to it. */
static void hold_publisher(struct connmgr *cm, const struct order *o)
{
    if (o->one < cm->journal->conns_high)
        held_for_consumer(cm, &cm->conns[o->one], o->subs[0], o->handle);
}

static void session_info(struct connmgr *cm, const struct order *o)
{
    struct conn *c = &cm->conns[o->one];

    if (c->uid != o->handle || c->phase != PHASE_OPENING)
        return;
    output_append(cm, c, o->subs, o->count);
    c->phase = PHASE_OPEN;
    redo_put(&cm->redo, &cm->recs[c->slot].phase, c->phase | c->options);
    connmgr_set_reading(cm, c, 1);
}

static void session_pong(struct connmgr *cm, const struct order *o)
{
    struct conn *c = &cm->conns[o->one];

    if (c->uid != o->handle || c->phase != PHASE_OPEN)
        return;
    output_append(cm, c, "PONG\r\n", 6);
    if (!c->awaiting)
        return;
    c->awaiting = 0;
    redo_put(&cm->redo, &cm->recs[c->slot].phase, c->phase | c->options);
    if (!c->paused)
        input_wake(cm, c);
}

static void sub_gone(struct connmgr *cm, const struct order *o)
{
    uint32_t sub = (uint32_t)o->handle;

    if (sub >= cm->journal->subs_high || sub_handle(cm, sub) != o->handle)
        return;
    uint64_t word = cm->subs[sub].word;

    /* Asked for, or a queue member that has had its maximum. */
    if (word & SUB_DYING || (word & SUB_ACTIVE && !(word & SUB_PLAIN)))
        subtable_free(cm, sub);
}

static void sub_refused(struct connmgr *cm, const struct order *o)
{
    uint32_t sub = (uint32_t)o->handle;

    if (sub >= cm->journal->subs_high || sub_handle(cm, sub) != o->handle ||
        !(cm->subs[sub].word & SUB_ACTIVE))
        return;
    struct conn *c = &cm->conns[o->one];

    if (c->phase == PHASE_OPEN && !c->ending) {
        c->ending = CLOSE_SUBSCRIPTIONS + 1;
        mark_ending(cm, c);
    }
}

static void note(struct connmgr *cm, const struct order *o)
{
    struct let_go *l = &cm->let_go[cm->let_go_count++];

    l->handle = o->handle;
    l->limit = ledger_limit(o->limit);
}

/* Only one message of a source can have a list that goes on: the router orders one source's
 * messages one after the other. */
static void set_open(struct connmgr *cm, uint32_t source, uint64_t handle)
{
    if (cm->open_handle[source] == handle)
        return;
    cm->open_handle[source] = handle;
    redo_put(&cm->redo, &cm->journal->open_handle[source], handle);
}

static void apply(struct connmgr *cm, const struct order *o, uint32_t stamp)
{
    switch (o->type & ~ORDER_MORE) {
    case ORDER_DELIVER:
        deliver_all(cm, o, stamp);
        set_open(cm, handle_source(o->handle), o->type & ORDER_MORE ? o->handle : 0);
        if (!(o->type & ORDER_MORE))
            note(cm, o);
        return;
    case ORDER_NO_RESPONDERS:
        deliver_no_responders(cm, o, stamp);
        note(cm, o);
        return;
    case ORDER_DELETE:
        note(cm, o);
        return;
    case ORDER_MODE:
        modes_deliver(cm, o, stamp);
        set_open(cm, handle_source(o->handle), o->type & ORDER_MORE ? o->handle : 0);
        if (!(o->type & ORDER_MORE))
            note(cm, o);
        return;
    case ORDER_TEXT:
        modes_text(cm, o, stamp);
        return;
    case ORDER_NAME_TAKEN:
        modes_name_taken(cm, o);
        return;
    case ORDER_INFO:
        session_info(cm, o);
        return;
    case ORDER_PONG:
        session_pong(cm, o);
        return;
    case ORDER_HOLD:
        hold_publisher(cm, o);
        return;
    case ORDER_TRACE:
        trace_mark(cm, o);
        return;
    default:
        return; /* those that free slots come after the commit */
    }
}

static void apply_late(struct connmgr *cm, const struct order *o)
{
    switch (o->type) {
    case ORDER_CLOSED:
        connmgr_ended(cm, o->one, o->handle);
        return;
    case ORDER_UNSUBSCRIBED:
        sub_gone(cm, o);
        return;
    case ORDER_REFUSED:
        sub_refused(cm, o);
        return;
    case ORDER_NAME_TAKEN:
        modes_name_taken_late(cm, o);
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
        uint64_t add = l->limit;

        if (cm->local[handle_source(l->handle)][handle_entry(l->handle)] == 0)
            add |= cm->my_bit;
        if (add)
            orders_relinquish(cm, l->handle, add, redo);
        if (i == cm->let_go_count / 2)
            CRASH(ORDERS_RELINQUISHING);
    }
    cm->let_go_count = 0;
}

static const struct order *order_at(const struct batch *b, uint32_t at)
{
    return (const struct order *)((const char *)b + at);
}

/* Whether apply_late() does something about it. */
static int is_late(const struct order *o)
{
    return (o->type >= ORDER_CLOSED && o->type <= ORDER_REFUSED) || o->type == ORDER_NAME_TAKEN;
}

int orders_process(struct connmgr *cm, const struct batch *b)
{
    struct journal *j = cm->journal;
    int redo = j->applied == b->seq; /* committed before a crash */
    int late = 0;

    trace_batch(cm, b);
    for (uint32_t at = BATCH_HEAD; at < b->bytes;) {
        const struct order *o = order_at(b, at);

        at += order_bytes(o);
        if (at > b->bytes)
            return -EBADMSG;
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
        output_put(cm);
        redo_put(&cm->redo, &j->applied, b->seq);
        redo_commit(&cm->redo);
        CRASH(ORDERS_COMMITTED);
    }
    relinquish_all(cm, redo);
    CRASH(ORDERS_RELINQUISHED);
    if (late)
        for (uint32_t at = BATCH_HEAD; at < b->bytes; at += order_bytes(order_at(b, at)))
            apply_late(cm, order_at(b, at));
    connmgr_end_marked(cm); /* before `done`: who is ended by this batch stays ended */
    if (late)
        CRASH(ORDERS_LATE);
    j->done = b->seq; /* "orders.done" */
    CRASH(ORDERS_DONE);
    cm->stats.order_batches++;
    return 0;
}
