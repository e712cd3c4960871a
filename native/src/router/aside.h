/* aside: references that would hold up others, and the share of their connections.
 *
 * All references of a port come one behind the other, those of all its clients. One that takes long (a list
 * of recipients longer than half a ring, the end of a connection with very many subscriptions or requests), that
 * waits for room in the ring of another port to tell others of a name or of an end, or that is
 * of a connection which has used up its allowance of work, is set aside (R7): copied into the routing segment,
 * together with all that follow of that connection. The others go on. What was set aside is done in slices, a
 * connection at a time, between the visits to the ports: so whatever one connection asks for, it costs
 * the others one slice.
 *
 * A connection that has several references here is not read by its port until they are done (ORDER_WAIT,
 * ORDER_GO_ON): TCP holds it back. One that has ended gets nothing more: its subscriptions are taken out
 * before its references are done.
 *
 * The structure: struct routing_aside, a ring of entries in the routing segment, and lists of them by
 *               connection, which are derived.
 * Written by:   the router. Entries lie past the tail until the step that sets them aside commits.
 * Invariants:   R7.
 * After a crash: aside_start() finds the entries that are not done. Each goes on at its place.
 */
#ifndef MIDAIR_ASIDE_H
#define MIDAIR_ASIDE_H

#include "router/router.h"

#define ASIDE_WINDOW_NS 16000000ULL /* allowances begin anew with each window */
#define ASIDE_ALLOWANCE 100000u     /* work of one connection in a window: about 2 ms of the 16 */
#define ASIDE_DEAR 1000u            /* work that is charged to nobody, about 20 us; more, to who brings it above that */
#define ASIDE_STEP 50u              /* work of any step: its commit */
#define ASIDE_WAIT 4u               /* references of a connection here before it is not read any more */

int aside_open(struct router *rt); /* 0, or -ENOMEM */
/* Before a batch of port `from`: what was done until now is nobody's. Care is taken from its first reference on while
 * something was set aside, some port stands still, or the list of that reference was ordered in part. */
static inline void aside_begin(struct router *rt, uint32_t from)
{
    rt->work_charged = rt->work;
    rt->work_dear = rt->asides[from].watch || rt->still || rt->seg->in[from].touched ? 0 : rt->work + ASIDE_DEAR;
}
void aside_start(struct router *rt);
/* Whether it has to be set aside because of its connection. Asked while work > work_dear. */
int aside_must(struct router *rt, uint32_t from, const struct ref *r);
/* Sets the present reference aside, with the step being made. 0: there is no room. */
int aside_put(struct router *rt, uint32_t from, const struct ref *r);
/* The work since the last charge is that of this connection. */
void aside_charge(struct router *rt, uint32_t from, uint32_t conn);
/* A slice. 1: there is more that can go on; 0: nothing, or no room in a ring. Negative errno. */
int aside_serve(struct router *rt, uint32_t from);

#endif
