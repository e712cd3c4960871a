/* fsck_words: words that can be judged by themselves: reserved ones, envelopes, texts. See fsck.h.
 *
 * Reserved words are zero in every layout that has them, and nobody writes them: they find what was
 * written at random, or by somebody who took one thing for another. None of them changes while the
 * instance runs, so one load is enough.
 */
#include "fsck/fsck.h"

/* Of protocols, transports and listeners: far more than there will be. A build has some of them, and may look at
 * what another build has left. */
#define NUMBERS_MAX 64u

enum whose { /* where[0] of FSCK_RESERVED: `RESERVED` of midair/fsck/checks.py */
    WHOSE_SEGMENT, WHOSE_CONN, WHOSE_SUB, WHOSE_SLOT, WHOSE_CHUNK, WHOSE_RING, WHOSE_CLIENT, WHOSE_ROUTED,
    WHOSE_REQUEST, WHOSE_LEG, WHOSE_NAME,
};

static int is_zero(const void *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        if (((const uint8_t *)at)[i])
            return 0;
    return 1;
}
#define ZERO(field) is_zero(&(field), sizeof(field))

static void reserved(struct fsck *f, uint32_t kind, uint32_t n, enum whose whose, uint64_t number, int zero)
{
    if (!zero)
        fsck_say(f, FSCK_RESERVED, kind, n, whose, number);
}

/* S1: what the first bytes say beside what was compared when the segment was taken in. */
static void check_header(struct fsck *f, uint32_t kind, uint32_t n, const struct segment_header *h)
{
    uint32_t len = 0;

    while (len < SEGMENT_RELEASE_MAX && h->release[len] > ' ' && h->release[len] < 127)
        len++;
    if (len == 0 || len == SEGMENT_RELEASE_MAX || !is_zero(h->release + len, SEGMENT_RELEASE_MAX - len) ||
        h->migrated_from >= h->layout)
        fsck_say(f, FSCK_RELEASE, kind, n, h->migrated_from);
    reserved(f, kind, n, WHOSE_SEGMENT, 0, ZERO(h->reserved));
}

static int is_text(const char *text, uint32_t room)
{
    uint32_t len = 0;

    while (len < room && text[len] > ' ' && text[len] < 127)
        len++;
    return len < room && is_zero(text + len, 1);
}

static void check_table(struct fsck *f)
{
    const struct conntable *t = f->table;

    check_header(f, SEGMENT_CONNTABLE, 0, &t->header);
    reserved(f, SEGMENT_CONNTABLE, 0, WHOSE_SEGMENT, 0, ZERO(t->pad) && ZERO(t->reserved));
    for (uint32_t slot = 0; slot < fsck_load(&t->high) && slot < t->capacity; slot++) {
        const struct conntable_slot *s = &t->slots[slot];
        uint32_t state = fsck_load32(&s->state);
        uint64_t uid = fsck_load(&s->uid);

        reserved(f, SEGMENT_CONNTABLE, 0, WHOSE_SLOT, slot, ZERO(s->pad) && ZERO(s->reserved));
        if (state != CONN_ASSIGNED && state != CONN_ACTIVE)
            continue;
        if ((!is_text(s->ip, sizeof s->ip) || s->listener >= NUMBERS_MAX ||
             s->transport >= NUMBERS_MAX || s->accepted_ns == 0) &&
            fsck_load32(&s->state) == state && fsck_load(&s->uid) == uid)
            fsck_say(f, FSCK_TABLE_PEER, SEGMENT_CONNTABLE, 0, slot, uid, s->listener, s->transport);
    }
}

/* J2 and J3 of a connection whose bytes are wrapped: positions do not pass each other. Without envelopes
 * the words about them are zero. */
static int envelopes_fit(const struct journal *j, const struct conn_rec *r)
{
    uint64_t blocks = fsck_load(&j->blocks_high);

    return r->in_pos <= r->in_plain && r->in_place <= r->in_plain && r->in_raw <= r->in_end &&
           r->out_place + r->out_len <= r->out_end && r->out_len <= r->out_end &&
           (uint32_t)r->in_stash <= blocks && r->in_stash >> 32 <= blocks;
}

static int envelopes_none(const struct conn_rec *r)
{
    return !(r->in_raw | r->in_number | r->in_place | r->in_plain | r->out_raw | r->out_number | r->out_place |
             r->out_len | r->in_end | r->in_stash);
}

static void check_conn(struct fsck *f, uint32_t n, uint32_t slot)
{
    const struct journal *j = f->journals[n];
    const struct conn_rec *r = &journal_conns((struct journal *)j)[slot];
    uint64_t uid = fsck_load(&r->uid), phase = fsck_load(&r->phase) & 0xff;
    int served = phase == PHASE_OPEN || phase == PHASE_GREETED;

    reserved(f, SEGMENT_JOURNAL, n, WHOSE_CONN, slot, ZERO(r->reserved));
    if (!uid)
        return;
    if ((r->protocol >= NUMBERS_MAX || r->transport >= NUMBERS_MAX ||
         !memchr(r->name, 0, JOURNAL_NAME_MAX)) && fsck_load(&r->uid) == uid) {
        fsck_say(f, FSCK_CONN_SPEAKS, SEGMENT_JOURNAL, n, slot, uid, r->protocol, r->transport);
        return;
    }
    /* Of a running one the words of a step are stored one after the other. */
    if (!r->transport ? !envelopes_none(r) : f->dead && served && !envelopes_fit(j, r))
        if (fsck_load(&r->uid) == uid)
            fsck_say(f, FSCK_ENVELOPE, SEGMENT_JOURNAL, n, slot, uid, r->transport);
}

