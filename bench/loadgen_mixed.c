/*
 * --subject-mode mixed: many publishers and subscribers on many subjects, with wildcards and queue
 * groups, and the check that every message arrives once for each plain subscription that matches it
 * and once for each group.
 *
 * Subject n is "load.<n / 100>.<n % 100>", three digits each: areas of 100 items. For every
 * message there are five deliveries (MIXED_DELIVERIES):
 *   literal     the subject itself, by subscriber n % S
 *   area        "load.<area>.*", by one subscriber for each area
 *   item        "load.*.<item>", by one subscriber for each item
 *   area group  "load.<area>.*" in queue group "area": up to ten members for each area
 *   all group   "load.>" in queue group "all": every subscriber
 *
 * All publishers go through the subjects in one shuffled order, each from a place of its own, so the
 * subject of a message follows from its publisher and sequence. That makes loss visible without
 * remembering messages: what a plain stream (the literals of one subscriber, one area, one item) gets
 * from one publisher is numbered here without gaps, and checked as loadgen_check.c does. A group has a
 * bit for each message, set by the connection that gets it; each member must see the sequences of one publisher
 * rise.
 *
 * Created by mixed_make(), written by mixed_message() alone. Invariants: `order` has every subject
 * once; a stream's numbers from one publisher are dense. A crash leaves nothing.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loadgen.h"

#define ITEMS 100u           /* subjects in an area */
#define MEMBERS 10u          /* of the group of an area */
#define SID_STEP 1000000u    /* a sid is kind * SID_STEP + number */

enum kind { LITERAL, AREA, ITEM, PLAIN_KINDS, AREA_GROUP = PLAIN_KINDS, ALL_GROUP, KINDS };
enum { GROUP_KINDS = KINDS - PLAIN_KINDS };

_Static_assert(KINDS == MIXED_DELIVERIES, "one delivery of each kind");

/* The plain subscriptions of one kind. */
struct streams {
    uint32_t count;
    uint32_t *size;      /* [stream]: subjects in it */
    uint32_t *rank;      /* [place]: earlier places of the order that are of the same stream */
    uint32_t *base;      /* [stream * publishers + publisher]: rank where the publisher begins */
    struct pair *pairs;  /* [stream * publishers + publisher] */
};

/* The groups of one kind: each message belongs to one of them. */
struct group {
    uint64_t *seen;      /* [publisher * words + sequence / 64], a bit for each message */
    uint64_t *next;      /* [subscriber * publishers + publisher]: what may come next */
};

struct mixed {
    uint32_t publishers, subscribers, subjects, areas;
    uint64_t limit;          /* messages of a publisher */
    size_t words;            /* of `seen` for one publisher */
    uint32_t *order;         /* [place]: subject */
    uint32_t *start;         /* [publisher]: the place where it begins */
    uint64_t *delivered;     /* [publisher]: first-time deliveries */
    struct streams streams[PLAIN_KINDS];
    struct group groups[GROUP_KINDS];
};

static uint32_t stream_of(const struct mixed *m, enum kind kind, uint32_t subject)
{
    return kind == LITERAL ? subject % m->subscribers : kind == AREA ? subject / ITEMS : subject % ITEMS;
}

static uint32_t area_owner(const struct mixed *m, uint32_t area)
{
    return (area * 13 + 7) % m->subscribers;
}

static uint32_t item_owner(const struct mixed *m, uint32_t item)
{
    return (item * 31 + 3) % m->subscribers;
}

static bool area_member(const struct mixed *m, uint32_t area, uint32_t subscriber)
{
    uint32_t first = area * MEMBERS % m->subscribers;
    return (subscriber + m->subscribers - first) % m->subscribers < MEMBERS;
}

static void streams_make(struct mixed *m, enum kind kind)
{
    struct streams *s = &m->streams[kind];
    uint32_t n = m->subjects;
    s->count = kind == LITERAL ? m->subscribers : kind == AREA ? m->areas : ITEMS;
    s->size = allocate(s->count, sizeof *s->size);
    s->rank = allocate(n, sizeof *s->rank);
    s->base = allocate((size_t)s->count * m->publishers, sizeof *s->base);
    s->pairs = allocate((size_t)s->count * m->publishers, sizeof *s->pairs);
    for (uint32_t place = 0; place < n; place++)
        s->rank[place] = s->size[stream_of(m, kind, m->order[place])]++;
    for (uint32_t p = 0; p < m->publishers; p++)
        for (uint32_t place = 0; place < m->start[p]; place++)
            s->base[(size_t)stream_of(m, kind, m->order[place]) * m->publishers + p]++;
}

