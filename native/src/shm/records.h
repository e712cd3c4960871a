/* records: what the batches of the queues carry. batch.h is the transport; here is the content.
 *
 * References go from a port to the router, orders from the router to a port. Each record begins
 * with a head (struct ref, struct order) whose type says which of the structs below it is. A record
 * is padded to 8 bytes and lies within one batch.
 *
 * Written by:   refer.c and port.c in a port, instruct.c in the router; nobody else makes a record.
 * Invariants:   the bytes of a record do not change within one BATCH_VERSION: what a process of the
 *               previous release sent is read by this one. The asserts hold the offsets.
 */
#ifndef MIDAIR_RECORDS_H
#define MIDAIR_RECORDS_H

#include "shm/batch.h"

#include <stddef.h>

/* ---- references: port -> router ---- */

enum ref_type {
    REF_MESSAGE = 1,     /* ref_message; with REF_RUN ref_run */
    REF_OPEN = 2,        /* ref_open: asks for a session */
    REF_READY = 3,       /* ref_ready: what the client says about itself was accepted */
    REF_CLOSE = 4,       /* ref_close: the connection is gone */
    REF_SUBSCRIBE = 5,   /* ref_subscribe */
    REF_UNSUBSCRIBE = 6, /* ref_unsubscribe */
    REF_PING = 7,        /* ref_ping: when ORDER_PASSED answers it, everything said before it has been routed */
    REF_HOLD = 8,        /* ref_hold: who publishes to a crowded consumer is to wait */
    REF_NAME_KEPT = 9,   /* ref_name_kept: the holder of a name is alive, who asked for it cannot have it */
};
enum ref_flags {
    REF_REPLY = 2,         /* REF_MESSAGE: it has a reply subject */
    REF_NO_ECHO = 4,       /* REF_MESSAGE: not to the sender's own subscriptions */
    REF_NO_RESPONDERS = 8, /* REF_MESSAGE: the sender is told if nobody gets it */
    REF_ALONE = 16,        /* it is handled in a step of its own (R6): */
    REF_MODE = REF_ALONE,  /*   REF_MESSAGE: a struct ref_mode follows the texts */
    REF_NAMED = REF_ALONE, /*   REF_READY: the client has a name to be addressed by */
    REF_RUN = 32,          /* REF_MESSAGE: a run, see struct ref_run */
};

struct ref { /* the head of every reference */
    uint8_t type;  /* enum ref_type */
    uint8_t flags; /* enum ref_flags */
    uint16_t of_type[2];
    uint16_t bytes; /* of the whole record, padded */
    uint32_t conn;  /* slot of the connection it is about */
};
#define REF_BYTES_MIN 24u

struct ref_message {
    uint8_t type, flags;
    uint16_t subject_len, reply_len; /* no reply: 0 */
    uint16_t bytes;
    uint32_t conn;  /* of the sender */
    uint32_t size;  /* bytes of headers and body */
    uint64_t handle;
    char text[];    /* subject, reply */
};
/* Messages of one sender to one subject, of one size, without replies, whose handles follow each
 * other. Said at once, routed at once. */
