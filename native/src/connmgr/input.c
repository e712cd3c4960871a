/* input: bytes from clients, received in place, become references for the router.
 *
 * A connection's unparsed bytes lie in the arena (J2). Most connections share one open chunk:
 * what one of them leaves unfinished is copied behind the next read of the same connection. A
 * frame larger than CONNMGR_BULK_BYTES gets a chunk of its own, one larger than a chunk gets a
 * chain of chunks, reserved whole before more of it is read: so what has been begun can be
 * finished, and large messages cannot starve small ones.
 *
 * Bytes of frames that are begun and have no chunk of their own are counted (cm->begun). Past
 * cm->begun_max no new frame is begun, and begun ones are read to their end and no further, so
 * there is always room to finish one. Who finds no room waits in a list (stalled.c). Why nobody
 * can wait for ever is in ../docs/pressure.md.
 *
 * The step: everything a read brought, up to its last whole frame, is committed at once:
 * references in the ring, answers in the output, the subscription words, the entries given
 * out, and the position in the stream (input_commit).
 */
#include "connmgr/decide.h"
#include "base/crash.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

static void store_buffer(struct connmgr *cm, struct conn *c)
{
    cm->recs[c->slot].buffer = (c->chunk + 1ULL) << 32 | c->at; /* "conn.buffer" */
}

uint8_t *input_bytes(struct connmgr *cm, const struct conn *c)
{
    return arena_data(cm->port.pool.arena, c->chunk) + c->at;
}

/* Counts what the connection has begun in chunks it shares. */
static void count_begun(struct connmgr *cm, struct conn *c)
{
    uint32_t now = c->chunk == CONNMGR_NONE || c->own_chunk ? 0 : c->len;

    cm->begun += now;
    cm->begun -= c->begun;
    c->begun = now;
}

void input_drop(struct connmgr *cm, struct conn *c)
{
    uint32_t chunk = c->chunk;

    if (chunk == CONNMGR_NONE)
        return;
    c->chunk = CONNMGR_NONE;
    c->len = c->need = 0;
    c->chained = 0;
    count_begun(cm, c);
    if (c->own_chunk) {
        unfinished_own(cm, c, 0);
        arena_close(&cm->port.pool, chunk);
    }
    arena_unhold(&cm->port.pool, chunk);
}

/* A chain is made for a frame whose length is known: it is read off its control line again. */
static uint32_t recover_need(struct connmgr *cm, const struct conn *c, uint32_t chunk, uint64_t len)
{
    struct frame_limits limits = take_limits(cm, c);
    struct frame f[2];
    uint64_t first = len < ARENA_CHUNK_BYTES ? len : ARENA_CHUNK_BYTES;
    int status;

    if (c->protocol->parse(arena_data(cm->port.pool.arena, chunk), first, &limits, f, 1, &status) != 0 || status != 0 ||
        f->bytes <= ARENA_CHUNK_BYTES || f->bytes < len)
        return 0;
    return (uint32_t)f->bytes;
}

/* After a crash: how much lies unparsed follows from what the kernel says was taken (J2). What is
 * found must be able to be that: else nothing is touched, as it may be somebody else's by now. */
int input_recover(struct connmgr *cm, struct conn *c, uint64_t taken)
{
    const struct conn_rec *r = &cm->recs[c->slot];
    const struct arena *a = cm->port.pool.arena;
    uint32_t chunk = (uint32_t)(r->buffer >> 32) - 1, at = (uint32_t)r->buffer, need = 0;

    if (taken == r->in_pos)
        return 0;
    if (taken < r->in_pos || chunk >= a->chunk_count)
        return -EBADMSG;
    uint64_t len = taken - r->in_pos;
    uint32_t state = atomic_load(&a->chunks[chunk].state);
    int chained = a->chunks[chunk].next != 0;

    if (state != CHUNK_OPEN && state != CHUNK_CLOSED)
        return -EBADMSG;
    if (chained && (at || !(need = recover_need(cm, c, chunk, len))))
        return -EBADMSG;
    if (!chained && at + len > ARENA_CHUNK_BYTES)
        return -EBADMSG;
    c->chunk = chunk;
    c->at = at;
    c->len = (uint32_t)len;
    c->need = need;
    c->chained = (uint8_t)chained;
    unfinished_own(cm, c, chained);
    count_begun(cm, c);
    arena_hold(&cm->port.pool, chunk);
    return 0;
}

