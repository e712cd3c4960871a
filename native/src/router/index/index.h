/* index: from a published subject to its recipients.
 *
 * Derived state of the router, in private memory: one mapping made by index_open(), of
 * which pages cost nothing until they are used; nothing is allocated later.
 *
 * Created by:   the router, empty, at start; it adds every subscription of its table.
 * Written by:   that one process, one thread. Not shared, no atomics.
 * Invariants:   what index_match() returns is what a comparison of the subject with every
 *               subscription would give, whatever is cached. Every pool is bounded by conf.
 * After a crash: gone, and rebuilt from the subscription table.
 *
 * How it works: index_core.h.
 */
#ifndef MIDAIR_INDEX_H
#define MIDAIR_INDEX_H

#include "base/api.h"
#include "base/limits.h"

#include <stdint.h>

#define INDEX_SLOT_BITS 27u
#define INDEX_SLOTS_MAX (1u << INDEX_SLOT_BITS)

/* Longest subject or queue name, in bytes. Longer ones cannot be added (-ENAMETOOLONG) and
 * match nothing: the codec refuses them before they come here. */
#define INDEX_SUBJECT_MAX 8192u

/* What a match may cost. A walk of the trie visits, at each depth, at most one node for each form: which of
 * the tokens so far are wildcards. Patterns of INDEX_FORM_FREE tokens have so few forms that they are not
 * counted. Of longer ones so many are kept, of all connections and of one: a pattern that would bring more
 * is refused (docs/decisions/0020-bounded-work.md). */
#define INDEX_FORM_FREE 8u
#define INDEX_FORMS_MAX 16384u
#define INDEX_FORMS_EACH 4096u
#define INDEX_STEPS_MAX ((2u << INDEX_FORM_FREE) - 1 + INDEX_FORMS_MAX) /* trie nodes visited by one match */

/* One connection may have a quarter of all trie nodes: those that its patterns made and that are still there,
 * whoever else uses them. A pattern that would need more is refused, so others find room for theirs. */
#define INDEX_TRIES_PART 4u

/* Work is counted in units of about 20 ns: a trie node visited is INDEX_WORK_STEP, a subscription put into a
 * result is one, and so are INDEX_WORK_LARGE of a kept one that are given back. */
#define INDEX_WORK_STEP 4u
#define INDEX_WORK_LARGE 8u
#define INDEX_LARGE 4096u /* recipients: smaller results are given back for nothing */

/* A subscription id: port number in the top 5 bits, slot in the low 27. Slots should be
 * dense per port: memory is used up to the highest slot ever used. */
API typedef uint32_t index_sub;
#define INDEX_SUB(port, slot) \
    (((uint32_t)(port) << INDEX_SLOT_BITS) | ((uint32_t)(slot) & (INDEX_SLOTS_MAX - 1)))
#define INDEX_SUB_PORT(sub) ((uint32_t)(sub) >> INDEX_SLOT_BITS)
#define INDEX_SUB_SLOT(sub) ((uint32_t)(sub) & (INDEX_SLOTS_MAX - 1))

struct index;

API struct index_conf {
    uint32_t ports;         /* 1..PORTS_MAX */
    uint32_t subs_per_port; /* 1..INDEX_SLOTS_MAX */
    uint32_t subjects;         /* distinct subscribed or recently published subjects, >= 1.
                                * Also the bound of wildcard trie nodes (twice this) and of
                                * distinct queue names. */
    uint32_t conns;            /* connections below this have shares of forms and trie nodes; 0: nobody has */
    uint64_t *work;            /* work is added up here; NULL: nowhere */
};

/* -EINVAL: a figure out of range. -ENOMEM: not enough address space. */
API int index_open(const struct index_conf *conf, struct index **ret_ix);
API void index_close(struct index *ix); /* NULL is allowed */

