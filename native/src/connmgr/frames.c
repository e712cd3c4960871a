/* frames: what clients say becomes references for the router, or an answer.
 *
 * Everything here works past committed lengths: references appended to the ring, answers to
 * the output, entries of the chunk. input_parse (input.c) commits it all at once. What Python
 * has to decide becomes an event, and the connection waits.
 *
 * A publisher often sends many messages of one size to one subject. Frames whose control line is that
 * of the frame before are not parsed again: their messages join its reference, which becomes a run
 * (take_repeats).
 */
#include "connmgr/refer.h"

struct nats_limits frames_limits(const struct connmgr *cm, const struct conn *c)
{
    return (struct nats_limits){cm->conf.max_control_line, cm->conf.max_payload,
                                (c->options & CONN_PEDANTIC) != 0, (c->options & CONN_HEADERS) != 0};
}

/* Whether it may be a message of a mode: has headers, or a subject that begins like ours. */
static inline int may_have_mode(const uint8_t *p, const struct nats_frame *f)
{
    return f->header_len || (p[f->subject] == '_' && p[f->subject + 1] == 'm');
}

/* The rest of a message's reference when it is of a mode; else it is left as it is. */
static void add_mode(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct nats_frame *f,
                     uint64_t handle)
{
    /* Headers that lie along a chain are looked for in its first chunk only. */
    uint32_t first = ARENA_CHUNK_BYTES - (c->at + f->body);
    uint32_t headers = f->header_len < first ? f->header_len : first;
    struct ref_mode mode;

    if (headers > MODES_HEADER_MAX)
        headers = MODES_HEADER_MAX;
    int has = modes_recognise(p, f, headers, cm->now_ns, &mode);
    int ask = f->reply_len && (has || c->options & CONN_NO_RESPONDERS);
    struct refer_texts texts = {p + f->subject, p + f->reply, f->subject_len, ask ? f->reply_len : 0};
    uint8_t flags = (uint8_t)((ask ? REF_REPLY : 0) | (ask && c->options & CONN_NO_RESPONDERS ? REF_NO_RESPONDERS : 0) |
                              (c->options & CONN_NO_ECHO ? REF_NO_ECHO : 0));

    if (has)
        refer_mode(cm, c, handle, f->total_len, flags, &texts, &mode);
    else
        (void)refer_message(cm, c, handle, f->total_len, flags, &texts, 0);
}

static inline void fill_entry(const struct connmgr *cm, const struct conn *c, struct arena_entry *e,
                              const struct nats_frame *f)
{
    e->chunk = c->chunk;
    e->subject = c->at + f->subject;
    e->body = c->at + f->body;
    e->total_len = f->total_len;
    e->header_len = f->header_len;
    e->subject_len = f->subject_len;
    e->reply_len = f->reply_len;
    e->reply = f->reply_len ? (uint16_t)(f->reply - f->subject) : 0;
    e->usual = (f->flags & NATS_FLAG_USUAL) != 0;
    e->conn = c->slot;
    e->received_ns = cm->now_ns;
}

/* 1: done, 0: no entry left in this chunk. */
static int take_message(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct nats_frame *f)
{
    uint32_t n = cm->chunk_messages[c->chunk];

    if (n == ARENA_CHUNK_MESSAGES)
        return 0;
    struct arena *a = cm->pool.arena;
    uint32_t entry = c->chunk * ARENA_CHUNK_MESSAGES + n;
    uint64_t handle = arena_begin(a, c->chunk, n);

    fill_entry(cm, c, &arena_entries(a)[entry], f);
    cm->chunk_messages[c->chunk] = n + 1;
    cm->stats.messages_in++;
    if (may_have_mode(p, f)) {
        add_mode(cm, c, p, f, handle);
        return 1;
    }
    /* The router needs the reply subject only to tell a sender that nobody listens. */
    int ask = f->reply_len && c->options & CONN_NO_RESPONDERS;
    struct refer_texts texts = {p + f->subject, p + f->reply, f->subject_len, ask ? f->reply_len : 0};
    uint8_t flags = (uint8_t)((ask ? REF_REPLY | REF_NO_RESPONDERS : 0) | (c->options & CONN_NO_ECHO ? REF_NO_ECHO : 0));
    struct ref_message *r = refer_message(cm, c, handle, f->total_len, flags, &texts, 0);

    if (f->flags == NATS_FLAG_USUAL && !f->reply_len)
        cm->repeatable = r;
    return 1;
}

