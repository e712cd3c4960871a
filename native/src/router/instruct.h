/* instruct: the orders of the router, and when they leave. The only writer of them.
 *
 * The structure: one ring of orders for each port, in the routing segment (batch.h), records.h.
 * Written by:   the router, past the committed tails; they become valid with the step they are made in.
 * Invariants:   no function here fails: the caller has made sure of room (router_room).
 * After a crash: what was not committed is overwritten by the step that is repeated.
 */
#ifndef MIDAIR_INSTRUCT_H
#define MIDAIR_INSTRUCT_H

#include "router/router.h"

/* Space for an order; `load` as in struct batch_out. */
static inline void *instruct_append(struct router *rt, uint32_t port, uint32_t bytes, uint32_t load)
{
    struct batch_out *o = &rt->out[port];

    if (TRACE_IF(rt->marking))
        router_mark(rt, o, bytes + load);
    if (o->bytes + o->load + bytes + load > BATCH_BYTES) {
        if (batch_out_room(o) == 0)
            abort(); /* the caller made sure of room; a successor repeats the step */
        batch_out_turn(o, rt->now_ns);
    }
    rt->stepping = 1;
    void *at = (char *)batch_slot(o->ring, o->seq) + o->bytes;

    o->bytes += bytes;
    o->load += load;
    return at;
}

/* ---- about messages ---- */

/* All of a message, or of a run of them, to one recipient. */
static inline void instruct_deliver_one(struct router *rt, uint32_t port, uint32_t sub, uint64_t handle)
{
    *(struct order_deliver *)instruct_append(rt, port, sizeof(struct order_deliver), 0) =
        (struct order_deliver){.type = ORDER_DELIVER, .limit = 1, .recipients = 1, .only = sub, .handle = handle};
}
static inline void instruct_run_one(struct router *rt, uint32_t port, uint32_t sub, uint64_t first, uint32_t messages,
                                    uint32_t load)
{
    struct order_run *o = instruct_append(rt, port, order_run_bytes(1), load);

    *o = (struct order_run){.type = ORDER_RUN, .limit = 1, .recipients = 1, .messages = messages, .first = first};
    o->subs[0] = sub;
}
/* To `recipients` of this port, whose sub slots the caller stores at instruct_subs(). One of several orders
 * about the message, perhaps: instruct_more() if this port gets a further one, instruct_limit() on the last of
 * all. */
struct order *instruct_deliver(struct router *rt, uint32_t port, uint32_t recipients, uint64_t handle);
struct order *instruct_run(struct router *rt, uint32_t port, uint32_t recipients, uint64_t first, uint32_t messages,
                           uint32_t load);
static inline uint32_t *instruct_subs(struct order *o) { return (uint32_t *)order_subs(o); }
static inline void instruct_more(struct order *o) { o->type |= ORDER_MORE; }
static inline void instruct_limit(struct order *o, uint32_t ports) { o->limit = (uint8_t)ports; }
/* Nobody gets these messages. */
void instruct_delete(struct router *rt, uint32_t port, uint64_t first, uint32_t messages);
void instruct_no_responders(struct router *rt, uint32_t port, uint32_t sub, uint64_t handle);

struct instruct_as { /* how a message of a mode is delivered; lengths of 0: as it was published */
    uint64_t deadline_ns; /* not after this; 0: none */
    const char *subject, *reply;
    uint32_t subject_len, reply_len;
};
struct order *instruct_mode(struct router *rt, uint32_t port, uint32_t sub, uint64_t handle, const struct instruct_as *as);

/* As instruct_deliver(), under another subject than it was published to; slots go to its `subs`. */
struct order *instruct_topic(struct router *rt, uint32_t port, uint32_t recipients, uint64_t handle, const char *subject,
                             uint32_t subject_len);

/* ---- about connections and subscriptions ---- */

/* ORDER_OPENED, ORDER_CLOSED, ORDER_NAME_TAKEN, ORDER_NAME_GIVEN, ORDER_WAIT, ORDER_GO_ON */
void instruct_conn(struct router *rt, uint32_t port, enum order_type type, uint32_t conn, uint64_t uid);
void instruct_passed(struct router *rt, uint32_t port, const struct ref_ping *r);
/* ORDER_UNSUBSCRIBED, ORDER_REFUSED; `sub`: slot | epoch << 32 */
void instruct_sub(struct router *rt, uint32_t port, enum order_type type, uint32_t conn, uint64_t sub);
/* The holder of a name is asked whether it is alive, because another connection (of port `from`) wants it. */
void instruct_name_asked(struct router *rt, uint32_t port, uint32_t holder, uint64_t holder_uid, uint32_t from,
                         const struct ref_ready *r);
void instruct_hold(struct router *rt, uint32_t port, const struct ref_hold *r);
/* ORDER_STILL, ORDER_STILL_OVER */
void instruct_wait(struct router *rt, uint32_t port, enum order_type type, uint32_t conn, uint32_t ports);

/* ---- what the router itself says ---- */

/* A message of the router's own to `count` sub slots of a port. */
void instruct_status(struct router *rt, uint32_t port, const uint32_t *slots, uint32_t count,
                     const struct order_said *head, const char *subject, const char *reply,
                     const char *fields, const char *body);
/* About the orders behind it (trace_marks.c). */
void instruct_trace(struct router *rt, struct batch_out *o);

/* When a batch leaves: a full one when the references of a batch are routed, the one being filled when
 * all ports were looked at. */
enum instruct_when { INSTRUCT_ROUTED = BATCH_CLOSED, INSTRUCT_LOOKED = BATCH_FILLED };
/* Batches sent, or a negative errno. Nothing uncommitted may be pending, but for INSTRUCT_ROUTED. */
static inline int instruct_send(struct router *rt, uint32_t port, enum instruct_when when)
{
    struct batch_out *o = &rt->out[port];

    if (when == INSTRUCT_ROUTED && !o->blocked && !batch_unsent(o->ring))
        return 0;
    int sent = batch_out_send(o, (enum batch_flush)when, rt->now_ns);

    if (sent > 0)
        o->end += (uint32_t)sent; /* as router_settle_room() */
    if (__builtin_expect(o->blocked, 0))
        rt->still_watch |= 1u << port;
    return sent;
}

#endif
