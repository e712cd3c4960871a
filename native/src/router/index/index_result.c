/* index_result: recipients of one subject, built from lists of subscriptions.
 *
 * Created by:   index_match(), when a subject's result is missing or stale.
 * Written by:   the index's one thread; the caller of index_match() moves the turns of groups.
 * Invariants:   a sub is in one list only, so a result has no more entries than there are
 *               subs, which is what the scratch areas hold; a block belongs to one node and
 *               is in the ring of blocks.
 * After a crash: gone with the process. See index_core.h.
 */
#include "router/index/index_core.h"
#include "base/hash.h"

#define BLOCK_EVICTIONS_MAX 16u /* given up for one new block: bounds a match */
#define CLOCK_STEPS_MAX 8u

struct shape {
    uint32_t plain, members, groups;
    uint32_t counts[PORTS_MAX]; /* plain recipients of each port */
};

static inline index_sub sub_id(const struct index *ix, uint32_t pos1)
{
    uint32_t pos = pos1 - 1;

    return INDEX_SUB(pos >> ix->slot_shift, pos & ((1u << ix->slot_shift) - 1));
}

/* Walks the lists once: plain subs to the front of ix->gather, members to its back. */
static void shape_take(struct index *ix, uint32_t count, struct shape *ret_shape)
{
    struct shape *s = ret_shape;
    uint32_t *back = ix->gather + ix->subs_max;

    memset(s, 0, sizeof(*s));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t pos1 = ix->sources[i];

        while (pos1) {
            const struct sub *sub = &ix->subs[pos1];

            if (!sub->queue) {
                s->counts[(pos1 - 1) >> ix->slot_shift]++;
                ix->gather[s->plain++] = pos1;
            } else {
                struct queue *q = &ix->queues[sub->queue];

                if (q->group_build != ix->builds) {
                    q->group_build = ix->builds;
                    q->group = s->groups++;
                    ix->group_queue[q->group] = sub->queue;
                    ix->group_count[q->group] = 0;
                }
                ix->group_count[q->group]++;
                *--back = pos1;
                s->members++;
            }
            pos1 = sub->next;
        }
    }
    *ix->work += s->plain + s->members;
}

static uint64_t shape_bytes(const struct shape *s)
{
    return sizeof(struct block) + s->groups * sizeof(struct index_group) +
           ((uint64_t)s->plain + s->members) * (sizeof(index_sub) + sizeof(uint32_t));
}

static void fill_plain(struct index *ix, const struct shape *s, index_sub *subs, uint32_t *conns)
{
    uint32_t at[PORTS_MAX], first = 0;

    for (uint32_t i = 0; i < ix->ports; i++) {
        at[i] = first;
        first += s->counts[i];
    }
    for (uint32_t i = 0; i < s->plain; i++) {
        uint32_t pos1 = ix->gather[i], to = at[(pos1 - 1) >> ix->slot_shift]++;

        subs[to] = sub_id(ix, pos1);
        conns[to] = ix->subs[pos1].conn;
    }
}

/* Whose turn it is in a group of `count`. Results that are not kept take the members in
 * rounds: all of them once, from one drawn for each round. Without the draw two subjects
 * published in turn would each reach only every other member. */
static uint32_t turn_of(const struct index *ix, struct queue *q, uint32_t count)
{
    if (q->carry_build == ix->builds)
        return q->carry % count;
    if (q->cursor % count == 0)
        q->shift = (uint16_t)(ix->builds * HASH_SPREAD >> 48);
    return (q->cursor++ + q->shift) % count;
}

static void fill_groups(struct index *ix, const struct shape *s, struct index_group *groups,
                        index_sub *subs, uint32_t *conns)
{
    const uint32_t *members = ix->gather + ix->subs_max;

    for (uint32_t i = 0; i < s->groups; i++) {
        struct queue *q = &ix->queues[ix->group_queue[i]];
        uint32_t count = ix->group_count[i];

        groups[i] = (struct index_group){.count = count, .next = turn_of(ix, q, count),
                                         .queue = ix->group_queue[i],
                                         .subs = subs, .conns = conns};
        subs += count;
        conns += count;
        ix->group_count[i] = 0; /* from here on: how many are in */
    }
    for (uint32_t i = 1; i <= s->members; i++) {
        uint32_t pos1 = members[-(ptrdiff_t)i], group = ix->queues[ix->subs[pos1].queue].group;
        uint32_t to = ix->group_count[group]++;

        ((index_sub *)groups[group].subs)[to] = sub_id(ix, pos1);
        ((uint32_t *)groups[group].conns)[to] = ix->subs[pos1].conn;
    }
}

