/* routing_3: the routing segment of release 0.1 becomes one of today's. See migrate.h. */
#include "migrate/converter.h"
#include "migrate/release_0_1.h"
#include "router/routing.h"

#include <errno.h>
#include <string.h>

_Static_assert(R01_TEXT_INLINE == ROUTING_TEXT_INLINE && R01_CELL_BYTES == sizeof(struct routing_cell) &&
               R01_CELLS == ROUTING_CELLS && sizeof(struct r01_in) == sizeof(struct routing_in), "copied as they are");
_Static_assert(sizeof(struct r01_lane) == sizeof(struct routing_lane) && R01_BATCH_VERSION == BATCH_VERSION,
               "batches are copied as they are");
_Static_assert(R01_REQUESTS == MODE_REQUESTS_MAX && R01_LEGS <= MODE_LEGS_MAX && R01_NAME_MAX <= MODE_NAME_MAX &&
               R01_CONNMGRS == PORTS_MAX, "numbers stay");

static uint64_t fingerprint(void)
{
    return sizeof(struct r01_routing) ^ sizeof(struct r01_rsub) << 24 ^ sizeof(struct r01_session) << 32 ^
           sizeof(struct r01_lane) << 40 ^ sizeof(struct r01_request) << 48 ^ sizeof(struct r01_leg) << 56 ^
           (uint64_t)R01_BATCH_VERSION << 60;
}

static uint64_t bytes(const void *from, uint64_t from_bytes)
{
    const struct r01_routing *r = from;

    if (from_bytes < sizeof(*r) || r->connmgrs > R01_CONNMGRS || r->cells != R01_CELLS ||
        r->lanes_at != r01_page_up(sizeof(*r)) ||
        r->sessions_at != r->lanes_at + r01_page_up(r->connmgrs * sizeof(struct r01_lane)) ||
        r->subs_at != r->sessions_at + r01_page_up((uint64_t)r->sessions * sizeof(struct r01_session)) ||
        r->cells_at != r->subs_at + r01_page_up((uint64_t)r->connmgrs * r->subs_each * sizeof(struct r01_rsub)) ||
        r->requests_at != r->cells_at + R01_CELLS * R01_CELL_BYTES ||
        r->legs_at != r->requests_at + R01_REQUESTS * sizeof(struct r01_request) ||
        r->names_at != r->legs_at + R01_LEGS * sizeof(struct r01_leg) ||
        from_bytes != r->names_at + r01_page_up((uint64_t)r->sessions * sizeof(struct r01_name)) ||
        r->cells_high > R01_CELLS || r->requests_high > R01_REQUESTS || r->legs_high > R01_LEGS ||
        r->names_high > r->sessions)
        return 0;
    for (uint32_t i = 0; i < r->connmgrs; i++)
        if (r->subs_high[i] > r->subs_each)
            return 0;
    return routing_bytes(r->sessions, r->subs_each);
}

static int finish(void *from, uint64_t from_bytes, void *other, uint64_t other_bytes)
{
    struct r01_routing *r = from;

    (void)other;
    (void)other_bytes;
    return r01_redo_finish(&r->redo, r, from_bytes, NULL, 0);
}

/* How many there are is not written down: those that ever were are not in a hole. */
static void convert_sessions(const struct conversion *c, const struct r01_routing *from, struct routing *to)
{
    const struct r01_session *sessions = (const void *)(c->from + from->sessions_at);
    uint64_t at = from->sessions_at, end = at + from->sessions * sizeof(struct r01_session), stop;

    for (; conversion_data(c, &at, end, &stop); at = stop)
        for (uint64_t i = (at - from->sessions_at) / sizeof(struct r01_session);
             from->sessions_at + i * sizeof(struct r01_session) < stop; i++) {
            routing_clients(to)[i].uid = sessions[i].uid;
            routing_clients(to)[i].word = sessions[i].word;
        }
}

static void convert_subs(const struct conversion *c, const struct r01_routing *from, struct routing *to)
{
    const struct r01_rsub *subs = (const void *)(c->from + from->subs_at);

    for (uint32_t n = 0; n < from->connmgrs; n++)
        for (uint64_t i = 0; i < from->subs_high[n]; i++) {
            const struct r01_rsub *f = &subs[(uint64_t)n * from->subs_each + i];
            struct routing_sub *t = routing_sub(to, n, (uint32_t)i);

            t->word = f->word;
            t->uid = f->uid;
            t->max = f->max;
            t->routed = f->routed;
            t->base = f->base;
            t->stamp = f->stamp;
            t->subject_len = f->subject_len;
            t->queue_len = f->queue_len;
            t->more = f->more;
            memcpy(t->text, f->text, sizeof f->text);
        }
}

static void convert_modes(const struct conversion *c, const struct r01_routing *from, struct routing *to)
{
    const struct r01_request *requests = (const void *)(c->from + from->requests_at);
    const struct r01_leg *legs = (const void *)(c->from + from->legs_at);
    const struct r01_name *named = (const void *)(c->from + from->names_at);

    for (uint64_t i = 0; i < from->requests_high; i++) {
        struct mode_request *t = &routing_requests(to)[i];

        t->word = requests[i].word;
        t->uid = requests[i].uid;
        t->deadline_ns = requests[i].deadline_ns;
        t->conn = requests[i].conn;
        t->reply_len = requests[i].reply_len;
        memcpy(t->reply, requests[i].reply, sizeof requests[i].reply);
    }
    for (uint64_t i = 0; i < from->legs_high; i++) {
        struct mode_leg *t = &routing_legs(to)[i];

        t->word = legs[i].word;
        t->uid = legs[i].uid;
        t->sub_word = legs[i].sub_word;
        t->conn = legs[i].conn;
        t->sub = legs[i].sub;
        t->request = legs[i].request;
        t->bare = 1;
    }
    for (uint64_t i = 0; i < from->names_high; i++) {
        struct mode_name *t = &routing_names(to)[i];

        t->word = named[i].word;
        t->uid = named[i].uid;
        memcpy(t->text, named[i].text, sizeof named[i].text);
    }
}

static int convert(const struct conversion *c)
{
    const struct r01_routing *from = (const void *)c->from;
    const struct r01_lane *lanes = (const void *)(c->from + from->lanes_at);
    struct routing *to = (void *)c->to;

    if (from->redo.count)
        return -EPROTO;
    routing_format(to, from->connmgrs, 0, from->sessions, from->subs_each);
    atomic_store(&to->header.magic, 0); /* last, below: it was needed for the offsets */
    to->step = from->step;
    to->cells_high = from->cells_high;
    to->requests_high = from->requests_high;
    to->legs_high = from->legs_high;
    to->names_high = from->names_high;
    memcpy(to->subs_high, from->subs_high, sizeof from->subs_high);
    memcpy(to->in, from->in, sizeof from->in);
    for (uint32_t i = 0; i < from->connmgrs; i++)
        memcpy(routing_lane(to, i), &lanes[i], sizeof lanes[i]);
    convert_sessions(c, from, to);
    convert_subs(c, from, to);
    conversion_copy(c, from->cells_at, to->cells_at, from->cells_high * R01_CELL_BYTES);
    convert_modes(c, from, to);
    segment_format(to, SEGMENT_ROUTING, ROUTING_LAYOUT, routing_fingerprint(), to->header.bytes);
    return 0;
}

const struct converter routing_from_3 = {
    .kind = SEGMENT_ROUTING,
    .layout = R01_ROUTING_LAYOUT,
    .fingerprint = fingerprint,
    .bytes = bytes,
    .finish = finish,
    .convert = convert,
};
