/* fsck_queue: rings, inboxes, records, sequence numbers. See fsck.h.
 *
 * A queue cannot be looked into without taking what is in it. But a batch stays in the ring of its
 * sender until its slot is filled again, so what is in a queue is read there. A slot that may have
 * been filled again is counted as unreadable, and then nobody is accused of having lost a message.
 */
#include "fsck/fsck.h"
#include "shm/records.h"

struct lane { /* one queue: the ring it is filled from, the inbox it is emptied into */
    uint32_t n;          /* connmgr */
    int orders;          /* the direction: from the router */
    uint8_t from;        /* sender in the header of a batch */
    struct batch_ring *ring;           /* NULL: not taken in */
    const struct batch_inbox *inbox;   /* NULL: not taken in, then done, too */
    const uint64_t *done, *applied, *at, *routed;
    const struct fsck_queue *queue;
};

static struct lane lane_of(struct fsck *f, uint32_t n, int orders)
{
    struct port_log *p = f->ports[n];
    /* A port that was just added has no lane before the router knows it. */
    struct routing *r = f->routing && p && fsck_load(&routing_lane(f->routing, n)->orders.tail) ? f->routing : NULL;
    struct lane l = {.n = n, .orders = orders, .from = orders ? 255 : (uint8_t)n,
                     .queue = orders ? &f->orders[n] : &f->refs[n]};

    if (orders && r)
        l.ring = &routing_lane(r, n)->orders;
    if (!orders && p)
        l.ring = &p->refs;
    if (orders && p) {
        l.inbox = &p->inbox;
        l.done = &p->done;
        l.applied = &p->applied;
    }
    if (!orders && r) {
        l.inbox = &routing_lane(r, n)->inbox;
        l.done = &r->in[n].done;
        l.at = &r->in[n].at;
        l.routed = &r->in[n].routed;
    }
    return l;
}

static uint32_t port_segment(const struct fsck *f, uint32_t n)
{
    return f->ports[n] && f->ports[n]->header.kind == SEGMENT_PORT ? SEGMENT_PORT : SEGMENT_JOURNAL;
}

/* A finding names its lane by the number of the port: the router has one segment for all. */
static void add_finding(struct fsck *f, const struct lane *l, int of_receiver, uint32_t code, const uint64_t where[6])
{
    int of_router = l->orders != of_receiver;

    fsck_add_finding(f, code, of_router ? SEGMENT_ROUTING : port_segment(f, l->n), of_router ? 0 : l->n, where);
}
#define say(f, l, of_receiver, code, ...) add_finding(f, l, of_receiver, code, FSCK_ARGS((l)->n, __VA_ARGS__))

/* ---- records ---- */

/* Bytes of the order that begins like this, or 0 if there is no such order. */
static uint32_t order_size(const struct fsck *f, const struct order *o)
{
    uint32_t type = o->type & ~ORDER_MORE;
    const struct order_mode *mode = (const void *)o;
    const struct order_text *text = (const void *)o;
    const struct order_run *run = (const void *)o;
    const struct order_topic *topic = (const void *)o;

    if (type < ORDER_DELIVER || type > ORDER_LAST ||
        (o->type & ORDER_MORE && type != ORDER_DELIVER && type != ORDER_MODE && type != ORDER_TOPIC) ||
        (type == ORDER_TOPIC && topic->subject_len > BATCH_RECORD_MAX) ||
        (type == ORDER_MODE && mode->rest < ORDER_MODE_REST) ||
        (type == ORDER_TEXT && (text->written < sizeof(struct order_written) || text->written > BATCH_RECORD_MAX)) ||
        (type == ORDER_STATUS && (text->written < sizeof(struct order_said) || text->written > BATCH_RECORD_MAX)) ||
        (type == ORDER_RUN && (run->messages == 0 || run->messages > ARENA_CHUNK_MESSAGES)) ||
        o->limit > f->connmgrs)
        return 0;
    return order_bytes(o);
}

