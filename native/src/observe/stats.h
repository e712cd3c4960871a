/* stats: what a component lets others see of its work. Nothing here is needed to recover.
 *
 *   struct stats | one row for each connection slot (connmgrs only)
 *
 * Created by:   connmgr N, the router or the dispatcher, each its own, under its lease.
 * Written by:   that process alone: plain aligned 64-bit words, no commit points. The counting is
 *               done in private memory; a few times a second it is copied here, so a message costs
 *               nothing here. Readers map it read-only (native/stats.py).
 * Invariants:   a word is never half written. Words of one copy may differ in age by one copy.
 *               A row is somebody's while `uid` is not 0; its text was written before that. Who
 *               finds the same uid before and after copying a row has a row of that connection.
 * After a crash: the successor goes on from the totals and rows it finds, so counts only grow,
 *               and lack what was counted after the last copy. A segment of another layout is
 *               removed and made anew by its owner: statistics never keep a version from starting. Of
 *               one that only counts something else the rows are taken over.
 */
#ifndef MIDAIR_STATS_H
#define MIDAIR_STATS_H

#include "base/api.h"
#include "base/limits.h"
#include "shm/segment.h"

#define STATS_LAYOUT 1 /* of struct stats and struct stats_conn; what is counted is in the fingerprint */
#define STATS_TOTALS_MAX 96u /* words */
#define STATS_GAUGES_MAX 96u
#define STATS_NAME_MAX 64u
#define STATS_WORD_MAX 24u

API struct stats_conn { /* all fields: the connmgr that owns the segment */
    _Atomic uint64_t uid;    /* stored last when a row is taken; 0: nobody's */
    uint64_t messages_in, messages_out;
    uint64_t bytes_in, bytes_out; /* of the stream: with protocol lines */
    uint64_t pending;        /* bytes appended that the kernel has not taken */
    uint64_t active_ns;      /* CLOCK_REALTIME: when it was last seen that bytes had moved */
    uint64_t subs;
    uint64_t since_ns;       /* CLOCK_REALTIME: accepted */
    uint16_t port;
    char ip[46];
    uint32_t stuck_ms;       /* for how long the client has taken nothing of what is pending */
    uint32_t rtt_us;         /* round trips of the connection, as the kernel sees them; 0: not known yet */
    char name[STATS_NAME_MAX];
    char lang[STATS_WORD_MAX], version[STATS_WORD_MAX];
    uint64_t payload_in, payload_out; /* bytes of headers and bodies */
};
_Static_assert(sizeof(struct stats_conn) == 256, "four cache lines");
_Static_assert(offsetof(struct stats_conn, since_ns) == 64, "what changes is in the first line");
_Static_assert(offsetof(struct stats_conn, name) == 128, "frozen layout");

API struct connmgr_gauges { /* as they are now */
    uint64_t connections;
    uint64_t arena_chunks, arena_free;    /* bodies on their way */
    uint64_t output_blocks, output_free;  /* copied output waiting for clients */
    uint64_t refs_waiting, refs_queued, refs_depth; /* batches: in the ring, in the queue, its size */
    uint64_t orders_queued, orders_depth;
    uint64_t reading_stopped;             /* 1: no client is read: the arena or the ring is full */
    uint64_t subscriptions, subscriptions_max; /* slots in use, also of those whose end is not confirmed */
};

API struct router_gauges {
    uint64_t subscriptions;
    uint64_t subjects, subjects_max, subjects_cached; /* the index */
    uint64_t matches, builds;    /* since this process began: lookups, and those not in the cache */
    uint64_t fanout_max;         /* the most recipients that one message had, since this process began */
    uint64_t requests, requests_max; /* of modes: open requests and sessions, */
    uint64_t legs, legs_max;         /* and those who are to answer them */
    uint64_t connmgrs;
    uint64_t orders_waiting[PORTS_MAX]; /* batches, per connmgr: in its ring */
};

API struct dispatcher_stats { /* only grow */
    uint64_t accepted, refused; /* refused: the maximum of connections was reached */
    uint64_t descriptors_out;   /* times accepting rested because descriptors ran out */
};

API struct dispatcher_gauges {
    uint64_t backlog;         /* accepted, and not handed to a connmgr yet */
    uint64_t connections_max; /* limits.max_connections, or what the descriptor limit allows */
};

API struct stats {
    struct segment_header header;
    uint32_t rows, pad;     /* creator, once */
    uint64_t high;          /* rows at or past it were never used, and nobody looks at them */
    uint64_t published_ns;  /* CLOCK_MONOTONIC: the last copy */
    uint64_t pid;           /* who made it */
    uint64_t reserved[4];
    uint64_t totals[STATS_TOTALS_MAX]; /* struct connmgr_stats, router_stats, dispatcher_stats */
    uint64_t gauges[STATS_GAUGES_MAX];
    struct stats_conn conns[];
};
_Static_assert(offsetof(struct stats, totals) == 128, "frozen layout");
_Static_assert(sizeof(struct stats) % 64 == 0, "rows are whole cache lines");

API uint64_t stats_bytes(uint32_t rows);
/* Of the layout and of what is copied into it: another version's counters are not ours. */
API uint64_t stats_fingerprint(void);
API void stats_format(struct stats *s, uint32_t rows);
/* Rows of a segment that another version counted in, of the same layout: what clients said about themselves
 * stays. `from` may have other totals. */
API void stats_take_rows(struct stats *s, const struct stats *from);
/* Copies totals and gauges, and says when. */
API void stats_publish(struct stats *s, const void *totals, uint64_t totals_bytes, const void *gauges,
                       uint64_t gauges_bytes);
/* A copy of one row; 0: it is nobody's, or changed hands meanwhile. */
API int stats_read_conn(const struct stats *s, uint32_t row, struct stats_conn *ret_row);
/* Text into a field of `room` bytes, cut to fit, NUL-terminated. */
void stats_text(char *to, uint32_t room, const char *text, uint32_t len);

#endif