struct ref_run {
    uint8_t type, flags;
    uint16_t subject_len, messages;
    uint16_t bytes;
    uint32_t conn;     /* of the sender */
    uint32_t size_all; /* bytes of headers and bodies of all of them */
    uint64_t first;    /* handle */
    char text[];       /* subject */
};
struct ref_open {
    uint8_t type, flags;
    uint16_t ip_len, pad;
    uint16_t bytes;
    uint32_t conn;
    uint32_t pad2;
    uint64_t uid;
    char ip[];
};
struct ref_ready {
    uint8_t type, flags;
    uint16_t name_len, pad; /* no name: 0 */
    uint16_t bytes;
    uint32_t conn;
    uint32_t options; /* enum conn_option */
    uint64_t uid;
    char name[];
};
struct ref_close {
    uint8_t type, flags;
    uint16_t pad[2];
    uint16_t bytes;
    uint32_t conn;
    uint32_t pad2;
    uint64_t uid;
};
struct ref_subscribe {
    uint8_t type, flags;
    uint16_t subject_len, queue_len; /* no queue group: 0 */
    uint16_t bytes;
    uint32_t conn;
    uint16_t sid_len, pad; /* 0: not said */
    uint64_t sub; /* slot | epoch << 32 */
    char text[];  /* subject, queue group, the beginning of the sid */
};
#define REF_SID_MAX 46u /* bytes of a sid that the router is told: routing_sub has room for them */
struct ref_unsubscribe {
    uint8_t type, flags;
    uint16_t max_len, pad; /* always 8 */
    uint16_t bytes;
    uint32_t conn;
    uint32_t pad2;
    uint64_t sub; /* slot | epoch << 32 */
    uint64_t max; /* messages after which it ends; 0: now */
};
struct ref_ping {
    uint8_t type, flags;
    uint16_t settle, pad; /* comes back with the answer; 0: the client has asked, and is told */
    uint16_t bytes;
    uint32_t conn;
    uint32_t pad2;
    uint64_t uid;
};
struct ref_hold {
    uint8_t type, flags;
    uint16_t port_len, pad; /* always 8 */
    uint16_t bytes;
    uint32_t conn;          /* the crowded consumer */
    uint32_t publisher;     /* slot of a connection that publishes to it */
    uint64_t uid;           /* of the consumer */
    uint64_t publisher_port; /* port of the publisher */
};
struct ref_name_kept {
    uint8_t type, flags;
    uint16_t asker_len, pad; /* always 16 */
    uint16_t bytes;
    uint32_t conn;           /* the holder of the name */
    uint32_t asker;          /* slot of the connection that asked for it */
    uint64_t uid;            /* of the holder */
    uint64_t asker_port;     /* port of the asker */
    uint64_t asker_uid;
};

#define REF_FITS(type, second)                                                                            \
    _Static_assert(sizeof(struct type) >= REF_BYTES_MIN && offsetof(struct type, flags) == 1 &&           \
                       offsetof(struct type, bytes) == 6 && offsetof(struct type, conn) == 8 &&           \
                       offsetof(struct type, second) == 16, "frozen wire layout")
REF_FITS(ref_message, handle);
REF_FITS(ref_run, first);
REF_FITS(ref_open, uid);
REF_FITS(ref_ready, uid);
REF_FITS(ref_close, uid);
REF_FITS(ref_subscribe, sub);
REF_FITS(ref_unsubscribe, sub);
REF_FITS(ref_ping, uid);
REF_FITS(ref_hold, uid);
REF_FITS(ref_name_kept, uid);
_Static_assert(sizeof(struct ref_name_kept) == 40, "frozen wire layout");
_Static_assert(offsetof(struct ref, bytes) == 6 && offsetof(struct ref, conn) == 8, "frozen wire layout");
_Static_assert(offsetof(struct ref_message, subject_len) == 2 && offsetof(struct ref_message, reply_len) == 4 &&
                   offsetof(struct ref_message, size) == 12 && offsetof(struct ref_message, text) == 24, "frozen wire layout");
_Static_assert(offsetof(struct ref_run, subject_len) == 2 && offsetof(struct ref_run, messages) == 4 &&
                   offsetof(struct ref_run, size_all) == 12 && offsetof(struct ref_run, text) == 24, "frozen wire layout");
_Static_assert(offsetof(struct ref_open, ip) == 24 && offsetof(struct ref_ready, name) == 24 &&
                   offsetof(struct ref_ready, options) == 12 && offsetof(struct ref_subscribe, text) == 24, "frozen wire layout");
_Static_assert(offsetof(struct ref_unsubscribe, max) == 24 && sizeof(struct ref_unsubscribe) == 32 &&
                   offsetof(struct ref_hold, publisher) == 12 && offsetof(struct ref_hold, publisher_port) == 24 &&
                   sizeof(struct ref_hold) == 32, "frozen wire layout");

