/* aside: setting references aside, and doing them in slices. See aside.h. */
#include "router/aside.h"
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"
#include "base/reserve.h"

#include <errno.h>

#define UNITS (ROUTING_ASIDE_BYTES / ROUTING_ASIDE_UNIT)

/* Entries are named by their first unit + 1. */
static struct aside_entry *entry_at(const struct aside *a, uint64_t offset)
{
    return (struct aside_entry *)(a->ring->bytes + offset % ROUTING_ASIDE_BYTES);
}
static uint32_t name_of(uint64_t offset) { return (uint32_t)(offset % ROUTING_ASIDE_BYTES / ROUTING_ASIDE_UNIT) + 1; }
static struct aside_entry *entry(const struct aside *a, uint32_t name)
{
    return entry_at(a, (uint64_t)(name - 1) * ROUTING_ASIDE_UNIT);
}
static const struct ref *ref_of(const struct aside_entry *e) { return (const struct ref *)e->ref; }
static int is_done(const struct aside_entry *e) { return e->in.at != ASIDE_AT; }

int aside_open(struct router *rt)
{
    struct routing *seg = rt->seg;

    rt->list_words = (seg->subs_each + 63) / 64;
    rt->aside_conns = reserve((uint64_t)seg->clients * sizeof(struct aside_conn));
    if (!rt->aside_conns)
        return -ENOMEM;
    for (uint32_t i = 0; i < rt->conf.ports; i++) {
        rt->asides[i].ring = routing_aside(seg, i);
        rt->asides[i].next = reserve((uint64_t)(UNITS + 1) * 4);
        rt->lists[i].bits = reserve(rt->conf.ports * rt->list_words * 8);
        if (!rt->asides[i].next || !rt->lists[i].bits)
            return -ENOMEM;
    }
    return 0;
}

/* From the next reference on each is looked at. */
static void set_watch(struct router *rt, uint32_t from)
{
    rt->asides[from].watch = 1;
    rt->work_dear = 0;
}

/* ---- lists ---- */

static void turn_append(struct router *rt, struct aside *a, uint32_t conn)
{
    rt->aside_conns[conn].next = 0;
    if (a->last)
        rt->aside_conns[a->last - 1].next = conn + 1;
    else
        a->first = conn + 1;
    a->last = conn + 1;
}

static void enlist(struct router *rt, struct aside *a, uint32_t name, uint32_t conn)
{
    struct aside_conn *c = &rt->aside_conns[conn];

    a->next[name] = 0;
    if (c->last) {
        a->next[c->last] = name;
    } else {
        c->first = name;
        a->conns++;
        turn_append(rt, a, conn);
    }
    c->last = name;
    c->count++;
    a->entries++;
}

/* The first entry of the first connection is done. */
static void strike(struct aside *a, struct aside_conn *c)
{
    c->first = a->next[c->first];
    c->count--;
    a->entries--;
    a->watch = a->entries || a->costly;
    if (c->first)
        return;
    c->last = 0;
    c->told = 0;
    a->conns--;
}

/* The first connection becomes the last, or leaves. */
static void turn_over(struct router *rt, struct aside *a)
{
    uint32_t conn = a->first - 1;

    a->first = rt->aside_conns[conn].next;
    if (!a->first)
        a->last = 0;
    if (rt->aside_conns[conn].first)
        turn_append(rt, a, conn);
}

void aside_start(struct router *rt)
{
    for (uint32_t i = 0; i < rt->conf.ports; i++) {
        struct aside *a = &rt->asides[i];

        a->tail = a->ring->tail;
        for (uint64_t at = a->ring->head; at < a->tail; at += entry_at(a, at)->in.done) {
            const struct aside_entry *e = entry_at(a, at);

            if (is_done(e))
                continue;
            enlist(rt, a, name_of(at), ref_of(e)->conn);
            rt->aside_conns[ref_of(e)->conn].told = 1; /* not known: it will be told that it is over */
            if (e->in.touched)
                a->open = name_of(at);
        }
        a->watch = a->entries != 0;
    }
}

/* ---- setting aside ---- */

