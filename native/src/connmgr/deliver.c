/* deliver: messages become frames in the output of the connections that get them.
 *
 * The structure: none of its own. Frames go behind what the connection's output already holds
 *               (output.c); a subscription counts what it was given.
 * Written by:   the connmgr, past committed ends, within the step of a batch of orders (J5).
 * Invariants:   a connection gets the messages of a batch in the order of its orders.
 * After a crash: the step is repeated, or was committed.
 *
 * Orders in a row for the same recipients are one run: what must be asked of a connection before it
 * is given anything is asked once, and if several recipients call their subscription the same, the
 * bytes are made once for all of them. That is the usual case: one publisher sends many messages to
 * one subject, and clients count their subscriptions from 1. Few bytes are copied to the output of
 * each; many lie in blocks that all of them share.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"
#include "base/put.h"

#define RUN_ORDERS (BATCH_BYTES / ORDER_BYTES_MIN)
#define PREFETCH_ORDERS 8u /* how far ahead subscriptions are fetched: they may be many */
#define SHARE_BYTES (JOURNAL_BLOCK_BYTES / 16 * 11) /* fewer would waste blocks if somebody is slow */
#define SHARE_BLOCKS 8u /* of RUN_BYTES and a frame, each block half full at least */
#define RUN_BYTES 32768u /* bytes after which a run ends: they stay in the cache while they are copied */

/* One message for one recipient: where the parts of its frame are. Behind its head go bytes [0, kept) of
 * what lies at `body`, then what was made for this recipient, then `rest` bytes from `skip` on. */
struct delivery {
    struct message head;
    uint64_t handle; /* 0: nothing of it lies in the arena */
    const uint8_t *body, *made;
    uint32_t kept, made_len, skip, rest;
    int copied; /* else a segment refers to what lies in the arena */
};

struct run {
    const uint32_t *subs; /* of the recipients */
    uint32_t recipients;
    uint32_t count;   /* messages */
    uint32_t headers; /* how many have any */
    uint64_t bytes;   /* of all, without sids */
    uint64_t payload; /* of all: headers and bodies */
    const struct protocol *protocol; /* whose frames they are, */
    uint16_t speaks;  /* and the two bytes of arena_entry that say so */
    struct usual frames[RUN_ORDERS];
};

/* `base` before `stamp` before `delivered`, as a crash in between must find them (subtable_recover). */
static inline void count_deliveries(struct sub_rec *s, uint32_t count, uint32_t stamp)
{
    if (s->stamp != stamp) {
        s->base = s->delivered;
        CRASH(COUNT_BASE);
        s->stamp = stamp;
        CRASH(COUNT_STAMP);
    }
    s->delivered += count;
}

/* Counts the delivery on the subscription; 0 if it has had all it asked for. */
static int count_delivery(struct connmgr *cm, struct sub_rec *s, uint32_t sub, uint32_t stamp)
{
    uint64_t max = s->word & SUB_PLAIN ? s->max : 0; /* of queue members the router keeps it */

    if (max && s->delivered >= max)
        return 0;
    count_deliveries(s, 1, stamp);
    if (max && s->delivered >= max && s->word & SUB_ACTIVE) {
        subtable_die(cm, sub);
        cm->sub_due[cm->sub_due_count++] = sub;
    }
    return 1;
}

/* The connection of a subscription that gets a 503: it counts neither as a message nor against a maximum, but one that
 * has had its maximum gets nothing. NULL: it gets none. */
static struct conn *no_responders_recipient(struct connmgr *cm, uint32_t sub, uint64_t handle)
{
    const struct sub_rec *s = &cm->subs[sub];
    struct conn *c = &cm->conns[(uint32_t)s->word];

    if (!(s->word & (SUB_ACTIVE | SUB_DYING)) || !c->served || c->reason)
        return NULL;
    if (s->word & SUB_PLAIN && s->max && s->delivered >= s->max)
        return NULL;
    return c->end - c->sent <= cm->conf.max_pending || slow_may_deliver(cm, c, handle) ? c : NULL;
}

struct conn *deliver_recipient(struct connmgr *cm, uint32_t sub, uint32_t stamp, uint64_t handle)
{
    struct sub_rec *s = &cm->subs[sub];

