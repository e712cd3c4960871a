/* index_node: subjects, their texts, and queue names of the subject index.
 *
 * Created by:   index_add(), or index_match() for a subject worth caching.
 * Written by:   the index's one thread.
 * Invariants:   a node is in the table under its subject's hash; NODE_CACHED says that it is
 *               in the ring and link is its slot there, else link is its list of subs. A
 *               queue lives as long as a sub refers to it.
 * After a crash: gone with the process. See index_core.h.
 */
#include "router/index/index_core.h"

#define CLOCK_STEPS_MAX 8u /* second chances given before one is refused: bounds a match */

void node_cache(struct index *ix, uint32_t id)
{
    struct node *n = &ix->nodes[id];

    n->state |= NODE_CACHED;
    n->link = ix->cached.count;
    ix->cached.ids[ix->cached.count++] = id;
}

void node_uncache(struct index *ix, uint32_t id)
{
    struct node *n = &ix->nodes[id];
    uint32_t last = ix->cached.ids[--ix->cached.count];

    ix->cached.ids[n->link] = last;
    ix->nodes[last].link = n->link;
    n->state &= (uint16_t)~NODE_CACHED;
    n->link = 0;
}

/* Gives up the first cached subject under the hand that was not hit since it last passed. */
static bool node_evict(struct index *ix)
{
    struct ring *r = &ix->cached;

    if (!r->count)
        return false;
    for (uint32_t steps = 0;; steps++) {
        uint32_t id;

        if (r->hand >= r->count)
            r->hand = 0;
        id = r->ids[r->hand];
        if (!(ix->nodes[id].state & NODE_RECENT) || steps == CLOCK_STEPS_MAX) {
            node_free(ix, id);
            ix->evictions++;
            return true;
        }
        ix->nodes[id].state &= (uint16_t)~NODE_RECENT;
        r->hand++;
    }
}

bool text_put(struct index *ix, char *text, const char *s, uint32_t len)
{
    uint32_t ref;

    if (len <= TEXT_INLINE) {
        memcpy(text, s, len);
        return true;
    }
    while (!(ref = pool_take(&ix->texts, len)))
        if (!node_evict(ix))
            return false;
    memcpy(pool_at(&ix->texts, ref), s, len);
    memcpy(text, &ref, sizeof(ref));
    return true;
}

void text_drop(struct index *ix, const char *text, uint32_t len)
{
    if (len > TEXT_INLINE)
        pool_give(&ix->texts, read4(text));
}

uint32_t node_new(struct index *ix, const char *subject, uint32_t len, uint64_t hash)
{
    struct token t1 = token_at(subject, len, 0);
    uint64_t hash1 = index_hash(subject, t1.end);
    struct node *n;
    uint32_t id;

    while (!(id = slab_take(&ix->node_slab)))
        if (!node_evict(ix))
            return 0;
    n = &ix->nodes[id];
    if (!text_put(ix, n->text, subject, len)) {
        slab_give(&ix->node_slab, id);
        return 0;
    }
    n->len = (uint16_t)len;
    n->stamp = STAMP_STALE;
    n->bucket1 = n->bucket2 = bucket_first(hash1);
    if (t1.end < len) {
        struct token t2 = token_at(subject, len, t1.end + 1);

        n->bucket2 = bucket_second(hash1, index_hash(subject + t2.start, t2.end - t2.start));
    }
    table_insert(&ix->table, (uint32_t)hash, id);
    return id;
}

void node_free(struct index *ix, uint32_t id)
{
    struct node *n = &ix->nodes[id];

    if (n->state & NODE_CACHED)
        node_uncache(ix, id);
    result_drop(ix, n);
    table_delete(&ix->table, (uint32_t)index_hash(text_at(ix, n->text, n->len), n->len), id);
    text_drop(ix, n->text, n->len);
    slab_give(&ix->node_slab, id);
}

uint32_t queue_find(const struct index *ix, const char *name, uint32_t len)
{
    uint32_t tag = (uint32_t)index_hash(name, len), pos = tag, id;

    while ((id = table_next(&ix->queue_table, tag, &pos))) {
        const struct queue *q = &ix->queues[id];

        if (q->len == len && text_same(text_at(ix, q->text, len), name, len))
            return id;
    }
    return 0;
}

uint32_t queue_take(struct index *ix, const char *name, uint32_t len)
{
    uint32_t id = queue_find(ix, name, len);

    if (!id) {
        if (!(id = slab_take(&ix->queue_slab)))
            return 0;
        if (!text_put(ix, ix->queues[id].text, name, len)) {
            slab_give(&ix->queue_slab, id);
            return 0;
        }
        ix->queues[id].len = (uint16_t)len;
        table_insert(&ix->queue_table, (uint32_t)index_hash(name, len), id);
    }
    ix->queues[id].refs++;
    return id;
}

void queue_drop(struct index *ix, uint32_t id)
{
    struct queue *q = &ix->queues[id];
    const char *name = text_at(ix, q->text, q->len);

    if (--q->refs)
        return;
    table_delete(&ix->queue_table, (uint32_t)index_hash(name, q->len), id);
    text_drop(ix, q->text, q->len);
    slab_give(&ix->queue_slab, id);
}
