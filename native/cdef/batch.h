struct redo;
struct batch {
    uint64_t seq;
    uint32_t bytes;
    uint16_t rounds;
    uint8_t from;
    uint8_t version;
    uint64_t closed_ns;
    uint64_t step_ns;
    uint8_t records[...];
    ...;
};
struct batch_ring { uint64_t tail; struct batch slots[...]; ...; };
struct batch_out {
    struct batch_ring *ring;
    uint64_t seq;
    uint32_t bytes;
    int blocked;
    uint64_t sends, send_bytes;
    ...;
};
struct batch_inbox { struct batch batch; ...; };
uint32_t batch_pad(uint32_t n);
uint32_t batch_run_load(uint32_t recipients, uint32_t messages, uint32_t size_each, uint32_t subject_len);
uint32_t batch_run_most(uint32_t load, uint32_t recipients, uint32_t size_each, uint32_t subject_len);
void batch_ring_format(struct batch_ring *r);
void batch_out_open(struct batch_out *o, struct batch_ring *r, int queue, uint8_t from);
uint32_t batch_out_room(const struct batch_out *o);
void *batch_out_append(struct batch_out *o, uint32_t bytes, uint64_t now_ns);
void batch_out_put(struct batch_out *o, struct redo *r);
int batch_out_send(struct batch_out *o, int flush, uint64_t now_ns);
int batch_in_receive(struct batch_inbox *in, int queue, uint64_t done);
int batch_in_pending(const struct batch_inbox *in, uint64_t done);
#define BATCH_BYTES ...
#define BATCH_RING ...
#define BATCH_HEAD ...
#define BATCH_RECORD_MAX ...
#define BATCH_VERSION ...
#define BATCH_ROUND_ENDS ...
