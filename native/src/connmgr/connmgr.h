/* connmgr: the data plane of one connection manager. Private memory; everything here is
 * derived from the journal, the arena and the kernel, and dies with the process.
 *
 * One turn (connmgr_turn) is: take orders from the router and append what they say to the
 * recipients' output, write it out, read clients and append references, send references.
 * Python is given only the events it must decide on.
 *
 *   connmgr.c     opening, the turn, timers
 *   recover.c     the start, fresh or after a crash
 *   conn.c        from adoption to the end of a connection: phases and reasons (conn.h)
 *   input.c       recv in place
 *   unread.c      why a connection is not read; those that wait for their rate or for a consumer
 *   names.c       clients that ask for a name another one has
 *   stalled.c     connections that wait for room, in order
 *   unfinished.c  large frames that do not grow while others wait for their place
 *   slow.c        consumers that do not read
 *   take.c        frames to messages, or an answer
 *   refer.c       the references themselves, and when they leave
 *   replies.c     what a client is told, in the words of its protocol
 *   streams.c     the kernel's bytes and the protocol's: receiving, sending, positions after a crash
 *   output.c      segments and blocks of pending output, writing
 *   orders.c      a batch of orders: one step, and relinquishing
 *   deliver.c     messages to the output of those who get them
 *   decide.c      whether the router is asked, or its decision repeated
 *   modes_in.c    headers and subjects to modes
 *   modes_out.c   orders of modes to deliveries
 *   trace.c       records of deliveries
 *   subtable.c    (connection, sid) -> sub slot
 */
#ifndef MIDAIR_CONNMGR_H
#define MIDAIR_CONNMGR_H

#include "base/api.h"
#include "base/trace_if.h"
#include "shm/arena.h"
#include "protocol/protocol.h"
#include "transport/transport.h"
#include "shm/conntable.h"
#include "connmgr/conn.h"
#include "connmgr/journal.h"
#include "base/sockpos.h"
#include "base/clock.h"
#include "base/spin.h"
#include "observe/trace.h"
#include "shm/load.h"
#include "shm/port.h"
#include "shm/records.h"

#include <sys/epoll.h>
#include <sys/types.h>
#include <sys/uio.h>

#define CONNMGR_NONE UINT32_MAX
#define CONNMGR_EVENTS_MAX 512
#define CONNMGR_RECV_MAX 61440u       /* bytes of one recv, the quantum: two and a frame fit a chunk */
#define CONNMGR_RECV_MIN 16384u       /* the least room for one, when there are few free chunks */
#define CONNMGR_RECV_LINE 512u        /* bytes of one recv of a control line when too much is begun */
#define CONNMGR_BULK_BYTES 32768u     /* a frame larger than this gets a chunk of its own */
#define CONNMGR_COPY_MAX BATCH_COPY_MAX /* a body larger than this is written from the arena */
#define CONNMGR_REFS_AHEAD 6u         /* batches of references to messages in the ring when reading stops */
#define CONNMGR_DUE_AHEAD 2u          /* the same of those that no client frame brings: they wait with what they are about */
#define CONNMGR_LOAD_BYTES 16u        /* bytes of a body count for one of the batch of its reference (refer_load): */
#define CONNMGR_BATCH_BODIES (BATCH_BYTES * CONNMGR_LOAD_BYTES) /* so a batch is full at 128 KiB, */
#define CONNMGR_BATCH_MESSAGES 320u   /* or when it stands for so many messages; */
#define CONNMGR_LARGE_BODIES 2u       /* a large one, while the router keeps up (refer_look), has so many times the bytes, */
#define CONNMGR_LARGE_MESSAGES 2272u  /* and so many messages: all that one read brings, if they are not tiny */
#define CONNMGR_LARGE_MAX 2u          /* large ones that may wait for the router; nobody knows whether the one it has is done */
#define CONNMGR_WAITING_BATCHES (CONNMGR_REFS_AHEAD + 10u + 1u) /* in the ring, in a queue of the usual depth, with the router */
#define CONNMGR_WAITING_MESSAGES 8704u /* that all of these stand for at most: a large one takes the place of two */
_Static_assert(CONNMGR_LARGE_BODIES == 2 && CONNMGR_LARGE_MAX * CONNMGR_LARGE_MESSAGES +
                   (CONNMGR_WAITING_BATCHES - 2 * CONNMGR_LARGE_MAX) * CONNMGR_BATCH_MESSAGES <= CONNMGR_WAITING_MESSAGES,
               "however many of them are large");
