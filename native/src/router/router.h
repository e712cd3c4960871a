/* router: the routing of references, in private memory derived from the routing segment.
 *
 * One turn (router_turn) takes batches of references from each port in turn, up to the
 * end of its round, and appends orders to the rings of the ports concerned.
 *
 *   router.c      opening, the turn, start
 *   route.c       one message to its recipients
 *   instruct.c    the orders themselves, and when they leave
 *   still.c       ports that take no orders, and who has to wait for them
 *   clients.c     clients and their subscriptions
 *   modes.h       requests that wait for answers, sessions of clients, names
 */
#ifndef MIDAIR_ROUTER_H
#define MIDAIR_ROUTER_H

#include "base/api.h"
#include "router/index/index.h"
#include "router/routing.h"
#include "base/spin.h"
#include "base/trace_if.h"
#include "shm/records.h"

#include <stdlib.h>

#define ROUTER_NONE UINT32_MAX
#define ROUTER_BATCHES_A_VISIT 16 /* of one port before the next, if no round ends sooner */
#define ROUTER_AHEAD_MAX 8u            /* passes one port may be ahead of a busy one */
#define ROUTER_PATIENCE_NS 100000000ULL /* how long others wait for a busy one that is behind: much more
                                         * than it may have to wait for a core, less than a restart */
#define ROUTER_STILL_NS 100000000ULL    /* a port that takes no orders for so long stands still */
#define ROUTER_STILL_KEPT 16u           /* batches of a ring that are kept for when its port does */
#define ROUTER_REDO_SOFT (REDO_PAIRS_MAX / 2) /* words of a step before it ends; a message adds 4096 at most */
#define ROUTER_REFS_MAX (BATCH_BYTES / REF_BYTES_MIN)

API struct router_conf {
    uint32_t ports;
    uint32_t subjects; /* capacity of the index */
    uint32_t spin_adaptive;
    uint64_t spin_ns;  /* see spin.h */
    uint32_t generation;
};

API struct router_stats { /* only grow */
    uint64_t messages, deliveries, no_recipients, no_responders;
    uint64_t sessions_opened, sessions_closed, subscribed, unsubscribed, refused;
    uint64_t batches, blocked, turns;
    /* modes */
    uint64_t mode_requests, mode_replies, mode_late, mode_refused, mode_expired, mode_gone;
    uint64_t statuses, names_refused;
    uint64_t found_words;   /* at start: of a committed step that was not finished */
    uint64_t found_batches; /* at start: received and not processed, or not sent */
};

struct sub_chain { /* derived, per subscription: the list of its client */
    uint32_t next, prev; /* index_sub; ROUTER_NONE ends */
};

struct router {
    struct routing *seg;
    struct index *index;
    struct modes *modes; /* modes.h */
    struct redo redo;
    struct batch_out out[PORTS_MAX];
    mqd_t refs[PORTS_MAX];
    int armed[PORTS_MAX]; /* waiting for room in the orders queue */
    int stuck[PORTS_MAX]; /* the input of this port waits for room in a ring */
    int listening[PORTS_MAX];
    /* Fairness between ports, see fair_may_go(). */
    uint64_t passes[PORTS_MAX];
    uint64_t behind_ns[PORTS_MAX]; /* since when somebody waits for it; 0: nobody does */
    int busy[PORTS_MAX];  /* it had more to read at the end of its last round */
    int ahead[PORTS_MAX]; /* it waits for those behind */
    int holding;                     /* somebody does */
    /* Ports that take no orders, see still.c. */
    uint32_t still;                  /* those that stand still, as bits */
    uint64_t still_sent[PORTS_MAX];  /* batches that each had taken when it was last looked at, */
    uint64_t still_ns[PORTS_MAX];    /* and since when its queue is full and it has taken none; 0: it is not so */
    uint32_t still_told[PORTS_MAX];  /* by port: ports with clients that may have been told to wait for it, as bits */
    uint64_t *still_said_ns;         /* by client: when it was last told to wait */
    int epoll;
    struct spin spin;
    uint64_t spin_seen;  /* spin_work() when it was last asked */
    uint64_t bytes;      /* of all messages */
    uint64_t now_ns;
    uint32_t changing;   /* the step being made holds changes, not messages (R3) */
    uint32_t stepping;   /* something is uncommitted */
    uint32_t routed;     /* messages of the present reference, a run, that are; see routing_in */
    struct sub_chain *chains;  /* by port * subs_each + slot */
    uint32_t *client_subs;    /* first subscription of each client */
    uint32_t *cell_free, cell_free_count;
    uint32_t *sorted;          /* scratch for lists longer than a ring */
    uint32_t picks[4096];      /* chosen members of queue groups */
    uint32_t spent[4096], spent_count; /* queue members that reached their max in this step */
    uint64_t hashes[ROUTER_REFS_MAX];
    uint16_t offsets[ROUTER_REFS_MAX];
    struct router_stats stats;
    struct order_trace mark; /* what is said about the references being routed (trace_marks.c) */
    int marking;             /* the references being routed are traced */
    int marked_look;         /* some of this look were */
    uint64_t marked_batches; /* of references: the number of the present one */
    uint64_t resumed; /* stats.messages of predecessors, for show.h */
    struct router_conf conf;
};

