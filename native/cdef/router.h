struct routing;
struct router;
uint64_t routing_bytes(uint32_t connmgrs, uint32_t sessions, uint32_t subs_each);
uint64_t routing_hot_bytes(uint32_t connmgrs);
uint64_t routing_fingerprint(void);
void routing_format(struct routing *r, uint32_t connmgrs, uint32_t sessions, uint32_t subs_each);
#define ROUTING_LAYOUT ...
#define ROUTER_INFO_MAX ...
struct router_conf {
    uint32_t connmgrs;
    uint32_t subjects;
    uint32_t spin_adaptive;
    uint64_t spin_ns;
    uint32_t generation;
    char info_head[...], info_middle[64], info_tail[64];
    ...;
};
struct router_stats {
    uint64_t messages, deliveries, no_recipients, no_responders;
    uint64_t sessions_opened, sessions_closed, subscribed, unsubscribed, refused;
    uint64_t batches, blocked, turns;
    uint64_t mode_requests, mode_replies, mode_late, mode_refused, mode_expired, mode_gone;
    uint64_t statuses, names_refused;
    uint64_t found_words, found_batches;
    ...;
};
int router_open(const struct router_conf *conf, struct routing *seg, const int *refs_queues,
                const int *orders_queues, struct router **ret_rt);
void router_close(struct router *rt);
int router_start(struct router *rt);
int router_turn(struct router *rt, int timeout_ms);
const struct router_stats *router_get_stats(const struct router *rt);
