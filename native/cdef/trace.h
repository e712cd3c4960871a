struct trace_record {
    uint64_t sequence;
    uint64_t message;
    uint64_t source_uid, destination_uid;
    uint64_t subject_hash;
    uint64_t intended_ns, received_ns, queued_ns, routed_ns, instructed_ns, written_ns;
    uint32_t run;
    uint32_t body_size;
    uint32_t round_messages;
    uint32_t source_generation, router_generation, destination_generation;
    uint16_t ref_batch_bytes, order_batch_bytes;
    ...;
};
struct trace_subject { uint64_t hash; uint32_t len; char text[116]; ...; };
struct trace_ring {
    uint32_t index, capacity;
    uint64_t epoch, sequence, dropped, undelivered, unmarked, flights;
    ...;
};
struct trace_control { ...; };
#define TRACE_LAYOUT ...
#define TRACE_SUBJECTS ...
#define TRACE_SUBJECT_MAX ...
uint64_t trace_ring_bytes(uint32_t capacity);
uint64_t trace_fingerprint(void);
void trace_ring_format(struct trace_ring *r, uint32_t index, uint32_t capacity, uint64_t epoch);
void trace_control_format(struct trace_control *c);
struct trace_record *trace_records(const struct trace_ring *r);
struct trace_subject *trace_subjects(const struct trace_ring *r);
void trace_control_set(struct trace_control *c, uint32_t run, uint32_t every);
void trace_control_read(struct trace_control *c, uint32_t index, uint64_t epoch, uint64_t records,
                        uint64_t subjects);
uint64_t trace_ring_head(const struct trace_ring *r);
uint64_t trace_ring_subjects_head(const struct trace_ring *r);
uint64_t trace_ring_word(const struct trace_ring *r);
uint64_t trace_control_word(const struct trace_control *c);
void trace_control_tail(const struct trace_control *c, uint32_t index, uint64_t epoch,
                        uint64_t *ret_records, uint64_t *ret_subjects);
int trace_open(struct connmgr *cm, struct trace_ring *ring, const struct trace_control *control,
               uint32_t generation);