    /* One that is dying is still served: what was routed to it came before its end. */
    if (!(s->word & (SUB_ACTIVE | SUB_DYING)))
        return NULL;
    struct conn *c = &cm->conns[(uint32_t)s->word];

    if (!c->served || c->reason || !count_delivery(cm, s, sub, stamp))
        return NULL;
    return c->end - c->sent <= cm->conf.max_pending || slow_may_deliver(cm, c, handle) ? c : NULL;
}

_Static_assert(2 * PROTOCOL_SID_MAX + CONNMGR_COPY_MAX + PROTOCOL_FRAME_MORE + 128 <= JOURNAL_BLOCK_BYTES,
               "a frame whose body is copied fits a block: subject and reply, sid, body, Midair-Dropped");

/* The frame of one message, whatever the message and the client are like. */
static void deliver_frame(struct connmgr *cm, struct conn *c, const struct sub_rec *s, const struct delivery *d)
{
    const struct protocol *protocol = c->protocol;
    const struct message *m = &d->head;
    uint32_t body = d->kept + d->made_len + d->rest, sid_len;
    const char *sid = subtable_sid(cm, s, &sid_len);
    uint32_t most = m->subject_len + m->reply_len + sid_len + PROTOCOL_FRAME_MORE +
                    (d->copied ? body + protocol->end_len : 0);
    uint8_t *at = output_reserve(cm, c, most), *to = protocol->put_message(at, m, sid, sid_len);

    if (d->copied) {
        to = put_text(to, d->body, d->kept);
        to = put_text(to, d->made, d->made_len);
        to = put_text(to, d->body + d->skip, d->rest);
        to = put_text(to, protocol->end, protocol->end_len);
    }
    c->write_at = to;
    c->end += (uint64_t)(to - at);
    if (d->copied)
        return;
    if (d->kept)
        output_append_body(cm, c, d->handle, 0, d->kept);
    output_append(cm, c, d->made, d->made_len);
    output_append_body(cm, c, d->handle, d->skip, d->rest);
    output_append(cm, c, protocol->end, protocol->end_len);
}

static void count_out(struct connmgr *cm, struct conn *c, uint32_t count, uint64_t payload)
{
    cm->stats.messages_out += count;
    c->messages_out += count;
    cm->stats.payload_out += payload;
    c->payload_out += payload;
}

/* The message as it was published. Headers go to those who have a use for them and speak the protocol
 * of who wrote them. */
static void describe(struct connmgr *cm, const struct conn *c, uint64_t handle, struct delivery *d)
{
    struct arena *a = cm->port.arenas[handle_source(handle)];
    const struct arena_entry *e = &arena_entries(a)[handle_entry(handle)];
    const uint8_t *data = arena_data(a, e->chunk);
    int headers = c->options & CONN_HEADERS && e->protocol == c->speaks;

    d->skip = headers ? 0 : e->header_len;
    d->rest = e->total_len - d->skip;
    d->head.subject = data + e->subject;
    d->head.subject_len = e->subject_len;
    d->head.reply = d->head.subject + e->reply;
    d->head.reply_len = e->reply_len;
    d->head.header_len = headers ? e->header_len : 0;
    d->head.total_len = d->rest;
    d->handle = handle;
    d->body = data + e->body;
    d->kept = d->made_len = 0;
    d->made = d->body;
    d->copied = e->total_len <= CONNMGR_COPY_MAX;
}

/* A client must be told how many messages before this one were left out: in a header more. */
static void add_dropped(struct connmgr *cm, struct conn *c, struct delivery *d, uint8_t *made)
{
    uint32_t headers = d->head.header_len, kept;
    const struct arena_entry *e = &arena_entries(cm->port.arenas[handle_source(d->handle)])[handle_entry(d->handle)];
    uint8_t number[20];
    struct field f = {.name = (const uint8_t *)"Midair-Dropped", .name_len = 14, .value = number};

    f.value_len = (uint32_t)((uint8_t *)put_number(number, c->dropped > UINT32_MAX ? UINT32_MAX : (uint32_t)c->dropped) - number);
    if (!c->protocol->put_field || e->body + headers > ARENA_CHUNK_BYTES)
        return; /* the next one may carry it */
    uint8_t *end = c->protocol->put_field(made, d->body, headers, &f, &kept);

    if (!end)
        return;
    d->made = made;
    d->made_len = (uint32_t)(end - made);
    d->kept = kept;
    d->skip += headers;
    d->rest -= headers;
    d->head.header_len = kept + d->made_len;
    d->head.total_len = d->head.header_len + d->rest;
    c->dropped = 0;
}

