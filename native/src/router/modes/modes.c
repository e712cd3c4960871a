/* modes: the tables of requests, legs and sessions. See modes.h, and R5 in routing.h.
 *
 * Written by:   the router. A record is filled by plain stores while it is free, and its word is put
 *               into the step being made. What is derived follows at once: it dies with the process.
 * Invariants:   a free record is in its free list or at or past the high mark; a used one is in the
 *               lists of its connections and, with a deadline, in the heap.
 * After a crash: records whose word was not committed are free. modes_start() rebuilds the rest.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"
#include "base/put.h"
#include "base/reserve.h"
#include "base/hash.h"
#include "base/siphash.h"

#include <errno.h>

int modes_open(struct router *rt)
{
    const struct routing *seg = rt->seg;
    struct modes *m = reserve(sizeof(*m));

    if (!m)
        return -ENOMEM;
    m->request_links = reserve(MODE_REQUESTS_MAX * sizeof(struct request_link));
    m->leg_links = reserve(MODE_LEGS_MAX * sizeof(struct leg_link));
    m->conns = reserve((uint64_t)seg->clients * sizeof(struct mode_conn));
    m->pins = reserve((uint64_t)rt->conf.ports * seg->subs_each * 4);
    m->request_free = reserve(MODE_REQUESTS_MAX * 4);
    m->leg_free = reserve(MODE_LEGS_MAX * 4);
    m->session_hash = reserve(MODES_BUCKETS * 4);
    m->name_hash = reserve(MODES_BUCKETS * 4);
    m->name_next = reserve((uint64_t)seg->clients * 4);
    m->heap = reserve(MODE_REQUESTS_MAX * 4);
    m->sub_seen = reserve((uint64_t)rt->conf.ports * seg->subs_each * 4);
    m->queue_seen = reserve(((uint64_t)rt->conf.subjects + 1) * 4);
    m->own = reserve((uint64_t)seg->clients * sizeof(struct mode_own));
    m->list = reserve((uint64_t)rt->conf.ports * seg->subs_each * 4);
    for (uint32_t i = 0; i < rt->conf.ports; i++)
        if (!(m->spread[i].seen = reserve((uint64_t)rt->conf.ports * ((seg->subs_each + 63) / 64) * 8)))
            return -ENOMEM;
    rt->modes = m;
    return m->request_links && m->leg_links && m->conns && m->pins && m->request_free && m->leg_free &&
                   m->session_hash && m->name_hash && m->name_next && m->heap && m->sub_seen && m->queue_seen &&
                   m->own && m->list
               ? 0 : -ENOMEM;
}

/* ---- deadlines: a heap of requests, the soonest first ---- */

static uint64_t due(const struct router *rt, uint32_t place)
{
    return routing_requests(rt->seg)[rt->modes->heap[place]].deadline_ns;
}

static void set_place(struct modes *m, uint32_t place, uint32_t request)
{
    m->heap[place] = request;
    m->request_links[request].heap = place + 1;
}

static void swap(struct modes *m, uint32_t a, uint32_t b)
{
    uint32_t request = m->heap[a];

    set_place(m, a, m->heap[b]);
    set_place(m, b, request);
}

static void settle(struct router *rt, uint32_t place)
{
    struct modes *m = rt->modes;

    for (; place && due(rt, place) < due(rt, (place - 1) / 2); place = (place - 1) / 2)
        swap(m, place, (place - 1) / 2);
    for (uint32_t child; (child = 2 * place + 1) < m->heap_count; place = child) {
        if (child + 1 < m->heap_count && due(rt, child + 1) < due(rt, child))
            child++;
        if (due(rt, place) <= due(rt, child))
            return;
        swap(m, place, child);
    }
}

static void heap_add(struct router *rt, uint32_t request)
{
    struct modes *m = rt->modes;

    set_place(m, m->heap_count++, request);
    settle(rt, m->heap_count - 1);
}

static void heap_remove(struct router *rt, uint32_t request)
{
    struct modes *m = rt->modes;
    uint32_t place = m->request_links[request].heap;

    if (!place--)
        return;
    m->request_links[request].heap = 0;
    if (place == --m->heap_count)
        return;
    set_place(m, place, m->heap[m->heap_count]);
    settle(rt, place);
}

/* ---- sessions by the connection that asks and its reply subject ---- */