/* What it said meanwhile is looked at when its turn in the list has come. */
void input_wake(struct connmgr *cm, struct conn *c)
{
    if (!c->unread && c->len)
        stalled_add(cm, c);
}

/* Moves the unparsed bytes to (chunk, at), where the caller knows there is room. */
static void move_to(struct connmgr *cm, struct conn *c, uint32_t chunk, uint32_t at, int own)
{
    uint32_t old = c->chunk, old_own = c->own_chunk;

    if (c->len)
        memcpy(arena_data(cm->port.pool.arena, chunk) + at, input_bytes(cm, c), c->len);
    arena_hold(&cm->port.pool, chunk);
    c->chunk = chunk;
    c->at = at;
    unfinished_own(cm, c, own);
    count_begun(cm, c);
    CRASH(INPUT_MOVE);
    store_buffer(cm, c);
    CRASH(INPUT_BUFFER);
    if (old == CONNMGR_NONE)
        return;
    if (old_own)
        arena_close(&cm->port.pool, old);
    arena_unhold(&cm->port.pool, old);
}

static uint32_t open_chunk(struct connmgr *cm)
{
    uint32_t chunk = arena_take(&cm->port.pool);

    if (chunk != ARENA_NONE)
        cm->chunk_messages[chunk] = 0;
    return chunk;
}

/* Chunks of its own that the frame at the beginning of the buffer will take. */
static uint32_t chunks_for(const struct conn *c)
{
    return (c->need + ARENA_CHUNK_BYTES - 1) / ARENA_CHUNK_BYTES;
}

/* Large frames leave chunks to small ones, and go one after the other. But one of them may always
 * have what there is: else those that wait for each other's chunks would wait for ever. */
static int large_may_take(struct connmgr *cm, uint32_t count)
{
    if (!cm->retrying && cm->stalled[STALLED_LARGE].first != CONNMGR_NONE)
        return 0;
    return arena_available(&cm->port.pool) >= count + (cm->bulk ? CONNMGR_CHUNKS_RESERVED : 0);
}

/* A chain long enough for the whole frame, with the bytes so far at its start. */
static int make_chain(struct connmgr *cm, struct conn *c)
{
    uint32_t count = chunks_for(c), last;

    if (!large_may_take(cm, count))
        return 0;
    uint32_t first = last = open_chunk(cm);
    for (uint32_t i = 1; i < count; i++)
        last = arena_extend(&cm->port.pool, last);
    CRASH(CHAIN_MADE);
    move_to(cm, c, first, 0, 1);
    c->chained = 1;
    return 1;
}

/* A chunk for this connection alone. */
static int make_own(struct connmgr *cm, struct conn *c)
{
    if (!large_may_take(cm, 1))
        return 0;
    move_to(cm, c, open_chunk(cm), 0, 1);
    return 1;
}

/* Puts the connection at the end of the shared chunk, a new one if there is not room for `want`
 * bytes and more than `kept` chunks are free. */
static int make_shared(struct connmgr *cm, struct conn *c, uint32_t want, uint32_t kept)
{
    if (cm->fill_chunk == CONNMGR_NONE || ARENA_CHUNK_BYTES - cm->fill_at < want ||
        cm->chunk_messages[cm->fill_chunk] >= ARENA_CHUNK_MESSAGES) {
        uint32_t old = cm->fill_chunk, fresh;

        if (old != CONNMGR_NONE) { /* first give the old one back: it may be the next one */
            cm->fill_chunk = CONNMGR_NONE;
            arena_close(&cm->port.pool, old);
        }
        fresh = cm->port.pool.free_count > kept || arena_available(&cm->port.pool) > kept
                    ? open_chunk(cm) : ARENA_NONE;
        if (fresh == ARENA_NONE)
            return 0;
        cm->fill_chunk = fresh;
        cm->fill_at = 0;
    }
    move_to(cm, c, cm->fill_chunk, cm->fill_at, 0);
    cm->fill_at += c->len;
    return 1;
}

