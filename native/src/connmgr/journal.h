/* journal: the primary state of one connmgr. Its process keeps only what can be rebuilt from
 * here, from the arena, from the queues and from the kernel's socket state.
 *
 *   struct journal (prefaulted) | conn records | sub records | out segments | out blocks
 *
 * Created by:   connmgr N, under its lease. Mapped and written by: connmgr N alone.
 * Invariants:
 *   J1  A word marked "redo" changes only through the redo log; the others are single
 *       stores that are commit points of their own, named beside them.
 *   J2  The unparsed bytes of a connection in PHASE_GREETED or PHASE_OPEN are the plain stream bytes
 *       [in_pos, taken) and lie at `buffer`, contiguous (or along a chain); what is received always
 *       lands right behind them. So after a crash it is known how many there are: without envelopes
 *       taken is the kernel's count, with envelopes it is in_plain, which advances in one step with the
 *       number and the raw position of the next envelope. Raw bytes at or past in_end are still in the
 *       kernel; those before it that are still there are dropped, and those of [in_raw, in_end) lie in
 *       the stash. In other phases nothing is
 *       parsed, and `buffer` may name what is somebody else's.
 *   J3  A connection's pending output is the list out_head .. out_tail; segment i covers plain
 *       stream bytes [pos, next's pos), the last one [pos, out_end). Links past out_tail
 *       were not committed. The kernel's count of bytes given says how far it got: in the plain stream
 *       without envelopes, else in the raw one, where [out_raw, ...) are the envelopes from out_number
 *       on, which hold the plain bytes [out_place, out_place + out_len). That is fixed before the
 *       first byte of them is given, and the next ones are not fixed before the last byte is. No
 *       segment of them is popped before. A block is in the list of one connection, but for
 *       those that only SEG_SHARED segments refer to.
 *   J4  Relinquish first, then pop: a body referred to by a listed segment that the kernel
 *       has not fully taken is live.
 *   J5  The first part of the journal is that of a port: P1 to P3 hold. What a batch of orders
 *       appends to outputs is committed together with its number.
 *   J6  A sub slot is reused only after the router said it will not be named again; a conn
 *       slot only after the router confirmed the end of its session.
 *   J7  The cells of a long sid (sid_more, next) are slots below subs_high without SUB_ACTIVE and SUB_DYING, as
 *       many as its length takes, and of one subscription each. They are written before it is
 *       active, and are free when its slot is.
 * A record that nothing names yet is outside J1: `connmgr_adopt()` and `subtable_add()` fill a
 * free record with plain stores before the step that makes it count.
 */
#ifndef MIDAIR_JOURNAL_H
#define MIDAIR_JOURNAL_H

#include "base/api.h"
#include "protocol/protocol.h"
#include "shm/batch.h"
#include "shm/ledger.h"
#include "shm/port.h"
#include "shm/segment.h"

#define JOURNAL_LAYOUT 3
#define JOURNAL_BLOCK_BYTES 16384u
#define JOURNAL_SEGS_PER_BLOCK 8u
#define JOURNAL_BLOCKS_MIN 8192u /* 128 MiB: one order batch may need 4096, see output.c */
#define JOURNAL_SID_INLINE 64u /* bytes of a sid in its record; a longer one goes on in cells (struct sid_cell) */
#define JOURNAL_SID_LONG 255u  /* sub_rec.sid_len of such a one */
#define JOURNAL_CELL_TEXT 96u
#define JOURNAL_NAME_MAX 64u /* MODE_NAME_MAX of routing.h */

/* The low byte of conn_rec.phase. Which may follow which is in conn.c. Layout 2 had the same numbers but
 * for PHASE_GREETED: a connection that was greeted was OPEN, with CONN_CONNECTED or without. The reason in
 * bits 16 to 23 had the same numbers, too (it was called enum close_reason + 1). So a record of layout 2 with
 * OPEN and without CONN_CONNECTED becomes GREETED, and every other word is kept as it is. */
