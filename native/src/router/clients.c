/* clients: clients and their subscriptions as the router knows them (R1, R2).
 *
 * Every change is idempotent: a step that is repeated after a crash, or a port that says
 * the same thing again, leaves the same table and is answered again. So the words are stored
 * at once, not through the redo log. Text longer than the record continues in cells.
 */
#include "router/aside.h"
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"

#include <errno.h>

#define WORK_DROP 8u /* of a subscription that is taken out */

static uint32_t cells_needed(uint32_t text)
{
    return text <= ROUTING_TEXT_INLINE
               ? 0 : (text - ROUTING_TEXT_INLINE + ROUTING_CELL_TEXT - 1) / ROUTING_CELL_TEXT;
}

static uint32_t cells_left(const struct router *rt)
{
    return rt->cell_free_count + rt->seg->cells - (uint32_t)rt->seg->cells_high;
}

static uint32_t take_cell(struct router *rt)
{
    return rt->cell_free_count ? rt->cell_free[--rt->cell_free_count]
                               : (uint32_t)rt->seg->cells_high++;
}

static void write_text(struct router *rt, struct routing_sub *s, const char *text, uint32_t len)
{
    uint32_t part = len < ROUTING_TEXT_INLINE ? len : ROUTING_TEXT_INLINE;
    uint32_t *link = &s->more;

    memcpy(s->text, text, part);
    s->more = 0;
    for (len -= part, text += part; len; len -= part, text += part) {
        uint32_t cell = take_cell(rt);
        struct routing_cell *c = &routing_cells(rt->seg)[cell];

        part = len < ROUTING_CELL_TEXT ? len : ROUTING_CELL_TEXT;
        memcpy(c->text, text, part);
        c->next = 0;
        *link = cell + 1;
        link = &c->next;
    }
}

static void read_text(struct router *rt, const struct routing_sub *s, char *to)
{
    uint32_t len = s->subject_len + s->queue_len;
    uint32_t part = len < ROUTING_TEXT_INLINE ? len : ROUTING_TEXT_INLINE;

    memcpy(to, s->text, part);
    for (uint32_t cell = s->more; cell; cell = routing_cells(rt->seg)[cell - 1].next) {
        to += part;
        len -= part;
        part = len < ROUTING_CELL_TEXT ? len : ROUTING_CELL_TEXT;
        memcpy(to, routing_cells(rt->seg)[cell - 1].text, part);
    }
}

const char *clients_subject(struct router *rt, const struct routing_sub *s)
{
    static char text[2 * 65536]; /* lengths are 16 bits each */

    if (!s->more)
        return s->text;
    read_text(rt, s, text);
    return text;
}

static void free_text(struct router *rt, const struct routing_sub *s)
{
    rt->client_cells[(uint32_t)s->word] -= cells_needed(s->subject_len + s->queue_len);
    for (uint32_t cell = s->more; cell; cell = routing_cells(rt->seg)[cell - 1].next)
        rt->cell_free[rt->cell_free_count++] = cell - 1;
}

static struct sub_chain *chain(struct router *rt, index_sub sub)
{
    return &rt->chains[(uint64_t)INDEX_SUB_PORT(sub) * rt->seg->subs_each + INDEX_SUB_SLOT(sub)];
}

static void link_sub(struct router *rt, index_sub sub, uint32_t conn)
{
    uint32_t first = rt->client_subs[conn];

    *chain(rt, sub) = (struct sub_chain){.next = first, .prev = ROUTER_NONE};
    if (first != ROUTER_NONE)
        chain(rt, first)->prev = sub;
    rt->client_subs[conn] = sub;
}

static void unlink_sub(struct router *rt, index_sub sub, uint32_t conn)
{
    const struct sub_chain *c = chain(rt, sub);

    if (c->prev != ROUTER_NONE)
        chain(rt, c->prev)->next = c->next;
    else
        rt->client_subs[conn] = c->next;
    if (c->next != ROUTER_NONE)
        chain(rt, c->next)->prev = c->prev;
}

/* Takes an active subscription out of the table, the index and the list of its client. */
void clients_drop_sub(struct router *rt, uint32_t port, uint32_t slot, int with_step)
{
    struct routing_sub *s = routing_sub(rt->seg, port, slot);

    (void)index_remove(rt->index, INDEX_SUB(port, slot));
    route_forget(rt, INDEX_SUB(port, slot));
    unlink_sub(rt, INDEX_SUB(port, slot), (uint32_t)s->word);
    free_text(rt, s);
    if (with_step) /* a repeated step of messages must find it still there */
        redo_put(&rt->redo, &s->word, s->word & ~ROUTING_ACTIVE);
    else
        s->word &= ~ROUTING_ACTIVE; /* "routing.unsubscribe" */
    CRASH(UNSUBSCRIBE_STORED);
    rt->stepping = 1;
    rt->stats.unsubscribed++;
}