static uint32_t bucket_of(uint32_t conn, const char *reply, uint32_t len)
{
    return (uint32_t)((index_hash(reply, len) ^ conn * HASH_SPREAD) >> 17) % MODES_BUCKETS;
}

uint32_t modes_find_session(const struct router *rt, uint32_t conn, const char *reply, uint32_t len)
{
    uint32_t at = rt->modes->session_hash[bucket_of(conn, reply, len)];

    for (; at; at = rt->modes->request_links[at - 1].hash_next) {
        const struct mode_request *q = &routing_requests(rt->seg)[at - 1];

        if (q->conn == conn && q->reply_len == len && memcmp(q->reply, reply, len) == 0)
            return at - 1;
    }
    return ROUTER_NONE;
}

static void unhash_session(struct router *rt, uint32_t request)
{
    const struct mode_request *q = &routing_requests(rt->seg)[request];
    uint32_t *at = &rt->modes->session_hash[bucket_of(q->conn, q->reply, q->reply_len)];

    while (*at && *at - 1 != request)
        at = &rt->modes->request_links[*at - 1].hash_next;
    if (*at)
        *at = rt->modes->request_links[request].hash_next;
}

/* ---- requests ---- */

static void link_request(struct router *rt, uint32_t request, uint8_t mode)
{
    struct modes *m = rt->modes;
    const struct mode_request *q = &routing_requests(rt->seg)[request];
    struct request_link *l = &m->request_links[request];
    struct mode_conn *c = &m->conns[q->conn];

    *l = (struct request_link){.conn_next = c->requests};
    if (c->requests)
        m->request_links[c->requests - 1].conn_prev = request + 1;
    c->requests = request + 1;
    c->requests_open++;
    if (mode == MODE_SESSION) {
        uint32_t *bucket = &m->session_hash[bucket_of(q->conn, q->reply, q->reply_len)];

        l->hash_next = *bucket;
        *bucket = request + 1;
    }
    if (q->deadline_ns)
        heap_add(rt, request);
}

uint32_t modes_take_request(struct router *rt, const struct ref_message *r, uint8_t mode, uint64_t deadline_ns)
{
    struct modes *m = rt->modes;
    struct routing *seg = rt->seg;
    uint32_t request;

    if (m->conns[r->conn].requests_open >= MODES_REQUESTS_EACH)
        return ROUTER_NONE;
    if (m->request_free_count)
        request = m->request_free[--m->request_free_count];
    else if (seg->requests_high < MODE_REQUESTS_MAX)
        request = (uint32_t)seg->requests_high++;
    else
        return ROUTER_NONE;
    struct mode_request *q = &routing_requests(seg)[request];

    q->uid = routing_clients(seg)[r->conn].uid;
    q->conn = r->conn;
    q->deadline_ns = deadline_ns;
    q->reply_len = r->reply_len;
    memcpy(q->reply, ref_reply(r), r->reply_len);
    redo_put(&rt->redo, &q->word, MODE_USED | ((q->word >> 8) + 1) << 8 | mode);
    link_request(rt, request, mode);
    rt->stepping = 1;
    return request;
}

void modes_free_request(struct router *rt, uint32_t request)
{
    struct modes *m = rt->modes;
    struct mode_request *q = &routing_requests(rt->seg)[request];
    struct request_link *l = &m->request_links[request];
    struct mode_conn *c = &m->conns[q->conn];

    while (l->legs)
        modes_free_leg(rt, l->legs - 1);
    if (l->conn_prev)
        m->request_links[l->conn_prev - 1].conn_next = l->conn_next;
    else
        c->requests = l->conn_next;
    if (l->conn_next)
        m->request_links[l->conn_next - 1].conn_prev = l->conn_prev;
    c->requests_open--;
    if ((uint8_t)q->word == MODE_SESSION)
        unhash_session(rt, request);
    heap_remove(rt, request);
    m->request_free[m->request_free_count++] = request;
    redo_put(&rt->redo, &q->word, (q->word & ~MODE_USED) >> 8 << 8);
    rt->stepping = 1;
}

/* ---- legs ---- */

static uint32_t *pin_of(struct router *rt, index_sub sub)
{
    return &rt->modes->pins[(uint64_t)INDEX_SUB_PORT(sub) * rt->seg->subs_each + INDEX_SUB_SLOT(sub)];
}

