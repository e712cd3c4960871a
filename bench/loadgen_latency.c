/*
 * Modes pingpong and paced: latency.
 *
 * pingpong: one requester and one responder connection, both here, one request outstanding; what is
 * recorded is the round trip, four passages through the server's sockets.
 * paced: messages are due at fixed times (start + n / rate). What is recorded is the time of arrival
 * minus the time the message was DUE, not the time it was sent, so a server (or a generator) that
 * falls behind shows as latency instead of as fewer samples. How late the generator itself sent is
 * recorded beside it (send_lag). Between messages it does not sleep, as its own timer and its own
 * wake-up would be most of what is measured (40 us and more on a virtual machine): it looks again and
 * again, and gives its core away in between.
 *
 * Created and written by this mode alone. Invariants: every sample belongs to a message seen for
 * the first time, after the warm-up. A crash leaves nothing.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "loadgen.h"

#define AWAKE_NS 1000000u    /* paced: no sleep is shorter than this */
#define POLL_NS 100000000u   /* the longest sleep: bounds how late a deadline is noticed */

struct latency {
    const struct options *opt;
    struct hub hub;
    struct check check;
    struct publisher publisher;       /* the requester, or the paced publisher */
    struct conn *subscribers;         /* the responder, or the paced subscribers */
    struct histogram round_trip;      /* or the latency of a delivery */
    struct histogram send_lag;
    uint64_t started_ns, asked_ns, moved_ns, ended_ns, total;
    double interval_ns;
    char *answer;                     /* the responder's frame */
    size_t answer_bytes, answer_body;
    bool done;
};

static void prepare(struct latency *l, const struct options *opt, uint32_t receivers)
{
    memset(l, 0, sizeof *l);
    l->opt = opt;
    l->total = opt->warmup + opt->messages;
    hub_init(&l->hub, opt);
    check_init(&l->check, 1, receivers, opt->size, l->total);
    /* The kernel may otherwise delay a sleeper by 50 microseconds to save wake-ups. */
    prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);
}

static void connect_all(struct latency *l, uint32_t subscribers)
{
    for (uint32_t i = 0; i < subscribers; i++)
        conn_open(&l->subscribers[i]);
    conns_await(&l->hub, subscribers, "waiting for subscriptions to be confirmed");
    conn_open(&l->publisher.conn);
    conns_await(&l->hub, subscribers + 1, "opening the publisher");
}

static void stall_check(struct latency *l)
{
    deadline_check(l->opt, "waiting for messages");
    if ((double)(clock_ns() - l->moved_ns) > l->opt->stall_s * 1e9)
        l->done = true;
}

/* ---- pingpong -------------------------------------------------------------------------------------- */

static void request_send(struct latency *l)
{
    l->asked_ns = clock_ns();
    publisher_fill(&l->publisher, 1);
    conn_write(&l->publisher.conn);
}

static void request_arrived(struct conn *c, const char *line)
{
    struct latency *l = c->owner;
    uint64_t sequence;
    check_message(&l->check, 0, 0, conn_body(c, line), c->size, &sequence);
    if (c->reply_len == 0 || c->size != l->opt->size)
        fail(EXIT_CHECKS, "a request arrived without its reply subject, or with another size");
    if (c->bulk_len)
        return;   /* the answer before this one is not out yet: this one is a duplicate */
    if (!l->answer) {
        /* The reply subject is the same in every request, so the frame is built once. */
        size_t room = (size_t)c->reply_len + c->size + 64;
        l->answer = allocate(1, room);
        char reply[64];
        snprintf(reply, sizeof reply, "%.*s", (int)c->reply_len, line + c->reply_off);
        l->answer_body = l->opt->protocol->frame_head(l->answer, room, reply, "", c->size);
        l->answer_bytes = l->answer_body + c->size + 2;
        memcpy(l->answer + l->answer_body + c->size, "\r\n", 2);
    }
    memcpy(l->answer + l->answer_body, conn_body(c, line), c->size);
    c->bulk = l->answer;
    c->bulk_len = l->answer_bytes;
    c->bulk_pos = 0;
    conn_write(c);
}