/* What headers and subject say about a message of a mode (docs/modes.md). */
enum mode {
    MODE_NONE = 0,        /* a deadline, or a subject of ours */
    MODE_SEMAPHORE = 1,
    MODE_SESSION_OPEN = 2,
    MODE_SESSION = 3,
    MODE_SESSION_END = 4,
    MODE_FANOUT = 5,
    MODE_MORE = 6,        /* of a reply: not the last one */
    MODE_BAD = 7,         /* headers that mean nothing */
};
enum mode_place { /* which subject of ours it is published to */
    PLACE_ANY = 0,
    PLACE_REPLY = 1,   /* MODE_REPLY_PREFIX, an id and its token */
    PLACE_IPC = 2,     /* MODE_IPC_PREFIX and a name */
    PLACE_CLIENTS = 3, /* MODE_CLIENTS_SUBJECT, perhaps a dot and a name */
    PLACE_KIND = 4,    /* MODE_KIND_PREFIX or MODE_ORG_PREFIX, and which */
};
#define MODE_PREFIX "_midair."
#define MODE_REPLY_PREFIX MODE_PREFIX "r."
#define MODE_IPC_PREFIX MODE_PREFIX "ipc."
#define MODE_CLIENTS_SUBJECT MODE_PREFIX "clients"
#define MODE_KIND_PREFIX MODE_PREFIX "kind."
#define MODE_ORG_PREFIX MODE_PREFIX "org."
#define MODE_ORG_INFIX ".org." /* behind a kind: of that kind and that organisation */
#define MODE_ID_DIGITS 16u     /* of an id; as many of its token */
#define MODE_REPLY_BYTES (sizeof MODE_REPLY_PREFIX - 1 + 2 * MODE_ID_DIGITS)
#define MODE_REPLY_BYTES_0_1 (sizeof MODE_REPLY_PREFIX - 1 + MODE_ID_DIGITS) /* of release 0.1: no token */
#define MODE_TOPICS_MAX 16u    /* of one message, besides its subject */
#define MODE_TOPICS_BYTES 1024u /* of all of them, with a blank between two */

struct ref_mode { /* behind the padded texts of a message with REF_MODE */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    uint64_t id;          /* PLACE_REPLY */
    uint8_t mode;         /* enum mode */
    uint8_t place;        /* enum mode_place */
    uint16_t topics_len;  /* bytes of `topics`; 0: none */
    uint8_t pad[4];
    char topics[];        /* further subjects of the message, a blank between two */
};
_Static_assert(sizeof(struct ref_mode) == 24 && offsetof(struct ref_mode, topics) == 24, "frozen wire layout");

static inline const struct ref *batch_ref(const struct batch *b, uint32_t at)
{
    return (const struct ref *)((const char *)b + at);
}
/* Bytes of a record with `text` bytes of text. */
static inline uint32_t ref_bytes(uint32_t text) { return REF_BYTES_MIN + batch_pad(text); }

/* A message or a run: what is at the same place in both. */
static inline const struct ref_run *ref_run(const struct ref_message *r) { return (const struct ref_run *)r; }
static inline uint32_t ref_messages(const struct ref_message *r)
{
    return r->flags & REF_RUN ? ref_run(r)->messages : 1;
}
static inline const char *ref_reply(const struct ref_message *r) { return r->text + r->subject_len; }
static inline const struct ref_mode *ref_mode(const struct ref_message *r)
{
    return (const struct ref_mode *)(r->text + batch_pad((uint32_t)r->subject_len + r->reply_len));
}

/* ---- orders: router -> port ---- */

enum order_type {
    ORDER_DELIVER = 1,       /* order_deliver */
    ORDER_DELETE = 2,        /* order_delete: nobody gets these messages */
    ORDER_NO_RESPONDERS = 3, /* order_no_responders: the sender is told, then the message deleted */
    ORDER_OPENED = 4,        /* order_opened: the session is there */
    ORDER_PASSED = 5,        /* order_conn: answers a REF_PING */
    ORDER_CLOSED = 6,        /* order_conn: its session and subscriptions are gone */
    ORDER_UNSUBSCRIBED = 7,  /* order_sub: no order names it again */
    ORDER_REFUSED = 8,       /* order_sub: the router has no room for it */
    ORDER_HOLD = 9,          /* order_hold */
    ORDER_MODE = 10,         /* order_mode */
    ORDER_TEXT = 11,         /* order_text, then order_written: of a router of the release before */
    ORDER_NAME_TAKEN = 12,   /* order_conn: its name is that of another client, which is alive */
    ORDER_TRACE = 13,        /* order_trace: about the orders after it (trace.h) */
    ORDER_RUN = 14,          /* order_run */
    ORDER_STATUS = 15,       /* order_text, then order_said: a message of the router's own */
    ORDER_NAME_GIVEN = 16,   /* order_conn: the name it asked for is its own */
    ORDER_NAME_ASKED = 17,   /* order_name: another client asks for the name of this one: is it alive? */
    ORDER_WAIT = 18,         /* order_conn: it is not to be read until its references are done with */
    ORDER_GO_ON = 19,        /* order_conn: they are */
    ORDER_TOPIC = 20,        /* order_topic */
    ORDER_STILL = 21,        /* order_wait: a connection publishes to ports that stand still, and is not to be read */
    ORDER_STILL_OVER = 22,   /* order_wait: these ports take orders again */
    ORDER_LAST = ORDER_STILL_OVER,
};
#define ORDER_MORE 0x80 /* in type: further recipients of this message follow for this port */