/* Bytes of text in a reference, by the lengths in its head; UINT32_MAX: there is no such reference. */
static uint32_t ref_text(const struct ref *r)
{
    const struct ref_message *m = (const void *)r;
    const struct ref_run *run = (const void *)r;
    const struct ref_subscribe *s = (const void *)r;
    const struct ref_unsubscribe *u = (const void *)r;

    switch (r->type) {
    case REF_MESSAGE:
        if (!(r->flags & REF_RUN))
            return (uint32_t)m->subject_len + m->reply_len;
        return run->messages && run->messages <= ARENA_CHUNK_MESSAGES ? run->subject_len : UINT32_MAX;
    case REF_SUBSCRIBE:
        return (uint32_t)s->subject_len + s->queue_len + s->sid_len;
    case REF_UNSUBSCRIBE:
        return u->max_len == sizeof(u->max) ? u->max_len : UINT32_MAX;
    case REF_HOLD:
        return ((const struct ref_hold *)r)->port_len;
    case REF_NAME_KEPT:
        return ((const struct ref_name_kept *)r)->asker_len;
    case REF_OPEN:
        return ((const struct ref_open *)r)->ip_len;
    case REF_READY:
        return ((const struct ref_ready *)r)->name_len;
    case REF_CLOSE:
    case REF_PING:
        return 0;
    default:
        return UINT32_MAX;
    }
}

static uint32_t ref_size(const struct ref *r)
{
    uint32_t text = ref_text(r);
    uint32_t mode = r->type == REF_MESSAGE && r->flags & REF_MODE ? (uint32_t)sizeof(struct ref_mode) : 0;

    if (text == UINT32_MAX || (r->flags & REF_RUN && r->type != REF_MESSAGE) || r->bytes < ref_bytes(text) + mode)
        return 0;
    uint32_t more = r->bytes - ref_bytes(text) - mode;

    if (more && !(mode && more <= batch_pad(MODE_TOPICS_BYTES))) /* topics; how many bytes lies behind the texts */
        return 0;
    return r->bytes;
}

/* Bytes of the record at `at`, or 0 if it is none. */
static uint32_t record_bytes(const struct fsck *f, const struct batch *b, uint32_t bytes, uint32_t at, int orders)
{
    const void *record = (const char *)b + at;
    uint32_t size;

    if (at + (orders ? ORDER_BYTES_MIN : REF_BYTES_MIN) > bytes)
        return 0;
    size = orders ? order_size(f, record) : ref_size(record);
    return size && at + size <= bytes ? size : 0;
}

/* Whether the receiver had not begun with message `i` of this record when that was looked at. */
static int untouched(const struct fsck *f, const struct lane *l, uint64_t seq, uint32_t at, uint32_t i, int in_inbox)
{
    if (!l->done)
        return 0;
    uint64_t done = fsck_load(l->done);

    if (in_inbox && l->orders)
        return done + 1 == seq && fsck_load(l->applied) < seq;
    if (in_inbox) {
        uint64_t next = fsck_load(l->at);

        return done + 1 == seq && (at > next || (at == next && i >= fsck_load(l->routed)));
    }
    return done + 1 < seq || (f->dead && done + 1 == seq && l->inbox->batch.seq != seq);
}

/* `count` messages in a row. */
static void meet(struct fsck *f, const struct lane *l, uint64_t first, uint32_t count, uint64_t seq, uint32_t at,
                 int in_inbox)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t handle = first + i;
        int alive = fsck_meet(f, handle);
        uint32_t code = alive < 0 ? FSCK_HANDLE : l->orders ? FSCK_ORDER_DEAD : FSCK_REF_DEAD;

        if (alive > 0 || !untouched(f, l, seq, at, i, in_inbox))
            continue;
        say(f, l, in_inbox, code, seq, at, handle);
    }
}

/* J6: until it is told that a slot will not be named again, the connmgr keeps it. */
static void check_named(struct fsck *f, const struct lane *l, const struct order *o, uint64_t seq, uint32_t at,
                        int in_inbox)
{
    const struct journal *j = f->journals[l->n];
    uint32_t type = o->type & ~ORDER_MORE;
    const struct order_text *text = (const void *)o;
    const uint32_t *subs;
    uint32_t count = 1;

    if (type == ORDER_DELIVER || type == ORDER_RUN) {
        count = order_recipients(o);
        subs = type == ORDER_RUN ? ((const struct order_run *)o)->subs : order_subs(o);
    } else if (type == ORDER_TEXT || type == ORDER_STATUS) {
        count = text->recipients;
        subs = text->subs;
    } else if (type == ORDER_TOPIC) {
        count = order_recipients(o);
        subs = ((const struct order_topic *)o)->subs;
    } else {
        subs = type == ORDER_MODE ? &((const struct order_mode *)o)->sub : &((const struct order_no_responders *)o)->sub;
    }
    for (uint32_t i = 0; j && i < count; i++) {
        uint32_t sub = subs[i];
        uint64_t word = sub < fsck_load(&j->subs_high) ? fsck_load(&journal_subs((struct journal *)j)[sub].word) : 0;

        if (word & (SUB_ACTIVE | SUB_DYING) || !untouched(f, l, seq, at, 0, in_inbox))
            continue;
        say(f, l, in_inbox, FSCK_ORDER_SUB, seq, at, sub);
    }
}

