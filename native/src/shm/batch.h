/* batch: what travels through the POSIX queues, and the rings it waits in.
 *
 * A port sends batches of references ("refs") to the router, the router sends batches of
 * orders to ports (records.h). One batch is one queue message of at most BATCH_BYTES.
 *
 * Ring (outgoing), in the sender's segment: BATCH_RING slots, slot seq % BATCH_RING.
 *   `tail` changes by redo (with the step that appended) or when a batch is closed for sending.
 * Inbox (incoming), in the receiver's segment: one buffer that mq_receive writes into. Its page is
 *   resident (S5).
 * Invariants:
 *   B1  A batch is one queue message of at most BATCH_BYTES, a record at most
 *       BATCH_RECORD_MAX. The sequence numbers of a ring begin at 1 and grow by 1.
 *   B2  A ring is written by its sender alone. Batches after `sent` and before the one in
 *       `tail` are closed, complete and unsent. The one in `tail` is committed up to the
 *       length there; what lies behind was appended by a step that has not committed.
 *   B3  `sent` is stored after `mq_send`. After a crash everything after `sent` is sent
 *       again. The receiver drops a sequence number it has finished. A gap cannot happen;
 *       it ends the process.
 *   B4  A process receives into the inbox in its own segment, never into private memory. It
 *       clears the sequence field before the call. Found equal to done + 1 after a crash,
 *       it means: received, not finished.
 *   B5  Nobody waits inside `mq_send`. While references cannot leave, a port takes in nothing
 *       that would make more: a connmgr stops reading its clients. Openings and ends of
 *       connections are never counted for that. While the ring of a port has no room, the router
 *       leaves references to recipients there waiting, and with them the port they came from. It
 *       goes on with those of the other ports. What is kept of a ring for a port that stands
 *       still, and who waits then, is in router/still.c. Nothing is left out.
 */
#ifndef MIDAIR_BATCH_H
#define MIDAIR_BATCH_H

#include "base/api.h"
#include "shm/redo.h"

#include <mqueue.h>
#include <string.h>

#define BATCH_BYTES 8192u
#define BATCH_RING 64u          /* slots in a ring: 512 KiB */
#define BATCH_RECORD_MAX 6144u  /* a record always fits an empty batch */

API struct batch {
    uint64_t seq;      /* from 1; per ring only grows */
    uint32_t bytes;    /* with this header; valid once closed */
    uint16_t rounds;   /* see batch_rounds() */
    uint8_t from;      /* number of the port, or 255 for the router */
    uint8_t version;
    uint64_t closed_ns; /* CLOCK_MONOTONIC, when it was closed for sending */
    uint64_t trace_tag; /* references of a connmgr that traces: batch_trace_tag(); else 0 */
    uint8_t records[BATCH_BYTES - 32];
};
_Static_assert(sizeof(struct batch) == BATCH_BYTES, "a batch is one queue message");
#define BATCH_HEAD 32u
#define BATCH_VERSION 4

API static inline uint32_t batch_pad(uint32_t n) { return (n + 7) & ~7u; }

API struct batch_ring {           /* shared, see above */
    uint64_t tail;            /* seq << 16 | bytes */
    _Atomic uint64_t sent;    /* seq of the last batch the kernel took */
    uint64_t pad[6];
    struct batch slots[BATCH_RING];
};

API struct batch_out {            /* private to the sender; what an append reads is in one cache line */
    struct batch_ring *ring;
    uint64_t seq;             /* of the batch being filled, with uncommitted appends */
    uint64_t end;             /* its owner's: no batch at or past this is begun for what can wait
                               * (refer_have_room, router_room) */
    uint32_t bytes;
    uint32_t load;            /* what the messages in it count for beside the bytes of their records: the
                               * router's for the output they make (batch_run_load), a connmgr's for the
                               * router's work and the arena (refer_load) */
    uint64_t trace_tag;       /* goes into every batch that is closed */
    uint64_t marked;          /* the router's: whose mark the batch being filled has (trace_marks.c) */
    mqd_t queue;
    uint32_t passes;          /* batch_rounds() since the last batch was closed */
    uint8_t from;
    uint8_t blocked;          /* the queue was full at the last try */
    uint8_t more;             /* not 0: there is more to read, see batch_rounds() */
    uint8_t said_more;        /* what the last batch said about it */
};
_Static_assert(sizeof(struct batch_out) == 64, "one cache line");

