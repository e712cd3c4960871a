uint64_t handle_make(uint32_t source, uint64_t word, uint32_t entry);
uint32_t handle_source(uint64_t handle);
uint32_t handle_entry(uint64_t handle);
int ledger_complete(uint64_t word);
uint64_t ledger_limit(uint32_t limit);
uint64_t ledger_bit(uint32_t connmgr);
#define LEDGER_CONNMGRS_MAX ...
#define LEDGER_GENERATION ...
int ledger_or(void *word, uint64_t add);
