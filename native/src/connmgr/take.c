/* take: frames that clients sent become messages of the arena, references, or an answer.
 *
 * Everything here works past committed lengths: entries of the chunk, references in the ring, answers in
 * the output. input_parse (input.c) commits it all at once, and moves on in the stream by what was taken.
 * What Python has to decide becomes an event, and the connection waits.
 *
 * Messages are gathered in the step (struct taken) as long as they may go where earlier ones went; else
 * the router is asked about them (decide.h). Frames that are alike are told by the protocol as one with a
 * number of repeats: their messages are one struct taken, or one reference, a run.
 */
#include "connmgr/decide.h"

struct frame_limits take_limits(const struct connmgr *cm, const struct conn *c)
{
    return (struct frame_limits){cm->conf.max_control_line, cm->conf.max_payload,
                                 (c->options & CONN_PEDANTIC) != 0, (c->options & CONN_HEADERS) != 0,
                                 !(c->options & CONN_VERBOSE)};
}

/* Whether it may be a message of a mode: has headers, or a subject that begins like ours. */
static inline int may_have_mode(const uint8_t *p, const struct frame *f)
{
    return f->header_len || (p[f->subject] == '_' && p[f->subject + 1] == 'm');
}

/* A message that may be of a mode: the router is asked about it. */
static void refer_with_mode(struct connmgr *cm, struct conn *c, const uint8_t *p, uint32_t at, const struct frame *f,
                            uint64_t handle)
{
    /* Headers that lie along a chain are looked for in its first chunk only. */
    uint32_t first = ARENA_CHUNK_BYTES - (at + f->body);
    uint32_t headers = f->header_len < first ? f->header_len : first;
    struct ref_mode mode;
    char topics[MODE_TOPICS_BYTES];

    if (headers > MODES_HEADER_MAX)
        headers = MODES_HEADER_MAX;
    int has = modes_recognise(c->protocol, p, f, headers, cm->now_ns, &mode, topics);
    int ask = f->reply_len && (has || c->options & CONN_NO_RESPONDERS);
    struct refer_texts texts = {p + f->subject, p + f->reply, f->subject_len, ask ? f->reply_len : 0};
    uint8_t flags = (uint8_t)((ask ? REF_REPLY : 0) | (ask && c->options & CONN_NO_RESPONDERS ? REF_NO_RESPONDERS : 0) |
                              (c->options & CONN_NO_ECHO ? REF_NO_ECHO : 0));

    if (!has && decide_joins(cm, p + f->subject, f->subject_len)) {
        decide_take(cm, &(struct taken){.handle = handle, .texts = texts, .size = f->total_len, .count = 1, .flags = flags});
        return;
    }
    decide_ask(cm, c);
    if (has)
        refer_mode(cm, c, handle, f->total_len, flags, &texts, &mode, topics);
    else
        (void)refer_message(cm, c, handle, f->total_len, flags, &texts, 0);
}

static inline void fill_entry(const struct connmgr *cm, const struct conn *c, struct arena_entry *e,
                              const struct frame *f, uint32_t at)
{
    e->chunk = c->chunk;
    e->subject = at + f->subject;
    e->body = at + f->body;
    e->total_len = f->total_len;
    e->header_len = f->header_len;
    e->subject_len = f->subject_len;
    e->reply_len = f->reply_len;
    e->reply = f->reply_len ? (uint16_t)(f->reply - f->subject) : 0;
    e->usual = (f->flags & FRAME_USUAL) != 0;
    e->protocol = c->speaks;
    e->conn = c->slot;
    e->received_ns = cm->now_ns;
}

/* The entries of `repeats` messages that repeat that of the frame `f`, whose entry is before entry `n`; returns how
 * many: fewer if the chunk has no entry left. */
static uint32_t take_repeats(struct connmgr *cm, uint32_t chunk, const struct frame *f, uint32_t n, uint32_t repeats)
{
    struct arena *a = cm->port.pool.arena;
    uint32_t room = ARENA_CHUNK_MESSAGES - n, count = repeats < room ? repeats : room, bytes = (uint32_t)f->bytes;
    struct arena_entry *e = &arena_entries(a)[chunk * ARENA_CHUNK_MESSAGES + n];
    const struct arena_entry first = e[-1];

    for (uint32_t i = 0, at = bytes; i < count; i++, at += bytes) {
        (void)arena_begin(a, chunk, n + i);
        e[i] = first;
        e[i].subject = first.subject + at;
        e[i].body = first.body + at;
    }
    return count;
}

