/* modes_fanout: a request to everybody who listens (docs/modes.md).
 *
 * The structure: none of its own; requests and legs are those of modes.c.
 * Written by:   the router. A request with up to MODES_FANOUT_STEP listeners is one step (R6). One with more is
 *               set aside (R7). First its legs are taken, in steps, while it has MODE_GATHERING and nobody knows of
 *               it; then one step tells the client that asks how many there are, and notes the request in
 *               routing_in.asking; then legs are ordered in steps, as far as there is room and time, and each
 *               loses MODE_UNASKED in the step that orders it; the last step ends the list of each port (P3).
 * Invariants:   who is asked is fixed when the number is told: each of them replies, goes away, or the deadline
 *               passes. Who unsubscribed before its order was made counts as gone.
 * After a crash: legs that were gathered are dropped, and gathered again; legs to be ordered are ordered.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"

/* An order, and the ends of the memberships that a step brings. */
_Static_assert((ROUTER_LEAVES - 1) * (BATCH_BYTES - BATCH_HEAD) > MODES_FANOUT_STEP * sizeof(struct order_sub), "they fit");

/* Everybody who listens: each plain subscription, and one member of each queue group; of a kind, each client
 * once. Returns how many are in modes.list. */
static uint32_t listeners(struct router *rt, const struct ref_message *r, uint64_t hash)
{
    uint32_t count = 0, *list = rt->modes->list;

    if (ref_mode(r)->place == PLACE_KIND)
        return modes_list_kind(rt, r);
    if (ref_mode(r)->place == PLACE_IPC) {
        list[0] = modes_choose_named(rt, r);
        return list[0] != ROUTER_NONE;
    }
    const struct index_match *m = index_match(rt->index, r->text, r->subject_len, hash);

    rt->work += m->count / MODES_WORK_COMPARED + m->group_count;
    for (uint32_t i = 0; i < m->count; i++)
        if (!(r->flags & REF_NO_ECHO) || m->conns[i] != r->conn)
            list[count++] = m->subs[i];
    for (uint32_t g = 0; g < m->group_count; g++) {
        const struct index_group *group = &m->groups[g];
        index_sub sub = modes_least_loaded(rt, r, group->subs, group->conns, group->count);

        if (sub != ROUTER_NONE)
            list[count++] = sub;
    }
    return count;
}

static void tell_count(struct router *rt, const struct ref_message *r, uint32_t count)
{
    struct fields expect = {.len = 0};

    modes_add_number(&expect, STATUS_FIELD_EXPECT, count);
    modes_tell(rt, r->conn, ref_reply(r), r->reply_len, STATUS_EXPECT, &expect);
    rt->stats.mode_requests++;
}

/* ---- a few: one step ---- */

static void order_legs(struct router *rt, const struct ref_message *r, uint32_t request, uint32_t count,
                       uint64_t deadline_ns)
{
    const uint32_t *list = rt->modes->list;
    struct order *last = NULL;
    uint32_t touched = 0;

    for (uint32_t port = 0; port < rt->conf.ports; port++) {
        struct order *here = NULL;

        for (uint32_t i = 0; i < count; i++) {
            if (INDEX_SUB_PORT(list[i]) != port)
                continue;
            if (here)
                instruct_more(here);
            here = modes_order_leg(rt, r, modes_take_leg(rt, request, MODE_FANOUT, list[i]), deadline_ns);
            instruct_limit(here, 0);
            last = here;
            touched |= 1u << port;
        }
    }
    instruct_limit(last, (uint32_t)__builtin_popcount(touched));
}