API int router_open(const struct router_conf *conf, struct routing *seg, const int *refs_queues,
                    const int *orders_queues, struct router **ret_rt);
/* Rebuilds the index; returns the number of subscriptions, or a negative errno. */
API int router_start(struct router *rt);
/* Works for at most timeout_ms, sleeping when there is nothing to do. 0 or negative errno. */
API int router_turn(struct router *rt, int timeout_ms);
API const struct router_stats *router_get_stats(const struct router *rt);

/* ---- between the C files ---- */
void router_commit(struct router *rt);
/* The same, and the next reference of port `from` is the one at `at` in its batch. */
void router_commit_at(struct router *rt, uint32_t from, uint64_t at);
/* All of a reference. 1: done; 0: a ring has no room for the next message (rt->routed says which of
 * a run), of which nothing was changed. */
int route_message(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash);
/* A connection's own subscription that would get a message to `subject`, or ROUTER_NONE. */
uint32_t route_own_sub(struct router *rt, uint32_t conn, const char *subject, uint32_t len);
/* Counts a message on a member of a queue group; those that have had their maximum are dropped by
 * the second, after everything of the message is appended. */
void route_count_pick(struct router *rt, index_sub sub);
void route_drop_spent(struct router *rt);
int clients_handle(struct router *rt, uint32_t from, const struct ref *r);
int clients_start(struct router *rt);
/* with_step: the change becomes valid with the step being made, not at once. */
void clients_drop_sub(struct router *rt, uint32_t port, uint32_t slot, int with_step);

void router_mark_begin(struct router *rt, uint32_t from, const struct batch *b);
void router_mark_end(struct router *rt);
void router_mark(struct router *rt, struct batch_out *o, uint32_t bytes);

/* Where the reference is in the batch of port `from`. */
static inline uint64_t router_at(const struct router *rt, uint32_t from, const void *r)
{
    return (uint64_t)((const char *)r - (const char *)&routing_lane(rt->seg, from)->inbox);
}

/* Whether more than so many batches are free in the ring of a port, beside what is kept. */
static inline int router_room(const struct router *rt, uint32_t port, uint32_t batches)
{
    return batch_out_room(&rt->out[port]) > batches + (rt->still >> port & 1 ? 0 : ROUTER_STILL_KEPT);
}
/* Ports in whose rings that is not so, as bits. */
static inline uint32_t router_full(const struct router *rt, uint32_t batches)
{
    uint32_t full = 0;

    for (uint32_t i = 0; i < rt->conf.ports; i++)
        full |= (uint32_t)!router_room(rt, i, batches) << i;
    return full;
}

void still_start(struct router *rt);
void still_look(struct router *rt); /* which ports stand still now; who waited for one that does not goes on */
int still_waiting(const struct router *rt); /* something waits for a port that may stand still soon */
/* Around the routing of a reference while some port stands still: its sender has to wait if a ring of such a
 * port got something. */
void still_before(const struct router *rt, uint64_t tails[PORTS_MAX]);
void still_after(struct router *rt, uint32_t from, uint32_t conn, const uint64_t tails[PORTS_MAX]);

#endif
