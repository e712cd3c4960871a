/* index: the subject index's memory, its changes and its matches. See index.h for who
 * creates and writes it and what a crash leaves, index_core.h for the structures.
 */
#include "router/index/index_core.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/random.h>

#define PAGE_BYTES 4096u
#define HUGE_BYTES (2u << 20)
#define TABLE_START 1024u      /* entries of a new table */
#define SEEN_MAX 65536u        /* subjects remembered as seen once */
#define UNSEEN_CACHED 16u      /* 1 in 16 subjects is cached when it is first seen */
#define SUBJECTS_MAX (1u << 28)
#define SUBS_MAX (1u << 30)    /* ports times slots, each rounded up to a power of two */
#define POOL_BYTES_MAX ((uint64_t)UNIT_BYTES << (ORDERS - 1))

/* Set once, before the first subject is hashed. */
static uint64_t hash_key[2];

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 m = (unsigned __int128)a * b;

    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

uint64_t index_hash(const char *s, uint32_t len)
{
    uint64_t h = hash_key[1] ^ len, a, b;

    if (len > 16) {
        const char *last = s + len - 16; /* overlaps what the loop has read */

        do {
            h = mix(read8(s) ^ hash_key[0], read8(s + 8) ^ h);
            s += 16;
        } while (s < last);
        a = read8(last);
        b = read8(last + 8);
    } else if (len >= 8) {
        a = read8(s);
        b = read8(s + len - 8);
    } else if (len >= 4) {
        a = read4(s);
        b = read4(s + len - 4);
    } else {
        a = len ? (uint64_t)(uint8_t)s[0] << 16 | (uint64_t)(uint8_t)s[len >> 1] << 8 |
                      (uint8_t)s[len - 1]
                : 0;
        b = 0;
    }
    return mix(mix(a ^ hash_key[0], b ^ h), 0xa0761d6478bd642fu ^ h);
}

/* ---- memory ------------------------------------------------------------------------- */

static uint64_t power_of_two(uint64_t n)
{
    return n <= 1 ? 1 : 1ull << (64 - __builtin_clzll(n - 1));
}

/* Areas one after another: with base NULL only their sizes are added up. */
struct layout {
    char *base;
    uint64_t bytes;
};

static void *layout_area(struct layout *l, uint64_t count, uint64_t size)
{
    uint64_t bytes = count * size, align = bytes >= 2 * HUGE_BYTES ? HUGE_BYTES : PAGE_BYTES;
    char *area;

    l->bytes = (l->bytes + align - 1) & ~(align - 1);
    area = l->base ? l->base + l->bytes : NULL;
    l->bytes += bytes;
    return area;
}

static void layout_table(struct layout *l, struct table *t, uint32_t members)
{
    uint64_t size = power_of_two((uint64_t)members * 8 / 5 + 1);

    t->entries = layout_area(l, size, sizeof(struct entry));
    t->other = layout_area(l, size, sizeof(struct entry));
    t->mask = (uint32_t)(size < TABLE_START ? size : TABLE_START) - 1;
}

static void layout_slab(struct layout *l, struct slab *s, uint32_t max, uint32_t stride)
{
    s->base = layout_area(l, (uint64_t)max + 1, stride);
    s->max = max;
    s->stride = stride;
}

static void layout_pool(struct layout *l, struct pool *p, uint64_t bytes)
{
    uint64_t units = power_of_two((bytes < POOL_BYTES_MAX ? bytes : POOL_BYTES_MAX) / UNIT_BYTES);

    p->base = layout_area(l, units, UNIT_BYTES);
    p->order = layout_area(l, units, 1);
    p->order_max = (uint32_t)__builtin_ctzll(units);
}

