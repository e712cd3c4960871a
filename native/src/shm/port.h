/* port: what takes part in the traffic of an instance, under a number from 0 to PORTS_MAX - 1.
 *
 * A port has a bit in every ledger word, a ring of references to the router, an inbox for its orders,
 * a redo log, and perhaps an arena. It says what it wants through references, gets messages by orders
 * that name their handles, reads the bodies where they lie, and lets go of them. A connmgr is a port
 * whose recipients are clients on sockets; a port need not have any.
 *
 * struct port_log is the first part of the segment of every port; struct port, private to its process, is
 * what follows from it.
 * Created by:   the process that has the role of the port. Written by: that process alone.
 * Invariants:
 *   P1  done <= applied <= done + 1. A batch of orders is one step: what its owner makes of it is
 *       committed together with `applied`. applied == done + 1: that is so for the batch in the inbox,
 *       but some of its messages may not be let go of yet.
 *   P2  A port lets go of a message after the step that needed it last is committed: it adds its bit
 *       once no order about the message is to come (open_handle) and nothing of the port needs the
 *       body (`needed`). A step that is repeated compares the generation (L3).
 *   P3  Of each source at most one message has orders that go on in a later batch: open_handle. Orders
 *       about other messages of that source may come in between, if each is within one batch.
 * After a crash: port_recover() finishes a committed step; port_process() finishes the batch in the
 *               inbox, from its beginning or from its commit point on.
 */
#ifndef MIDAIR_PORT_H
#define MIDAIR_PORT_H

#include "base/api.h"
#include "base/limits.h"
#include "shm/arena.h"
#include "shm/batch.h"
#include "shm/records.h"

enum port_kind {
    PORT_CONNMGR = 0, /* clients on sockets */
    PORT_ALONE = 1,   /* none: what it gets is for itself */
};

API struct port_log {
    struct segment_header header;
    uint32_t index;   /* creator, once: number of the port */
    uint32_t kind;    /* creator, once: enum port_kind */
    uint64_t reserved0[7];
    uint64_t applied; /* redo: last order batch whose outputs are committed */
    uint64_t done;    /* single store "orders.done": last order batch finished */
    uint64_t reserved1[14];
    uint64_t open_handle[PORTS_MAX]; /* redo, per source: the message whose list of recipients goes on;
                                      * orders about others may come in between (P3) */
    struct redo_log redo;
    struct batch_ring refs;
    struct batch_inbox inbox;
};
_Static_assert(offsetof(struct port_log, applied) == 128, "frozen layout");

struct let_go { /* messages in a row of the batch being processed, to let go of after its commit */
    uint64_t handle; /* of the first */
    uint64_t limit;  /* of each, as ledger bits */
    uint32_t count;
};

API struct port {
    struct port_log *log;
    uint32_t index;
    struct redo redo;
    struct batch_out refs;
    mqd_t orders;
    struct arena *arenas[PORTS_MAX];     /* NULL: that port has none, or it is not known here */
    uint32_t *needed[PORTS_MAX];         /* per entry: what here needs its body beyond the batch */
    struct arena_pool pool;              /* of its own arena, if it has one */
    uint64_t my_bit;
    uint64_t open_handle[PORTS_MAX];     /* as in the log, with the uncommitted */
    int recovering;                      /* steps may be repetitions */
    struct let_go *let_go;
    uint32_t let_go_count;
};

API void port_format(struct port_log *log, uint32_t index, uint32_t kind);

/* The segment of a port that has no clients: its log, then `own` bytes that are its owner's alone, at
 * port_own(). They change by the redo of the port, or past lengths that do. */
#define PORT_LAYOUT 1
API uint64_t port_hot_bytes(void); /* what must be resident: the log */
API uint64_t port_bytes(uint64_t own);
API uint64_t port_fingerprint(void);
API void port_segment_format(struct port_log *log, uint32_t index, uint64_t own);
API static inline void *port_own(struct port_log *log) { return (char *)log + page_up(sizeof(*log)); }

/* 0, or -ENOMEM. The queues are those of this port. */
API int port_open(struct port *p, struct port_log *log, int refs_queue, int orders_queue);
/* Makes the bodies of port `index` readable. Its own: redo reaches it. */
API int port_add_arena(struct port *p, uint32_t index, struct arena *arena);
/* At start: finishes a committed step, returns how many words it stored, and counts batches that were received
 * and not processed, or not sent. */
API uint32_t port_recover(struct port *p, uint64_t *ret_batches);

/* ---- references ---- */

/* Each appends one, past the committed tail; the caller has made sure of room (batch_out_room). */
/* Asks for a session in slot `conn`; asked again with the same uid it is the same one. */
API void port_refer_open(struct port *p, uint32_t conn, uint64_t uid, const char *ip, uint64_t now_ns);
/* `sub`: slot | epoch << 32. Said again it is the same subscription. `sid`: what its client calls it, REF_SID_MAX bytes
 * of that at most; it is shown to who looks, and not needed. */
API void port_refer_subscribe(struct port *p, uint32_t conn, uint64_t sub, const void *subject, uint32_t subject_len,
                              const void *queue, uint32_t queue_len, const void *sid, uint32_t sid_len, uint64_t now_ns);
