/* batch: what travels through the POSIX queues, and the rings it waits in.
 *
 * A connmgr sends batches of references ("refs") to the router, the router sends batches of
 * orders to connmgrs. One batch is one queue message of at most BATCH_BYTES.
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
 *   B5  Nobody waits inside `mq_send`. While references cannot leave, a connmgr stops
 *       reading its clients. While the ring of a connmgr is full, the router leaves
 *       references waiting: those with one recipient there, and those with several
 *       recipients anywhere. It goes on with those of the other connmgrs.
 */
#ifndef MIDAIR_BATCH_H
#define MIDAIR_BATCH_H

#include "base/api.h"
#include "shm/redo.h"

#include <mqueue.h>
#include <string.h>

/* Around every hook on the path of a message. A build without them shows what they cost
 * (python -m bench.trace; trace.h says what they are for). */
#ifdef MIDAIR_NO_TRACE
#define TRACE_IF(condition) 0
#else
#define TRACE_IF(condition) __builtin_expect((condition) != 0, 0)
#endif

#define BATCH_BYTES 8192u
#define BATCH_RING 64u          /* slots in a ring: 512 KiB */
#define BATCH_RECORD_MAX 6144u  /* a record always fits an empty batch */

API struct batch {
    uint64_t seq;      /* from 1; per ring only grows */
    uint32_t bytes;    /* with this header; valid once closed */
    uint16_t rounds;   /* see batch_rounds() */
    uint8_t from;      /* connmgr index, or 255 for the router */
    uint8_t version;
    uint64_t closed_ns; /* CLOCK_MONOTONIC, when it was closed for sending */
    uint64_t step_ns;   /* orders: when the router took up the first of its references. References:
                         * not 0 if their connmgr traces: generation << 32 | messages of its round */
    uint8_t records[BATCH_BYTES - 32];
};
_Static_assert(sizeof(struct batch) == BATCH_BYTES, "a batch is one queue message");
#define BATCH_HEAD 32u
#define BATCH_VERSION 4

/* ---- references: connmgr -> router. Records are padded to 8 bytes. ---- */
enum ref_type {
    REF_MESSAGE = 1,  /* handle; text = subject, then reply if REF_REPLY; or a run, see REF_RUN */
    REF_OPEN = 2,     /* handle = uid; text = client ip: asks for a session */
    REF_READY = 3,    /* handle = uid; text = client name: CONNECT was accepted */
    REF_CLOSE = 4,    /* handle = uid: the connection is gone */
    REF_SUBSCRIBE = 5,   /* handle = sub slot | epoch << 32; text = subject, queue group */
    REF_UNSUBSCRIBE = 6, /* handle likewise; text = 8 bytes: max (0 = now) */
    REF_PING = 7,     /* handle = uid: everything said before has been routed when PONG comes */
    REF_HOLD = 8,     /* handle = uid of a crowded consumer in slot `conn`; size = a connection that
                       * publishes to it; text = 8 bytes: the connmgr of that connection */
};
enum ref_flags {
    REF_REPLY = 2,      /* text2 is a reply subject */
    REF_NO_ECHO = 4,    /* not to the sender's own subscriptions */
    REF_NO_RESPONDERS = 8, /* tell the sender if nobody gets it */
    REF_MODE = 16,      /* REF_MESSAGE: a struct ref_mode follows the texts. REF_READY: the text
                         * is a name to be addressed by */
    REF_RUN = 32,       /* text2_len messages whose handles follow each other, of one sender to one
                         * subject, without replies; size = of all. Said at once, routed at once */
};
struct ref {
    uint8_t type;
    uint8_t flags;
    uint16_t text_len;   /* subject */
    uint16_t text2_len;  /* reply or queue group, right after the subject */
    uint16_t bytes;      /* of the whole record, padded */
    uint32_t conn;       /* slot of the connection */
    uint32_t size;       /* of the message */
    uint64_t handle;
    char text[];
};
_Static_assert(sizeof(struct ref) == 24, "frozen wire layout");

/* What headers and subject say about a message of a mode (docs/modes.md). */
enum mode {
    MODE_NONE = 0,        /* a deadline, or a subject of ours */
    MODE_SEMAPHORE = 1,
    MODE_SESSION_OPEN = 2,
    MODE_SESSION = 3,
    MODE_SESSION_END = 4,
    MODE_FANOUT = 5,
    MODE_MORE = 6,        /* of a reply: not the last one */
    MODE_BAD = 7,         /* headers that mean nothing */
};
enum mode_place { /* which subject of ours it is published to */
    PLACE_ANY = 0,
    PLACE_REPLY = 1,   /* MODE_REPLY_PREFIX and an id */
    PLACE_IPC = 2,     /* MODE_IPC_PREFIX and a name */
    PLACE_CLIENTS = 3, /* MODE_CLIENTS_SUBJECT, perhaps a dot and a name */
};
#define MODE_PREFIX "_midair."
#define MODE_REPLY_PREFIX MODE_PREFIX "r."
#define MODE_IPC_PREFIX MODE_PREFIX "ipc."
#define MODE_CLIENTS_SUBJECT MODE_PREFIX "clients"
#define MODE_ID_DIGITS 16u
#define MODE_REPLY_BYTES (sizeof MODE_REPLY_PREFIX - 1 + MODE_ID_DIGITS)

