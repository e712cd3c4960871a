/* modes_spread: one message to everybody who listens to one of several topics, or to all clients of a kind
 * (docs/modes.md).
 *
 * The structure: none of its own. Recipients come in sections: those of a topic, in the order of the topics, by
 *               ascending subscription; those of a kind by port, by ascending connection. How far that went is
 *               routing_in.progress, section << 40 | last one ordered + 1.
 * Written by:   the router. What fits the rings is one step (R6); else each piece is a step of its own (R4), and
 *               the last one ends the list of each port (P3).
 * Invariants:   a subscription gets the message once, under the first topic that it matches; a client of a kind
 *               gets it once. Which section a recipient is in depends on nobody else, so the list may change
 *               between two pieces. Members of queue groups are picked in the last step.
 * After a crash: the step is repeated; what is before `progress` was ordered.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"

#define SECTION_SHIFT 40
#define LIST_MAX 1024u     /* recipients of one order */
#define ORDERS_A_STEP 16u
#define PICKS_MAX (sizeof ((struct router *)0)->picks / 4)
_Static_assert(ORDER_BYTES_MIN + LIST_MAX * 4 + MODE_TOPICS_BYTES <= BATCH_RECORD_MAX, "an order fits a batch");

struct topic {
    const char *text;
    uint32_t len; /* 0: what it was published to */
};

struct spread {
    struct router *rt;
    uint32_t from;
    const struct ref_message *r;
    struct order *last[PORTS_MAX]; /* of this step */
    struct order *latest;          /* of these */
    uint32_t touched;              /* ports that have orders, of earlier steps too */
    uint32_t orders;               /* in this step */
    uint64_t progress;
};

static struct spread begin(struct router *rt, uint32_t from, const struct ref_message *r)
{
    const struct routing_in *in = &rt->seg->in[from];

    if (!++rt->modes->stamp) { /* once in four thousand million: what has an old stamp must not look met */
        memset(rt->modes->sub_seen, 0, (size_t)rt->conf.ports * rt->seg->subs_each * 4);
        memset(rt->modes->queue_seen, 0, ((size_t)rt->conf.subjects + 1) * 4);
        memset(rt->modes->own, 0, (size_t)rt->seg->clients * sizeof(struct mode_own));
        rt->modes->stamp = 1;
    }
    return (struct spread){.rt = rt, .from = from, .r = r, .touched = (uint32_t)in->touched, .progress = in->progress};
}

/* What was ordered so far becomes valid; more is to come. */
static void save(struct spread *s)
{
    struct routing_in *in = &s->rt->seg->in[s->from];

    if (!s->orders)
        return;
    for (uint32_t i = 0; i < s->rt->conf.ports; i++)
        if (s->last[i])
            instruct_more(s->last[i]);
    memset(s->last, 0, sizeof s->last);
    s->latest = NULL;
    s->orders = 0;
    redo_put(&s->rt->redo, &in->progress, s->progress);
    redo_put(&s->rt->redo, &in->touched, s->touched);
    CRASH(MODE_SPREADING);
    router_commit_at(s->rt, s->from, router_at(s->rt, s->from, s->r));
    CRASH(MODE_SPREAD);
    for (uint32_t i = 0; i < s->rt->conf.ports; i++)
        (void)instruct_send(s->rt, i, INSTRUCT_ROUTED);
}

/* An order for `count` recipients of a port; where their slots go. */
static uint32_t *new_order(struct spread *s, uint32_t port, uint32_t count, const struct topic *t)
{
    struct order *o = t->len ? instruct_topic(s->rt, port, count, s->r->handle, t->text, t->len)
                             : instruct_deliver(s->rt, port, count, s->r->handle);

    if (s->last[port])
        instruct_more(s->last[port]);
    s->last[port] = s->latest = o;
    s->touched |= 1u << port;
    s->orders++;
    s->rt->stats.deliveries += count;
    return t->len ? ((struct order_topic *)o)->subs : instruct_subs(o);
}

/* Orders a section, but for what was ordered before. `keys` are subscriptions or, with `own`, connections. 0: there
 * is no room; what was ordered is saved. */
static int order_section(struct spread *s, uint32_t section, uint32_t *keys, uint32_t count, const struct mode_own *own,
                         const struct topic *t)
{
    uint32_t at = 0;

    if (count > 1)
        route_sort_ids(keys, count);
    while (at < count && ((uint64_t)section << SECTION_SHIFT | keys[at]) < s->progress)
        at++;
    while (at < count) {
        uint32_t first = own ? own[keys[at]].sub : keys[at], port = INDEX_SUB_PORT(first), n = 1;

        while (at + n < count && n < LIST_MAX && INDEX_SUB_PORT(own ? own[keys[at + n]].sub : keys[at + n]) == port)
            n++;
        if (!router_room(s->rt, port, 2)) {
            save(s);
            return 0;
        }
        uint32_t *to = new_order(s, port, n, t);

        for (uint32_t i = 0; i < n; i++)
            to[i] = INDEX_SUB_SLOT(own ? own[keys[at + i]].sub : keys[at + i]);
        at += n;
        s->progress = ((uint64_t)section << SECTION_SHIFT | keys[at - 1]) + 1;
        if (s->orders == ORDERS_A_STEP)
            save(s);
    }
    return 1;
}