/* A message to one recipient, by itself. */
static void deliver_one(struct connmgr *cm, uint32_t sub, uint64_t handle, uint32_t stamp)
{
    struct conn *c = deliver_recipient(cm, sub, stamp, handle);
    struct delivery d;
    uint8_t made[128];

    if (!c)
        return;
    describe(cm, c, handle, &d);
    if (c->dropped && c->options & CONN_HEADERS)
        add_dropped(cm, c, &d, made);
    deliver_frame(cm, c, &cm->subs[sub], &d);
    count_out(cm, c, 1, d.head.total_len);
    if (TRACE_IF(cm->trace.on))
        trace_deliver(cm, c, (struct trace_part){.handle = handle, .end = c->end, .count = 1});
}

/* ---- runs ---- */

/* `usual` and `protocol` of an entry at once. */
static inline uint16_t usual_of(const struct arena_entry *e)
{
    uint16_t both;

    memcpy(&both, &e->usual, sizeof both);
    return both;
}
_Static_assert(offsetof(struct arena_entry, protocol) == offsetof(struct arena_entry, usual) + 1, "see usual_of");

/* The first message of a run says whose frames it is of; 0: it is in none. */
static int run_speaks(struct run *run, const struct arena_entry *e)
{
    if (!e->usual)
        return 0;
    run->speaks = usual_of(e);
    run->protocol = protocols[e->protocol];
    return 1;
}

/* Field by field: most of the frames will not be used. */
static inline void run_begin(struct run *run, const uint32_t *subs, uint32_t recipients)
{
    run->subs = subs;
    run->recipients = recipients;
    run->count = run->headers = 0;
    run->bytes = run->payload = 0;
}

/* Adds the message to the run; 0: its frame cannot be made this way. */
static int run_add(struct connmgr *cm, struct run *run, uint64_t handle)
{
    struct arena *a = cm->port.arenas[handle_source(handle)];
    const struct arena_entry *e = &arena_entries(a)[handle_entry(handle)];

    if (run->count == 0 ? !run_speaks(run, e) : usual_of(e) != run->speaks)
        return 0;
    uint32_t total_len = e->total_len;

    if (total_len > CONNMGR_COPY_MAX)
        return 0;
    const struct protocol *protocol = run->protocol;
    struct usual *f = &run->frames[run->count++];
    uint32_t subject_len = e->subject_len, bytes = e->body + total_len + protocol->end_len - e->subject; /* from there on */

    run->payload += total_len;
    f->handle = handle;
    f->subject = arena_data(a, e->chunk) + e->subject;
    f->subject_len = subject_len;
    f->tail_len = bytes - subject_len;
    f->headers = f->alike = 0;
    if (e->header_len) {
        f->headers = 1;
        run->headers++;
    }
    run->bytes += protocol->usual_more[f->headers] + bytes;
    return 1;
}

/* What an ORDER_DELIVER to one recipient says besides its message; 0: it is another order. */
static inline uint64_t order_to_one(const struct order *o)
{
    uint64_t word;

    memcpy(&word, o, sizeof word);
    return o->type == ORDER_DELIVER && order_recipients(o) == 1 ? word : 0;
}
_Static_assert(offsetof(struct order_deliver, only) == 4 && offsetof(struct order_deliver, handle) == 8, "see order_to_one");

static inline int same_recipients(const uint32_t *subs, uint32_t count, const struct order *o)
{
    if (order_recipients(o) != count)
        return 0;
    return count == 1 ? *order_subs(o) == *subs : memcmp(order_subs(o), subs, count * 4u) == 0;
}

/* A connection that is named twice gets each message twice before the next one: not in a run. */
static int each_once(struct connmgr *cm, const uint32_t *subs, uint32_t count)
{
    uint32_t run = ++cm->run;

    for (uint32_t i = 0; i < count; i++) {
        struct conn *c = &cm->conns[(uint32_t)cm->subs[subs[i]].word];

        if (c->run == run)
            return 0;
        c->run = run;
    }
    return 1;
}