struct order { /* the head of every order */
    uint8_t type;  /* enum order_type, perhaps | ORDER_MORE */
    uint8_t limit; /* on the last order of a message: how many ports have orders about it; else 0 */
};
#define ORDER_BYTES_MIN 16u

struct order_message { /* what all orders about messages have: DELIVER, RUN, DELETE, NO_RESPONDERS, MODE, TOPIC */
    uint8_t type, limit;
    uint16_t of_type;
    uint32_t of_type2;
    uint64_t handle; /* of the first, where there can be several */
};
struct order_deliver {
    uint8_t type, limit;
    uint16_t recipients;
    uint32_t only; /* sub slot, if there is one recipient */
    uint64_t handle;
    uint32_t subs[]; /* sub slots, if there are several */
};
struct order_run { /* messages whose handles follow each other */
    uint8_t type, limit;
    uint16_t recipients;
    uint32_t messages;
    uint64_t first;
    uint32_t subs[]; /* sub slots, one also */
};
struct order_delete {
    uint8_t type, limit;
    uint16_t messages; /* whose handles follow each other */
    uint32_t pad;
    uint64_t first;
};
struct order_no_responders {
    uint8_t type, limit;
    uint16_t one; /* always 1 */
    uint32_t sub; /* slot, of the sender */
    uint64_t handle;
};
struct order_opened {
    uint8_t type, limit;
    uint16_t text_len; /* a router of the release before sends a greeting: it is not looked at. 0 since */
    uint32_t conn; /* slot */
    uint64_t uid;
    char text[];
};
struct order_conn { /* orders about a connection: PASSED, CLOSED, NAME_TAKEN, NAME_GIVEN, WAIT, GO_ON */
    uint8_t type, limit;
    uint16_t settle; /* PASSED: that of the REF_PING */
    uint32_t conn; /* slot */
    uint64_t uid;
};
struct order_name {
    uint8_t type, limit;
    uint16_t asker_port; /* port of who asks */
    uint32_t conn;       /* slot of the holder */
    uint64_t uid;        /* of the holder */
    uint64_t asker_uid;
    uint32_t asker;      /* slot of who asks */
    uint32_t pad;
};
struct order_sub { /* orders about a subscription: UNSUBSCRIBED, REFUSED */
    uint8_t type, limit;
    uint16_t pad;
    uint32_t conn; /* slot */
    uint64_t sub;  /* slot | epoch << 32 */
};
struct order_hold { /* a publisher is not read until the consumer is no longer crowded */
    uint8_t type, limit;
    uint16_t pad;
    uint32_t publisher;    /* conn slot */
    uint64_t consumer_uid;
    uint32_t consumer;     /* conn slot */
    uint32_t pad2;
};
struct order_wait { /* to the port of a publisher */
    uint8_t type, limit;
    uint16_t pad;
    uint32_t conn;  /* WAIT: its slot */
    uint64_t ports; /* as bits */
};
struct order_mode { /* as ORDER_DELIVER to one, with texts of its own */
    uint8_t type, limit;
    uint16_t rest; /* bytes after `handle`, without padding */
    uint32_t sub;  /* slot */
    uint64_t handle;
    uint64_t deadline_ns; /* not delivered after this; 0: none */
    uint16_t subject_len, reply_len; /* 0: as it was published */
    uint32_t pad;
    char text[];          /* subject, reply */
};
struct order_topic { /* as ORDER_DELIVER, under another subject than it was published to */
    uint8_t type, limit;
    uint16_t recipients;
    uint32_t subject_len;
    uint64_t handle;
    uint32_t subs[]; /* sub slots, padded; then the subject, padded */
};
struct order_text { /* a message of the router's own: after the recipients what it says */
    uint8_t type, limit;
    uint16_t recipients;
    uint32_t written; /* bytes of the struct order_said or order_written, with its texts */
    uint64_t pad;
    uint32_t subs[];  /* sub slots, padded */
};
struct order_written {
    uint16_t subject_len, reply_len, header_len, body_len;
    char text[];
};
struct order_said {
    uint16_t subject_len, reply_len, fields_len, body_len;
    uint16_t status; /* enum mode_status */
    uint16_t pad[3];
    char text[];     /* subject, reply, fields, body. A field: enum status_field and its length, a byte each, its text */
};
enum mode_status { /* what each means to a client is in modes_out.c */
    STATUS_NONE = 0, /* only a body */
    STATUS_EXPECT = 1,
    STATUS_END = 2,
    STATUS_BAD = 3,
    STATUS_EXPIRED = 4,
    STATUS_SESSION_EXISTS = 5,
    STATUS_NO_SESSION = 6,
    STATUS_RESPONDER_GONE = 7,
    STATUS_REQUESTER_GONE = 8,
    STATUS_REPLY_TOO_LONG = 9,
    STATUS_TOO_MANY_REQUESTS = 10,
    STATUS_TOO_MANY_LISTENERS = 11,
    STATUS_NO_RESPONDERS = 12,
    STATUSES = 13,
};
enum status_field { /* what a status says beside itself, each as text */
    STATUS_FIELD_CLIENT = 1, /* number of a connection, */
    STATUS_FIELD_NAME = 2,   /* and what it is called */
    STATUS_FIELD_EXPECT = 3, /* replies to expect */
    STATUS_FIELDS = 4,
};
struct order_trace {
    uint8_t type, limit;
    uint16_t pad;
    uint32_t bytes;     /* of the references that the orders after this come of */
    uint64_t queued_ns; /* closed_ns of those */
    uint64_t routed_ns; /* when the router took them up */
    uint32_t source_generation, router_generation;
    uint32_t round_messages;
    uint8_t source;     /* port of the references */
    uint8_t pad2[3];
};

