/* streams: receiving, sending, shutting and finding the place again, for every transport (transport.h).
 *
 * A connection without envelopes has one stream: what the kernel counts is what the protocol reads, and bytes
 * go straight between sockets and shared memory. One with envelopes has two, and this maps one to the
 * other, by words of its record (journal.h):
 *
 * Inbound (J2). Raw bytes are looked at in the kernel (MSG_PEEK), and envelopes are opened into the arena,
 * right behind the unparsed bytes. The beginning of one that is not whole is copied to blocks of the
 * journal, its *stash*. One step commits how far that came in both streams, and the stash ("in_raw",
 * "in_number", "in_place", "in_plain", "in_end", "in_stash"); then the kernel is made to drop the raw bytes. A crash
 * before the commit leaves everything in the kernel; one after it finds the kernel's count behind in_end,
 * and drops the rest. An envelope of which there is room for a part only stays in the kernel until all
 * of it was taken. Nothing else does: a kernel that keeps part of what it received counts it as a whole,
 * and may have no room for the rest of the envelope.
 *
 * Outbound (J3). A *flight* is up to FLIGHT_MAX pending plain bytes. One step fixes it ("out_raw",
 * "out_number", "out_place", "out_len"); it is cut into envelopes of plain_max bytes, the last one shorter.
 * Only then are they sealed, in private memory, and given to the kernel from the byte its count names. The
 * plain bytes are committed output: they stay listed, and bodies in the arena stay alive, until the kernel has
 * all of the flight. So a successor seals the same envelopes again. Bodies are not written from the
 * arena without a copy, as they are in a plain stream: sealing is the copy.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"

#include <errno.h>
#include <sys/socket.h>

#define FLIGHT_MAX (4 * TRANSPORT_PLAIN_MAX)
#define PEEK_MAX (4 * (TRANSPORT_PLAIN_MAX + TRANSPORT_MORE_MAX))
/* The smallest envelopes that a flight is cut into. */
#define FLIGHT_ENVELOPES (FLIGHT_MAX / STREAM_ENVELOPE_MIN + 1)

uint64_t streams_scratch_bytes(void)
{
    return PEEK_MAX + TRANSPORT_PLAIN_MAX + FLIGHT_MAX + FLIGHT_ENVELOPES * (uint64_t)TRANSPORT_MORE_MAX;
}
static uint8_t *peeked(struct connmgr *cm) { return cm->raw; }
static uint8_t *one_plain(struct connmgr *cm) { return cm->raw + PEEK_MAX; }
static uint8_t *sealed(struct connmgr *cm) { return one_plain(cm) + TRANSPORT_PLAIN_MAX; }

/* ---- inbound ---- */

/* Where plain bytes go: pieces in a row. */
struct room {
    struct iovec *iov;
    int count;
    uint64_t left;
};

static void put(struct room *to, const uint8_t *from, uint32_t len)
{
    to->left -= len;
    while (len) {
        uint32_t part = to->iov->iov_len < len ? (uint32_t)to->iov->iov_len : len;

        memcpy(to->iov->iov_base, from, part);
        to->iov->iov_base = (uint8_t *)to->iov->iov_base + part;
        to->iov->iov_len -= part;
        from += part;
        len -= part;
        if (!to->iov->iov_len)
            to->iov++;
    }
}

/* Makes the kernel drop raw bytes that were opened. */
static int drop_raw(int fd, uint64_t bytes)
{
    while (bytes) {
        ssize_t got = recv(fd, NULL, bytes, MSG_TRUNC | MSG_DONTWAIT);

        if (got == 0 || (got < 0 && errno != EINTR))
            return -EBADMSG;
        bytes -= got > 0 ? (uint64_t)got : 0;
    }
    return 0;
}

/* ---- the stash: the beginning of an envelope ---- */

_Static_assert(TRANSPORT_PLAIN_MAX + TRANSPORT_MORE_MAX <= 2 * JOURNAL_BLOCK_BYTES, "it fits two blocks");

static uint32_t stash_block(uint64_t word, int i) { return (uint32_t)(word >> (32 * i)) - 1; }

static uint32_t read_stash(struct connmgr *cm, const struct conn_rec *r, uint8_t *to)
{
    uint32_t len = (uint32_t)(r->in_end - r->in_raw), first = len < JOURNAL_BLOCK_BYTES ? len : JOURNAL_BLOCK_BYTES;

    if (first)
        memcpy(to, journal_block(cm->journal, stash_block(r->in_stash, 0)), first);
    if (len > first)
        memcpy(to + first, journal_block(cm->journal, stash_block(r->in_stash, 1)), len - first);
    return len;
}