static int ask_few(struct router *rt, uint32_t from, const struct ref_message *r, uint32_t count, uint64_t deadline_ns)
{
    /* An order to a leg is 80 bytes; ends of memberships, and the status, come on top. */
    uint32_t full = router_full(rt, 2 + count / 64), ports = 1u << from;

    for (uint32_t i = 0; full && i < count; i++)
        ports |= 1u << INDEX_SUB_PORT(rt->modes->list[i]);
    if (full & ports)
        return 0;
    uint32_t request = modes_take_request(rt, r, MODE_FANOUT, deadline_ns);

    if (request == ROUTER_NONE)
        return modes_refuse(rt, from, r, STATUS_TOO_MANY_REQUESTS);
    rt->work += count * MODES_WORK_LEG;
    order_legs(rt, r, request, count, deadline_ns);
    for (uint32_t i = 0; i < count; i++)
        route_count_pick(rt, rt->modes->list[i]);
    route_drop_spent(rt);
    tell_count(rt, r, count);
    CRASH(MODE_ASKED_ALL);
    return 1;
}

/* ---- many: steps ---- */

static struct mode_request *asked(struct router *rt, uint64_t asking)
{
    struct mode_request *q = &routing_requests(rt->seg)[(uint32_t)asking - 1];

    return q->word & MODE_USED && (uint32_t)(q->word >> 8) == (uint32_t)(asking >> 32) ? q : NULL;
}

static uint32_t ports_with_room(const struct router *rt)
{
    uint32_t ports = 0;

    for (uint32_t i = 0; i < rt->conf.ports; i++)
        if (router_room(rt, i, ROUTER_LEAVES))
            ports |= 1u << i;
    return ports;
}

/* Makes the orders of a step valid. */
static void commit_piece(struct router *rt, uint32_t touched)
{
    route_drop_spent(rt);
    redo_put(&rt->redo, &rt->place->touched, touched);
    CRASH(MODE_ORDERED);
    router_commit(rt);
    CRASH(MODE_PIECE);
    for (uint32_t i = 0; i < rt->conf.ports; i++)
        (void)instruct_send(rt, i, INSTRUCT_ROUTED);
}

/* Orders the legs that are to come, as far as there is room and time: enum routed. */
static int order_unasked(struct router *rt, uint32_t from, const struct ref_message *r)
{
    const struct mode_request *q = asked(rt, rt->place->asking);
    uint32_t *waiting = &rt->modes->spread[from].waiting, touched = (uint32_t)rt->place->touched, count = 0;
    uint32_t gone_through = 0;

    if (!q)
        return ROUTED; /* it has ended */
    if (*waiting && !(*waiting & ports_with_room(rt)))
        return ROUTED_NO_ROOM;
    rt->asides[from].open = rt->aside_now;
    *waiting = 0;
    for (uint32_t leg = rt->modes->request_links[q - routing_requests(rt->seg)].legs, next; leg; leg = next) {
        struct mode_leg *g = &routing_legs(rt->seg)[leg - 1];

        next = rt->modes->leg_links[leg - 1].peer_next;
        rt->work += ++gone_through % MODES_WORK_COMPARED == 0;
        if (!(g->word & MODE_UNASKED))
            continue;
        int stands = modes_leg_stands(rt, leg - 1);
        uint32_t port = stands ? INDEX_SUB_PORT(g->sub) : modes_port(rt, q->conn);

        if (!router_room(rt, port, ROUTER_LEAVES)) {
            *waiting |= 1u << port;
            continue;
        }
        if (stands) {
            struct order *o = modes_order_leg(rt, r, leg - 1, q->deadline_ns);

            instruct_more(o);
            instruct_limit(o, 0);
            redo_put(&rt->redo, &g->word, g->word & ~MODE_UNASKED);
            route_count_pick(rt, g->sub);
            touched |= 1u << port;
        } else {
            modes_responder_gone(rt, leg - 1);
        }
        rt->work += MODES_WORK_LEG;
        if (++count % MODES_FANOUT_STEP)
            continue;
        commit_piece(rt, touched);
        if (rt->work > rt->work_until && next) {
            *waiting = 0;
            return ROUTED_LATER;
        }
    }
    if (count % MODES_FANOUT_STEP)
        commit_piece(rt, touched);
    return *waiting ? ROUTED_NO_ROOM : ROUTED;
}

