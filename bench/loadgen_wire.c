/*
 * Connections and the event loop: non-blocking sockets on one epoll, a handshake (the greeting,
 * subscriptions and a ping in one go, then the answer to the ping), and a receiving loop that touches
 * the head of a message and then steps over the body. What is said is up to the protocol
 * (loadgen_nats.c and its like).
 *
 * A hub and its connections are created by a mode and written from hub_poll() and that mode only.
 * Invariants: what is in `carry` is the beginning of one unfinished frame; `out` and `bulk` never
 * interleave within a piece: whichever has begun is finished first. A crash leaves nothing.
 *
 * The receive buffer is one for all connections of a hub, so it stays in the cache; only the
 * unfinished frame at its end is copied aside, and one that is large is finished there. The heads of messages are usually all the same, so the
 * last one is remembered and the next one compared with it before it is parsed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loadgen.h"

#define CARRY_SMALL (RECEIVE_BYTES / 4)   /* an unfinished frame worth copying */

static struct addrinfo *server_address;

static void server_resolve(const struct options *opt)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    char port[16];
    snprintf(port, sizeof port, "%u", opt->port);
    int error = getaddrinfo(opt->host, port, &hints, &server_address);
    if (error)
        fail(EXIT_SERVER, "cannot find %s: %s", opt->host, gai_strerror(error));
}

void hub_init(struct hub *hub, const struct options *opt)
{
    memset(hub, 0, sizeof *hub);
    hub->opt = opt;
    hub->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (hub->epoll < 0)
        fail(EXIT_SERVER, "epoll_create1: %s", strerror(errno));
    hub->receive = allocate(1, CARRY_SMALL + RECEIVE_BYTES);
    if (!server_address)
        server_resolve(opt);
}

/* Watches a descriptor that is not a connection: `*flag` becomes 1 when it is readable. The entry is
 * told from a connection's by its lowest bit, which no pointer to a structure has set. */
void hub_watch(struct hub *hub, int fd, uint32_t *flag)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)(uintptr_t)flag | 1u};
    if (epoll_ctl(hub->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        if (errno != EPERM)
            fail(EXIT_SERVER, "epoll_ctl: %s", strerror(errno));
        /* A regular file cannot be waited for: it is always readable. */
        *flag = 1;
    }
}

/* Must be called before the flag goes out of scope. A regular file was never in the set. */
void hub_unwatch(struct hub *hub, int fd)
{
    if (epoll_ctl(hub->epoll, EPOLL_CTL_DEL, fd, NULL) < 0 && errno != ENOENT && errno != EPERM)
        fail(EXIT_SERVER, "epoll_ctl: %s", strerror(errno));
}

void conn_init(struct conn *c, struct hub *hub, const char *role, uint32_t index)
{
    memset(c, 0, sizeof *c);
    c->hub = hub;
    c->role = role;
    c->index = index;
    c->fd = -1;
}

