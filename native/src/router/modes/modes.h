/* modes: requests that wait for answers, sessions, and names, in the router (docs/modes.md).
 *
 * Primary state is in the routing segment: requests, legs, names (R5). A request is one that was
 * asked and whose replies pass us, or a session; it has one leg for each responder. The id of a
 * leg, number << 32 | generation, and its token are the end of the reply subject its responder is
 * given: a reply is recognised by its subject, and messages that are none are not looked at. The token
 * is a hash of the id with a key that lies in the segment: who was not asked cannot know it, and it is
 * the same for every router of the instance.
 *
 * What is declared here is derived: lists, counts, a heap of deadlines, hashes; private memory of
 * the router, rebuilt by modes_start(). Its memory cost is the pages touched, not the address space
 * reserved.
 *
 *   modes.c        the tables, and what is derived from them
 *   modes_route.c  messages of a mode
 *   modes_fanout.c requests to everybody who listens
 *   modes_spread.c messages to several topics, and to all clients of a kind
 *   modes_settle.c ends: replies that will not come, deadlines, connections that are over
 *   modes_names.c  names and presence
 */
#ifndef MIDAIR_MODES_H
#define MIDAIR_MODES_H

#include "router/router.h"

#define MODES_REQUESTS_EACH 16384u     /* open requests and sessions of one connection */
#define MODES_ANSWERS_EACH 131072u     /* answers outstanding of what one connection asked */
#define MODES_FANOUT_MAX 65536u        /* listeners one fanout request may have */
#define MODES_FANOUT_STEP 1024u        /* of those, how many are asked in one step */
#define MODES_GATHER_STEP 4096u        /* and how many legs are taken in one */
#define MODES_SPREAD_STEP 1024u        /* recipients of a message to several topics, or to a kind, in one step */
#define MODES_CHOICE 1024u             /* responders that are compared to choose one */
#define MODES_WORK_COMPARED 4u         /* of them, for a unit of work (index.h) */
#define MODES_WORK_LEG 4u              /* work (index.h) of a request to one responder */
#define MODES_DEADLINE_NS 600000000000ULL /* of a request that names none: ten minutes */
#define MODES_PAGE_BYTES 3072u         /* body of one answer to "who is there" */
#define MODES_WATCHERS_EACH 1024u      /* subscriptions in one order of presence */
#define MODES_WATCHERS_MAX 16384u      /* told of one change of presence, and as many groups as above; more are not */
#define MODES_WATCHERS_ROOM (3 + MODES_WATCHERS_MAX / MODES_WATCHERS_EACH) /* batches of one ring that takes at most */
#define MODES_EXPIRE_A_STEP 32u
#define MODES_BUCKETS 65536u           /* of the hashes of sessions and of names */
#define MODES_WORK_SETTLED 16u         /* of a request or leg that is settled */
#define MODES_SETTLED_AT_ONCE 256u     /* for a reference; with more it is set aside */

#define MODES_FIELDS_MAX 128u /* bytes of the fields of a status: a number and a name */
_Static_assert(MODES_FIELDS_MAX >= 2 * 2 + 20 + MODE_NAME_MAX, "see above");

struct request_link { /* links are number + 1; 0 ends */
    uint32_t conn_next, conn_prev; /* requests of the connection that asks */
    uint32_t hash_next;            /* sessions */
    uint32_t legs;                 /* first of its legs */
    uint32_t open;                 /* how many */
    uint32_t heap;                 /* place in the heap + 1; 0: not there */
};
struct leg_link {
    uint32_t conn_next, conn_prev; /* legs of the responder's connection */
    uint32_t sub_next, sub_prev;   /* sessions that stay with a subscription */
    uint32_t peer_next, peer_prev; /* legs of the request */
};
struct mode_conn { /* per slot of a connection */
    uint32_t requests, legs;             /* first of each */
    uint32_t requests_open, outstanding; /* how many */
    uint32_t awaited;                    /* legs of what it asked */
    uint64_t idle;                       /* the tick when it was last given something, or finished it */
};