/* Room in the rings of these ports, for the last step; 0: there is none, and what was ordered is saved. */
static int have_room(struct spread *s, uint32_t ports, uint32_t batches)
{
    for (; ports; ports &= ports - 1)
        if (!router_room(s->rt, (uint32_t)__builtin_ctz(ports), batches)) {
            save(s);
            return 0;
        }
    return 1;
}

/* Everybody has an order: each list ends, and the last order of all says how many ports there are. */
static int finish(struct spread *s)
{
    struct routing_in *in = &s->rt->seg->in[s->from];

    if (!s->touched)
        return modes_refuse(s->rt, s->from, s->r, STATUS_NO_RESPONDERS);
    for (uint32_t left = s->touched; left; left &= left - 1)
        if (!s->last[__builtin_ctz(left)])
            s->latest = instruct_deliver(s->rt, (uint32_t)__builtin_ctz(left), 0, s->r->handle);
    instruct_limit(s->latest, (uint32_t)__builtin_popcount(s->touched));
    if (in->touched) {
        redo_put(&s->rt->redo, &in->progress, 0);
        redo_put(&s->rt->redo, &in->touched, 0);
    }
    route_drop_spent(s->rt);
    return 1;
}

/* ---- topics ---- */

static const struct index_match *match(struct router *rt, const struct ref_message *r, const struct topic *t)
{
    const char *text = t->len ? t->text : r->text;
    uint32_t len = t->len ? t->len : r->subject_len;

    return index_match(rt->index, text, len, index_hash(text, len));
}

static int is_echo(const struct ref_message *r, uint32_t conn) { return r->flags & REF_NO_ECHO && conn == r->conn; }

/* Plain subscriptions to a topic that matched none before it. */
static uint32_t collect(struct router *rt, const struct ref_message *r, const struct topic *t)
{
    const struct index_match *m = match(rt, r, t);
    uint32_t count = 0;

    for (uint32_t i = 0; i < m->count; i++) {
        uint32_t *seen = &rt->modes->sub_seen[(uint64_t)INDEX_SUB_PORT(m->subs[i]) * rt->seg->subs_each + INDEX_SUB_SLOT(m->subs[i])];

        if (*seen == rt->modes->stamp || is_echo(r, m->conns[i]))
            continue;
        *seen = rt->modes->stamp;
        rt->modes->list[count++] = m->subs[i];
    }
    return count;
}

/* One member of each queue group, of those that listen to the first topic the group listens to. Returns how
 * many are in rt->picks from `at` on. */
static uint32_t pick(struct router *rt, const struct ref_message *r, const struct topic *t, uint32_t at)
{
    const struct index_match *m = match(rt, r, t);
    uint32_t first = at;

    for (uint32_t g = 0; g < m->group_count && at < PICKS_MAX; g++) {
        struct index_group *group = &m->groups[g];
        uint32_t *seen = &rt->modes->queue_seen[group->queue], member = index_group_pick(group), tries = group->count;

        if (*seen == rt->modes->stamp)
            continue;
        while (tries && is_echo(r, group->conns[member])) {
            member = member + 1 < group->count ? member + 1 : 0;
            tries--;
        }
        if (!tries)
            continue;
        *seen = rt->modes->stamp;
        rt->picks[at++] = group->subs[member];
    }
    return at - first;
}

static uint32_t ports_of(const uint32_t *subs, uint32_t count)
{
    uint32_t ports = 0;

    for (uint32_t i = 0; i < count; i++)
        ports |= 1u << INDEX_SUB_PORT(subs[i]);
    return ports;
}

static void order_picks(struct spread *s, uint32_t *subs, uint32_t count, const struct topic *t)
{
    if (count > 1)
        route_sort_ids(subs, count);
    for (uint32_t at = 0, n; at < count; at += n) {
        uint32_t port = INDEX_SUB_PORT(subs[at]);

        for (n = 1; at + n < count && n < LIST_MAX && INDEX_SUB_PORT(subs[at + n]) == port;)
            n++;
        uint32_t *to = new_order(s, port, n, t);

        for (uint32_t i = 0; i < n; i++) {
            to[i] = INDEX_SUB_SLOT(subs[at + i]);
            route_count_pick(s->rt, subs[at + i]);
        }
    }
}