API enum conn_phase {
    PHASE_NONE = 0,
    PHASE_OPENING = 1, /* adopted, the router has not answered yet */
    PHASE_OPEN = 2,    /* what it says about itself was accepted, and the name in it is its own */
    PHASE_LINGER = 3,  /* an error was sent: what waits is written, nothing is read */
    PHASE_CLOSING = 4, /* the socket is gone, the router's word is awaited */
    PHASE_GREETED = 5, /* greeted; served like OPEN, as no client has to say who it is yet. With
                        * CONN_CONNECTED: what it said was accepted but for its name (names.c) */
    PHASE_FINISHING = 6, /* the client has ended its side: it gets what it is owed, nothing is read (conn.c) */
    PHASES = 7,
};
#define CONN_REASON_SHIFT 16 /* PHASE_LINGER: bits 16 to 23 say why, enum close_reason of conn.h */

struct conn_rec {
    uint64_t uid;       /* redo; 0: unused */
    uint64_t phase;     /* redo: enum conn_phase | enum conn_option */
    uint64_t in_base;   /* redo: kernel's count of bytes received at adoption */
    uint64_t out_base;  /* redo: kernel's count of bytes sent at adoption */
    uint64_t in_pos;    /* redo: stream bytes consumed as whole frames */
    uint64_t buffer;    /* redo, or the single store "conn.buffer": (chunk + 1) << 32 | offset */
    uint64_t out_head;  /* redo when it was 0, else the single store "out.pop": segment + 1 */
    uint64_t out_tail;  /* redo: segment + 1; meaningless while out_head is 0 */
    uint64_t out_end;   /* redo: stream bytes appended */
    uint64_t dropped;   /* redo: messages left out since the client was last told (slow.c) */

    /* A transport that wraps the protocol's bytes in envelopes makes two streams (streams.c): in_pos and
     * out_end count bytes of the plain one, the kernel counts bytes of the raw one. All zero and
     * not looked at while `transport` has no envelopes: then both are one stream. */
    uint64_t in_raw;    /* redo: raw stream position of the first envelope that was not taken whole, */
    uint64_t in_number; /* redo: its number, */
    uint64_t in_place;  /* redo: and the plain stream position of its first byte */
    uint64_t in_plain;  /* redo: plain stream bytes taken; in_pos <= in_plain, in_place <= in_plain */
    uint64_t out_raw;   /* redo: raw stream position of the first byte of what was fixed last */
    uint64_t out_number; /* redo: envelopes fixed before it: the number of its first one */
    uint64_t out_place; /* redo: plain stream position of its first byte */
    uint64_t out_len;   /* redo: plain bytes in it; 0: nothing was fixed yet */

    /* Plain stores: the first two before the connection is adopted, the others before the step
     * that sets CONN_CONNECTED. Zero is what every connection of layout 2 was. */
    uint16_t protocol;  /* of its listener when it was adopted: a number of protocol/registry.c */
    uint16_t transport; /* as in its conntable_slot; 0: plain */
    uint32_t account;   /* its subject space; 0: the global one */
    uint32_t principal; /* whom admission found it to be; 0: nobody in particular */
    uint32_t permits;   /* permission set; 0: everything is allowed */
    uint64_t in_end;    /* redo: raw stream bytes taken: those from in_raw on lie in the stash (streams.c) */
    uint64_t in_stash;  /* redo: its blocks, block + 1 each: low half, then high half; 0: none */
    uint64_t reserved[2];
    char name[JOURNAL_NAME_MAX]; /* to be addressed by, or empty: written before CONN_CONNECTED */
};
_Static_assert(sizeof(struct conn_rec) == 256, "four cache lines");
_Static_assert(offsetof(struct conn_rec, out_end) == 64, "what a read touches is in the first line");
_Static_assert(offsetof(struct conn_rec, name) == 192, "frozen layout");

