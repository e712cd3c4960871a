/*
 * The load generator: what its files share.
 *
 * One process, one thread, one event loop. Every structure here is created by the mode that runs
 * (throughput, pingpong, paced, connect, idle) before its first message. Nothing is shared with other
 * processes, so a crash leaves nothing behind but closed sockets.
 */
#ifndef LOADGEN_H
#define LOADGEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define LOADGEN_VERSION "1.0"

#define LINE_BYTES_MAX 65536u       /* the longest control line accepted (INFO is the long one) */
#define BODY_BYTES_MAX 16777216u    /* the largest --size */
#define RECEIVE_BYTES 262144u       /* one recv(2); about half of a second-level cache */
#define BATCH_BYTES 131072u         /* one bulk of pre-built frames */
#define PIDS_MAX 256u               /* processes in --server-pids */
#define SUBJECTS_MAX 1000000u       /* six digits in a subject */
#define EVENTS_MAX 256              /* events taken from one epoll_wait */
#define HEAD_BYTES_MAX 160u         /* a MSG line that can be remembered */

/* Exit codes. */
enum {
    EXIT_OK = 0,
    EXIT_CHECKS = 1,   /* messages lost, duplicated, reordered, misrouted or corrupt */
    EXIT_USAGE = 2,    /* bad arguments */
    EXIT_SERVER = 3,   /* the server does not answer, or ended a connection */
};

enum subject_mode { SUBJECT_ONE, SUBJECT_PAIRS, SUBJECT_MANY, SUBJECT_MIXED };

extern const char *const SUBJECT_MODES[4];

struct protocol;

struct options {
    const char *mode, *host;
    const struct protocol *protocol;
    uint32_t port;
    uint32_t publishers, subscribers, subjects, spread, size, connections, concurrency;
    enum subject_mode subject_mode;
    uint64_t messages, warmup, window, window_bytes, seed;
    double rate, timeout_s, stall_s;
    bool json, verify;
    uint32_t pid_count;
    int pids[PIDS_MAX];
    uint64_t deadline_ns;   /* start of the program plus timeout */
};

/* ---- loadgen_stats.c: clocks, CPU time, latency histogram ---------------------------------------- */

uint64_t clock_ns(void);

struct cpu_meter {
    uint32_t count;
    clockid_t clocks[PIDS_MAX];
    bool known;                   /* all processes were there at start and at stop */
    uint64_t server_ns, own_ns;   /* at stop: the CPU time spent since start */
};
void cpu_meter_init(struct cpu_meter *meter, const struct options *opt);
void cpu_meter_start(struct cpu_meter *meter);
void cpu_meter_stop(struct cpu_meter *meter);

/* Log-linear: 128 buckets to a power of two, so a bucket is at most 1/128 of its value wide. */
#define HISTOGRAM_SUB 128u
#define HISTOGRAM_BUCKETS (HISTOGRAM_SUB * 40u)
struct histogram {
    uint64_t count, sum, max;
    uint64_t buckets[HISTOGRAM_BUCKETS];
};
void histogram_add(struct histogram *h, uint64_t value);
uint64_t histogram_quantile(const struct histogram *h, double quantile);

struct hub;

/* ---- loadgen_report.c: one JSON object, or lines for people; and the ways to end ------------------ */

void report_begin(const struct options *opt);
void report_text(const char *name, const char *value);
void report_count(const char *name, uint64_t value);
void report_number(const char *name, double value);
void report_null(const char *name);
void report_latency(const char *prefix, const struct histogram *h);
void report_cpu(const struct cpu_meter *meter, uint64_t deliveries);
void report_server(const struct hub *hub);
void report_end(void);

_Noreturn void fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void deadline_check(const struct options *opt, const char *doing);
void *allocate(size_t count, size_t size);

/* ---- loadgen_wire.c: connections and the event loop ----------------------------------------------- */

enum conn_state { CONN_CLOSED, CONN_CONNECTING, CONN_INFO, CONN_HELLO, CONN_READY };

struct hub {
    int epoll;
    const struct options *opt;
    char *receive;           /* RECEIVE_BYTES after room for one unfinished frame */
    uint64_t ready;          /* connections that finished their handshake */
    char server_name[64];    /* from the first INFO */
    char server_version[32];
};

struct conn {
    struct hub *hub;
    int fd;
    enum conn_state state;
    uint32_t index;
    const char *role;        /* for error lines: "publisher", "subscriber", ... */
    bool want_write;         /* EPOLLOUT is asked for */
    bool many_heads;         /* lines differ from message to message: do not remember the last */
    uint64_t opened_ns, ready_ns, pongs;
    uint64_t answers;        /* redis: how many PUBLISH were answered */

