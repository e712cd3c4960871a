/* modes_settle: ends that no reply brings: a connection or subscription is gone, a deadline passed.
 *
 * The structure: none of its own; requests and legs are those of modes.c.
 * Written by:   the router, in steps of a few records each (R6): a responder that goes away may
 *               leave more requests than a ring has room for, or than there is time for. The end of a connection, or
 *               of a subscription, is then set aside (R7), and goes on in slices. So do deadlines, between the visits.
 * Invariants:   every client that still waits is told. Between two steps the tables hold what is not settled.
 * After a crash: the reference, or the deadline, is there again, and so is what was not committed.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"

void modes_responder_gone(struct router *rt, uint32_t leg)
{
    const struct mode_leg *g = &routing_legs(rt->seg)[leg];
    uint32_t request = g->request;
    const struct mode_request *q = &routing_requests(rt->seg)[request];
    struct fields who = {.len = 0};

    modes_add_who(rt, g->conn, g->uid, &who);
    modes_tell(rt, q->conn, q->reply, q->reply_len, STATUS_RESPONDER_GONE, &who);
    modes_free_leg(rt, leg);
    if (!rt->modes->request_links[request].open) {
        if ((uint8_t)q->word == MODE_FANOUT)
            modes_tell(rt, q->conn, q->reply, q->reply_len, STATUS_END, NULL);
        modes_free_request(rt, request);
    }
    rt->stats.mode_gone++;
}

/* Nobody waits any more. The responder of a session is told, the others may answer into the void. */
static void requester_gone(struct router *rt, uint32_t request)
{
    const struct mode_request *q = &routing_requests(rt->seg)[request];
    uint32_t leg = rt->modes->request_links[request].legs - 1;

    if ((uint8_t)q->word == MODE_SESSION && modes_leg_stands(rt, leg)) {
        index_sub sub = routing_legs(rt->seg)[leg].sub;
        uint32_t slot = INDEX_SUB_SLOT(sub);
        char id[MODE_REPLY_BYTES];

        uint16_t len = (uint16_t)modes_put_reply(rt, leg, id);

        instruct_status(rt, INDEX_SUB_PORT(sub), &slot, 1,
                        &(struct order_said){.subject_len = len, .reply_len = len,
                                             .status = STATUS_REQUESTER_GONE},
                        id, id, "", "");
        rt->stats.statuses++;
    }
    modes_free_request(rt, request);
}

static int room_for_requester(const struct router *rt, uint32_t leg)
{
    uint32_t request = routing_legs(rt->seg)[leg].request;

    return router_room(rt, modes_port(rt, routing_requests(rt->seg)[request].conn), 1);
}

static int room_for_responder(const struct router *rt, uint32_t request)
{
    uint32_t leg = rt->modes->request_links[request].legs - 1;

    return router_room(rt, INDEX_SUB_PORT(routing_legs(rt->seg)[leg].sub), 1);
}

/* Frees legs until those that are left fit a step: a fanout request may have many more. They are not known to
 * be gone to anybody before the last ones are: the request is there, and comes here again. `from`: the port whose
 * reference at `at` this is for, or ROUTER_NONE. 1: it was enough for now, and there are more. */
static int free_many_legs(struct router *rt, uint32_t request, uint32_t from, uint64_t at)
{
    const struct request_link *l = &rt->modes->request_links[request];

    while (l->open > MODES_FANOUT_STEP) {
        if (rt->work > rt->work_until)
            return 1;
        for (uint32_t i = 0; i < MODES_FANOUT_STEP && l->open > 1; i++)
            modes_free_leg(rt, l->legs - 1);
        if (from == ROUTER_NONE)
            router_commit(rt);
        else
            router_commit_at(rt, from, at);
        CRASH(MODE_LEGS_FREED);
        rt->work += MODES_FANOUT_STEP * MODES_WORK_LEG;
    }
    rt->work += l->open * MODES_WORK_LEG;
    return 0;
}

/* The reference at hand cannot go on now: not among those of others. */
static int not_now(const struct router *rt, int why) { return rt->aside_now ? why : ROUTED_ASIDE; }

/* After a record was settled, the `count`th for this reference. */
static int is_enough(struct router *rt, uint32_t count)
{
    rt->work += MODES_WORK_SETTLED;
    return rt->work > rt->work_until || (!rt->aside_now && count >= MODES_SETTLED_AT_ONCE);
}

int modes_unpin(struct router *rt, uint32_t from, const struct ref_unsubscribe *r, uint32_t sub)
{
    const uint32_t *pin = &rt->modes->pins[(uint64_t)from * rt->seg->subs_each + sub];

    if (rt->stepping)
        router_commit_at(rt, from, router_at(rt, from, r));
    for (uint32_t count = 1; *pin; count++) {
        if (!room_for_requester(rt, *pin - 1))
            return not_now(rt, ROUTED_NO_ROOM);
        modes_responder_gone(rt, *pin - 1);
        router_commit_at(rt, from, router_at(rt, from, r));
        CRASH(MODE_UNPINNED);
        if (is_enough(rt, count) && *pin)
            return not_now(rt, ROUTED_LATER);
    }
    return ROUTED;
}

int modes_close(struct router *rt, uint32_t from, const struct ref_close *r)
{
    const struct mode_conn *c = &rt->modes->conns[r->conn];
    uint64_t at = router_at(rt, from, r);
    uint32_t count = 0;

    if (rt->stepping)
        router_commit_at(rt, from, at);
    while (c->legs) {
        if (!room_for_requester(rt, c->legs - 1))
            return not_now(rt, ROUTED_NO_ROOM);
        modes_responder_gone(rt, c->legs - 1);
        router_commit_at(rt, from, at);
        CRASH(MODE_LEG_SETTLED);
        if (is_enough(rt, ++count))
            return not_now(rt, ROUTED_LATER);
    }
    while (c->requests) {
        if (!room_for_responder(rt, c->requests - 1))
            return not_now(rt, ROUTED_NO_ROOM);
        if (free_many_legs(rt, c->requests - 1, from, at))
            return not_now(rt, ROUTED_LATER);
        requester_gone(rt, c->requests - 1);
        router_commit_at(rt, from, at);
        CRASH(MODE_REQUEST_SETTLED);
        if (is_enough(rt, ++count))
            return not_now(rt, ROUTED_LATER);
    }
    return modes_drop_name(rt, from, r) ? ROUTED : not_now(rt, ROUTED_NO_ROOM);
}

int modes_expire(struct router *rt)
{
    struct modes *m = rt->modes;
    uint32_t count = 0;
    int more = 0;

    rt->work_until = rt->work + ROUTER_WORK_A_SLICE;
    while (m->heap_count && modes_next_ns(rt) <= rt->now_ns) {
        const struct mode_request *q = &routing_requests(rt->seg)[m->heap[0]];

        more = rt->work > rt->work_until;
        if (more || !router_room(rt, modes_port(rt, q->conn), 1))
            break;
        rt->work += MODES_WORK_SETTLED;
        if ((more = free_many_legs(rt, m->heap[0], ROUTER_NONE, 0)))
            break;
        modes_tell(rt, q->conn, q->reply, q->reply_len, STATUS_EXPIRED, NULL);
        modes_free_request(rt, m->heap[0]);
        rt->stats.mode_expired++;
        CRASH(MODE_EXPIRED);
        if (++count % MODES_EXPIRE_A_STEP == 0 || rt->redo.count > MODES_FANOUT_STEP)
            router_commit(rt);
    }
    if (rt->stepping)
        router_commit(rt);
    return more;
}
