/* fsck: looks for broken rules in the segments of an instance, alive or dead.
 *
 * Private memory of one process that maps the segments to read them. It may run beside the
 * processes that write them, so nothing read is trusted: every index is compared with its bound
 * before it is followed, batches are copied before they are parsed, and whatever takes more than
 * one load is loaded again before it is called a finding.
 *
 *   fsck.c          taking segments in, redo logs, the connection table, the order of a pass
 *   fsck_arena.c    chunks, chains, entries, words; who refers to each message
 *   fsck_queue.c    rings, inboxes, records, sequence numbers
 *   fsck_conns.c    connection records and their pending output
 *   fsck_subs.c     sessions and subscriptions on both sides
 *   fsck_modes.c    requests, legs and names of the router
 *   fsck_words.c    words that can be judged by themselves
 *
 * Created by:   `midair fsck`. Written to segments: nothing, except by the three calls marked
 *               "repair", which the caller makes on writable mappings of an instance that is
 *               dead and whose leases it holds.
 * Invariants:   a pass reads in the direction a message takes (words, references, orders, output),
 *               and a message is in its next place before it leaves the last one: so one that is
 *               alive before the pass and after it was met on the way, unless nobody has it.
 * After a crash: nothing is left. A repair stores single words, each right by itself.
 */
#ifndef MIDAIR_FSCK_H
#define MIDAIR_FSCK_H

#include "base/api.h"
#include "shm/arena.h"
#include "shm/conntable.h"
#include "connmgr/journal.h"
#include "router/routing.h"
#include "base/reserve.h"

#define FSCK_FINDINGS_MAX 4096u /* of one pass; more are counted, not kept */
#define FSCK_TRIES 16           /* looks at something that keeps changing */
#define FSCK_TAKEN_MAX 64u      /* segments one sendmsg may take: OUTPUT_IOV_MAX of output.c */

