/*
 * relay: only copies bytes from the sockets of publishers to those of subscribers. No message is
 * parsed, no subject looked up: what it reaches is the limit for a server that is one process and
 * moves bytes with recv(2) and send(2).
 *
 * A connection first says "SUB name" and "PUB name frame-bytes" lines, then "PING", and is answered
 * "PONG". From then on every byte it sends goes to all connections that said SUB with a name that it
 * said PUB with. Where several publishers feed one subscriber their bytes take turns at multiples of
 * frame-bytes, so that frames stay whole.
 *
 * One process, one thread. Everything is created and written by it alone. Invariants: a source reads
 * only when all its targets have everything it read before; a target takes from one source at a time
 * until that one's bytes are out. A crash leaves nothing but closed sockets.
 *
 * usage: relay PORT (127.0.0.1)
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES 262144u
#define HELLO_BYTES_MAX 65536u
#define NAME_BYTES_MAX 64u
#define NAMES_MAX 16u
#define CONNS_MAX 65536u
#define EVENTS_MAX 256

struct target {
    uint32_t conn;
    bool waits;        /* has not taken the whole of `length` yet */
    uint32_t pos;
};

struct conn {
    int fd;                    /* -1: none */
    bool open;                 /* PONG was said */
    bool want_write;
    uint32_t index;
    uint32_t sub_count, pub_count;
    char (*names)[NAME_BYTES_MAX];   /* sub_count of SUB, then pub_count of PUB */
    uint32_t frame_bytes;

    /* As a source: `held` bytes read, of which `length` (whole frames) are being copied. */
    char *buffer;
    uint32_t held, length, unfinished;   /* `unfinished`: targets that wait */
    struct target *targets;
    uint32_t target_count;

    /* As a target: who is in the middle of its bytes, and who wants to be. */
    struct conn *holder;
    struct conn **feeders;
    uint32_t feeder_count;
};

static struct conn *conns;
static uint32_t conns_high, first_free;   /* no slot below `first_free` is free */
static int epoll;

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *allocate(void *old, size_t bytes)
{
    void *memory = realloc(old, bytes);
    if (!memory)
        die("memory");
    return memory;
}

static void watch(struct conn *c, bool write)
{
    struct epoll_event event = {.data.u32 = c->index + 1};
    /* A source with bytes under way is not read: the publisher's socket fills, and it waits. */
    event.events = (c->unfinished ? 0u : (uint32_t)EPOLLIN) | (write ? (uint32_t)EPOLLOUT : 0u);
    c->want_write = write;
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event) < 0)
        die("epoll_ctl");
}

static void source_done(struct conn *c);

static bool feeds(const struct conn *source, const struct conn *target)
{
    for (uint32_t i = 0; i < target->sub_count; i++)
        for (uint32_t k = 0; k < source->pub_count; k++)
            if (strcmp(target->names[i], source->names[source->sub_count + k]) == 0)
                return true;
    return false;
}

static void route_add(struct conn *source, struct conn *target)
{
    size_t targets = source->target_count + 1, feeders = target->feeder_count + 1;
    source->targets = allocate(source->targets, targets * sizeof *source->targets);
    source->targets[source->target_count++] = (struct target){.conn = target->index};
    target->feeders = allocate(target->feeders, feeders * sizeof *target->feeders);
    target->feeders[target->feeder_count++] = source;
}

/* Finds whom a new connection feeds and who feeds it. */
static void routes_make(struct conn *c)
{
    for (uint32_t i = 0; (c->sub_count || c->pub_count) && i < conns_high; i++) {
        struct conn *other = &conns[i];
        if (!other->open)
            continue;
        if (c->pub_count && feeds(c, other))
            route_add(c, other);
        if (other->pub_count && other != c && feeds(other, c))
            route_add(other, c);
    }
}

/* A connection is gone: nobody waits for it, and nobody gets the rest of its bytes. */
static void forget(struct conn *c)
{
    close(c->fd);
    c->fd = -1;
    c->open = false;
    if (c->index < first_free)
        first_free = c->index;
    for (uint32_t i = 0; i < c->target_count; i++) {
        struct conn *target = &conns[c->targets[i].conn];
        if (target->holder == c)
            target->holder = NULL;
        for (uint32_t k = 0; k < target->feeder_count; k++)
            if (target->feeders[k] == c)
                target->feeders[k--] = target->feeders[--target->feeder_count];
    }
    for (uint32_t i = 0; i < c->feeder_count; i++) {
        struct conn *source = c->feeders[i];
        for (uint32_t k = 0; k < source->target_count; k++) {
            if (source->targets[k].conn != c->index)
                continue;
            bool waited = source->targets[k].waits;
            source->targets[k--] = source->targets[--source->target_count];
            if (waited && --source->unfinished == 0)
                source_done(source);
        }
    }
    c->target_count = c->feeder_count = c->unfinished = 0;
}

/* Copies to one target as much as it takes; true if it has everything. */
static bool copy(struct conn *source, struct target *to)
{
    struct conn *c = &conns[to->conn];
    if (c->fd < 0)
        return true;
    if (c->holder && c->holder != source)
        return false;
    while (to->pos < source->length) {
        ssize_t n = send(c->fd, source->buffer + to->pos, source->length - to->pos, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN)
            return true;
        if (n < 0) {
            c->holder = to->pos % source->frame_bytes ? source : NULL;
            if (!c->want_write)
                watch(c, true);
            return false;
        }
        to->pos += (uint32_t)n;
    }
    c->holder = NULL;
    return true;
}

