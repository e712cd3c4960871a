/* modes_route: a message of a mode to whom it is for (docs/modes.md).
 *
 * The structure: none of its own; requests and legs are those of modes.c.
 * Written by:   the router, in steps of one message each (R6).
 * Invariants:   a message is ordered to somebody or deleted, never both. Whoever asked is told
 *               when it goes to nobody. A responder is given the id of its leg as reply subject,
 *               the client that asked gets the replies under the subject it named.
 * After a crash: the step is repeated. The choice among responders may differ: nothing of the first
 *               attempt was visible to anybody.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"
#include "base/hash.h"
#include "base/put.h"

int modes_refuse(struct router *rt, uint32_t from, const struct ref_message *r, enum mode_status status)
{
    if (!router_room(rt, from, 1))
        return 0;
    instruct_delete(rt, from, r->handle, 1);
    if (r->reply_len)
        modes_tell(rt, r->conn, ref_reply(r), r->reply_len, status, NULL);
    rt->stats.mode_refused++;
    return 1;
}

static struct order *order_as(struct router *rt, const struct ref_message *r, index_sub sub, const struct instruct_as *as)
{
    rt->stats.deliveries++;
    return instruct_mode(rt, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub), r->handle, as);
}

/* To the responder of a leg, with a reply subject that names the leg. */
struct order *modes_order_leg(struct router *rt, const struct ref_message *r, uint32_t leg, uint64_t deadline_ns)
{
    char reply[MODE_REPLY_BYTES];
    uint32_t len = modes_put_reply(rt, leg, reply);

    return order_as(rt, r, routing_legs(rt->seg)[leg].sub,
                    &(struct instruct_as){.deadline_ns = deadline_ns, .subject = "", .reply = reply, .reply_len = len});
}

/* ---- whom to ask ---- */

int modes_less_loaded(const struct router *rt, uint32_t a, uint32_t b)
{
    const struct mode_conn *x = &rt->modes->conns[a], *y = &rt->modes->conns[b];

    return x->outstanding != y->outstanding ? x->outstanding < y->outstanding : x->idle < y->idle;
}

static int answers(const struct router *rt, index_sub sub)
{
    return !(rt->still >> INDEX_SUB_PORT(sub) & 1) && router_room(rt, INDEX_SUB_PORT(sub), 1);
}

/* One on a port that takes orders comes before one that would have to wait. */
static int before(const struct router *rt, index_sub a, uint32_t a_conn, index_sub b, uint32_t b_conn)
{
    int now = answers(rt, a);

    return now == answers(rt, b) ? modes_less_loaded(rt, a_conn, b_conn) : now;
}

/* The least loaded of `count` candidates: fewest outstanding requests, then the longest idle. Of more than
 * MODES_CHOICE so many are compared, each time others. */
index_sub modes_least_loaded(struct router *rt, const struct ref_message *r, const uint32_t *subs,
                             const uint32_t *conns, uint32_t count)
{
    uint32_t best = ROUTER_NONE, tries = 0;
    uint32_t at = count > MODES_CHOICE ? (uint32_t)((++rt->modes->choices * HASH_SPREAD >> 32) % count) : 0;

    for (; tries < count && (tries < MODES_CHOICE || best == ROUTER_NONE); tries++, at = at + 1 < count ? at + 1 : 0) {
        if (r->flags & REF_NO_ECHO && conns[at] == r->conn)
            continue;
        if (best == ROUTER_NONE || before(rt, subs[at], conns[at], subs[best], conns[best]))
            best = at;
    }
    rt->work += tries / MODES_WORK_COMPARED;
    return best == ROUTER_NONE ? ROUTER_NONE : subs[best];
}

/* One of all members of queue groups; only where there are none, one of the plain subscribers. */
static index_sub choose_any(struct router *rt, const struct ref_message *r, uint64_t hash)
{
    const struct index_match *m = index_match(rt->index, r->text, r->subject_len, hash);
    index_sub best = ROUTER_NONE;
    uint32_t best_conn = 0;

    for (uint32_t g = 0; g < m->group_count; g++) {
        const struct index_group *group = &m->groups[g];
        index_sub sub = modes_least_loaded(rt, r, group->subs, group->conns, group->count);

        if (sub == ROUTER_NONE)
            continue;
        uint32_t conn = (uint32_t)routing_sub(rt->seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub))->word;

        if (best == ROUTER_NONE || before(rt, sub, conn, best, best_conn)) {
            best = sub;
            best_conn = conn;
        }
    }
    return m->group_count ? best : modes_least_loaded(rt, r, m->subs, m->conns, m->count);
}