static const struct index_match *block_fill(struct index *ix, struct block *b,
                                            const struct shape *s)
{
    struct index_group *groups = (struct index_group *)(b + 1);
    index_sub *subs = (index_sub *)(groups + s->groups);
    uint32_t all = s->plain + s->members;
    uint32_t *conns = subs + all;

    fill_plain(ix, s, subs, conns);
    fill_groups(ix, s, groups, subs + s->plain, conns + s->plain);
    b->match = (struct index_match){.count = s->plain, .group_count = s->groups, .subs = subs, .conns = conns,
                                    .groups = groups};
    return &b->match;
}

void result_drop(struct index *ix, struct node *n)
{
    struct ring *r = &ix->blocked;
    struct block *b;
    uint32_t last;

    if (n->state & RESULT_BLOCK) {
        b = pool_at(&ix->blocks, n->result);
        last = r->ids[--r->count];
        r->ids[b->slot] = last;
        ((struct block *)pool_at(&ix->blocks, ix->nodes[last].result))->slot = b->slot;
        pool_give(&ix->blocks, n->result);
    }
    n->state &= (uint16_t)~RESULT_BITS;
    n->stamp = STAMP_STALE;
}

/* Room for a block, at the cost of blocks of others that were not used lately. */
static uint32_t block_take(struct index *ix, uint64_t bytes)
{
    struct ring *r = &ix->blocked;
    uint32_t ref = pool_take(&ix->blocks, bytes), steps = 0;

    for (uint32_t given = 0; !ref && r->count && given < BLOCK_EVICTIONS_MAX; steps++) {
        struct node *n;

        if (r->hand >= r->count)
            r->hand = 0;
        n = &ix->nodes[r->ids[r->hand]];
        if ((n->state & NODE_RECENT) && steps < CLOCK_STEPS_MAX) {
            n->state &= (uint16_t)~NODE_RECENT;
            r->hand++;
            continue;
        }
        result_drop(ix, n);
        ix->evictions++;
        given++;
        ref = pool_take(&ix->blocks, bytes);
    }
    return ref;
}

const struct index_match *result_scratch(struct index *ix, uint32_t count)
{
    struct shape s;

    ix->builds++;
    shape_take(ix, count, &s);
    if (s.plain + s.members == 0)
        return &ix->none;
    if (s.plain == 1 && !s.members)
        return one_fill(ix, sub_id(ix, ix->gather[0]), ix->subs[ix->gather[0]].conn);
    return block_fill(ix, ix->scratch, &s);
}

/* The turns of the groups of a stale result, for the build at work. A queue that is gone
 * meanwhile, even when its record has another name now, costs a turn, no more. */
static void carry_turns(struct index *ix, const struct node *n)
{
    const struct block *b;

    if (!(n->state & RESULT_BLOCK))
        return;
    b = pool_at(&ix->blocks, n->result);
    for (uint32_t i = 0; i < b->match.group_count; i++) {
        struct queue *q = &ix->queues[b->match.groups[i].queue];

        q->carry = b->match.groups[i].next;
        q->carry_build = ix->builds;
    }
}

const struct index_match *result_keep(struct index *ix, uint32_t id, uint32_t count)
{
    struct node *n = &ix->nodes[id];
    struct block *b;
    struct shape s;

    ix->builds++;
    shape_take(ix, count, &s);
    carry_turns(ix, n);
    result_drop(ix, n);
    if (s.plain == 1 && !s.members) {
        n->state |= RESULT_ONE;
        n->result = sub_id(ix, ix->gather[0]);
        n->conn = ix->subs[ix->gather[0]].conn;
    } else if (s.plain + s.members) {
        n->result = block_take(ix, shape_bytes(&s));
        if (!n->result)
            return block_fill(ix, ix->scratch, &s);
        n->state |= RESULT_BLOCK;
        b = pool_at(&ix->blocks, n->result);
        b->slot = ix->blocked.count;
        ix->blocked.ids[ix->blocked.count++] = id;
        block_fill(ix, b, &s);
    }
    n->stamp = node_stamp(ix, n);
    return result_of(ix, n);
}
