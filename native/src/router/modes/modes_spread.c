/* modes_spread: one message to everybody who listens to one of several topics, or to all clients of a kind
 * (docs/modes.md).
 *
 * The structure: none of its own. Up to MODES_SPREAD_STEP recipients are one step (R6). More are ordered in pieces,
 *               each a step of its own, from where the message was set aside (R7): in sections, which are the topics
 *               in their order, or for a kind the ports. Within a topic subscriptions ascend, within a port
 *               connections. How far that went is routing_in.progress, section << SECTION_SHIFT | last one + 1. The
 *               last step ends the list of each port (P3), and has the members of queue groups in it.
 * Written by:   the router.
 * Invariants:   a subscription gets the message once, under the first topic that it matches; a client of a kind
 *               gets it once. Which section a recipient is in depends on nobody else, so the list may change
 *               between two pieces.
 * After a crash: the step is repeated; what is before `progress` was ordered.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"

#define SECTION_SHIFT 40
#define SECTION_KEY ((1ULL << SECTION_SHIFT) - 1)
#define LIST_MAX 1024u     /* recipients of one order */
#define ROOM 8u            /* batches for MODES_SPREAD_STEP recipients, members of groups that end among them */
#define WORK_RECIPIENTS 4u /* for a unit of work */
#define TOPIC_LONG (4 * MODES_SPREAD_STEP)
_Static_assert(ORDER_BYTES_MIN + LIST_MAX * 4 + MODE_TOPICS_BYTES <= BATCH_RECORD_MAX, "an order fits a batch");
_Static_assert(MODES_SPREAD_STEP * (4 + sizeof(struct order_sub)) + MODE_TOPICS_BYTES + (MODE_TOPICS_MAX + 1) * 32 <
               (ROOM - 2) * (BATCH_BYTES - BATCH_RECORD_MAX / 2), "see above; what does not fit a batch begins the next");

struct topic {
    const char *text;
    uint32_t len; /* 0: what it was published to */
};

/* Orders being written for the ports of one message. */
struct writer {
    struct router *rt;
    uint64_t handle;
    struct order *last[PORTS_MAX]; /* of this step */
    struct order *latest;          /* of these */
    uint32_t touched;              /* ports that have orders */
};

/* An order for `count` recipients of a port; where their slots go. */
static uint32_t *new_order(struct writer *w, uint32_t port, uint32_t count, const struct topic *t)
{
    struct order *o = t->len ? instruct_topic(w->rt, port, count, w->handle, t->text, t->len)
                             : instruct_deliver(w->rt, port, count, w->handle);

    if (w->last[port])
        instruct_more(w->last[port]);
    w->last[port] = w->latest = o;
    w->touched |= 1u << port;
    w->rt->stats.deliveries += count;
    return t->len ? ((struct order_topic *)o)->subs : instruct_subs(o);
}

/* Subscriptions to a topic, whatever their ports. */
static void order_all(struct writer *w, const uint32_t *subs, uint32_t count, const struct topic *t)
{
    uint32_t left[PORTS_MAX] = {0}, *to[PORTS_MAX] = {0}, room[PORTS_MAX] = {0};

    for (uint32_t i = 0; i < count; i++)
        left[INDEX_SUB_PORT(subs[i])]++;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t port = INDEX_SUB_PORT(subs[i]);

        if (!room[port]) {
            room[port] = left[port] < LIST_MAX ? left[port] : LIST_MAX;
            left[port] -= room[port];
            to[port] = new_order(w, port, room[port], t);
        }
        *to[port]++ = INDEX_SUB_SLOT(subs[i]);
        room[port]--;
    }
}

/* The last order says how many ports there are. */
static int finish(struct writer *w, uint32_t from, const struct ref_message *r)
{
    if (!w->touched)
        return modes_refuse(w->rt, from, r, STATUS_NO_RESPONDERS);
    instruct_limit(w->latest, (uint32_t)__builtin_popcount(w->touched));
    route_drop_spent(w->rt);
    return ROUTED;
}

static int have_room(const struct router *rt, uint32_t ports, uint32_t batches)
{
    for (; ports; ports &= ports - 1)
        if (!router_room(rt, (uint32_t)__builtin_ctz(ports), batches))
            return 0;
    return 1;
}

