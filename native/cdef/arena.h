struct arena;
struct arena_pool { struct arena *arena; uint32_t free_count; uint32_t *free; uint32_t *holds; ...; };
uint64_t arena_bytes(uint32_t chunk_count);
uint64_t arena_fingerprint(void);
void arena_format(struct arena *a, uint32_t owner, uint32_t chunk_count);
void arena_census(const struct arena *a, uint64_t *ret_live, uint64_t *ret_busy_chunks);
#define ARENA_LAYOUT ...
#define ARENA_CHUNK_BYTES ...
#define ARENA_CHUNKS_MIN ...
#define ARENA_CHUNKS_MAX ...
#define ARENA_CHUNK_MESSAGES ...
#define ARENA_NONE ...
int arena_pool_open(struct arena_pool *p, struct arena *a);
void arena_pool_close(struct arena_pool *p);
uint32_t arena_pool_recover(struct arena_pool *p);
void arena_hold(struct arena_pool *p, uint32_t chunk);
void arena_unhold(struct arena_pool *p, uint32_t chunk);
uint32_t arena_take(struct arena_pool *p);
uint32_t arena_available(struct arena_pool *p);
void arena_close(struct arena_pool *p, uint32_t chunk);
uint64_t *arena_messages(struct arena *a, uint32_t chunk);
uint32_t arena_extend(struct arena_pool *p, uint32_t last);
uint64_t arena_begin(struct arena *a, uint32_t chunk, uint32_t n);
int arena_relinquish(struct arena *a, struct arena_pool *pool, uint64_t handle, uint64_t add, int redo);
void arena_sweep(struct arena_pool *p, uint32_t count);
void *arena_word(struct arena *a, uint64_t handle);
