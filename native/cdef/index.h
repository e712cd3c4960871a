typedef uint32_t index_sub;
struct index;
struct index_conf { uint32_t connmgrs; uint32_t subs_per_connmgr; uint32_t subjects; };
struct index_run { uint32_t connmgr; uint32_t first; uint32_t count; };
struct index_group {
    uint32_t count; uint32_t next; uint32_t queue; uint32_t reserved;
    const index_sub *subs; const uint32_t *conns;
};
struct index_match {
    uint32_t count; uint32_t run_count; uint32_t group_count; uint32_t connmgr_mask;
    const index_sub *subs; const uint32_t *conns;
    const struct index_run *runs; struct index_group *groups;
};
struct index_stats {
    uint32_t subs; uint32_t nodes; uint32_t nodes_cached; uint32_t nodes_max;
    uint32_t trie_nodes; uint32_t queues; uint32_t blocks; uint32_t table_size;
    uint64_t text_used_bytes; uint64_t block_used_bytes; uint64_t builds; uint64_t evictions;
};
#define INDEX_CONNMGRS_MAX ...
#define INDEX_SLOT_BITS ...
#define INDEX_SLOTS_MAX ...
#define INDEX_SUBJECT_MAX ...
int index_open(const struct index_conf *conf, struct index **ret_ix);
void index_close(struct index *ix);
int index_add(struct index *ix, index_sub sub, uint32_t conn, const char *subject,
              uint32_t subject_len, const char *queue, uint32_t queue_len);
int index_remove(struct index *ix, index_sub sub);
uint32_t index_group_pick(struct index_group *g);
uint64_t index_hash(const char *subject, uint32_t len);
void index_prefetch(const struct index *ix, uint64_t hash);
void index_prefetch_node(const struct index *ix, uint64_t hash);
const struct index_match *index_match(struct index *ix, const char *subject, uint32_t len,
                                      uint64_t hash);
void index_stats(const struct index *ix, struct index_stats *ret_stats);
