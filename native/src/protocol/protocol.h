/* protocol: what a wire protocol is to the rest of a connmgr.
 *
 * A protocol turns the bytes of clients into frames, and messages, statuses and replies into bytes.
 * No file outside its folder knows what those bytes look like. What a frame means (references, the
 * subscription table, modes) is the connmgr's, and is the same for all protocols.
 *
 * The structure: one constant struct protocol for each protocol, listed in registry.c. A connection
 *               has the one of its listener, from its adoption on.
 * Written by:   nobody. The functions are pure: they keep nothing, allocate nothing, and know
 *               neither connections nor segments. What they write, the caller has reserved.
 * Called:       parse() once for a read, put_run() once for a run and a recipient, the others once
 *               for a message that needs them. Never for a byte.
 * Invariants:   not one byte past `len` is read. What parse() says of a frame, once it is not "not
 *               whole yet", does not change when more bytes follow: the cuts of a stream cannot be
 *               seen.
 * After a crash: nothing is left. Bytes that were not consumed are parsed again.
 */
#ifndef MIDAIR_PROTOCOL_H
#define MIDAIR_PROTOCOL_H

#include "base/api.h"

#include <stddef.h>
#include <stdint.h>

#define PROTOCOL_SID_SHORT 32  /* bytes of a sid that put_run() is given: BATCH_FRAME_MORE counts them */
#define PROTOCOL_SID_MAX 6016  /* bytes a protocol may use to name a subscription, as for a subject and a reply */
#define PROTOCOL_FRAMES 32     /* frames that are parsed at once */
#define PROTOCOL_FRAME_MORE 64 /* bytes of a delivered frame beside subject, reply, sid and body, at most */
#define PROTOCOL_REPLY_MORE 32 /* bytes of a reply beside its text, at most */
#define PROTOCOL_END_MAX 4     /* bytes behind a body */

API enum conn_option {     /* what was agreed with a client: bits of conn_rec.phase above the low byte */
    CONN_VERBOSE = 1 << 8,        /* each frame is confirmed */
    CONN_PEDANTIC = 1 << 9,       /* subjects of messages are judged */
    CONN_NO_ECHO = 1 << 10,       /* it does not get its own messages */
    CONN_HEADERS = 1 << 11,       /* it has a use for headers */
    CONN_NO_RESPONDERS = 1 << 12, /* it is told when nobody gets a request */
    CONN_CONNECTED = 1 << 13,     /* what it said about itself was accepted */
    CONN_AWAITING = 1 << 14,      /* conn.awaiting: only in the record */
    CONN_GREET_AGAIN = 1 << 15,   /* it takes a greeting at any time */
};

/* ---- what clients say ---- */

API enum frame_op {
    FRAME_MESSAGE = 1,
    FRAME_SUBSCRIBE,
    FRAME_UNSUBSCRIBE,
    FRAME_PING,    /* answered when everything before it has been routed */
    FRAME_CONNECT, /* says who the client is: Python decides about `args` */
    FRAME_NOTHING, /* having heard it is all */
};

API enum frame_flag {
    /* The subject breaks the rules of subject.h. FRAME_SUBSCRIBE: always judged, and refused.
     * FRAME_MESSAGE: judged only when pedantic; the sender is told, the message is routed. One that
     * is not judged is routed as it stands: a subject with an empty token has no recipients, and
     * wildcards in it are ordinary tokens. */
    FRAME_BAD_SUBJECT = 1,
    /* FRAME_MESSAGE: put_run() can send it to clients of this protocol as it lies. */
    FRAME_USUAL = 2,
};

/* Why a client is refused something, or its connection is ended with a word: each has a text in
 * every protocol. Those below REFUSALS are answers to frames, and counted by name (stats.h). */
API enum refusal {
    REFUSED_UNKNOWN_OP = 1,   /* also a body that does not end where its frame says */
    REFUSED_PARSER = 2,       /* wrong arguments */
    REFUSED_CONTROL_LINE = 3, /* the part before the body is too long */
    REFUSED_PAYLOAD = 4,      /* announced size over max_payload */
    REFUSED_SUBJECT = 5,      /* to subscribe to; the connection stays open */
    REFUSED_SID = 6,          /* longer than the protocol allows */
    REFUSED_HEADERS = 7,      /* headers from a client that said it has none */
    REFUSED_PUB_SUBJECT = 8,  /* to publish to (pedantic); the connection stays open */
    REFUSED_STALE = 9,        /* silent for too long */
    REFUSED_SUBSCRIPTIONS = 10,
    REFUSED_RATE = 11,
    REFUSED_SLOW = 12,
    REFUSED_NAME = 13,        /* its name is taken */
    REFUSED_CONNECTIONS = 14,
    REFUSED_REPLACED = 15,    /* it was silent, and another client has its name now */
};
#define REFUSALS 9 /* counted ones, and 0 for none */

API struct frame_limits {
    uint32_t max_control_line; /* bytes before the body */
    uint32_t max_payload;      /* bytes, headers included */
    uint8_t pedantic;          /* subjects of messages are judged */
    uint8_t headers;           /* messages may have headers */
    uint8_t repeats;           /* frames that are alike may be told as one (frame.repeats) */
};