/* Whether the frame at `p` has the control line of the one before it, `f`, and is whole. Most that
 * have not differ in the last bytes, the end of the subject and the size: a line has eight at least. */
static inline int is_repeat(const uint8_t *p, uint32_t len, const struct nats_frame *f)
{
    const uint8_t *end = p + f->body;

    return len >= f->bytes && memcmp(end - 8, end - 8 - f->bytes, 8) == 0 && memcmp(p, p - f->bytes, f->body) == 0 && p[f->bytes - 2] == '\r' &&
           p[f->bytes - 1] == '\n';
}

/* Takes the messages behind the frame `f` that repeat its control line: they join the reference of
 * its message. Returns how many bytes they were. */
static uint32_t take_repeats(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct nats_frame *f)
{
    struct arena *a = cm->pool.arena;
    uint32_t n = cm->chunk_messages[c->chunk], first = n, bytes = (uint32_t)f->bytes, at = c->at, left = c->len;
    uint32_t base = c->chunk * ARENA_CHUNK_MESSAGES;

    for (; n < ARENA_CHUNK_MESSAGES && is_repeat(p, c->len, f); n++) {
        (void)arena_begin(a, c->chunk, n);
        fill_entry(cm, c, &arena_entries(a)[base + n], f);
        p += bytes;
        c->at += bytes;
        c->len -= bytes;
    }
    uint32_t taken = n - first;

    if (!taken) /* the chunk has no entry left */
        return 0;
    refer_join(cm->repeatable, taken, f->total_len);
    cm->chunk_messages[c->chunk] = n;
    cm->stats.messages_in += taken;
    c->in_pos += left - c->len;
    return c->at - at;
}

static void say(struct connmgr *cm, struct conn *c, const char *text)
{
    output_append(cm, c, text, (uint32_t)strlen(text));
}

static void say_error(struct connmgr *cm, struct conn *c, int error)
{
    char line[96];
    const char *text = nats_error_text(error);
    size_t len = strlen(text);

    cm->stats.refused[-error]++;
    memcpy(line, "-ERR '", 6);
    memcpy(line + 6, text, len);
    memcpy(line + 6 + len, "'\r\n", 3);
    output_append(cm, c, line, (uint32_t)len + 9);
}

static void subscribe(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct nats_frame *f)
{
    if (f->flags & NATS_FLAG_BAD_SUBJECT) {
        say_error(cm, c, NATS_E_SUBJECT);
        return;
    }
    if (subtable_find(cm, c->slot, p + f->sid, f->sid_len) == CONNMGR_NONE) {
        uint32_t sub = CONNMGR_NONE;

        if (!cm->conf.max_subscriptions || c->subs < cm->conf.max_subscriptions)
            sub = subtable_add(cm, c, p + f->sid, f->sid_len, f->queue_len == 0);
        if (sub == CONNMGR_NONE) {
            conn_end(cm, c, CLOSE_SUBSCRIPTIONS);
            return;
        }
        refer_subscribe(cm, c, sub, p + f->subject, f->subject_len, p + f->queue, f->queue_len);
    }
    if (c->options & CONN_VERBOSE)
        say(cm, c, "+OK\r\n");
}

static void unsubscribe(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct nats_frame *f)
{
    uint32_t sub = subtable_find(cm, c->slot, p + f->sid, f->sid_len);

    if (sub != CONNMGR_NONE) {
        struct sub_rec *s = &cm->subs[sub];

        uint64_t max = f->max_msgs;

        if (max)
            redo_put(&cm->redo, &s->max, max);
        /* A queue member's maximum is the router's to keep: what it has routed there already
         * went to nobody else. */
        if (max == 0 || (s->word & SUB_PLAIN && s->delivered >= max)) {
            max = 0;
            subtable_die(cm, sub);
        }
        refer_unsubscribe(cm, c->slot, sub, max);
    }
    if (c->options & CONN_VERBOSE)
        say(cm, c, "+OK\r\n");
}

