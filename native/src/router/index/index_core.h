/* index_core: what the files of the subject index share. Included by index*.c only.
 *
 * node    one per literal subject that is subscribed, or was published lately: one cache
 *         line with the subject, the list of its literal subscriptions, and the result of
 *         matching it against everything. Found through a hash table of 8-byte entries, so
 *         that a match that hits costs two cache lines.           index_node.c
 * trie    wildcard subscriptions only, one node a token; literal edges are one hash table
 *         over (parent, token), `*` and `>` edges are fields.      index_trie.c
 * result  none or one recipient: inside the node. More: a block of a pool, complete with
 *         the struct index_match that is returned. No room: scratch. index_result.c
 * form    which tokens of a pattern are wildcards; a binary trie beside the trie. What a match costs
 *         is bounded by how many there are.                         index_form.c
 * sub     one record per subscription id: links of its owner's list. index.c
 * queue   one per distinct queue name, counted.                    index_node.c
 *
 * A node's result is right while its stamp equals the sum of three counters that only grow:
 * that of all wildcard patterns that begin with a wildcard, that of those whose first token
 * is this one's and the second a wildcard, and that of those which begin with the same two
 * tokens (the latter two hashed into buckets). A change of a wildcard subscription raises
 * one counter; a change of a literal one spoils the stamp of its own node. What is stale is
 * rebuilt by the next match of that very subject, from the lists: so a hundred thousand
 * subscriptions in a row cost no rebuild, and the next message one.
 *
 * A subject without literal subscription gets a node the second time it is seen (`seen`
 * remembers the first), so that subjects that never return, as those of replies, leave
 * the cache alone; one in sixteen gets it the first time, lest those whose marks fall on
 * one another never do. Such nodes are in a ring, from which a clock hand evicts; the ring of
 * nodes that have a block is the same for blocks.
 */
#ifndef MIDAIR_INDEX_CORE_H
#define MIDAIR_INDEX_CORE_H

#include "base/subject.h"
#include "router/index/index.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define TEXT_INLINE 36u      /* longer texts live in the text pool */
#define BUCKETS 2048u        /* versions by first tokens; one more is for all */
#define STAMP_STALE UINT64_MAX
#define OWNER_TRIE (1u << 31) /* owner of a sub: a trie node, not a node */
#define TRIE_ROOT 1u          /* ids begin at 1 everywhere, 0 is none */
#define FORM_ROOT 1u
#define UNIT_BYTES 64u        /* smallest piece of a pool */
#define ORDERS 27u            /* powers of two of a unit */

/* ---- small parts: index_parts.c ---------------------------------------------------- */

/* Ids 1..max, the lowest never used or the last freed first. The first word of each
 * object is the link of the free list. */
struct slab {
    char *base;
    uint32_t stride, max, fresh, free, used;
};
uint32_t slab_take(struct slab *s); /* 0: full */
void slab_give(struct slab *s, uint32_t id);

/* A buddy allocator over units of 64 bytes: pieces join again when freed, so no size can
 * starve another for good. refs are unit number + 1. */
struct pool {
    char *base;
    uint8_t *order;          /* of the piece that starts at this unit; bit 7: free */
    uint32_t free[ORDERS];   /* first free piece of each order, as ref */
    uint32_t nonempty;       /* bit per order */
    uint32_t order_max;
    uint32_t used_units;
};
void pool_init(struct pool *p);
uint32_t pool_take(struct pool *p, uint64_t bytes); /* 0: no room */
void pool_give(struct pool *p, uint32_t ref);

static inline void *pool_at(const struct pool *p, uint32_t ref)
{
    return p->base + (uint64_t)(ref - 1) * UNIT_BYTES;
}

/* Ids in no order; each member knows its slot. The hand goes round for the clock. */
struct ring {
    uint32_t *ids;
    uint32_t count, hand;
};

/* Open addressing, linear probing, at most 5/8 full, no tombstones. Grows by doubling into
 * the other of two reserved areas, up to what the largest number of members needs. The home
 * of an entry is the low bits of its tag, so growing reads only the table. */
struct entry {
    uint32_t tag, id;
};
struct table {
    struct entry *entries, *other;
    uint32_t mask, used;
};
void table_insert(struct table *t, uint32_t tag, uint32_t id);
void table_delete(struct table *t, uint32_t tag, uint32_t id);