static uint32_t ports_of(const uint32_t *subs, uint32_t count)
{
    uint32_t ports = 0;

    for (uint32_t i = 0; i < count; i++)
        ports |= 1u << INDEX_SUB_PORT(subs[i]);
    return ports;
}

static int is_echo(const struct ref_message *r, uint32_t conn) { return r->flags & REF_NO_ECHO && conn == r->conn; }

/* Nothing was met yet. */
static void new_stamp(struct router *rt)
{
    struct modes *m = rt->modes;

    if (++m->stamp)
        return;
    memset(m->sub_seen, 0, (size_t)rt->conf.ports * rt->seg->subs_each * 4); /* once in four thousand million */
    memset(m->queue_seen, 0, ((size_t)rt->conf.subjects + 1) * 4);
    memset(m->own, 0, (size_t)rt->seg->clients * sizeof(struct mode_own));
    m->stamp = 1;
}

/* ---- topics ---- */

struct topics {
    struct topic at[MODE_TOPICS_MAX + 1];
    uint32_t count;
};

static struct topics take_topics(const struct ref_message *r)
{
    const char *at = ref_mode(r)->topics, *end = at + ref_mode(r)->topics_len;
    struct topics t = {.count = 1};

    while (at < end && t.count <= MODE_TOPICS_MAX) {
        const char *blank = memchr(at, ' ', (size_t)(end - at)), *next = blank ? blank : end;

        t.at[t.count++] = (struct topic){at, (uint32_t)(next - at)};
        at = next + 1;
    }
    return t;
}

static const struct index_match *match(struct router *rt, const struct ref_message *r, const struct topic *t)
{
    const char *text = t->len ? t->text : r->text;
    uint32_t len = t->len ? t->len : r->subject_len;

    return index_match(rt->index, text, len, index_hash(text, len));
}

/* Adds plain subscriptions to a topic that matched none before it to modes.list. */
static uint32_t collect(struct router *rt, const struct ref_message *r, const struct topic *t, uint32_t count)
{
    const struct index_match *m = match(rt, r, t);

    rt->work += m->count / WORK_RECIPIENTS;
    for (uint32_t i = 0; i < m->count; i++) {
        uint32_t *seen = &rt->modes->sub_seen[(uint64_t)INDEX_SUB_PORT(m->subs[i]) * rt->seg->subs_each + INDEX_SUB_SLOT(m->subs[i])];

        if (*seen == rt->modes->stamp || is_echo(r, m->conns[i]))
            continue;
        *seen = rt->modes->stamp;
        rt->modes->list[count++] = m->subs[i];
    }
    return count;
}

/* Adds one member of each queue group to rt->picks, of those that listen to the first topic the group listens to. */
static uint32_t pick(struct router *rt, const struct ref_message *r, const struct topic *t, uint32_t count)
{
    const struct index_match *m = match(rt, r, t);

    rt->work += m->group_count;
    for (uint32_t g = 0; g < m->group_count && count < sizeof rt->picks / sizeof *rt->picks; g++) {
        struct index_group *group = &m->groups[g];
        uint32_t *seen = &rt->modes->queue_seen[group->queue];

        if (*seen == rt->modes->stamp)
            continue;
        uint32_t echo = r->flags & REF_NO_ECHO ? r->conn : ROUTER_NONE;
        uint32_t first = index_group_pick(group), at = route_member(rt, group, first, echo, rt->still);

        if (at == ROUTER_NONE && rt->still)
            at = route_member(rt, group, first, echo, 0);
        if (at == ROUTER_NONE)
            continue;
        *seen = rt->modes->stamp;
        rt->picks[count++] = group->subs[at];
    }
    return count;
}

struct picked {
    uint32_t ends[MODE_TOPICS_MAX + 1]; /* of each topic, in rt->picks */
    uint32_t count;
};

static struct picked pick_all(struct router *rt, const struct ref_message *r, const struct topics *t)
{
    struct picked p = {.count = 0};

    for (uint32_t i = 0; i < t->count; i++)
        p.ends[i] = p.count = pick(rt, r, &t->at[i], p.count);
    return p;
}