struct mixed *mixed_make(const struct options *opt)
{
    struct mixed *m = allocate(1, sizeof *m);
    uint64_t x = (opt->seed + 1) * 0x9e3779b97f4a7c15u | 1u;
    m->publishers = opt->publishers;
    m->subscribers = opt->subscribers;
    m->subjects = opt->subjects;
    m->areas = (opt->subjects + ITEMS - 1) / ITEMS;
    m->limit = opt->warmup + opt->messages;
    m->words = (size_t)(m->limit + 63) / 64;
    m->order = allocate(m->subjects, sizeof *m->order);
    m->start = allocate(m->publishers, sizeof *m->start);
    m->delivered = allocate(m->publishers, sizeof *m->delivered);
    for (uint32_t p = 0; p < m->publishers; p++)
        m->start[p] = (uint32_t)((uint64_t)p * 7919 % m->subjects);
    for (uint32_t i = 0; i < m->subjects; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        uint32_t other = (uint32_t)(x % (i + 1));
        m->order[i] = m->order[other];
        m->order[other] = i;
    }
    for (enum kind kind = 0; kind < PLAIN_KINDS; kind++)
        streams_make(m, kind);
    for (int i = 0; i < GROUP_KINDS; i++) {
        m->groups[i].seen = allocate(m->words * m->publishers, sizeof(uint64_t));
        m->groups[i].next = allocate((size_t)m->subscribers * m->publishers, sizeof(uint64_t));
    }
    return m;
}

uint32_t mixed_subject(const struct mixed *m, uint32_t publisher, uint64_t sequence)
{
    return m->order[(sequence + m->start[publisher]) % m->subjects];
}

/* `at` is at the first digit of "AAA.III". */
void mixed_subject_patch(char *at, uint32_t subject)
{
    digits_patch(at, subject / ITEMS);
    at[3] = '.';
    digits_patch(at + 4, subject % ITEMS);
}

static void subscribe(struct hello *h, enum kind kind, uint32_t number, const char *queue,
                      const char *format, ...) __attribute__((format(printf, 5, 6)));