/* The subscription of the client with that name to its own subject. */
index_sub modes_choose_named(struct router *rt, const struct ref_message *r)
{
    const uint32_t prefix = sizeof MODE_IPC_PREFIX - 1;
    uint32_t conn = modes_find_name(rt, r->text + prefix, r->subject_len - prefix);

    if (conn == ROUTER_NONE || (r->flags & REF_NO_ECHO && conn == r->conn))
        return ROUTER_NONE;
    return own_sub(rt, conn, r->text, r->subject_len);
}

/* One of the clients of a kind. */
static index_sub choose_of_kind(struct router *rt, const struct ref_message *r)
{
    const uint32_t *list = rt->modes->list;
    index_sub best = ROUTER_NONE;
    uint32_t best_conn = 0;

    for (uint32_t left = modes_list_kind(rt, r); left--; list++) {
        uint32_t conn = (uint32_t)routing_sub(rt->seg, INDEX_SUB_PORT(*list), INDEX_SUB_SLOT(*list))->word;

        if (best == ROUTER_NONE || before(rt, *list, conn, best, best_conn)) {
            best = *list;
            best_conn = conn;
        }
    }
    return best;
}

static index_sub choose(struct router *rt, const struct ref_message *r, uint64_t hash)
{
    switch (ref_mode(r)->place) {
    case PLACE_IPC:
        return modes_choose_named(rt, r);
    case PLACE_KIND:
        return choose_of_kind(rt, r);
    default:
        return choose_any(rt, r, hash);
    }
}

/* ---- requests ---- */

/* Without anybody to hear of an answer: one delivery, and nothing to remember but whose turn it was. */
static int deliver_one(struct router *rt, const struct ref_message *r, index_sub sub)
{
    uint32_t conn = (uint32_t)routing_sub(rt->seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub))->word;

    if (!router_room(rt, INDEX_SUB_PORT(sub), 1))
        return 0;
    rt->modes->conns[conn].idle = ++rt->modes->tick;
    instruct_deliver_one(rt, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub), r->handle);
    rt->stats.deliveries++;
    route_count_pick(rt, sub);
    route_drop_spent(rt);
    return 1;
}

static int named(struct router *rt, uint32_t from, const struct ref_message *r)
{
    index_sub sub = modes_choose_named(rt, r);

    return sub == ROUTER_NONE ? modes_refuse(rt, from, r, STATUS_NO_RESPONDERS) : deliver_one(rt, r, sub);
}

/* A request to one responder, or the first of a session. */
static int ask_one(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash, uint8_t mode)
{
    uint64_t deadline_ns = mode == MODE_SESSION ? 0 : ref_mode(r)->deadline_ns;

    if (r->reply_len > MODE_REPLY_MAX)
        return modes_refuse(rt, from, r, STATUS_REPLY_TOO_LONG);
    if (mode == MODE_SESSION && !r->reply_len)
        return modes_refuse(rt, from, r, STATUS_BAD);
    if (mode == MODE_SESSION &&
        modes_find_session(rt, r->conn, ref_reply(r), r->reply_len) != ROUTER_NONE)
        return modes_refuse(rt, from, r, STATUS_SESSION_EXISTS);
    index_sub sub = choose(rt, r, hash);

    if (sub == ROUTER_NONE)
        return modes_refuse(rt, from, r, STATUS_NO_RESPONDERS);
    if (!r->reply_len)
        return deliver_one(rt, r, sub);
    if (!router_room(rt, INDEX_SUB_PORT(sub), 1))
        return 0;
    if (mode != MODE_SESSION && !deadline_ns)
        deadline_ns = rt->now_ns + MODES_DEADLINE_NS;
    uint32_t request = modes_legs_for(rt, r->conn) ? modes_take_request(rt, r, mode, deadline_ns) : ROUTER_NONE;

    if (request == ROUTER_NONE)
        return modes_refuse(rt, from, r, STATUS_TOO_MANY_REQUESTS);
    uint32_t leg = modes_take_leg(rt, request, mode, sub);

    modes_order_leg(rt, r, leg, deadline_ns);
    route_count_pick(rt, sub);
    route_drop_spent(rt);
    CRASH(MODE_ASKED);
    rt->stats.mode_requests++;
    return 1;
}

