/* still: ports that take no orders, and who has to wait for them.
 *
 * A port that hangs, or is being started anew, takes no orders: its queue fills, then its ring. Nothing for it
 * is left out, as nothing of what a client was sent may be lost. So who publishes to its clients has to wait,
 * and nobody else: what is for other ports goes on.
 *
 * A ring is used up to ROUTER_STILL_KEPT batches before its end. A port that is busy takes some of them soon,
 * and until then its source waits (router_room). One whose queue is full and that has taken nothing for
 * ROUTER_STILL_NS stands still: from then on the rest of its ring is used, and each connection whose message
 * goes there is not read any more (ORDER_STILL to its connmgr) until the port takes orders again (ORDER_STILL_OVER).
 * What such a connection had on its way is bounded (refer.h), and what is kept is enough for it. If it is not
 * (many recipients of each message, many sources) the source waits as a whole, as before.
 *
 * Ports are looked at while their queue is full or somebody was told to wait for them (`still_watch`); while one
 * stands still every reference is handled with care (aside_begin).
 *
 * The structure: private to the router, derived. The two orders are appended like others and become valid with
 *               the step they are made in.
 * After a crash: a connmgr that starts holds nobody; who publishes on is told again. A router that starts does
 *               not know who was told, and tells every port that all take orders as soon as they do, and that nobody
 *               has to wait for ports past its own: one that was retired.
 */
#include "router/instruct.h"

#include "base/clock.h"

#define SAY_AGAIN_NS 20000000ULL /* a connection that was told and publishes on: what was on its way, or its connmgr has forgotten */

static uint32_t all_ports(const struct router *rt) { return (uint32_t)((1ULL << rt->conf.ports) - 1); }

void still_start(struct router *rt)
{
    for (uint32_t i = 0; i < rt->conf.ports; i++) {
        rt->still_told[i] = all_ports(rt);
        rt->still_over_ns[i] = clock_ns();
    }
    rt->still_watch = all_ports(rt);
}

/* Those who were told to wait for this port need not any more, nor for ports that there are no more. */
static void go_on(struct router *rt, uint32_t port)
{
    for (uint32_t left = rt->still_told[port]; left; left &= left - 1) {
        uint32_t to = (uint32_t)__builtin_ctz(left);

        if (!router_room(rt, to, 1))
            continue;
        instruct_wait(rt, to, ORDER_STILL_OVER, 0, 1u << port | ~all_ports(rt));
        rt->still_told[port] &= ~(1u << to);
    }
}

/* Half of its ring is free, so they do not stop and go with every batch; or it has taken orders for a while, and
 * others keep its ring full. */
static int is_over(const struct router *rt, uint32_t port)
{
    return !(rt->still >> port & 1) && (batch_out_room(&rt->out[port]) >= BATCH_RING / 2 ||
                                        rt->now_ns - rt->still_over_ns[port] >= ROUTER_STILL_NS);
}

void still_look(struct router *rt)
{
    for (uint32_t left = rt->still_watch; left; left &= left - 1) {
        uint32_t i = (uint32_t)__builtin_ctz(left);
        const struct batch_out *o = &rt->out[i];
        uint64_t sent = atomic_load_explicit(&o->ring->sent, memory_order_relaxed);

        if (!o->blocked || sent != rt->still_sent[i]) {
            rt->still_sent[i] = sent;
            rt->still_ns[i] = 0;
            if (__builtin_expect(rt->still >> i & 1, 0))
                rt->still_over_ns[i] = rt->now_ns;
            rt->still &= ~(1u << i);
        } else if (!rt->still_ns[i]) {
            rt->still_ns[i] = rt->now_ns;
        } else if (rt->now_ns - rt->still_ns[i] >= ROUTER_STILL_NS) {
            rt->still |= 1u << i;
        }
        router_settle_room(rt, i);
        if (__builtin_expect(rt->still_told[i] && is_over(rt, i), 0))
            go_on(rt, i);
        if (!o->blocked && !rt->still_told[i])
            rt->still_watch &= ~(1u << i);
    }
    if (rt->stepping)
        router_commit(rt);
}

int still_waiting(const struct router *rt)
{
    uint32_t soon = 0, stuck = 0;

    for (uint32_t i = 0; i < rt->conf.ports; i++) {
        soon |= (uint32_t)(rt->out[i].blocked && !(rt->still >> i & 1));
        stuck |= (uint32_t)rt->stuck[i];
    }
    return soon && stuck;
}

void still_before(const struct router *rt, uint64_t tails[PORTS_MAX])
{
    for (uint32_t left = rt->still; left; left &= left - 1) {
        uint32_t port = (uint32_t)__builtin_ctz(left);

        tails[port] = batch_tail(rt->out[port].seq, rt->out[port].bytes);
    }
}

void still_after(struct router *rt, uint32_t from, uint32_t conn, const uint64_t tails[PORTS_MAX])
{
    uint32_t ports = 0;

    for (uint32_t left = rt->still & ~(1u << from); left; left &= left - 1) {
        uint32_t port = (uint32_t)__builtin_ctz(left);

        if (tails[port] != batch_tail(rt->out[port].seq, rt->out[port].bytes))
            ports |= 1u << port;
    }
    if (!ports || rt->now_ns - rt->still_said_ns[conn] < SAY_AGAIN_NS || !router_room(rt, from, 1))
        return;
    rt->still_said_ns[conn] = rt->now_ns;
    instruct_wait(rt, from, ORDER_STILL, conn, ports);
    for (uint32_t left = ports; left; left &= left - 1)
        rt->still_told[__builtin_ctz(left)] |= 1u << from;
}