/* Chunks that a small frame must leave. One that is begun leaves what compaction needs. A new one
 * also leaves the first large frame its turn: small ones could go on for ever. */
static uint32_t kept_for_others(const struct connmgr *cm, const struct conn *c)
{
    uint32_t large = cm->stalled[STALLED_LARGE].first;

    if (c->len || cm->bulk || large == CONNMGR_NONE)
        return CONNMGR_CHUNKS_COMPACT;
    return CONNMGR_CHUNKS_COMPACT + chunks_for(&cm->conns[large]);
}

int input_pack(struct connmgr *cm, struct conn *c)
{
    if (!make_shared(cm, c, c->len, 0))
        return 0;
    c->chained = 0; /* all of it lies in one piece: what had a chain has little so far */
    return 1;
}

/* Whether a new frame may be begun. */
int input_may_begin(const struct connmgr *cm)
{
    return cm->begun + CONNMGR_RECV_MAX <= cm->begun_max;
}

/* Room below which a chunk counts as full. Everyone is to get a whole quantum, or those who come
 * at the end of a chunk get less than their share; but not if that is a waste of few chunks. */
static uint32_t least_room(const struct connmgr *cm)
{
    return cm->port.pool.free_count >= CONNMGR_CHUNKS_FEW ? CONNMGR_RECV_MAX : CONNMGR_RECV_MIN;
}

/* Finds where the next bytes of the connection go. 0: nowhere now. */
int input_place(struct connmgr *cm, struct conn *c)
{
    uint32_t least = least_room(cm), want = c->need > c->len + least ? c->need : c->len + least;

    if (c->chained)
        return 1;
    if (c->need > ARENA_CHUNK_BYTES)
        return make_chain(cm, c);
    if (c->own_chunk) {
        uint32_t end = c->at + c->len;

        if (c->len && c->need && c->at + c->need <= ARENA_CHUNK_BYTES &&
            cm->chunk_messages[c->chunk] < ARENA_CHUNK_MESSAGES)
            return 1;
        if (!c->need && ARENA_CHUNK_BYTES - end >= CONNMGR_RECV_MIN &&
            cm->chunk_messages[c->chunk] < ARENA_CHUNK_MESSAGES)
            return 1;
    }
    if (c->need > CONNMGR_BULK_BYTES)
        return make_own(cm, c);
    if (c->len && !c->own_chunk && c->chunk == cm->fill_chunk && c->at + c->len == cm->fill_at &&
        ARENA_CHUNK_BYTES - cm->fill_at >= least &&
        c->at + c->need <= ARENA_CHUNK_BYTES &&
        cm->chunk_messages[c->chunk] < ARENA_CHUNK_MESSAGES)
        return 1;
    return make_shared(cm, c, want, kept_for_others(cm, c));
}

/* recv behind the bytes a chained frame has so far, never past its end. */
static ssize_t recv_chain(struct connmgr *cm, struct conn *c)
{
    struct arena *a = cm->port.pool.arena;
    struct iovec iov[4];
    uint32_t at = c->len, left = c->need - c->len, chunk = c->chunk;
    int count = 0;

    if (left > CONNMGR_RECV_MAX)
        left = CONNMGR_RECV_MAX;

    for (; at >= ARENA_CHUNK_BYTES; at -= ARENA_CHUNK_BYTES)
        chunk = a->chunks[chunk].next - 1;
    while (left && count < 4) {
        uint32_t part = ARENA_CHUNK_BYTES - at < left ? ARENA_CHUNK_BYTES - at : left;

        iov[count].iov_base = arena_data(a, chunk) + at;
        iov[count++].iov_len = part;
        left -= part;
        at = 0;
        if (left)
            chunk = a->chunks[chunk].next - 1;
    }
    return streams_receive(cm, c, iov, count);
}