struct ref_mode {
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    uint64_t id;          /* PLACE_REPLY */
    uint8_t mode;         /* enum mode */
    uint8_t place;        /* enum mode_place */
    uint8_t pad[6];
};
_Static_assert(sizeof(struct ref_mode) == 24, "frozen wire layout");

/* ---- orders: router -> connmgr ---- */
enum order_type {
    ORDER_DELIVER = 1,  /* handle; to `count` sub slots (one: in `one`, none after) */
    ORDER_DELETE = 2,   /* handle: no recipients; nor have the count - 1 messages after it */
    ORDER_NO_RESPONDERS = 3, /* handle: 503 to sub slot `one` of the sender, then delete */
    ORDER_INFO = 4,     /* handle = uid, one = conn slot; text = what to send first */
    ORDER_PONG = 5,     /* handle = uid, one = conn slot */
    ORDER_CLOSED = 6,   /* handle = uid, one = conn slot: session and subscriptions gone */
    ORDER_UNSUBSCRIBED = 7, /* handle = sub slot | epoch << 32: no order names it again */
    ORDER_REFUSED = 8,  /* the same, because the router has no room for it; one = conn slot */
    ORDER_HOLD = 9,     /* handle = uid of a crowded consumer, its slot in subs[0]; one = conn slot of a
                         * publisher, which is not read until the consumer is no longer crowded */
    ORDER_MODE = 10,    /* handle; to sub slot `one`, with texts of its own: struct order_mode */
    ORDER_TEXT = 11,    /* to `count` sub slots, always after this; then a struct order_text of
                         * `one` bytes with its texts */
    ORDER_NAME_TAKEN = 12, /* handle = uid, one = conn slot: its name is somebody else's */
    ORDER_TRACE = 13,   /* about the orders after it (trace.h): handle = closed_ns of the references
                         * they come of, one = bytes of these, then a struct order_trace */
    ORDER_RUN = 14,     /* as ORDER_DELIVER, `one` messages whose handles follow each other; the sub
                         * slots are always after this */
};
#define ORDER_MORE 0x80 /* in type: further recipients of this message follow for this connmgr */
struct order {
    uint8_t type;    /* enum order_type, perhaps | ORDER_MORE */
    uint8_t limit;   /* touch count on the last order of a message, else 0 */
    uint16_t count;  /* recipients, or text bytes */
    uint32_t one;    /* a single recipient is here, and the record ends after 16 bytes */
    uint64_t handle;
    uint32_t subs[]; /* two or more recipients, or text */
};
_Static_assert(sizeof(struct order) == 16, "frozen wire layout");

struct order_mode { /* order.count bytes with its texts: subject, reply */
    uint64_t deadline_ns; /* not delivered after this; 0: none */
    uint16_t subject_len, reply_len; /* 0: as it was published */
    uint32_t pad;
    char text[];
};
struct order_text { /* a message of the router's own: subject, reply, headers, body */
    uint16_t subject_len, reply_len, header_len, body_len;
    char text[];
};
struct order_trace {
    uint64_t routed_ns; /* when the router took the references up */
    uint32_t source_generation, router_generation;
    uint32_t round_messages;
    uint8_t source;     /* connmgr of the references */
    uint8_t pad[3];
};
_Static_assert(sizeof(struct order_mode) == 16 && sizeof(struct order_text) == 8, "frozen wire layout");
_Static_assert(sizeof(struct order_trace) == 24, "frozen wire layout");

API static inline uint32_t batch_pad(uint32_t n) { return (n + 7) & ~7u; }