/* The router needs the reply subject only to tell a sender that nobody listens. */
static inline int asks(const struct conn *c, const struct frame *f)
{
    return f->reply_len && c->options & CONN_NO_RESPONDERS;
}

/* Takes the message of the frame at `at`, and of the `repeats` that repeat it those that one reference may
 * stand for. Returns how many: 0 if the chunk has no entry left. */
static inline __attribute__((always_inline)) uint32_t
take_messages(struct connmgr *cm, struct conn *c, const uint8_t *p, uint32_t at, const struct frame *f, uint32_t repeats)
{
    uint32_t n = cm->chunk_messages[c->chunk], count = 1;

    if (n == ARENA_CHUNK_MESSAGES)
        return 0;
    struct arena *a = cm->port.pool.arena;
    uint64_t handle = arena_begin(a, c->chunk, n);

    fill_entry(cm, c, &arena_entries(a)[c->chunk * ARENA_CHUNK_MESSAGES + n], f, at);
    if (may_have_mode(p, f)) {
        cm->chunk_messages[c->chunk] = n + 1;
        cm->stats.payload_in += f->total_len;
        refer_with_mode(cm, c, p, at, f, handle);
        return 1;
    }
    int joins = decide_joins(cm, p + f->subject, f->subject_len);

    if (!joins)
        decide_ask(cm, c);
    if (repeats) {
        uint32_t bytes = ref_bytes(f->subject_len + (asks(c, f) ? f->reply_len : 0u));
        uint32_t most = joins ? repeats : refer_most(cm, bytes, f->total_len, repeats);

        count += take_repeats(cm, c->chunk, f, n + 1, most);
    }
    cm->chunk_messages[c->chunk] = n + count;
    cm->stats.payload_in += (uint64_t)count * f->total_len;
    int ask = asks(c, f);
    struct refer_texts texts = {p + f->subject, p + f->reply, f->subject_len, ask ? f->reply_len : 0};
    uint8_t flags = (uint8_t)((ask ? REF_REPLY | REF_NO_RESPONDERS : 0) | (c->options & CONN_NO_ECHO ? REF_NO_ECHO : 0));

    if (joins) {
        decide_take(cm, &(struct taken){.handle = handle, .texts = texts, .size = f->total_len, .count = count, .flags = flags});
        return count;
    }
    struct ref_message *r = refer_message(cm, c, handle, f->total_len, flags, &texts, 0);

    if (count > 1)
        refer_join(cm, r, count - 1, f->total_len);
    return count;
}

/* The answer has no more to say than for which frame it was asked. */
static uint16_t settle_mark(uint64_t pos) { return (uint16_t)(pos % UINT16_MAX + 1); }

/* A sid is used again, and its subscription has a maximum. Whether that is reached is known when everything the client
 * said before has been routed, and what of it is for this connmgr has been delivered: the frame waits for that, as that
 * of a verbose client behind a PING does. 1: it waits. After a crash it may wait twice. */
static int settle_first(struct connmgr *cm, struct conn *c, uint32_t sub, uint32_t at)
{
    uint16_t mark = settle_mark(c->in_pos + (at - c->at));

    if ((!cm->subs[sub].max && !cm->step.limited) || c->settled == mark)
        return 0;
    decide_ask(cm, c);
    refer_ping(cm, c, mark);
    unread_set(c, UNREAD_ANSWER);
    conn_put_phase(cm, c);
    return 1;
}

/* 0: it has to wait. */
static int subscribe(struct connmgr *cm, struct conn *c, const uint8_t *p, uint32_t at, const struct frame *f)
{
    if (f->flags & FRAME_BAD_SUBJECT) {
        reply_refuse(cm, c, REFUSED_SUBJECT);
        return 1;
    }
    uint32_t before = subtable_find(cm, c->slot, p + f->sid, f->sid_len);

    if (before != CONNMGR_NONE && settle_first(cm, c, before, at))
        return 0;
    if (before == CONNMGR_NONE) {
        uint32_t sub = CONNMGR_NONE;

        if (subtable_may_add(cm, c, f->sid_len))
            sub = subtable_add(cm, c, p + f->sid, f->sid_len, f->queue_len == 0);
        if (sub == CONNMGR_NONE) {
            conn_end(cm, c, CLOSE_SUBSCRIPTIONS);
            return 1;
        }
        decide_ask(cm, c);
        refer_subscribe(cm, c, sub, p, f);
    }
    if (c->options & CONN_VERBOSE)
        reply_say(cm, c, REPLY_OK);
    return 1;
}

