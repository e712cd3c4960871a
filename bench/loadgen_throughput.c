/*
 * Mode throughput: P publishers, S subscribers, as fast as the server takes it.
 *
 * All subscriptions are confirmed (PONG after SUB) before the first PUB. A phase (warm-up, then the
 * timed one) ends when every subscriber has every message; time runs from before the first send to
 * after the receive that brought the last message. Then each subscriber sends PING: what came in
 * front of the PONG is counted too, so a duplicate at the very end is seen without waiting.
 *
 * Created and written by this mode alone. Invariants: at most `window` messages of a publisher have
 * not reached its slowest subscriber. A crash leaves nothing.
 *
 * One loop for publishers and subscribers, by measurement: against a server that only rewrites PUB to
 * MSG, on two cores, one loop made 10.3 million 128-byte deliveries a second (91 ns of CPU each) and
 * two threads 8.2 million (117 ns): the second thread only takes a core from the server.
 */
#include <stdio.h>
#include <string.h>

#include "loadgen.h"

#define POLL_NS 100000000u   /* the longest sleep: bounds how late a deadline is noticed */

struct throughput {
    const struct options *opt;
    struct hub hub;
    struct publisher *publishers;
    struct conn *subscribers;
    struct check check;
    struct mixed *mixed;     /* with --subject-mode mixed */
    uint64_t fresh_target;   /* the phase is complete at this many first-time messages */
};

/* With pairs, publisher p feeds the subscribers p, p + 1, ... p + spread - 1, going round. */
static bool is_fed(const struct options *opt, uint32_t subscriber, uint32_t publisher)
{
    if (opt->subject_mode != SUBJECT_PAIRS)
        return true;
    return (subscriber + opt->subscribers - publisher) % opt->subscribers < opt->spread;
}

/* Whose subject a message of several pairs came on: the body says, and check_message() compares it
 * with the sender it also says. A subscriber that is not fed by that one gets a subject that is
 * nobody's. */
static uint32_t pair_publisher(const struct throughput *t, const struct conn *c, const char *line)
{
    struct body_head head;
    if (c->size < sizeof head)
        return UINT32_MAX;
    memcpy(&head, conn_body(c, line), sizeof head);
    return is_fed(t->opt, c->index, head.publisher) ? head.publisher : UINT32_MAX;
}

static void message_arrived(struct conn *c, const char *line)
{
    struct throughput *t = c->owner;
    uint32_t subject = 0;
    uint64_t sequence;
    if (t->mixed) {
        mixed_message(t->mixed, &t->check, c, line);
        return;
    }
    if (t->opt->subject_mode == SUBJECT_PAIRS)
        subject = t->opt->spread == 1 ? c->index : pair_publisher(t, c, line);
    else if (t->opt->subject_mode == SUBJECT_MANY)
        subject = c->sid - 1;
    check_message(&t->check, c->index, subject, conn_body(c, line), c->size, &sequence);
}

/* How many messages of this publisher its slowest subscriber has not seen yet. */
static uint64_t outstanding(const struct throughput *t, const struct publisher *p)
{
    const struct check *k = &t->check;
    uint32_t first = 0, end = t->opt->subscribers, column = k->sequenced ? p->conn.index : 0;
    uint64_t sent = p->sent, slowest = UINT64_MAX;
    if (t->mixed)
        return mixed_outstanding(t->mixed, p);
    if (t->opt->subject_mode == SUBJECT_PAIRS) {
        first = p->conn.index;
        end = first + t->opt->spread;
    } else if (!k->sequenced) {
        /* Bodies do not say who sent them: all publishers share their windows. */
        sent = 0;
        for (uint32_t i = 0; i < t->opt->publishers; i++)
            sent += t->publishers[i].sent;
        sent /= t->opt->publishers;
    }
    for (uint32_t s = first; s < end; s++) {
        const struct pair *pair = &k->pairs[(size_t)(s % t->opt->subscribers) * k->publishers + column];
        if (pair->next < slowest)
            slowest = pair->next;
    }
    if (!k->sequenced && t->opt->subject_mode != SUBJECT_PAIRS)
        slowest /= t->opt->publishers;
    return sent > slowest ? sent - slowest : 0;
}

/* How many messages may be sent now; a batch is worth sending when it is a good part of what fits. */
static uint64_t allowance(const struct throughput *t, const struct publisher *p, bool *ret_worth)
{
    uint64_t left = p->target - p->sent, window_left = left;
    if (p->window) {
        uint64_t waiting = outstanding(t, p);
        window_left = waiting < p->window ? p->window - waiting : 0;
    }
    uint64_t most = left < p->batch_frames ? left : p->batch_frames;
    if (p->window && most > (p->window + 1) / 2)
        most = (p->window + 1) / 2;
    *ret_worth = window_left >= most && left > 0;
    return window_left < left ? window_left : left;
}