struct place { /* in a batch */
    uint32_t at;   /* of an order */
    uint32_t done; /* messages of it that are delivered */
};

/* Behind one message. */
static void place_next(const struct order *o, struct place *p)
{
    if (++p->done == order_messages(o)) {
        p->at += order_bytes(o);
        p->done = 0;
    }
}

/* Adds messages of the ORDER_RUN at the place, as many as go; 0: the run ends before the end of it. */
static int run_add_run(struct connmgr *cm, struct run *run, const struct order_run *o, struct place *p)
{
    for (uint32_t before = run->count; p->done < o->messages; p->done++) {
        if (run->count == RUN_ORDERS || run->bytes >= RUN_BYTES || !run_add(cm, run, o->first + p->done))
            return 0;
        run->frames[run->count - 1].alike = run->count > before + 1;
    }
    p->at += order_run_bytes(o->recipients);
    p->done = 0;
    return 1;
}

/* Collects what is at the place and what can go with it, and moves the place behind it. If that is
 * nothing, the next message is one to be delivered by itself. */
static void run_collect(struct connmgr *cm, struct run *run, const struct batch *b, struct place *p)
{
    const struct order *first = batch_order(b, p->at), *o = first;
    const uint32_t *subs = order_subs(first);
    uint32_t count = order_recipients(first), single = order_deliver_bytes(count);
    uint64_t to_one = order_to_one(first), word;

    run_begin(run, subs, count);
    if (first->type & ORDER_MORE || (count > 1 && !each_once(cm, subs, count))) {
        if (run_add(cm, run, order_handle(first) + p->done))
            place_next(first, p);
        return;
    }
    while (run->count < RUN_ORDERS && run->bytes < RUN_BYTES) {
        if (o->type == ORDER_DELIVER) {
            if (!run_add(cm, run, order_handle(o)))
                return;
            p->at += single;
        } else if (!run_add_run(cm, run, (const struct order_run *)o, p)) {
            return;
        }
        if (p->at + single > b->bytes)
            return;
        o = batch_order(b, p->at);
        memcpy(&word, o, sizeof word);
        if (word == to_one)
            continue;
        if ((o->type != ORDER_DELIVER && (o->type != ORDER_RUN || p->at + order_bytes(o) > b->bytes)) ||
            !same_recipients(subs, count, o))
            return;
    }
}

/* Most bytes that put_run() may write for one of them. */
static inline uint32_t frame_most(const struct usual *f, const struct sub_rec *s)
{
    return PROTOCOL_FRAME_MORE + f->subject_len + s->sid_len + f->tail_len;
}

/* Whether the connection gets all of the run, as it is. */
static int takes_run(const struct connmgr *cm, const struct conn *c, const struct sub_rec *s,
                     const struct run *run)
{
    if (!(s->word & (SUB_ACTIVE | SUB_DYING)) || !c->served || c->dropped || s->sid_len > PROTOCOL_SID_SHORT ||
        c->protocol != run->protocol)
        return 0;
    if (s->max && s->word & SUB_PLAIN && s->delivered + run->count >= s->max)
        return 0;
    if (run->headers && !(c->options & CONN_HEADERS))
        return 0;
    return c->end - c->sent + run->bytes + (uint64_t)run->count * s->sid_len <= cm->conf.max_pending;
}

static void run_trace(struct connmgr *cm, const struct conn *c, const struct sub_rec *s, const struct run *run,
                      uint64_t end)
{
    for (uint32_t i = 0; i < run->count;) {
        const struct usual *f = &run->frames[i];
        uint32_t bytes = c->protocol->usual_more[f->headers] + f->subject_len + s->sid_len + f->tail_len, count = 1;

        while (i + count < run->count && f[count].alike)
            count++;
        trace_deliver(cm, c, (struct trace_part){.handle = f->handle, .end = end + bytes, .count = count, .bytes = bytes});
        end += (uint64_t)bytes * count;
        i += count;
    }
}

static void run_write(struct connmgr *cm, struct conn *c, const struct sub_rec *s, const struct run *run)
{
    for (uint32_t i = 0, count; i < run->count; i += count) {
        uint8_t *from = output_reserve(cm, c, frame_most(&run->frames[i], s));
        uint8_t *to = c->protocol->put_run(from, c->write_end, &run->frames[i], run->count - i, s->sid, s->sid_len, &count);

        c->write_at = to;
        c->end += (uint64_t)(to - from);
    }
}