static void unsubscribe(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct frame *f)
{
    uint32_t sub = subtable_find(cm, c->slot, p + f->sid, f->sid_len);

    if (sub != CONNMGR_NONE) {
        struct sub_rec *s = &cm->subs[sub];

        uint64_t max = f->max_msgs;

        if (max) {
            redo_put(&cm->port.redo, &s->max, max);
            cm->step.limited = 1;
        }
        /* A queue member's maximum is the router's to keep: what it has routed there already
         * went to nobody else. */
        if (max == 0 || (s->word & SUB_PLAIN && s->delivered >= max)) {
            max = 0;
            subtable_die(cm, sub);
        }
        decide_ask(cm, c);
        refer_unsubscribe(cm, c->slot, sub, max);
    }
    if (c->options & CONN_VERBOSE)
        reply_say(cm, c, REPLY_OK);
}

/* A whole frame, and `repeats` that repeat it. Returns how many were consumed; 0 if it must wait (for Python, for the
 * router, or for an entry in another chunk). */
static __attribute__((noinline)) uint32_t take_frame(struct connmgr *cm, struct conn *c, const uint8_t *p, uint32_t at,
                                                     const struct frame *f, uint32_t repeats)
{
    uint32_t count;

    switch (f->op) {
    case FRAME_MESSAGE:
        count = take_messages(cm, c, p, at, f, repeats);
        if (!count)
            return 0;
        if (f->flags & FRAME_BAD_SUBJECT)
            reply_refuse(cm, c, REFUSED_PUB_SUBJECT);
        if (c->options & CONN_VERBOSE)
            reply_say(cm, c, REPLY_OK);
        return count;
    case FRAME_SUBSCRIBE:
        return (uint32_t)subscribe(cm, c, p, at, f);
    case FRAME_UNSUBSCRIBE:
        unsubscribe(cm, c, p, f);
        return 1;
    case FRAME_PING:
        /* The answer comes by way of the router, behind everything this client said. */
        decide_ask(cm, c);
        refer_ping(cm, c, 0);
        if (c->options & CONN_VERBOSE) {
            unread_set(c, UNREAD_ANSWER);
            conn_put_phase(cm, c);
        }
        return 1;
    case FRAME_CONNECT: {
        struct connmgr_event *ev = connmgr_event(cm, EVENT_CONNECT, c, (int)c->options);

        if (!ev)
            return 0;
        ev->data = (const char *)p + f->args;
        ev->len = f->args_len;
        unread_set(c, UNREAD_DECISION);
        return 0;
    }
    default:
        return 1; /* FRAME_NOTHING */
    }
}

void take_refuse(struct connmgr *cm, struct conn *c, int error)
{
    cm->stats.refused[-error]++;
    c->error = (int16_t)error;
    conn_end(cm, c, CLOSE_PROTOCOL);
}

/* Most frames: a message by itself, about which its sender is told nothing. Nothing is put into the redo log for it,
 * and it does not end the connection. */
static inline int is_plain(const struct frame *f)
{
    return f->op == FRAME_MESSAGE && !(f->flags & FRAME_BAD_SUBJECT) && !f->repeats;
}

uint32_t take_frames(struct connmgr *cm, struct conn *c, const struct frame *f, uint32_t count, enum take_end *ret_end)
{
    uint32_t at = c->at, told = c->options & CONN_VERBOSE;
    const uint8_t *data = arena_data(cm->port.pool.arena, c->chunk);

    *ret_end = TAKE_ROOM;
    for (const struct frame *end = f + count; f < end; f++) {
        uint32_t left = f->repeats + 1u, taken, bytes = (uint32_t)f->bytes;

        if (__builtin_expect(is_plain(f) && !told, 1)) {
            if (!refer_have_room(cm) || !take_messages(cm, c, data + at, at, f, 0))
                return at - c->at;
            at += bytes;
            continue;
        }
        do {
            if (!refer_have_room(cm) || cm->port.redo.count >= REDO_PAIRS_SOFT)
                return at - c->at;
            taken = take_frame(cm, c, data + at, at, f, left - 1);
            if (!taken) {
                if (c->unread & (UNREAD_DECISION | UNREAD_ANSWER))
                    *ret_end = TAKE_STOP;
                return at - c->at;
            }
            at += taken * bytes;
        } while (left -= taken);
        if (c->reason || c->unread & UNREAD_ANSWER) { /* it ends, or the next confirmation comes after the answer */
            *ret_end = TAKE_STOP;
            return at - c->at;
        }
    }
    *ret_end = TAKE_ALL;
    return at - c->at;
}
