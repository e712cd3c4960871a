/* trace_marks: what the router says about the references that orders come of.
 *
 * The structure: none of its own; a mark is an ORDER_TRACE before the orders it is about, once for
 *               each (batch of references, batch of orders). Only references that were tagged by
 *               a port that traces have one (trace.h).
 * Written by:   the router, past committed lengths, with the step its orders are in.
 * Invariants:   a mark and the order that follows it are in the same batch. A mark is left out when
 *               the ring has little room: orders need it more.
 * After a crash: marks are cut off or committed with their step; a repetition makes them anew.
 */
#include "router/instruct.h"
#include "base/clock.h"


#define MARK_ROOM 4u /* batches that are left to orders */

/* A tagged batch of references is taken up. */
void router_mark_begin(struct router *rt, uint32_t from, const struct batch *b)
{
    rt->now_ns = clock_ns();
    rt->marked_batches++;
    rt->marking = 1;
    rt->marked_look = 1;
    rt->mark = (struct order_trace){
        .type = ORDER_TRACE,
        .bytes = b->bytes,
        .queued_ns = b->closed_ns,
        .routed_ns = rt->now_ns,
        .source_generation = batch_trace_generation(b->trace_tag),
        .router_generation = rt->conf.generation,
        .round_messages = b->rounds & BATCH_ROUND_ENDS ? batch_trace_messages(b->trace_tag) : 0,
        .source = (uint8_t)from,
    };
}

/* All that was found is routed: batches closed now are closed now, not when the look began. */
void router_mark_end(struct router *rt)
{
    rt->now_ns = clock_ns();
    rt->marked_look = 0;
}

/* Before an order of `bytes` is appended: a mark, if the batch it goes into has none yet. */
void router_mark(struct router *rt, struct batch_out *o, uint32_t bytes)
{
    const uint32_t own = sizeof(struct order_trace);

    if (o->marked == rt->marked_batches && o->bytes + o->load + bytes <= BATCH_BYTES)
        return;
    if (batch_out_room(o) < MARK_ROOM)
        return;
    if (o->bytes + o->load + own + bytes > BATCH_BYTES)
        batch_out_turn(o, rt->now_ns);
    instruct_trace(rt, o);
    o->marked = rt->marked_batches;
}