static void order_picks(struct writer *w, const struct topics *t, const struct picked *p)
{
    for (uint32_t i = 0, at = 0; i < t->count; at = p->ends[i++])
        order_all(w, w->rt->picks + at, p->ends[i] - at, &t->at[i]);
    for (uint32_t i = 0; i < p->count; i++)
        route_count_pick(w->rt, w->rt->picks[i]);
}

static int topics_in_a_step(struct router *rt, uint32_t from, const struct ref_message *r, const struct topics *t,
                            const uint32_t *ends, const struct picked *p)
{
    struct writer w = {.rt = rt, .handle = r->handle};
    const uint32_t *list = rt->modes->list;

    if (!have_room(rt, ports_of(list, ends[t->count - 1]) | ports_of(rt->picks, p->count), ROOM))
        return ROUTED_NO_ROOM;
    for (uint32_t i = 0, at = 0; i < t->count; at = ends[i++])
        order_all(&w, list + at, ends[i] - at, &t->at[i]);
    order_picks(&w, t, p);
    return finish(&w, from, r);
}

static uint64_t *seen_word(const struct router *rt, uint32_t from, index_sub sub)
{
    uint64_t words = (rt->seg->subs_each + 63) / 64;

    return &rt->modes->spread[from].seen[INDEX_SUB_PORT(sub) * words + INDEX_SUB_SLOT(sub) / 64];
}

static int has_section(const struct router *rt, uint32_t from, const struct ref_message *r, uint32_t section)
{
    const struct mode_spread *s = &rt->modes->spread[from];

    return rt->lists[from].made && rt->asides[from].open == rt->aside_now && s->handle == r->handle &&
           s->sections == section + 1;
}

/* The list of a topic: who matched none before it. */
static void make_section(struct router *rt, uint32_t from, const struct ref_message *r, const struct topics *t,
                         uint32_t section)
{
    struct mode_spread *s = &rt->modes->spread[from];

    if (s->handle != r->handle || s->sections != section) {
        uint64_t words = (rt->seg->subs_each + 63) / 64;

        for (uint32_t i = 0; i < rt->conf.ports; i++)
            memset(s->seen + i * words, 0, (size_t)((rt->seg->subs_high[i] + 63) / 64 * 8));
        s->handle = r->handle;
        s->sections = 0;
    }
    route_list_begin(rt, from);
    for (; s->sections <= section; s->sections++) {
        const struct index_match *m = match(rt, r, &t->at[s->sections]);

        rt->work += m->count;
        for (uint32_t i = 0; i < m->count; i++) {
            uint64_t *word = seen_word(rt, from, m->subs[i]), bit = 1ULL << m->subs[i] % 64;

            if (s->sections == section && !(*word & bit) && !is_echo(r, m->conns[i]))
                route_list_add(rt, from, m->subs[i]);
            *word |= bit;
        }
    }
}

/* A piece is ordered: `progress` is where the next one begins. */
static void commit_piece(struct router *rt, struct order *o, uint32_t port, uint32_t count, uint64_t progress)
{
    struct routing_in *in = rt->place;

    instruct_more(o);
    redo_put(&rt->redo, &in->progress, progress);
    redo_put(&rt->redo, &in->touched, in->touched | 1ULL << port);
    CRASH(MODE_SPREADING);
    router_commit(rt);
    CRASH(MODE_SPREAD);
    (void)instruct_send(rt, port, INSTRUCT_ROUTED);
    rt->work += count;
}

/* The last step: lists of earlier ones end, those that this one adds to with what it adds. */
static int end_lists(struct writer *w, uint32_t from, const struct ref_message *r)
{
    struct routing_in *in = w->rt->place;

    if (!w->touched && !in->touched) { /* they all have gone meanwhile */
        int done = modes_refuse(w->rt, from, r, STATUS_NO_RESPONDERS);

        if (done == ROUTED)
            redo_put(&w->rt->redo, &in->progress, 0);
        return done;
    }
    for (uint32_t left = (uint32_t)in->touched; left; left &= left - 1)
        if (!w->last[__builtin_ctz(left)])
            (void)new_order(w, (uint32_t)__builtin_ctz(left), 0, &(struct topic){.len = 0});
    redo_put(&w->rt->redo, &in->progress, 0);
    redo_put(&w->rt->redo, &in->touched, 0);
    return finish(w, from, r);
}

