/* router: opening, the turn, start. See router.h. */
#include "router/aside.h"
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"
#include "base/reserve.h"
#include "base/clock.h"

#include <errno.h>
#include <sys/epoll.h>

#define TAG_ROOM 64u /* plus port: its orders queue has room again */
#define STILL_LOOK_MS 10 /* between two looks at a port that something waits for */
#define PREFETCH_LINE 12u
#define PREFETCH_NODE 6u

int router_open(const struct router_conf *conf, struct routing *seg, const int *refs_queues,
                const int *orders_queues, struct router **ret_rt)
{
    struct router *rt = reserve(sizeof(*rt));
    uint64_t subs = (uint64_t)conf->ports * seg->subs_each;
    uint64_t sorted = subs > ROUTING_CELLS ? subs : ROUTING_CELLS;

    if (!rt)
        return -ENOMEM;
    rt->conf = *conf;
    rt->seg = seg;
    rt->work = 1; /* see work_dear */
    rt->spin = spin_make(conf->spin_ns, (int)conf->spin_adaptive);
    struct index_conf ic = {conf->ports, seg->subs_each, conf->subjects, seg->clients, &rt->work};
    int err = index_open(&ic, &rt->index);
    if (err)
        return err;
    rt->chains = reserve(subs * sizeof(struct sub_chain));
    rt->client_subs = reserve((uint64_t)seg->clients * 4);
    rt->client_cells = reserve((uint64_t)seg->clients * 4);
    rt->cell_free = reserve((uint64_t)seg->cells * 4);
    rt->sorted = reserve(sorted * 4);
    rt->still_said_ns = reserve((uint64_t)seg->clients * 8);
    rt->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (!rt->chains || !rt->client_subs || !rt->client_cells || !rt->cell_free || !rt->sorted || !rt->still_said_ns || rt->epoll < 0)
        return -ENOMEM;
    err = modes_open(rt);
    if (!err)
        err = aside_open(rt);
    if (err)
        return err;
    memset(rt->client_subs, 0xff, (size_t)seg->clients * 4);
    rt->redo.log = &seg->redo;
    rt->redo.base = (char *)seg;
    for (uint32_t i = 0; i < conf->ports; i++) {
        struct epoll_event in = {.events = EPOLLIN, .data.u32 = i};
        struct epoll_event room = {.events = 0, .data.u32 = TAG_ROOM + i};

        rt->refs[i] = refs_queues[i];
        rt->listening[i] = 1;
        batch_out_open(&rt->out[i], &routing_lane(seg, i)->orders, orders_queues[i], 255);
        if (epoll_ctl(rt->epoll, EPOLL_CTL_ADD, refs_queues[i], &in) != 0 ||
            epoll_ctl(rt->epoll, EPOLL_CTL_ADD, orders_queues[i], &room) != 0)
            return -errno;
    }
    *ret_rt = rt;
    return 0;
}

const struct router_stats *router_get_stats(const struct router *rt) { return &rt->stats; }

uint32_t router_started(const struct router *rt) { return rt->start_count; }

int router_start(struct router *rt)
{
    if (rt->start_port || rt->start_slot)
        return clients_start(rt);
    rt->stats.found_words = redo_recover(&rt->redo);
    for (uint32_t i = 0; i < rt->conf.ports; i++) {
        struct batch_ring *ring = rt->out[i].ring;

        routing_begin_lane(rt->seg, i, rt->conf.lives[i]);
        batch_out_open(&rt->out[i], ring, rt->out[i].queue, 255);
        router_settle_room(rt, i);
        if (rt->out[i].bytes > BATCH_HEAD)
            rt->out[i].load = BATCH_BYTES; /* not known: nothing is added to it */
        rt->stats.found_batches += (uint64_t)batch_in_pending(&routing_lane(rt->seg, i)->inbox, rt->seg->in[i].done) +
                                   batch_unsent(ring);
    }
    still_start(rt);
    return clients_start(rt);
}

/* Makes everything since the last commit valid: outputs, changes, place in the input. */
void router_commit(struct router *rt)
{
    CRASH(ROUTE_STEP);
    for (uint32_t i = 0; i < rt->conf.ports; i++)
        batch_out_put(&rt->out[i], &rt->redo);
    redo_put(&rt->redo, &rt->seg->step, rt->seg->step + 1);
    redo_commit(&rt->redo);
    CRASH(ROUTE_COMMITTED);
    rt->stepping = 0;
}

void router_commit_at(struct router *rt, uint32_t from, uint64_t at)
{
    struct routing_in *in = rt->place;

    (void)from;
    redo_put(&rt->redo, &in->at, at);
    if (in->routed != rt->routed)
        redo_put(&rt->redo, &in->routed, rt->routed);
    router_commit(rt);
}