/* A further message of a session, to the one responder it has. */
static int session_message(struct router *rt, uint32_t from, const struct ref_message *r, uint8_t mode)
{
    uint32_t request = modes_find_session(rt, r->conn, ref_reply(r), r->reply_len);

    if (!router_room(rt, from, 1))
        return 0;
    if (request == ROUTER_NONE) {
        if (mode == MODE_SESSION)
            return modes_refuse(rt, from, r, STATUS_NO_SESSION);
        instruct_delete(rt, from, r->handle, 1); /* ended already, by the other side */
        return 1;
    }
    uint32_t leg = rt->modes->request_links[request].legs - 1;

    if (!modes_leg_stands(rt, leg)) {
        modes_free_request(rt, request);
        return modes_refuse(rt, from, r, STATUS_RESPONDER_GONE);
    }
    index_sub sub = routing_legs(rt->seg)[leg].sub;

    if (!router_room(rt, INDEX_SUB_PORT(sub), 1))
        return 0;
    modes_order_leg(rt, r, leg, 0);
    if (mode == MODE_SESSION_END)
        modes_free_request(rt, request);
    route_count_pick(rt, sub);
    route_drop_spent(rt);
    CRASH(MODE_SESSION_SAID);
    return 1;
}

/* ---- replies ---- */

static int reply(struct router *rt, uint32_t from, const struct ref_message *r)
{
    uint8_t mode = ref_mode(r)->mode;
    uint32_t leg = modes_find_leg(rt, r);

    if (!router_room(rt, from, 1))
        return 0;
    if (leg == ROUTER_NONE) { /* too late, guessed, or not one of ours */
        instruct_delete(rt, from, r->handle, 1);
        rt->stats.mode_late++;
        return 1;
    }
    uint32_t request = routing_legs(rt->seg)[leg].request;
    const struct mode_request *q = &routing_requests(rt->seg)[request];

    if (!router_room(rt, modes_port(rt, q->conn), 1))
        return 0;
    index_sub sub = own_sub(rt, q->conn, q->reply, q->reply_len);

    if (sub == ROUTER_NONE)
        instruct_delete(rt, from, r->handle, 1);
    else
        order_as(rt, r, sub, &(struct instruct_as){.subject = q->reply, .subject_len = q->reply_len, .reply = ""});
    rt->stats.mode_replies++;
    if ((uint8_t)q->word == MODE_SESSION) {
        if (mode == MODE_SESSION_END)
            modes_free_request(rt, request);
    } else if (mode != MODE_MORE) {
        modes_free_leg(rt, leg);
        if (!rt->modes->request_links[request].open) {
            modes_tell(rt, q->conn, q->reply, q->reply_len, STATUS_END, NULL);
            modes_free_request(rt, request);
        }
    }
    CRASH(MODE_REPLIED);
    return 1;
}

/* In no mode, or with a deadline only: to everybody it is addressed to. */
static int broadcast(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash)
{
    const struct ref_mode *m = ref_mode(r);

    if (m->topics_len)
        return modes_spread_topics(rt, from, r);
    switch (m->place) {
    case PLACE_IPC:
        return named(rt, from, r);
    case PLACE_KIND:
        return modes_spread_kind(rt, from, r);
    default:
        return route_any(rt, from, r, hash);
    }
}

int modes_message(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash)
{
    const struct ref_mode *m = ref_mode(r);
    int begun = rt->place->asking || rt->place->touched; /* some have it: so all of them will (R4) */

    if (m->place == PLACE_REPLY)
        return reply(rt, from, r);
    if (m->place == PLACE_CLIENTS)
        return modes_list_clients(rt, from, r);
    if (m->deadline_ns && rt->now_ns >= m->deadline_ns && !begun) {
        rt->stats.mode_expired++;
        return modes_refuse(rt, from, r, STATUS_EXPIRED);
    }
    switch (m->mode) {
    case MODE_NONE:
        return broadcast(rt, from, r, hash);
    case MODE_SEMAPHORE:
        return ask_one(rt, from, r, hash, MODE_SEMAPHORE);
    case MODE_SESSION_OPEN:
        return ask_one(rt, from, r, hash, MODE_SESSION);
    case MODE_SESSION:
    case MODE_SESSION_END:
        return session_message(rt, from, r, m->mode);
    case MODE_FANOUT:
        return r->reply_len ? modes_ask_all(rt, from, r, hash) : broadcast(rt, from, r, hash); /* nobody to tell */
    default:
        return modes_refuse(rt, from, r, STATUS_BAD);
    }
}