static int topics_in_pieces(struct router *rt, uint32_t from, const struct ref_message *r, const struct topics *t)
{
    struct routing_in *in = rt->place;
    index_sub subs[LIST_MAX];

    for (uint32_t section; (section = (uint32_t)(in->progress >> SECTION_SHIFT)) < t->count;) {
        if (!has_section(rt, from, r, section))
            make_section(rt, from, r, t, section);
        uint32_t n = route_list_next(rt, from, in->progress & SECTION_KEY, LIST_MAX, subs), port = INDEX_SUB_PORT(subs[0]);

        if (!n) {
            redo_put(&rt->redo, &in->progress, (section + 1ULL) << SECTION_SHIFT);
            router_commit(rt);
            CRASH(MODE_SECTION);
            if (rt->work > rt->work_until)
                return ROUTED_LATER;
            continue;
        }
        if (!router_room(rt, port, ROUTER_LEAVES))
            return ROUTED_NO_ROOM;
        struct writer w = {.rt = rt, .handle = r->handle};

        order_all(&w, subs, n, &t->at[section]);
        commit_piece(rt, w.latest, port, n, (uint64_t)section << SECTION_SHIFT | (subs[n - 1] + 1ULL));
        if (rt->work > rt->work_until)
            return ROUTED_LATER;
    }
    new_stamp(rt);
    struct writer w = {.rt = rt, .handle = r->handle};
    struct picked p = pick_all(rt, r, t);

    /* Four bytes each and an order that ends a membership; texts, and lists that are not full. */
    if (!have_room(rt, (uint32_t)in->touched, 1) || !have_room(rt, ports_of(rt->picks, p.count), BATCH_RING / 3))
        return ROUTED_NO_ROOM;
    order_picks(&w, t, &p);
    return end_lists(&w, from, r);
}

/* Whether a topic has so many that they are not gone through to find out whether one step will do. No further
 * topics are matched then. */
static int is_long(struct router *rt, const struct ref_message *r, const struct topics *t)
{
    for (uint32_t i = 0; i < t->count; i++)
        if (match(rt, r, &t->at[i])->count > TOPIC_LONG)
            return 1;
    return 0;
}

int modes_spread_topics(struct router *rt, uint32_t from, const struct ref_message *r)
{
    struct topics t = take_topics(r);
    uint32_t ends[MODE_TOPICS_MAX + 1], count = 0;

    if (rt->place->progress || (rt->aside_now && has_section(rt, from, r, 0)))
        return topics_in_pieces(rt, from, r, &t);
    if (is_long(rt, r, &t))
        return rt->aside_now ? topics_in_pieces(rt, from, r, &t) : ROUTED_ASIDE;
    new_stamp(rt);
    for (uint32_t i = 0; i < t.count; i++)
        ends[i] = count = collect(rt, r, &t.at[i], count);
    struct picked p = pick_all(rt, r, &t);

    if (count + p.count <= MODES_SPREAD_STEP)
        return topics_in_a_step(rt, from, r, &t, ends, &p);
    return rt->aside_now ? topics_in_pieces(rt, from, r, &t) : ROUTED_ASIDE;
}

/* ---- kinds ---- */

static uint32_t subject_len(struct router *rt, index_sub sub)
{
    return routing_sub(rt->seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub))->subject_len;
}

/* Clients of the kind that listen there, into modes.list; which subscription it is in modes.own: the one with
 * the longest subject, as in own_sub(). */
