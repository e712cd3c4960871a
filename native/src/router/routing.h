/* routing: the primary state of the router. Its process keeps only the subject index and
 * lists, rebuilt from here at start.
 *
 *   struct routing | per port: inbox, ring of orders | clients |
 *   subscriptions, one array per port | text cells | requests | legs | names (modes.h) |
 *   per port: references that were set aside (aside.h)
 *
 * There is a place for each of PORTS_MAX ports, so that one can be added to an instance at work. What
 * nobody has used is a hole, and no memory; the lanes of the ports in use are prefaulted.
 *
 * Created by:   the router, under its lease. Mapped and written by: the router alone.
 * Invariants:
 *   R1  A word marked "redo" changes only through the redo log.
 *   R2  A subscription is named by (port, slot): the port gave it the slot and an epoch.
 *       It is there when ROUTING_ACTIVE is set; its other fields were written before that.
 *   R3  Input is processed in steps. The outputs of a step lie past the committed tails of
 *       the rings; the redo log makes them, and the place reached in the input, valid
 *       together. A step holds either messages or changes of subscriptions, never a message
 *       before a change: so repeating a step routes every message as the first time, and
 *       repeating the changes of a step in order leaves the same table.
 *   R4  in.done + 1 is the batch in the inbox, if its sequence field says so; in.at is how
 *       far it was processed; if a run is there, in.routed of its messages are. For lists longer than a whole ring, ordered in pieces by
 *       ascending subscription: in.progress is the last one ordered + 1, in.touched the
 *       ports that got pieces. The list may change between two pieces. For a message to several
 *       topics, or to a kind, in.progress also says which (modes_spread.c). For a fanout request with
 *       very many listeners, in.asking is the request whose legs are being ordered: those that have
 *       MODE_UNASKED are to come.
 *   R5  A request, one of its legs or a name is there while MODE_USED is set in its word (redo);
 *       its other fields were written before that and do not change. A used leg is of a used
 *       request, and a used request has a used leg. Their connections have client records, and so has
 *       that of a used name. No two used names are the same. A request with MODE_GATHERING does not
 *       have all of its legs, and nobody knows of it: the next router drops it.
 *   R6  A message of a mode, a name, each deadline that has passed and each leg that is settled
 *       because a connection ended is a step of its own, or shares one with its like: what the
 *       step reads in the tables is committed.
 *   R7  A reference that would hold up others is set aside: copied behind the tail of its port's aside, in
 *       the step that passes it in the input. While a connection has references there, all that follow of
 *       it go there too, so they stay in order. An entry has a place in the input of its own (R4): it is
 *       done when `at` is past its reference. `head` passes entries that are done. Lists in pieces are
 *       ordered from there alone, and of one port at most one at a time (P3).
 *   R8  A lane is that of one life of its port, whose number is in `lives`: what it says of batches that
 *       were taken and sent is about the journal of that life. The router begins a lane anew, before it
 *       takes anything from its queue, when the port has another number than the lane. Before that
 *       nobody has a client, a subscription or a message at that port.
 * Whose turn it is in a queue group is derived state of the index. It starts anew with the router,
 * so R3 does not promise that a repeated step picks the same member. Nothing of the first attempt
 * was visible to anybody. The same goes for who has been idle longest (modes.h).
 */
#ifndef MIDAIR_ROUTING_H
#define MIDAIR_ROUTING_H

#include "base/api.h"
#include "base/limits.h"
#include "shm/batch.h"
#include "shm/port.h"
#include "shm/records.h"
#include "shm/segment.h"

#define ROUTING_LAYOUT 4
#define ROUTING_TEXT_INLINE 72u
#define ROUTING_CELL_TEXT 124u
#define ROUTING_CELLS 65536u /* 8 MiB of text that does not fit its subscription */

struct routing_client {
    uint64_t uid;     /* single store; 0: none */
    uint64_t word;    /* single store: port << 32 | options (enum conn_option) once READY */
    uint32_t account;   /* before `uid`, as all that follow: its subject space; 0: the global one */
    uint32_t principal; /* whom admission found it to be; 0: nobody in particular */
    uint32_t permits;   /* permission set; 0: everything is allowed */
    uint32_t kind;      /* what it is; 0: a client on a socket */
    uint64_t reserved[4];
};
_Static_assert(sizeof(struct routing_client) == 64, "one cache line");