static void link_leg(struct router *rt, uint32_t leg, uint8_t mode)
{
    struct modes *m = rt->modes;
    const struct mode_leg *g = &routing_legs(rt->seg)[leg];
    struct leg_link *l = &m->leg_links[leg];
    struct mode_conn *c = &m->conns[g->conn];
    struct request_link *q = &m->request_links[g->request];

    *l = (struct leg_link){.conn_next = c->legs, .peer_next = q->legs};
    if (c->legs)
        m->leg_links[c->legs - 1].conn_prev = leg + 1;
    c->legs = leg + 1;
    c->outstanding++;
    c->idle = ++m->tick;
    if (q->legs)
        m->leg_links[q->legs - 1].peer_prev = leg + 1;
    q->legs = leg + 1;
    q->open++;
    m->conns[routing_requests(rt->seg)[g->request].conn].awaited++;
    if (mode == MODE_SESSION) {
        uint32_t *pin = pin_of(rt, g->sub);

        l->sub_next = *pin;
        if (*pin)
            m->leg_links[*pin - 1].sub_prev = leg + 1;
        *pin = leg + 1;
    }
}

uint32_t modes_legs_left(const struct router *rt)
{
    return rt->modes->leg_free_count + MODE_LEGS_MAX - (uint32_t)rt->seg->legs_high;
}

uint32_t modes_legs_for(const struct router *rt, uint32_t conn)
{
    uint32_t left = modes_legs_left(rt), awaited = rt->modes->conns[conn].awaited;
    uint32_t own = awaited < MODES_ANSWERS_EACH ? MODES_ANSWERS_EACH - awaited : 0;

    return left < own ? left : own;
}

uint32_t modes_requests_left(const struct router *rt)
{
    return rt->modes->request_free_count + MODE_REQUESTS_MAX - (uint32_t)rt->seg->requests_high;
}

uint32_t modes_take_leg(struct router *rt, uint32_t request, uint8_t mode, index_sub sub)
{
    struct modes *m = rt->modes;
    struct routing *seg = rt->seg;
    uint32_t leg = m->leg_free_count ? m->leg_free[--m->leg_free_count] : (uint32_t)seg->legs_high++;
    struct mode_leg *g = &routing_legs(seg)[leg];
    const struct routing_sub *s = routing_sub(seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub));

    g->uid = s->uid;
    g->sub_word = s->word;
    g->conn = (uint32_t)s->word;
    g->sub = sub;
    g->request = request;
    g->bare = 0;
    /* The working value is stored at once: without MODE_USED the record is free after a crash. */
    g->word = (g->word + 1) & MODE_GENERATION;
    redo_put(&rt->redo, &g->word, MODE_USED | (mode & MODE_GATHERING ? MODE_UNASKED : 0) | g->word);
    link_leg(rt, leg, mode);
    rt->stepping = 1;
    return leg;
}

void modes_free_leg(struct router *rt, uint32_t leg)
{
    struct modes *m = rt->modes;
    struct mode_leg *g = &routing_legs(rt->seg)[leg];
    struct leg_link *l = &m->leg_links[leg];
    struct mode_conn *c = &m->conns[g->conn];
    struct request_link *q = &m->request_links[g->request];
    uint32_t *pin = pin_of(rt, g->sub);

    if (l->conn_prev)
        m->leg_links[l->conn_prev - 1].conn_next = l->conn_next;
    else
        c->legs = l->conn_next;
    if (l->conn_next)
        m->leg_links[l->conn_next - 1].conn_prev = l->conn_prev;
    c->outstanding--;
    c->idle = ++m->tick;
    if (l->peer_prev)
        m->leg_links[l->peer_prev - 1].peer_next = l->peer_next;
    else
        q->legs = l->peer_next;
    if (l->peer_next)
        m->leg_links[l->peer_next - 1].peer_prev = l->peer_prev;
    q->open--;
    m->conns[routing_requests(rt->seg)[g->request].conn].awaited--;
    if (l->sub_prev)
        m->leg_links[l->sub_prev - 1].sub_next = l->sub_next;
    else if (*pin == leg + 1)
        *pin = l->sub_next;
    if (l->sub_next)
        m->leg_links[l->sub_next - 1].sub_prev = l->sub_prev;
    m->leg_free[m->leg_free_count++] = leg;
    redo_put(&rt->redo, &g->word, g->word & MODE_GENERATION);
    rt->stepping = 1;
}