static void publisher_pump(struct conn *c)
{
    struct throughput *t = c->owner;
    struct publisher *p = (struct publisher *)c;
    bool worth;
    uint64_t allowed = allowance(t, p, &worth);
    if (!worth) {
        p->blocked = p->sent < p->target;
        conn_want_write(c, false);
        return;
    }
    p->blocked = false;
    publisher_fill(p, allowed);
    conn_want_write(c, true);
    conn_write(c);
}

/* Wakes publishers that waited for the window. */
static void publishers_resume(struct throughput *t)
{
    for (uint32_t i = 0; i < t->opt->publishers; i++) {
        struct publisher *p = &t->publishers[i];
        if (p->blocked && !p->conn.bulk_len)
            publisher_pump(&p->conn);
    }
}

static uint64_t sent_total(const struct throughput *t)
{
    uint64_t sent = 0;
    for (uint32_t i = 0; i < t->opt->publishers; i++)
        sent += t->publishers[i].sent;
    return sent;
}

static uint64_t deliveries_of(const struct options *opt, uint64_t published)
{
    if (opt->subject_mode == SUBJECT_MIXED)
        return published * MIXED_DELIVERIES;
    return published * (opt->subject_mode == SUBJECT_PAIRS ? opt->spread : opt->subscribers);
}

/* Publishes `messages` more on every publisher; returns false if nothing moved for --stall seconds. */
static bool phase_run(struct throughput *t, uint64_t messages, uint64_t *ret_ns)
{
    const struct options *opt = t->opt;
    uint64_t begun_ns = clock_ns(), moved_ns = begun_ns, before = 0;
    t->fresh_target += deliveries_of(opt, messages * opt->publishers);
    for (uint32_t i = 0; i < opt->publishers; i++) {
        t->publishers[i].target += messages;
        publisher_pump(&t->publishers[i].conn);
    }
    while (t->check.fresh < t->fresh_target) {
        hub_poll(&t->hub, POLL_NS);
        publishers_resume(t);
        uint64_t now = clock_ns(), moved = sent_total(t) + t->check.fresh;
        if (moved != before) {
            before = moved;
            moved_ns = now;
        } else if ((double)(now - moved_ns) > opt->stall_s * 1e9) {
            return false;
        }
        if (now >= opt->deadline_ns)
            fail(EXIT_SERVER, "timed out after %g s: %llu of %llu deliveries made", opt->timeout_s,
                 (unsigned long long)t->check.fresh, (unsigned long long)t->fresh_target);
    }
    *ret_ns = clock_ns() - begun_ns;
    return true;
}

static void subscriber_hello(struct throughput *t, uint32_t subscriber, struct hello *h)
{
    const struct options *opt = t->opt;
    const struct protocol *protocol = opt->protocol;
    char subject[64];
    protocol->hello_begin(h);
    if (t->mixed) {
        mixed_hello(t->mixed, h, subscriber);
    } else if (opt->subject_mode == SUBJECT_PAIRS) {
        for (uint32_t i = 0; i < opt->spread; i++) {
            uint32_t publisher = (subscriber + opt->subscribers - i) % opt->subscribers;
            snprintf(subject, sizeof subject, "load.pair.%u", publisher);
            protocol->hello_subscribe(h, subject, "", i + 1);
        }
    } else if (opt->subject_mode == SUBJECT_MANY) {
        for (uint32_t i = 0; i < opt->subjects; i++) {
            snprintf(subject, sizeof subject, "load.%06u.x", i);
            protocol->hello_subscribe(h, subject, "", i + 1);
        }
    } else {
        protocol->hello_subscribe(h, "load.one", "", 1);
    }
    hello_end(h, protocol);
}

static void subscribers_open(struct throughput *t)
{
    const struct options *opt = t->opt;
    bool shared = opt->subject_mode == SUBJECT_ONE || opt->subject_mode == SUBJECT_MANY;
    struct hello hello = {0};
    t->subscribers = allocate(opt->subscribers, sizeof *t->subscribers);
    for (uint32_t i = 0; i < opt->subscribers; i++) {
        struct conn *c = &t->subscribers[i];
        conn_init(c, &t->hub, "subscriber", i);
        if (!shared || !hello.data) {
            hello = (struct hello){0};
            subscriber_hello(t, i, &hello);
        }
        hello_give(&hello, c);
        c->many_heads = opt->subject_mode == SUBJECT_MANY || opt->subject_mode == SUBJECT_MIXED;
        c->on_message = message_arrived;
        c->owner = t;
        conn_open(c);
        if (i + 1 - t->hub.ready >= opt->concurrency)
            conns_await(&t->hub, i + 2 - opt->concurrency, "opening subscribers");
    }
    conns_await(&t->hub, opt->subscribers, "waiting for subscriptions to be confirmed");
}

