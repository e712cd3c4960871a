/*
 * Modes connect and idle: many connections.
 *
 * connect: opens N connections (TCP connect, INFO, CONNECT and PING, PONG), at most --concurrency of
 * them on the way at any time, and keeps them open until the last is ready.
 * idle: the same with one subscription each; says {"event":"ready"} on standard output, waits for a
 * line or the end of standard input (so that a caller can weigh the server in between), then
 * publishes one message and checks that every connection gets it exactly once.
 *
 * Created and written by this mode alone. A crash leaves nothing.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "loadgen.h"

#define POLL_NS 100000000u   /* the longest sleep: bounds how late a deadline is noticed */

struct crowd {
    const struct options *opt;
    struct hub hub;
    struct conn *conns;
    struct check check;
    struct publisher publisher;
    uint64_t elapsed_ns;
    struct histogram setup;
};

static void crowd_message(struct conn *c, const char *line)
{
    struct crowd *w = c->owner;
    uint64_t sequence;
    check_message(&w->check, c->index, 0, conn_body(c, line), c->size, &sequence);
}

/* Opens all connections and records how long each took. */
static void crowd_open(struct crowd *w, const struct hello *hello)
{
    const struct options *opt = w->opt;
    uint64_t begun_ns = clock_ns();
    uint32_t opened = 0;
    w->conns = allocate(opt->connections, sizeof *w->conns);
    while (w->hub.ready < opt->connections) {
        while (opened < opt->connections && opened - w->hub.ready < opt->concurrency) {
            struct conn *c = &w->conns[opened];
            conn_init(c, &w->hub, "connection", opened++);
            hello_give(hello, c);
            c->on_message = crowd_message;
            c->owner = w;
            conn_open(c);
        }
        hub_poll(&w->hub, POLL_NS);
        deadline_check(opt, "opening connections");
    }
    w->elapsed_ns = clock_ns() - begun_ns;
    for (uint32_t i = 0; i < opt->connections; i++)
        histogram_add(&w->setup, w->conns[i].ready_ns - w->conns[i].opened_ns);
}

static void crowd_report(const struct crowd *w)
{
    double seconds = (double)w->elapsed_ns / 1e9;
    report_begin(w->opt);
    report_server(&w->hub);
    report_count("connections", w->opt->connections);
    report_count("concurrency", w->opt->concurrency);
    report_number("seconds", seconds);
    report_number("connections_per_s", (double)w->opt->connections / seconds);
    report_latency("setup_", &w->setup);
}

int run_connect(const struct options *opt)
{
    static struct crowd state;
    struct crowd *w = &state;
    struct cpu_meter meter;
    struct hello hello = {0};
    opt->protocol->hello_begin(&hello);
    hello_end(&hello, opt->protocol);
    w->opt = opt;
    hub_init(&w->hub, opt);
    cpu_meter_init(&meter, opt);
    cpu_meter_start(&meter);
    crowd_open(w, &hello);
    cpu_meter_stop(&meter);
    for (uint32_t i = 0; i < opt->connections; i++)
        conn_close(&w->conns[i]);
    crowd_report(w);
    report_cpu(&meter, opt->connections);
    report_end();
    return EXIT_OK;
}

/* Answers the server's PINGs until standard input has a line or ends. */
static void await_go(struct crowd *w)
{
    uint32_t readable = 0;
    char line[256];
    printf("{\"event\": \"ready\", \"connections\": %u}\n", w->opt->connections);
    fflush(stdout);
    hub_watch(&w->hub, STDIN_FILENO, &readable);
    for (;;) {
        if (readable) {
            ssize_t n = read(STDIN_FILENO, line, sizeof line);
            if (n <= 0 || memchr(line, '\n', (size_t)n))
                break;
            readable = 0;
        }
        hub_poll(&w->hub, POLL_NS);
        deadline_check(w->opt, "waiting for a line on standard input");
    }
    hub_unwatch(&w->hub, STDIN_FILENO);
}

int run_idle(const struct options *opt)
{
    static struct crowd state;
    struct crowd *w = &state;
    struct conn *sender = &w->publisher.conn;
    struct hello hello = {0};
    opt->protocol->hello_begin(&hello);
    opt->protocol->hello_subscribe(&hello, "idle.all", "", 1);
    hello_end(&hello, opt->protocol);
    w->opt = opt;
    hub_init(&w->hub, opt);
    check_init(&w->check, 1, opt->connections, opt->size, 1);
    crowd_open(w, &hello);
    conn_init(sender, &w->hub, "publisher", 0);
    publisher_init(&w->publisher, opt, "idle.all", 0, "");
    publisher_hello(&w->publisher, "idle.all", "");
    conn_open(sender);
    conns_await(&w->hub, opt->connections + 1, "opening the publisher");
    await_go(w);

    uint64_t begun_ns = clock_ns(), moved_ns = begun_ns, before = 0, reached = 0;
    publisher_fill(&w->publisher, 1);
    conn_write(sender);
    while (reached < opt->connections) {
        hub_poll(&w->hub, POLL_NS);
        reached = w->check.fresh;
        uint64_t now = clock_ns();
        if (reached != before) {
            before = reached;
            moved_ns = now;
        } else if ((double)(now - moved_ns) > opt->stall_s * 1e9) {
            break;
        }
        deadline_check(opt, "waiting for the one message to reach everyone");
    }
    uint64_t elapsed_ns = clock_ns() - begun_ns;
    conns_barrier(&w->hub, w->conns, opt->connections);
    reached = w->check.fresh;
    uint64_t lost = 0;
    for (uint32_t i = 0; i < opt->connections; i++)
        lost += check_settle(&w->check, i, 0, 1);
    crowd_report(w);
    report_count("reached", reached);
    report_number("reach_all_seconds", (double)elapsed_ns / 1e9);
    bool good = check_report(&w->check, lost);
    report_end();
    return good ? EXIT_OK : EXIT_CHECKS;
}