#define ORDER_FITS(type, second, third, bytes)                                                            \
    _Static_assert(offsetof(struct type, limit) == 1 && offsetof(struct type, second) == 4 &&             \
                       offsetof(struct type, third) == 8 && sizeof(struct type) == bytes, "frozen wire layout")
ORDER_FITS(order_message, of_type2, handle, 16);
ORDER_FITS(order_deliver, only, handle, 16);
ORDER_FITS(order_run, messages, first, 16);
ORDER_FITS(order_delete, pad, first, 16);
ORDER_FITS(order_no_responders, sub, handle, 16);
ORDER_FITS(order_opened, conn, uid, 16);
ORDER_FITS(order_conn, conn, uid, 16);
ORDER_FITS(order_sub, conn, sub, 16);
ORDER_FITS(order_name, conn, uid, 32);
ORDER_FITS(order_hold, publisher, consumer_uid, 24);
ORDER_FITS(order_wait, conn, ports, 16);
ORDER_FITS(order_mode, sub, handle, 32);
ORDER_FITS(order_topic, subject_len, handle, 16);
ORDER_FITS(order_text, written, pad, 16);
ORDER_FITS(order_trace, bytes, queued_ns, 40);
_Static_assert(offsetof(struct order_deliver, recipients) == 2 && offsetof(struct order_deliver, subs) == 16 &&
                   offsetof(struct order_run, recipients) == 2 && offsetof(struct order_run, subs) == 16 &&
                   offsetof(struct order_delete, messages) == 2, "frozen wire layout");
_Static_assert(offsetof(struct order_opened, text_len) == 2 && offsetof(struct order_opened, text) == 16 &&
                   offsetof(struct order_hold, consumer) == 16 && offsetof(struct order_mode, rest) == 2 &&
                   offsetof(struct order_mode, deadline_ns) == 16 && offsetof(struct order_mode, subject_len) == 24 &&
                   offsetof(struct order_mode, reply_len) == 26 && offsetof(struct order_mode, text) == 32, "frozen wire layout");
