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

struct delivery { /* one message */
    uint64_t handle;
    const struct arena_entry *entry;
    const uint8_t *subject, *reply, *body;
    int inline_body;
};

struct frame { /* a message whose frame is as the publisher wrote it, but for verb and sid */
    uint64_t handle;
    const uint8_t *subject;
    uint32_t subject_len;
    uint32_t tail_len; /* bytes after the subject; the sid goes in between */
    uint16_t headers;  /* 0 or 1 */
    uint16_t alike;    /* follows the one before it, and differs from it in its body only */
};

struct run {
    const struct order *first;
    uint32_t count;   /* frames */
    uint32_t headers; /* how many have any */
    uint64_t bytes;   /* of all, without sids */
    struct frame frames[RUN_ORDERS];
};

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

/* One recipient, whatever the message and the client are like. */
static void deliver_made(struct connmgr *cm, struct conn *c, const struct sub_rec *s, const struct delivery *d)
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

/* A message to one recipient, by itself. */
static void deliver_one(struct connmgr *cm, uint32_t sub, uint64_t handle, uint32_t stamp)
{
    struct conn *c = deliver_recipient(cm, sub, stamp, handle);
    const struct sub_rec *s = &cm->subs[sub];
    struct delivery d;

    if (!c)
        return;
    describe(cm, handle, &d);
    if (!c->dropped || !(c->options & CONN_HEADERS) || !deliver_telling(cm, c, s, &d))
        deliver_made(cm, c, s, &d);
    if (TRACE_IF(cm->trace.on))
        trace_deliver(cm, c, (struct trace_part){.handle = handle, .end = c->end, .count = 1});
}

/* ---- runs ---- */

/* Adds the message to the run; 0: its frame cannot be made this way. */
static int run_add(struct connmgr *cm, struct run *run, uint64_t handle)
{
    struct arena *a = cm->arenas[handle_source(handle)];
    const struct arena_entry *e = &arena_entries(a)[handle_entry(handle)];

    if (!e->usual || e->total_len > CONNMGR_COPY_MAX)
        return 0;
    struct frame *f = &run->frames[run->count++];

    f->handle = handle;
    f->subject = arena_data(a, e->chunk) + e->subject;
    f->subject_len = e->subject_len;
    f->tail_len = e->body + e->total_len + 2 - e->subject - e->subject_len;
    f->headers = e->header_len != 0;
    f->alike = 0;
    run->headers += f->headers;
    run->bytes += 5 + f->headers + f->subject_len + f->tail_len;
    return 1;
}

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

    run->first = first; /* field by field: most of the frames will not be used */
    run->count = run->headers = 0;
    run->bytes = 0;
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
        if ((o->type != ORDER_DELIVER && (o->type != ORDER_RUN || p->at + order_bytes(o) > b->bytes)) ||
            !same_recipients(subs, count, o))
            return;
    }
}

static inline uint8_t *put_frame(uint8_t *to, const struct frame *f, const struct sub_rec *s)
{
    if (f->headers)
        *to++ = 'H';
    memcpy(to, "MSG ", 4);
    to = put_short(to + 4, f->subject, f->subject_len);
    *to++ = ' ';
    to = put_tiny(to, s->sid, s->sid_len);
    return put_text(to, f->subject + f->subject_len, f->tail_len);
}

/* Most bytes that put_frame() may write. */
static inline uint32_t frame_most(const struct frame *f, const struct sub_rec *s)
{
    return 6 + f->subject_len + s->sid_len + PUT_SHORT_MAX + f->tail_len;
}

/* Whether the connection gets all of the run, as it is. */
static int takes_run(const struct connmgr *cm, const struct conn *c, const struct sub_rec *s,
                     const struct run *run)
{
    if (!(s->word & (SUB_ACTIVE | SUB_DYING)) || !c->served || c->dropped)
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
        const struct frame *f = &run->frames[i];
        uint32_t bytes = 5 + f->headers + f->subject_len + s->sid_len + f->tail_len, count = 1;

        while (i + count < run->count && f[count].alike)
            count++;
        trace_deliver(cm, c, (struct trace_part){.handle = f->handle, .end = end + bytes, .count = count, .bytes = bytes});
        end += (uint64_t)bytes * count;
        i += count;
    }
}