/* Finds the references of a batch and hashes the subjects to be looked up. */
static int scan(struct router *rt, const struct batch *b, uint32_t at)
{
    uint32_t count = 0;

    while (at < b->bytes) {
        const struct ref *r = batch_ref(b, at);
        const struct ref_message *m = (const struct ref_message *)r;

        if (at + REF_BYTES_MIN > b->bytes || r->bytes < REF_BYTES_MIN || at + r->bytes > b->bytes)
            return -EBADMSG;
        rt->offsets[count] = (uint16_t)at;
        rt->hashes[count] = r->type == REF_MESSAGE ? index_hash(m->text, m->subject_len) : 0;
        if (count < PREFETCH_LINE && r->type == REF_MESSAGE)
            index_prefetch(rt->index, rt->hashes[count]);
        count++;
        at += r->bytes;
    }
    return (int)count;
}

/* A message of a mode, or a client with a name: a step of its own (R6). As route_any(). */
static __attribute__((noinline)) int handle_alone(struct router *rt, uint32_t from, const struct ref *r, uint64_t hash)
{
    uint64_t at = router_at(rt, from, r);

    if (rt->stepping)
        router_commit_at(rt, from, at);
    rt->changing = r->type != REF_MESSAGE;
    int done = r->type == REF_MESSAGE ? modes_message(rt, from, (const struct ref_message *)r, hash) : clients_handle(rt, from, r);

    if (done == ROUTED) {
        router_commit_at(rt, from, at + r->bytes);
        CRASH(MODE_COMMITTED);
    }
    return done;
}

/* The reference is not done: it was set aside (ROUTED_ASIDE), or the batch goes on there later. */
static __attribute__((noinline)) int not_routed(struct router *rt, uint32_t from, const struct ref *r, int done)
{
    if (done == ROUTED_LATER)
        aside_charge(rt, from, r->conn);
    if (done < 0 || (done == ROUTED_ASIDE && aside_put(rt, from, r)))
        return done;
    router_commit_at(rt, from, router_at(rt, from, r));
    return done == ROUTED_LATER ? ROUTED_LATER : ROUTED_NO_ROOM;
}

/* A step holds changes, or messages (R3): with this reference another one begins. */
static __attribute__((noinline)) void set_changing(struct router *rt, uint32_t from, const struct ref *r, uint32_t changes)
{
    if (changes != rt->changing && rt->stepping)
        router_commit_at(rt, from, router_at(rt, from, r));
    rt->changing = changes;
}

static __attribute__((noinline)) int handle_other(struct router *rt, uint32_t from, const struct ref *r)
{
    set_changing(rt, from, r, r->type != REF_PING && r->type != REF_HOLD);
    return clients_handle(rt, from, r);
}

/* A reference of the batch in the inbox: enum routed. */
static inline int handle(struct router *rt, uint32_t from, const struct ref *r, uint64_t hash)
{
    if (__builtin_expect(r->flags & REF_ALONE, 0))
        return handle_alone(rt, from, r, hash);
    if (r->type != REF_MESSAGE)
        return handle_other(rt, from, r);
    if (rt->changing)
        set_changing(rt, from, r, 0);
    const struct ref_message *m = (const struct ref_message *)r;

    return r->flags & REF_RUN ? route_any(rt, from, m, hash) : route_message(rt, from, m, hash);
}

/* Before reference `i` of the batch: those before it were dear, or something was set aside. ROUTED: it may be
 * routed now. */
static int take_care(struct router *rt, uint32_t from, const struct batch *b, int i)
{
    if (i)
        aside_charge(rt, from, batch_ref(b, rt->offsets[i - 1])->conn);
    if (i && rt->work > rt->work_until)
        return ROUTED_LATER;
    return aside_must(rt, from, batch_ref(b, rt->offsets[i])) ? ROUTED_ASIDE : ROUTED;
}

/* handle() of reference `i` while care is taken (aside_begin). */
static __attribute__((noinline)) int handle_with_care(struct router *rt, uint32_t from, const struct batch *b, int i)
{
    const struct ref *r = batch_ref(b, rt->offsets[i]);
    uint64_t tails[PORTS_MAX];
    int done = take_care(rt, from, b, i);

    if (done != ROUTED)
        return done;
    if (rt->still)
        still_before(rt, tails);
    done = handle(rt, from, r, rt->hashes[i]);
    if (rt->still && r->type == REF_MESSAGE)
        still_after(rt, from, r->conn, tails);
    return done;
}

