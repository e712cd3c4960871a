/* trace: one record for each delivery: where its time went.
 *
 *   struct trace_ring | records | subjects       one segment per connmgr
 *   struct trace_control                         one segment per instance
 *
 * Created by:   the ring by connmgr n under its lease; the control segment by the first that needs it.
 * Written by:   the ring by connmgr n alone. The control segment by the tracer alone: what is to be
 *               traced, and how far it has read each ring. Connmgrs map it read-only, and the tracer
 *               maps the rings read-only.
 * Invariants:   records numbered tail <= n < head are whole; head - tail <= capacity. `head` is
 *               stored after the record. A ring that is full drops the record and counts it: nobody
 *               ever waits for the tracer. `epoch` tells a ring from one made later under its name;
 *               a tail that names another epoch means that nothing was read.
 * After a crash: of the connmgr, records of deliveries on their way are missing: their numbers
 *               were given out (`sequence`), so a gap shows them. Of the tracer, the tail is where it
 *               was. Nothing here is needed to recover, and there are no commit points.
 *
 * The way of the times: `received_ns` is in the arena entry. A connmgr that traces tags its batches
 * of references (trace_tag) with its generation; for each tagged batch the
 * router puts a mark (ORDER_TRACE) before the orders that come of it, in every batch of orders they
 * are in: when the references were closed, how many bytes, and when it took them up. The rest is in
 * the head of the batch of orders. So every time is that of the batch the message was in, exactly.
 */
#ifndef MIDAIR_TRACE_H
#define MIDAIR_TRACE_H

#include "base/api.h"
#include "base/limits.h"
#include "shm/ledger.h"
#include "shm/segment.h"

#define TRACE_LAYOUT 1
#define TRACE_SUBJECTS 16384u  /* slots of the ring of subjects */
#define TRACE_SUBJECT_MAX 116u /* bytes of a subject that are kept */
#define TRACE_SEEN 4096u       /* subjects remembered as written */
#define TRACE_CONTEXTS 4096u   /* batches whose times are remembered for deliveries that wait */
#define TRACE_FLIGHTS 65536u   /* deliveries that wait for the kernel to take their last byte */
#define TRACE_HEADER "Midair-Intended"
#define TRACE_HEADER_SEARCHED 1024u

API struct trace_record { /* all fields: the connmgr that delivered it */
    uint64_t sequence;
    uint64_t message; /* handle */
    uint64_t source_uid, destination_uid;
    uint64_t subject_hash;
    uint64_t intended_ns, received_ns, queued_ns, routed_ns, instructed_ns, written_ns;
    uint32_t recording; /* number, of trace_control.word */
    uint32_t body_size;
    uint32_t round_messages;
    uint32_t source_generation, router_generation, destination_generation;
    uint16_t ref_batch_bytes, order_batch_bytes;
    uint32_t reserved[3];
};
_Static_assert(sizeof(struct trace_record) == 128, "two cache lines");

API struct trace_subject {
    uint64_t hash;
    uint32_t len; /* of the subject; its first TRACE_SUBJECT_MAX bytes are kept */
    char text[TRACE_SUBJECT_MAX];
};
_Static_assert(sizeof(struct trace_subject) == 128, "two cache lines");

API struct trace_ring {
    struct segment_header header;
    uint32_t index, capacity; /* creator, once; capacity is a power of two */
    uint64_t epoch;           /* creator, once */
    uint64_t reserved[6];
    _Atomic uint64_t head;          /* records written */
    _Atomic uint64_t subjects_head;
    uint64_t sequence;      /* records begun: the next number */
    uint64_t dropped;       /* begun, and left out because the ring or the pool was full, or they waited too long */
    uint64_t undelivered;   /* begun, and the connection ended first */
    uint64_t unmarked;      /* not begun: the router had not said when it took the message up */
    uint64_t flights;       /* begun and not written yet: as of the last turn */
    _Atomic uint64_t word;  /* trace_control.word as it was obeyed in the last turn */
    uint8_t pad[4096 - 192];
};
_Static_assert(sizeof(struct trace_ring) == 4096, "records begin on a page");

struct trace_tail { /* how far the tracer has read a ring */
    _Atomic uint64_t epoch, records, subjects;
    uint64_t reserved[5];
};

API struct trace_control {
    struct segment_header header;
    _Atomic uint64_t word; /* recording << 32 | every: 1 in `every` messages is traced; 0: none is */
    uint64_t reserved[7];
    struct trace_tail tails[PORTS_MAX];
};

