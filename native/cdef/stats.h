struct stats_conn {
    uint64_t messages_in, messages_out;
    uint64_t bytes_in, bytes_out;
    uint64_t pending;
    uint64_t active_ns;
    uint64_t subs;
    uint64_t since_ns;
    uint16_t port;
    char ip[46];
    uint64_t stuck_ns;
    char name[64];
    char lang[24], version[24];
    ...;
};
struct connmgr_gauges {
    uint64_t connections;
    uint64_t arena_chunks, arena_free;
    uint64_t output_blocks, output_free;
    uint64_t refs_waiting, refs_queued, refs_depth;
    uint64_t orders_queued, orders_depth;
    uint64_t reading_stopped;
};
struct router_gauges {
    uint64_t subscriptions;
    uint64_t subjects, subjects_max, subjects_cached;
    uint64_t matches, builds;
    uint64_t connmgrs;
    uint64_t orders_waiting[32];
};
struct dispatcher_stats { uint64_t accepted, refused, descriptors_out; };
struct dispatcher_gauges { uint64_t backlog, connections_max; };
struct stats {
    uint32_t rows;
    uint64_t high, published_ns, pid;
    uint64_t totals[96];
    uint64_t gauges[96];
    ...;
};
#define STATS_LAYOUT ...
#define STATS_TOTALS_MAX ...
#define STATS_GAUGES_MAX ...
uint64_t stats_bytes(uint32_t rows);
uint64_t stats_fingerprint(void);
void stats_format(struct stats *s, uint32_t rows);
void stats_publish(struct stats *s, const void *totals, uint64_t totals_bytes, const void *gauges,
                   uint64_t gauges_bytes);
int stats_read_conn(const struct stats *s, uint32_t row, struct stats_conn *ret_row);