/* The bytes of a run for everyone who calls the subscription what `of` does. */
struct made {
    const struct sub_rec *of;
    uint32_t len;             /* in the scratch, if they are not shared */
    uint32_t count;           /* of blocks, if they are */
    struct { uint32_t block, len; } shared[SHARE_BLOCKS];
};

static void made_forget(struct connmgr *cm, struct made *m)
{
    for (uint32_t i = 0; i < m->count; i++)
        output_shared(cm, m->shared[i].block);
    m->count = m->len = 0;
}

static void made_share(struct connmgr *cm, struct made *m, const struct run *run)
{
    for (uint32_t i = 0, count; i < run->count; i += count) {
        uint8_t *from = output_share(cm, &m->shared[m->count].block);

        m->shared[m->count++].len = (uint32_t)(run->protocol->put_run(from, from + JOURNAL_BLOCK_BYTES, &run->frames[i],
                                                                 run->count - i, m->of->sid, m->of->sid_len, &count) -
                                               from);
    }
}

static void made_make(struct connmgr *cm, struct made *m, const struct sub_rec *s, const struct run *run)
{
    uint32_t count;

    made_forget(cm, m);
    m->of = s;
    if (run->bytes >= SHARE_BYTES) {
        made_share(cm, m, run);
        return;
    }
    const uint8_t *end = cm->scratch + run->bytes + run->count * (s->sid_len + PROTOCOL_FRAME_MORE);

    m->len = (uint32_t)(run->protocol->put_run(cm->scratch, end, run->frames, run->count, s->sid, s->sid_len,
                                                        &count) -
                        cm->scratch);
}

static void made_give(struct connmgr *cm, struct conn *c, const struct made *m)
{
    for (uint32_t i = 0; i < m->count; i++)
        output_append_shared(cm, c, m->shared[i].block, m->shared[i].len);
    if (m->len)
        output_append(cm, c, cm->scratch, m->len);
}

static void run_deliver(struct connmgr *cm, const struct run *run, uint32_t stamp)
{
    const uint32_t *subs = run->subs;
    uint32_t count = run->recipients;
    struct made made;

    made.of = NULL; /* field by field, as above */
    made.count = 0;

    for (uint32_t i = 0; i < count; i++) {
        struct sub_rec *s = &cm->subs[subs[i]];
        struct conn *c = &cm->conns[(uint32_t)s->word];

        if (!takes_run(cm, c, s, run)) {
            if (s->sid_len > PROTOCOL_SID_SHORT && run->count > 1 && !output_has_spare(cm, run->count))
                conn_end(cm, c, CLOSE_SLOW_ROOM);
            for (uint32_t k = 0; k < run->count; k++)
                deliver_one(cm, subs[i], run->frames[k].handle, stamp);
            continue;
        }
        count_deliveries(s, run->count, stamp);
        uint64_t end = c->end;

        if (count == 1) {
            run_write(cm, c, s, run);
        } else {
            if (!made.of || made.of->sid_len != s->sid_len || memcmp(made.of->sid, s->sid, s->sid_len) != 0)
                made_make(cm, &made, s, run);
            made_give(cm, c, &made);
        }
        count_out(cm, c, run->count, run->payload);
        if (TRACE_IF(cm->trace.on))
            run_trace(cm, c, s, run, end);
    }
    made_forget(cm, &made);
}

/* Most orders are for one recipient and of one size; fetching what is none harms nobody. */
static inline void prefetch_ahead(const struct connmgr *cm, const struct batch *b, uint32_t at)
{
    at += PREFETCH_ORDERS * ORDER_BYTES_MIN;
    if (at < b->bytes)
        __builtin_prefetch(&cm->subs[((const struct order_deliver *)batch_order(b, at))->only], 1);
}

uint32_t deliver_orders(struct connmgr *cm, const struct batch *b, uint32_t at, uint32_t stamp)
{
    struct place p = {.at = at};
    struct run run;

    prefetch_ahead(cm, b, at);
    do {
        const struct order *o = batch_order(b, p.at);
        uint64_t handle = order_handle(o) + p.done;

        run_collect(cm, &run, b, &p);
        if (run.count) {
            run_deliver(cm, &run, stamp);
            continue;
        }
        for (uint32_t i = 0; i < order_recipients(o); i++)
            deliver_one(cm, order_subs(o)[i], handle, stamp);
        place_next(o, &p);
    } while (p.done);
    return p.at;
}