static char *put_hex(char *to, uint64_t n)
{
    for (uint32_t i = 0; i < MODE_ID_DIGITS; i++)
        *to++ = "0123456789abcdef"[n >> (60 - 4 * i) & 15];
    return to;
}

uint32_t modes_put_reply(const struct router *rt, uint32_t leg, char *to)
{
    const struct mode_leg *g = &routing_legs(rt->seg)[leg];
    uint64_t id = (uint64_t)leg << 32 | (g->word & MODE_GENERATION);
    char *end = put_hex(mempcpy(to, MODE_REPLY_PREFIX, sizeof MODE_REPLY_PREFIX - 1), id);

    if (!g->bare)
        end = put_hex(end, siphash_word(rt->seg->reply_key, id));
    return (uint32_t)(end - to);
}

/* Takes as long wherever two texts differ: how long it took tells nobody how much of a token was right. */
static int are_equal(const char *a, const char *b, uint32_t len)
{
    unsigned char differ = 0;

    for (uint32_t i = 0; i < len; i++)
        differ |= (unsigned char)(a[i] ^ b[i]);
    return differ == 0;
}

uint32_t modes_find_leg(const struct router *rt, const struct ref_message *r)
{
    uint64_t id = ref_mode(r)->id;
    uint32_t leg = (uint32_t)(id >> 32);
    char reply[MODE_REPLY_BYTES];

    if (leg >= rt->seg->legs_high || routing_legs(rt->seg)[leg].word != (MODE_USED | (id & MODE_GENERATION)))
        return ROUTER_NONE;
    uint32_t len = modes_put_reply(rt, leg, reply);

    return len == r->subject_len && are_equal(reply, r->text, len) ? leg : ROUTER_NONE;
}

int modes_leg_stands(const struct router *rt, uint32_t leg)
{
    const struct mode_leg *g = &routing_legs(rt->seg)[leg];
    const struct routing_sub *s = routing_sub(rt->seg, INDEX_SUB_PORT(g->sub), INDEX_SUB_SLOT(g->sub));

    return s->word == g->sub_word && s->uid == g->uid;
}

/* ---- start ---- */

void modes_start(struct router *rt)
{
    struct routing *seg = rt->seg;
    struct modes *m = rt->modes;

    for (uint32_t at = (uint32_t)seg->requests_high; at-- > 0;) {
        const struct mode_request *q = &routing_requests(seg)[at];

        if (q->word & MODE_USED)
            link_request(rt, at, (uint8_t)q->word);
        else
            m->request_free[m->request_free_count++] = at;
    }
    for (uint32_t at = (uint32_t)seg->legs_high; at-- > 0;) {
        const struct mode_leg *g = &routing_legs(seg)[at];

        if (g->word & MODE_USED)
            link_leg(rt, at, (uint8_t)routing_requests(seg)[g->request].word);
        else
            m->leg_free[m->leg_free_count++] = at;
    }
    for (uint32_t conn = 0; conn < seg->names_high; conn++)
        if (routing_names(seg)[conn].word & MODE_USED)
            modes_hash_name(rt, conn);
    modes_drop_gathering(rt);
}

/* ---- texts ---- */

void modes_add_field(struct fields *f, enum status_field field, const char *value, uint32_t len)
{
    f->text[f->len++] = (char)field;
    f->text[f->len++] = (char)len;
    memcpy(f->text + f->len, value, len);
    f->len += len;
}

void modes_add_number(struct fields *f, enum status_field field, uint64_t value)
{
    char digits[20];

    modes_add_field(f, field, digits, (uint32_t)((char *)put_number(digits, value) - digits));
}

void modes_tell(struct router *rt, uint32_t conn, const char *reply, uint32_t reply_len,
                enum mode_status status, const struct fields *fields)
{
    index_sub sub = own_sub(rt, conn, reply, reply_len);
    uint32_t slot = INDEX_SUB_SLOT(sub);

    if (sub == ROUTER_NONE)
        return;
    instruct_status(rt, INDEX_SUB_PORT(sub), &slot, 1,
                    &(struct order_said){.subject_len = (uint16_t)reply_len, .status = (uint16_t)status,
                                         .fields_len = (uint16_t)(fields ? fields->len : 0)},
                    reply, "", fields ? fields->text : "", "");
    rt->stats.statuses++;
}