#define ROUTING_ACTIVE (1ULL << 63)
#define ROUTING_EPOCH 0x1fffffff00000000ULL
struct routing_sub {
    uint64_t word;    /* single store (redo when a max was reached): ROUTING_ACTIVE | epoch << 32 | conn slot */
    uint64_t uid;     /* of the client */
    uint64_t max;     /* single store; queue groups only: plain ones are counted by the port */
    uint64_t routed;  /* queue groups: messages sent its way; with base and stamp */
    uint64_t base;    /* `routed` before step `stamp` */
    uint64_t stamp;
    uint16_t subject_len, queue_len;
    uint32_t more;    /* first text cell + 1 */
    uint32_t account; /* of its client; 0: the global one */
    uint32_t kind;    /* what it stands for; 0: a client's subscription */
    char text[ROUTING_TEXT_INLINE]; /* subject, queue group; continued in cells */
    uint16_t sid_len; /* what its client calls it, as far as there is room: for who looks (census.h). 0: not known */
    char sid[REF_SID_MAX];
    uint64_t reserved[1];
};
_Static_assert(sizeof(struct routing_sub) == 192, "three cache lines");
_Static_assert(offsetof(struct routing_sub, text) == 64, "what a message of a group changes is in the first line");

struct routing_cell {
    uint32_t next; /* cell + 1 */
    char text[ROUTING_CELL_TEXT];
};

struct routing_in {
    uint64_t done;     /* redo: last input batch finished */
    uint64_t at;       /* redo: offset of the next reference in batch done + 1; 0: its first */
    uint64_t progress; /* redo: see R4 */
    uint64_t touched;  /* redo: see R4 */
    uint64_t listed;   /* redo: names gone through for the reference at `at`, see modes_names.c */
    uint64_t routed;   /* redo: messages of the reference at `at`, a run, that are routed */
    uint64_t asking;   /* redo: see R4: generation << 32 | request + 1; 0: none */
    uint64_t pad;
};

#define ROUTING_ASIDE_BYTES 1048576u
#define ROUTING_ASIDE_UNIT 64u
struct routing_aside { /* one port: a ring of struct aside_entry, R7 */
    uint64_t head, tail; /* redo: bytes, only grow; place: % ROUTING_ASIDE_BYTES */
    uint64_t reserved[6];
    char bytes[ROUTING_ASIDE_BYTES];
};
struct aside_entry {
    struct routing_in in; /* done: bytes of the entry, before `tail`; at: ASIDE_AT, or past the reference */
    char ref[];           /* a copy of it; none if the entry only fills the ring up to its end */
};
#define ASIDE_AT ((uint64_t)sizeof(struct routing_in))
_Static_assert(sizeof(struct aside_entry) == ROUTING_ASIDE_UNIT, "one unit at least");

struct routing_lane { /* one port */
    struct batch_inbox inbox;
    struct batch_ring orders;
};

struct routing {
    struct segment_header header;
    uint32_t ports, clients, subs_each, cells;  /* creator, once */
    uint64_t lanes_at, clients_at, subs_at, cells_at; /* creator, once */
    uint64_t requests_at, legs_at, names_at; /* creator, once */
    uint8_t kinds[PORTS_MAX]; /* creator, once: enum port_kind of each index */
    uint64_t asides_at; /* creator, once */
    uint64_t reply_key[2]; /* creator, once, at random: of the tokens in reply subjects (modes.h) */
    uint8_t lives[PORTS_MAX]; /* single stores "lane.begun": which life of its port each lane is of (R8) */
    uint64_t ports_high; /* single stores, only grows: ports that there ever were */
    uint64_t reserved0[3];
    uint64_t step;      /* redo: steps committed */
    uint64_t cells_high; /* single stores, only grow, raised before use */
    uint64_t requests_high, legs_high, names_high; /* high marks, as cells_high */
    uint64_t reserved1[11];
    uint64_t subs_high[PORTS_MAX]; /* high mark of each port's subscriptions; 0 again in its next life */
    struct routing_in in[PORTS_MAX];
    struct redo_log redo;
};