/* How far the sender has come: passes over its readable connections that it finished since its last
 * batch, each connection giving one quantum in each; whether there was more to read; and whether its
 * round ends with this batch. */
#define BATCH_ROUND_ENDS 1u
static inline uint16_t batch_rounds(uint32_t passes, int more)
{
    return (uint16_t)((passes > 16000 ? 16000 : passes) << 2 | (more != 0) << 1);
}
static inline uint32_t batch_rounds_passes(uint16_t rounds) { return rounds >> 2; }
static inline int batch_rounds_more(uint16_t rounds) { return rounds >> 1 & 1; }

/* A connmgr that traces says which process it is, and how many messages its round brought. */
static inline uint64_t batch_trace_tag(uint32_t generation, uint32_t messages) { return (uint64_t)generation << 32 | messages; }
static inline uint32_t batch_trace_generation(uint64_t tag) { return (uint32_t)(tag >> 32); }
static inline uint32_t batch_trace_messages(uint64_t tag) { return (uint32_t)tag; }

static inline uint64_t batch_tail(uint64_t seq, uint32_t bytes) { return seq << 16 | bytes; }
static inline struct batch *batch_slot(struct batch_ring *r, uint64_t seq)
{
    return &r->slots[seq % BATCH_RING];
}

/* Batches that are closed and were not sent: none in a ring whose numbers do not fit together (B2). */
API static inline uint64_t batch_unsent(const struct batch_ring *r)
{
    uint64_t seq = r->tail >> 16, sent = atomic_load_explicit(&r->sent, memory_order_relaxed);

    return seq > sent + 1 ? seq - 1 - sent : 0;
}
/* Free batches, not counting the one being filled. */
API static inline uint32_t batch_out_room(const struct batch_out *o)
{
    return BATCH_RING - 1 - (uint32_t)(o->seq - 1 - atomic_load_explicit(&o->ring->sent, memory_order_relaxed));
}

API void batch_ring_format(struct batch_ring *r);
API void batch_out_open(struct batch_out *o, struct batch_ring *r, mqd_t queue, uint8_t from);

/* Finishes the batch being filled and starts the next (the caller made sure of room). */
void batch_out_turn(struct batch_out *o, uint64_t now_ns);

/* Space for a record of `bytes` (padded by the caller, <= BATCH_RECORD_MAX) in the batch
 * being filled, or in the next one. NULL when the ring is full: nothing changed. */
API static inline void *batch_out_append(struct batch_out *o, uint32_t bytes, uint64_t now_ns)
{
    if (o->bytes + o->load + bytes > BATCH_BYTES) {
        if (batch_out_room(o) == 0)
            return NULL;
        batch_out_turn(o, now_ns);
    }
    void *at = (char *)batch_slot(o->ring, o->seq) + o->bytes;
    o->bytes += bytes;
    return at;
}

/* Puts the appended records into the step being committed. */
API static inline void batch_out_put(struct batch_out *o, struct redo *r)
{
    uint64_t tail = batch_tail(o->seq, o->bytes);

    if (tail != o->ring->tail)
        redo_put(r, &o->ring->tail, tail);
}

/* Sends what is committed and closed, and the batch being filled as `flush` says. Nothing
 * uncommitted may be pending unless that is BATCH_CLOSED. Returns batches sent; sets o->blocked
 * when the queue is full. Negative errno on failure. */
enum batch_flush {
    BATCH_CLOSED = 0, /* not the batch being filled */
    BATCH_FILLED = 1, /* that too, if it holds anything */
    BATCH_EMPTY = 2,  /* even if not: for what it says of the round */
};
API int batch_out_send(struct batch_out *o, enum batch_flush flush, uint64_t now_ns);

API struct batch_inbox {          /* shared, receiver only */
    struct batch batch;       /* mq_receive lands here */
};

/* Receives the next batch into the inbox. 1: a batch with seq == done + 1 is there.
 * 0: the queue is empty. Duplicates (seq <= done) are dropped. -EBADMSG: a gap or a
 * malformed batch, which cannot happen while the rules above hold. */
API int batch_in_receive(struct batch_inbox *in, mqd_t queue, uint64_t done);
/* Whether a batch received before a crash lies unfinished. */
API static inline int batch_in_pending(const struct batch_inbox *in, uint64_t done)
{
    return in->batch.seq == done + 1;
}

#endif