/* A publisher's share of the window: in bytes per subscriber, split among those who feed it. */
static uint64_t window_of(const struct options *opt)
{
    if (opt->window || !opt->window_bytes)
        return opt->window;
    uint64_t feeders = opt->subject_mode == SUBJECT_PAIRS ? opt->spread : opt->publishers;
    uint64_t messages = opt->window_bytes / feeders / frame_bytes_of(opt->size);
    return messages ? messages : 1;
}

static void publishers_open(struct throughput *t)
{
    const struct options *opt = t->opt;
    uint64_t already = t->hub.ready;
    t->publishers = allocate(opt->publishers, sizeof *t->publishers);
    for (uint32_t i = 0; i < opt->publishers; i++) {
        struct publisher *p = &t->publishers[i];
        char subject[64] = "load.one";
        if (opt->subject_mode == SUBJECT_PAIRS)
            snprintf(subject, sizeof subject, "load.pair.%u", i);
        else if (opt->subject_mode == SUBJECT_MANY)
            snprintf(subject, sizeof subject, "load.%06u.x", 0);
        else if (t->mixed)
            snprintf(subject, sizeof subject, "load.000.000");
        conn_init(&p->conn, &t->hub, "publisher", i);
        publisher_init(p, opt, subject, opt->subject_mode == SUBJECT_PAIRS ? i : 0, "");
        publisher_hello(p, subject, "");
        p->mixed = t->mixed;
        p->window = window_of(opt);
        p->conn.owner = t;
        conn_open(&p->conn);
    }
    conns_await(&t->hub, already + opt->publishers, "opening publishers");
    for (uint32_t i = 0; i < opt->publishers; i++)
        t->publishers[i].conn.on_writable = publisher_pump;
}

static uint64_t lost_total(struct throughput *t)
{
    const struct options *opt = t->opt;
    bool pairs = opt->subject_mode == SUBJECT_PAIRS;
    uint64_t lost = 0;
    if (t->mixed)
        return mixed_lost(t->mixed, t->publishers);
    for (uint32_t s = 0; s < opt->subscribers; s++) {
        /* Without sequences a subscriber counts what comes from all publishers in one place. */
        if (!t->check.sequenced) {
            lost += check_settle(&t->check, s, 0, pairs ? t->publishers[s].sent : sent_total(t));
            continue;
        }
        for (uint32_t p = 0; p < opt->publishers; p++)
            if (is_fed(opt, s, p))
                lost += check_settle(&t->check, s, p, t->publishers[p].sent);
    }
    return lost;
}

int run_throughput(const struct options *opt)
{
    static struct throughput state;
    struct throughput *t = &state;
    struct cpu_meter meter;
    uint64_t elapsed_ns = 0, warmup_ns, begun_ns = clock_ns();
    t->opt = opt;
    hub_init(&t->hub, opt);
    check_init(&t->check, opt->publishers, opt->subscribers, opt->size, opt->warmup + opt->messages);
    if (opt->verify)
        t->check.fill = body_fill();
    if (opt->subject_mode == SUBJECT_MIXED)
        t->mixed = mixed_make(opt);
    cpu_meter_init(&meter, opt);
    subscribers_open(t);
    publishers_open(t);
    uint64_t setup_ns = clock_ns() - begun_ns;

    bool moved = !opt->warmup || phase_run(t, opt->warmup, &warmup_ns);
    cpu_meter_start(&meter);
    moved = moved && phase_run(t, opt->messages, &elapsed_ns);
    cpu_meter_stop(&meter);
    uint64_t answered = conns_barrier(&t->hub, t->subscribers, opt->subscribers);
    uint64_t lost = lost_total(t);
    if (lost == 0 && (!moved || answered < opt->subscribers))
        fail(EXIT_SERVER, "%s:%u stopped answering: nothing moved for %g s", opt->host, opt->port,
             opt->stall_s);

    uint64_t deliveries = moved ? deliveries_of(opt, opt->messages * opt->publishers) : 0;
    double seconds = (double)elapsed_ns / 1e9;
    report_begin(opt);
    report_server(&t->hub);
    report_count("publishers", opt->publishers);
    report_count("subscribers", opt->subscribers);
    report_text("protocol", opt->protocol->name);
    report_text("subject_mode", SUBJECT_MODES[opt->subject_mode]);
    report_count("subjects", opt->subjects);
    report_count("size", opt->size);
    report_count("window", t->publishers[0].window);
    report_number("setup_seconds", (double)setup_ns / 1e9);
    report_count("published", moved ? opt->messages * opt->publishers : 0);
    report_count("deliveries", deliveries);
    report_number("seconds", seconds);
    report_number("published_per_s",
                  moved ? (double)(opt->messages * opt->publishers) / seconds : 0);
    report_number("deliveries_per_s", moved ? (double)deliveries / seconds : 0);
    report_number("delivered_mb_per_s",
                  moved ? (double)deliveries * opt->size / seconds / 1e6 : 0);
    report_cpu(&meter, deliveries);
    bool good = check_report(&t->check, lost);
    report_end();
    return good ? EXIT_OK : EXIT_CHECKS;
}
