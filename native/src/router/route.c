/* route: a message to its recipients, or a run of messages of one sender to one subject.
 *
 * The index gives plain subscribers grouped by port and queue groups to pick one member
 * of. Each port concerned gets one order (or several, the earlier ones marked "more");
 * the touch count rides on the last order of the message. Nobody concerned: the source is
 * told to delete it, or to tell the sender that nobody is listening.
 *
 * A run (REF_RUN) is routed at once, in pieces that fit a batch of orders. With queue groups each of
 * its messages is routed for itself, as each is picked for; with very many recipients too. How far a
 * run is routed is part of the place in the input (routing_in).
 */
#include "router/aside.h"
#include "router/instruct.h"

#include "base/crash.h"
#include "shm/load.h"

#include <errno.h>

#define LIST_MAX ((BATCH_RECORD_MAX - ORDER_BYTES_MIN) / 4)
#define PICKS_MAX 4096u
#define WORK_RECIPIENTS 4u /* of a list that is copied, for a unit of work */
#define WORK_MEMBERS 16u   /* that are passed over */
#define PICKS_WAIT UINT32_MAX
#define RUN_BYTES_MAX (BATCH_BYTES - 128u) /* of one order with its load: there may be a mark beside it */

/* Counts a message on a queue member (R3: redone by base and stamp). */
void route_count_pick(struct router *rt, index_sub sub)
{
    struct routing_sub *s = routing_sub(rt->seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub));
    uint64_t step = rt->seg->step + 1;

    if (s->stamp != step) {
        s->base = s->routed;
        CRASH(PICK_BASE);
        s->stamp = step;
        CRASH(PICK_STAMP);
    }
    s->routed++;
    if (s->max && s->routed >= s->max)
        rt->spent[rt->spent_count++] = sub;
}

uint32_t route_member(struct router *rt, const struct index_group *group, uint32_t at, uint32_t not_conn, uint32_t not_ports)
{
    uint32_t tries = 0;

    for (; tries < group->count; tries++) {
        if (group->conns[at] != not_conn && !(not_ports >> INDEX_SUB_PORT(group->subs[at]) & 1))
            break;
        at = at + 1 < group->count ? at + 1 : 0;
    }
    rt->work += tries / WORK_MEMBERS;
    return tries < group->count ? at : ROUTER_NONE;
}

/* One member per group. Those of ports that stand still or have no room (`full`, as bits) are passed over for
 * others; PICKS_WAIT if all that a group has are of ports without room. */
static __attribute__((noinline)) uint32_t pick_members(struct router *rt, const struct index_match *m,
                                                       const struct ref_message *r, uint32_t full)
{
    uint32_t count = 0;

    for (uint32_t g = 0; g < m->group_count && count < PICKS_MAX; g++) {
        struct index_group *group = &m->groups[g];
        uint32_t first = index_group_pick(group), at = first;

        if (r->flags & REF_NO_ECHO || full || rt->still) {
            uint32_t echo = r->flags & REF_NO_ECHO ? r->conn : ROUTER_NONE;

            at = route_member(rt, group, first, echo, full | rt->still);
            if (at == ROUTER_NONE && rt->still)
                at = route_member(rt, group, first, echo, full);
            if (at == ROUTER_NONE && full && route_member(rt, group, first, echo, 0) != ROUTER_NONE)
                return PICKS_WAIT;
        }
        if (at != ROUTER_NONE)
            rt->picks[count++] = group->subs[at];
    }
    return count;
}

/* Whether some of the recipients, which are in the order of their ports, are on one of those. */
static int any_on(const uint32_t *subs, uint32_t count, uint32_t ports)
{
    for (; ports; ports &= ports - 1) {
        uint32_t port = (uint32_t)__builtin_ctz(ports), at = 0, end = count;

        while (at < end) {
            uint32_t middle = at + (end - at) / 2;

            if (INDEX_SUB_PORT(subs[middle]) < port)
                at = middle + 1;
            else
                end = middle;
        }
        if (at < count && INDEX_SUB_PORT(subs[at]) == port)
            return 1;
    }
    return 0;
}

