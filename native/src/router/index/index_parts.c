/* index_parts: slab, pool and table, the containers of the subject index.
 *
 * Created by:   index_open(), over zeroed memory. Written by: the index's one thread.
 * Invariants:   bounded, never allocate; a taken id or ref is not handed out again before
 *               it is given back; the start of every piece of a pool has its order.
 * After a crash: gone with the process. See index_core.h.
 */
#include "router/index/index_core.h"

#include <sys/mman.h>

#define ORDER_FREE 0x80u
#define HUGE_BYTES (2u << 20)

uint32_t slab_take(struct slab *s)
{
    uint32_t id = s->free;

    if (id)
        memcpy(&s->free, s->base + (uint64_t)id * s->stride, sizeof(s->free));
    else if (s->fresh < s->max)
        id = ++s->fresh;
    else
        return 0;
    s->used++;
    memset(s->base + (uint64_t)id * s->stride, 0, s->stride);
    return id;
}

void slab_give(struct slab *s, uint32_t id)
{
    memcpy(s->base + (uint64_t)id * s->stride, &s->free, sizeof(s->free));
    s->free = id;
    s->used--;
}

/* The first words of a free piece. */
struct piece {
    uint32_t next, prev; /* refs; prev 0: first of its order */
};

static void piece_push(struct pool *p, uint32_t unit, uint32_t order)
{
    struct piece *piece = pool_at(p, unit + 1);

    p->order[unit] = (uint8_t)(order | ORDER_FREE);
    piece->prev = 0;
    piece->next = p->free[order];
    if (piece->next)
        ((struct piece *)pool_at(p, piece->next))->prev = unit + 1;
    p->free[order] = unit + 1;
    p->nonempty |= 1u << order;
}

static void piece_pull(struct pool *p, uint32_t unit, uint32_t order)
{
    struct piece *piece = pool_at(p, unit + 1);

    if (piece->next)
        ((struct piece *)pool_at(p, piece->next))->prev = piece->prev;
    if (piece->prev)
        ((struct piece *)pool_at(p, piece->prev))->next = piece->next;
    else if (!(p->free[order] = piece->next))
        p->nonempty &= ~(1u << order);
}

void pool_init(struct pool *p)
{
    piece_push(p, 0, p->order_max);
}

uint32_t pool_take(struct pool *p, uint64_t bytes)
{
    uint64_t units = (bytes + UNIT_BYTES - 1) / UNIT_BYTES;
    uint32_t order = units <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(units - 1);
    uint32_t have, unit;

    if (order > p->order_max || !(p->nonempty >> order))
        return 0;
    have = order + (uint32_t)__builtin_ctz(p->nonempty >> order);
    unit = p->free[have] - 1;
    piece_pull(p, unit, have);
    while (have > order) {
        have--;
        piece_push(p, unit + (1u << have), have);
    }
    p->order[unit] = (uint8_t)order;
    p->used_units += 1u << order;
    return unit + 1;
}

void pool_give(struct pool *p, uint32_t ref)
{
    uint32_t unit = ref - 1, order = p->order[unit];

    p->used_units -= 1u << order;
    while (order < p->order_max) {
        uint32_t buddy = unit ^ (1u << order);

        if (p->order[buddy] != (order | ORDER_FREE))
            break;
        piece_pull(p, buddy, order);
        unit &= ~(1u << order);
        order++;
    }
    piece_push(p, unit, order);
}

static void table_place(struct table *t, uint32_t tag, uint32_t id)
{
    uint32_t pos = tag & t->mask;

    while (t->entries[pos].id)
        pos = (pos + 1) & t->mask;
    t->entries[pos] = (struct entry){tag, id};
}

/* Entries keep their order but for their new top bit, so both areas are read and written
 * nearly in sequence: a few milliseconds at a million entries. */
static void table_grow(struct table *t)
{
    struct entry *old = t->entries;
    uint64_t size = (uint64_t)t->mask + 1, bytes = size * sizeof(*old);

    t->entries = t->other;
    t->other = old;
    t->mask = (uint32_t)(size * 2 - 1);
    if (bytes * 2 >= HUGE_BYTES)
        (void)madvise(t->entries, bytes * 2, MADV_HUGEPAGE); /* only a wish */
    for (uint64_t i = 0; i < size; i++)
        if (old[i].id)
            table_place(t, old[i].tag, old[i].id);
    /* A small area may share its pages with its neighbours, so it is cleared by hand. */
    if (bytes < HUGE_BYTES || madvise(old, bytes, MADV_DONTNEED) != 0)
        memset(old, 0, bytes);
}

void table_insert(struct table *t, uint32_t tag, uint32_t id)
{
    if ((uint64_t)(t->used + 1) * 8 > ((uint64_t)t->mask + 1) * 5)
        table_grow(t);
    t->used++;
    table_place(t, tag, id);
}

void table_delete(struct table *t, uint32_t tag, uint32_t id)
{
    uint32_t hole = tag & t->mask, pos;

    while (t->entries[hole].id != id)
        hole = (hole + 1) & t->mask;
    /* Entries that may move closer to their home fill the hole, so probes never pass a
     * dead entry. */
    for (pos = (hole + 1) & t->mask; t->entries[pos].id; pos = (pos + 1) & t->mask) {
        uint32_t home = t->entries[pos].tag & t->mask;

        if (((pos - home) & t->mask) >= ((pos - hole) & t->mask)) {
            t->entries[hole] = t->entries[pos];
            hole = pos;
        }
    }
    t->entries[hole] = (struct entry){0, 0};
    t->used--;
}
