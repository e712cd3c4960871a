struct fsck;
enum fsck_code { FSCK_HEADER, FSCK_UNFINISHED, FSCK_GEOMETRY, FSCK_HIGH_MARK, FSCK_REDO_WAITS,
    FSCK_REDO_BAD, FSCK_RING_TAIL, FSCK_RING_SENT, FSCK_RING_SPAN, FSCK_SEQ_AHEAD, FSCK_SEQ_BEHIND,
    FSCK_SEQ_LOST, FSCK_BATCH_HEADER, FSCK_RECORD, FSCK_INBOX_GAP, FSCK_INBOX_BATCH, FSCK_IN_AT,
    FSCK_IN_PROGRESS, FSCK_APPLIED, FSCK_APPLIED_INBOX, FSCK_OPEN_HANDLE, FSCK_HANDLE, FSCK_REF_DEAD,
    FSCK_ORDER_DEAD, FSCK_ORDER_SUB, FSCK_TABLE_STATE, FSCK_TABLE_CONNMGR, FSCK_TABLE_UID,
    FSCK_UID_TWICE, FSCK_TABLE_ALONE, FSCK_TABLE_ASSIGNED, FSCK_TABLE_CLOSED, FSCK_CONN_PHASE,
    FSCK_CONN_TABLE, FSCK_CONN_BUFFER, FSCK_CONN_SESSION, FSCK_OUT_LINK, FSCK_OUT_CYCLE,
    FSCK_OUT_SHARED, FSCK_OUT_POS, FSCK_OUT_BLOCK, FSCK_OUT_OVERLAP, FSCK_BLOCK_SHARED, FSCK_OUT_BODY,
    FSCK_OUT_BODY_RANGE, FSCK_OUT_LEFT, FSCK_SUB_FLAGS, FSCK_SUB_CONN, FSCK_SUB_SID, FSCK_SUB_TWICE,
    FSCK_SUB_UNROUTED, FSCK_ROUTED_FREE, FSCK_ROUTED_SESSION, FSCK_ROUTED_TEXT, FSCK_CELL_SHARED,
    FSCK_SESSION_ALONE, FSCK_REQUEST_SESSION,
    FSCK_REQUEST_ALONE, FSCK_LEG_REQUEST, FSCK_LEG_SESSION, FSCK_NAME_SESSION, FSCK_NAME_TWICE,
    FSCK_CHUNK_STATE, FSCK_CHUNK_MESSAGES, FSCK_CHAIN_LINK, FSCK_CHAIN_CYCLE,
    FSCK_CHAIN_SHARED, FSCK_CHAIN_ORPHAN, FSCK_FREE_LIVE, FSCK_WORD, FSCK_ENTRY, FSCK_LEAK,
    FSCK_UNKNOWN, FSCK_CODES, ... };
struct fsck_finding { uint32_t code, kind, index; uint64_t where[6]; ...; };
struct fsck_counts {
    uint64_t messages, chunks, connections, sessions, subscriptions, pending_bytes;
    uint64_t in_flight, unsent, unreadable, dropped;
    ...;
};
int fsck_open(int dead, struct fsck **ret_f);
void fsck_close(struct fsck *f);
int fsck_add(struct fsck *f, uint32_t kind, uint32_t index, void *base, uint64_t bytes);
void fsck_add_queue(struct fsck *f, int orders, uint32_t index, uint32_t depth, uint32_t messages);
uint64_t fsck_finish_steps(struct fsck *f);
int fsck_run(struct fsck *f);
const struct fsck_finding *fsck_found(const struct fsck *f);
const struct fsck_counts *fsck_get_counts(const struct fsck *f);
uint32_t fsck_free_leaks(struct fsck *f);
uint32_t fsck_free_slots(struct fsck *f);
