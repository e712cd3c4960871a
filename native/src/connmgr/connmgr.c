/* connmgr: opening, the turn, timers. See connmgr.h. */
#include "connmgr/refer.h"
#include "base/reserve.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <time.h>

#define TAG_ORDERS 1u
#define TAG_REFS 2u
#define TAG_IN 3u
#define TAG_OUT 4u
#define TAG_USER 16u /* plus the caller's tag */
#define SWEEP_A_TICK 256 /* chunks looked at each second for lost hints */
#define POLL_ARENA_MS 5 /* other connmgrs free chunks of ours without waking us */

int connmgr_epoll(int epoll, int fd, uint32_t events, uint32_t tag)
{
    struct epoll_event ev = {.events = events, .data.u32 = tag};

    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &ev) == 0)
        return 0;
    return errno == EEXIST && epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &ev) == 0 ? 0 : -errno;
}

int connmgr_open(const struct connmgr_conf *conf, struct journal *journal, struct conntable *table,
                 int refs_queue, int orders_queue, struct connmgr **ret_cm)
{
    struct connmgr *cm = reserve(sizeof(*cm));
    uint32_t hash = 1, segs = journal->blocks * JOURNAL_SEGS_PER_BLOCK;

    if (!cm || port_open(&cm->port, &journal->port, refs_queue, orders_queue) != 0)
        return -ENOMEM;
    if (getrandom(cm->sub_key, sizeof(cm->sub_key), 0) != (ssize_t)sizeof(cm->sub_key))
        return -EIO;
    while (hash < journal->subs)
        hash *= 2;
    cm->conf = *conf;
    cm->journal = journal;
    cm->table = table;
    cm->recs = journal_conns(journal);
    cm->subs = journal_subs(journal);
    cm->segs = journal_segs(journal);
    cm->conns = reserve((uint64_t)journal->conns * sizeof(struct conn));
    cm->flows = reserve((uint64_t)journal->conns * sizeof(struct flow));
    cm->taken = reserve(ARENA_CHUNK_MESSAGES * sizeof(struct taken));
    cm->links = reserve((uint64_t)journal->subs * sizeof(struct sub_link));
    cm->sub_hash = reserve((uint64_t)hash * 4);
    cm->sub_hash_mask = hash - 1;
    cm->sub_free = reserve((uint64_t)journal->subs * 4);
    cm->sub_due = reserve((uint64_t)journal->subs * 4);
    cm->seg_free = reserve((uint64_t)segs * 4);
    cm->block_free = reserve((uint64_t)journal->blocks * 4);
    cm->block_users = reserve((uint64_t)journal->blocks * 2);
    cm->raw = reserve(streams_scratch_bytes());
    cm->scratch = reserve(segs > 4 * CONNMGR_RECV_MAX ? segs : 4 * CONNMGR_RECV_MAX);
    cm->epoll = epoll_create1(EPOLL_CLOEXEC);
    cm->epoll_in = epoll_create1(EPOLL_CLOEXEC);
    cm->epoll_out = epoll_create1(EPOLL_CLOEXEC);
    if (!cm->conns || !cm->flows || !cm->taken || !cm->links || !cm->sub_hash || !cm->sub_free || !cm->sub_due || !cm->seg_free ||
        !cm->block_free || !cm->block_users || !cm->scratch || !cm->raw || cm->epoll < 0 ||
        cm->epoll_in < 0 || cm->epoll_out < 0)
        return -ENOMEM;
    cm->spin[0] = cm->spin[1] = spin_make(conf->spin_ns, (int)conf->spin_adaptive);
    cm->dirty_first = cm->flush_first = cm->ending_first = cm->finished_first = CONNMGR_NONE;
    stalled_open(cm);
    cm->asked_first = cm->asked_last = cm->held_first = cm->own_first = CONNMGR_NONE;
    cm->fill_chunk = CONNMGR_NONE;
    cm->flows_on = conf->flow_leases && conf->ports == 1; /* F1 */
    if (connmgr_epoll(cm->epoll, orders_queue, EPOLLIN, TAG_ORDERS) || connmgr_epoll(cm->epoll, refs_queue, 0, TAG_REFS) ||
        connmgr_epoll(cm->epoll, cm->epoll_in, EPOLLIN, TAG_IN) || connmgr_epoll(cm->epoll, cm->epoll_out, EPOLLIN, TAG_OUT))
        return -errno;
    cm->in_armed = 1;
    *ret_cm = cm;
    return 0;
}