_Static_assert(CONNMGR_REFS_AHEAD - CONNMGR_LARGE_MAX >= CONNMGR_DUE_AHEAD + 2, "what is due may end batches of what clients say");
#define CONNMGR_ORDERS_A_TURN 16      /* order batches between two writes */
#define CONNMGR_MADE_A_TURN (1u << 22) /* bytes of output before it is written: more leaves the cache */
#define CONNMGR_FULL_MESSAGES 200u    /* in a batch of references that is sent */
#define CONNMGR_PASSES_A_TURN 8       /* over the readable connections, until a batch is full */
#define CONNMGR_MORE_ROUNDS 4         /* rounds in a row that bring little end a flood */
#define CONNMGR_PAUSE_MS 2            /* a pause of this length ends a flood, too */
#define CONNMGR_READS_A_TURN 64       /* connections read between two looks at orders */
#define CONNMGR_CHUNKS_RESERVED 16u   /* kept for small messages when large ones come */
#define CONNMGR_CHUNKS_FEW 64u        /* free chunks below which they are filled to the end */
#define CONNMGR_CHUNKS_COMPACT 4u     /* of those, kept for moving unfinished frames together */
#define MODES_HEADER_MAX 4096u        /* bytes of a header block that are searched for a mode */
#define MODES_NO_RESPONDERS 503u      /* the status of it, see modes_out.c */
#define FLOW_SUBS_MAX 16u
#define FLOW_SUBJECT_MAX 128u
#define FLOW_NEVER UINT64_MAX
#define CONNMGR_DISCARD_NS 2000000000ULL /* how long a lingering peer may keep us waiting */

API enum connmgr_event_type {
    EVENT_FD = 1,      /* a descriptor given to connmgr_watch is readable: code = its tag */
    EVENT_CONNECT = 2, /* FRAME_CONNECT arrived: data = its args, code = options so far; answer with
                        * connmgr_connected, or connmgr_end */
    EVENT_CLOSED = 3,  /* the socket is gone: code = enum close_reason */
    EVENT_ENDED = 4,   /* the router confirmed; the slot is free again */
};

API struct connmgr_event {
    uint32_t type;
    uint32_t slot;
    uint64_t uid;
    int32_t code;
    uint32_t len;
    const char *data;
};

enum ask { ASK_OPEN = 1, ASK_READY = 2, ASK_CLOSE = 4, ASK_KEPT = 8 };

/* What happens to a consumer with more than max_pending bytes waiting for it; whatever it is,
 * one that takes nothing for write_deadline_ns is told and closed. */
enum slow_policy {
    SLOW_DISCONNECT = 0,   /* it is told and closed */
    SLOW_DROP = 1,         /* further messages are left out; it is told how many */
    SLOW_BACKPRESSURE = 2, /* who publishes to it is not read until it has caught up */
};
#define CONNMGR_LISTENERS_MAX 16u
#define CONNMGR_TEXT_MAX 1024u     /* bytes of what a client is told when it is refused */
#define CONNMGR_GREETING_MAX 1024u /* bytes of a greeting, with the 0 that ends it */
#define GREETING_CLIENT_ID 1       /* in a greeting: here goes the number of the client, */
#define GREETING_CLIENT_IP 2       /* and here its address; each once */

API struct connmgr_conf {
    uint32_t index, ports; /* its own number as a port, and how many there are */
    uint32_t max_payload, max_control_line;
    uint32_t max_subscriptions; /* per connection; 0: none */
    uint32_t few_subscriptions; /* who would have more slots of the table gets none of its last SUBTABLE_KEPT part;
                                 * 0: everybody does */
    uint64_t max_pending;       /* bytes */
    uint64_t write_deadline_ns, ping_interval_ns;
    uint32_t ping_max;
    uint64_t name_answer_ns;    /* the holder of a name has this long to answer when another asks; 0: ever */
    uint32_t spin_adaptive;
    uint64_t spin_ns;           /* see spin.h */
    uint32_t flow_leases;       /* 1: decisions of the router are repeated (decide.c) */
    uint64_t max_messages_s, max_bytes_s; /* from one connection, each second; 0: none */
    uint32_t rate_closes;                 /* 1: who sends more is closed; 0: read later */
    uint8_t slow[CONNMGR_LISTENERS_MAX];  /* enum slow_policy of each listener */
    uint8_t protocol[CONNMGR_LISTENERS_MAX]; /* that is spoken there: a number of registry.c */
    uint8_t transport[CONNMGR_LISTENERS_MAX]; /* number of each listener's transport (transport/registry.c) */
    char greeting[CONNMGR_LISTENERS_MAX][CONNMGR_GREETING_MAX]; /* said first, or empty */
};