static void run_write(struct connmgr *cm, struct conn *c, const struct sub_rec *s, const struct run *run)
{
    uint8_t *from = c->write_at, *to = from;

    for (uint32_t i = 0; i < run->count; i++) {
        const struct frame *f = &run->frames[i];

        if (to == from || c->write_end - to < (ptrdiff_t)frame_most(f, s)) {
            c->write_at = to;
            c->end += (uint64_t)(to - from);
            from = to = output_reserve(cm, c, frame_most(f, s));
        }
        to = put_frame(to, f, s);
    }
    c->write_at = to;
    c->end += (uint64_t)(to - from);
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
    uint8_t *from = NULL, *to = NULL, *end = NULL;

    for (uint32_t i = 0; i < run->count; i++) {
        uint32_t most = frame_most(&run->frames[i], m->of);

        if (end - to < (ptrdiff_t)most) {
            from = to = output_share(cm, &m->shared[m->count++].block);
            end = to + JOURNAL_BLOCK_BYTES;
        }
        to = put_frame(to, &run->frames[i], m->of);
        m->shared[m->count - 1].len = (uint32_t)(to - from);
    }
}

static void made_make(struct connmgr *cm, struct made *m, const struct sub_rec *s, const struct run *run)
{
    uint8_t *to = cm->scratch;

    made_forget(cm, m);
    m->of = s;
    if (run->bytes >= SHARE_BYTES) {
        made_share(cm, m, run);
        return;
    }
    for (uint32_t i = 0; i < run->count; i++)
        to = put_frame(to, &run->frames[i], s);
    m->len = (uint32_t)(to - cm->scratch);
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
    const uint32_t *subs = order_subs(run->first);
    uint32_t count = order_recipients(run->first);
    struct made made;

    made.of = NULL; /* field by field, as above */
    made.count = 0;

    for (uint32_t i = 0; i < count; i++) {
        struct sub_rec *s = &cm->subs[subs[i]];
        struct conn *c = &cm->conns[(uint32_t)s->word];

        if (!takes_run(cm, c, s, run)) {
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
        cm->stats.messages_out += run->count;
        c->messages_out += run->count;
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

void deliver_as(struct connmgr *cm, const struct order_mode *o, uint32_t stamp)
{
    struct conn *c = deliver_recipient(cm, o->sub, stamp, o->handle);
    struct delivery d;

    if (!c)
        return;
    describe(cm, o->handle, &d);
    struct arena_entry entry = *d.entry;

    if (o->subject_len) {
        entry.subject_len = o->subject_len;
        d.subject = (const uint8_t *)o->text;
    }
    if (o->reply_len) {
        entry.reply_len = o->reply_len;
        d.reply = (const uint8_t *)o->text + o->subject_len;
    }
    d.entry = &entry;
    deliver_made(cm, c, &cm->subs[o->sub], &d);
    if (TRACE_IF(cm->trace.on))
        trace_deliver(cm, c, (struct trace_part){.handle = o->handle, .end = c->end, .count = 1});
}

/* "Nobody is listening": a status frame to the sender's own subscription. */
void deliver_no_responders(struct connmgr *cm, const struct order_no_responders *o, uint32_t stamp)
{
    struct conn *c = deliver_recipient(cm, o->sub, stamp, o->handle);
    struct delivery d;

    if (!c)
        return;
    describe(cm, o->handle, &d);
    const struct sub_rec *s = &cm->subs[o->sub];
    uint8_t *at = output_reserve(cm, c, 8 + d.entry->reply_len + s->sid_len + 32), *to = at;

    to = put_text(to, "HMSG ", 5);
    to = put_text(to, d.reply, d.entry->reply_len);
    *to++ = ' ';
    to = put_text(to, s->sid, s->sid_len);
    to = put_text(to, " 16 16\r\nNATS/1.0 503\r\n\r\n\r\n", 26);
    c->write_at = to;
    c->end += (uint64_t)(to - at);
}