static uint32_t collect_kind(struct router *rt, const struct ref_message *r)
{
    const struct index_match *m = match(rt, r, &(struct topic){.len = 0});
    struct mode_own *own = rt->modes->own;
    uint32_t count = 0;
    struct kind kind;

    new_stamp(rt);
    if (!modes_take_kind(r->text, r->subject_len, &kind))
        return 0;
    rt->work += m->count; /* a record of each is looked at */
    for (uint32_t i = 0; i < m->count; i++) {
        uint32_t conn = m->conns[i];

        if (own[conn].stamp == rt->modes->stamp) {
            if (subject_len(rt, m->subs[i]) > subject_len(rt, own[conn].sub))
                own[conn].sub = m->subs[i];
        } else if (!is_echo(r, conn) && modes_is_of_kind(rt, conn, &kind)) {
            own[conn] = (struct mode_own){rt->modes->stamp, m->subs[i]};
            rt->modes->list[count++] = conn;
        }
    }
    for (uint32_t g = 0; g < m->group_count; g++) {
        rt->work += m->groups[g].count;
        for (uint32_t i = 0; i < m->groups[g].count; i++) {
            uint32_t conn = m->groups[g].conns[i];

            if (own[conn].stamp == rt->modes->stamp || is_echo(r, conn) || !modes_is_of_kind(rt, conn, &kind))
                continue;
            own[conn] = (struct mode_own){rt->modes->stamp, m->groups[g].subs[i]};
            rt->modes->list[count++] = conn;
        }
    }
    return count;
}

uint32_t modes_list_kind(struct router *rt, const struct ref_message *r)
{
    uint32_t count = collect_kind(rt, r), *list = rt->modes->list;

    for (uint32_t i = 0; i < count; i++)
        list[i] = rt->modes->own[list[i]].sub;
    return count;
}

/* Subscriptions of the next clients of the kind, from `progress` on, all of one port; where they end. */
static uint32_t next_of_kind(struct router *rt, uint64_t progress, index_sub *ret_subs, uint64_t *ret_end)
{
    const struct mode_own *own = rt->modes->own;
    uint64_t conn = progress & SECTION_KEY;
    uint32_t count = 0;

    for (uint32_t port = (uint32_t)(progress >> SECTION_SHIFT); port < rt->conf.ports && !count; port++, conn = 0) {
        rt->work += (rt->seg->names_high - conn) / WORK_RECIPIENTS;
        for (; conn < rt->seg->names_high && count < LIST_MAX; conn++)
            if (own[conn].stamp == rt->modes->stamp && INDEX_SUB_PORT(own[conn].sub) == port)
                ret_subs[count++] = own[conn].sub;
        *ret_end = (uint64_t)port << SECTION_SHIFT | conn;
    }
    return count;
}

static int kind_in_pieces(struct router *rt, uint32_t from, const struct ref_message *r)
{
    struct routing_in *in = rt->place;
    struct writer w = {.rt = rt, .handle = r->handle};
    index_sub subs[LIST_MAX];
    uint64_t end;

    rt->asides[from].open = rt->aside_now;
    for (uint32_t n; (n = next_of_kind(rt, in->progress, subs, &end));) {
        struct writer piece = {.rt = rt, .handle = r->handle};
        uint32_t port = INDEX_SUB_PORT(subs[0]);

        if (!router_room(rt, port, ROUTER_LEAVES))
            return ROUTED_NO_ROOM;
        order_all(&piece, subs, n, &(struct topic){.len = 0});
        commit_piece(rt, piece.latest, port, n, end);
        if (rt->work > rt->work_until)
            return ROUTED_LATER;
    }
    return have_room(rt, (uint32_t)in->touched, 1) ? end_lists(&w, from, r) : ROUTED_NO_ROOM;
}

int modes_spread_kind(struct router *rt, uint32_t from, const struct ref_message *r)
{
    struct writer w = {.rt = rt, .handle = r->handle};
    uint32_t count = collect_kind(rt, r), *list = rt->modes->list;

    if (rt->place->progress || (count > MODES_SPREAD_STEP && rt->aside_now))
        return kind_in_pieces(rt, from, r);
    if (count > MODES_SPREAD_STEP)
        return ROUTED_ASIDE;
    for (uint32_t i = 0; i < count; i++)
        list[i] = rt->modes->own[list[i]].sub;
    if (!have_room(rt, ports_of(list, count), ROOM))
        return ROUTED_NO_ROOM;
    order_all(&w, list, count, &(struct topic){.len = 0});
    return finish(&w, from, r);
}