_Static_assert(offsetof(struct order_text, recipients) == 2 && offsetof(struct order_text, subs) == 16 &&
                   sizeof(struct order_written) == 8 && sizeof(struct order_said) == 16 && offsetof(struct order_trace, routed_ns) == 16 &&
                   offsetof(struct order_trace, source) == 36, "frozen wire layout");

/* Bytes after the handle of an ORDER_MODE that has no texts. */
#define ORDER_MODE_REST ((uint32_t)(sizeof(struct order_mode) - ORDER_BYTES_MIN))

static inline uint32_t order_deliver_bytes(uint32_t recipients)
{
    return ORDER_BYTES_MIN + (recipients < 2 ? 0 : batch_pad(recipients * 4));
}
static inline uint32_t order_run_bytes(uint32_t recipients) { return ORDER_BYTES_MIN + batch_pad(recipients * 4); }
static inline uint32_t order_topic_bytes(uint32_t recipients, uint32_t subject_len)
{
    return ORDER_BYTES_MIN + batch_pad(recipients * 4) + batch_pad(subject_len);
}
static inline const char *order_topic_subject(const struct order_topic *o)
{
    return (const char *)o->subs + batch_pad(o->recipients * 4u);
}

static inline uint32_t order_bytes(const struct order *o)
{
    switch (o->type & ~ORDER_MORE) {
    case ORDER_DELIVER:
        return order_deliver_bytes(((const struct order_deliver *)o)->recipients);
    case ORDER_RUN:
        return order_run_bytes(((const struct order_run *)o)->recipients);
    case ORDER_HOLD:
        return sizeof(struct order_hold);
    case ORDER_NAME_ASKED:
        return sizeof(struct order_name);
    case ORDER_OPENED:
        return ORDER_BYTES_MIN + batch_pad(((const struct order_opened *)o)->text_len);
    case ORDER_MODE:
        return ORDER_BYTES_MIN + batch_pad(((const struct order_mode *)o)->rest);
    case ORDER_TOPIC: {
        const struct order_topic *t = (const struct order_topic *)o;

        return order_topic_bytes(t->recipients, t->subject_len);
    }
    case ORDER_TRACE:
        return sizeof(struct order_trace);
    case ORDER_TEXT:
    case ORDER_STATUS: {
        const struct order_text *t = (const struct order_text *)o;

        return ORDER_BYTES_MIN + batch_pad(t->recipients * 4u) + batch_pad(t->written);
    }
    default:
        return ORDER_BYTES_MIN;
    }
}

static inline const struct order *batch_order(const struct batch *b, uint32_t at)
{
    return (const struct order *)((const char *)b + at);
}

/* Whether this order is about a message that a port lets go of after it: struct order_message. */
static inline int order_has_message(const struct order *o)
{
    uint8_t type = o->type & (uint8_t)~ORDER_MORE;

    return type <= ORDER_NO_RESPONDERS || type == ORDER_MODE || type == ORDER_RUN || type == ORDER_TOPIC;
}
static inline uint64_t order_handle(const struct order *o) { return ((const struct order_message *)o)->handle; }
/* The messages of an order that has any. */
static inline uint32_t order_messages(const struct order *o)
{
    uint8_t type = o->type & (uint8_t)~ORDER_MORE;

    return type == ORDER_RUN ? ((const struct order_run *)o)->messages
                             : type == ORDER_DELETE ? ((const struct order_delete *)o)->messages : 1;
}
/* The recipients of an ORDER_DELIVER or ORDER_RUN: how many, and their sub slots. */
static inline uint32_t order_recipients(const struct order *o) { return ((const struct order_deliver *)o)->recipients; }
static inline const uint32_t *order_subs(const struct order *o)
{
    const struct order_deliver *d = (const struct order_deliver *)o;

    return d->recipients == 1 && o->type != ORDER_RUN ? &d->only : d->subs;
}
static inline const struct order_written *order_written(const struct order_text *o)
{
    return (const struct order_written *)((const char *)o->subs + batch_pad(o->recipients * 4u));
}
static inline const struct order_said *order_said(const struct order_text *o)
{
    return (const struct order_said *)((const char *)o->subs + batch_pad(o->recipients * 4u));
}

#endif