static void check_port(struct fsck *f, uint32_t n)
{
    const struct port_log *p = f->ports[n];
    const struct journal *j = f->journals[n];
    uint32_t kind = j ? SEGMENT_JOURNAL : SEGMENT_PORT;

    check_header(f, kind, n, &p->header);
    reserved(f, kind, n, WHOSE_SEGMENT, 1, ZERO(p->reserved0) && ZERO(p->reserved1));
    reserved(f, kind, n, WHOSE_RING, n, ZERO(p->refs.pad));
    if (!j)
        return;
    reserved(f, kind, n, WHOSE_SEGMENT, 2, ZERO(j->pad0) && ZERO(j->reserved0) && ZERO(j->reserved1));
    for (uint32_t slot = 0; slot < fsck_load(&j->conns_high) && slot < j->conns; slot++)
        check_conn(f, n, slot);
    for (uint32_t sub = 0; sub < fsck_load(&j->subs_high) && sub < j->subs; sub++) {
        const struct sub_rec *s = &journal_subs((struct journal *)j)[sub];

        uint64_t sub_word = fsck_load(&s->word);
        /* A slot that was the cell of a long sid has its text in the rest, until somebody has it again. */
        int cells = !(sub_word & SUB_ACTIVE) || s->sid_len == JOURNAL_SID_LONG || s->sid_more == 0;

        reserved(f, kind, n, WHOSE_SUB, sub, ZERO(s->reserved) && (cells || fsck_load(&s->word) != sub_word));
    }
}

static void check_arena(struct fsck *f, uint32_t n)
{
    const struct arena *a = f->arenas[n];

    check_header(f, SEGMENT_ARENA, n, &a->header);
    reserved(f, SEGMENT_ARENA, n, WHOSE_SEGMENT, 0, ZERO(a->pad));
    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++)
        reserved(f, SEGMENT_ARENA, n, WHOSE_CHUNK, chunk, ZERO(a->chunks[chunk].pad));
}

static void check_modes(struct fsck *f)
{
    struct routing *r = f->routing;

    for (uint32_t at = 0; at < fsck_load(&r->requests_high) && at < MODE_REQUESTS_MAX; at++) {
        const struct mode_request *q = &routing_requests(r)[at];

        reserved(f, SEGMENT_ROUTING, 0, WHOSE_REQUEST, at, ZERO(q->pad) && ZERO(q->reserved));
    }
    for (uint32_t at = 0; at < fsck_load(&r->legs_high) && at < MODE_LEGS_MAX; at++)
        reserved(f, SEGMENT_ROUTING, 0, WHOSE_LEG, at, ZERO(routing_legs(r)[at].reserved));
    for (uint32_t at = 0; at < fsck_load(&r->names_high) && at < r->clients; at++) {
        const struct mode_name *n = &routing_names(r)[at];

        reserved(f, SEGMENT_ROUTING, 0, WHOSE_NAME, at, ZERO(n->pad) && ZERO(n->reserved));
    }
}

static void check_routing(struct fsck *f)
{
    struct routing *r = f->routing;
    uint64_t used = 0;

    check_header(f, SEGMENT_ROUTING, 0, &r->header);
    reserved(f, SEGMENT_ROUTING, 0, WHOSE_SEGMENT, 0, ZERO(r->reserved0) && ZERO(r->reserved1));
    for (uint32_t n = 0; n < fsck_load(&r->ports_high) && n < PORTS_MAX; n++) { /* the others are holes */
        reserved(f, SEGMENT_ROUTING, 0, WHOSE_RING, n, ZERO(routing_lane(r, n)->orders.pad) && ZERO(r->in[n].pad) &&
                                                           ZERO(routing_aside(r, n)->reserved));
        if (f->journals[n] && used < fsck_load(&f->journals[n]->conns_high))
            used = fsck_load(&f->journals[n]->conns_high);
        for (uint32_t sub = 0; sub < fsck_load(&r->subs_high[n]) && sub < r->subs_each; sub++)
            reserved(f, SEGMENT_ROUTING, 0, WHOSE_ROUTED, (uint64_t)n << 32 | sub, ZERO(routing_sub(r, n, sub)->reserved));
    }
    for (uint64_t slot = 0; slot < used && slot < r->clients; slot++)
        reserved(f, SEGMENT_ROUTING, 0, WHOSE_CLIENT, slot, ZERO(routing_clients(r)[slot].reserved));
    check_modes(f);
}

void fsck_words(struct fsck *f)
{
    for (uint32_t n = 0; n < f->connmgrs; n++) {
        if (f->arenas[n])
            check_arena(f, n);
        if (f->ports[n])
            check_port(f, n);
    }
    if (f->routing)
        check_routing(f);
    if (f->table)
        check_table(f);
}