/* Ends the list of each port. */
static int end_lists(struct router *rt, uint32_t from, const struct ref_message *r)
{
    struct routing_in *in = rt->place;
    uint32_t touched = (uint32_t)in->touched;
    struct order *last = NULL;

    for (uint32_t i = 0; i < rt->conf.ports; i++)
        if ((touched & 1u << i || i == from) && !router_room(rt, i, 1))
            return ROUTED_NO_ROOM;
    for (uint32_t left = touched; left; left &= left - 1)
        last = instruct_deliver(rt, (uint32_t)__builtin_ctz(left), 0, r->handle);
    if (last)
        instruct_limit(last, (uint32_t)__builtin_popcount(touched));
    else
        instruct_delete(rt, from, r->handle, 1);
    redo_put(&rt->redo, &in->touched, 0);
    redo_put(&rt->redo, &in->asking, 0);
    return ROUTED;
}

static int go_on(struct router *rt, uint32_t from, const struct ref_message *r)
{
    int done = order_unasked(rt, from, r);

    return done == ROUTED ? end_lists(rt, from, r) : done;
}

static int ask_many(struct router *rt, uint32_t from, const struct ref_message *r, uint32_t count, uint64_t deadline_ns)
{
    uint64_t at = router_at(rt, from, r);

    if (!router_room(rt, from, 1))
        return 0;
    uint32_t request = modes_take_request(rt, r, MODE_FANOUT | MODE_GATHERING, deadline_ns);

    if (request == ROUTER_NONE)
        return modes_refuse(rt, from, r, STATUS_TOO_MANY_REQUESTS);
    for (uint32_t i = 0; i < count;) {
        (void)modes_take_leg(rt, request, MODE_FANOUT | MODE_GATHERING, rt->modes->list[i]);
        if (++i % MODES_GATHER_STEP == 0 || i == count) {
            router_commit_at(rt, from, at);
            CRASH(MODE_GATHERED);
        }
    }
    struct mode_request *q = &routing_requests(rt->seg)[request];

    redo_put(&rt->redo, &q->word, q->word & ~(uint64_t)MODE_GATHERING);
    redo_put(&rt->redo, &rt->place->asking, q->word >> 8 << 32 | (request + 1));
    tell_count(rt, r, count);
    router_commit_at(rt, from, at);
    rt->work += (uint64_t)count * MODES_WORK_LEG;
    rt->modes->spread[from].waiting = 0;
    return rt->work > rt->work_until ? ROUTED_LATER : go_on(rt, from, r);
}

void modes_drop_gathering(struct router *rt)
{
    for (uint32_t at = 0; at < rt->seg->requests_high; at++) {
        const struct request_link *l = &rt->modes->request_links[at];
        uint64_t word = routing_requests(rt->seg)[at].word;

        if (!(word & MODE_USED) || !(word & MODE_GATHERING))
            continue;
        while (l->open > 1) { /* R5: as long as it is used it has one */
            for (uint32_t i = 0; i < MODES_GATHER_STEP && l->open > 1; i++)
                modes_free_leg(rt, l->legs - 1);
            router_commit(rt);
        }
        modes_free_request(rt, at);
        router_commit(rt);
    }
}

int modes_ask_all(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash)
{
    uint64_t deadline_ns = ref_mode(r)->deadline_ns;

    if (rt->place->asking)
        return go_on(rt, from, r);
    if (r->reply_len > MODE_REPLY_MAX)
        return modes_refuse(rt, from, r, STATUS_REPLY_TOO_LONG);
    uint32_t count = listeners(rt, r, hash);

    if (count == 0)
        return modes_refuse(rt, from, r, STATUS_NO_RESPONDERS);
    if (count > MODES_FANOUT_MAX)
        return modes_refuse(rt, from, r, STATUS_TOO_MANY_LISTENERS);
    if (count > modes_legs_for(rt, r->conn))
        return modes_refuse(rt, from, r, STATUS_TOO_MANY_REQUESTS);
    if (!deadline_ns)
        deadline_ns = rt->now_ns + MODES_DEADLINE_NS;
    if (count > MODES_FANOUT_STEP && !rt->aside_now)
        return ROUTED_ASIDE;
    return count > MODES_FANOUT_STEP ? ask_many(rt, from, r, count, deadline_ns) : ask_few(rt, from, r, count, deadline_ns);
}