struct modes {
    struct request_link *request_links;
    struct leg_link *leg_links;
    struct mode_conn *conns;
    uint32_t *pins;         /* per subscription: first session leg that stays with it */
    uint32_t *request_free, request_free_count;
    uint32_t *leg_free, leg_free_count;
    uint32_t *session_hash; /* request + 1, by connection and reply subject */
    uint32_t *name_hash;    /* slot + 1 of the connection, by name */
    uint32_t *name_next;
    uint32_t *heap, heap_count;
    uint64_t tick;
    /* Scratch of one message. What has this `stamp` was met for it. */
    uint32_t stamp;
    uint32_t *sub_seen;   /* per subscription */
    uint64_t choices; /* made among more than MODES_CHOICE */
    uint32_t *queue_seen; /* per queue name (index_group.queue) */
    struct mode_own *own; /* per connection: which of its subscriptions gets it */
    uint32_t *list;       /* who gets it: as many as there are subscriptions */
    /* Per port: of what it is ordered in pieces. */
    struct mode_spread {
        uint64_t handle;   /* of a message to several topics, */
        uint32_t sections; /* of how many of them it is known who listens, */
        uint64_t *seen;    /* and who: a bit for each subscription */
        uint32_t waiting;  /* ports that legs of a fanout request wait for */
    } spread[PORTS_MAX];
};

struct mode_own {
    uint32_t stamp;
    index_sub sub;
};

/* ---- for router.c, clients.c ---- */
int modes_open(struct router *rt);
void modes_start(struct router *rt);
/* A message with REF_MODE, as route_any(). */
int modes_message(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash);
/* REF_READY of a client that has a name: enum routed. It is also done when it was refused. */
void modes_name_kept(struct router *rt, const struct ref_name_kept *r);
int modes_name(struct router *rt, uint32_t from, const struct ref_ready *r);
/* A connection is over: everything it asked or was asked is settled, in steps: enum routed. */
int modes_close(struct router *rt, uint32_t from, const struct ref_close *r);
/* A subscription is about to go: sessions that stay with it end: enum routed. */
int modes_unpin(struct router *rt, uint32_t from, const struct ref_unsubscribe *r, uint32_t sub);
/* Settles what is past its deadline, as far as there is room, and a slice of it at most. Between steps. 1: there is
 * more that can be. */
int modes_expire(struct router *rt);
/* When modes_expire() has to be called next; 0: never. */
static inline uint64_t modes_next_ns(const struct router *rt)
{
    const struct modes *m = rt->modes;

    return m->heap_count ? routing_requests(rt->seg)[m->heap[0]].deadline_ns : 0;
}
static inline int modes_conn_involved(const struct router *rt, uint32_t conn)
{
    const struct mode_conn *c = &rt->modes->conns[conn];

    return c->requests || c->legs ||
           (conn < rt->seg->names_high && routing_names(rt->seg)[conn].word & MODE_USED);
}
static inline int modes_sub_pinned(const struct router *rt, uint32_t port, uint32_t slot)
{
    return rt->modes->pins[(uint64_t)port * rt->seg->subs_each + slot] != 0;
}