/* What has no order among the references of its connection stays where it is. */
static int any_time(const struct ref *r)
{
    return r->type == REF_OPEN || r->type == REF_HOLD || r->type == REF_NAME_KEPT;
}

int aside_must(struct router *rt, uint32_t from, const struct ref *r)
{
    struct aside *a = &rt->asides[from];
    const struct aside_conn *c = &rt->aside_conns[r->conn];
    uint64_t window = rt->now_ns / ASIDE_WINDOW_NS;

    if (a->costly && a->costly != window) {
        a->costly = 0;
        a->watch = a->entries != 0;
        if (!a->watch)
            aside_begin(rt, from);
    }
    if (any_time(r))
        return 0;
    if (rt->place->touched && r->type == REF_MESSAGE && !(r->flags & REF_MODE)) /* by release 0.1 (R7) */
        return 1;
    return c->first || (a->open && r->type == REF_MESSAGE && r->flags & REF_MODE && modes_goes_on((const struct ref_message *)r)) ||
           (c->window == window && c->used > ASIDE_ALLOWANCE);
}

void aside_charge(struct router *rt, uint32_t from, uint32_t conn)
{
    struct aside_conn *c = &rt->aside_conns[conn];
    uint64_t window = rt->now_ns / ASIDE_WINDOW_NS, work = rt->work - rt->work_charged;

    if (work <= ASIDE_DEAR)
        return;
    aside_begin(rt, from);
    if (c->window != window) {
        c->window = window;
        c->used = 0;
    }
    c->used += work < ASIDE_ALLOWANCE ? (uint32_t)work : ASIDE_ALLOWANCE + 1;
    if (c->used > ASIDE_ALLOWANCE) {
        rt->asides[from].costly = window;
        set_watch(rt, from);
    }
}

/* Its port is asked not to read it, now and then: the word may come to one that was killed meanwhile. */
static void say_wait(struct router *rt, uint32_t from, uint32_t conn, struct aside_conn *c)
{
    if (c->count < ASIDE_WAIT || c->count & (c->count - 1) || !router_room(rt, from, 1))
        return;
    instruct_conn(rt, from, ORDER_WAIT, conn, routing_clients(rt->seg)[conn].uid);
    c->told = 1;
}

int aside_put(struct router *rt, uint32_t from, const struct ref *r)
{
    struct aside *a = &rt->asides[from];
    struct routing_in *in = rt->place;
    uint64_t bytes = (sizeof(struct aside_entry) + r->bytes + ROUTING_ASIDE_UNIT - 1) & ~(uint64_t)(ROUTING_ASIDE_UNIT - 1);
    uint64_t end = ROUTING_ASIDE_BYTES - a->tail % ROUTING_ASIDE_BYTES, fill = end < bytes ? end : 0;

    if (a->tail + fill + bytes - a->ring->head > ROUTING_ASIDE_BYTES)
        return 0;
    if (fill)
        entry_at(a, a->tail)->in = (struct routing_in){.done = fill};
    a->tail += fill;
    struct aside_entry *e = entry_at(a, a->tail);

    e->in = (struct routing_in){.done = bytes, .at = ASIDE_AT, .progress = in->progress, .touched = in->touched,
                                .listed = in->listed, .routed = rt->routed};
    memcpy(e->ref, r, r->bytes);
    enlist(rt, a, name_of(a->tail), r->conn);
    if (e->in.touched)
        a->open = name_of(a->tail);
    a->tail += bytes;
    redo_put(&rt->redo, &a->ring->tail, a->tail);
    rt->routed = 0;
    if (in->progress | in->touched | in->listed) { /* the entry has them now */
        redo_put(&rt->redo, &in->progress, 0);
        redo_put(&rt->redo, &in->touched, 0);
        redo_put(&rt->redo, &in->listed, 0);
        router_commit_at(rt, from, router_at(rt, from, r) + r->bytes);
    }
    rt->stepping = 1;
    set_watch(rt, from);
    rt->stats.set_aside++;
    CRASH(ASIDE_PUT);
    say_wait(rt, from, r->conn, &rt->aside_conns[r->conn]);
    return 1;
}