static void layout_all(struct layout *l, struct index *ix, const struct index_conf *conf)
{
    uint32_t nodes = conf->subjects, tries = conf->subjects * 2 + 1, queues = conf->subjects;
    uint64_t subs = ix->subs_max;
    uint64_t seen = power_of_two(nodes < SEEN_MAX ? nodes : SEEN_MAX);

    (void)layout_area(l, 1, sizeof(struct index));
    layout_table(l, &ix->table, nodes);
    layout_table(l, &ix->edges, tries);
    layout_table(l, &ix->queue_table, queues);
    layout_slab(l, &ix->node_slab, nodes, sizeof(struct node));
    layout_slab(l, &ix->trie_slab, tries, sizeof(struct trie));
    layout_slab(l, &ix->queue_slab, queues, sizeof(struct queue));
    ix->nodes = (struct node *)ix->node_slab.base;
    ix->tries = (struct trie *)ix->trie_slab.base;
    ix->queues = (struct queue *)ix->queue_slab.base;
    layout_slab(l, &ix->form_slab, tries, sizeof(struct form)); /* a trie node has one form */
    ix->forms = (struct form *)ix->form_slab.base;
    ix->conn_forms = layout_area(l, conf->conns, sizeof(uint32_t));
    ix->owners = layout_area(l, (uint64_t)tries + 1, sizeof(struct trie_owner));
    ix->shares = layout_area(l, conf->conns, sizeof(struct share));
    ix->tries_each = tries / INDEX_TRIES_PART + 1;
    ix->subs = layout_area(l, subs + 1, sizeof(struct sub));
    /* Texts: four units for each subject, shared with long tokens and queue names. Results:
     * a unit for each subject and four entries for each subscription; a result that finds
     * no room is built at each match instead. */
    layout_pool(l, &ix->texts, 16384 + (uint64_t)nodes * 4 * UNIT_BYTES);
    layout_pool(l, &ix->blocks, 4096 + (uint64_t)nodes * UNIT_BYTES + subs * 32);
    ix->cached.ids = layout_area(l, nodes, sizeof(uint32_t));
    ix->blocked.ids = layout_area(l, nodes, sizeof(uint32_t));
    ix->seen = layout_area(l, seen, sizeof(uint16_t));
    ix->seen_mask = seen - 1;
    /* Scratch: a source for each trie node and the subject itself; the largest result. */
    ix->sources = layout_area(l, (uint64_t)tries + 1, sizeof(uint32_t));
    ix->gather = layout_area(l, subs, sizeof(uint32_t));
    ix->group_queue = layout_area(l, queues, sizeof(uint32_t));
    ix->group_count = layout_area(l, queues, sizeof(uint32_t));
    ix->scratch = layout_area(l, 1, sizeof(struct block) + subs * 8 + (uint64_t)queues * sizeof(struct index_group));
    ix->tokens = layout_area(l, INDEX_SUBJECT_MAX + 1, sizeof(struct token));
    ix->visits = layout_area(l, INDEX_SUBJECT_MAX + 2, sizeof(struct visit));
}

static void hash_key_draw(void)
{
    if (hash_key[0])
        return;
    /* Without entropy at this early a moment a fixed key is still a correct one. */
    if (getrandom(hash_key, sizeof(hash_key), GRND_NONBLOCK) != (ssize_t)sizeof(hash_key))
        hash_key[1] = 0xe7037ed1a0b428dbu;
    hash_key[0] |= 1; /* drawn */
}

