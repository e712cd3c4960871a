/* modes_settle: ends that no reply brings: a connection or subscription is gone, a deadline passed.
 *
 * The structure: none of its own; requests and legs are those of modes.c.
 * Written by:   the router, in steps of a few records each (R6): a responder that goes away may
 *               leave more requests than a ring has room for.
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
 * reference at `at` this is for, or ROUTER_NONE. */
static void free_many_legs(struct router *rt, uint32_t request, uint32_t from, uint64_t at)
{
    const struct request_link *l = &rt->modes->request_links[request];

    while (l->open > MODES_FANOUT_STEP) {
        for (uint32_t i = 0; i < MODES_FANOUT_STEP && l->open > 1; i++)
            modes_free_leg(rt, l->legs - 1);
        if (from == ROUTER_NONE)
            router_commit(rt);
        else
            router_commit_at(rt, from, at);
        CRASH(MODE_LEGS_FREED);
    }
}

int modes_unpin(struct router *rt, uint32_t from, const struct ref_unsubscribe *r, uint32_t sub)
{
    const uint32_t *pin = &rt->modes->pins[(uint64_t)from * rt->seg->subs_each + sub];

    if (rt->stepping)
        router_commit_at(rt, from, router_at(rt, from, r));
    while (*pin) {
        if (!room_for_requester(rt, *pin - 1))
            return 0;
        modes_responder_gone(rt, *pin - 1);
        router_commit_at(rt, from, router_at(rt, from, r));
        CRASH(MODE_UNPINNED);
    }
    return 1;
}

int modes_close(struct router *rt, uint32_t from, const struct ref_close *r)
{
    const struct mode_conn *c = &rt->modes->conns[r->conn];
    uint64_t at = router_at(rt, from, r);

    if (rt->stepping)
        router_commit_at(rt, from, at);
    while (c->legs) {
        if (!room_for_requester(rt, c->legs - 1))
            return 0;
        modes_responder_gone(rt, c->legs - 1);
        router_commit_at(rt, from, at);
        CRASH(MODE_LEG_SETTLED);
    }
    while (c->requests) {
        if (!room_for_responder(rt, c->requests - 1))
            return 0;
        free_many_legs(rt, c->requests - 1, from, at);
        requester_gone(rt, c->requests - 1);
        router_commit_at(rt, from, at);
        CRASH(MODE_REQUEST_SETTLED);
    }
    return modes_drop_name(rt, from, r);
}

void modes_expire(struct router *rt)
{
    struct modes *m = rt->modes;
    uint32_t count = 0;

    while (m->heap_count && modes_next_ns(rt) <= rt->now_ns) {
        const struct mode_request *q = &routing_requests(rt->seg)[m->heap[0]];

        if (!router_room(rt, modes_port(rt, q->conn), 1))
            break;
        free_many_legs(rt, m->heap[0], ROUTER_NONE, 0);
        modes_tell(rt, q->conn, q->reply, q->reply_len, STATUS_EXPIRED, NULL);
        modes_free_request(rt, m->heap[0]);
        rt->stats.mode_expired++;
        CRASH(MODE_EXPIRED);
        if (++count % MODES_EXPIRE_A_STEP == 0 || rt->redo.count > MODES_FANOUT_STEP)
            router_commit(rt);
    }
    if (rt->stepping)
        router_commit(rt);
}