static void answer_arrived(struct conn *c, const char *line)
{
    struct latency *l = c->owner;
    uint64_t sequence, now = clock_ns();
    if (!check_message(&l->check, 1, 0, conn_body(c, line), c->size, &sequence))
        return;
    l->moved_ns = now;
    if (sequence >= l->opt->warmup)
        histogram_add(&l->round_trip, now - l->asked_ns);
    if (l->publisher.sent == l->opt->warmup)
        l->started_ns = now;
    if (l->publisher.sent == l->total) {
        l->ended_ns = now;
        l->done = true;
        return;
    }
    request_send(l);
}

static void pingpong_connect(struct latency *l)
{
    const struct protocol *protocol = l->opt->protocol;
    struct conn *requester = &l->publisher.conn, *responder;
    struct hello hello = {0};
    char head[256];
    size_t answer_bytes = protocol->frame_head(head, sizeof head, "ping.reply", "", l->opt->size) +
                          l->opt->size + protocol->end_bytes;
    l->subscribers = allocate(1, sizeof *l->subscribers);
    responder = &l->subscribers[0];
    conn_init(responder, &l->hub, "responder", 0);
    protocol->hello_begin(&hello);
    protocol->hello_subscribe(&hello, "ping.request", "", 1);
    protocol->hello_publish(&hello, "ping.reply", answer_bytes);
    hello_end(&hello, protocol);
    hello_give(&hello, responder);
    responder->on_message = request_arrived;
    responder->owner = l;
    conn_init(requester, &l->hub, "requester", 0);
    requester->on_message = answer_arrived;
    requester->owner = l;
    publisher_init(&l->publisher, l->opt, "ping.request", 0, "ping.reply");
    publisher_hello(&l->publisher, "ping.request", "ping.reply");
    connect_all(l, 1);
}

int run_pingpong(const struct options *opt)
{
    static struct latency state;
    struct latency *l = &state;
    struct cpu_meter meter;
    prepare(l, opt, 2);
    cpu_meter_init(&meter, opt);
    pingpong_connect(l);
    cpu_meter_start(&meter);
    l->moved_ns = l->started_ns = clock_ns();
    request_send(l);
    while (!l->done) {
        hub_poll(&l->hub, POLL_NS);
        stall_check(l);
    }
    cpu_meter_stop(&meter);
    uint64_t answered = conns_barrier(&l->hub, l->subscribers, 1);
    answered += conns_barrier(&l->hub, &l->publisher.conn, 1);
    /* A lost request loses its answer too: it is counted once. */
    uint64_t lost = check_settle(&l->check, 1, 0, l->publisher.sent);
    if (lost == 0 && answered < 2)
        fail(EXIT_SERVER, "%s:%u stopped answering: nothing moved for %g s", opt->host, opt->port,
             opt->stall_s);
    double seconds = l->ended_ns ? (double)(l->ended_ns - l->started_ns) / 1e9 : 0;
    report_begin(opt);
    report_server(&l->hub);
    report_count("size", opt->size);
    report_count("round_trips", l->round_trip.count);
    report_number("seconds", seconds);
    report_number("round_trips_per_s", seconds > 0 ? (double)l->round_trip.count / seconds : 0);
    report_latency("", &l->round_trip);
    report_cpu(&meter, 2 * l->publisher.sent);
    bool good = check_report(&l->check, lost);
    report_end();
    return good ? EXIT_OK : EXIT_CHECKS;
}

/* ---- paced ----------------------------------------------------------------------------------------- */

static uint64_t due_ns(const struct latency *l, uint64_t sequence)
{
    return l->started_ns + (uint64_t)((double)sequence * l->interval_ns);
}

static void paced_arrived(struct conn *c, const char *line)
{
    struct latency *l = c->owner;
    uint64_t sequence, now;
    if (!check_message(&l->check, c->index, 0, conn_body(c, line), c->size, &sequence))
        return;
    now = clock_ns();
    l->moved_ns = now;
    if (sequence >= l->opt->warmup)
        histogram_add(&l->round_trip, now - due_ns(l, sequence));
    if (l->check.fresh == l->total * l->opt->subscribers) {
        l->ended_ns = now;
        l->done = true;
    }
}