/* A new stash with these bytes; its word. */
static uint64_t make_stash(struct connmgr *cm, const uint8_t *from, uint32_t len)
{
    uint64_t word = 0;

    for (int i = 0; len; i++) {
        uint32_t part = len < JOURNAL_BLOCK_BYTES ? len : JOURNAL_BLOCK_BYTES, block = output_take_block(cm);

        memcpy(journal_block(cm->journal, block), from, part);
        word |= (block + 1ULL) << (32 * i);
        from += part;
        len -= part;
    }
    return word;
}

static void free_stash(struct connmgr *cm, uint64_t word)
{
    for (int i = 0; i < 2; i++)
        if ((uint32_t)(word >> (32 * i)))
            output_free_block(cm, stash_block(word, i));
}

void streams_forget(struct connmgr *cm, struct conn *c)
{
    free_stash(cm, c->stash);
    c->stash = 0;
}

void streams_recover(struct connmgr *cm, struct conn *c)
{
    c->stash = conn_is_heard(c) ? cm->recs[c->slot].in_stash : 0;
    for (int i = 0; i < 2; i++)
        if ((uint32_t)(c->stash >> (32 * i)))
            cm->block_users[stash_block(c->stash, i)]++;
}

/* ---- receiving ---- */

struct opening { /* how far it came: the words of the record */
    uint64_t raw, number, place, plain;
    uint32_t at; /* in what was looked at */
    int partial; /* an envelope that is not whole is next */
};

/* Opens envelopes while there is room. 0, or -1: what comes is none. */
static int open_all(struct connmgr *cm, const struct conn *c, uint32_t there, struct opening *o, struct room to)
{
    while (o->at < there) {
        uint32_t len;
        int took = c->transport->open(NULL, o->number, peeked(cm) + o->at, there - o->at, one_plain(cm), &len);

        if (took < 0)
            return -1;
        if (took == 0) {
            o->partial = 1;
            return 0;
        }
        uint32_t skip = (uint32_t)(o->plain - o->place), rest = len - skip; /* part of it was taken before */

        if (rest > to.left) {
            if (o->at == 0) { /* else it is for the next time */
                o->plain += to.left;
                put(&to, one_plain(cm) + skip, (uint32_t)to.left);
            }
            return 0;
        }
        put(&to, one_plain(cm) + skip, rest);
        o->at += (uint32_t)took;
        o->raw += (uint32_t)took;
        o->number++;
        o->place = o->plain = o->place + len;
    }
    return 0;
}

static ssize_t receive_envelopes(struct connmgr *cm, struct conn *c, struct room to)
{
    struct conn_rec *r = &cm->recs[c->slot];
    struct opening o = {.raw = r->in_raw, .number = r->in_number, .place = r->in_place, .plain = r->in_plain};
    uint32_t stashed = read_stash(cm, r, peeked(cm));
    ssize_t got = recv(c->fd, peeked(cm) + stashed, PEEK_MAX - stashed, MSG_PEEK | MSG_DONTWAIT);

    if (got <= 0)
        return got;
    uint32_t there = stashed + (uint32_t)got;

    if (open_all(cm, c, there, &o, to)) {
        errno = EBADMSG;
        return -1;
    }
    if (o.partial && output_blocks_left(cm) < 2) {
        errno = EAGAIN;
        return -1;
    }
    uint64_t end = r->in_end, plain = o.plain - r->in_plain, old = c->stash;

    if (o.partial)
        c->stash = make_stash(cm, peeked(cm) + o.at, there - o.at);
    else if (o.at)
        c->stash = 0;
    redo_put(&cm->port.redo, &r->in_raw, o.raw);
    redo_put(&cm->port.redo, &r->in_number, o.number);
    redo_put(&cm->port.redo, &r->in_place, o.place);
    redo_put(&cm->port.redo, &r->in_plain, o.plain);
    redo_put(&cm->port.redo, &r->in_end, o.partial ? r->in_raw + there : o.at ? o.raw : end);
    redo_put(&cm->port.redo, &r->in_stash, c->stash);
    redo_commit(&cm->port.redo);
    CRASH(RAW_OPENED);
    if (old != c->stash)
        free_stash(cm, old);
    if (drop_raw(c->fd, r->in_end - end)) {
        errno = EBADMSG;
        return -1;
    }
    CRASH(RAW_DROPPED);
    errno = EAGAIN; /* if no envelope was whole */
    return plain ? (ssize_t)plain : -1;
}

ssize_t streams_receive(struct connmgr *cm, struct conn *c, struct iovec *iov, int count)
{
    if (!c->transport->plain_max) {
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count};

        return count == 1 ? recv(c->fd, iov->iov_base, iov->iov_len, MSG_DONTWAIT) : recvmsg(c->fd, &msg, MSG_DONTWAIT);
    }
    struct room to = {.iov = iov, .count = count};

    for (int i = 0; i < count; i++)
        to.left += iov[i].iov_len;
    return receive_envelopes(cm, c, to);
}