API struct connmgr_stats { /* only grow */
    uint64_t messages_in, bytes_in, messages_out, bytes_out; /* bytes of the streams, with protocol lines */
    uint64_t payload_in, payload_out; /* bytes of headers and bodies */
    uint64_t recvs, sends, turns;
    uint64_t order_batches, stalls, compacted;
    uint64_t throttled;  /* times a connection was over its rate, and not read for a while */
    uint64_t held;       /* times one was not read because a consumer was crowded */
    uint64_t dropped;    /* messages left out by SLOW_DROP */
    uint64_t repeated;   /* messages delivered as the router had decided before (decide.c) */
    uint64_t closed[CLOSE_REASONS];
    uint64_t refused[REFUSALS]; /* frames that were refused, by enum refusal */
    /* what a start found of its predecessor's work, and repaired */
    uint64_t found_words;   /* of a committed step that was not finished */
    uint64_t found_input;   /* bytes taken from sockets and not recorded as frames */
    uint64_t found_output;  /* bytes given to sockets and not recorded */
    uint64_t found_batches; /* received and not processed, or not sent */
};

#define LOST_LEFT 2 /* conn.lost */
struct conn {
    int fd;               /* -1: none */
    uint32_t slot;
    uint64_t uid;
    uint32_t phase;       /* enum conn_phase */
    uint32_t options;     /* enum conn_option */
    const struct protocol *protocol; /* of its listener */
    const struct transport *transport; /* of its listener; without envelopes: plain */
    /* input: see J2 */
    uint32_t chunk;       /* CONNMGR_NONE: nothing buffered */
    uint32_t at, len;
    uint32_t need;        /* bytes of the frame at `at`, once known */
    uint32_t begun;       /* its part of connmgr.begun */
    uint64_t in_pos;
    uint8_t own_chunk;    /* the chunk is filled by this connection alone (unfinished_own) */
    uint8_t chained;      /* the frame lies along a chain of chunks */
    uint16_t unread;      /* enum unread: why it is not read */
    uint8_t watched;      /* is in the input epoll */
    uint8_t stalled;      /* UNREAD_ROOM: enum stalled_list it waits in */
    uint8_t writing;      /* waiting for the socket to take more */
    uint8_t dirty;        /* has uncommitted output */
    uint8_t flush;        /* is in the list of connections to write */
    uint8_t slow;         /* enum slow_policy of its listener */
    uint8_t speaks;       /* the number of its protocol */
    uint8_t carried;      /* the number of its transport */
    uint64_t stash;       /* blocks with the beginning of an envelope, as in its record */
    uint64_t raw_given;   /* raw bytes of what was fixed last that the kernel has */
    uint8_t crowded;      /* publishers are told to wait for it */
    uint8_t served;       /* its phase is one in which it is spoken to: see conn_is_heard() */
    uint8_t reason;       /* enum close_reason: it ends, or lingers */
    int16_t error;        /* CLOSE_PROTOCOL: -enum refusal, 0: it is told something else */
    uint8_t asked;        /* enum ask: references that are due */
    uint8_t confirmed;    /* lingering or finishing, and the router has ended the session */
    uint8_t finished;     /* is in the list of those that have all they are owed (conn_finish) */
    uint8_t discarding;   /* our side is shut down, reading to the end */
    uint8_t lost;         /* its socket did not survive; LOST_LEFT: because its client had left */
    /* output: see J3 */
    uint32_t head, tail;  /* segments; CONNMGR_NONE: empty */
    uint32_t write_block; /* being filled; counts as a user of the block */
    uint8_t *write_at, *write_end;
    uint64_t end, sent;   /* stream positions: appended, taken by the kernel */
    uint64_t dropped;     /* messages left out, to be told with the next one */
    uint64_t messages_out, messages_in, payload_out, payload_in; /* for show.h */
    /* lists and times */
    uint32_t sub_first, subs;
    uint32_t sub_slots;   /* of the table, that those take: with the cells of long sids */
    uint32_t next_dirty, next_flush, next_stalled, prev_stalled, next_asked, next_ending, next_finished;
    uint64_t stuck_since; /* the kernel took nothing since; 0: not stuck */
    uint64_t linger_since; /* PHASE_LINGER, PHASE_FINISHING: since nothing moved */
    uint64_t paid_messages_ns, paid_bytes_ns; /* until when its rate is used up */
    uint32_t next_held, prev_held;
    uint32_t next_own, prev_own; /* own_chunk: those that have one (unfinished.c), */
    uint32_t grown_len;          /* and how long the frame was when it grew last, */
    uint64_t grown_ns;           /* and when that was */
    uint32_t consumer;     /* UNREAD_CONSUMER: slot and uid of the crowded one */
    uint64_t consumer_uid;
    uint32_t ports;        /* UNREAD_PORT: those it waits for, as bits */
    uint64_t heard_ns;    /* last bytes from the client */
    uint32_t pings;       /* unanswered */
    uint16_t settled;     /* the last REF_PING of its own connmgr that was answered: see settle_first() of take.c */
    uint8_t name_asked;   /* another client asks for its name: see `question` */
    struct name_question { /* see names.c */
        uint64_t since_ns;    /* when the PING was appended, */
        uint64_t end, sent;   /* its end in the output, and how much of that the kernel had then */
        uint64_t asker_uid;
        uint32_t asker_port, asker;
    } question;
    uint32_t pass;        /* the last one it was read in */
    uint32_t run;         /* the last one it was a recipient of (deliver.c) */
    /* what it published: see decide.c */
    uint8_t has_flow;      /* connmgr.flows has one for it */
    uint8_t routing;       /* messages of it are with the router, */
    uint64_t routed_last;  /* and this is the last of them; */
    uint64_t routed_subscribed; /* connmgr.subscribed as it was then, or FLOW_NEVER */
};