/* ---- modes (docs/modes.md): who waits for whom, and who is called what ---- */
#define MODE_USED (1ULL << 63)
#define MODE_GENERATION 0xffffffffULL /* low bits of a leg's word; part of its id, only grows */
#define MODE_REPLY_MAX 128u           /* bytes of a reply subject that a mode can be used with */
#define MODE_NAME_MAX 64u             /* bytes of "TYPE.INSTANCE@ORGANISATION" */
#define MODE_REQUESTS_MAX 65536u      /* requests and sessions that are open, of all clients */
#define MODE_LEGS_MAX 262144u         /* answers outstanding: one a request, but for fanout */
#define MODE_GATHERING 0x80u          /* beside MODE_FANOUT in the word of a request: R5 */
#define MODE_UNASKED (1ULL << 62)     /* in the word of a leg: its order is to come */

struct mode_request { /* a request whose replies pass us, or a session; R5 */
    uint64_t word;        /* redo: MODE_USED | generation << 8 | enum mode; without MODE_USED: free */
    uint64_t uid;         /* of the client that asks */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    uint32_t conn;        /* slot of the connection that asks */
    uint32_t reply_len;
    uint32_t account;     /* of that client; 0: the global one */
    uint32_t pad;
    uint64_t reserved[3];
    char reply[MODE_REPLY_MAX];
};
_Static_assert(sizeof(struct mode_request) == 192, "three cache lines");

struct mode_leg { /* one responder of a request; R5 */
    uint64_t word;     /* redo: MODE_USED | generation, perhaps MODE_UNASKED; without MODE_USED: free */
    uint64_t uid;      /* of the responder */
    uint64_t sub_word; /* of its subscription when it was chosen: another one may get the slot */
    uint32_t conn;     /* slot of its connection */
    uint32_t sub;      /* index_sub */
    uint32_t request;
    uint32_t account;  /* of the responder; 0: the global one */
    uint64_t bare;     /* not 0: release 0.1 has told its responder, in a reply subject without token */
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct mode_leg) == 64, "one cache line");

struct mode_name { /* by slot of the connection; R5 */
    uint64_t word; /* redo: MODE_USED | bytes of `text` << 8 | those of the name; 0: none */
    uint64_t uid;
    char text[MODE_NAME_MAX]; /* TYPE.INSTANCE, the name; perhaps @ and its organisation */
    uint32_t account; /* names of different accounts do not meet; 0: the global one */
    uint32_t pad;
    uint64_t reserved[5];
};
_Static_assert(sizeof(struct mode_name) == 128, "two cache lines");

API uint64_t routing_bytes(uint32_t clients, uint32_t subs_each);
/* The part that must be resident while there are that many ports: their lanes, and what is before them. */
API uint64_t routing_hot_bytes(uint32_t ports);
API uint64_t routing_fingerprint(void);
/* There are `connmgrs` connmgrs, and `others` ports behind them. */
API void routing_format(struct routing *r, uint32_t connmgrs, uint32_t others, uint32_t clients, uint32_t subs_each);
/* Begins the lane of a port for a life of it (R8). Nothing happens if it is that one's already. */
void routing_begin_lane(struct routing *r, uint32_t port, uint8_t life);

static inline struct routing_lane *routing_lane(struct routing *r, uint32_t port)
{
    return (struct routing_lane *)((char *)r + r->lanes_at) + port;
}
static inline struct routing_client *routing_clients(struct routing *r)
{
    return (struct routing_client *)((char *)r + r->clients_at);
}
static inline struct routing_sub *routing_sub(struct routing *r, uint32_t port, uint32_t slot)
{
    return (struct routing_sub *)((char *)r + r->subs_at) + (uint64_t)port * r->subs_each + slot;
}
static inline struct routing_cell *routing_cells(struct routing *r)
{
    return (struct routing_cell *)((char *)r + r->cells_at);
}
static inline struct mode_request *routing_requests(struct routing *r)
{
    return (struct mode_request *)((char *)r + r->requests_at);
}
static inline struct mode_leg *routing_legs(struct routing *r)
{
    return (struct mode_leg *)((char *)r + r->legs_at);
}
static inline struct routing_aside *routing_aside(struct routing *r, uint32_t port)
{
    return (struct routing_aside *)((char *)r + r->asides_at) + port;
}
static inline struct mode_name *routing_names(struct routing *r)
{
    return (struct mode_name *)((char *)r + r->names_at);
}
/* Bytes of the name, and of what lies behind it: of a record of release 0.1 that was not said. */
static inline uint32_t mode_name_len(uint64_t word) { return (uint32_t)(word & 0xff); }
static inline uint32_t mode_name_bytes(uint64_t word)
{
    uint32_t bytes = (uint32_t)(word >> 8 & 0xff);

    return bytes ? bytes : mode_name_len(word);
}

#endif