/* Sends everything that is due; returns how long until the next is. */
static uint64_t due_send(struct latency *l)
{
    struct publisher *p = &l->publisher;
    uint64_t now = clock_ns(), first = p->sent, count = 0;
    if (p->sent == l->total)
        return POLL_NS;
    if (p->conn.bulk_len)
        return POLL_NS;   /* the socket is full: EPOLLOUT will bring us back */
    while (first + count < l->total && count < p->batch_frames && due_ns(l, first + count) <= now) {
        if (first + count >= l->opt->warmup)
            histogram_add(&l->send_lag, now - due_ns(l, first + count));
        count++;
    }
    if (count) {
        publisher_fill(p, count);
        conn_write(&p->conn);
        l->moved_ns = now = clock_ns();
    }
    if (p->sent == l->total)
        return POLL_NS;
    uint64_t next = due_ns(l, p->sent);
    return next <= now ? 0 : next - now < POLL_NS ? next - now : POLL_NS;
}

static void paced_connect(struct latency *l)
{
    const struct options *opt = l->opt;
    struct hello hello = {0};
    opt->protocol->hello_begin(&hello);
    opt->protocol->hello_subscribe(&hello, "pace.x", "", 1);
    hello_end(&hello, opt->protocol);
    l->subscribers = allocate(opt->subscribers, sizeof *l->subscribers);
    for (uint32_t i = 0; i < opt->subscribers; i++) {
        struct conn *c = &l->subscribers[i];
        conn_init(c, &l->hub, "subscriber", i);
        hello_give(&hello, c);
        c->on_message = paced_arrived;
        c->owner = l;
    }
    conn_init(&l->publisher.conn, &l->hub, "publisher", 0);
    publisher_init(&l->publisher, opt, "pace.x", 0, "");
    publisher_hello(&l->publisher, "pace.x", "");
    connect_all(l, opt->subscribers);
}

int run_paced(const struct options *opt)
{
    static struct latency state;
    struct latency *l = &state;
    struct cpu_meter meter;
    prepare(l, opt, opt->subscribers);
    l->interval_ns = 1e9 / opt->rate;
    cpu_meter_init(&meter, opt);
    paced_connect(l);
    cpu_meter_start(&meter);
    l->moved_ns = l->started_ns = clock_ns();
    while (!l->done) {
        uint64_t left = due_send(l);
        if (hub_poll(&l->hub, left < AWAKE_NS ? 0 : left) == 0)
            sched_yield();
        stall_check(l);
    }
    cpu_meter_stop(&meter);
    uint64_t answered = conns_barrier(&l->hub, l->subscribers, opt->subscribers), lost = 0;
    for (uint32_t i = 0; i < opt->subscribers; i++)
        lost += check_settle(&l->check, i, 0, l->publisher.sent);
    if (lost == 0 && (!l->ended_ns || answered < opt->subscribers))
        fail(EXIT_SERVER, "%s:%u stopped answering: nothing moved for %g s", opt->host, opt->port,
             opt->stall_s);
    double seconds = l->ended_ns ? (double)(l->ended_ns - l->started_ns) / 1e9 : 0;
    uint64_t deliveries = l->check.fresh;
    report_begin(opt);
    report_server(&l->hub);
    report_count("subscribers", opt->subscribers);
    report_count("size", opt->size);
    report_number("rate", opt->rate);
    report_number("seconds", seconds);
    report_count("deliveries", deliveries);
    report_number("deliveries_per_s", seconds > 0 ? (double)deliveries / seconds : 0);
    report_latency("", &l->round_trip);
    report_latency("send_lag_", &l->send_lag);
    report_cpu(&meter, deliveries);
    bool good = check_report(&l->check, lost);
    report_end();
    return good ? EXIT_OK : EXIT_CHECKS;
}