/* Whether its phase is one in which it may speak. Then what it sent is parsed, now or later (J2). */
static inline int conn_is_heard(const struct conn *c) { return c->phase == PHASE_OPEN || c->phase == PHASE_GREETED; }

struct flow { /* see decide.c */
    uint64_t subscribed; /* connmgr.subscribed when it was decided */
    uint16_t subject_len, count;
    uint32_t subs[FLOW_SUBS_MAX];
    char subject[FLOW_SUBJECT_MAX];
};

enum step_bodies { BODIES_COPIED = 1, BODIES_KEPT = 2, BODIES_BOTH = 3 };

struct step { /* of input: see decide.h */
    const struct flow *flow;    /* that may be repeated; NULL: the router is asked */
    uint32_t count;             /* of connmgr.taken */
    uint32_t ref_bytes;         /* of the references that they would take */
    uint8_t bodies;             /* enum step_bodies */
    uint8_t limited;            /* a subscription was given a maximum in it */
    uint64_t subscribed, modes, payload_in; /* those of connmgr when it began */
};

struct refer_texts { /* of a message */
    const void *subject, *reply;
    uint32_t subject_len, reply_len;
};

struct taken { /* a message of the step, or several in a row that are alike */
    uint64_t handle; /* of the first */
    struct refer_texts texts;
    uint32_t size;   /* bytes of headers and body of each */
    uint32_t count;
    uint8_t flags;   /* enum ref_flags of their reference */
};

enum stalled_list {
    STALLED_BEGUN = 0, /* has bytes: of frames that wait for the ring, or of a small one */
    STALLED_LARGE = 1, /* has the beginning of a frame that wants chunks of its own */
    STALLED_FRESH = 2, /* has nothing yet */
    STALLED_LISTS = 3,
};
struct stalled { /* first come, first served; linked by next_stalled and prev_stalled */
    uint32_t first, last;
};

struct hold_said { /* a publisher that was told of a crowded consumer, and when */
    uint64_t consumer_uid, publisher;
    uint64_t when_ns;
};
#define CONNMGR_HOLDS_SAID 1024u /* remembered, so that not every message says it again */
#define CONNMGR_HOLDS_DUE 256u   /* waiting for room in the ring; further ones are said later */
struct hold_due {
    uint64_t consumer_uid;
    uint32_t consumer, publisher, connmgr;
};

struct sub_link { /* derived, per sub slot */
    uint32_t hash_next;
    uint32_t conn_next, conn_prev; /* CONNMGR_NONE ends */
};