API enum fsck_code { /* what `where` holds; its first four words tell one finding from another */
    FSCK_HEADER,          /* field (0 magic, 1 kind, 2 layout, 3 fingerprint, 4 size), found, expected */
    FSCK_UNFINISHED,      /* - */
    FSCK_GEOMETRY,        /* - */
    FSCK_HIGH_MARK,       /* which, mark, bound */
    FSCK_REDO_WAITS,      /* words, first offset, first value */
    FSCK_REDO_BAD,        /* words, number of the pair, offset */
    FSCK_RING_TAIL,       /* ring, seq, bytes */
    FSCK_RING_SENT,       /* ring; sent, seq in tail */
    FSCK_RING_SPAN,       /* ring; seq in tail, sent */
    FSCK_SEQ_AHEAD,       /* ring; done, sent */
    FSCK_SEQ_BEHIND,      /* ring; sent, done */
    FSCK_SEQ_LOST,        /* ring; missing, first of them */
    FSCK_BATCH_HEADER,    /* ring, seq, slot's seq, from */
    FSCK_RECORD,          /* ring, seq, offset, type */
    FSCK_INBOX_GAP,       /* lane, seq, done */
    FSCK_INBOX_BATCH,     /* lane, seq, offset, type */
    FSCK_IN_AT,           /* lane, at, done */
    FSCK_IN_PROGRESS,     /* lane, progress, done */
    FSCK_ASIDE,           /* lane, head, tail */
    FSCK_ASIDE_ENTRY,     /* lane, offset, bytes, at */
    FSCK_APPLIED,         /* -; applied, done */
    FSCK_APPLIED_INBOX,   /* applied, seq in the inbox */
    FSCK_OPEN_HANDLE,     /* handle */
    FSCK_HANDLE,          /* ring, seq, offset, handle */
    FSCK_REF_DEAD,        /* ring, seq, offset, handle */
    FSCK_ORDER_DEAD,      /* ring, seq, offset, handle */
    FSCK_ORDER_SUB,       /* ring, seq, offset, sub */
    FSCK_TABLE_STATE,     /* slot, state */
    FSCK_TABLE_CONNMGR,   /* slot, uid, connmgr */
    FSCK_TABLE_UID,       /* slot, uid; next uid */
    FSCK_UID_TWICE,       /* uid, slot, slot */
    FSCK_TABLE_ALONE,     /* slot, uid, connmgr */
    FSCK_TABLE_ASSIGNED,  /* -; how many */
    FSCK_TABLE_CLOSED,    /* -; how many */
    FSCK_CONN_PHASE,      /* slot, uid, phase */
    FSCK_CONN_TABLE,      /* slot, uid, uid in the table, state << 32 | connmgr */
    FSCK_CONN_BUFFER,     /* slot, uid, buffer */
    FSCK_CONN_SESSION,    /* slot, uid, uid of the session */
    FSCK_OUT_LINK,        /* slot, uid, segment; highest */
    FSCK_OUT_CYCLE,       /* slot, uid, segment */
    FSCK_OUT_SHARED,      /* slot, uid, segment, other slot */
    FSCK_OUT_POS,         /* slot, uid, segment, pos; end */
    FSCK_OUT_BLOCK,       /* slot, uid, segment, block; offset, bytes */
    FSCK_OUT_OVERLAP,     /* slot, uid, segment, block */
    FSCK_BLOCK_SHARED,    /* slot, uid, block, other slot */
    FSCK_OUT_BODY,        /* slot, uid, segment, handle */
    FSCK_OUT_BODY_RANGE,  /* slot, uid, segment, handle; skip, bytes */
    FSCK_OUT_LEFT,        /* slot, uid, phase */
    FSCK_SUB_FLAGS,       /* sub, word */
    FSCK_SUB_CONN,        /* sub, epoch, slot */
    FSCK_SUB_SID,         /* sub, epoch, length */
    FSCK_SUB_CELL,        /* sub, epoch, cell + 1, other sub + 1 */
    FSCK_SUB_TWICE,       /* sub, epoch, slot, other sub */
    FSCK_SUB_UNROUTED,    /* sub, epoch, slot */
    FSCK_ROUTED_FREE,     /* sub, epoch, word in the journal */
    FSCK_ROUTED_SESSION,  /* sub, epoch, uid, uid of the session */
    FSCK_ROUTED_TEXT,     /* sub, epoch, cell + 1 */
    FSCK_CELL_SHARED,     /* sub, epoch, cell, other sub */
    FSCK_SESSION_ALONE,   /* slot, uid, connmgr, uid in the journal */
    FSCK_REQUEST_SESSION, /* request, uid, uid of the session */
    FSCK_REQUEST_ALONE,   /* request, uid */
    FSCK_LEG_REQUEST,     /* leg, generation, request */
    FSCK_LEG_SESSION,     /* leg, uid, uid of the session */
    FSCK_NAME_SESSION,    /* slot, uid, uid of the session, length */
    FSCK_NAME_TWICE,      /* slot, uid, other slot */
    FSCK_CHUNK_STATE,     /* chunk, state */
    FSCK_CHUNK_MESSAGES,  /* chunk, messages, state */
    FSCK_CHAIN_LINK,      /* head, link, state of the link, generation */
    FSCK_CHAIN_CYCLE,     /* head, link */
    FSCK_CHAIN_SHARED,    /* head, link, other head */
    FSCK_CHAIN_ORPHAN,    /* chunk */
    FSCK_FREE_LIVE,       /* chunk, handle */
    FSCK_WORD,            /* handle, word */
    FSCK_ENTRY,           /* handle */
    FSCK_LEAK,            /* handle; word, connection of the sender */
    FSCK_RELEASE,         /* layout it was converted from */
    FSCK_RESERVED,        /* whose (fsck_words.c), number */
    FSCK_TABLE_PEER,      /* slot, uid, listener, transport */
    FSCK_CONN_SPEAKS,     /* slot, uid, protocol, transport */
    FSCK_ENVELOPE,        /* slot, uid, transport */
    FSCK_UNKNOWN,         /* -; live messages that may be in unreadable batches, batches */
    FSCK_CODES,
};

API struct fsck_finding {
    uint32_t code;
    uint32_t kind;  /* enum segment_kind */
    uint32_t index; /* connmgr, for kinds that each has its own of */
    uint32_t pad;
    uint64_t where[6];
};

API struct fsck_counts {
    uint64_t messages;      /* alive */
    uint64_t chunks;        /* not free */
    uint64_t connections;   /* ASSIGNED or ACTIVE in the table */
    uint64_t sessions;
    uint64_t subscriptions; /* active in the journals */
    uint64_t pending_bytes; /* of output */
    uint64_t in_flight;     /* batches sent and not finished */
    uint64_t unsent;        /* batches closed and not sent */
    uint64_t unreadable;    /* of those in flight: no longer in the ring of their sender */
    uint64_t dropped;       /* findings past FSCK_FINDINGS_MAX */
};

struct fsck_queue {
    uint32_t known;    /* 0: there is no such queue, or it is not ours to open */
    uint32_t depth;
    uint32_t messages; /* when it was looked at */
};

