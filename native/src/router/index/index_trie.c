/* index_trie: the wildcard subscriptions of the subject index, a token a node.
 *
 * Created by:   index_open(), with a root that has no token.
 * Written by:   index_add() and index_remove(), in the index's one thread.
 * Invariants:   every node but the root has subs or children; a literal child is in the edge
 *               table under (parent, token), the children for `*` and `>` are fields of the
 *               parent and have no text. `*` and `>` are never literal children.
 * After a crash: gone with the process. See index_core.h.
 */
#include "router/index/index_core.h"
#include "base/hash.h"

static inline uint32_t edge_tag(uint32_t parent, uint64_t hash)
{
    uint64_t x = (hash ^ parent * HASH_SPREAD) * 0xd6e8feb86659fd93u;

    return (uint32_t)(x >> 32);
}

static inline uint32_t edge_find(const struct index *ix, uint32_t parent, const char *text,
                                 uint32_t len, uint64_t hash)
{
    uint32_t tag = edge_tag(parent, hash), pos = tag, id;

    while ((id = table_next(&ix->edges, tag, &pos))) {
        const struct trie *t = &ix->tries[id];

        if (t->parent == parent && t->len == len &&
            text_same(text_at(ix, t->text, len), text, len))
            return id;
    }
    return 0;
}

static inline bool token_is(const char *pattern, struct token t, char c)
{
    return t.end - t.start == 1 && pattern[t.start] == c;
}

bool trie_wild(const char *subject, uint32_t len)
{
    struct token t = {.end = (uint32_t)-1};

    do {
        t = token_at(subject, len, t.end + 1);
        if (token_is(subject, t, SUBJECT_ANY) || (t.end == len && token_is(subject, t, SUBJECT_REST)))
            return true;
    } while (t.end < len);
    return false;
}

static uint32_t child_find(const struct index *ix, uint32_t parent, const char *pattern,
                           uint32_t len, struct token t)
{
    if (token_is(pattern, t, SUBJECT_ANY))
        return ix->tries[parent].star;
    if (t.end == len && token_is(pattern, t, SUBJECT_REST))
        return ix->tries[parent].rest;
    return edge_find(ix, parent, pattern + t.start, t.end - t.start,
                     index_hash(pattern + t.start, t.end - t.start));
}

uint32_t trie_find(const struct index *ix, const char *pattern, uint32_t len)
{
    struct token t = {.end = (uint32_t)-1};
    uint32_t id = TRIE_ROOT;

    do {
        t = token_at(pattern, len, t.end + 1);
        id = child_find(ix, id, pattern, len, t);
    } while (id && t.end < len);
    return id;
}

/* The counter for what begins with the parent's tokens and this literal one. Patterns that
 * begin with a wildcard share the one for all; two literal tokens are told apart, more are
 * not. */
static uint16_t child_bucket(const struct index *ix, uint32_t parent, uint64_t hash)
{
    const struct trie *p = &ix->tries[parent];

    if (parent == TRIE_ROOT)
        return bucket_first(hash);
    if (p->parent == TRIE_ROOT && p->bucket != BUCKETS)
        return bucket_second(index_hash(text_at(ix, p->text, p->len), p->len), hash);
    return p->bucket;
}

/* A node, charged to the connection whose pattern is being added until the node goes. 0: the slab is full, or the
 * connection has its share. */
static uint32_t trie_take(struct index *ix)
{
    struct share *share = ix->adding < ix->conns ? &ix->shares[ix->adding] : NULL;
    uint32_t id;

    if (share && !ix->restoring && share->tries >= ix->tries_each)
        return 0;
    id = slab_take(&ix->trie_slab);
    if (id && share) {
        share->tries++;
        ix->owners[id] = (struct trie_owner){ix->adding, share->life};
    } else if (id) {
        ix->owners[id] = (struct trie_owner){.conn = UINT32_MAX};
    }
    return id;
}

static void trie_give(struct index *ix, uint32_t id)
{
    struct trie_owner owner = ix->owners[id];

    if (owner.conn < ix->conns && ix->shares[owner.conn].life == owner.life)
        ix->shares[owner.conn].tries--;
    slab_give(&ix->trie_slab, id);
}

static uint32_t child_new(struct index *ix, uint32_t parent, const char *pattern, uint32_t len,
                          struct token token)
{
    uint32_t size = token.end - token.start, id = trie_take(ix);
    struct trie *t = &ix->tries[id];
    uint64_t hash;