static void open_client(struct router *rt, uint32_t from, const struct ref_open *r)
{
    struct routing_client *s = &routing_clients(rt->seg)[r->conn];

    if (s->uid != r->uid) {
        s->word = (uint64_t)from << 32;
        s->account = s->principal = s->permits = s->kind = 0;
        s->uid = r->uid; /* "client.opened" */
        CRASH(CLIENT_OPENED);
        rt->client_subs[r->conn] = ROUTER_NONE;
        rt->stats.sessions_opened++;
    }
    instruct_conn(rt, from, ORDER_OPENED, r->conn, r->uid);
}

static void ready_client(struct router *rt, uint32_t from, const struct ref_ready *r)
{
    struct routing_client *s = &routing_clients(rt->seg)[r->conn];

    if (s->uid == r->uid)
        s->word = (uint64_t)from << 32 | r->options;
}

int clients_drop_some(struct router *rt, uint32_t conn)
{
    for (uint32_t n = 0; rt->client_subs[conn] != ROUTER_NONE; n++) {
        index_sub sub = rt->client_subs[conn];

        if (n == ROUTER_SUBS_A_SLICE)
            return 1;
        clients_drop_sub(rt, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub), 0);
        rt->work += WORK_DROP;
    }
    return 0;
}

static int close_client(struct router *rt, uint32_t from, const struct ref_close *r)
{
    struct routing_client *s = &routing_clients(rt->seg)[r->conn];

    if (s->uid == r->uid) {
        int done = modes_conn_involved(rt, r->conn) ? modes_close(rt, from, r) : ROUTED;

        if (done != ROUTED)
            return done;
        if (clients_drop_some(rt, r->conn))
            return rt->aside_now ? ROUTED_LATER : ROUTED_ASIDE;
        s->uid = 0; /* "client.closed" */
        CRASH(CLIENT_CLOSED);
        rt->stats.sessions_closed++;
    }
    instruct_conn(rt, from, ORDER_CLOSED, r->conn, r->uid);
    return 1;
}

static void subscribe(struct router *rt, uint32_t from, const struct ref_subscribe *r)
{
    uint32_t slot = (uint32_t)r->sub;
    uint32_t text = r->subject_len + r->queue_len, cells = cells_needed(text);
    struct routing_sub *s = routing_sub(rt->seg, from, slot);
    const struct routing_client *client = &routing_clients(rt->seg)[r->conn];
    uint64_t word = ROUTING_ACTIVE | (r->sub & ROUTING_EPOCH) | r->conn;
    int err = client->uid ? 0 : -ENOENT;

    if (slot < rt->seg->subs_high[from] && s->word == word)
        return; /* said again after a crash */
    if (!err && cells && (cells_left(rt) < cells || rt->client_cells[r->conn] + cells > rt->seg->cells / ROUTER_CELLS_PART))
        err = -ENOSPC;
    if (!err)
        err = index_add(rt->index, INDEX_SUB(from, slot), r->conn, r->text, r->subject_len,
                        r->text + r->subject_len, r->queue_len);
    if (err) {
        rt->stats.refused++;
        instruct_sub(rt, from, ORDER_REFUSED, r->conn, r->sub);
        return;
    }
    if (rt->seg->subs_high[from] <= slot)
        rt->seg->subs_high[from] = slot + 1;
    s->uid = client->uid;
    s->account = client->account;
    s->kind = 0;
    s->max = s->routed = s->base = s->stamp = 0;
    s->subject_len = r->subject_len;
    s->queue_len = r->queue_len;
    write_text(rt, s, r->text, text);
    rt->client_cells[r->conn] += cells;
    s->sid_len = r->sid_len < REF_SID_MAX ? r->sid_len : REF_SID_MAX;
    memcpy(s->sid, r->text + text, s->sid_len);
    s->word = word; /* "routing.subscribe" */
    CRASH(SUBSCRIBE_STORED);
    link_sub(rt, INDEX_SUB(from, slot), r->conn);
    rt->stats.subscribed++;
}

static int unsubscribe(struct router *rt, uint32_t from, const struct ref_unsubscribe *r)
{
    uint32_t slot = (uint32_t)r->sub;
    struct routing_sub *s = routing_sub(rt->seg, from, slot);
    uint64_t max = r->max;
    int there = slot < rt->seg->subs_high[from] &&
                s->word == (ROUTING_ACTIVE | (r->sub & ROUTING_EPOCH) | r->conn);

    int ends = there && (max == 0 || (s->queue_len && s->routed >= max)) && modes_sub_pinned(rt, from, slot);
    int done = ends ? modes_unpin(rt, from, r, slot) : ROUTED;

    if (done != ROUTED)
        return done;
    if (max == 0) {
        if (there)
            clients_drop_sub(rt, from, slot, 0);
        instruct_sub(rt, from, ORDER_UNSUBSCRIBED, r->conn, r->sub);
    } else if (there && s->queue_len && s->routed < max) {
        s->max = max;
    } else if (!there || s->queue_len) { /* it has had them all */
        if (there)
            clients_drop_sub(rt, from, slot, 0);
        instruct_sub(rt, from, ORDER_UNSUBSCRIBED, r->conn, r->sub);
    }
    return 1;
}