/* A whole frame. 1: consumed. 0: it must wait (Python, or an entry in another chunk). */
static int handle_frame(struct connmgr *cm, struct conn *c, const uint8_t *p, const struct nats_frame *f)
{
    switch (f->op) {
    case NATS_PUB:
    case NATS_HPUB:
        if (!take_message(cm, c, p, f))
            return 0;
        if (f->flags & NATS_FLAG_BAD_SUBJECT)
            say_error(cm, c, NATS_E_PUB_SUBJECT);
        if (c->options & CONN_VERBOSE)
            say(cm, c, "+OK\r\n");
        return 1;
    case NATS_SUB:
        subscribe(cm, c, p, f);
        return 1;
    case NATS_UNSUB:
        unsubscribe(cm, c, p, f);
        return 1;
    case NATS_PING:
        /* The answer comes by way of the router, behind everything this client said. */
        refer_ping(cm, c);
        if (c->options & CONN_VERBOSE) {
            unread_set(c, UNREAD_ANSWER);
            conn_put_phase(cm, c);
        }
        return 1;
    case NATS_CONNECT: {
        struct connmgr_event *ev = connmgr_event(cm, EVENT_CONNECT, c, (int)c->options);

        if (!ev)
            return 0;
        ev->data = (const char *)p + f->args;
        ev->len = f->args_len;
        unread_set(c, UNREAD_DECISION);
        return 0;
    }
    default:
        return 1; /* PONG, +OK, INFO: having heard is all */
    }
}

/* The chained frame has arrived whole: only its end is left to check. */
int frames_parse_chain(struct connmgr *cm, struct conn *c)
{
    struct nats_limits limits = frames_limits(cm, c);
    struct nats_frame f;
    struct arena *a = cm->pool.arena;
    uint32_t chunk = c->chunk;
    uint8_t tail[2];

    if (nats_parse(input_bytes(cm, c), ARENA_CHUNK_BYTES, &limits, &f) != 0 || f.bytes != c->need)
        return NATS_E_PARSER;
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t at = c->need - 2 + i, link = chunk;

        for (; at >= ARENA_CHUNK_BYTES; at -= ARENA_CHUNK_BYTES)
            link = a->chunks[link].next - 1;
        tail[i] = arena_data(a, link)[at];
    }
    if (tail[0] != '\r' || tail[1] != '\n')
        return NATS_E_UNKNOWN_OP;
    return handle_frame(cm, c, input_bytes(cm, c), &f);
}

void frames_refuse(struct connmgr *cm, struct conn *c, int error)
{
    cm->stats.refused[-error]++;
    c->error = (int16_t)error;
    conn_end(cm, c, CLOSE_PROTOCOL);
}

int frames_parse(struct connmgr *cm, struct conn *c)
{
    struct nats_limits limits = frames_limits(cm, c);
    const uint8_t *p = input_bytes(cm, c);
    struct nats_frame f;

    while (c->len) {
        if (!refer_have_room(cm) || cm->redo.count >= REDO_PAIRS_SOFT)
            return 1;
        int whole = nats_parse(p, c->len, &limits, &f);

        if (whole < 0) {
            frames_refuse(cm, c, whole);
            return 0;
        }
        if (whole == 0) {
            c->need = (uint32_t)f.bytes;
            return 0;
        }
        cm->repeatable = NULL;
        if (!handle_frame(cm, c, p, &f))
            return !(c->unread & UNREAD_DECISION);
        p += f.bytes;
        c->at += (uint32_t)f.bytes;
        c->len -= (uint32_t)f.bytes;
        c->in_pos += f.bytes;
        c->need = 0;
        if (cm->repeatable && is_repeat(p, c->len, &f) && !(c->options & CONN_VERBOSE))
            p += take_repeats(cm, c, p, &f);
        if (c->reason || c->unread & UNREAD_ANSWER) /* it ends, or the next +OK comes after the PONG */
            return 0;
    }
    return 0;
}