/* What was read is with everybody: keep the rest of a frame, and read again. */
static void source_done(struct conn *c)
{
    memmove(c->buffer, c->buffer + c->length, c->held - c->length);
    c->held -= c->length;
    c->length = 0;
    if (c->fd >= 0)
        watch(c, c->want_write);
}

static void source_copy(struct conn *c)
{
    c->unfinished = 0;
    for (uint32_t i = 0; i < c->target_count; i++) {
        struct target *to = &c->targets[i];
        to->pos = 0;
        to->waits = !copy(c, to);
        c->unfinished += to->waits;
    }
    if (c->unfinished) {
        watch(c, c->want_write);
        return;
    }
    memmove(c->buffer, c->buffer + c->length, c->held - c->length);
    c->held -= c->length;
    c->length = 0;
}

/* A target takes bytes again: the source in the middle of a frame goes on, then the others in turn. */
static void target_writable(struct conn *c)
{
    uint32_t left = 0;
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < c->feeder_count; i++) {
            struct conn *source = c->feeders[i];
            if (!source->unfinished || (pass == 0 && c->holder != source))
                continue;
            for (uint32_t k = 0; k < source->target_count; k++) {
                struct target *to = &source->targets[k];
                if (to->conn != c->index || !to->waits)
                    continue;
                to->waits = !copy(source, to);
                left += to->waits;
                if (!to->waits && --source->unfinished == 0)
                    source_done(source);
            }
        }
    }
    if (!left)
        watch(c, false);
}

static bool line_take(struct conn *c, char *line)
{
    char word[8], name[NAME_BYTES_MAX];
    unsigned bytes = 1;
    int count = sscanf(line, "%7s %63s %u", word, name, &bytes);
    if (count >= 1 && strcmp(word, "PING") == 0) {
        c->open = true;
        routes_make(c);
        return send(c->fd, "PONG\r\n", 6, MSG_NOSIGNAL) == 6;
    }
    bool publishes = count == 3 && strcmp(word, "PUB") == 0;
    if ((!publishes && (count != 2 || strcmp(word, "SUB") != 0)) ||
        c->sub_count + c->pub_count == NAMES_MAX || bytes == 0 || (!publishes && c->pub_count))
        return false;
    c->names = allocate(c->names, (c->sub_count + c->pub_count + 1) * sizeof *c->names);
    strcpy(c->names[c->sub_count + c->pub_count], name);
    if (publishes) {
        c->pub_count++;
        c->frame_bytes = bytes;
    } else {
        c->sub_count++;
    }
    return true;
}

/* What a connection says first fits into one read: it is a line or a few. */
static void hello_read(struct conn *c)
{
    static char text[HELLO_BYTES_MAX];
    ssize_t n = recv(c->fd, text, sizeof text - 1, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        forget(c);
        return;
    }
    text[n] = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (c->open || !line_take(c, line)) {
            forget(c);
            return;
        }
    }
}

static void source_read(struct conn *c)
{
    uint32_t size = READ_BYTES > c->frame_bytes * 2 ? READ_BYTES : c->frame_bytes * 2;
    if (!c->buffer && c->pub_count)
        c->buffer = allocate(NULL, size);
    static char nobody[64];
    char *at = c->pub_count ? c->buffer + c->held : nobody;
    ssize_t n = recv(c->fd, at, c->pub_count ? size - c->held : sizeof nobody, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        forget(c);
        return;
    }
    if (!c->pub_count)
        return;
    c->held += (uint32_t)n;
    c->length = c->held - c->held % c->frame_bytes;
    if (c->length)
        source_copy(c);
}

static void accept_all(int listener)
{
    for (;;) {
        int yes = 1, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        uint32_t index = first_free;
        while (index < conns_high && conns[index].fd >= 0)
            index++;
        if (index == CONNS_MAX) {
            close(fd);
            continue;
        }
        if (index == conns_high)
            conns_high++;
        first_free = index + 1;
        struct conn *c = &conns[index];
        free(c->names);
        free(c->buffer);
        free(c->targets);
        free(c->feeders);
        *c = (struct conn){.fd = fd, .index = index, .frame_bytes = 1};
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = index + 1};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
            die("epoll_ctl");
    }
}

static int listen_on(const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    address.sin_port = htons((uint16_t)atoi(port));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0)
        die("listen");
    return fd;
}

int main(int argc, char **argv)
{
    if (argc != 2 || atoi(argv[1]) < 1 || atoi(argv[1]) > 65535) {
        fprintf(stderr, "usage: relay PORT\n");
        return 2;
    }
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    conns = calloc(CONNS_MAX, sizeof *conns);
    epoll = epoll_create1(EPOLL_CLOEXEC);
    int listener = listen_on(argv[1]);
    struct epoll_event events[EVENTS_MAX], event = {.events = EPOLLIN, .data.u32 = 0};
    if (!conns || epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) < 0)
        die("start");
    for (;;) {
        int count = epoll_wait(epoll, events, EVENTS_MAX, -1);
        if (count < 0 && errno != EINTR)
            die("epoll_wait");
        for (int i = 0; i < count; i++) {
            if (events[i].data.u32 == 0) {
                accept_all(listener);
                continue;
            }
            struct conn *c = &conns[events[i].data.u32 - 1];
            if (c->fd >= 0 && events[i].events & (EPOLLHUP | EPOLLERR))
                forget(c);
            if (c->fd >= 0 && events[i].events & EPOLLOUT)
                target_writable(c);
            if (c->fd >= 0 && !c->unfinished && events[i].events & EPOLLIN) {
                if (c->open)
                    source_read(c);
                else
                    hello_read(c);
            }
        }
    }
}