#define SUB_ACTIVE (1ULL << 63)
#define SUB_DYING (1ULL << 62)  /* unsubscribed here, the router has not confirmed */
#define SUB_PLAIN (1ULL << 61)  /* no queue group: this side enforces max */
struct sub_rec {
    uint64_t word;      /* redo: SUB_* | epoch:29 << 32 | conn slot. 0: never used; without
                         * SUB_ACTIVE and SUB_DYING: free */
    uint64_t delivered; /* with base and stamp: how many went out */
    uint64_t base;      /* `delivered` before the batch `stamp`; redo when a flow has delivered since (decide.c) */
    uint64_t max;       /* redo; 0: none */
    uint32_t stamp;     /* low bits of the batch that last changed `delivered` */
    uint8_t sid_len;    /* before the step that sets SUB_ACTIVE, as all that follow; JOURNAL_SID_LONG: sid_bytes */
    char sid[JOURNAL_SID_INLINE]; /* one of up to 27 bytes ends in the first cache line */
    uint8_t pad;
    uint16_t sid_bytes; /* of a long sid: all of it */
    uint32_t sid_more;  /* of a long sid: slot + 1 of its first cell; else 0 */
    uint32_t account;   /* of its connection; 0: the global one */
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct sub_rec) == 128, "two cache lines");
_Static_assert(offsetof(struct sub_rec, sid) == 37, "frozen layout");
_Static_assert(offsetof(struct sub_rec, sid_bytes) == 102, "frozen layout");
_Static_assert(offsetof(struct sub_rec, sid_more) == 104, "frozen layout");

/* Where a long sid goes on: a slot of the subscriptions that is nobody's subscription. It is in use while a record
 * that is active or dying leads to it (J7). */
struct sid_cell {
    uint64_t word;      /* of the slot: neither SUB_ACTIVE nor SUB_DYING; its epoch stays */
    char text[JOURNAL_CELL_TEXT]; /* before the step that makes the subscription active, as what follows */
    uint32_t next;      /* slot + 1; 0: the last one */
    uint32_t pad;
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct sid_cell) == sizeof(struct sub_rec), "it takes the place of one");

API static inline uint32_t journal_sid_cells(uint32_t sid_bytes)
{
    return sid_bytes <= JOURNAL_SID_INLINE ? 0 : (sid_bytes - JOURNAL_SID_INLINE + JOURNAL_CELL_TEXT - 1) / JOURNAL_CELL_TEXT;
}

#define SEG_BODY (1ULL << 63) /* ref is a handle: bytes of a body; else block << 32 | offset */
#define SEG_SHARED (1ULL << 62) /* beside block and offset: other connections get the same bytes */
struct out_seg {
    uint64_t pos;       /* stream position of its first byte */
    uint64_t ref;
    uint32_t next;      /* segment + 1 */
    uint32_t skip;      /* SEG_BODY: first byte of the body (headers may be left out) */
    uint64_t handle;    /* SEG_BODY: the message */
};
_Static_assert(sizeof(struct out_seg) == 32, "frozen layout");

struct journal {
    struct port_log port; /* what it has as a port; the rest is about its clients */
    uint32_t conns, subs, blocks, pad0;  /* creator, once */
    uint64_t conns_at, subs_at, segs_at, blocks_at; /* creator, once: offsets */
    uint64_t reserved0[2];
    uint64_t conns_high;  /* single stores, only grow, raised before use: slots, segments and */
    uint64_t subs_high;   /* blocks at or past these were never used, and recovery does not */
    uint64_t segs_high;   /* look there (looking at a hole of a segment makes it real memory) */
    uint64_t blocks_high;
    uint64_t reserved1[12];
};

API uint64_t journal_bytes(uint32_t conns, uint32_t subs, uint32_t blocks);
/* The part that must be resident: everything before the connections. */
API uint64_t journal_hot_bytes(void);
API uint64_t journal_fingerprint(void);
API void journal_format(struct journal *j, uint32_t index, uint32_t conns, uint32_t subs, uint32_t blocks);

static inline struct conn_rec *journal_conns(struct journal *j)
{
    return (struct conn_rec *)((char *)j + j->conns_at);
}
static inline struct sub_rec *journal_subs(struct journal *j)
{
    return (struct sub_rec *)((char *)j + j->subs_at);
}
static inline struct out_seg *journal_segs(struct journal *j)
{
    return (struct out_seg *)((char *)j + j->segs_at);
}
static inline uint8_t *journal_block(struct journal *j, uint32_t block)
{
    return (uint8_t *)j + j->blocks_at + (uint64_t)block * JOURNAL_BLOCK_BYTES;
}

#endif