/* A change of a subscription that one side knows and the other does not know yet. */
static void note_change(struct fsck *f, uint32_t n, uint64_t handle)
{
    uint32_t sub = (uint32_t)handle;

    if (f->journals[n] && sub < f->journals[n]->subs)
        f->under_way[n][sub] = (uint32_t)(handle >> 32 & 0x1fffffff) + 1;
}

static void take_record(struct fsck *f, const struct lane *l, const struct batch *b, uint32_t at, uint64_t seq,
                        int in_inbox)
{
    if (!l->orders) {
        const struct ref *r = batch_ref(b, at);
        const struct ref_message *m = (const struct ref_message *)r;

        if (r->type == REF_MESSAGE)
            meet(f, l, m->handle, ref_messages(m), seq, at, in_inbox);
        else if (r->type == REF_SUBSCRIBE)
            note_change(f, l->n, ((const struct ref_subscribe *)r)->sub);
        return;
    }
    const struct order *o = batch_order(b, at);
    uint32_t type = o->type & ~ORDER_MORE;

    if (order_has_message(o))
        meet(f, l, order_handle(o), order_messages(o), seq, at, in_inbox);
    if (type == ORDER_DELIVER || type == ORDER_RUN || type == ORDER_NO_RESPONDERS || type == ORDER_MODE ||
        type == ORDER_TEXT || type == ORDER_STATUS || type == ORDER_TOPIC)
        check_named(f, l, o, seq, at, in_inbox);
    if (type == ORDER_REFUSED)
        note_change(f, l->n, ((const struct order_sub *)o)->sub);
}

/* Takes in the records of f->batch. Returns 0, or the offset of one that is none. */
static uint32_t take_records(struct fsck *f, const struct lane *l, uint32_t bytes, uint64_t seq, int in_inbox)
{
    uint32_t size;

    for (uint32_t at = BATCH_HEAD; at < bytes; at += size) {
        size = record_bytes(f, &f->batch, bytes, at, l->orders);
        if (!size)
            return at;
        take_record(f, l, &f->batch, at, seq, in_inbox);
    }
    return 0;
}

/* ---- rings ---- */

/* The batch the sender is filling, perhaps in a step that is not committed: the first after the
 * tail whose slot was not closed. The slot of the batch BATCH_RING before it is being overwritten. */
static uint64_t filling(struct batch_ring *r, uint64_t tail)
{
    uint64_t seq = tail;

    while (seq < tail + BATCH_RING && fsck_load(&batch_slot(r, seq)->seq) == seq)
        seq++;
    return seq;
}

/* One batch of a ring, committed up to `bytes` if it is the last. 0: it cannot be read any more. */
static int take_batch(struct fsck *f, const struct lane *l, uint64_t seq, uint64_t tail, uint64_t sent)
{
    const struct batch *slot = batch_slot(l->ring, seq);
    int last = seq == tail >> 16;

    memcpy(&f->batch, slot, sizeof(f->batch));
    uint32_t bytes = last ? (uint32_t)(tail & 0xffff) : f->batch.bytes;
    int head_ok = last || (f->batch.seq == seq && bytes >= BATCH_HEAD && bytes <= BATCH_BYTES &&
                           f->batch.from == l->from && f->batch.version == BATCH_VERSION);

    if (filling(l->ring, fsck_load(&l->ring->tail) >> 16) >= seq + BATCH_RING)
        return 0;
    if (!head_ok) {
        if (seq <= sent)
            return 0;
        say(f, l, 0, FSCK_BATCH_HEADER, seq, f->batch.seq, f->batch.from);
        return 1;
    }
    uint32_t bad = take_records(f, l, bytes, seq, 0);

    if (!bad)
        return 1;
    if (seq <= sent)
        return 0;
    say(f, l, 0, FSCK_RECORD, seq, bad, ((const uint8_t *)&f->batch)[bad]);
    return 1;
}

/* B2 and B3. The order of the loads makes each comparison right while both sides are at work.
 * Returns whether the ring can be walked. */