/* The next id with this tag at or after *pos, which moves past it; 0: no more. */
static inline uint32_t table_next(const struct table *t, uint32_t tag, uint32_t *pos)
{
    for (;;) {
        const struct entry *e = &t->entries[*pos & t->mask];

        *pos += 1;
        if (e->tag == tag || !e->id)
            return e->id;
    }
}

/* ---- objects ------------------------------------------------------------------------ */

/* The state of a node: one RESULT_, also while stale (turns are taken over from there),
 * and the bits beside it. */
enum {
    RESULT_NONE = 0,
    RESULT_ONE = 1,
    RESULT_BLOCK = 2,
    RESULT_BITS = 3,
    NODE_RECENT = 4, /* hit since the clock's hand passed */
    NODE_CACHED = 8, /* no literal sub: in the ring of what may be evicted */
};

struct node {
    uint32_t link;   /* first literal sub; of a cached node its slot in the ring */
    uint32_t result; /* RESULT_ONE: the recipient's sub id; RESULT_BLOCK: ref */
    uint32_t conn;   /* RESULT_ONE: the recipient's connection */
    uint16_t len;
    uint16_t state;
    uint64_t stamp;
    uint16_t bucket1, bucket2;
    char text[TEXT_INLINE]; /* longer: its ref in the text pool */
};
_Static_assert(sizeof(struct node) == 64, "one cache line");
_Static_assert(offsetof(struct node, text) % 4 == 0, "holds a ref");
_Static_assert(INDEX_SUBJECT_MAX <= UINT16_MAX, "len");

struct trie {
    uint32_t link; /* first sub whose pattern ends here */
    uint32_t parent, star, rest; /* rest: the child for `>` */
    uint32_t children;           /* number of literal ones */
    uint32_t form;               /* of the tokens up to here; 0 for `>`, which costs no visit */
    uint16_t len;
    uint16_t bucket;             /* the counter a change of a sub here raises */
    char text[TEXT_INLINE];
};
_Static_assert(sizeof(struct trie) == 64, "one cache line");

/* Whose pattern made a trie node, in private memory of its own: matches do not read it. */
struct trie_owner {
    uint32_t conn, life; /* the connection, and which one of those that had its number */
};

struct share { /* of one connection */
    uint32_t subs;
    uint32_t tries; /* trie nodes that its patterns made, while they are there */
    uint32_t life;  /* grows when it has no subs: what others keep of its nodes is not its next user's */
};

struct form {
    uint32_t tries;    /* trie nodes of this form; none, but for the root: it is free */
    uint32_t parent;
    uint32_t child[2]; /* by whether the next token is a wildcard */
    uint16_t depth;
    uint16_t pad;
};

struct queue {
    uint32_t refs;    /* subs that use it */
    uint32_t cursor;  /* the turn of the next result that takes over no turn */
    uint32_t carry;   /* turn taken over, if carry_build is the build at work */
    uint32_t group;   /* number in the result, if group_build is the build at work */
    uint64_t carry_build, group_build;
    uint16_t shift;   /* added to the cursor, drawn anew for each round of all members */
    uint16_t len;
    char text[TEXT_INLINE];
};

struct sub {
    uint32_t owner; /* node id, or trie id | OWNER_TRIE; 0: absent */
    uint32_t next, prev; /* position + 1; the first one's prev is the last */
    uint32_t conn;
    uint32_t queue; /* 0: plain */
    uint32_t forms; /* counted ones that came with it */
};

struct block {
    uint32_t slot; /* in the ring of blocks */
    uint32_t pad;
    struct index_match match;
};

struct token {
    uint32_t start, end; /* end: its dot, or the subject's length */
    uint64_t hash;
};

struct visit {
    uint32_t trie, depth;
};