static inline uint32_t ref_bytes(uint32_t text, uint32_t text2)
{
    return (uint32_t)sizeof(struct ref) + batch_pad(text + text2);
}
static inline uint32_t ref_messages(const struct ref *r) { return r->flags & REF_RUN ? r->text2_len : 1; }
static inline const struct ref_mode *ref_mode(const struct ref *r)
{
    return (const struct ref_mode *)(r->text + batch_pad((uint32_t)r->text_len + r->text2_len));
}
static inline uint32_t order_list_bytes(uint32_t count)
{
    return (uint32_t)sizeof(struct order) + (count < 2 ? 0 : batch_pad(count * 4));
}
static inline uint32_t order_run_bytes(uint32_t count)
{
    return (uint32_t)sizeof(struct order) + batch_pad(count * 4);
}
static inline uint32_t order_bytes(const struct order *o)
{
    switch (o->type & ~ORDER_MORE) {
    case ORDER_DELIVER:
        return order_list_bytes(o->count);
    case ORDER_RUN:
        return order_run_bytes(o->count);
    case ORDER_HOLD:
        return (uint32_t)sizeof(struct order) + 8;
    case ORDER_INFO:
    case ORDER_MODE:
        return (uint32_t)sizeof(struct order) + batch_pad(o->count);
    case ORDER_TRACE:
        return (uint32_t)(sizeof(struct order) + sizeof(struct order_trace));
    case ORDER_TEXT:
        return (uint32_t)sizeof(struct order) + batch_pad(o->count * 4u) + batch_pad(o->one);
    default:
        return sizeof(struct order);
    }
}

static inline const struct order *batch_order(const struct batch *b, uint32_t at)
{
    return (const struct order *)((const char *)b + at);
}

/* Whether this order is about a message that a connmgr lets go of after it. */
static inline int order_has_message(const struct order *o)
{
    uint8_t type = o->type & (uint8_t)~ORDER_MORE;

    return type <= ORDER_NO_RESPONDERS || type == ORDER_MODE || type == ORDER_RUN;
}
/* The messages of an order that has any. */
static inline uint32_t order_messages(const struct order *o)
{
    uint8_t type = o->type & (uint8_t)~ORDER_MORE;

    return type == ORDER_RUN ? o->one : type == ORDER_DELETE ? o->count : 1;
}
/* The recipients of an ORDER_DELIVER or ORDER_RUN. */
static inline const uint32_t *order_subs(const struct order *o)
{
    return o->count == 1 && o->type != ORDER_RUN ? &o->one : o->subs;
}
static inline const struct order_text *order_text(const struct order *o)
{
    return (const struct order_text *)((const char *)o->subs + batch_pad(o->count * 4u));
}

API struct batch_ring {           /* shared, see above */
    uint64_t tail;            /* seq << 16 | bytes */
    _Atomic uint64_t sent;    /* seq of the last batch the kernel took */
    uint64_t pad[6];
    struct batch slots[BATCH_RING];
};

API struct batch_out {            /* private to the sender */
    struct batch_ring *ring;
    mqd_t queue;
    uint64_t seq;             /* of the batch being filled, with uncommitted appends */
    uint32_t bytes;
    uint32_t load;            /* the router's: what the runs in it count for beside their bytes
                               * (batch_run_load) */
    uint8_t from;
    int blocked;              /* the queue was full at the last try */
    uint64_t first_ns;        /* goes to step_ns of the batch being filled */
    uint32_t passes;          /* see batch_rounds(); since the last batch was closed */
    int more;                 /* likewise: not 0 if there is */
    int said_more;            /* what the last batch said */
    uint64_t tag;             /* the same when first_ns is 0; stays */
    uint64_t marked;          /* the router's: whose mark the batch being filled has (trace_marks.c) */
    uint64_t sends, send_bytes;
};

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

/* A batch may make its receiver write no more than one can that is full of recipients: four bytes
 * each, and each counts for two blocks of output (output.c). Of a run of small messages a recipient
 * gets frames that are gathered, in half of BATCH_GATHERED each block at least; the bodies of larger
 * ones (BATCH_COPY_MAX) are not copied, and each is written as a piece of its own. */
#define BATCH_COPY_MAX 4096u
#define BATCH_GATHERED 16384u
#define BATCH_FRAME_MORE 64u /* bytes of a frame beside subject and body, at most */
API static inline uint32_t batch_run_load(uint32_t recipients, uint32_t messages, uint32_t size_each, uint32_t subject_len)
{
    uint64_t bytes = (uint64_t)messages * (size_each + subject_len + BATCH_FRAME_MORE);

    return 4 * recipients * (size_each > BATCH_COPY_MAX ? messages : (uint32_t)(bytes / BATCH_GATHERED) + 1);
}
/* How many messages make no more than `load`; at least one. */
API static inline uint32_t batch_run_most(uint32_t load, uint32_t recipients, uint32_t size_each, uint32_t subject_len)
{
    uint32_t each = load / (4 * recipients);

    uint32_t frame = size_each + subject_len + BATCH_FRAME_MORE;

    if (each && size_each <= BATCH_COPY_MAX && frame < BATCH_GATHERED)
        return (each * BATCH_GATHERED - 1) / frame;
    return each ? each : 1;
}

static inline uint64_t batch_tail(uint64_t seq, uint32_t bytes) { return seq << 16 | bytes; }
static inline struct batch *batch_slot(struct batch_ring *r, uint64_t seq)
{
    return &r->slots[seq % BATCH_RING];
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