    /* Bytes to send: `out` is owned (PONG, PING), `bulk` is borrowed (hello, frames). */
    const char *hello, *bulk;
    size_t hello_len, bulk_len, bulk_pos;
    char *out;
    size_t out_len, out_pos, out_cap;

    /* An unfinished frame, kept between two recv(2). */
    char *carry;
    size_t carry_len, carry_cap;

    /* The last head of a message and what it said; offsets are from the start of the head. */
    char head[HEAD_BYTES_MAX];
    uint32_t head_len, cached_len, subject_len, reply_off, reply_len, sid, size;

    void (*on_message)(struct conn *c, const char *line);
    void (*on_writable)(struct conn *c);
    void *owner;
};

void hub_init(struct hub *hub, const struct options *opt);
int hub_poll(struct hub *hub, uint64_t timeout_ns);
void hub_watch(struct hub *hub, int fd, uint32_t *flag);
void hub_unwatch(struct hub *hub, int fd);
void conn_init(struct conn *c, struct hub *hub, const char *role, uint32_t index);
void conn_open(struct conn *c);
void conn_close(struct conn *c);
void conn_write(struct conn *c);
void conn_queue(struct conn *c, const char *text, size_t length);
void conn_want_write(struct conn *c, bool want);
void conn_greet(struct conn *c);
void conn_ponged(struct conn *c);
_Noreturn void conn_lost(const struct conn *c, const char *why);
_Noreturn void conn_puzzled(const struct conn *c, const char *what, size_t length);
void head_remember(struct conn *c, const char *head);
bool number_parse(const char *at, const char *end, uint32_t *ret_);
void conns_await(struct hub *hub, uint64_t ready_target, const char *doing);
uint64_t conns_barrier(struct hub *hub, struct conn *conns, uint32_t count);

static inline const char *conn_body(const struct conn *c, const char *line)
{
    return line + c->head_len;
}

/* ---- loadgen_nats.c, _mqtt.c, _redis.c, _relay.c: what is said on the wire ------------------------- */