/* Lists being written for the ports of one message. */
struct writer {
    struct router *rt;
    uint64_t handle;
    uint32_t messages, size_each, subject_len;
    struct order *last; /* the latest order of any port */
    uint32_t touched;   /* ports, as bits */
};

static struct order *new_order(struct writer *w, uint32_t port, uint32_t count)
{
    w->touched |= 1u << port;
    if (w->messages > 1)
        w->last = instruct_run(w->rt, port, count, w->handle, w->messages,
                               batch_run_load(count, w->messages, w->size_each, w->subject_len));
    else
        w->last = instruct_deliver(w->rt, port, count, w->handle);
    return w->last;
}

/* `count` slots from `subs` (index ids), then the picks of this port. */
static void write_list(struct writer *w, uint32_t port, const uint32_t *subs, uint32_t count,
                       const uint32_t *picks, uint32_t pick_count)
{
    uint32_t mine = 0, done = 0, pick = 0;

    for (uint32_t i = 0; i < pick_count; i++)
        mine += INDEX_SUB_PORT(picks[i]) == port;
    for (uint32_t left = count + mine; left;) {
        uint32_t n = left < LIST_MAX ? left : (uint32_t)LIST_MAX;
        struct order *o = new_order(w, port, n);
        uint32_t *to = instruct_subs(o);

        for (uint32_t i = 0; i < n; i++) {
            if (done < count) {
                to[i] = INDEX_SUB_SLOT(subs[done++]);
            } else {
                while (INDEX_SUB_PORT(picks[pick]) != port)
                    pick++;
                to[i] = INDEX_SUB_SLOT(picks[pick++]);
            }
        }
        left -= n;
        if (left)
            instruct_more(o);
    }
}

static int nobody(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t handle, uint32_t messages)
{
    if (!router_room(rt, from, 0))
        return 0;
    rt->stats.no_recipients += messages;
    if (r->flags & REF_NO_RESPONDERS) {
        /* It goes to no queue group: the request may not be of who would get it. */
        uint32_t sub = own_plain(rt, r->conn, ref_reply(r), r->reply_len);

        if (sub != ROUTER_NONE && INDEX_SUB_PORT(sub) == from) {
            rt->stats.no_responders++;
            instruct_no_responders(rt, from, INDEX_SUB_SLOT(sub), handle);
            return 1;
        }
    }
    instruct_delete(rt, from, handle, messages);
    return 1;
}

/* Batches a list of this many recipients may take in one ring. */
static uint32_t batches_for(uint32_t recipients)
{
    return recipients / (uint32_t)LIST_MAX + 2;
}

/* Plain recipients without the sender's own. */
static uint32_t without_echo(struct router *rt, const struct index_match *m, uint32_t conn)
{
    uint32_t count = 0;

    rt->work += m->count / WORK_MEMBERS;
    for (uint32_t i = 0; i < m->count; i++)
        if (m->conns[i] != conn)
            rt->sorted[count++] = m->subs[i];
    return count;
}

void route_drop_spent(struct router *rt)
{
    while (rt->spent_count) {
        index_sub sub = rt->spent[--rt->spent_count];

        uint32_t port = INDEX_SUB_PORT(sub), slot = INDEX_SUB_SLOT(sub);
        uint64_t word = routing_sub(rt->seg, port, slot)->word;

        clients_drop_sub(rt, port, slot, 1);
        instruct_sub(rt, port, ORDER_UNSUBSCRIBED, (uint32_t)word, slot | (word & ROUTING_EPOCH));
    }
}

/* ---- lists so long that no ring can hold them at once ----
 *
 * Such a message is set aside (aside.h). Its plain recipients are found once, and marked in a bitmap: that
 * gives the order which must be the same after a restart (R4). They go out piece by piece, each piece a step
 * of its own, as far as there is room and time; then the last order of each port. */