static int check_numbers(struct fsck *f, const struct lane *l, uint64_t *ret_done, uint64_t *ret_sent, uint64_t *ret_tail)
{
    uint64_t done = l->done ? fsck_load(l->done) : 0;
    uint64_t sent = fsck_load(&l->ring->sent);
    uint64_t tail = fsck_load(&l->ring->tail), seq = tail >> 16, bytes = tail & 0xffff;
    uint64_t sent_after = fsck_load(&l->ring->sent);
    uint64_t done_after = l->done ? fsck_load(l->done) : sent;

    *ret_done = l->done ? done : sent;
    *ret_sent = sent;
    *ret_tail = tail;
    if (seq == 0 || bytes < BATCH_HEAD || bytes > BATCH_BYTES) {
        say(f, l, 0, FSCK_RING_TAIL, seq, bytes);
        return 0;
    }
    if (sent >= seq) {
        say(f, l, 0, FSCK_RING_SENT, 0, 0, 0, sent, seq);
        return 0;
    }
    if (seq - sent_after > BATCH_RING && seq > sent_after) {
        say(f, l, 0, FSCK_RING_SPAN, 0, 0, 0, seq, sent_after);
        return 0;
    }
    if (l->done && done > sent + 1) {
        say(f, l, 1, FSCK_SEQ_AHEAD, 0, 0, 0, done, sent);
        return 0;
    }
    if (l->queue->known && sent > done_after && sent - done_after > l->queue->depth + 1ULL)
        say(f, l, 0, FSCK_SEQ_BEHIND, 0, 0, 0, sent, done_after);
    f->counts.unsent += seq > sent_after + 1 ? seq - 1 - sent_after : 0;
    f->counts.in_flight += sent > done_after ? sent - done_after : 0;
    return 1;
}

/* A dead instance: what was sent and not finished lies in the inbox or in the queue. */
static void check_lost(struct fsck *f, const struct lane *l, uint64_t done, uint64_t sent)
{
    uint64_t there = l->queue->messages + (l->inbox->batch.seq == done + 1);

    if (l->queue->known && sent > done && sent - done > there)
        say(f, l, 0, FSCK_SEQ_LOST, 0, 0, 0, sent - done - there, done + 1);
}

static void check_ring(struct fsck *f, const struct lane *l)
{
    uint64_t done, sent, tail, unreadable = 0;

    if (!check_numbers(f, l, &done, &sent, &tail)) {
        f->counts.unreadable++;
        return;
    }
    if (f->dead && l->inbox)
        check_lost(f, l, done, sent);
    uint64_t last = tail >> 16, first = done + 1;

    if (last - first >= BATCH_RING && last >= first) {
        unreadable = last - first - (BATCH_RING - 1);
        first = last - (BATCH_RING - 1);
    }
    for (uint64_t seq = first; seq <= last; seq++)
        unreadable += !take_batch(f, l, seq, tail, sent);
    if (!l->orders)
        f->unreadable_refs[l->n] = unreadable;
    f->counts.unreadable += unreadable;
}

/* ---- inboxes ---- */

static void check_place(struct fsck *f, const struct lane *l, uint64_t done, int pending)
{
    const struct routing_in *in = &f->routing->in[l->n];
    uint64_t at = fsck_load(&in->at), progress = fsck_load(&in->progress), found = BATCH_HEAD;
    uint64_t routed = fsck_load(&in->routed);
    uint32_t size;

    while (pending && found < at && (size = record_bytes(f, &f->batch, f->batch.bytes, (uint32_t)found, 0)))
        found += size;
    const struct ref_message *first = (const struct ref_message *)batch_ref(&f->batch, (uint32_t)found);
    int first_is_message = pending && found < f->batch.bytes && first->type == REF_MESSAGE;

    if (fsck_load(&in->done) != done || fsck_load(&in->at) != at || fsck_load(&in->routed) != routed)
        return;
    if ((at && (!pending || found != at)) || (routed && (!first_is_message || routed >= ref_messages(first))))
        say(f, l, 1, FSCK_IN_AT, at, done);
    if (progress && !first_is_message)
        say(f, l, 1, FSCK_IN_PROGRESS, progress, done);
}

static void check_inbox(struct fsck *f, const struct lane *l)
{
    uint64_t done = fsck_load(l->done), seq = fsck_load(&l->inbox->batch.seq);
    int pending = seq == done + 1;

    memcpy(&f->batch, &l->inbox->batch, sizeof(f->batch));
    if (fsck_load(l->done) != done || fsck_load(&l->inbox->batch.seq) != seq)
        return; /* it goes on meanwhile; the same records were read in the ring */
    if (seq > done + 1)
        say(f, l, 1, FSCK_INBOX_GAP, seq, done);
    if (pending) {
        uint32_t bad = 0, bytes = f->batch.bytes;
        int head_ok = bytes >= BATCH_HEAD && bytes <= BATCH_BYTES && f->batch.from == l->from &&
                      f->batch.version == BATCH_VERSION;

        if (head_ok)
            bad = take_records(f, l, bytes, seq, 1);
        if (!head_ok || bad) {
            say(f, l, 1, FSCK_INBOX_BATCH, seq, bad, ((const uint8_t *)&f->batch)[bad]);
            return;
        }
    }
    if (!l->orders)
        check_place(f, l, done, pending);
}

