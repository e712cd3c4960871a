struct journal;
struct connmgr;
struct conntable;
uint64_t journal_bytes(uint32_t conns, uint32_t subs, uint32_t blocks);
uint64_t journal_hot_bytes(void);
uint64_t journal_fingerprint(void);
void journal_format(struct journal *j, uint32_t index, uint32_t conns, uint32_t subs, uint32_t blocks);
#define JOURNAL_LAYOUT ...
#define JOURNAL_BLOCK_BYTES ...
#define JOURNAL_BLOCKS_MIN ...
#define JOURNAL_NAME_MAX ...

enum conn_option { CONN_VERBOSE, CONN_PEDANTIC, CONN_NO_ECHO, CONN_HEADERS, CONN_NO_RESPONDERS, ... };
enum connmgr_event_type { EVENT_FD, EVENT_CONNECT, EVENT_REFUSED, EVENT_CLOSED, EVENT_ENDED, ... };
enum close_reason { CLOSE_CLIENT, CLOSE_READ_ERROR, CLOSE_WRITE_ERROR, CLOSE_PROTOCOL, CLOSE_STALE,
    CLOSE_SLOW_BYTES, CLOSE_SLOW_DEADLINE, CLOSE_SUBSCRIPTIONS, CLOSE_SERVER, CLOSE_RATE, CLOSE_NAME_TAKEN,
    CLOSE_REASONS, ... };
struct connmgr_event { uint32_t type; uint32_t slot; uint64_t uid; int32_t code; uint32_t len; const char *data; ...; };
struct connmgr_conf {
    uint32_t index, connmgrs;
    uint32_t max_payload, max_control_line;
    uint32_t max_subscriptions;
    uint64_t max_pending;
    uint64_t write_deadline_ns, ping_interval_ns;
    uint32_t ping_max;
    uint32_t spin_adaptive;
    uint64_t spin_ns;
    uint32_t flow_leases;
    uint64_t max_messages_s, max_bytes_s;
    uint32_t rate_closes;
    uint8_t slow[...];
    ...;
};
struct connmgr_stats {
    uint64_t messages_in, bytes_in, messages_out, bytes_out;
    uint64_t recvs, sends, turns, sleeps;
    uint64_t order_batches, ref_batches, stalls, compacted, throttled, held, dropped, repeated;
    uint64_t closed[...];
    uint64_t refused[...];
    uint64_t found_words, found_input, found_output, found_batches;
    ...;
};
int connmgr_open(const struct connmgr_conf *conf, struct journal *journal, struct conntable *table,
                 int refs_queue, int orders_queue, struct connmgr **ret_cm);
int connmgr_add_arena(struct connmgr *cm, uint32_t index, struct arena *arena);
int connmgr_load(struct connmgr *cm);
int connmgr_found(const struct connmgr *cm, uint32_t slot, uint64_t *ret_uid);
int connmgr_readopt(struct connmgr *cm, uint32_t slot, uint64_t uid, int fd);
int connmgr_start(struct connmgr *cm);
void connmgr_close(struct connmgr *cm);
int connmgr_watch(struct connmgr *cm, int fd, uint32_t tag);
void connmgr_unwatch(struct connmgr *cm, int fd);
int connmgr_turn(struct connmgr *cm, int timeout_ms);
const struct connmgr_event *connmgr_events(const struct connmgr *cm);
int connmgr_adopt(struct connmgr *cm, uint32_t slot, uint64_t uid, int fd);
int connmgr_connected(struct connmgr *cm, uint32_t slot, uint64_t uid, uint32_t options,
                      const char *name, uint32_t name_len);
int connmgr_fail(struct connmgr *cm, uint32_t slot, uint64_t uid, const char *text, uint32_t len, int reason);
void connmgr_tick(struct connmgr *cm);
const struct connmgr_stats *connmgr_get_stats(const struct connmgr *cm);
uint32_t connmgr_conn_count(const struct connmgr *cm);
uint32_t connmgr_event_count(const struct connmgr *cm);
void connmgr_forget_events(struct connmgr *cm);
uint32_t connmgr_slots(const struct connmgr *cm);
int connmgr_socket(const struct connmgr *cm, uint32_t slot, uint64_t *ret_uid);