int connmgr_add_arena(struct connmgr *cm, uint32_t index, struct arena *arena)
{
    int err = port_add_arena(&cm->port, index, arena);

    if (err || index != cm->port.index)
        return err;
    /* Beside what is begun there is always room for the largest frame and for small ones. Half of
     * it, because pieces of up to half a chunk fill chunks only in part. */
    uint32_t frame = (cm->conf.max_payload + cm->conf.max_control_line) / ARENA_CHUNK_BYTES + 2;

    if (arena->chunk_count > frame + CONNMGR_CHUNKS_RESERVED)
        cm->begun_max = (uint64_t)(arena->chunk_count - frame - CONNMGR_CHUNKS_RESERVED) * ARENA_CHUNK_BYTES / 2;
    if (cm->begun_max < 2 * CONNMGR_RECV_MAX)
        cm->begun_max = 2 * CONNMGR_RECV_MAX;
    cm->chunk_messages = reserve((uint64_t)arena->chunk_count * 4);
    return cm->chunk_messages ? 0 : -ENOMEM;
}

int connmgr_watch(struct connmgr *cm, int fd, uint32_t tag)
{
    return connmgr_epoll(cm->epoll, fd, EPOLLIN, TAG_USER + tag);
}

void connmgr_unwatch(struct connmgr *cm, int fd)
{
    (void)epoll_ctl(cm->epoll, EPOLL_CTL_DEL, fd, NULL);
}

const struct connmgr_event *connmgr_events(const struct connmgr *cm) { return cm->events; }
const struct connmgr_stats *connmgr_get_stats(const struct connmgr *cm) { return &cm->stats; }
uint32_t connmgr_event_count(const struct connmgr *cm) { return cm->event_count; }
void connmgr_forget_events(struct connmgr *cm) { cm->event_count = 0; }
uint32_t connmgr_conn_count(const struct connmgr *cm) { return cm->conn_count; }

uint32_t connmgr_slots(const struct connmgr *cm) { return (uint32_t)cm->journal->conns_high; }

int connmgr_socket(const struct connmgr *cm, uint32_t slot, uint64_t *ret_uid)
{
    *ret_uid = cm->conns[slot].uid;
    return slot < cm->journal->conns_high ? cm->conns[slot].fd : -1;
}

int connmgr_found_batch(const struct connmgr *cm) { return port_has_batch(&cm->port); }

int connmgr_set_greeting(struct connmgr *cm, uint32_t listener, const char *text, uint32_t len)
{
    if (listener >= CONNMGR_LISTENERS_MAX || len >= CONNMGR_GREETING_MAX)
        return -EINVAL;
    memset(cm->conf.greeting[listener], 0, CONNMGR_GREETING_MAX);
    memcpy(cm->conf.greeting[listener], text, len);
    return 0;
}

int connmgr_idle(const struct connmgr *cm)
{
    const struct port_log *log = cm->port.log;
    uint64_t live, busy;

    if (cm->conn_count || cm->sub_due_count || port_has_batch(&cm->port) ||
        log->refs.tail != batch_tail(atomic_load(&log->refs.sent) + 1, BATCH_HEAD))
        return 0;
    for (uint32_t i = 0; i < PORTS_MAX; i++)
        if (log->open_handle[i])
            return 0;
    for (uint64_t slot = 0; slot < cm->journal->conns_high; slot++)
        if (cm->recs[slot].uid)
            return 0;
    arena_census(cm->port.arenas[cm->port.index], &live, &busy);
    return live == 0;
}

