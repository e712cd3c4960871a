/* trace_marks: what the router says about the references that orders come of.
 *
 * The structure: none of its own; a mark is an ORDER_TRACE before the orders it is about, once for
 *               each (batch of references, batch of orders). Only references that were tagged by
 *               a connmgr that traces have one (trace.h).
 * Written by:   the router, past committed lengths, with the step its orders are in.
 * Invariants:   a mark and the order that follows it are in the same batch. A mark is left out when
 *               the ring has little room: orders need it more.
 * After a crash: marks are cut off or committed with their step; a repetition makes them anew.
 */
#include "router/router.h"

#include <time.h>

#define MARK_ROOM 4u /* batches that are left to orders */

static uint64_t clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

/* A tagged batch of references is taken up. */
void router_mark_begin(struct router *rt, uint32_t from, const struct batch *b)
{
    rt->now_ns = clock_ns();
    rt->marked_batches++;
    rt->marking = 1;
    rt->marked_look = 1;
    rt->mark = (struct router_mark){
        .queued_ns = b->closed_ns,
        .bytes = b->bytes,
        .about = {.routed_ns = rt->now_ns,
                  .source_generation = (uint32_t)(b->step_ns >> 32),
                  .round_messages = b->rounds & BATCH_ROUND_ENDS ? (uint32_t)b->step_ns : 0,
                  .router_generation = rt->conf.generation,
                  .source = (uint8_t)from},
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
    const uint32_t own = sizeof(struct order) + sizeof(struct order_trace);

    if (o->marked == rt->marked_batches && o->bytes + o->load + bytes <= BATCH_BYTES)
        return;
    if (batch_out_room(o) < MARK_ROOM)
        return;
    if (o->bytes + o->load + own + bytes > BATCH_BYTES)
        batch_out_turn(o, rt->now_ns);
    struct order *m = batch_out_append(o, own, rt->now_ns);

    *m = (struct order){.type = ORDER_TRACE, .one = rt->mark.bytes, .handle = rt->mark.queued_ns};
    *(struct order_trace *)m->subs = rt->mark.about;
    o->marked = rt->marked_batches;
    if (!o->first_ns)
        o->first_ns = rt->now_ns;
}