struct index {
    /* What every match reads. */
    struct table table; /* subject -> node */
    struct node *nodes; /* the bases of the slabs; object 0 is unused everywhere */
    struct pool texts, blocks;
    uint64_t versions[BUCKETS + 1]; /* the last is for all */
    struct {
        struct index_match match;
        index_sub sub;
        uint32_t conn;
    } one; /* the scratch of a single recipient; pointers set at open */
    struct index_match none;
    /* Changes and builds. */
    struct slab node_slab, trie_slab, queue_slab, form_slab;
    struct table edges, queue_table;
    struct trie *tries;
    struct queue *queues;
    struct form *forms;
    uint32_t *conn_forms;  /* counted ones that came with the subs of each connection */
    struct trie_owner *owners; /* by trie node */
    struct share *shares;  /* by connection */
    uint32_t tries_each;   /* trie nodes that one connection may have */
    uint32_t adding;       /* connection whose pattern is being added */
    uint32_t forms_long;   /* counted ones: of more than INDEX_FORM_FREE tokens */
    uint32_t forms_new;    /* of those: that the pattern being added has brought, */
    uint32_t forms_left;   /* and that it may still bring */
    struct sub *subs;
    struct ring cached, blocked;
    uint16_t *seen; /* part of the hash of a subject seen once */
    uint64_t seen_mask;
    uint32_t unseen; /* subjects met that `seen` did not know */
    uint32_t *sources;       /* scratch: first subs of the lists of a build */
    uint32_t *gather;        /* scratch: plain subs from the front, others from the back */
    uint32_t *group_queue;   /* scratch: queue of each group, then its count */
    uint32_t *group_count;
    struct block *scratch;   /* scratch: the result of a match that is not kept */
    struct token *tokens;    /* scratch: of the subject at work */
    struct visit *visits;    /* scratch: stack of the trie walk */
    uint32_t ports, slots, slot_shift, subs_max, subs_used;
    uint64_t builds, evictions, steps;
    uint64_t *work, unwatched; /* where work is added up */
    uint32_t conns;
    int restoring;
    uint64_t map_bytes;
    void *map;
};

/* ---- inline helpers ------------------------------------------------------------------ */

static inline uint64_t read8(const char *p)
{
    uint64_t v;

    memcpy(&v, p, 8);
    return v;
}

static inline uint32_t read4(const char *p)
{
    uint32_t v;

    memcpy(&v, p, 4);
    return v;
}

/* Overlapping words instead of a call: subjects are short. */
static inline bool text_same(const char *a, const char *b, uint32_t n)
{
    if (n >= 8) {
        const char *last = a + n - 8;
        ptrdiff_t apart = b - a;

        for (; a + 8 < last; a += 16)
            if ((read8(a) ^ read8(a + apart)) | (read8(a + 8) ^ read8(a + 8 + apart)))
                return false;
        /* What is left, 1 to 16 bytes, or 8 to 16 when nothing came before. */
        if (a < last && read8(a) != read8(a + apart))
            return false;
        return read8(last) == read8(last + apart);
    }
    if (n >= 4)
        return read4(a) == read4(b) && read4(a + n - 4) == read4(b + n - 4);
    return n == 0 || (a[0] == b[0] && a[n >> 1] == b[n >> 1] && a[n - 1] == b[n - 1]);
}

/* The same for 1 to TEXT_INLINE bytes, without a loop. */
static inline bool text_same_short(const char *a, const char *b, uint32_t n)
{
    const char *aend = a + n, *bend = b + n;

    if (n > 16) {
        uint64_t diff = (read8(a) ^ read8(b)) | (read8(a + 8) ^ read8(b + 8)) |
                        (read8(aend - 16) ^ read8(bend - 16)) |
                        (read8(aend - 8) ^ read8(bend - 8));

        if (n > 32)
            diff |= (read8(a + 16) ^ read8(b + 16)) | (read8(a + 24) ^ read8(b + 24));
        return !diff;
    }
    if (n >= 8)
        return !((read8(a) ^ read8(b)) | (read8(aend - 8) ^ read8(bend - 8)));
    if (n >= 4)
        return !((read4(a) ^ read4(b)) | (read4(aend - 4) ^ read4(bend - 4)));
    return a[0] == b[0] && a[n >> 1] == b[n >> 1] && aend[-1] == bend[-1];
}
_Static_assert(TEXT_INLINE <= 48, "32 from the front and 16 from the end");

static inline const char *text_at(const struct index *ix, const char *text, uint32_t len)
{
    return len <= TEXT_INLINE ? text : pool_at(&ix->texts, read4(text));
}

static inline uint64_t node_stamp(const struct index *ix, const struct node *n)
{
    return ix->versions[BUCKETS] + ix->versions[n->bucket1] + ix->versions[n->bucket2];
}