struct connmgr_event *connmgr_event(struct connmgr *cm, uint32_t type, const struct conn *c, int code)
{
    if (cm->event_count == CONNMGR_EVENTS_MAX)
        return NULL;
    struct connmgr_event *ev = &cm->events[cm->event_count++];

    *ev = (struct connmgr_event){.type = type, .slot = c ? c->slot : 0, .uid = c ? c->uid : 0, .code = code};
    return ev;
}

/* ---- the turn ---- */

static uint64_t work_in(const struct connmgr *cm) { return spin_work(cm->stats.messages_in, cm->stats.bytes_in); }
static uint64_t work_out(const struct connmgr *cm) { return spin_work(cm->stats.messages_out, cm->stats.bytes_out); }

static int take_orders(struct connmgr *cm)
{
    uint64_t most = cm->made + CONNMGR_MADE_A_TURN;

    for (int i = 0; i < CONNMGR_ORDERS_A_TURN; i++) {
        uint64_t before = work_out(cm);

        if (cm->event_count > CONNMGR_EVENTS_MAX / 2)
            return i;
        int got = port_receive(&cm->port);

        if (got <= 0)
            return got < 0 ? got : i;
        output_make_room(cm);
        int err = orders_process(cm);
        if (err)
            return err;
        if (cm->made > most || work_out(cm) - before <= SPIN_SPARSE_MAX) /* after a small batch there is hardly another */
            return i + 1;
    }
    return CONNMGR_ORDERS_A_TURN;
}

static void write_ready(struct connmgr *cm)
{
    struct epoll_event evs[64];
    int n = epoll_wait(cm->epoll_out, evs, 64, 0);

    for (int i = 0; i < n; i++) {
        struct conn *c = &cm->conns[evs[i].data.u32];

        if (c->writing)
            output_write(cm, c);
    }
}

/* One quantum (CONNMGR_RECV_MAX) of each readable connection in turn: deficit round robin, where
 * nothing is saved up. What the ring has no room for now goes on with the next connection later.
 * Returns how many were read. */
static int read_ready(struct connmgr *cm)
{
    uint64_t most = cm->made + CONNMGR_MADE_A_TURN;
    int count = 0;

    if (cm->ready_at == cm->ready_count) {
        cm->ready_count = epoll_wait(cm->epoll_in, cm->ready, CONNMGR_READS_A_TURN, 0);
        cm->ready_at = 0;
        if (cm->ready_count < 0)
            cm->ready_count = 0;
    }
    for (; cm->ready_at < cm->ready_count; cm->ready_at++) {
        if (cm->event_count > CONNMGR_EVENTS_MAX / 2 || !refer_have_room(cm) || cm->made > most)
            break;
        struct conn *c = &cm->conns[cm->ready[cm->ready_at].data.u32];

        (void)input_read(cm, c);
        (void)refer_send(cm, REFER_READING);
        count++;
    }
    return count;
}

/* A batch leaves when it is full or holds as many messages as a full one of single references, or
 * when there is nothing more to read: each one sent may wake the router, which costs more than what
 * is in a small one. More would leave the cache. */
static void read_on(struct connmgr *cm)
{
    uint64_t seq = cm->port.refs.seq, before = work_in(cm), messages = cm->stats.messages_in;

    for (int pass = 0; pass < CONNMGR_PASSES_A_TURN; pass++) {
        if (read_ready(cm) <= 0)
            return;
        if (cm->port.refs.seq != seq || cm->event_count || work_in(cm) - before <= SPIN_SPARSE_MAX ||
            cm->stats.messages_in - messages >= CONNMGR_FULL_MESSAGES)
            return;
    }
}

/* Reading clients is what stops when anything is full; nothing else does. */
static void arm(struct connmgr *cm)
{
    int in = refer_have_room(cm);

    if (in != cm->in_armed) {
        struct epoll_event ev = {.events = in ? EPOLLIN : 0, .data.u32 = TAG_IN};

        (void)epoll_ctl(cm->epoll, EPOLL_CTL_MOD, cm->epoll_in, &ev);
        cm->in_armed = in;
    }
    if (cm->port.refs.blocked != cm->refs_armed) {
        struct epoll_event ev = {.events = cm->port.refs.blocked ? EPOLLOUT : 0, .data.u32 = TAG_REFS};

        (void)epoll_ctl(cm->epoll, EPOLL_CTL_MOD, cm->port.refs.queue, &ev);
        cm->refs_armed = cm->port.refs.blocked;
    }
}