/* P1, and the list of recipients that goes on in the next batch. */
static void check_applied(struct fsck *f, uint32_t n)
{
    const struct port_log *p = f->ports[n];
    uint64_t done = fsck_load(&p->done), applied = fsck_load(&p->applied);
    uint64_t done_after = fsck_load(&p->done), seq = fsck_load(&p->inbox.batch.seq);

    if (applied < done || applied > done_after + 1)
        fsck_say(f, FSCK_APPLIED, port_segment(f, n), n, 0, 0, 0, 0, applied, done_after);
    else if (applied == done_after + 1 && seq != applied && fsck_load(&p->done) == done_after)
        fsck_say(f, FSCK_APPLIED_INBOX, port_segment(f, n), n, applied, seq);
    for (uint32_t source = 0; source < PORTS_MAX; source++) {
        uint64_t open = fsck_load(&p->open_handle[source]);

        if (open && fsck_meet(f, open) <= 0 && fsck_load(&p->open_handle[source]) == open)
            fsck_say(f, FSCK_OPEN_HANDLE, port_segment(f, n), n, open);
    }
}

static void check_lane(struct fsck *f, uint32_t n, int orders)
{
    struct lane l = lane_of(f, n, orders);

    if (l.ring)
        check_ring(f, &l);
    if (l.inbox)
        check_inbox(f, &l);
}

/* ---- what was set aside (R7) ---- */

/* The entry at `at`; its bytes, or 0 if it is none. */
static uint64_t take_entry(struct fsck *f, uint32_t n, const struct aside_entry *e, uint64_t left)
{
    uint64_t bytes = fsck_load(&e->in.done), at = fsck_load(&e->in.at), routed = fsck_load(&e->in.routed);

    if (bytes < ROUTING_ASIDE_UNIT || bytes % ROUTING_ASIDE_UNIT || bytes > left)
        return 0;
    if (at != ASIDE_AT) /* done, or only there to fill the ring */
        return bytes;
    if (bytes > sizeof(*e) + BATCH_BYTES)
        return 0;
    memcpy((char *)&f->batch + BATCH_HEAD, e->ref, bytes - sizeof(*e) < BATCH_RECORD_MAX ? bytes - sizeof(*e) : BATCH_RECORD_MAX);
    const struct ref *r = batch_ref(&f->batch, BATCH_HEAD);
    const struct ref_message *m = (const struct ref_message *)r;
    uint32_t size = ref_size(r);

    if (!size || sizeof(*e) + size > bytes)
        return 0;
    for (uint64_t i = routed; r->type == REF_MESSAGE && i < ref_messages(m); i++)
        (void)fsck_meet(f, m->handle + i);
    if (r->type == REF_SUBSCRIBE)
        note_change(f, n, ((const struct ref_subscribe *)r)->sub);
    return bytes;
}

static void check_aside(struct fsck *f, uint32_t n)
{
    const struct routing_aside *a = routing_aside(f->routing, n);
    struct lane l = lane_of(f, n, 0);
    uint64_t head = fsck_load(&a->head), tail = fsck_load(&a->tail), bytes;

    if (tail < head || tail - head > ROUTING_ASIDE_BYTES || head % ROUTING_ASIDE_UNIT || tail % ROUTING_ASIDE_UNIT) {
        say(f, &l, 1, FSCK_ASIDE, head, tail);
        return;
    }
    for (uint64_t at = head; at < tail; at += bytes) {
        uint64_t place = at % ROUTING_ASIDE_BYTES, end = ROUTING_ASIDE_BYTES - place;
        const struct aside_entry *e = (const struct aside_entry *)(a->bytes + place);

        bytes = take_entry(f, n, e, end < tail - at ? end : tail - at);
        if (bytes)
            continue;
        if (fsck_load(&a->head) <= at) /* else it is done, and its place was used again */
            say(f, &l, 1, FSCK_ASIDE_ENTRY, at, fsck_load(&e->in.done), fsck_load(&e->in.at));
        return;
    }
}

void fsck_refs(struct fsck *f, uint32_t n)
{
    check_lane(f, n, 0);
    if (f->routing && n < f->routing->ports)
        check_aside(f, n);
}

void fsck_orders(struct fsck *f, uint32_t n)
{
    check_lane(f, n, 1);
    if (f->ports[n])
        check_applied(f, n);
}