/* Passes on that a consumer is crowded. Nobody answers: if there is no room now, the next message to
 * that consumer says it again. */
static void pass_hold(struct router *rt, const struct ref_hold *r)
{
    if (r->publisher_port < rt->conf.ports && router_room(rt, (uint32_t)r->publisher_port, 1))
        instruct_hold(rt, (uint32_t)r->publisher_port, r);
}

/* Handles a reference that is not a message: enum routed. */
int clients_handle(struct router *rt, uint32_t from, const struct ref *r)
{
    if (!router_room(rt, from, 1))
        return 0;
    rt->stepping = 1;
    switch (r->type) {
    case REF_OPEN:
        open_client(rt, from, (const struct ref_open *)r);
        break;
    case REF_READY:
        ready_client(rt, from, (const struct ref_ready *)r);
        return r->flags & REF_NAMED ? modes_name(rt, from, (const struct ref_ready *)r) : 1;
    case REF_CLOSE:
        return close_client(rt, from, (const struct ref_close *)r);
    case REF_SUBSCRIBE:
        subscribe(rt, from, (const struct ref_subscribe *)r);
        break;
    case REF_UNSUBSCRIBE:
        return unsubscribe(rt, from, (const struct ref_unsubscribe *)r);
    case REF_PING:
        instruct_passed(rt, from, (const struct ref_ping *)r);
        break;
    case REF_HOLD:
        pass_hold(rt, (const struct ref_hold *)r);
        break;
    case REF_NAME_KEPT:
        modes_name_kept(rt, (const struct ref_name_kept *)r);
        break;
    default:
        return -EBADMSG;
    }
    return 1;
}

/* Adds an active subscription of the table to what is derived. */
static int restore(struct router *rt, uint32_t port, uint32_t slot)
{
    struct routing_sub *s = routing_sub(rt->seg, port, slot);
    uint8_t *used = (uint8_t *)rt->sorted; /* scratch, zeroed */

    if (s->stamp == rt->seg->step + 1)
        s->routed = s->base;
    const char *text = clients_subject(rt, s);
    int err = index_add(rt->index, INDEX_SUB(port, slot), (uint32_t)s->word, text, s->subject_len,
                        text + s->subject_len, s->queue_len);

    if (err)
        return err;
    link_sub(rt, INDEX_SUB(port, slot), (uint32_t)s->word);
    rt->client_cells[(uint32_t)s->word] += cells_needed(s->subject_len + s->queue_len);
    for (uint32_t cell = s->more; cell; cell = routing_cells(rt->seg)[cell - 1].next)
        used[cell - 1] = 1;
    rt->start_count++;
    return 0;
}

static int has_subs(struct routing *seg, uint32_t port)
{
    for (uint32_t slot = 0; slot < seg->subs_high[port]; slot++)
        if (routing_sub(seg, port, slot)->word & ROUTING_ACTIVE)
            return 1;
    return 0;
}

/* Rebuilds index, lists and free cells, some at each call: see router_start(). */
int clients_start(struct router *rt)
{
    struct routing *seg = rt->seg;
    uint8_t *used = (uint8_t *)rt->sorted;
    uint32_t cells = (uint32_t)seg->cells_high;

    index_restoring(rt->index, 1);
    for (uint32_t left = ROUTER_STARTS_A_CALL; rt->start_port < seg->ports; rt->start_port++, rt->start_slot = 0) {
        if (rt->start_port >= rt->conf.ports && has_subs(seg, rt->start_port))
            return -EBUSY;
        for (; rt->start_slot < seg->subs_high[rt->start_port]; rt->start_slot++) {
            if (left-- == 0)
                return 1;
            if (routing_sub(seg, rt->start_port, rt->start_slot)->word & ROUTING_ACTIVE) {
                int err = restore(rt, rt->start_port, rt->start_slot);

                if (err)
                    return err;
            }
        }
    }
    index_restoring(rt->index, 0);
    for (uint32_t cell = cells; cell-- > 0;)
        if (!used[cell])
            rt->cell_free[rt->cell_free_count++] = cell;
    memset(used, 0, cells);
    modes_start(rt);
    aside_start(rt);
    return 0;
}