/* ---- slices ---- */

/* The entry is done when the step commits; `head` passes those that are, up to the first that is not. */
static void put_head(struct router *rt, struct aside *a, const struct aside_entry *now_done)
{
    uint64_t head = a->ring->head, at = head;

    while (at < a->ring->tail && (entry_at(a, at) == now_done || is_done(entry_at(a, at))))
        at += entry_at(a, at)->in.done;
    if (at != head)
        redo_put(&rt->redo, &a->ring->head, at);
}

/* The connection has ended, and waits here for that to be taken notice of. */
static int has_left(const struct router *rt, const struct aside *a, const struct aside_conn *c, uint32_t conn)
{
    const struct ref_close *last = (const struct ref_close *)ref_of(entry(a, c->last));

    return last->type == REF_CLOSE && routing_clients(rt->seg)[conn].uid == last->uid;
}

static int handle(struct router *rt, uint32_t from, const struct aside *a, const struct ref *r)
{
    const struct ref_message *m = (const struct ref_message *)r;

    rt->changing = r->type != REF_MESSAGE;
    if (r->type != REF_MESSAGE)
        return clients_handle(rt, from, r);
    uint64_t hash = index_hash(m->text, m->subject_len);

    if (!(r->flags & REF_MODE))
        return route_any(rt, from, m, hash);
    return a->open && a->open != rt->aside_now && modes_goes_on(m) ? ROUTED_NO_ROOM : modes_message(rt, from, m, hash);
}

/* Goes on with the first reference of the connection: enum routed. */
static int serve(struct router *rt, uint32_t from, uint32_t conn)
{
    struct aside *a = &rt->asides[from];
    struct aside_conn *c = &rt->aside_conns[conn];
    uint32_t name = c->first;
    struct aside_entry *e = entry(a, name);
    const struct ref *r = ref_of(e);
    uint64_t uid = routing_clients(rt->seg)[conn].uid;

    if (has_left(rt, a, c, conn) && clients_drop_some(rt, conn))
        return ROUTED_LATER;
    if (c->count == 1 && c->told && !router_room(rt, from, 2))
        return ROUTED_NO_ROOM;
    rt->place = &e->in;
    rt->place_base = (const char *)e;
    rt->routed = (uint32_t)e->in.routed;
    rt->aside_now = name;
    int done = handle(rt, from, a, r);

    rt->aside_now = 0;
    if (done < 0)
        return done;
    if (done != ROUTED) {
        if (rt->stepping || e->in.routed != rt->routed)
            router_commit_at(rt, from, ASIDE_AT);
        return done;
    }
    if (r->type == REF_MESSAGE) {
        rt->stats.messages += ref_messages((const struct ref_message *)r);
        rt->bytes += ((const struct ref_message *)r)->size;
    }
    if (c->count == 1 && c->told && uid)
        instruct_conn(rt, from, ORDER_GO_ON, conn, uid);
    if (a->open == name) /* also if its list was made and nobody got anything: it was refused */
        route_list_end(rt, from);
    put_head(rt, a, e);
    strike(a, c);
    router_commit_at(rt, from, ASIDE_AT + r->bytes);
    CRASH(ASIDE_DONE);
    return ROUTED;
}

int aside_serve(struct router *rt, uint32_t from)
{
    struct aside *a = &rt->asides[from];

    rt->work_until = rt->work + ROUTER_WORK_A_SLICE;
    rt->aside_stuck[from] = 0;
    for (uint32_t left = a->conns; left && a->entries;) {
        rt->work += ASIDE_STEP;
        int done = serve(rt, from, a->first - 1);

        if (done < 0)
            return done;
        turn_over(rt, a);
        for (uint32_t m = 0; m < rt->conf.ports; m++)
            (void)instruct_send(rt, m, INSTRUCT_ROUTED);
        left = done == ROUTED_NO_ROOM ? left - 1 : a->conns;
        if (rt->work > rt->work_until && a->entries)
            return 1;
    }
    rt->aside_stuck[from] = a->entries != 0;
    return 0;
}