/* ---- outbound ---- */

static uint64_t envelopes_of(const struct transport *t, uint64_t len) { return (len + t->plain_max - 1) / t->plain_max; }

static uint64_t raw_of(const struct transport *t, uint64_t len)
{
    uint64_t whole = len / t->plain_max;
    uint32_t rest = (uint32_t)(len % t->plain_max);

    return whole * t->sealed_bytes(t->plain_max) + (rest ? t->sealed_bytes(rest) : 0);
}

/* Fixes what is pending from c->sent on, `len` bytes at most. The kernel has all of the flight before. */
static void fix(struct connmgr *cm, struct conn *c, uint64_t len)
{
    struct conn_rec *r = &cm->recs[c->slot];

    redo_put(&cm->port.redo, &r->out_raw, r->out_raw + raw_of(c->transport, r->out_len));
    redo_put(&cm->port.redo, &r->out_number, r->out_number + envelopes_of(c->transport, r->out_len));
    redo_put(&cm->port.redo, &r->out_place, c->sent);
    redo_put(&cm->port.redo, &r->out_len, len < FLIGHT_MAX ? len : FLIGHT_MAX);
    redo_commit(&cm->port.redo);
    c->raw_given = 0;
    CRASH(RAW_FIXED);
}

/* Copies `len` bytes at `from` of what lies in the pieces. */
static void copy(const struct iovec *iov, uint64_t from, uint32_t len, uint8_t *to)
{
    for (; from >= iov->iov_len; iov++)
        from -= iov->iov_len;
    for (; len; iov++, from = 0) {
        uint64_t there = iov->iov_len - from;
        uint32_t part = there < len ? (uint32_t)there : len;

        memcpy(to, (const uint8_t *)iov->iov_base + from, part);
        to += part;
        len -= part;
    }
}

static ssize_t send_envelopes(struct connmgr *cm, struct conn *c, const struct iovec *iov, int count)
{
    struct conn_rec *r = &cm->recs[c->slot];
    const struct transport *t = c->transport;
    uint64_t pending = 0, raw = 0;
    uint8_t *to = sealed(cm);

    for (int i = 0; i < count; i++)
        pending += iov[i].iov_len;
    if (c->sent == r->out_place + r->out_len)
        fix(cm, c, pending);
    if (pending < r->out_len) { /* what is fixed is committed output, and gathered as it was */
        errno = EBADMSG;
        return -1;
    }
    for (uint64_t at = 0, i = 0; at < r->out_len; at += t->plain_max, i++) {
        uint32_t len = r->out_len - at < t->plain_max ? (uint32_t)(r->out_len - at) : t->plain_max;

        raw += t->sealed_bytes(len);
        if (raw <= c->raw_given) /* the kernel has it */
            continue;
        copy(iov, at, len, one_plain(cm));
        t->seal(NULL, r->out_number + i, one_plain(cm), len, to);
        to += t->sealed_bytes(len);
    }
    uint64_t made = (uint64_t)(to - sealed(cm)), skip = c->raw_given - (raw - made);
    ssize_t gave = send(c->fd, sealed(cm) + skip, made - skip, MSG_DONTWAIT | MSG_NOSIGNAL);

    if (gave < 0)
        return -1;
    c->raw_given += (uint64_t)gave;
    return c->raw_given == raw ? (ssize_t)r->out_len : 0;
}

ssize_t streams_send(struct connmgr *cm, struct conn *c, struct iovec *iov, int count)
{
    if (!c->transport->plain_max) {
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count};

        return sendmsg(c->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return send_envelopes(cm, c, iov, count);
}

void streams_shut(const struct conn *c, int how) { (void)shutdown(c->fd, how); }

/* ---- after a crash ---- */

int streams_find(struct connmgr *cm, struct conn *c, int fd, uint64_t taken, uint64_t given, struct stream_places *ret)
{
    const struct conn_rec *r = &cm->recs[c->slot];

    taken -= r->in_base;
    given -= r->out_base;
    if (!c->transport->plain_max) {
        *ret = (struct stream_places){.in = taken, .out = given, .fin = given == c->end + 1};
        return 0;
    }
    uint64_t raw = raw_of(c->transport, r->out_len), there = given - r->out_raw;

    if (conn_is_heard(c) && (taken > r->in_end || drop_raw(fd, r->in_end - taken)))
        return -EBADMSG;
    ret->fin = there == raw + 1;
    there -= (uint64_t)ret->fin;
    if (given < r->out_raw || there > raw)
        return -EBADMSG;
    c->raw_given = there;
    ret->in = r->in_plain;
    ret->out = r->out_place + (there == raw ? r->out_len : 0) + (uint64_t)ret->fin;
    return 0;
}