static inline uint32_t node_find(const struct index *ix, const char *subject, uint32_t len,
                                 uint64_t hash)
{
    uint32_t pos = (uint32_t)hash, id;

    while ((id = table_next(&ix->table, (uint32_t)hash, &pos))) {
        const struct node *n = &ix->nodes[id];

        if (n->len == len && text_same(text_at(ix, n->text, len), subject, len))
            return id;
    }
    return 0;
}

static inline const struct index_match *one_fill(struct index *ix, index_sub sub, uint32_t conn)
{
    ix->one.sub = sub;
    ix->one.conn = conn;
    return &ix->one.match;
}

/* The result a fresh node holds. */
static inline const struct index_match *result_of(struct index *ix, struct node *n)
{
    if ((n->state & RESULT_BITS) == RESULT_ONE)
        return one_fill(ix, n->result, n->conn);
    if ((n->state & RESULT_BITS) == RESULT_NONE)
        return &ix->none;
    const struct index_match *match = &((struct block *)pool_at(&ix->blocks, n->result))->match;

    if (__builtin_expect(match->count > INDEX_LARGE, 0)) /* whoever asked goes through all of it */
        *ix->work += match->count / INDEX_WORK_LARGE;
    return match;
}

/* Where the first dot of a word is, times 8 plus 7, as a bit; 0: there is none. Only bits
 * above the first one may be wrong. */
static inline uint64_t dot_bits(uint64_t word)
{
    uint64_t x = word ^ 0x2e2e2e2e2e2e2e2eu;

    return (x - 0x0101010101010101u) & ~x & 0x8080808080808080u;
}
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest");

/* The token of the subject that starts at `start`, without its hash. Eight bytes a step;
 * the last step shifts the subject's last word, so that nothing beyond it is read. */
static inline struct token token_at(const char *subject, uint32_t len, uint32_t start)
{
    struct token t = {.start = start, .end = start};
    uint64_t bits = 0;

    while (t.end + 8 <= len && !(bits = dot_bits(read8(subject + t.end))))
        t.end += 8;
    if (!bits && t.end < len && len >= 8)
        bits = dot_bits(read8(subject + len - 8) >> 8 * (t.end + 8 - len));
    if (bits)
        t.end += (uint32_t)__builtin_ctzll(bits) / 8;
    else if (len >= 8)
        t.end = len;
    else
        while (t.end < len && subject[t.end] != SUBJECT_DOT)
            t.end++;
    return t;
}

static inline uint16_t bucket_first(uint64_t hash)
{
    return (uint16_t)(hash & (BUCKETS - 1));
}

static inline uint16_t bucket_second(uint64_t hash1, uint64_t hash2)
{
    return (uint16_t)((hash1 * 31 + hash2) >> 32 & (BUCKETS - 1));
}

/* ---- between the files --------------------------------------------------------------- */

/* index_node.c. text_put: false when the text pool is full even of what cannot be evicted. */
bool text_put(struct index *ix, char *text, const char *s, uint32_t len);
void text_drop(struct index *ix, const char *text, uint32_t len);
uint32_t node_new(struct index *ix, const char *subject, uint32_t len, uint64_t hash);
void node_cache(struct index *ix, uint32_t id);   /* no literal sub: into the ring */
void node_uncache(struct index *ix, uint32_t id); /* out of the ring */
void node_free(struct index *ix, uint32_t id);
uint32_t queue_find(const struct index *ix, const char *name, uint32_t len);
uint32_t queue_take(struct index *ix, const char *name, uint32_t len); /* 0: no room */
void queue_drop(struct index *ix, uint32_t id);

/* index_trie.c */
bool trie_wild(const char *subject, uint32_t len);
uint32_t trie_find(const struct index *ix, const char *pattern, uint32_t len);
uint32_t trie_insert(struct index *ix, const char *pattern, uint32_t len); /* 0: no room */
void trie_prune(struct index *ix, uint32_t id);
uint32_t trie_collect(struct index *ix, const char *subject, uint32_t len, uint32_t count);

/* index_form.c. form_take: the form with one token more; 0: it would be one too many. */
uint32_t form_take(struct index *ix, uint32_t parent, bool wild);
void form_give(struct index *ix, uint32_t id); /* of a trie node that goes; 0 is allowed */

/* index_result.c. Both use the first `count` of ix->sources. */
const struct index_match *result_scratch(struct index *ix, uint32_t count);
const struct index_match *result_keep(struct index *ix, uint32_t id, uint32_t count);
void result_drop(struct index *ix, struct node *n);

#endif