/* Processes the batch in the inbox of port `from`: enum routed. */
static int process(struct router *rt, uint32_t from)
{
    struct routing_in *in = &rt->seg->in[from];
    const struct batch *b = &routing_lane(rt->seg, from)->inbox.batch;
    int count = scan(rt, b, in->at ? (uint32_t)in->at : BATCH_HEAD);

    rt->place = in;
    rt->place_base = (const char *)b;
    rt->routed = (uint32_t)in->routed;
    aside_begin(rt, from);
    for (int i = 0; i < count; i++) {
        const struct ref *r = batch_ref(b, rt->offsets[i]);
        const struct ref_message *m = (const struct ref_message *)r;
        int done;

        if (rt->redo.count > ROUTER_REDO_SOFT)
            router_commit_at(rt, from, rt->offsets[i]);
        if (i + (int)PREFETCH_LINE < count)
            index_prefetch(rt->index, rt->hashes[i + (int)PREFETCH_LINE]);
        if (i + (int)PREFETCH_NODE < count)
            index_prefetch_node(rt->index, rt->hashes[i + (int)PREFETCH_NODE]);
        if (__builtin_expect(rt->work > rt->work_dear, 0))
            done = handle_with_care(rt, from, b, i);
        else
            done = handle(rt, from, r, rt->hashes[i]);
        if (__builtin_expect(done != ROUTED, 0)) {
            done = not_routed(rt, from, r, done);
            if (done == ROUTED_ASIDE)
                continue;
            return done;
        }
        if (r->type == REF_MESSAGE) {
            rt->stats.messages += ref_messages(m);
            rt->bytes += m->size;
        }
    }
    if (count < 0)
        return count;
    if (__builtin_expect(rt->work > rt->work_dear, 0) && count)
        aside_charge(rt, from, batch_ref(b, rt->offsets[count - 1])->conn);
    redo_put(&rt->redo, &in->done, b->seq);
    router_commit_at(rt, from, 0);
    rt->stats.batches++;
    return 1;
}

/* Every busy connection gets the same share, however connections are spread: a port with few of
 * them finishes its passes sooner, and then waits for the other busy ones to have made as many.
 * Its queue fills meanwhile, and it stops reading. One that says it is busy and does not come is
 * not waited for longer than ROUTER_PATIENCE_NS. */
static int fair_may_go(struct router *rt, uint32_t m)
{
    for (uint32_t k = 0; rt->busy[m] && k < rt->conf.ports; k++) {
        if (k == m || !rt->busy[k] || rt->passes[m] <= rt->passes[k] + ROUTER_AHEAD_MAX)
            continue;
        if (!rt->behind_ns[k])
            rt->behind_ns[k] = rt->now_ns;
        if (rt->now_ns - rt->behind_ns[k] < ROUTER_PATIENCE_NS)
            return 0;
        rt->busy[k] = 0;
        rt->behind_ns[k] = 0;
    }
    return 1;
}

static void fair_account(struct router *rt, uint32_t m, uint16_t rounds)
{
    rt->behind_ns[m] = 0;
    if (!rt->busy[m]) /* who was idle has saved nothing up */
        for (uint32_t k = 0; k < rt->conf.ports; k++)
            if (rt->busy[k] && rt->passes[k] > rt->passes[m])
                rt->passes[m] = rt->passes[k];
    rt->passes[m] += batch_rounds_passes(rounds);
    rt->busy[m] = batch_rounds_more(rounds);
}

/* Takes what port `from` has, up to the end of a round. 1: there may be more. */
static int visit(struct router *rt, uint32_t from)
{
    struct routing_in *in = &rt->seg->in[from];
    struct batch_inbox *inbox = &routing_lane(rt->seg, from)->inbox;

    int tried = 0;

    rt->work_until = rt->work + ROUTER_WORK_A_VISIT;
    for (int i = 0; i < ROUTER_BATCHES_A_VISIT && rt->work <= rt->work_until; i++) {
        rt->ahead[from] = rt->conf.ports > 1 && !fair_may_go(rt, from);
        if (rt->ahead[from]) {
            rt->holding = 1;
            return 0;
        }
        int got = batch_in_pending(inbox, in->done) ? 1 : batch_in_receive(inbox, rt->refs[from], in->done);

        if (got <= 0)
            return got;
        if (TRACE_IF(inbox->batch.trace_tag))
            router_mark_begin(rt, from, &inbox->batch);
        int done = process(rt, from);

        rt->marking = 0;
        if (done < 0)
            return done;
        for (uint32_t m = 0; m < rt->conf.ports; m++)
            (void)instruct_send(rt, m, INSTRUCT_ROUTED);
        if (done == ROUTED_NO_ROOM) {
            if (!tried++)
                continue; /* what was just sent may have made some */
            rt->stuck[from] = 1;
            rt->first = from;
            rt->stats.blocked++;
            return 0;
        }
        if (done == ROUTED_LATER)
            return 1;
        fair_account(rt, from, inbox->batch.rounds);
        if (inbox->batch.rounds & BATCH_ROUND_ENDS)
            return 1;
    }
    return 1;
}