static ssize_t receive(struct connmgr *cm, struct conn *c)
{
    if (c->chained)
        return recv_chain(cm, c);
    uint32_t room = ARENA_CHUNK_BYTES - c->at - c->len, most = CONNMGR_RECV_MAX;

    /* A large frame is received to its end and no further: nobody keeps a chunk of its own for
     * the beginning of another frame. Nor does anyone begin one while too much is begun; of a
     * control line that is not whole the end is not known, so little of it is taken at once. */
    if (c->len && (c->own_chunk || !input_may_begin(cm)))
        most = c->need > c->len ? c->need - c->len : CONNMGR_RECV_LINE;
    if (most > CONNMGR_RECV_MAX)
        most = CONNMGR_RECV_MAX;
    struct iovec iov = {.iov_base = input_bytes(cm, c) + c->len, .iov_len = room < most ? room : most};

    return streams_receive(cm, c, &iov, 1);
}

static void drain_discarded(struct connmgr *cm, struct conn *c)
{
    ssize_t got;

    do
        got = recv(c->fd, cm->scratch, CONNMGR_RECV_MAX, MSG_DONTWAIT);
    while (got > 0);
    if (got == 0 || (errno != EAGAIN && errno != EINTR))
        conn_end(cm, c, c->reason);
}

/* One read of one connection, if there is room for it. */
void input_read(struct connmgr *cm, struct conn *c)
{
    if (c->discarding) {
        drain_discarded(cm, c);
        return;
    }
    if (c->unread) {
        unread_seen(cm, c);
        return;
    }
    if ((c->len == 0 && (!input_may_begin(cm) || cm->stalled[STALLED_FRESH].first != CONNMGR_NONE)) ||
        !input_place(cm, c)) {
        stalled_add(cm, c);
        return;
    }
    input_receive(cm, c);
}

/* A pass ends when a connection comes up for the second time; the router counts them. */
static void count_pass(struct connmgr *cm, struct conn *c)
{
    if (c->pass == cm->pass) {
        cm->pass++;
        cm->port.refs.passes++;
    }
    c->pass = cm->pass;
}

void input_receive(struct connmgr *cm, struct conn *c)
{
    uint32_t before = cm->fill_at, chunk = c->chunk, kept = cm->chunk_messages[chunk];
    int shared = c->chunk == cm->fill_chunk;
    ssize_t got = receive(cm, c);

    if (got <= 0) {
        if (c->len == 0)
            input_drop(cm, c);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (got == 0)
            conn_finish(cm, c);
        else
            conn_end(cm, c, CLOSE_READ_ERROR);
        return;
    }
    CRASH(INPUT_RECEIVED);
    if (c->chained)
        CRASH(CHAIN_RECEIVED);
    cm->stats.recvs++;
    count_pass(cm, c);
    cm->stats.bytes_in += (uint64_t)got;
    if (TRACE_IF(cm->trace.on))
        cm->now_ns = clock_ns();
    c->len += (uint32_t)got;
    c->heard_ns = cm->now_ns;
    c->pings = 0;
    if (c->name_asked)
        names_heard(cm, c);
    cm->large_reads += got >= CONNMGR_RECV_MIN;
    if (shared)
        cm->fill_at += (uint32_t)got;
    uint64_t messages = cm->stats.messages_in;
    input_parse(cm, c);
    if (cm->conf.max_messages_s || cm->conf.max_bytes_s)
        unread_charge(cm, c, cm->stats.messages_in - messages, (uint64_t)got);
    /* Nothing of it was kept: the next read may use the same bytes. */
    if (shared && cm->chunk_messages[chunk] == kept && c->chunk == CONNMGR_NONE &&
        cm->fill_at == before + (uint32_t)got)
        cm->fill_at = before;
}