struct connmgr {
    struct connmgr_conf conf;
    struct journal *journal;
    struct conntable *table;
    struct port port;    /* the first part of the journal; needed: segments of output with the body */
    int epoll, epoll_in, epoll_out;
    int in_armed, refs_armed;
    struct epoll_event ready[CONNMGR_READS_A_TURN]; /* readable, in the order they are read */
    int ready_at, ready_count;
    uint32_t pass;     /* see count_pass() */
    uint64_t large_reads, large_seen, reads_seen, messages_seen, active_ns; /* see flood_is_over() */
    uint32_t run;      /* see each_once() */
    uint32_t bulk;     /* connections with chunks of their own: these can always go on */
    uint32_t own_first;      /* their list, */
    uint64_t own_looked_ns;  /* and when it was looked at (unfinished.c) */
    uint64_t begun;    /* bytes of unfinished frames in shared chunks */
    uint64_t begun_max;
    struct stalled stalled[STALLED_LISTS];
    int retrying;      /* serving those that wait: they do not wait for each other */
    uint32_t held_first;
    uint64_t held_looked_ns;
    struct hold_said holds_said[CONNMGR_HOLDS_SAID];
    struct hold_due holds_due[CONNMGR_HOLDS_DUE];
    uint32_t holds_due_count;
    int stalled_ring;  /* some wait for room in the ring, not for the arena */
    int stalled_more;  /* some could go on without anything happening first */
    int in_step;    /* what is done now is committed with a step that is not finished: see conn_end() */
    struct spin spin[2]; /* without and with an answer of the router to wait for */
    uint64_t spin_seen;  /* spin_work() in and out when it was last asked */
    int asking;          /* references were sent, and no orders have come since */
    uint64_t now_ns;

    struct conn *conns;
    struct conn_rec *recs;

    struct sub_rec *subs;
    struct sub_link *links;
    uint32_t *sub_hash, sub_hash_mask;
    uint64_t sub_key[2];   /* of sub_hash: drawn when opened, and known to nobody else */
    uint32_t *sub_free, sub_free_count;
    uint32_t *sub_due, sub_due_count; /* REF_UNSUBSCRIBE to send */
    char sid_text[PROTOCOL_SID_MAX];  /* see subtable_sid() */
    uint64_t due[CONNMGR_DUE_AHEAD];  /* batches of what is due that have not left the ring (refer_due) */
    uint32_t due_count;
    uint32_t joined;      /* messages that are in runs of the batch `joined_seq`, but for the first of each */
    uint64_t joined_seq, looked_seq; /* refer_look() was asked about the latter */
    uint64_t large[CONNMGR_LARGE_MAX]; /* large ones that the router may not be done with (refer_forget), */
    uint32_t large_count;              /* in their order */

    struct out_seg *segs;
    uint32_t *seg_free, seg_free_count;
    uint32_t *block_free, block_free_count;
    uint16_t *block_users;

    uint32_t fill_chunk, fill_at; /* the shared open chunk */
    uint32_t *chunk_messages;     /* entries given out, with the uncommitted */

    uint32_t dirty_first, flush_first, ending_first, finished_first, asked_first, asked_last;
    int late;               /* the batch of orders has some that free slots (orders.c), */
    uint32_t last_delivery; /* and this is where its last delivery is */
    uint64_t made;       /* bytes for clients since the start */
    uint8_t *scratch;
    uint8_t *raw;        /* scratch of streams.c */
    uint32_t conn_count;

    int flows_on;
    uint64_t subscribed;  /* subscriptions that the router was told of */
    struct flow *flows;   /* by slot of the publisher */
    uint64_t modes;       /* messages of a mode that the router was told of */
    struct step step;
    struct taken *taken;

    struct trace trace;
    struct connmgr_event events[CONNMGR_EVENTS_MAX];
    uint32_t event_count;
    struct connmgr_stats stats;
};

/* ---- the seam to Python ---- */
API int connmgr_open(const struct connmgr_conf *conf, struct journal *journal, struct conntable *table,
                     int refs_queue, int orders_queue, struct connmgr **ret_cm);
API int connmgr_add_arena(struct connmgr *cm, uint32_t index, struct arena *arena);
/* Start, fresh or after a crash, in three steps: load the journal (returns connections found),
 * give it back the sockets that survived, rebuild the rest. Connections whose socket did
 * not come back are ended. */