static void arm(struct router *rt, uint32_t m)
{
    int blocked = rt->out[m].blocked, listen = !rt->stuck[m] && !rt->ahead[m];

    if (blocked != rt->armed[m]) {
        struct epoll_event ev = {.events = blocked ? EPOLLOUT : 0, .data.u32 = TAG_ROOM + m};

        (void)epoll_ctl(rt->epoll, EPOLL_CTL_MOD, rt->out[m].queue, &ev);
        rt->armed[m] = blocked;
    }
    if (listen != rt->listening[m]) {
        struct epoll_event ev = {.events = listen ? EPOLLIN : 0, .data.u32 = m};

        (void)epoll_ctl(rt->epoll, EPOLL_CTL_MOD, rt->refs[m], &ev);
        rt->listening[m] = listen;
    }
}

/* One look at every port. 1: more to do, 0: nothing left, negative errno. */
static int look(struct router *rt)
{
    int more = 0;
    uint64_t next_ns = modes_next_ns(rt);

    if (next_ns && next_ns <= rt->now_ns)
        more = modes_expire(rt);
    rt->holding = 0;
    if (__builtin_expect(rt->still_watch != 0, 0))
        still_look(rt);
    /* From the last one that found no room on: the others take what there is behind it. */
    for (uint32_t left = rt->conf.ports, m = rt->first; left; left--, m = m + 1 < rt->conf.ports ? m + 1 : 0) {
        rt->stuck[m] = 0;
        int got = visit(rt, m);

        if (got < 0)
            return got;
        more |= got;
        if (__builtin_expect(rt->asides[m].entries != 0, 0)) {
            got = aside_serve(rt, m);
            if (got < 0)
                return got;
            more |= got;
        }
    }
    if (TRACE_IF(rt->marked_look))
        router_mark_end(rt);
    for (uint32_t m = 0; m < rt->conf.ports; m++) {
        int sent = instruct_send(rt, m, INSTRUCT_LOOKED);

        if (sent < 0)
            return sent;
        /* Room was made for an input that waits: look again before sleeping. */
        for (uint32_t k = 0; sent > 0 && k < rt->conf.ports; k++)
            more |= rt->stuck[k] | rt->aside_stuck[k];
    }
    return more;
}

/* Looks again for a moment before sleeping. As look(). */
static int look_again(struct router *rt, uint64_t work)
{
    uint64_t until = rt->now_ns + spin_time(&rt->spin, work);
    int more = 0;

    while (more == 0 && rt->now_ns < until) {
        sched_yield();
        more = look(rt);
        rt->now_ns = clock_ns();
    }
    return more;
}

/* Nothing is left to do: waits, at most so long, until there is. As look(). */
static int await(struct router *rt, int sleep_ms)
{
    struct epoll_event evs[2 * PORTS_MAX];
    uint64_t seen = spin_work(rt->stats.messages, rt->bytes), began = rt->now_ns;
    int more = look_again(rt, seen - rt->spin_seen);

    rt->spin_seen = spin_work(rt->stats.messages, rt->bytes);
    if (more == 0) {
        for (uint32_t m = 0; m < rt->conf.ports; m++)
            arm(rt, m);
        if (rt->holding) /* until its patience ends */
            sleep_ms = 1;
        else if (sleep_ms > STILL_LOOK_MS && still_waiting(rt))
            sleep_ms = STILL_LOOK_MS;
        if (epoll_wait(rt->epoll, evs, 2 * PORTS_MAX, sleep_ms) < 0)
            return -errno;
        rt->now_ns = clock_ns();
    }
    spin_learn(&rt->spin, rt->now_ns - began);
    return more;
}

/* No longer than the next deadline is away; a passed one waits for room in a ring. */
static int until_deadline(const struct router *rt, int left_ms)
{
    uint64_t next_ns = modes_next_ns(rt);

    if (!next_ns)
        return left_ms;
    uint64_t ms = next_ns <= rt->now_ns ? 1 : (next_ns - rt->now_ns) / 1000000 + 1;

    return ms < (uint64_t)left_ms ? (int)ms : left_ms;
}

int router_turn(struct router *rt, int timeout_ms)
{
    rt->now_ns = clock_ns();
    uint64_t until = rt->now_ns + (uint64_t)timeout_ms * 1000000ULL;

    for (;;) {
        int more = look(rt);

        if (more < 0)
            return more;
        rt->stats.turns++;
        rt->stats.work = rt->work;
        rt->now_ns = clock_ns();
        int left = rt->now_ns >= until ? 0 : (int)((until - rt->now_ns + 999999) / 1000000);
        if (left == 0)
            return 0;
        if (!more)
            more = await(rt, until_deadline(rt, left));
        if (more < 0)
            return more == -EINTR ? 0 : more;
    }
}