/* Offsets are from the start of the frame; what an operation does not have is 0. */
API struct frame {
    uint8_t op;           /* enum frame_op */
    uint8_t flags;        /* enum frame_flag */
    uint16_t subject_len;
    uint16_t reply_len;   /* 0: no reply subject */
    uint16_t queue_len;   /* 0: no queue group */
    uint8_t verb;         /* the protocol's own name for the operation: nobody else reads it */
    uint8_t pad;
    uint16_t repeats;     /* frames of the same bytes behind it, but for their bodies */
    uint32_t subject;
    uint32_t reply;
    uint16_t queue;       /* it is near the beginning: nothing with a body has one */
    uint16_t sid_len;
    uint32_t sid;
    uint32_t args;        /* FRAME_CONNECT: what the client says about itself */
    uint32_t args_len;
    uint32_t body;        /* FRAME_MESSAGE: headers, then payload */
    uint32_t header_len;
    uint32_t total_len;   /* headers + payload */
    uint64_t max_msgs;    /* FRAME_UNSUBSCRIBE: 0 means now */
    uint64_t bytes;       /* the whole frame, once known, else 0 */
};
_Static_assert(sizeof(struct frame) == 64, "one cache line");

/* ---- what they are told ---- */

struct field { /* of a header block: not terminated */
    const uint8_t *name, *value;
    uint32_t name_len, value_len;
};

struct message { /* to be delivered, as its recipient gets it */
    const uint8_t *subject, *reply;
    uint32_t subject_len, reply_len; /* reply_len 0: none */
    uint32_t header_len, total_len;  /* header_len 0: without headers */
};

struct usual { /* a message with FRAME_USUAL: its frame lies in the arena from the subject on */
    uint64_t handle;
    const uint8_t *subject;
    uint32_t subject_len;
    uint32_t tail_len; /* bytes of the frame after the subject */
    uint16_t headers;  /* 0 or 1 */
    uint16_t alike;    /* follows the one before it, and differs from it in its body only */
};

enum reply {
    REPLY_PING,  /* are you there? */
    REPLY_PONG,  /* everything you said before your PING was routed */
    REPLY_OK,    /* to a client that wants each frame to be confirmed */
    REPLY_ERROR, /* with a text */
};

struct protocol {
    const char *name;
    uint32_t options;      /* enum conn_option of a connection that has said nothing yet */
    uint32_t sid_max;      /* bytes, at most PROTOCOL_SID_MAX */
    uint32_t usual_more[2]; /* exact bytes of put_run() beside subject, sid and tail: without, with headers */
    char end[PROTOCOL_END_MAX]; /* what follows a body, in both directions */
    uint32_t end_len;

    /* Parses the frames at `buf`, at most `most`, into ret_frames, which has room for one more.
     * Returns how many are whole. ret_status says what is behind them:
     *   1    nothing, or more that was not looked at: the limits may change with a FRAME_CONNECT
     *   0    a frame that is not whole, ret_frames[returned]. Its `bytes` is 0 while its control line
     *        is incomplete; else it is the total needed and all fields are filled
     *   < 0  one that is refused: -enum refusal, as soon as it is knowable */
    uint32_t (*parse)(const uint8_t *buf, uint64_t len, const struct frame_limits *limits,
                      struct frame *ret_frames, uint32_t most, int *ret_status);

    /* The first field at or after `at` whose name begins with `prefix`, in a header block that ends
     * at `end` or is cut there; a line without a name counts, with name_len 0. Returns where to go
     * on; NULL: there is none. */
    const uint8_t *(*next_field)(const uint8_t *at, const uint8_t *end, const char *prefix, uint32_t prefix_len,
                                 struct field *ret_field);

    /* Each returns the end of what it wrote. */
    /* Frames of messages as they lie, as many as fit before `end`; ret_count: how many. */
    uint8_t *(*put_run)(uint8_t *to, const uint8_t *end, const struct usual *messages, uint32_t count,
                        const char *sid, uint32_t sid_len, uint32_t *ret_count);
    /* What is before the headers and body of a message. */
    uint8_t *(*put_message)(uint8_t *to, const struct message *m, const char *sid, uint32_t sid_len);
    /* A header block with a status and fields. The member is NULL if the protocol has no headers. */
    uint8_t *(*put_status)(uint8_t *to, uint32_t code, const char *text, const struct field *fields, uint32_t count);
    /* The end of a header block to which a field is added. ret_kept: how much of the old block goes
     * before it. Returns NULL if this block cannot carry it. The member is NULL as that before. */
    uint8_t *(*put_field)(uint8_t *to, const uint8_t *headers, uint32_t header_len, const struct field *field,
                          uint32_t *ret_kept);
    uint8_t *(*put_reply)(uint8_t *to, enum reply reply, const char *text, uint32_t len);

    const char *(*text)(int refusal); /* what REPLY_ERROR says about it */
};

/* All protocols of this build, by number: registry.c. The first one is that of a listener of which
 * nothing is said. */
extern const struct protocol *const protocols[];

/* ---- for Python ---- */
API uint32_t protocol_count(void);
API const char *protocol_name(uint32_t protocol);
API const char *protocol_text(uint32_t protocol, int refusal);
/* A whole reply that refuses something, into at least `room` bytes; 0: it does not fit. */
API uint32_t protocol_error(uint32_t protocol, const char *text, uint32_t len, uint8_t *to, uint32_t room);
/* One frame, as protocol.parse: 1, 0 or -enum refusal. */
API int protocol_parse(uint32_t protocol, const uint8_t *buf, uint64_t len, const struct frame_limits *limits,
                       struct frame *ret_frame);

#endif