/* What a connection says first: the greeting, its subscriptions, and a ping. */
struct hello {
    char *data;
    size_t length, capacity;
};
void hello_add(struct hello *h, const void *bytes, size_t length);
void hello_print(struct hello *h, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What `head` of a protocol returns besides the length of something that is not a message. */
enum { HEAD_UNFINISHED = 0, HEAD_MESSAGE = -1 };

struct protocol {
    const char *name;
    bool greets;               /* the server speaks first */
    const char *ping;          /* answered after everything before it; NULL if nothing is */
    size_t ping_len;
    uint32_t end_bytes;        /* 2 if CR LF follows a body, on the way in and out; else 0 */
    bool throughput_only;      /* the other modes do not speak it */
    /* Writes what goes before a body; returns its length. */
    size_t (*frame_head)(char *ret_, size_t size, const char *subject, const char *reply,
                         uint32_t body);
    void (*hello_begin)(struct hello *h);
    void (*hello_subscribe)(struct hello *h, const char *subject, const char *queue, uint32_t sid);
    void (*hello_publish)(struct hello *h, const char *subject, size_t frame_bytes);
    /* Looks at what begins at `at`: a message (then head_len and size are set), a control line or
     * packet (handled; its length is returned), or not enough of either. */
    ssize_t (*head)(struct conn *c, const char *at, size_t left);
};
extern const struct protocol PROTOCOL_NATS, PROTOCOL_MQTT, PROTOCOL_REDIS, PROTOCOL_RELAY;
const struct protocol *protocol_find(const char *name);
void hello_end(struct hello *h, const struct protocol *protocol);
void hello_give(const struct hello *h, struct conn *c);

/* ---- loadgen_check.c: what the first 16 bytes of a body say, and what was lost -------------------- */

#define BODY_MAGIC 0x4d414c47u

/* The first 16 bytes of every body, in the machine's byte order (both ends are this process). */
struct body_head {
    uint32_t tag;         /* BODY_MAGIC ^ index of the subject */
    uint32_t publisher;
    uint64_t sequence;
};
_Static_assert(sizeof(struct body_head) == 16, "the body head is 16 bytes");

struct gap {
    uint64_t first, end;   /* sequences [first, end) were passed over */
};

struct pair {
    uint64_t next;   /* one past the highest sequence seen */
    struct gap *gaps;        /* ascending, disjoint */
    size_t gap_count, gap_cap;
};

struct check {
    uint32_t publishers, subscribers;
    uint32_t size;
    bool sequenced;            /* bodies are large enough to carry a body_head */
    uint64_t limit;            /* sequences a publisher will ever use */
    struct pair *pairs;        /* [subscriber * publishers + publisher] */
    const char *fill;          /* body bytes after the head, compared with --verify; else NULL */
    uint64_t fresh;    /* messages seen for the first time */
    uint64_t duplicated, reordered, misrouted, corrupt;
};

bool check_sequence(struct check *k, struct pair *pair, uint64_t sequence);
uint64_t pair_lost(const struct pair *pair, uint64_t sent);
void check_init(struct check *k, uint32_t publishers, uint32_t subscribers, uint32_t size,
                uint64_t limit);
bool check_unexpected(struct check *k, struct pair *pair, uint64_t sequence);
uint64_t check_settle(struct check *k, uint32_t subscriber, uint32_t publisher, uint64_t sent);
bool check_report(struct check *k, uint64_t lost);

/* Returns true if the message is seen for the first time. `subject` is the index of the subject the
 * message was delivered on. The common case is a handful of instructions. */
static inline bool check_message(struct check *k, uint32_t subscriber, uint32_t subject,
                                 const char *body, uint32_t size, uint64_t *ret_sequence)
{
    struct body_head head = {BODY_MAGIC ^ subject, 0, 0};
    struct pair *pair = &k->pairs[(size_t)subscriber * k->publishers];
    if (__builtin_expect(size != k->size, 0)) {
        k->corrupt++;
        return false;
    }
    if (k->sequenced) {
        __builtin_memcpy(&head, body, sizeof head);
        if (__builtin_expect(head.publisher >= k->publishers, 0)) {
            k->corrupt++;
            return false;
        }
        if (__builtin_expect(head.tag != (BODY_MAGIC ^ subject), 0)) {
            k->misrouted++;
            return false;
        }
        if (k->fill && __builtin_memcmp(body + sizeof head, k->fill, size - sizeof head) != 0) {
            k->corrupt++;
            return false;
        }
        pair += head.publisher;
    } else {
        head.sequence = pair->next;
    }
    *ret_sequence = head.sequence;
    if (__builtin_expect(head.sequence == pair->next, 1))
        pair->next++;
    else if (!check_unexpected(k, pair, head.sequence))
        return false;
    k->fresh++;
    return true;
}

/* ---- loadgen_publish.c: pre-built frames ---------------------------------------------------------- */

struct publisher {
    struct conn conn;
    char *frames;
    size_t frame_bytes, body_offset, digits_offset;
    uint32_t batch_frames, size, subject, subjects;
    bool many;               /* each frame goes to a random one of `subjects` */
    const struct mixed *mixed;   /* or to the one the mix says */
    bool blocked;            /* waits for the window */
    uint64_t sent, target, window, random;
};

void publisher_init(struct publisher *p, const struct options *opt, const char *subject,
                    uint32_t subject_index, const char *reply);
void publisher_hello(struct publisher *p, const char *subject, const char *subscribe);
void digits_patch(char *at, uint32_t value);
uint64_t publisher_fill(struct publisher *p, uint64_t count);
const char *body_fill(void);
uint64_t frame_bytes_of(uint32_t size);

/* ---- loadgen_mixed.c: --subject-mode mixed ---------------------------------------------------------- */

#define MIXED_DELIVERIES 5u   /* of one message: a literal, two wildcards, two queue groups */

#define MIXED_SUBJECTS_MAX 100000u   /* a thousand areas */

struct mixed;
struct mixed *mixed_make(const struct options *opt);
uint32_t mixed_subject(const struct mixed *m, uint32_t publisher, uint64_t sequence);
void mixed_subject_patch(char *at, uint32_t subject);
void mixed_hello(const struct mixed *m, struct hello *h, uint32_t subscriber);
void mixed_message(struct mixed *m, struct check *k, const struct conn *c, const char *line);
uint64_t mixed_outstanding(const struct mixed *m, const struct publisher *p);
uint64_t mixed_lost(struct mixed *m, const struct publisher *publishers);

/* ---- the modes: each returns the exit code --------------------------------------------------------- */

int run_throughput(const struct options *opt);
int run_pingpong(const struct options *opt);
int run_paced(const struct options *opt);
int run_connect(const struct options *opt);
int run_idle(const struct options *opt);

#endif