static uint64_t *list_word(const struct router *rt, const struct list *l, index_sub sub)
{
    return &l->bits[INDEX_SUB_PORT(sub) * rt->list_words + INDEX_SUB_SLOT(sub) / 64];
}

void route_forget(struct router *rt, index_sub sub)
{
    for (uint32_t i = 0; i < rt->conf.ports; i++)
        if (__builtin_expect(rt->lists[i].made, 0))
            *list_word(rt, &rt->lists[i], sub) &= ~(1ULL << sub % 64);
}

void route_list_begin(struct router *rt, uint32_t from)
{
    struct list *l = &rt->lists[from];

    for (uint32_t i = 0; i < rt->conf.ports; i++)
        memset(&l->bits[i * rt->list_words], 0, (size_t)((rt->seg->subs_high[i] + 63) / 64 * 8));
    l->made = 1;
    rt->asides[from].open = rt->aside_now;
    rt->stats.lists++;
}

void route_list_end(struct router *rt, uint32_t from)
{
    rt->lists[from].made = 0;
    rt->asides[from].open = 0;
}

void route_list_add(struct router *rt, uint32_t from, index_sub sub)
{
    *list_word(rt, &rt->lists[from], sub) |= 1ULL << sub % 64;
}

static void list_make(struct router *rt, uint32_t from, const struct ref_message *r, const struct index_match *m)
{
    route_list_begin(rt, from);
    for (uint32_t i = 0; i < m->count; i++)
        if (!(r->flags & REF_NO_ECHO && m->conns[i] == r->conn))
            route_list_add(rt, from, m->subs[i]);
    rt->work += m->count;
}

uint32_t route_list_next(const struct router *rt, uint32_t from, uint64_t progress, uint32_t most, index_sub *ret_subs)
{
    const struct list *l = &rt->lists[from];
    uint32_t port = INDEX_SUB_PORT((uint32_t)progress), slot = INDEX_SUB_SLOT((uint32_t)progress), count = 0;

    for (; port < rt->conf.ports && !count; port++, slot = 0) {
        uint64_t words = (rt->seg->subs_high[port] + 63) / 64;

        for (uint64_t at = slot / 64; at < words && count < most; at++) {
            uint64_t bits = l->bits[port * rt->list_words + at];

            if (at == slot / 64)
                bits &= ~0ULL << slot % 64;
            for (; bits && count < most; bits &= bits - 1)
                ret_subs[count++] = INDEX_SUB(port, at * 64 + (uint32_t)__builtin_ctzll(bits));
        }
    }
    return count;
}

/* The pieces that there is room and time for: enum routed. */
static int route_pieces(struct router *rt, uint32_t from, uint64_t handle)
{
    struct routing_in *in = rt->place;
    struct writer w = {.rt = rt, .handle = handle, .messages = 1};
    index_sub subs[LIST_MAX];
    uint32_t n;

    while ((n = route_list_next(rt, from, in->progress, LIST_MAX, subs))) {
        uint32_t port = INDEX_SUB_PORT(subs[0]);

        if (!router_room(rt, port, ROUTER_LEAVES))
            return ROUTED_NO_ROOM;
        write_list(&w, port, subs, n, NULL, 0);
        instruct_more(w.last);
        redo_put(&rt->redo, &in->progress, subs[n - 1] + 1ULL);
        redo_put(&rt->redo, &in->touched, in->touched | 1ULL << port);
        router_commit(rt);
        CRASH(ROUTE_PIECE);
        (void)instruct_send(rt, port, INSTRUCT_ROUTED);
        rt->stats.deliveries += n;
        rt->work += n;
        if (rt->work > rt->work_until)
            return ROUTED_LATER;
    }
    return ROUTED;
}