/* Whether there is more to read, at the end of a round. Who sent a lot at once has more, until a few
 * rounds have brought little, or nothing for a moment. That the ring is full says nothing about it.
 * 1: the others, who may be waiting for us to be as far as they are, must be told that it is over. */
static int flood_is_over(struct connmgr *cm)
{
    uint64_t reads = cm->stats.recvs, large = cm->large_reads, messages = cm->stats.messages_in;
    int has_read = reads != cm->reads_seen, has_large = large != cm->large_seen;

    if (has_read || messages != cm->messages_seen)
        cm->active_ns = cm->now_ns;
    cm->reads_seen = reads;
    cm->large_seen = large;
    cm->messages_seen = messages;
    if (has_large)
        cm->port.refs.more = CONNMGR_MORE_ROUNDS;
    if (has_large || cm->stalled_ring || !cm->in_armed)
        return 0;
    if (has_read && cm->port.refs.more)
        cm->port.refs.more--;
    if (cm->now_ns - cm->active_ns > CONNMGR_PAUSE_MS * 1000000ULL)
        cm->port.refs.more = 0;
    return !cm->port.refs.more && cm->port.refs.said_more && cm->conf.ports > 1;
}

/* Waits for something to do; looks again for a moment before it sleeps. */
static int await(struct connmgr *cm, struct epoll_event *evs, int max, int sleep_ms)
{
    uint64_t seen = work_in(cm) + work_out(cm), work = seen - cm->spin_seen;
    struct spin *s = &cm->spin[cm->asking];
    int n = 0;

    cm->spin_seen = seen;
    if (sleep_ms == 0)
        return epoll_wait(cm->epoll, evs, max, 0);
    uint64_t began = clock_ns(), until = began + spin_time(s, work);

    for (uint64_t now = began; n == 0 && now < until; now = clock_ns()) {
        n = epoll_wait(cm->epoll, evs, max, 0);
        if (n == 0)
            sched_yield();
    }
    if (n == 0)
        n = epoll_wait(cm->epoll, evs, max, sleep_ms);
    spin_learn(s, clock_ns() - began);
    return n;
}

/* Once a turn: what is to be traced. */
static void look_at_trace(struct connmgr *cm)
{
    struct trace *t = &cm->trace;

    if (!t->ring)
        return;
    uint64_t word = atomic_load_explicit(&t->control->word, memory_order_relaxed);

    if (word != t->word)
        trace_switch(cm, word);
    if (t->ring->flights != t->flights)
        t->ring->flights = t->flights;
    if (atomic_load_explicit(&t->ring->word, memory_order_relaxed) != word)
        atomic_store_explicit(&t->ring->word, word, memory_order_release);
}