int index_open(const struct index_conf *conf, struct index **ret_ix)
{
    struct index sizes = {.ports = conf->ports, .slots = conf->subs_per_port, .conns = conf->conns};
    struct layout l = {0};
    uint64_t subs, nodes_bytes = (uint64_t)conf->subjects * sizeof(struct node);
    struct index *ix;
    char *map;

    if (conf->ports < 1 || conf->ports > PORTS_MAX || conf->subs_per_port < 1 ||
        conf->subs_per_port > INDEX_SLOTS_MAX || conf->subjects < 1 ||
        conf->subjects > SUBJECTS_MAX)
        return -EINVAL;
    subs = conf->ports * power_of_two(conf->subs_per_port);
    if (subs > SUBS_MAX)
        return -EINVAL;
    sizes.slot_shift = (uint32_t)__builtin_ctzll(power_of_two(conf->subs_per_port));
    sizes.subs_max = (uint32_t)subs;
    layout_all(&l, &sizes, conf);

    map = mmap(NULL, l.bytes + HUGE_BYTES, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return -ENOMEM;
    sizes.map = map;
    sizes.map_bytes = l.bytes + HUGE_BYTES;
    l = (struct layout){.base = (char *)(((uintptr_t)map + HUGE_BYTES - 1) &
                                         ~(uintptr_t)(HUGE_BYTES - 1))};
    ix = (struct index *)l.base;
    layout_all(&l, &sizes, conf);
    *ix = sizes;

    /* Nodes are met at random and used from the lowest: beyond the first 2 MiB large pages
     * save a walk of the page table for each, and cost little. */
    if (nodes_bytes >= 2 * HUGE_BYTES)
        (void)madvise((char *)ix->nodes + HUGE_BYTES, nodes_bytes - HUGE_BYTES, MADV_HUGEPAGE);
    pool_init(&ix->texts);
    pool_init(&ix->blocks);
    (void)slab_take(&ix->trie_slab); /* TRIE_ROOT */
    (void)slab_take(&ix->form_slab); /* FORM_ROOT */
    ix->tries[TRIE_ROOT].bucket = BUCKETS;
    ix->tries[TRIE_ROOT].form = FORM_ROOT;
    ix->work = conf->work ? conf->work : &ix->unwatched;
    ix->one.match = (struct index_match){.count = 1, .subs = &ix->one.sub, .conns = &ix->one.conn};
    hash_key_draw();
    *ret_ix = ix;
    return 0;
}

void index_close(struct index *ix)
{
    if (ix)
        munmap(ix->map, ix->map_bytes);
}

/* ---- changes ------------------------------------------------------------------------ */

/* Where the record of a sub is, or 0. */
static uint32_t sub_pos(const struct index *ix, index_sub sub)
{
    uint32_t port = INDEX_SUB_PORT(sub), slot = INDEX_SUB_SLOT(sub);

    if (port >= ix->ports || slot >= ix->slots)
        return 0;
    return (port << ix->slot_shift) + slot + 1;
}

static void list_append(struct index *ix, uint32_t *head, uint32_t pos)
{
    struct sub *subs = ix->subs;

    subs[pos].next = 0;
    if (!*head) {
        *head = subs[pos].prev = pos;
        return;
    }
    subs[pos].prev = subs[*head].prev;
    subs[subs[*head].prev].next = pos;
    subs[*head].prev = pos;
}

static void list_unlink(struct index *ix, uint32_t *head, uint32_t pos)
{
    struct sub *subs = ix->subs;
    uint32_t next = subs[pos].next, prev = subs[pos].prev;

    if (*head == pos)
        *head = next;
    else
        subs[prev].next = next;
    if (next)
        subs[next].prev = prev;
    else if (*head)
        subs[*head].prev = prev;
}

static bool sub_same(const struct index *ix, const struct sub *rec, uint32_t conn,
                     const char *subject, uint32_t subject_len, const char *queue,
                     uint32_t queue_len)
{
    uint32_t owner = trie_wild(subject, subject_len)
                         ? trie_find(ix, subject, subject_len) | OWNER_TRIE
                         : node_find(ix, subject, subject_len, index_hash(subject, subject_len));

    return rec->owner == owner && rec->conn == conn &&
           (queue_len ? rec->queue && rec->queue == queue_find(ix, queue, queue_len)
                      : !rec->queue);
}

void index_restoring(struct index *ix, int on) { ix->restoring = on; }

int index_add(struct index *ix, index_sub sub, uint32_t conn, const char *subject,
              uint32_t subject_len, const char *queue, uint32_t queue_len)
{
    uint32_t pos = sub_pos(ix, sub), name = 0, id;
    struct sub *rec = &ix->subs[pos];

    if (!pos || !subject_len)
        return -EINVAL;
    if (subject_len > INDEX_SUBJECT_MAX || queue_len > INDEX_SUBJECT_MAX)
        return -ENAMETOOLONG;
    if (rec->owner)
        return sub_same(ix, rec, conn, subject, subject_len, queue, queue_len) ? 0 : -EEXIST;
    if (queue_len && !(name = queue_take(ix, queue, queue_len)))
        return -ENOSPC;
    ix->adding = conn;
    ix->forms_new = 0;
    ix->forms_left = INDEX_FORMS_MAX;
    if (conn < ix->conns)
        ix->forms_left = ix->conn_forms[conn] < INDEX_FORMS_EACH ? INDEX_FORMS_EACH - ix->conn_forms[conn] : 0;
    if (trie_wild(subject, subject_len)) {
        if (!(id = trie_insert(ix, subject, subject_len)))
            goto full;
        list_append(ix, &ix->tries[id].link, pos);
        ix->versions[ix->tries[id].bucket]++;
        rec->owner = id | OWNER_TRIE;
    } else {
        uint64_t hash = index_hash(subject, subject_len);

        id = node_find(ix, subject, subject_len, hash);
        if (id && (ix->nodes[id].state & NODE_CACHED))
            node_uncache(ix, id);
        else if (!id && !(id = node_new(ix, subject, subject_len, hash)))
            goto full;
        list_append(ix, &ix->nodes[id].link, pos);
        ix->nodes[id].stamp = STAMP_STALE;
        rec->owner = id;
    }
    rec->conn = conn;
    rec->queue = name;
    rec->forms = ix->forms_new;
    if (rec->forms && conn < ix->conns)
        ix->conn_forms[conn] += rec->forms;
    if (conn < ix->conns)
        ix->shares[conn].subs++;
    ix->subs_used++;
    return 0;

full:
    if (name)
        queue_drop(ix, name);
    return -ENOSPC;
}

int index_remove(struct index *ix, index_sub sub)
{
    uint32_t pos = sub_pos(ix, sub), id;
    struct sub *rec = &ix->subs[pos];

    if (!pos)
        return -EINVAL;
    if (!rec->owner)
        return -ENOENT;
    id = rec->owner & ~OWNER_TRIE;
    if (rec->owner & OWNER_TRIE) {
        ix->versions[ix->tries[id].bucket]++;
        list_unlink(ix, &ix->tries[id].link, pos);
        trie_prune(ix, id);
    } else {
        ix->nodes[id].stamp = STAMP_STALE;
        list_unlink(ix, &ix->nodes[id].link, pos);
        if (!ix->nodes[id].link)
            node_free(ix, id);
    }
    if (rec->queue)
        queue_drop(ix, rec->queue);
    if (rec->forms && rec->conn < ix->conns)
        ix->conn_forms[rec->conn] -= rec->forms;
    if (rec->conn < ix->conns && --ix->shares[rec->conn].subs == 0) {
        ix->shares[rec->conn].tries = 0;
        ix->shares[rec->conn].life++;
    }
    *rec = (struct sub){0};
    ix->subs_used--;
    return 0;
}

/* ---- matches ------------------------------------------------------------------------ */

void index_prefetch(const struct index *ix, uint64_t hash)
{
    __builtin_prefetch(&ix->table.entries[(uint32_t)hash & ix->table.mask]);
}

void index_prefetch_node(const struct index *ix, uint64_t hash)
{
    uint32_t pos = (uint32_t)hash, id = table_next(&ix->table, (uint32_t)hash, &pos);

    __builtin_prefetch(&ix->nodes[id]);
}

static __attribute__((noinline)) const struct index_match *
match_stale(struct index *ix, const char *subject, uint32_t len, uint32_t id)
{
    uint32_t count = 0;

    if (!(ix->nodes[id].state & NODE_CACHED))
        ix->sources[count++] = ix->nodes[id].link;
    if (ix->trie_slab.used > 1)
        count = trie_collect(ix, subject, len, count);
    return result_keep(ix, id, count);
}

static __attribute__((noinline)) const struct index_match *
match_unknown(struct index *ix, const char *subject, uint32_t len, uint64_t hash)
{
    uint16_t *seen = &ix->seen[hash >> 32 & ix->seen_mask], mark = (uint16_t)(hash >> 48 | 1);
    uint32_t count, id;

    if (ix->trie_slab.used == 1 || len == 0 || len > INDEX_SUBJECT_MAX)
        return &ix->none;
    count = trie_collect(ix, subject, len, 0);
    if (*seen != mark) {
        *seen = mark;
        if (++ix->unseen % UNSEEN_CACHED != 0)
            return result_scratch(ix, count);
    }
    if (!(id = node_new(ix, subject, len, hash)))
        return result_scratch(ix, count);
    node_cache(ix, id);
    return result_keep(ix, id, count);
}

/* What the short way does not handle: long subjects, and two subjects of one tag. */
static __attribute__((noinline)) const struct index_match *
match_slow(struct index *ix, const char *subject, uint32_t len, uint64_t hash)
{
    uint32_t id = node_find(ix, subject, len, hash);
    struct node *n = &ix->nodes[id];

    if (!id)
        return match_unknown(ix, subject, len, hash);
    if (n->stamp != node_stamp(ix, n))
        return match_stale(ix, subject, len, id);
    n->state |= NODE_RECENT;
    return result_of(ix, n);
}

/* The way of nearly every message, without loops over text and without calls: about sixty
 * instructions. An entry that is empty leads to object 0, whose length fits no subject. */
const struct index_match *index_match(struct index *ix, const char *subject, uint32_t len,
                                      uint64_t hash)
{
    uint32_t tag = (uint32_t)hash, mask = ix->table.mask;
    const struct entry *e = &ix->table.entries[tag & mask];
    struct node *n;

    for (uint32_t pos = tag; e->tag != tag; e = &ix->table.entries[++pos & mask])
        if (!e->id)
            return match_unknown(ix, subject, len, hash);
    n = &ix->nodes[e->id];
    if (n->len != len || len - 1 >= TEXT_INLINE || !text_same_short(n->text, subject, len))
        return match_slow(ix, subject, len, hash);
    if (n->stamp != node_stamp(ix, n))
        return match_stale(ix, subject, len, e->id);
    if (n->state == (RESULT_ONE | NODE_RECENT))
        return one_fill(ix, n->result, n->conn);
    n->state |= NODE_RECENT;
    return result_of(ix, n);
}

void index_stats(const struct index *ix, struct index_stats *ret_stats)
{
    *ret_stats = (struct index_stats){
        .subs = ix->subs_used,
        .nodes = ix->node_slab.used,
        .nodes_cached = ix->cached.count,
        .nodes_max = ix->node_slab.max,
        .trie_nodes = ix->trie_slab.used - 1,
        .queues = ix->queue_slab.used,
        .blocks = ix->blocked.count,
        .table_size = ix->table.mask + 1,
        .text_used_bytes = (uint64_t)ix->texts.used_units * UNIT_BYTES,
        .block_used_bytes = (uint64_t)ix->blocks.used_units * UNIT_BYTES,
        .builds = ix->builds,
        .evictions = ix->evictions,
        .steps = ix->steps,
        .forms = ix->forms_long,
    };
}
