/* show: copies what a connmgr or the router has counted into its stats segment. The structure, who
 * writes it and what a crash leaves are in stats.h. */
#include "observe/show.h"

#include "router/modes/modes.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

static uint64_t wall_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

void connmgr_resume(struct connmgr *cm, const struct stats *s)
{
    struct connmgr_stats found = cm->stats;

    memcpy(&cm->stats, s->totals, sizeof cm->stats);
    cm->stats.found_words = found.found_words;
    cm->stats.found_input = found.found_input;
    cm->stats.found_output = found.found_output;
    cm->stats.found_batches = found.found_batches;
    for (uint32_t slot = 0; slot < cm->journal->conns_high && slot < s->high; slot++) {
        struct conn *c = &cm->conns[slot];
        const struct stats_conn *row = &s->conns[slot];

        if (c->uid == 0 || atomic_load(&row->uid) != c->uid)
            continue;
        c->messages_in = row->messages_in;
        c->messages_out = row->messages_out;
        c->payload_in = row->payload_in;
        c->payload_out = row->payload_out;
    }
}

/* Who it is, from the connection table; the row was nobody's until uid is stored. */
static void take_row(const struct connmgr *cm, const struct conn *c, struct stats_conn *row)
{
    const struct conntable_slot *t = &cm->table->slots[c->slot];

    atomic_store_explicit(&row->uid, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    memset((char *)row + sizeof row->uid, 0, sizeof(*row) - sizeof row->uid);
    row->since_ns = row->active_ns = t->accepted_ns;
    row->port = t->port;
    memcpy(row->ip, t->ip, sizeof row->ip);
    row->ip[sizeof row->ip - 1] = 0;
    atomic_store_explicit(&row->uid, c->uid, memory_order_release);
}

/* Of each connection every few seconds: it is a system call. */
#define RTT_NS 250000000ULL
#define RTT_EVERY 32

static uint32_t rtt_of(int fd)
{
    struct tcp_info info;
    socklen_t len = sizeof info;

    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0 ? info.tcpi_rtt : 0;
}

static void show_conn(struct connmgr *cm, const struct conn *c, struct stats_conn *row, uint64_t wall)
{
    uint64_t in = c->in_pos + c->len, out = c->sent;

    if (atomic_load_explicit(&row->uid, memory_order_relaxed) != c->uid)
        take_row(cm, c, row);
    if (row->bytes_in != in || row->bytes_out != out)
        row->active_ns = wall;
    row->bytes_in = in;
    row->bytes_out = out;
    row->messages_in = c->messages_in;
    row->messages_out = c->messages_out;
    row->pending = c->end - c->sent;
    row->subs = c->subs;
    row->payload_in = c->payload_in;
    row->payload_out = c->payload_out;
    row->stuck_ms =
        c->writing && c->stuck_since && cm->now_ns > c->stuck_since ? (uint32_t)((cm->now_ns - c->stuck_since) / 1000000) : 0;
    if (!row->rtt_us || (c->slot + wall / RTT_NS) % RTT_EVERY == 0)
        row->rtt_us = rtt_of(c->fd);
}

static struct mq_attr queue_fill(mqd_t queue)
{
    struct mq_attr found = {0};

    (void)mq_getattr(queue, &found);
    return found;
}

uint32_t connmgr_show(struct connmgr *cm, struct stats *s, uint32_t from)
{
    const struct journal *j = cm->journal;
    uint64_t high = j->conns_high < s->rows ? j->conns_high : s->rows, wall = wall_ns();
    uint32_t slot = from < high ? from : 0;
    struct mq_attr refs = queue_fill(cm->port.refs.queue), orders = queue_fill(cm->port.orders);
    struct connmgr_gauges now = {
        .connections = cm->conn_count,
        .arena_chunks = cm->port.pool.arena->chunk_count,
        .arena_free = cm->port.pool.free_count,
        .output_blocks = j->blocks,
        .output_free = cm->block_free_count + j->blocks - j->blocks_high,
        .refs_waiting = BATCH_RING - 1 - batch_out_room(&cm->port.refs),
        .refs_queued = (uint64_t)refs.mq_curmsgs,
        .refs_depth = (uint64_t)refs.mq_maxmsg,
        .orders_queued = (uint64_t)orders.mq_curmsgs,
        .orders_depth = (uint64_t)orders.mq_maxmsg,
        .reading_stopped = (uint64_t)!cm->in_armed,
        .subscriptions = j->subs - subtable_left(cm),
        .subscriptions_max = j->subs,
    };

    if (s->high < high)
        s->high = high;
    for (uint32_t left = SHOW_ROWS_MAX; left && slot < high; left--, slot++) {
        const struct conn *c = &cm->conns[slot];
        struct stats_conn *row = &s->conns[slot];

        if (c->fd >= 0)
            show_conn(cm, c, row, wall);
        else if (atomic_load_explicit(&row->uid, memory_order_relaxed))
            atomic_store_explicit(&row->uid, 0, memory_order_release);
    }
    stats_publish(s, &cm->stats, sizeof cm->stats, &now, sizeof now);
    return slot < high ? slot : 0;
}

int connmgr_describe(struct connmgr *cm, struct stats *s, uint32_t slot, uint64_t uid,
                     const char *name, uint32_t name_len, const char *lang, uint32_t lang_len,
                     const char *version, uint32_t version_len)
{
    if (slot >= cm->journal->conns_high || slot >= s->rows || cm->conns[slot].uid != uid)
        return 0;
    struct stats_conn *row = &s->conns[slot];

    if (s->high <= slot)
        s->high = slot + 1;
    if (atomic_load_explicit(&row->uid, memory_order_relaxed) != uid)
        take_row(cm, &cm->conns[slot], row);
    stats_text(row->name, sizeof row->name, name, name_len);
    stats_text(row->lang, sizeof row->lang, lang, lang_len);
    stats_text(row->version, sizeof row->version, version, version_len);
    return 1;
}

void router_resume(struct router *rt, const struct stats *s)
{
    memcpy(&rt->stats, s->totals, sizeof rt->stats);
    rt->stats.found_words = rt->stats.found_batches = 0;
    rt->resumed = rt->stats.messages;
}

void router_show(struct router *rt, struct stats *s)
{
    struct router_gauges now = {0};
    struct index_stats index;

    index_stats(rt->index, &index);
    now.subscriptions = index.subs;
    now.subjects = index.nodes;
    now.subjects_max = index.nodes_max;
    now.subjects_cached = index.nodes_cached;
    now.matches = rt->stats.messages - rt->resumed;
    now.builds = index.builds;
    now.fanout_max = rt->fanout_max ? rt->fanout_max : rt->stats.deliveries != 0;
    now.requests = MODE_REQUESTS_MAX - modes_requests_left(rt);
    now.requests_max = MODE_REQUESTS_MAX;
    now.legs = MODE_LEGS_MAX - modes_legs_left(rt);
    now.legs_max = MODE_LEGS_MAX;
    now.connmgrs = rt->conf.ports;
    for (uint32_t m = 0; m < rt->conf.ports; m++)
        now.orders_waiting[m] = BATCH_RING - 1 - batch_out_room(&rt->out[m]);
    stats_publish(s, &rt->stats, sizeof rt->stats, &now, sizeof now);
}