struct trace_flight { /* private: deliveries in a row that the kernel has not taken whole; one, or of a run */
    uint64_t end; /* of the bytes of the first in the stream of its connection */
    uint64_t message, source_uid, subject_hash; /* message: of the first; the others follow it */
    uint64_t intended_ns, received_ns;
    uint32_t sequence; /* of the first; its low half */
    uint32_t context;  /* number of the context */
    uint32_t body_size;
    uint32_t next;     /* flight + 1 */
    uint32_t count;    /* deliveries; more than one if every message is traced */
    uint32_t bytes;    /* from the end of one to the end of the next */
};

struct trace_context { /* private: what all messages of one batch of references have in common */
    uint32_t number; /* of the context: who remembers another one comes too late */
    uint32_t recording;
    uint64_t queued_ns, routed_ns, instructed_ns;
    uint32_t bytes, order_bytes, round_messages, source_generation, router_generation;
};

struct trace { /* private to the connmgr */
    struct trace_ring *ring; /* NULL: not opened */
    const struct trace_control *control;
    uint64_t word;
    uint32_t on;      /* 1 in `on` messages is traced; 0: none is */
    uint32_t flights; /* deliveries waiting */
    uint32_t generation;
    uint32_t pool_used, pool_free; /* pool_free: flight + 1 */
    struct trace_flight *pool;
    uint32_t *first, *last; /* per connection: flight + 1 */
    uint64_t *seen;         /* hashes of subjects that were written */
    uint32_t room; /* records that can be begun and will have a place, at least */
    uint64_t subjects_tail; /* as last looked up */
    uint8_t last_subject[64];
    uint32_t last_len; /* 0: none */
    uint64_t last_hash;
    uint64_t instructed_ns; /* of the batch of orders being processed */
    uint32_t batch_bytes;
    uint32_t batch_first;   /* number of the first context of that batch */
    uint64_t salt;          /* of the choice of messages: 0, or of a flow, whose handles are used again at once */
    uint32_t contexts_made; /* number of the last context */
    uint64_t round_from;    /* messages_in when the round began */
    uint32_t about[PORTS_MAX]; /* number of the context of a connmgr's messages */
    struct trace_context contexts[TRACE_CONTEXTS];
};

struct connmgr;
struct conn;
struct arena_entry;
struct batch;
struct order_trace;

API uint64_t trace_ring_bytes(uint32_t capacity);
API uint64_t trace_fingerprint(void);
API void trace_ring_format(struct trace_ring *r, uint32_t index, uint32_t capacity, uint64_t epoch);
API void trace_control_format(struct trace_control *c);
API static inline struct trace_record *trace_records(const struct trace_ring *r)
{
    return (struct trace_record *)((char *)r + sizeof(*r));
}
API static inline struct trace_subject *trace_subjects(const struct trace_ring *r)
{
    return (struct trace_subject *)(trace_records(r) + r->capacity);
}
/* For the tracer: what is to be traced; how far it has read the ring of connmgr `index`. */
API void trace_control_set(struct trace_control *c, uint32_t recording, uint32_t every);
API void trace_control_set_tail(struct trace_control *c, uint32_t index, uint64_t epoch, uint64_t records,
                                uint64_t subjects);

API uint64_t trace_ring_head(const struct trace_ring *r);
API uint64_t trace_ring_subjects_head(const struct trace_ring *r);
API uint64_t trace_ring_word(const struct trace_ring *r);
API uint64_t trace_control_word(const struct trace_control *c);
/* How far that ring was read: 0 if it was another one of the same name. */
API void trace_control_tail(const struct trace_control *c, uint32_t index, uint64_t epoch,
                            uint64_t *ret_records, uint64_t *ret_subjects);

/* -ENOMEM. Between opening a connmgr and its first turn; `generation` is at least 1. */
API int trace_open(struct connmgr *cm, struct trace_ring *ring, const struct trace_control *control,
                   uint32_t generation);

/* ---- between the C files ---- */
void trace_switch(struct connmgr *cm, uint64_t word);
void trace_batch(struct connmgr *cm, const struct batch *b);
void trace_mark(struct connmgr *cm, const struct order_trace *m);
void trace_flow(struct connmgr *cm, uint32_t messages); /* that the router is not asked about (decide.c) */
struct trace_part { /* deliveries of messages in a row, alike but for their bodies */
    uint64_t handle; /* of the first */
    uint64_t end;    /* of its bytes in the stream of its connection */
    uint32_t count;
    uint32_t bytes;  /* of each */
};
void trace_deliver(struct connmgr *cm, const struct conn *c, struct trace_part part);
void trace_sent(struct connmgr *cm, const struct conn *c);
void trace_forget(struct connmgr *cm, const struct conn *c);
void trace_round(struct connmgr *cm);

#endif