static void conn_watch(struct conn *c, int operation)
{
    struct epoll_event event = {.events = EPOLLIN | (c->want_write ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(c->hub->epoll, operation, c->fd, &event) < 0)
        fail(EXIT_SERVER, "epoll_ctl: %s", strerror(errno));
}

void conn_want_write(struct conn *c, bool want)
{
    if (c->want_write == want)
        return;
    c->want_write = want;
    conn_watch(c, EPOLL_CTL_MOD);
}

static _Noreturn void conn_refused(const struct conn *c, int error)
{
    fail(EXIT_SERVER, "cannot connect to %s:%u (%s %u): %s", c->hub->opt->host, c->hub->opt->port,
         c->role, c->index, strerror(error));
}

void conn_open(struct conn *c)
{
    int yes = 1;
    c->opened_ns = clock_ns();
    c->fd = socket(server_address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        fail(EXIT_SERVER, "socket (%s %u): %s", c->role, c->index, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (connect(c->fd, server_address->ai_addr, server_address->ai_addrlen) < 0 &&
        errno != EINPROGRESS)
        conn_refused(c, errno);
    c->state = CONN_CONNECTING;
    c->want_write = true;
    conn_watch(c, EPOLL_CTL_ADD);
}

void conn_close(struct conn *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    c->state = CONN_CLOSED;
    free(c->carry);
    free(c->out);
    c->carry = c->out = NULL;
    c->carry_cap = c->out_cap = c->carry_len = c->out_len = c->out_pos = 0;
}

/* Ends the program. A server says why with -ERR just before it closes, and a failed send is often
 * noticed before that line is read: so look for it. */
void conn_lost(const struct conn *c, const char *why)
{
    char last[4096], reason[256];
    ssize_t n = recv(c->fd, last, sizeof last, MSG_DONTWAIT);
    const char *at = n > 0 ? memmem(last, (size_t)n, "-ERR", 4) : NULL;
    if (at) {
        size_t left = (size_t)(last + n - at);
        const char *end = memchr(at, '\r', left);
        snprintf(reason, sizeof reason, "%s (%.*s)", why, (int)(end ? end - at : 4), at);
        why = reason;
    }
    fail(EXIT_SERVER, "%s:%u ended the connection of %s %u: %s", c->hub->opt->host, c->hub->opt->port,
         c->role, c->index, why);
}

/* Sends from one piece; returns false if the socket would block before its end. */
static bool piece_send(struct conn *c, const char *data, size_t length, size_t *pos)
{
    while (*pos < length) {
        ssize_t n = send(c->fd, data + *pos, length - *pos, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return false;
        if (n < 0)
            conn_lost(c, strerror(errno));
        *pos += (size_t)n;
    }
    return true;
}

/* Sends what there is to send; asks for EPOLLOUT when the socket is full. */
void conn_write(struct conn *c)
{
    for (;;) {
        bool bulk_begun = c->bulk_pos > 0 && c->bulk_pos < c->bulk_len;
        if (c->out_len && !bulk_begun) {
            if (!piece_send(c, c->out, c->out_len, &c->out_pos))
                break;
            c->out_len = c->out_pos = 0;
        } else if (c->bulk_len) {
            if (!piece_send(c, c->bulk, c->bulk_len, &c->bulk_pos))
                break;
            c->bulk_len = c->bulk_pos = 0;
        } else {
            if (!c->on_writable)
                conn_want_write(c, false);
            return;
        }
    }
    conn_want_write(c, true);
}

/* Adds a small control line; the caller sends it with conn_write(). */
void conn_queue(struct conn *c, const char *text, size_t length)
{
    if (c->out_len + length > c->out_cap) {
        size_t cap = (c->out_len + length) * 2;
        char *out = realloc(c->out, cap);
        if (!out)
            fail(EXIT_SERVER, "out of memory (%zu bytes)", cap);
        c->out = out;
        c->out_cap = cap;
    }
    memcpy(c->out + c->out_len, text, length);
    c->out_len += length;
}

/* The server answered a ping: the one of the greeting, or that of conns_barrier(). */
void conn_ponged(struct conn *c)
{
    if (c->state == CONN_HELLO) {
        c->state = CONN_READY;
        c->ready_ns = clock_ns();
        c->hub->ready++;
    } else {
        c->pongs++;
    }
}

void conn_puzzled(const struct conn *c, const char *what, size_t length)
{
    char why[256];
    snprintf(why, sizeof why, "not understood: %.*s", (int)(length < 100 ? length : 100), what);
    conn_lost(c, why);
}

bool number_parse(const char *at, const char *end, uint32_t *ret_)
{
    uint32_t value = 0;
    if (at == end || end - at > 9)
        return false;
    for (; at < end; at++) {
        uint32_t digit = (uint32_t)(unsigned char)*at - '0';
        if (digit > 9)
            return false;
        value = value * 10 + digit;
    }
    *ret_ = value;
    return true;
}

/* Keeps the head of a message (`head_len` bytes): the next one is usually the same. */
void head_remember(struct conn *c, const char *head)
{
    c->cached_len = 0;
    if (!c->many_heads && c->head_len <= HEAD_BYTES_MAX) {
        memcpy(c->head, head, c->head_len);
        c->cached_len = c->head_len;
    }
}

/* Handles every complete frame; returns how many bytes they were. */
static size_t frames_parse(struct conn *c, const char *buffer, size_t length)
{
    const struct protocol *protocol = c->hub->opt->protocol;
    const char *at = buffer, *end = buffer + length;
    while (at < end) {
        size_t left = (size_t)(end - at);
        if (!(c->cached_len && left >= c->cached_len && memcmp(at, c->head, c->cached_len) == 0)) {
            ssize_t control = protocol->head(c, at, left);
            if (control == HEAD_UNFINISHED)
                break;
            if (control != HEAD_MESSAGE) {
                at += control;
                continue;
            }
        }
        size_t total = (size_t)c->head_len + c->size + protocol->end_bytes;
        if (left < total)
            break;
        if (protocol->end_bytes && (at[total - 2] != '\r' || at[total - 1] != '\n'))
            conn_lost(c, "not understood: a body that does not end where its line says");
        if (!c->on_message)
            conn_lost(c, "a message came, and nothing was subscribed");
        c->on_message(c, at);
        at += total;
    }
    return (size_t)(at - buffer);
}

/* Receives behind the unfinished frame where it lies: it is large, and copying it for each piece
 * that comes would cost more than everything else. */
static ssize_t conn_receive_large(struct conn *c)
{
    if (c->carry_cap < c->carry_len + RECEIVE_BYTES) {
        size_t cap = (c->carry_len + RECEIVE_BYTES) * 2;
        char *carry = realloc(c->carry, cap);
        if (!carry)
            fail(EXIT_SERVER, "out of memory (%zu bytes)", cap);
        c->carry = carry;
        c->carry_cap = cap;
    }
    ssize_t n = recv(c->fd, c->carry + c->carry_len, RECEIVE_BYTES, 0);
    if (n <= 0)
        return n;
    size_t length = c->carry_len + (size_t)n, done = frames_parse(c, c->carry, length);
    if (done)
        memmove(c->carry, c->carry + done, length - done);
    c->carry_len = length - done;
    return n;
}

static ssize_t conn_receive_small(struct conn *c)
{
    char *buffer = c->hub->receive;
    if (c->carry_len)
        memcpy(buffer, c->carry, c->carry_len);
    ssize_t n = recv(c->fd, buffer + c->carry_len, RECEIVE_BYTES, 0);
    if (n <= 0)
        return n;
    size_t length = c->carry_len + (size_t)n;
    size_t done = frames_parse(c, buffer, length);
    size_t rest = length - done;
    if (rest > c->carry_cap) {
        free(c->carry);
        c->carry_cap = rest < 512 ? 512 : rest * 2;
        c->carry = allocate(1, c->carry_cap);
    }
    if (rest)
        memcpy(c->carry, buffer + done, rest);
    c->carry_len = rest;
    return n;
}

static void conn_receive(struct conn *c)
{
    ssize_t n = c->carry_len < CARRY_SMALL ? conn_receive_small(c) : conn_receive_large(c);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        conn_lost(c, strerror(errno));
    if (n == 0)
        conn_lost(c, "end of stream");
}

/* Says what the connection says first. */
void conn_greet(struct conn *c)
{
    c->state = CONN_HELLO;
    c->bulk = c->hello;
    c->bulk_len = c->hello_len;
    c->bulk_pos = 0;
    conn_write(c);
}

static void conn_writable(struct conn *c)
{
    if (c->state == CONN_CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error)
            conn_refused(c, error);
        if (c->hub->opt->protocol->greets) {
            c->state = CONN_INFO;
            conn_want_write(c, false);
        } else {
            conn_greet(c);
        }
        return;
    }
    conn_write(c);
    if (c->state == CONN_READY && c->on_writable && !c->bulk_len && !c->out_len)
        c->on_writable(c);
}

/* One turn: waits for events at most `timeout_ns`, handles them, returns how many there were. */
int hub_poll(struct hub *hub, uint64_t timeout_ns)
{
    struct epoll_event events[EVENTS_MAX];
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    int count = epoll_pwait2(hub->epoll, events, EVENTS_MAX, &timeout, NULL);
    if (count < 0 && errno != EINTR)
        fail(EXIT_SERVER, "epoll_pwait2: %s", strerror(errno));
    for (int i = 0; i < count; i++) {
        if (events[i].data.u64 & 1u) {
            *(uint32_t *)(uintptr_t)(events[i].data.u64 & ~(uint64_t)1u) = 1;
            continue;
        }
        struct conn *c = events[i].data.ptr;
        if (events[i].events & EPOLLOUT)
            conn_writable(c);
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR) && c->state != CONN_CONNECTING)
            conn_receive(c);
    }
    return count;
}

/* Polls until `count` connections of this hub are ready. */
void conns_await(struct hub *hub, uint64_t ready_target, const char *doing)
{
    while (hub->ready < ready_target) {
        hub_poll(hub, 100000000);
        deadline_check(hub->opt, doing);
    }
}

/* Sends PING on each connection and waits for each PONG, so that whatever the server had already
 * put in front of it has been counted (a relay has nothing to answer with: it is taken at its word).
 * Returns how many answered: all of them, or fewer if the time
 * without an answer passed --stall. */
uint64_t conns_barrier(struct hub *hub, struct conn *conns, uint32_t count)
{
    const struct protocol *protocol = hub->opt->protocol;
    uint64_t answered = 0, before = 0, changed_ns = clock_ns();
    if (!protocol->ping)
        return count;
    for (uint32_t i = 0; i < count; i++) {
        conns[i].pongs = 0;
        conn_queue(&conns[i], protocol->ping, protocol->ping_len);
        conn_write(&conns[i]);
    }
    for (;;) {
        answered = 0;
        for (uint32_t i = 0; i < count; i++)
            answered += conns[i].pongs > 0;
        if (answered == count)
            return answered;
        if (answered != before) {
            before = answered;
            changed_ns = clock_ns();
        }
        if ((double)(clock_ns() - changed_ns) > hub->opt->stall_s * 1e9)
            return answered;
        hub_poll(hub, 100000000);
        deadline_check(hub->opt, "waiting for the last PONG");
    }
}