void deliver_taken(struct connmgr *cm, const uint32_t *subs, uint32_t recipients, const struct taken *t, uint32_t count,
                   uint32_t stamp)
{
    uint32_t most = recipients == 1 || each_once(cm, subs, recipients) ? RUN_ORDERS : 1;
    struct run run;

    run_begin(&run, subs, recipients);
    for (const struct taken *end = t + count; t < end; t++) {
        for (uint32_t i = 0; i < t->count; i++) {
            if (run.count == most || run.bytes >= RUN_BYTES) {
                run_deliver(cm, &run, stamp);
                run_begin(&run, subs, recipients);
            }
            if (run_add(cm, &run, t->handle + i)) {
                run.frames[run.count - 1].alike = i && run.count > 1;
                continue;
            }
            if (run.count)
                run_deliver(cm, &run, stamp);
            run_begin(&run, subs, recipients);
            for (uint32_t n = 0; n < recipients; n++)
                deliver_one(cm, subs[n], t->handle + i, stamp);
        }
    }
    if (run.count)
        run_deliver(cm, &run, stamp);
}

void deliver_as(struct connmgr *cm, uint32_t sub, uint64_t handle, const struct deliver_texts *as, uint32_t stamp)
{
    struct conn *c = deliver_recipient(cm, sub, stamp, handle);
    struct delivery d;

    if (!c)
        return;
    describe(cm, c, handle, &d);
    if (as->subject_len) {
        d.head.subject = as->subject;
        d.head.subject_len = as->subject_len;
    }
    if (as->reply_len) {
        d.head.reply = as->reply;
        d.head.reply_len = as->reply_len;
    }
    deliver_frame(cm, c, &cm->subs[sub], &d);
    count_out(cm, c, 1, d.head.total_len);
    if (TRACE_IF(cm->trace.on))
        trace_deliver(cm, c, (struct trace_part){.handle = handle, .end = c->end, .count = 1});
}

/* A header block of the router's making in the words of the protocol; its length. */
static uint32_t put_own(const struct protocol *protocol, uint8_t *to, const struct own *own)
{
    if (own->raw_len) {
        memcpy(to, own->raw, own->raw_len);
        return own->raw_len;
    }
    if (!own->code || !protocol->put_status)
        return 0;
    return (uint32_t)(protocol->put_status(to, own->code, own->text, own->fields, own->field_count) - to);
}

void deliver_own(struct connmgr *cm, uint32_t sub, const struct own *own, uint32_t stamp)
{
    struct conn *c = own->code == MODES_NO_RESPONDERS ? no_responders_recipient(cm, sub, 0)
                                                      : deliver_recipient(cm, sub, stamp, 0);
    uint8_t made[OWN_HEADERS_MAX];
    struct delivery d = {.head = own->head, .made = made, .body = own->body, .rest = own->body_len, .copied = 1};

    if (!c)
        return;
    if (c->options & CONN_HEADERS)
        d.made_len = put_own(c->protocol, made, own);
    if (!d.made_len && !d.rest)
        return; /* a status means nothing to a client without headers */
    d.head.header_len = d.made_len;
    d.head.total_len = d.made_len + d.rest;
    deliver_frame(cm, c, &cm->subs[sub], &d);
    count_out(cm, c, 1, d.head.total_len);
}

/* "Nobody is listening": a status to the sender's own subscription. */
void deliver_no_responders(struct connmgr *cm, const struct order_no_responders *o)
{
    struct conn *c = no_responders_recipient(cm, o->sub, o->handle);
    uint8_t status[64];
    struct delivery about;

    if (!c || !c->protocol->put_status)
        return;
    describe(cm, c, o->handle, &about);
    struct delivery d = {.head = {.subject = about.head.reply, .subject_len = about.head.reply_len}, .body = status,
                         .made = status, .copied = 1};

    d.made_len = (uint32_t)(c->protocol->put_status(status, MODES_NO_RESPONDERS, "", NULL, 0) - status);
    d.head.header_len = d.head.total_len = d.made_len;
    deliver_frame(cm, c, &cm->subs[o->sub], &d);
}