    if (!id)
        return 0;
    t->parent = parent;
    t->bucket = ix->tries[parent].bucket;
    if (token.end == len && token_is(pattern, token, SUBJECT_REST)) {
        ix->tries[parent].rest = id;
        return id;
    }
    t->form = form_take(ix, ix->tries[parent].form, token_is(pattern, token, SUBJECT_ANY));
    if (!t->form) {
        trie_give(ix, id);
        return 0;
    }
    if (token_is(pattern, token, SUBJECT_ANY)) {
        ix->tries[parent].star = id;
        return id;
    }
    if (!text_put(ix, t->text, pattern + token.start, size)) {
        form_give(ix, t->form);
        trie_give(ix, id);
        return 0;
    }
    hash = index_hash(pattern + token.start, size);
    t->len = (uint16_t)size;
    t->bucket = child_bucket(ix, parent, hash);
    ix->tries[parent].children++;
    table_insert(&ix->edges, edge_tag(parent, hash), id);
    return id;
}

uint32_t trie_insert(struct index *ix, const char *pattern, uint32_t len)
{
    struct token t = {.end = (uint32_t)-1};
    uint32_t id = TRIE_ROOT, child;

    do {
        t = token_at(pattern, len, t.end + 1);
        child = child_find(ix, id, pattern, len, t);
        if (!child)
            child = child_new(ix, id, pattern, len, t);
        if (!child) {
            trie_prune(ix, id); /* nothing was added below: the new ones go again */
            return 0;
        }
        id = child;
    } while (t.end < len);
    return id;
}

void trie_prune(struct index *ix, uint32_t id)
{
    while (id != TRIE_ROOT) {
        struct trie *t = &ix->tries[id], *p = &ix->tries[t->parent];
        uint32_t parent = t->parent;

        if (t->link || t->star || t->rest || t->children)
            return;
        if (p->star == id) {
            p->star = 0;
        } else if (p->rest == id) {
            p->rest = 0;
        } else {
            p->children--;
            table_delete(&ix->edges, edge_tag(parent, index_hash(text_at(ix, t->text, t->len), t->len)), id);
            text_drop(ix, t->text, t->len);
        }
        form_give(ix, t->form);
        trie_give(ix, id);
        id = parent;
    }
}

/* `a..b`, `.a`, `a.`: such a subject can be published, but no pattern means it. */
static int has_empty_token(const char *subject, uint32_t len)
{
    return len == 0 || subject[0] == SUBJECT_DOT || subject[len - 1] == SUBJECT_DOT ||
           memmem(subject, len, "..", 2) != NULL;
}

static uint32_t walked(struct index *ix, uint32_t steps, uint32_t count)
{
    ix->steps += steps;
    *ix->work += (uint64_t)steps * INDEX_WORK_STEP;
    return count;
}

/* Adds the lists of all patterns that match to ix->sources and returns the new count. A
 * depth-first walk; each step leaves at most one node behind on the stack, at a depth that
 * is on no other, so the stack is bounded by the number of tokens. Tokens are found, and
 * hashed, when the walk first needs them: a pattern `a.>` costs one token. Visits at most INDEX_STEPS_MAX nodes. */
uint32_t trie_collect(struct index *ix, const char *subject, uint32_t len, uint32_t count)
{
    if (has_empty_token(subject, len))
        return count;
    const struct trie *tries = ix->tries;
    struct visit *visits = ix->visits;
    uint32_t *sources = ix->sources;
    uint32_t known = 0, top = 0, id = TRIE_ROOT, depth = 0, steps = 0;

    /* At each visit there is a token at this depth: nodes are visited only if one remains. */
    for (;;) {
        const struct trie *t = &tries[id];
        struct token *token = &ix->tokens[depth];
        uint32_t literal = 0;

        steps++;
        if (t->rest)
            sources[count++] = tries[t->rest].link;
        if (t->star | t->children) {
            if (depth == known) {
                *token = token_at(subject, len, known ? token[-1].end + 1 : 0);
                known++;
            }
            if (t->children) {
                const char *text = subject + token->start;
                uint32_t size = token->end - token->start;

                if (!token->hash)
                    token->hash = index_hash(text, size);
                literal = edge_find(ix, id, text, size, token->hash);
            }
            if (token->end == len) {
                if (literal && tries[literal].link)
                    sources[count++] = tries[literal].link;
                if (t->star && tries[t->star].link)
                    sources[count++] = tries[t->star].link;
            } else if (literal) {
                depth++;
                if (t->star)
                    visits[top++] = (struct visit){t->star, depth};
                id = literal;
                continue;
            } else if (t->star) {
                depth++;
                id = t->star;
                continue;
            }
        }
        if (!top)
            return walked(ix, steps, count);
        top--;
        id = visits[top].trie;
        depth = visits[top].depth;
    }
}