/* Adds a subscription; queue_len 0: plain. conn is kept and given back with each match.
 * The subject is already validated (`*` and `>` as whole tokens, `>` last).
 * 0: it is there (also when it was there already with the same subject, queue and conn).
 * Else nothing has changed:
 * -EEXIST: this id is there with another subject, queue or conn. -ENOSPC: a pool is full, its form is one
 * too many, or its connection has its share of trie nodes.
 * -EINVAL: id out of range of conf, or an empty subject. -ENAMETOOLONG. */
API int index_add(struct index *ix, index_sub sub, uint32_t conn, const char *subject,
                  uint32_t subject_len, const char *queue, uint32_t queue_len);

/* -ENOENT: it was not there (harmless). -EINVAL: id out of range of conf. O(1), plus the
 * number of tokens when it was the last one on its wildcard subject. */
API int index_remove(struct index *ix, index_sub sub);

/* While `on`, forms and shares are not bounded: what a table holds was accepted, in whatever order it is added again. */
API void index_restoring(struct index *ix, int on);

/* One queue group: exactly one of its members gets the message. */
API struct index_group {
    uint32_t count;         /* members, at least 1 */
    uint32_t next;          /* whose turn, always < count; see index_group_pick() */
    uint32_t queue;         /* number of the queue name while anyone subscribes with it */
    uint32_t reserved;
    const index_sub *subs;  /* in the order of subscription within one pattern */
    const uint32_t *conns;  /* the connection of each, same order */
};

/* Recipients of one subject. The struct and everything it points to is valid until the
 * next call of index_match(), index_add() or index_remove() on this index. */
API struct index_match {
    uint32_t count;              /* plain recipients: one per matching subscription */
    uint32_t group_count;        /* queue groups: one per name, whatever the patterns */
    const index_sub *subs;       /* port by port, ascending */
    const uint32_t *conns;       /* the connection of each, same order */
    struct index_group *groups;
};

/* The member whose turn it is; the turn passes to the next. The turn is kept across rebuilds
 * of the result, and continues per queue name where no result is kept. */
API static inline uint32_t index_group_pick(struct index_group *g)
{
    uint32_t i = g->next;

    g->next = i + 1 < g->count ? i + 1 : 0;
    return i;
}

/* The hash of a subject. Keyed at random per process, at the first index_open(): not to be
 * kept in shared memory nor sent to another process. */
API uint64_t index_hash(const char *subject, uint32_t len);

/* Two steps of fetching ahead, both optional and without effect on the result. A batch is
 * fastest as three loops over some 8 to 16 messages: hash and index_prefetch() each, then
 * index_prefetch_node() each, then index_match() each. */
API void index_prefetch(const struct index *ix, uint64_t hash);      /* the hash table's line */
API void index_prefetch_node(const struct index *ix, uint64_t hash); /* the node it leads to */

/* Never NULL, never fails: without room to cache, the result is built in scratch memory.
 * The subject is literal: `*` and `>` in it are ordinary tokens. hash = index_hash(). */
API const struct index_match *index_match(struct index *ix, const char *subject, uint32_t len,
                                          uint64_t hash);

API struct index_stats {
    uint32_t subs;             /* subscriptions present */
    uint32_t nodes;            /* subjects known: subscribed literally, or cached */
    uint32_t nodes_cached;     /* of those, only cached: evicted when room is needed */
    uint32_t nodes_max;
    uint32_t trie_nodes;       /* tokens of wildcard subscriptions, without the root */
    uint32_t queues;           /* distinct queue names */
    uint32_t blocks;           /* results kept outside their node */
    uint32_t table_size;       /* entries of the subject hash table, grows by doubling */
    uint64_t text_used_bytes;  /* pool of long subjects, tokens and queue names */
    uint64_t block_used_bytes; /* pool of results */
    uint64_t builds;           /* results built: a match that was no cache hit */
    uint64_t evictions;        /* cached subjects or results given up for room */
    uint64_t steps;            /* trie nodes visited by matches */
    uint32_t forms;            /* of patterns longer than INDEX_FORM_FREE, each beginning counted */
};
API void index_stats(const struct index *ix, struct index_stats *ret_stats);

#endif
