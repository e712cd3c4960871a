struct redo_pair { uint64_t offset; uint64_t value; };
struct redo_log { struct redo_pair pairs[...]; ...; };
struct redo { struct redo_log *log; char *base; char *arena; uint32_t count; uint64_t commits; ...; };
void redo_put(struct redo *r, uint64_t *word, uint64_t value);
void redo_put_arena(struct redo *r, uint64_t *word, uint64_t value);
void redo_commit(struct redo *r);
uint32_t redo_recover(struct redo *r);
#define REDO_PAIRS_MAX ...
#define REDO_PAIRS_SOFT ...
