/* conn: a client's connection from adoption to its end, and why it is not read.
 *
 * A connection is in one phase (enum conn_phase of journal.h). conn_set_phase() is the only writer of the
 * phase, and knows which phase may follow which (conn.c). It leaves by conn_end() alone, with a reason:
 * the table in conn.c says which reasons a client is told before its socket is shut.
 *
 * A connection is read while its set of causes not to read it (enum unread) is empty. unread_set() and
 * unread_clear() are the only writers of the set, and unread.c alone watches sockets for input. Causes are
 * private memory: a successor finds out anew, but for UNREAD_ANSWER and UNREAD_NAME, which the record has.
 */
#ifndef MIDAIR_CONN_H
#define MIDAIR_CONN_H

#include "base/api.h"

#include <stdint.h>

struct connmgr;
struct conn;

/* Why a connection ends: every one that ends has a reason, and is counted by its name. The record of a
 * lingering one has it (CONN_REASON_SHIFT of journal.h), so a number is never given another meaning. */
API enum close_reason {
    CLOSE_NONE = 0,           /* it does not end */
    CLOSE_CLIENT = 1,         /* the client closed it */
    CLOSE_READ_ERROR = 2,
    CLOSE_WRITE_ERROR = 3,
    CLOSE_PROTOCOL = 4,       /* the client said what the protocol does not allow */
    CLOSE_STALE = 5,          /* it did not answer PINGs */
    CLOSE_SLOW_BYTES = 6,     /* more than max_pending waits for it */
    CLOSE_SLOW_DEADLINE = 7,  /* it took nothing for write_deadline_ns */
    CLOSE_SUBSCRIPTIONS = 8,  /* it has too many, or there is no room for one more */
    CLOSE_SERVER = 9,         /* its socket did not survive */
    CLOSE_RATE = 10,          /* it sends more than it may */
    CLOSE_NAME_TAKEN = 11,    /* its name is that of another client, which is alive */
    CLOSE_SLOW_ROOM = 12,     /* no room for output was left, and most of it waited for this one */
    CLOSE_REPLACED = 13,      /* it did not answer, and another client asked for its name */
    CLOSE_UNFINISHED = 14,    /* its message did not grow, and others waited for the room that it held */
    CLOSE_LAME_DUCK = 15,     /* the instance is going to end */
    CLOSE_REASONS = 16,
};

/* Why a connection is not read now: bits of conn.unread. */
enum unread {
    UNREAD_PHASE = 1,     /* it was not greeted yet, or it is ending */
    UNREAD_DECISION = 2,  /* Python has to decide about its FRAME_CONNECT */
    UNREAD_ANSWER = 4,    /* that to its FRAME_PING: a verbose client's next confirmation comes after it */
    UNREAD_ROOM = 8,      /* no room for what it says: it waits in a list (stalled.c) */
    UNREAD_RATE = 16,     /* it sent more than it may (unread.c) */
    UNREAD_CONSUMER = 32, /* it publishes to a consumer that has too much waiting (unread.c, slow.c) */
    UNREAD_NAME = 64,     /* whether the name it asks for is its own is not known yet (names.c) */
    UNREAD_ROUTER = 128,  /* what it asked of the router takes long (ORDER_WAIT) */
    UNREAD_PORT = 256,    /* it publishes to clients of a port that takes no orders (unread.c) */
};
#define UNREAD_HELD (UNREAD_RATE | UNREAD_CONSUMER | UNREAD_PORT) /* it is in the list of unread.c */
/* Its next frame must not be looked at, even if it lies here already. */
#define UNREAD_FRAMES (UNREAD_PHASE | UNREAD_DECISION | UNREAD_ANSWER | UNREAD_NAME)

void conn_reset(struct conn *c, uint32_t slot);
/* What its listener says about it, and the number of the protocol that it spoke from the beginning. */
void conn_set_listener(const struct connmgr *cm, struct conn *c, uint32_t protocol, uint32_t transport);
void conn_load(struct conn *c, uint64_t word); /* what the record of a predecessor says (conn_rec.phase) */
void conn_set_phase(struct connmgr *cm, struct conn *c, uint32_t phase); /* into the step being committed */
API int conn_may_follow(uint32_t from, uint32_t to); /* enum conn_phase */
void conn_put_phase(struct connmgr *cm, const struct conn *c); /* the same, for options that changed */
/* Ends the connection. Outside of a step at once. Within one (connmgr.in_step) nothing more is taken from it
 * or delivered to it; it is told right before the step's commit by conn_tell_ending(), and the rest is done
 * after it by conn_settle_ending(). One that lingers already keeps the reason it has. */
void conn_end(struct connmgr *cm, struct conn *c, enum close_reason reason);
void conn_tell_ending(struct connmgr *cm);
void conn_settle_ending(struct connmgr *cm);
void conn_finish(struct connmgr *cm, struct conn *c); /* it has ended its side: all that it says was taken */
void conn_shut_finished(struct connmgr *cm);
/* What a client that lingers or finishes is waiting for may have happened. Once the router has ended its session and
 * the error is written, our side is shut down. A client that sees the end is thus out of every group. */
void conn_linger(struct connmgr *cm, struct conn *c);
void conn_ended(struct connmgr *cm, uint32_t slot, uint64_t uid); /* the router has ended its session */

void unread_set(struct conn *c, uint32_t causes);
void unread_clear(struct connmgr *cm, struct conn *c, uint32_t causes);
void unread_seen(struct connmgr *cm, struct conn *c); /* its socket is readable, and it is not to be read */
void unread_forget(struct connmgr *cm, struct conn *c); /* it ends: leaves every list */
void unread_charge(struct connmgr *cm, struct conn *c, uint64_t messages, uint64_t bytes);
void unread_for_consumer(struct connmgr *cm, struct conn *c, uint32_t consumer, uint64_t uid);
void unread_for_ports(struct connmgr *cm, struct conn *c, uint32_t ports); /* as bits */
void unread_go_on(struct connmgr *cm, uint32_t ports); /* these take orders again */
void unread_retry(struct connmgr *cm);

#endif