/* In the last step: they would be picked again. */
static int order_groups(struct spread *s, const struct topic *topics, uint32_t count)
{
    uint32_t picked[MODE_TOPICS_MAX + 1], total = 0;

    for (uint32_t t = 0; t < count; t++) {
        picked[t] = pick(s->rt, s->r, &topics[t], total);
        total += picked[t];
    }
    /* Four bytes each and an order that ends a membership; texts, and lists that are not full. */
    if (!have_room(s, ports_of(s->rt->picks, total), BATCH_RING / 3))
        return 0;
    for (uint32_t t = 0, at = 0; t < count; at += picked[t++])
        order_picks(s, s->rt->picks + at, picked[t], &topics[t]);
    return 1;
}

static uint32_t take_topics(const struct ref_message *r, struct topic *to)
{
    const char *at = ref_mode(r)->topics, *end = at + ref_mode(r)->topics_len;
    uint32_t count = 0;

    to[count++] = (struct topic){.len = 0};
    while (at < end && count <= MODE_TOPICS_MAX) {
        const char *blank = memchr(at, ' ', (size_t)(end - at));
        const char *next = blank ? blank : end;

        to[count++] = (struct topic){at, (uint32_t)(next - at)};
        at = next + 1;
    }
    return count;
}

int modes_spread_topics(struct router *rt, uint32_t from, const struct ref_message *r)
{
    struct topic topics[MODE_TOPICS_MAX + 1];
    struct spread s = begin(rt, from, r);
    uint32_t count = take_topics(r, topics);

    for (uint32_t t = 0; t < count; t++) {
        uint32_t found = collect(rt, r, &topics[t]);

        if (t >= s.progress >> SECTION_SHIFT && !order_section(&s, t, rt->modes->list, found, NULL, &topics[t]))
            return 0;
    }
    return have_room(&s, s.touched, 1) && order_groups(&s, topics, count) && finish(&s);
}

/* ---- kinds ---- */

static uint32_t subject_len(struct router *rt, index_sub sub)
{
    return routing_sub(rt->seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub))->subject_len;
}

/* Clients of the kind that listen there, into modes.list; which subscription it is in modes.own: the one with
 * the longest subject, as in route_own_sub(). */
static uint32_t collect_kind(struct router *rt, const struct ref_message *r)
{
    const struct index_match *m = index_match(rt->index, r->text, r->subject_len, index_hash(r->text, r->subject_len));
    struct mode_own *own = rt->modes->own;
    uint32_t count = 0, stamp = rt->modes->stamp;
    struct kind kind;

    if (!modes_take_kind(r->text, r->subject_len, &kind))
        return 0;
    for (uint32_t i = 0; i < m->count; i++) {
        uint32_t conn = m->conns[i];

        if (own[conn].stamp == stamp) {
            if (subject_len(rt, m->subs[i]) > subject_len(rt, own[conn].sub))
                own[conn].sub = m->subs[i];
        } else if (!is_echo(r, conn) && modes_is_of_kind(rt, conn, &kind)) {
            own[conn] = (struct mode_own){stamp, m->subs[i]};
            rt->modes->list[count++] = conn;
        }
    }
    for (uint32_t g = 0; g < m->group_count; g++)
        for (uint32_t i = 0; i < m->groups[g].count; i++) {
            uint32_t conn = m->groups[g].conns[i];

            if (own[conn].stamp == stamp || is_echo(r, conn) || !modes_is_of_kind(rt, conn, &kind))
                continue;
            own[conn] = (struct mode_own){stamp, m->groups[g].subs[i]};
            rt->modes->list[count++] = conn;
        }
    return count;
}

uint32_t modes_list_kind(struct router *rt, const struct ref_message *r)
{
    (void)begin(rt, 0, r);
    uint32_t count = collect_kind(rt, r), *list = rt->modes->list;

    for (uint32_t i = 0; i < count; i++)
        list[i] = rt->modes->own[list[i]].sub;
    return count;
}

int modes_spread_kind(struct router *rt, uint32_t from, const struct ref_message *r)
{
    struct spread s = begin(rt, from, r);
    uint32_t found = collect_kind(rt, r);

    for (uint32_t port = (uint32_t)(s.progress >> SECTION_SHIFT); port < rt->conf.ports; port++) {
        uint32_t count = 0;

        for (uint32_t i = 0; i < found; i++)
            if (INDEX_SUB_PORT(rt->modes->own[rt->modes->list[i]].sub) == port)
                rt->sorted[count++] = rt->modes->list[i];
        if (!order_section(&s, port, rt->sorted, count, rt->modes->own, &(struct topic){.len = 0}))
            return 0;
    }
    return have_room(&s, s.touched, 1) && finish(&s);
}