API int connmgr_load(struct connmgr *cm);
API int connmgr_found(const struct connmgr *cm, uint32_t slot, uint64_t *ret_uid); /* 1: needs its socket */
API int connmgr_readopt(struct connmgr *cm, uint32_t slot, uint64_t uid, int fd);
API int connmgr_start(struct connmgr *cm);
API int connmgr_watch(struct connmgr *cm, int fd, uint32_t tag);
API void connmgr_unwatch(struct connmgr *cm, int fd);
/* One turn; sleeps at most timeout_ms when there is nothing to do. Returns the number of
 * events in connmgr_events, or a negative errno. */
API int connmgr_turn(struct connmgr *cm, int timeout_ms);
API const struct connmgr_event *connmgr_events(const struct connmgr *cm);
/* Calls other than turn leave events too. They are kept until they are forgotten. */
API uint32_t connmgr_event_count(const struct connmgr *cm);
API void connmgr_forget_events(struct connmgr *cm);
API int connmgr_adopt(struct connmgr *cm, uint32_t slot, uint64_t uid, int fd);
API int connmgr_connected(struct connmgr *cm, uint32_t slot, uint64_t uid, uint32_t options,
                          const char *name, uint32_t name_len);
/* Ends the connection. `text` (of `len` bytes; 0: none) is what the client is told, if the reason is one
 * that a client is told, instead of the reason's own text. */
API int connmgr_end(struct connmgr *cm, uint32_t slot, uint64_t uid, int reason, const char *text, uint32_t len);
/* What clients of that listener are greeted with from now on. */
API int connmgr_set_greeting(struct connmgr *cm, uint32_t listener, const char *text, uint32_t len);
/* Greets a client once more. -ENOENT: it cannot take it now, or ever; -ENOSPC: no room for output. */
API int connmgr_greet_again(struct connmgr *cm, uint32_t slot, uint64_t uid);
/* 1: it has no connection and no message, nobody is owed anything by it, and it waits for nothing. */
API int connmgr_idle(const struct connmgr *cm);
/* 1: a batch of orders lies in the inbox that a predecessor did not finish. */
API int connmgr_found_batch(const struct connmgr *cm);
/* Once a second: pings, stale peers, write deadlines. */
API void connmgr_tick(struct connmgr *cm);
API const struct connmgr_stats *connmgr_get_stats(const struct connmgr *cm);
/* For tests: which bucket a subscription of this connection is found in. */
API uint32_t connmgr_sub_bucket(const struct connmgr *cm, uint32_t conn, const char *sid, uint32_t len);
API uint32_t connmgr_conn_count(const struct connmgr *cm);
/* Slots ever used, and the descriptor of the connection in one (-1: none). */
API uint32_t connmgr_slots(const struct connmgr *cm);
API int connmgr_socket(const struct connmgr *cm, uint32_t slot, uint64_t *ret_uid);

/* ---- between the C files ---- */
struct connmgr_event *connmgr_event(struct connmgr *cm, uint32_t type, const struct conn *c, int code);
int connmgr_epoll(int epoll, int fd, uint32_t events, uint32_t tag); /* adds or changes */
void connmgr_ask(struct connmgr *cm, struct conn *c, uint8_t what);

void input_read(struct connmgr *cm, struct conn *c);
void input_receive(struct connmgr *cm, struct conn *c); /* the same, after input_place */
int input_place(struct connmgr *cm, struct conn *c);
int input_may_begin(const struct connmgr *cm);
int input_pack(struct connmgr *cm, struct conn *c); /* moves it behind others: 0 if there is no chunk */
void input_parse(struct connmgr *cm, struct conn *c);
void input_drop(struct connmgr *cm, struct conn *c);
void input_wake(struct connmgr *cm, struct conn *c); /* a cause is cleared: what it said meanwhile is looked at */
void stalled_open(struct connmgr *cm);
void stalled_add(struct connmgr *cm, struct conn *c);
void stalled_remove(struct connmgr *cm, struct conn *c);
int stalled_any(const struct connmgr *cm);
void stalled_retry(struct connmgr *cm);
void stalled_compact(struct connmgr *cm);
void unfinished_own(struct connmgr *cm, struct conn *c, int own); /* it has chunks of its own from here on, or not */
void unfinished_look(struct connmgr *cm);
void unfinished_tick(struct connmgr *cm);
void input_commit(struct connmgr *cm, struct conn *c);
/* These bytes are done with. Nobody moves on in the stream in another way. */
void input_move_on(struct conn *c, uint32_t bytes);
uint8_t *input_bytes(struct connmgr *cm, const struct conn *c);
struct frame_limits take_limits(const struct connmgr *cm, const struct conn *c);
enum take_end {
    TAKE_ALL,  /* all were taken */
    TAKE_ROOM, /* the next one waits for room: in the ring, or for an entry of a chunk */
    TAKE_STOP, /* it waits for something else, or the connection ends */
};
/* Takes parsed frames, the first of which is the next in the stream. Returns how many bytes were taken. */
uint32_t take_frames(struct connmgr *cm, struct conn *c, const struct frame *f, uint32_t count, enum take_end *ret_end);
void take_refuse(struct connmgr *cm, struct conn *c, int error);
int input_recover(struct connmgr *cm, struct conn *c, uint64_t taken);