API void port_refer_unsubscribe(struct port *p, uint32_t conn, uint64_t sub, uint64_t max, uint64_t now_ns);
API void port_refer_close(struct port *p, uint32_t conn, uint64_t uid, uint64_t now_ns);
/* Makes them valid, and sends them. Batches sent, or a negative errno. */
API int port_refer_commit(struct port *p, uint64_t now_ns);

/* ---- orders ---- */

/* What the owner of a port does about a batch of orders; called once for each. */
API struct port_owner {
    /* Carries the orders out, past committed lengths, and puts what makes them valid into the port's
     * redo. Says port_note() of every message that is done with. 0, or a negative errno. */
    int (*apply)(void *owner, const struct batch *b);
    /* The step is committed; its messages are still there. Not called for a repetition. */
    void (*committed)(void *owner, const struct batch *b);
    /* The messages are let go of. `again`: a predecessor applied the batch, and may have done this. */
    void (*finish)(void *owner, const struct batch *b, int again);
};
/* Whether a batch lies in the inbox, received and not finished. */
static inline int port_has_batch(const struct port *p) { return batch_in_pending(&p->log->inbox, p->log->done); }
/* Has the next batch in the inbox: 1; 0: there is none. Negative errno. */
API int port_receive(struct port *p);
/* Processes the batch in the inbox. 0, or a negative errno. */
API int port_process(struct port *p, const struct port_owner *with, void *owner);

/* The order about these `count` messages is carried out, and no further one about them comes to this port. */
static inline void port_note_some(struct port *p, const struct order *o, uint32_t count)
{
    struct let_go *l = &p->let_go[p->let_go_count];
    uint64_t limit = ledger_limit(o->limit), handle = order_handle(o);

    if (p->let_go_count && l[-1].handle + l[-1].count == handle && l[-1].limit == limit) {
        l[-1].count += count;
        return;
    }
    p->let_go_count++;
    l->handle = handle;
    l->limit = limit;
    l->count = count;
}
static inline void port_note(struct port *p, const struct order *o) { port_note_some(p, o, order_messages(o)); }
/* The recipients so far have the message of this order: more are to come (P3), or it is done with. */
static inline void port_set_open(struct port *p, uint32_t source, uint64_t handle)
{
    if (p->open_handle[source] == handle)
        return;
    p->open_handle[source] = handle;
    redo_put(&p->redo, &p->log->open_handle[source], handle);
}
static inline void port_delivered(struct port *p, const struct order *o)
{
    uint64_t handle = order_handle(o);
    uint32_t source = handle_source(handle);

    if (o->type & ORDER_MORE) {
        port_set_open(p, source, handle);
        return;
    }
    if (__builtin_expect(p->open_handle[source] == handle, 0))
        port_set_open(p, source, 0);
    port_note(p, o);
}

API struct port_delivery { /* what an order brings to a port that takes everything alike */
    uint64_t first;        /* handle of the first message */
    uint32_t messages;     /* whose handles follow each other */
    uint32_t recipients;
    const uint32_t *subs;  /* their slots */
};
/* For port_owner.apply: the delivery at *at of the batch, which moves behind it. 1; 0: there are no more.
 * The messages are let go of with the batch; those nobody gets are passed over. Negative errno. */
API int port_next(struct port *p, const struct batch *b, uint32_t *at, struct port_delivery *ret);

/* ---- bodies ----
 *
 * Who lets go, and when (P2, J4): port_process() of the messages of a batch, after its commit;
 * port_release() of one that something here still needed then, when it does no longer;
 * port_own_alone() gives the limit to messages that nobody else will hear of. Nobody else adds bits. */

API struct port_message {
    const char *subject;
    uint32_t subject_len, header_len, total_len; /* of headers and body */
    uint32_t conn;                               /* slot of the sender */
};
API void port_describe(const struct port *p, uint64_t handle, struct port_message *ret);

static inline const struct arena_entry *port_entry(const struct port *p, uint64_t handle)
{
    return &arena_entries(p->arenas[handle_source(handle)])[handle_entry(handle)];
}
static inline uint32_t *port_needed(struct port *p, uint64_t handle)
{
    return &p->needed[handle_source(handle)][handle_entry(handle)];
}
/* One of those who needed the body does no longer; the last one lets go of the message, unless orders about it
 * are to come. */
static inline void port_release(struct port *p, uint64_t handle)
{
    uint32_t source = handle_source(handle);

    if (--*port_needed(p, handle) == 0 && p->open_handle[source] != handle)
        (void)arena_relinquish(p->arenas[source], source == p->index ? &p->pool : NULL, handle, p->my_bit, p->recovering);
}
/* Messages of its own arena that no other port has orders about, from entry `first` on, not committed yet: it
 * will let go of them alone, when what needs their bodies does no longer. */
void port_own_alone(struct port *p, uint32_t first, uint32_t count);
/* Copies `len` bytes of headers and body from `at` on, along the chain if it is one. */
API void port_read(const struct port *p, uint64_t handle, uint32_t at, void *to, uint32_t len);

#endif
