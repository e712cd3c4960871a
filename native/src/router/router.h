/* router: the routing of references, in private memory derived from the routing segment.
 *
 * One turn (router_turn) takes batches of references from each port in turn, up to the
 * end of its round, and appends orders to the rings of the ports concerned.
 *
 *   router.c      opening, the turn, start
 *   route.c       one message to its recipients
 *   own.c         a connection's own subscription
 *   instruct.c    the orders themselves, and when they leave
 *   still.c       ports that take no orders, and who has to wait for them
 *   clients.c     clients and their subscriptions
 *   aside.c       references that would hold up others
 *
 * No turn takes long. Whatever a reference costs is counted as work, in units of about 20 ns (index.h); a
 * visit to a port ends after ROUTER_WORK_A_VISIT of it, also within a batch, and goes on where it stopped.
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
#define ROUTER_WORK_A_VISIT 200000u /* of one port before the next: about 4 ms */
#define ROUTER_WORK_A_SLICE 50000u  /* of what was set aside, in between: about 1 ms */
#define ROUTER_LEAVES (BATCH_RING * 5 / 8) /* free batches that pieces leave to others: a list in one step needs half of them */
#define ROUTER_SUBS_A_SLICE 1024u   /* subscriptions of an ended connection taken out at once */
#define ROUTER_CELLS_PART 4u        /* one client may have a quarter of the cells of text */
#define ROUTER_STARTS_A_CALL 65536u /* slots of subscriptions gone through by one router_start() */

/* What became of a reference. */
enum routed {
    ROUTED_NO_ROOM = 0, /* a ring has no room for it: nothing was changed */
    ROUTED = 1,
    ROUTED_LATER = 2,   /* it was enough for now: it goes on where it is */
    ROUTED_ASIDE = 3,   /* it would hold up others; nothing of the message at hand was changed */
};

API struct router_conf {
    uint32_t ports;
    uint32_t subjects; /* capacity of the index */
    uint32_t spin_adaptive;
    uint64_t spin_ns;  /* see spin.h */
    uint32_t generation;
    uint8_t lives[PORTS_MAX]; /* which life each port is in (R8 of routing.h) */
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
    uint64_t lists;         /* of recipients, made for a message that is ordered in pieces */
    uint64_t set_aside;     /* references that would have held up others */
    uint64_t work;          /* units of about 20 ns, see index.h */
};

struct sub_chain { /* derived, per subscription: the list of its client */
    uint32_t next, prev; /* index_sub; ROUTER_NONE ends */
};