static void subscribe(struct hello *h, enum kind kind, uint32_t number, const char *queue,
                      const char *format, ...)
{
    char subject[64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(subject, sizeof subject, format, arguments);
    va_end(arguments);
    PROTOCOL_NATS.hello_subscribe(h, subject, queue, (kind + 1) * SID_STEP + number);
}

void mixed_hello(const struct mixed *m, struct hello *h, uint32_t subscriber)
{
    for (uint32_t n = subscriber; n < m->subjects; n += m->subscribers)
        subscribe(h, LITERAL, n, "", "load.%03u.%03u", n / ITEMS, n % ITEMS);
    for (uint32_t area = 0; area < m->areas; area++) {
        if (area_owner(m, area) == subscriber)
            subscribe(h, AREA, area, "", "load.%03u.*", area);
        if (area_member(m, area, subscriber))
            subscribe(h, AREA_GROUP, area, "area", "load.%03u.*", area);
    }
    for (uint32_t item = 0; item < ITEMS; item++)
        if (item_owner(m, item) == subscriber)
            subscribe(h, ITEM, item, "", "load.*.%03u", item);
    subscribe(h, ALL_GROUP, 0, "all", "load.>");
}

/* Whether this subscriber has a subscription of that kind and number, and the subject matches it. */
static bool is_wanted(const struct mixed *m, uint32_t kind, uint32_t number, uint32_t subscriber,
                      uint32_t subject)
{
    switch (kind) {
    case LITERAL: return number == subject && subject % m->subscribers == subscriber;
    case AREA: return number == subject / ITEMS && area_owner(m, number) == subscriber;
    case ITEM: return number == subject % ITEMS && item_owner(m, number) == subscriber;
    case AREA_GROUP: return number == subject / ITEMS && area_member(m, number, subscriber);
    case ALL_GROUP: return number == 0;
    default: return false;
    }
}

static bool plain_arrived(struct mixed *m, struct check *k, enum kind kind, uint32_t publisher,
                          uint32_t subject, uint64_t round, uint32_t place)
{
    const struct streams *s = &m->streams[kind];
    uint32_t stream = stream_of(m, kind, subject);
    size_t at = (size_t)stream * m->publishers + publisher;
    uint64_t number = round * s->size[stream] + s->rank[place] - s->base[at];
    return check_sequence(k, &s->pairs[at], number);
}

static bool group_arrived(struct mixed *m, struct check *k, const struct group *g, uint32_t subscriber,
                          const struct body_head *head)
{
    uint64_t *word = &g->seen[head->publisher * m->words + head->sequence / 64];
    uint64_t bit = (uint64_t)1 << head->sequence % 64;
    uint64_t *next = &g->next[(size_t)subscriber * m->publishers + head->publisher];
    if (*word & bit) {
        k->duplicated++;
        return false;
    }
    *word |= bit;
    if (head->sequence < *next)
        k->reordered++;
    else
        *next = head->sequence + 1;
    k->fresh++;
    return true;
}

void mixed_message(struct mixed *m, struct check *k, const struct conn *c, const char *line)
{
    struct body_head head;
    char digits[8];
    uint32_t kind = c->sid / SID_STEP - 1, number = c->sid % SID_STEP;
    const char *body = conn_body(c, line);
    if (c->size != k->size) {
        k->corrupt++;
        return;
    }
    memcpy(&head, body, sizeof head);
    if (head.publisher >= m->publishers || head.sequence >= m->limit) {
        k->corrupt++;
        return;
    }
    uint64_t turn = head.sequence + m->start[head.publisher], round = turn / m->subjects;
    uint32_t place = (uint32_t)(turn - round * m->subjects), subject = m->order[place];
    if (head.tag != (BODY_MAGIC ^ subject) ||
        (k->fill && memcmp(body + sizeof head, k->fill, c->size - sizeof head) != 0)) {
        k->corrupt++;
        return;
    }
    mixed_subject_patch(digits, subject);
    if (c->subject_len != 12 || memcmp(line + strlen("MSG load."), digits, 7) != 0 ||
        !is_wanted(m, kind, number, c->index, subject)) {
        k->misrouted++;
        return;
    }
    bool fresh = kind < PLAIN_KINDS
                     ? plain_arrived(m, k, kind, head.publisher, subject, round, place)
                     : group_arrived(m, k, &m->groups[kind - PLAIN_KINDS], c->index, &head);
    m->delivered[head.publisher] += fresh;
}

/* Messages of this publisher that have not arrived everywhere, about. */
uint64_t mixed_outstanding(const struct mixed *m, const struct publisher *p)
{
    return p->sent - m->delivered[p->conn.index] / MIXED_DELIVERIES;
}

static uint64_t plain_lost(struct mixed *m, enum kind kind, uint32_t publisher, uint64_t sent)
{
    const struct streams *s = &m->streams[kind];
    uint64_t lost = 0;
    uint32_t *rest = allocate(s->count, sizeof *rest);
    for (uint32_t n = 0; n < sent % m->subjects; n++)
        rest[stream_of(m, kind, mixed_subject(m, publisher, n))]++;
    for (uint32_t stream = 0; stream < s->count; stream++)
        lost += pair_lost(&s->pairs[(size_t)stream * m->publishers + publisher],
                          sent / m->subjects * s->size[stream] + rest[stream]);
    free(rest);
    return lost;
}

/* At the end: deliveries that were not made. */
uint64_t mixed_lost(struct mixed *m, const struct publisher *publishers)
{
    uint64_t lost = 0;
    for (uint32_t p = 0; p < m->publishers; p++) {
        uint64_t sent = publishers[p].sent;
        for (enum kind kind = 0; kind < PLAIN_KINDS; kind++)
            lost += plain_lost(m, kind, p, sent);
        for (int i = 0; i < GROUP_KINDS; i++) {
            uint64_t arrived = 0;
            for (size_t word = 0; word < m->words; word++)
                arrived += (uint64_t)__builtin_popcountll(m->groups[i].seen[p * m->words + word]);
            lost += sent - arrived;
        }
    }
    return lost;
}
