/*
 * loadgen: puts load on any server that speaks the NATS client protocol (or, for comparison, MQTT or
 * Redis publish and subscribe) and checks every delivery.
 *
 * This file holds the command line. `struct options` is created here, filled once by options_parse(),
 * and read-only afterwards. A crash leaves nothing.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "loadgen.h"

const char *const SUBJECT_MODES[4] = {"one", "pairs", "many", "mixed"};

static const char HELP[] =
    "usage: loadgen MODE [options]\n"
    "\n"
    "Modes\n"
    "  throughput   publishers to subscribers as fast as the server takes it\n"
    "  pingpong     request and answer, one at a time: round-trip latency\n"
    "  paced        --rate messages a second: latency from the time each message was due\n"
    "  connect      open --connections connections: connections per second\n"
    "  idle         hold --connections connections with one subscription each, say\n"
    "               {\"event\": \"ready\"}, wait for a line on standard input, then send one\n"
    "               message to all of them\n"
    "\n"
    "Server\n"
    "  --host HOST            127.0.0.1\n"
    "  --port PORT            4222\n"
    "  --protocol P           nats, relay (bench/relay); throughput also mqtt, redis (nats)\n"
    "  --server-pids A,B,...  the server's processes: their CPU time is reported\n"
    "  --timeout S            end with exit code 3 after S seconds in all (60)\n"
    "  --stall S              nothing moves for S seconds: what is missing is lost (5)\n"
    "\n"
    "Load\n"
    "  --publishers N         throughput (1)\n"
    "  --subscribers N        throughput, paced (1)\n"
    "  --subject-mode M       throughput: one (all on one subject), pairs (publisher i to\n"
    "                         subscriber i), many (--subjects, chosen at random), mixed\n"
    "                         (--subjects with wildcards and queue groups: each message\n"
    "                         goes to three subscriptions and two groups) (one)\n"
    "  --subjects N           with many, mixed: distinct subjects, each subscribed to (1000)\n"
    "  --spread N             with pairs: publisher i to subscribers i to i + N - 1 (1)\n"
    "  --size BYTES           body; below 16 only the number of messages is checked (128)\n"
    "  --messages N           from each publisher, or round trips (100000)\n"
    "  --warmup N             before them, not measured (1000)\n"
    "  --window N             messages of a publisher that its slowest subscriber has not\n"
    "                         seen (0: use --window-bytes)\n"
    "  --window-bytes B       the same in bytes for each subscriber, shared by the\n"
    "                         publishers that feed it; 0 is no window (8388608)\n"
    "  --rate R               paced: messages a second (10000)\n"
    "  --connections N        connect, idle (1000)\n"
    "  --concurrency N        connections being opened at the same time (64)\n"
    "  --seed N               choice of subjects (1)\n"
    "  --verify               compare every byte of every body (throughput)\n"
    "\n"
    "Output\n"
    "  --json                 one JSON object on standard output\n"
    "  --help, --version\n"
    "\n"
    "Exit codes: 0 good, 1 messages lost, duplicated, reordered, misrouted or corrupt,\n"
    "2 bad arguments, 3 the server does not answer or ended a connection.\n";

static uint64_t whole(const char *name, const char *text, uint64_t low, uint64_t high)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || value < low || value > high)
        fail(EXIT_USAGE, "--%s: a whole number from %llu to %llu is needed, not \"%s\"", name,
             (unsigned long long)low, (unsigned long long)high, text);
    return value;
}

static double positive(const char *name, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (!*text || *end || !isfinite(value) || value <= 0 || value > 1e9)
        fail(EXIT_USAGE, "--%s: a number above 0 is needed, not \"%s\"", name, text);
    return value;
}

static void pids_parse(struct options *opt, const char *text)
{
    char copy[PIDS_MAX * 8], *rest = copy, *word;
    if (strlen(text) >= sizeof copy)
        fail(EXIT_USAGE, "--server-pids: at most %u processes", PIDS_MAX);
    strcpy(copy, text);
    opt->pid_count = 0;
    while ((word = strsep(&rest, ",")) != NULL) {
        if (opt->pid_count == PIDS_MAX)
            fail(EXIT_USAGE, "--server-pids: at most %u processes", PIDS_MAX);
        opt->pids[opt->pid_count++] = (int)whole("server-pids", word, 1, 4194304);
    }
}

static enum subject_mode subject_mode_parse(const char *text)
{
    for (uint32_t i = 0; i < sizeof SUBJECT_MODES / sizeof SUBJECT_MODES[0]; i++)
        if (strcmp(text, SUBJECT_MODES[i]) == 0)
            return i;
    fail(EXIT_USAGE, "--subject-mode: one, pairs, many or mixed, not \"%s\"", text);
}

enum {
    OPT_HOST = 256, OPT_PORT, OPT_PIDS, OPT_TIMEOUT, OPT_STALL, OPT_PUBLISHERS, OPT_SUBSCRIBERS,
    OPT_SUBJECT_MODE, OPT_SUBJECTS, OPT_SIZE, OPT_MESSAGES, OPT_WARMUP, OPT_WINDOW, OPT_WINDOW_BYTES,
    OPT_RATE, OPT_CONNECTIONS, OPT_CONCURRENCY, OPT_SEED, OPT_VERIFY, OPT_JSON, OPT_HELP,
    OPT_VERSION, OPT_PROTOCOL, OPT_SPREAD,
};

static const struct option LONG_OPTIONS[] = {
    {"host", required_argument, NULL, OPT_HOST},
    {"port", required_argument, NULL, OPT_PORT},
    {"server-pids", required_argument, NULL, OPT_PIDS},
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"stall", required_argument, NULL, OPT_STALL},
    {"publishers", required_argument, NULL, OPT_PUBLISHERS},
    {"subscribers", required_argument, NULL, OPT_SUBSCRIBERS},
    {"subject-mode", required_argument, NULL, OPT_SUBJECT_MODE},
    {"subjects", required_argument, NULL, OPT_SUBJECTS},
    {"spread", required_argument, NULL, OPT_SPREAD},
    {"protocol", required_argument, NULL, OPT_PROTOCOL},
    {"size", required_argument, NULL, OPT_SIZE},
    {"messages", required_argument, NULL, OPT_MESSAGES},
    {"warmup", required_argument, NULL, OPT_WARMUP},
    {"window", required_argument, NULL, OPT_WINDOW},
    {"window-bytes", required_argument, NULL, OPT_WINDOW_BYTES},
    {"rate", required_argument, NULL, OPT_RATE},
    {"connections", required_argument, NULL, OPT_CONNECTIONS},
    {"concurrency", required_argument, NULL, OPT_CONCURRENCY},
    {"seed", required_argument, NULL, OPT_SEED},
    {"verify", no_argument, NULL, OPT_VERIFY},
    {"json", no_argument, NULL, OPT_JSON},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

static void option_take(struct options *opt, int which, const char *value)
{
    switch (which) {
    case OPT_HOST: opt->host = value; break;
    case OPT_PORT: opt->port = (uint32_t)whole("port", value, 1, 65535); break;
    case OPT_PIDS: pids_parse(opt, value); break;
    case OPT_TIMEOUT: opt->timeout_s = positive("timeout", value); break;
    case OPT_STALL: opt->stall_s = positive("stall", value); break;
    case OPT_PUBLISHERS: opt->publishers = (uint32_t)whole("publishers", value, 1, 10000); break;
    case OPT_SUBSCRIBERS: opt->subscribers = (uint32_t)whole("subscribers", value, 1, 10000); break;
    case OPT_SUBJECT_MODE: opt->subject_mode = subject_mode_parse(value); break;
    case OPT_SUBJECTS: opt->subjects = (uint32_t)whole("subjects", value, 1, SUBJECTS_MAX); break;
    case OPT_SPREAD: opt->spread = (uint32_t)whole("spread", value, 1, 10000); break;
    case OPT_PROTOCOL: opt->protocol = protocol_find(value); break;
    case OPT_SIZE: opt->size = (uint32_t)whole("size", value, 0, BODY_BYTES_MAX); break;
    case OPT_MESSAGES: opt->messages = whole("messages", value, 1, 1000000000000u); break;
    case OPT_WARMUP: opt->warmup = whole("warmup", value, 0, 1000000000000u); break;
    case OPT_WINDOW: opt->window = whole("window", value, 0, 1000000000u); break;
    case OPT_WINDOW_BYTES: opt->window_bytes = whole("window-bytes", value, 0, 1000000000000u); break;
    case OPT_RATE: opt->rate = positive("rate", value); break;
    case OPT_CONNECTIONS: opt->connections = (uint32_t)whole("connections", value, 1, 1000000); break;
    case OPT_CONCURRENCY: opt->concurrency = (uint32_t)whole("concurrency", value, 1, 10000); break;
    case OPT_SEED: opt->seed = whole("seed", value, 0, UINT64_MAX - 1); break;
    case OPT_VERIFY: opt->verify = true; break;
    case OPT_JSON: opt->json = true; break;
    case OPT_HELP: fputs(HELP, stdout); exit(EXIT_OK);
    case OPT_VERSION: puts("loadgen " LOADGEN_VERSION); exit(EXIT_OK);
    default: break;
    }
}

static void options_parse(struct options *opt, int argc, char **argv)
{
    *opt = (struct options){
        .host = "127.0.0.1", .protocol = &PROTOCOL_NATS, .port = 4222, .spread = 1, .publishers = 1, .subscribers = 1, .subjects = 1000,
        .size = 128, .connections = 1000, .concurrency = 64, .messages = 100000,
        .warmup = 1000, .window_bytes = 8388608, .seed = 1, .rate = 10000, .timeout_s = 60,
        .stall_s = 5,
    };
    opterr = 0;
    for (;;) {
        int which = getopt_long(argc, argv, ":", LONG_OPTIONS, NULL);
        if (which == -1)
            break;
        if (which == ':')
            fail(EXIT_USAGE, "%s needs a value (see --help)", argv[optind - 1]);
        if (which == '?')
            fail(EXIT_USAGE, "unknown option %s (see --help)", argv[optind - 1]);
        option_take(opt, which, optarg);
    }
    if (optind == argc)
        fail(EXIT_USAGE, "a mode is needed: throughput, pingpong, paced, connect or idle (see --help)");
    if (optind + 1 < argc)
        fail(EXIT_USAGE, "one mode at a time: \"%s\" is too many (see --help)", argv[optind + 1]);
    opt->mode = argv[optind];
    if (opt->subject_mode == SUBJECT_PAIRS && opt->publishers != opt->subscribers)
        fail(EXIT_USAGE, "--subject-mode pairs needs as many --publishers as --subscribers");
    if (opt->spread > opt->subscribers || (opt->spread > 1 && opt->subject_mode != SUBJECT_PAIRS))
        fail(EXIT_USAGE, "--spread needs --subject-mode pairs and at least as many --subscribers");
    if ((opt->subject_mode == SUBJECT_MIXED || opt->spread > 1) && opt->size < sizeof(struct body_head))
        fail(EXIT_USAGE, "--subject-mode mixed and --spread need a --size of at least 16");
    if (opt->subject_mode == SUBJECT_MIXED && opt->subjects > MIXED_SUBJECTS_MAX)
        fail(EXIT_USAGE, "--subject-mode mixed: at most %u --subjects", MIXED_SUBJECTS_MAX);
    if (opt->protocol->throughput_only && strcmp(opt->mode, "throughput") != 0)
        fail(EXIT_USAGE, "--protocol %s: throughput is the only mode", opt->protocol->name);
    if (opt->protocol != &PROTOCOL_NATS && opt->subject_mode >= SUBJECT_MANY)
        fail(EXIT_USAGE, "--subject-mode %s: for --protocol nats only", SUBJECT_MODES[opt->subject_mode]);
    if (opt->subject_mode < SUBJECT_MANY)
        opt->subjects = opt->subject_mode == SUBJECT_PAIRS ? opt->publishers : 1;
    if (opt->verify && opt->size < sizeof(struct body_head))
        fail(EXIT_USAGE, "--verify needs a --size of at least 16");
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(const struct options *);
    } modes[] = {
        {"throughput", run_throughput}, {"pingpong", run_pingpong}, {"paced", run_paced},
        {"connect", run_connect},       {"idle", run_idle},
    };
    static struct options opt;
    options_parse(&opt, argc, argv);

    struct rlimit files;
    uint64_t wanted = (uint64_t)opt.publishers + opt.subscribers + 64;
    if (strcmp(opt.mode, "connect") == 0 || strcmp(opt.mode, "idle") == 0)
        wanted = (uint64_t)opt.connections + 64;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
        if (files.rlim_cur < wanted)
            fail(EXIT_USAGE, "%llu open files are needed and the limit is %llu (ulimit -Hn)",
                 (unsigned long long)wanted, (unsigned long long)files.rlim_cur);
    }
    opt.deadline_ns = clock_ns() + (uint64_t)(opt.timeout_s * 1e9);
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++)
        if (strcmp(opt.mode, modes[i].name) == 0)
            return modes[i].run(&opt);
    fail(EXIT_USAGE, "unknown mode \"%s\" (see --help)", opt.mode);
}