void input_commit(struct connmgr *cm, struct conn *c)
{
    struct conn_rec *r = &cm->recs[c->slot];

    if (r->in_pos != c->in_pos) {
        redo_put(&cm->port.redo, &r->in_pos, c->in_pos);
        if (c->chunk != CONNMGR_NONE)
            redo_put(&cm->port.redo, &r->buffer, (c->chunk + 1ULL) << 32 | c->at);
    }
    output_put(cm);
    batch_out_put(&cm->port.refs, &cm->port.redo);
    redo_commit(&cm->port.redo);
}

void input_move_on(struct conn *c, uint32_t bytes)
{
    c->at += bytes;
    c->len -= bytes;
    c->in_pos += bytes;
    c->need = 0;
}

/* Frames that lie in one piece, as many as are whole and can be taken. 1: what is left waits for room. */
static int parse_frames(struct connmgr *cm, struct conn *c)
{
    struct frame_limits limits = take_limits(cm, c);
    struct frame frames[PROTOCOL_FRAMES + 1];
    enum take_end end = TAKE_ALL;
    int status = 1;

    while (status == 1 && c->len) {
        uint32_t count = c->protocol->parse(input_bytes(cm, c), c->len, &limits, frames, PROTOCOL_FRAMES, &status);

        input_move_on(c, take_frames(cm, c, frames, count, &end));
        if (end != TAKE_ALL)
            break;
        if (status < 0)
            take_refuse(cm, c, status);
        else if (status == 0)
            c->need = (uint32_t)frames[count].bytes;
    }
    return end == TAKE_ROOM;
}

/* Whether a chained frame that has arrived whole ends as its protocol says. */
static int chain_ends(const struct connmgr *cm, const struct conn *c)
{
    struct arena *a = cm->port.pool.arena;
    const struct protocol *protocol = c->protocol;

    for (uint32_t i = 0; i < protocol->end_len; i++) {
        uint32_t at = c->need - protocol->end_len + i, link = c->chunk;

        for (; at >= ARENA_CHUNK_BYTES; at -= ARENA_CHUNK_BYTES)
            link = a->chunks[link].next - 1;
        if (arena_data(a, link)[at] != (uint8_t)protocol->end[i])
            return 0;
    }
    return 1;
}

/* The same for a frame along a chain, which has arrived whole. */
static int parse_chain(struct connmgr *cm, struct conn *c)
{
    struct frame_limits limits = take_limits(cm, c);
    enum take_end end = TAKE_ALL;
    struct frame f[2];
    int status;

    if (c->protocol->parse(input_bytes(cm, c), ARENA_CHUNK_BYTES, &limits, f, 1, &status) != 0 || status != 0 ||
        f->bytes != c->need) {
        take_refuse(cm, c, -REFUSED_PARSER);
    } else if (!chain_ends(cm, c)) {
        take_refuse(cm, c, -REFUSED_UNKNOWN_OP);
    } else if (take_frames(cm, c, f, 1, &end)) {
        c->in_pos += c->need;
        c->len = 0;
    }
    return end == TAKE_ROOM;
}

/* Parses what is buffered and commits it. What must wait for room goes to the list of those that do. */
void input_parse(struct connmgr *cm, struct conn *c)
{
    uint32_t chunk = c->chunk, first = cm->chunk_messages[chunk];

    count_begun(cm, c);
    if (c->unread & UNREAD_FRAMES || (c->chained && c->len < c->need))
        return;
    cm->in_step = 1;
    decide_begin(cm, c);
    int wait = c->chained ? parse_chain(cm, c) : parse_frames(cm, c);

    CRASH(INPUT_PARSED);
    if (c->chained)
        CRASH(CHAIN_WHOLE);
    decide_end(cm, c, chunk, first);
    if (c->reason) /* behind what was delivered to it in this step */
        conn_tell_ending(cm);
    input_commit(cm, c);
    cm->in_step = 0;
    CRASH(INPUT_COMMITTED);
    if (c->len == 0)
        input_drop(cm, c);
    count_begun(cm, c);
    if (c->reason) {
        conn_settle_ending(cm);
    } else if (wait && !(c->unread & UNREAD_FRAMES)) {
        cm->stalled_ring = 1;
        stalled_add(cm, c);
    }
}