static int one_round(struct connmgr *cm, int sleep_ms)
{
    struct epoll_event evs[16];
    int ready = 0, n, took, wrote, over;

    arm(cm);
    if (cm->port.refs.said_more && sleep_ms > CONNMGR_PAUSE_MS)
        sleep_ms = CONNMGR_PAUSE_MS;
    if (sleep_ms > POLL_ARENA_MS && (stalled_any(cm) || held_any(cm)))
        sleep_ms = POLL_ARENA_MS;
    n = await(cm, evs, 16, sleep_ms);
    if (n < 0)
        return errno == EINTR ? -EINTR : -errno;
    cm->now_ns = clock_ns();
    look_at_trace(cm);
    for (int i = 0; i < n; i++) {
        uint32_t tag = evs[i].data.u32;

        if (tag < TAG_USER)
            ready |= 1 << tag;
        else
            connmgr_event(cm, EVENT_FD, NULL, (int)(tag - TAG_USER));
    }
    took = ready & 1 << TAG_ORDERS || port_has_batch(&cm->port) ? take_orders(cm) : 0;
    if (took < 0)
        return took;
    if (took)
        cm->asking = 0;
    if (ready & 1 << TAG_OUT)
        write_ready(cm);
    output_flush(cm);
    conn_shut_finished(cm);
    if (refer_any_due(cm))
        refer_due(cm);
    if (held_any(cm))
        unread_retry(cm);
    if (stalled_any(cm)) {
        unfinished_look(cm);
        stalled_retry(cm);
    }
    if (ready & 1 << TAG_IN && cm->in_armed)
        read_on(cm);
    output_flush(cm);
    if (TRACE_IF(cm->trace.on))
        trace_round(cm);
    over = flood_is_over(cm);
    wrote = refer_send(cm, over ? REFER_FLOOD_OVER : REFER_ROUND);
    if (wrote > 0 && !over)
        cm->asking = 1;
    cm->stats.turns++;
    return wrote < 0 ? wrote : 0;
}

/* Work that no descriptor will announce: what Python's calls since the last turn left to
 * send, and a batch a predecessor received. Without room in the ring it waits for that. */
static int has_work(const struct connmgr *cm)
{
    if (port_has_batch(&cm->port) || cm->finished_first != CONNMGR_NONE)
        return 1;
    if (cm->port.refs.blocked)
        return 0;
    return cm->stalled_more || (cm->stalled_ring && refer_have_room(cm)) || refer_any_due(cm) ||
           (cm->port.log->refs.tail & 0xffff) > BATCH_HEAD;
}

int connmgr_turn(struct connmgr *cm, int timeout_ms)
{
    uint64_t until = clock_ns() + (uint64_t)timeout_ms * 1000000ULL;

    for (;;) {
        uint64_t now = clock_ns();
        int left = now >= until ? 0 : (int)((until - now + 999999) / 1000000);
        int err = one_round(cm, has_work(cm) ? 0 : left);

        if (err == -EINTR)
            return (int)cm->event_count;
        if (err)
            return err;
        if (cm->event_count || left == 0)
            return (int)cm->event_count;
    }
}

void connmgr_tick(struct connmgr *cm)
{
    uint64_t now = clock_ns();
    const struct connmgr_conf *conf = &cm->conf;

    cm->now_ns = now;
    for (uint32_t i = 0; i < cm->journal->conns_high; i++) {
        struct conn *c = &cm->conns[i];

        if (cm->event_count > CONNMGR_EVENTS_MAX / 2)
            return;
        if (c->unread || !cm->in_armed) { /* it is not read: its silence is not its fault */
            c->heard_ns = now;
            c->pings = 0;
        }
        if (c->name_asked || c->unread & UNREAD_NAME)
            names_tick(cm, c);
        if (c->phase == PHASE_LINGER && now - c->linger_since > CONNMGR_DISCARD_NS) {
            conn_end(cm, c, c->reason);
        } else if (c->phase == PHASE_FINISHING && !c->writing) {
            if (now - c->linger_since > conf->write_deadline_ns)
                conn_end(cm, c, CLOSE_CLIENT);
        } else if (c->served && c->writing && c->stuck_since &&
                   now - c->stuck_since > conf->write_deadline_ns) {
            conn_end(cm, c, CLOSE_SLOW_DEADLINE);
        } else if (c->served && now - c->heard_ns > conf->ping_interval_ns * (c->pings + 1)) {
            if (c->pings >= conf->ping_max) {
                conn_end(cm, c, CLOSE_STALE);
            } else {
                c->pings++;
                reply_say(cm, c, REPLY_PING);
                output_put(cm);
                redo_commit(&cm->port.redo);
            }
        }
    }
    output_flush(cm);
    arena_sweep(&cm->port.pool, stalled_any(cm) ? cm->port.pool.arena->chunk_count : SWEEP_A_TICK);
    stalled_compact(cm);
    unfinished_tick(cm);
}
