#define CONNTABLE_LAYOUT ...
#define CONNTABLE_CONNMGRS_MAX ...
enum conn_state { CONN_FREE, CONN_ASSIGNED, CONN_ACTIVE, CONN_CLOSED, ... };
struct conntable_slot {
    uint32_t connmgr;
    uint64_t uid;
    uint64_t accepted_ns;
    uint16_t listener;
    uint16_t port;
    char ip[46];
    uint64_t cookie;
    ...;
};
struct conntable {
    uint32_t capacity;
    struct conntable_slot slots[];
    ...;
};
struct conntable_free { uint32_t count; ...; };
uint64_t conntable_bytes(uint32_t capacity);
uint64_t conntable_fingerprint(void);
void conntable_format(struct conntable *t, uint32_t capacity);
struct conntable_free *conntable_free_new(uint32_t capacity);
void conntable_free_delete(struct conntable_free *f);
uint32_t conntable_reap(struct conntable *t, struct conntable_free *f);
int conntable_assign(struct conntable *t, struct conntable_free *f, uint32_t connmgr,
                     uint16_t listener, const char *ip, uint16_t port, uint64_t accepted_ns,
                     uint64_t cookie, uint32_t *ret_slot, uint64_t *ret_uid);
void conntable_unassign(struct conntable *t, struct conntable_free *f, uint32_t slot);
uint32_t conntable_list(const struct conntable *t, uint32_t connmgr, uint32_t room, uint32_t *ret_slots);
void conntable_count(const struct conntable *t, uint32_t ret_counts[]);
void conntable_set_state(struct conntable *t, uint32_t slot, uint32_t state);