/* ---- between the modes*.c ---- */
static inline uint32_t modes_port(const struct router *rt, uint32_t conn)
{
    return (uint32_t)(routing_clients(rt->seg)[conn].word >> 32);
}
/* A new request of `r`, or ROUTER_NONE when there is none left for it. */
uint32_t modes_take_request(struct router *rt, const struct ref_message *r, uint8_t mode, uint64_t deadline_ns);
/* A leg of it to that subscription; the caller has made sure of modes_legs_left(). */
uint32_t modes_take_leg(struct router *rt, uint32_t request, uint8_t mode, index_sub sub);
uint32_t modes_legs_left(const struct router *rt);
/* How many legs a request of this connection may have. */
uint32_t modes_legs_for(const struct router *rt, uint32_t conn);
uint32_t modes_requests_left(const struct router *rt);
void modes_free_leg(struct router *rt, uint32_t leg);
/* With the legs it still has. */
void modes_free_request(struct router *rt, uint32_t request);
/* The reply subject of a leg, to `to` of MODE_REPLY_BYTES; its length. */
uint32_t modes_put_reply(const struct router *rt, uint32_t leg, char *to);
/* The leg whose reply subject this message is published to, or ROUTER_NONE. */
uint32_t modes_find_leg(const struct router *rt, const struct ref_message *r);
uint32_t modes_find_session(const struct router *rt, uint32_t conn, const char *reply, uint32_t len);
/* Whether the subscription a leg was given to is still the same one. */
int modes_leg_stands(const struct router *rt, uint32_t leg);
/* Fields of a status, one behind the other (struct order_said). */
struct fields {
    uint32_t len;
    char text[MODES_FIELDS_MAX];
};
void modes_add_field(struct fields *f, enum status_field field, const char *value, uint32_t len);
void modes_add_number(struct fields *f, enum status_field field, uint64_t value);
/* A status to the connection's own subscription to `reply`; nothing if it has none. Fields may be
 * NULL. The caller has made sure of room for one batch more. */
void modes_tell(struct router *rt, uint32_t conn, const char *reply, uint32_t reply_len,
                enum mode_status status, const struct fields *fields);
/* The slot of the connection called that, or ROUTER_NONE. */
uint32_t modes_find_name(const struct router *rt, const char *name, uint32_t len);
/* Adds who a connection is: its number, and its name if it has one. */
void modes_add_who(const struct router *rt, uint32_t conn, uint64_t uid, struct fields *f);
int modes_list_clients(struct router *rt, uint32_t from, const struct ref_message *r);
/* Whom a message to a kind, an organisation or both is for: MODE_KIND_PREFIX, MODE_ORG_PREFIX. */
struct kind {
    const char *type, *organisation;
    uint32_t type_len, organisation_len; /* 0: any */
};
/* 0: the subject names none. */
int modes_take_kind(const char *subject, uint32_t len, struct kind *ret_kind);
int modes_is_of_kind(const struct router *rt, uint32_t conn, const struct kind *kind);
/* ---- whom to ask (modes_route.c) ---- */
/* To nobody, and the sender is told why. As route_any(). */
int modes_refuse(struct router *rt, uint32_t from, const struct ref_message *r, enum mode_status status);
struct order *modes_order_leg(struct router *rt, const struct ref_message *r, uint32_t leg, uint64_t deadline_ns);
int modes_less_loaded(const struct router *rt, uint32_t a, uint32_t b);
index_sub modes_least_loaded(struct router *rt, const struct ref_message *r, const uint32_t *subs,
                             const uint32_t *conns, uint32_t count);
index_sub modes_choose_named(struct router *rt, const struct ref_message *r);
/* ---- modes_fanout.c ---- */
int modes_ask_all(struct router *rt, uint32_t from, const struct ref_message *r, uint64_t hash);
/* At start: requests that did not get all of their legs. */
void modes_drop_gathering(struct router *rt);
/* Whether its orders may go on from one batch to the next (P3). */
static inline int modes_goes_on(const struct ref_message *r)
{
    const struct ref_mode *m = ref_mode(r);

    return m->mode == MODE_FANOUT || m->place == PLACE_KIND || m->topics_len;
}
/* ---- modes_spread.c: as route_any() ---- */
int modes_spread_topics(struct router *rt, uint32_t from, const struct ref_message *r);
int modes_spread_kind(struct router *rt, uint32_t from, const struct ref_message *r);
/* The subscriptions, one of each client of the kind that the message is to, into modes.list; how many. */
uint32_t modes_list_kind(struct router *rt, const struct ref_message *r);
/* ---- modes_settle.c ---- */
/* The responder of this leg will not answer. A request to one, and a session, end with it. */
void modes_responder_gone(struct router *rt, uint32_t leg);
/* ---- modes_names.c ---- */
void modes_hash_name(struct router *rt, uint32_t conn);
int modes_drop_name(struct router *rt, uint32_t from, const struct ref_close *r);

#endif