void reply_say(struct connmgr *cm, struct conn *c, enum reply reply);
void reply_text(struct connmgr *cm, struct conn *c, enum reply reply, const char *text, uint32_t len);
void reply_refuse(struct connmgr *cm, struct conn *c, int refusal); /* tells it why, and counts it */
void reply_greet(struct connmgr *cm, struct conn *c);

/* As recv and sendmsg; counts are of plain bytes. streams_send may return 0: go on. */
ssize_t streams_receive(struct connmgr *cm, struct conn *c, struct iovec *iov, int count);
ssize_t streams_send(struct connmgr *cm, struct conn *c, struct iovec *iov, int count);
void streams_shut(const struct conn *c, int how);
struct stream_places { /* in the plain streams */
    uint64_t in, out;
    int fin; /* `out` counts that our side was shut */
};
/* After a crash: where the plain streams are, by the kernel's counts. 0, or a negative errno. */
int streams_find(struct connmgr *cm, struct conn *c, int fd, uint64_t taken, uint64_t given, struct stream_places *ret);
void streams_forget(struct connmgr *cm, struct conn *c); /* nothing more is received from it */
void streams_recover(struct connmgr *cm, struct conn *c); /* with output_recover() */
uint64_t streams_scratch_bytes(void);
#define STREAM_ENVELOPE_MIN 1024u /* plain_max of a transport with envelopes is not less */

void output_mark(struct connmgr *cm, struct conn *c); /* its record changes with this step */
uint8_t *output_reserve(struct connmgr *cm, struct conn *c, uint32_t bytes);
void output_append(struct connmgr *cm, struct conn *c, const void *bytes, uint32_t len);
/* A block that is filled once for several connections; each gets its first `len` bytes, and the one
 * who filled it says when it has been given to all. */
uint8_t *output_share(struct connmgr *cm, uint32_t *ret_block);
void output_append_shared(struct connmgr *cm, struct conn *c, uint32_t block, uint32_t len);
void output_shared(struct connmgr *cm, uint32_t block);
void output_append_body(struct connmgr *cm, struct conn *c, uint64_t handle, uint32_t skip, uint32_t len);
void output_put(struct connmgr *cm);   /* all dirty connections into the step being committed */
void output_flush(struct connmgr *cm); /* writes all connections in the flush list */
void output_write(struct connmgr *cm, struct conn *c);
void output_resume(struct connmgr *cm, struct conn *c);
void output_drop(struct connmgr *cm, struct conn *c);
uint32_t output_take_block(struct connmgr *cm); /* for something else than output */
void output_free_block(struct connmgr *cm, uint32_t block);
uint32_t output_blocks_left(const struct connmgr *cm);
int output_make_room(struct connmgr *cm);
int output_has_room(const struct connmgr *cm); /* there is nothing to be made */
int output_has_spare(const struct connmgr *cm, uint32_t frames);
void output_recover(struct connmgr *cm);

static inline int held_any(const struct connmgr *cm) { return cm->held_first != CONNMGR_NONE; }

/* Whether the message may be appended for this consumer, which has too much waiting already. */
int slow_may_deliver(struct connmgr *cm, struct conn *c, uint64_t handle);
void slow_written(struct connmgr *cm, struct conn *c); /* some of what waited was taken */
void slow_recover(struct connmgr *cm, struct conn *c);

int orders_process(struct connmgr *cm); /* the batch in the inbox */