/* All plain ones are ordered: each list is closed, with the members of groups if there are any. */
static int close_lists(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t handle, uint64_t hash)
{
    struct routing_in *in = rt->place;
    struct writer w = {.rt = rt, .handle = handle, .messages = 1};

    uint32_t full = router_full(rt, BATCH_RING / 4), mask = (uint32_t)in->touched;

    if (full & mask)
        return ROUTED_NO_ROOM;
    uint32_t picked = pick_members(rt, index_match(rt->index, r->text, r->subject_len, hash), r, full);

    if (picked == PICKS_WAIT)
        return ROUTED_NO_ROOM;

    for (uint32_t i = 0; i < picked; i++) {
        route_count_pick(rt, rt->picks[i]);
        mask |= 1u << INDEX_SUB_PORT(rt->picks[i]);
    }
    for (; mask; mask &= mask - 1) {
        uint32_t port = (uint32_t)__builtin_ctz(mask);

        write_list(&w, port, NULL, 0, rt->picks, picked);
        if (!(w.touched & 1u << port))
            new_order(&w, port, 0);
    }
    route_list_end(rt, from);
    if (!w.last)
        return nobody(rt, from, r, handle, 1);
    redo_put(&rt->redo, &in->progress, 0);
    redo_put(&rt->redo, &in->touched, 0);
    instruct_limit(w.last, (uint32_t)__builtin_popcount(w.touched));
    rt->stats.deliveries += picked;
    route_drop_spent(rt);
    return ROUTED;
}

/* What cannot be ordered now, because another list of this port is open. */
static int put_off(const struct router *rt) { return rt->aside_now ? ROUTED_NO_ROOM : ROUTED_ASIDE; }

static int other_open(const struct router *rt, uint32_t from)
{
    return rt->asides[from].open && rt->asides[from].open != rt->aside_now;
}

static __attribute__((noinline)) int route_huge(struct router *rt, uint32_t from, const struct ref_message *r,
                                                const struct index_match *m, uint64_t handle, uint64_t hash)
{
    if (!rt->aside_now || other_open(rt, from))
        return put_off(rt);
    if (!rt->lists[from].made)
        list_make(rt, from, r, m ? m : index_match(rt->index, r->text, r->subject_len, hash));
    int done = route_pieces(rt, from, handle);

    return done == ROUTED ? close_lists(rt, from, r, handle, hash) : done;
}

static int route_many(struct router *rt, uint32_t from, const struct ref_message *r, const struct index_match *m,
                      uint64_t handle, uint32_t messages, uint64_t hash)
{
    const uint32_t *subs = m->subs;
    uint32_t count = m->count, mask = 0;

    if (batches_for(m->count + m->group_count) > BATCH_RING / 2)
        return route_huge(rt, from, r, m, handle, hash);
    if (m->count + m->group_count > LIST_MAX && other_open(rt, from)) /* it may go on in a next batch (P3) */
        return put_off(rt);
    if (r->flags & REF_NO_ECHO) {
        count = without_echo(rt, m, r->conn);
        subs = rt->sorted;
    }
    /* Each pick may also end a membership: an order of four words. */
    uint32_t full = router_full(rt, batches_for(count + 5 * (m->group_count < PICKS_MAX ? m->group_count : PICKS_MAX)));

    if (full && any_on(subs, count, full))
        return 0;
    rt->work += (m->count + m->group_count * 8ULL) / WORK_RECIPIENTS;
    uint32_t picked = m->group_count ? pick_members(rt, m, r, full) : 0;

    if (picked == PICKS_WAIT)
        return 0;
    struct writer w = {.rt = rt, .handle = handle, .messages = messages, .size_each = r->size / ref_messages(r),
                       .subject_len = r->subject_len};

    for (uint32_t i = 0; i < picked; i++) {
        route_count_pick(rt, rt->picks[i]);
        mask |= 1u << INDEX_SUB_PORT(rt->picks[i]);
    }
    for (uint32_t i = 0; i < count;) {
        uint32_t port = INDEX_SUB_PORT(subs[i]), n = 1;

        while (i + n < count && INDEX_SUB_PORT(subs[i + n]) == port)
            n++;
        write_list(&w, port, subs + i, n, rt->picks, picked);
        mask &= ~(1u << port);
        i += n;
    }
    for (; mask; mask &= mask - 1)
        write_list(&w, (uint32_t)__builtin_ctz(mask), NULL, 0, rt->picks, picked);
    if (!w.last)
        return nobody(rt, from, r, handle, messages);
    instruct_limit(w.last, (uint32_t)__builtin_popcount(w.touched));
    rt->stats.deliveries += (uint64_t)(count + picked) * messages;
    if (count + picked > rt->fanout_max)
        rt->fanout_max = count + picked;
    route_drop_spent(rt);
    return 1;
}