struct aside { /* derived: what was set aside of one port (aside.h) */
    struct routing_aside *ring;
    uint64_t tail;        /* with the uncommitted */
    uint32_t entries;     /* that are not done */
    uint32_t open;        /* entry whose list of recipients is being ordered; 0: none */
    uint32_t first, last; /* connections that have some, in turn; 0: none */
    uint32_t conns;       /* how many */
    uint64_t costly;      /* window in which some connection has used up its allowance; 0: none */
    uint32_t watch;       /* there are entries, or such a connection */
    uint32_t *next;       /* per entry: the next of its connection */
};
struct aside_conn { /* derived, per connection */
    uint32_t first, last; /* of its entries */
    uint32_t count;
    uint32_t next;        /* connection after it in turn */
    uint32_t told;        /* its port was asked not to read it */
    uint32_t used;        /* work in this window */
    uint64_t window;
};
struct list { /* derived: recipients of the message of one port that is ordered in pieces */
    uint64_t *bits; /* a bit for each subscription, those of each port from a word on */
    int made;
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
    uint32_t first;       /* the port that is visited first: one that found no room */
    int listening[PORTS_MAX];
    /* Fairness between ports, see fair_may_go(). */
    uint64_t passes[PORTS_MAX];
    uint64_t behind_ns[PORTS_MAX]; /* since when somebody waits for it; 0: nobody does */
    int busy[PORTS_MAX];  /* it had more to read at the end of its last round */
    int ahead[PORTS_MAX]; /* it waits for those behind */
    int holding;                     /* somebody does */
    /* Ports that take no orders, see still.c. */
    uint32_t still;                  /* those that stand still, as bits */
    uint32_t still_watch;            /* those that are looked at: their queue is full, or somebody was told to wait, as bits */
    uint64_t still_sent[PORTS_MAX];  /* batches that each had taken when it was last looked at, */
    uint64_t still_ns[PORTS_MAX];    /* and since when its queue is full and it has taken none; 0: it is not so */
    uint64_t still_over_ns[PORTS_MAX]; /* since when it takes orders again */
    uint32_t still_told[PORTS_MAX];  /* by port: ports with clients that may have been told to wait for it, as bits */
    uint64_t *still_said_ns;         /* by client: when it was last told to wait */
    int epoll;
    struct spin spin;
    uint64_t spin_seen;  /* spin_work() when it was last asked */
    uint64_t bytes;      /* of all messages */
    uint32_t fanout_max; /* the most recipients of one, of those with several */
    uint64_t now_ns;
    uint32_t changing;   /* the step being made holds changes, not messages (R3) */
    uint32_t stepping;   /* something is uncommitted */
    uint32_t routed;     /* messages of the present reference, a run, that are; see routing_in */
    struct routing_in *place; /* of the present reference: of its port, or of an entry that was set aside */
    const char *place_base;   /* what `at` is counted from */
    uint32_t aside_now;       /* entry at hand; 0: the reference is in the inbox */
    uint64_t work, work_until; /* done so far; where the visit ends */
    uint64_t work_dear;        /* above it care is taken: a charge is due, or it is 0 (aside_begin) */
    uint64_t work_charged;     /* work up to here was charged, or was too little to be */
    struct aside asides[PORTS_MAX];
    struct aside_conn *aside_conns;
    int aside_stuck[PORTS_MAX]; /* what was set aside waits for room in a ring */
    struct list lists[PORTS_MAX];
    uint64_t list_words;        /* of each port in list.bits */
    uint32_t start_port, start_slot, start_count; /* how far router_start() is */
    struct sub_chain *chains;  /* by port * subs_each + slot */
    uint32_t *client_subs;    /* first subscription of each client */
    uint32_t *client_cells;   /* cells of text of each client's subscriptions */
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
/* Rebuilds the index, in pieces: 1: there is more, call it again. 0: done. Negative errno; -EBUSY: there are
 * subscriptions of ports past those of the configuration. */
API int router_start(struct router *rt);
API uint32_t router_started(const struct router *rt); /* subscriptions found so far */
/* Works for at most timeout_ms, sleeping when there is nothing to do. 0 or negative errno. */
API int router_turn(struct router *rt, int timeout_ms);
API const struct router_stats *router_get_stats(const struct router *rt);

/* ---- between the C files ---- */
void router_commit(struct router *rt);
/* The same, and the next reference of port `from` is the one at `at` in its batch (or its entry is done). */
void router_commit_at(struct router *rt, uint32_t from, uint64_t at);
/* A message, or a run: enum routed. Of a run rt->routed says which is the message at hand. */
int route_any(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash);
/* The same of a message in the inbox that is no run, and whose list is not ordered in pieces. */
int route_message(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash);
/* The list of the message of port `from` that is ordered in pieces, which is the entry at hand. */
void route_list_begin(struct router *rt, uint32_t from);
void route_list_end(struct router *rt, uint32_t from); /* nothing of it is used for the next one */
void route_list_add(struct router *rt, uint32_t from, index_sub sub);
/* The next recipients from `progress` on, `most` at most and all of one port: their number. */
uint32_t route_list_next(const struct router *rt, uint32_t from, uint64_t progress, uint32_t most, index_sub *ret_subs);
/* A subscription goes: no list that is being ordered names it. */
void route_forget(struct router *rt, index_sub sub);
/* The first member of a group from `at` on that is not of this connection (ROUTER_NONE: any) and not on one of these
 * ports (as bits), or ROUTER_NONE. */
uint32_t route_member(struct router *rt, const struct index_group *group, uint32_t at, uint32_t not_conn, uint32_t not_ports);
/* A connection's own subscription that would get a message to `subject`, or ROUTER_NONE. The second: also one in
 * a queue group, if there is no other. */
uint32_t own_plain(struct router *rt, uint32_t conn, const char *subject, uint32_t len);
uint32_t own_sub(struct router *rt, uint32_t conn, const char *subject, uint32_t len);
/* Counts a message on a member of a queue group; those that have had their maximum are dropped by
 * the second, after everything of the message is appended. */
void route_count_pick(struct router *rt, index_sub sub);
void route_drop_spent(struct router *rt);
int clients_handle(struct router *rt, uint32_t from, const struct ref *r); /* enum routed */
/* Takes out some subscriptions of a connection that has ended. 1: it has more. */
int clients_drop_some(struct router *rt, uint32_t conn);
int clients_start(struct router *rt);
/* with_step: the change becomes valid with the step being made, not at once. */
void clients_drop_sub(struct router *rt, uint32_t port, uint32_t slot, int with_step);

/* The subject and the queue group of a subscription, until the next call. */
const char *clients_subject(struct router *rt, const struct routing_sub *s);
void router_mark_begin(struct router *rt, uint32_t from, const struct batch *b);
void router_mark_end(struct router *rt);
void router_mark(struct router *rt, struct batch_out *o, uint32_t bytes);

/* Where the reference is in its batch, or entry. */
static inline uint64_t router_at(const struct router *rt, uint32_t from, const void *r)
{
    (void)from;
    return (uint64_t)((const char *)r - rt->place_base);
}

/* Whether more than so many batches are free in the ring of a port, beside what is kept. */
static inline int router_room(const struct router *rt, uint32_t port, uint32_t batches)
{
    return rt->out[port].seq + batches < rt->out[port].end;
}
/* From what has left and what is kept: at start, and when a port stands still or no more does. */
static inline void router_settle_room(struct router *rt, uint32_t port)
{
    struct batch_out *o = &rt->out[port];

    uint32_t kept = rt->still >> port & 1 ? 0 : ROUTER_STILL_KEPT;

    o->end = atomic_load_explicit(&o->ring->sent, memory_order_relaxed) + BATCH_RING - kept;
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
void still_look(struct router *rt); /* which of `still_watch` stand still now; who waited for one that does not goes on */
int still_waiting(const struct router *rt); /* something waits for a port that may stand still soon */
/* Around the routing of a reference while some port stands still: its sender has to wait if a ring of such a
 * port got something. */
void still_before(const struct router *rt, uint64_t tails[PORTS_MAX]);
void still_after(struct router *rt, uint32_t from, uint32_t conn, const uint64_t tails[PORTS_MAX]);

#endif