struct fsck {
    int dead;          /* nobody writes: what is read is exact */
    uint32_t given;    /* highest index given, + 1 */
    uint32_t connmgrs; /* the same, or as many ports as there ever were */
    struct conntable *table; /* NULL: not there, or refused */
    struct arena *arenas[PORTS_MAX];
    struct port_log *ports[PORTS_MAX];   /* of every port; of a connmgr the first part of its journal */
    struct journal *journals[PORTS_MAX]; /* NULL: of a port that is no connmgr, too */
    struct routing *routing;
    struct fsck_queue refs[PORTS_MAX], orders[PORTS_MAX];

    uint32_t *seen[PORTS_MAX];  /* per entry: generation << 2 | 1 if alive, | 2 if met */
    uint32_t *owner[PORTS_MAX]; /* per chunk: head of its chain + 1 */
    uint64_t *segs[PORTS_MAX];  /* per segment: walk << 32 | slot + 1 */
    uint64_t *blocks[PORTS_MAX];  /* per block: the same */
    uint32_t *filled[PORTS_MAX];  /* per block: end of what this walk found in it */
    uint32_t *had[PORTS_MAX];       /* per sub: epoch + 1 if active at first */
    uint32_t *under_way[PORTS_MAX]; /* per sub: epoch + 1 of a change on its way */
    uint32_t *sids[PORTS_MAX], sids_mask[PORTS_MAX]; /* hash of (conn, sid) */
    uint32_t *sid_cells[PORTS_MAX]; /* by slot of subscriptions: sub + 1 whose sid goes on there */
    uint32_t *cells;                    /* per text cell: index of its user + 1 */
    uint64_t unreadable_refs[PORTS_MAX];
    uint32_t walks;
    struct batch batch;                 /* the copy being parsed */

    uint32_t count;
    struct fsck_finding found[FSCK_FINDINGS_MAX];
    struct fsck_counts counts;
};

/* ---- the seam to Python ---- */
API int fsck_open(int dead, struct fsck **ret_f);
API void fsck_close(struct fsck *f);
/* A mapping of `bytes`, the size of the file. 0: taken in; 1: refused, with a finding. */
API int fsck_add(struct fsck *f, uint32_t kind, uint32_t index, void *base, uint64_t bytes);
API void fsck_add_queue(struct fsck *f, int orders, uint32_t index, uint32_t depth, uint32_t messages);
/* Repair, or the view of a dead instance in private mappings: finishes committed steps whose words
 * are all inside their segments. Returns words stored. Before fsck_run. */
API uint64_t fsck_finish_steps(struct fsck *f);
/* One pass. Returns the number of findings kept. */
API int fsck_run(struct fsck *f);
API const struct fsck_finding *fsck_found(const struct fsck *f);
API const struct fsck_counts *fsck_get_counts(const struct fsck *f);
/* Repair: completes the words of the messages the pass found leaked. Returns how many. */
API uint32_t fsck_free_leaks(struct fsck *f);
/* Repair: CLOSED slots, and ACTIVE ones whose session is over in the journal, become FREE.
 * Returns how many. */
API uint32_t fsck_free_slots(struct fsck *f);

/* ---- between the C files ---- */
static inline uint64_t fsck_load(const void *word)
{
    return atomic_load_explicit((const _Atomic uint64_t *)word, memory_order_acquire);
}
static inline uint32_t fsck_load32(const void *word)
{
    return atomic_load_explicit((const _Atomic uint32_t *)word, memory_order_acquire);
}

#define FSCK_ARGS(...) ((const uint64_t[6]){__VA_ARGS__})
void fsck_add_finding(struct fsck *f, uint32_t code, uint32_t kind, uint32_t index, const uint64_t where[6]);
#define fsck_say(f, code, kind, index, ...) fsck_add_finding(f, code, kind, index, FSCK_ARGS(__VA_ARGS__))

void fsck_chunks(struct fsck *f, uint32_t n); /* chains, words, entries: what is alive */
void fsck_leaks(struct fsck *f);              /* last: who was not met on the way */
/* 1: alive in that generation, and noted as met; 0: not alive; -1: no such entry. */
int fsck_meet(struct fsck *f, uint64_t handle);
void fsck_refs(struct fsck *f, uint32_t n);   /* ring of connmgr n, inbox of the router, what it set aside */
void fsck_orders(struct fsck *f, uint32_t n); /* ring of the router, inbox of connmgr n */
void fsck_conns(struct fsck *f, uint32_t n);
void fsck_subs_begin(struct fsck *f, uint32_t n); /* before the references are read */
void fsck_subs(struct fsck *f, uint32_t n);
void fsck_sessions(struct fsck *f);
void fsck_modes(struct fsck *f);
void fsck_words(struct fsck *f);

#endif