/* How many of the `left` messages of a run can go together. */
static uint32_t together(const struct router *rt, const struct ref_message *r, const struct index_match *m)
{
    uint32_t count = ref_messages(r), left = count - rt->routed;

    if (left == 1 || m->group_count)
        return 1;
    if (m->count == 0)
        return left;
    uint32_t bytes = order_run_bytes(m->count);

    if (bytes + 4 * m->count > RUN_BYTES_MAX)
        return 1;
    uint32_t most = batch_run_most(RUN_BYTES_MAX - bytes, m->count, r->size / count, r->subject_len);

    return left < most ? left : most;
}

static inline int route_some(struct router *rt, uint32_t from, const struct ref_message *r, const struct index_match *m,
                      uint64_t handle, uint32_t messages, uint64_t hash)
{
    if (m->count == 0 && m->group_count == 0)
        return nobody(rt, from, r, handle, messages);
    if (m->count != 1 || m->group_count || (r->flags & REF_NO_ECHO && m->conns[0] == r->conn))
        return route_many(rt, from, r, m, handle, messages, hash);
    uint32_t port = INDEX_SUB_PORT(m->subs[0]), sub = INDEX_SUB_SLOT(m->subs[0]);

    if (!router_room(rt, port, 0))
        return 0;
    rt->stats.deliveries += messages;
    if (messages == 1)
        instruct_deliver_one(rt, port, sub, handle);
    else
        instruct_run_one(rt, port, sub, handle, messages,
                         batch_run_load(1, messages, r->size / ref_messages(r), r->subject_len));
    return 1;
}

/* The message at hand, whose list is being ordered: it is not matched again. */
static int goes_on(const struct router *rt, uint32_t from)
{
    return rt->aside_now && rt->lists[from].made && rt->asides[from].open == rt->aside_now;
}

/* Those messages of the reference that can go together, or more of one whose list is ordered in pieces. */
static int route_part(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash, uint32_t *ret_messages)
{
    uint64_t handle = r->handle + rt->routed;

    *ret_messages = 1;
    if (__builtin_expect(goes_on(rt, from), 0))
        return route_huge(rt, from, r, NULL, handle, hash);
    const struct index_match *m = index_match(rt->index, r->text, r->subject_len, hash);

    if (__builtin_expect(rt->place->touched != 0, 0)) /* it is closed, even if its last recipient has gone */
        return route_huge(rt, from, r, m, handle, hash);
    *ret_messages = together(rt, r, m);
    return route_some(rt, from, r, m, handle, *ret_messages, hash);
}

int route_any(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash)
{
    for (uint32_t count = ref_messages(r), messages; rt->routed < count;) {
        uint64_t work = rt->work;
        int done = route_part(rt, from, r, hash, &messages);

        if (done != ROUTED)
            return done;
        rt->routed += messages;
        if (rt->routed == count)
            break;
        CRASH(ROUTE_PART);
        if (rt->redo.count > ROUTER_REDO_SOFT)
            router_commit_at(rt, from, router_at(rt, from, r));
        if (__builtin_expect(rt->work != work, 0) &&
            (rt->work > rt->work_until || (rt->aside_now && rt->work - work > ASIDE_DEAR)))
            return ROUTED_LATER;
    }
    rt->routed = 0;
    return ROUTED;
}

int route_message(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash)
{
    return route_some(rt, from, r, index_match(rt->index, r->text, r->subject_len, hash), r->handle, 1, hash);
}