/* What the router says about the last messages of this connection is not to be repeated. */
static inline void flow_never(struct conn *c) { c->routed_subscribed = FLOW_NEVER; }
/* The orders of a batch are carried out, and their messages still there. `last_at`: of the last delivery. */
void flow_learn(struct connmgr *cm, const struct batch *b, uint32_t last_at);

/* Carries out the ORDER_DELIVER or ORDER_RUN at `at` and those after it for the same recipients. Returns where the
 * next order is. */
uint32_t deliver_orders(struct connmgr *cm, const struct batch *b, uint32_t at, uint32_t stamp);
/* The messages to each of these subscriptions, which just take them (F4). */
void deliver_taken(struct connmgr *cm, const uint32_t *subs, uint32_t recipients, const struct taken *t, uint32_t count,
                   uint32_t stamp);
/* The connection of a subscription, counted on it as a delivery of that message (0: one that the
 * router wrote); NULL: it gets nothing more. */
struct conn *deliver_recipient(struct connmgr *cm, uint32_t sub, uint32_t stamp, uint64_t handle);
/* Delivers the message of an order with another subject or reply than it was published with. */
/* To one recipient, with other texts than it was published with; lengths of 0: as they were. */
struct deliver_texts {
    const uint8_t *subject, *reply;
    uint32_t subject_len, reply_len;
};
void deliver_as(struct connmgr *cm, uint32_t sub, uint64_t handle, const struct deliver_texts *as, uint32_t stamp);
void deliver_no_responders(struct connmgr *cm, const struct order_no_responders *o);
struct own { /* a message that no client published */
    struct message head; /* subject and reply */
    const uint8_t *body;
    uint32_t body_len;
    uint32_t code, field_count; /* code 0: no status */
    const char *text;
    const struct field *fields;
    const uint8_t *raw; /* a header block as a router of the release before wrote it, */
    uint32_t raw_len;   /* at most OWN_HEADERS_MAX bytes; 0: none */
};
#define OWN_HEADERS_MAX 1024u
void deliver_own(struct connmgr *cm, uint32_t sub, const struct own *own, uint32_t stamp);

/* 1: the message is of a mode, or to a subject of ours. `headers`: bytes of them to look at. */
int modes_recognise(const struct protocol *protocol, const uint8_t *p, const struct frame *f, uint32_t headers,
                    uint64_t now_ns, struct ref_mode *ret_mode, char *ret_topics);
void modes_topic(struct connmgr *cm, const struct order_topic *o, uint32_t stamp);
void modes_deliver(struct connmgr *cm, const struct order_mode *o, uint32_t stamp);
void modes_text(struct connmgr *cm, const struct order_text *o, uint32_t stamp);
void modes_status(struct connmgr *cm, const struct order_text *o, uint32_t stamp);

/* Whose a name is. To the one that asks: */
void names_given(struct connmgr *cm, const struct order_conn *o);
void names_taken(struct connmgr *cm, const struct order_conn *o);
/* To the one that has it: the question, and what it said since. */
void names_asked(struct connmgr *cm, const struct order_name *o);
void names_heard(struct connmgr *cm, struct conn *c);
void names_tick(struct connmgr *cm, struct conn *c); /* once a second, of either */

uint32_t subtable_find(struct connmgr *cm, uint32_t conn, const uint8_t *sid, uint32_t len);
/* Whether it may have one more, with a sid of so many bytes: the last quarter of the table is kept for clients that
 * have few slots of it, so one client, or a few greedy ones, cannot keep the others from a single one. A subscription
 * is a slot, and so is each cell of its sid. */
#define SUBTABLE_KEPT 4u
int subtable_may_add(const struct connmgr *cm, const struct conn *c, uint32_t sid_len);
uint32_t subtable_left(const struct connmgr *cm); /* free slots */
uint32_t subtable_add(struct connmgr *cm, struct conn *c, const uint8_t *sid, uint32_t len, int plain);
/* Its sid: in its record, or put together at cm->sid_text until the next call. */
const char *subtable_sid(struct connmgr *cm, const struct sub_rec *s, uint32_t *ret_len);
void subtable_die(struct connmgr *cm, uint32_t sub);
void subtable_free(struct connmgr *cm, uint32_t sub);
void subtable_recover(struct connmgr *cm);

static inline uint64_t sub_handle(const struct connmgr *cm, uint32_t sub)
{
    return sub | (cm->subs[sub].word & 0x1fffffff00000000ULL);
}

#endif
