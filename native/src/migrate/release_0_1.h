/* release_0_1: the layouts of release 0.1, frozen: connection table 2, arena 3, journal 2, routing 3.
 *
 * Nothing here is shared with the structs of today. Written by processes of that release, which are
 * all dead when this is read; by segment_finish() the words its redo logs name.
 */
#ifndef MIDAIR_RELEASE_0_1_H
#define MIDAIR_RELEASE_0_1_H

#include <stddef.h>
#include <stdint.h>

#define R01_CONNTABLE_LAYOUT 2u
#define R01_ARENA_LAYOUT 3u
#define R01_JOURNAL_LAYOUT 2u
#define R01_ROUTING_LAYOUT 3u
#define R01_BATCH_VERSION 4u
#define R01_CONNMGRS 32u
#define R01_PAGE 4096ULL

struct r01_header {
    uint64_t magic;
    uint32_t kind, layout;
    uint64_t fingerprint, bytes, reserved[4];
};
_Static_assert(sizeof(struct r01_header) == 64, "release 0.1");

/* ---- what travels ---- */
struct r01_ring {
    uint64_t tail, sent, pad[6];
    uint8_t slots[64][8192];
};
struct r01_inbox {
    uint8_t batch[8192];
};
struct r01_redo_pair {
    uint64_t offset, value;
};
#define R01_REDO_ARENA (1ULL << 63)
#define R01_REDO_PAIRS 16384u
struct r01_redo_log {
    uint64_t count, pad[7];
    struct r01_redo_pair pairs[R01_REDO_PAIRS];
};
_Static_assert(sizeof(struct r01_ring) == 64 + 64 * 8192 && sizeof(struct r01_redo_log) == 64 + 16384 * 16, "release 0.1");

/* ---- connection table ---- */
struct r01_slot {
    uint32_t state, connmgr;
    uint64_t uid, accepted_ns;
    uint16_t listener, port;
    char ip[46];
    uint8_t pad[6];
    uint64_t cookie, crowded, reserved[4];
};
_Static_assert(sizeof(struct r01_slot) == 128 && offsetof(struct r01_slot, cookie) == 80, "release 0.1");
struct r01_conntable {
    struct r01_header header;
    uint32_t capacity, pad;
    uint64_t next_uid, high, reserved[5];
    struct r01_slot slots[];
};
_Static_assert(sizeof(struct r01_conntable) == 128, "release 0.1");

/* ---- arena ---- */
#define R01_CHUNK_BYTES (128u * 1024)
#define R01_CHUNK_MESSAGES 4096u
#define R01_CHUNKS_MAX 65536u
#define R01_ARENA_SLACK 64u
#define R01_CHUNK_FREE 0u
#define R01_CHUNK_CHAIN 3u
struct r01_chunk {
    uint32_t state, next;
    uint64_t messages, freed, pad[5];
};
struct r01_entry {
    uint32_t chunk, subject, body, total_len, header_len;
    uint16_t subject_len, reply_len, reply, usual;
    uint32_t conn;
    uint64_t received_ns;
};
_Static_assert(sizeof(struct r01_chunk) == 64 && sizeof(struct r01_entry) == 40, "release 0.1");
struct r01_arena {
    struct r01_header header;
    uint32_t owner, chunk_count;
    uint64_t words, entries, data, pad[4];
    uint64_t maybe_free[R01_CHUNKS_MAX / 64];
    struct r01_chunk chunks[];
};
_Static_assert(offsetof(struct r01_arena, maybe_free) == 128, "release 0.1");

/* ---- journal ---- */
#define R01_BLOCK_BYTES 16384u
#define R01_SEGS_PER_BLOCK 8u
#define R01_SID_MAX 27u
#define R01_NAME_MAX 48u
/* Low byte of r01_conn.phase: the same numbers as today's enum conn_phase. Connections that were greeted and
 * had not said CONNECT were OPEN without CONNECTED, those that asked for a name OPEN with it. */
#define R01_PHASE_OPEN 2u
#define R01_CONN_CONNECTED (1u << 13)
struct r01_conn {
    uint64_t uid, phase, in_base, out_base, in_pos, buffer, out_head, out_tail, out_end, dropped;
    char name[R01_NAME_MAX];
};
struct r01_sub {
    uint64_t word, delivered, base;
    uint32_t stamp;
    uint8_t sid_len;
    char sid[R01_SID_MAX];
    uint64_t max;
};
struct r01_seg {
    uint64_t pos, ref;
    uint32_t next, skip;
    uint64_t handle;
};
_Static_assert(sizeof(struct r01_conn) == 128 && sizeof(struct r01_sub) == 64 && sizeof(struct r01_seg) == 32, "release 0.1");
_Static_assert(offsetof(struct r01_sub, sid) == 29 && offsetof(struct r01_sub, max) == 56, "release 0.1");
struct r01_journal {
    struct r01_header header;
    uint32_t index, conns, subs, blocks;
    uint64_t conns_at, subs_at, segs_at, blocks_at, pad0[2];
    uint64_t applied, done, conns_high, subs_high, segs_high, blocks_high, pad1[2];
    uint64_t open_handle[R01_CONNMGRS];
    struct r01_redo_log redo;
    struct r01_ring refs;
    struct r01_inbox inbox;
};
_Static_assert(offsetof(struct r01_journal, applied) == 128 && offsetof(struct r01_journal, redo) == 448, "release 0.1");

/* ---- routing ---- */
#define R01_TEXT_INLINE 72u
#define R01_CELLS 65536u
#define R01_CELL_BYTES 128u
#define R01_REQUESTS 65536u
#define R01_LEGS 131072u
struct r01_session {
    uint64_t uid, word, pad[2];
};
struct r01_rsub {
    uint64_t word, uid, max, routed, base, stamp;
    uint16_t subject_len, queue_len;
    uint32_t more;
    char text[R01_TEXT_INLINE];
};
struct r01_in {
    uint64_t done, at, progress, touched, listed, routed, pad[2];
};
struct r01_lane {
    struct r01_inbox inbox;
    struct r01_ring orders;
};
struct r01_request {
    uint64_t word, uid, deadline_ns;
    uint32_t conn, reply_len;
    uint64_t pad[4];
    char reply[128];
};
struct r01_leg {
    uint64_t word, uid, sub_word;
    uint32_t conn, sub, request, pad[7];
};
struct r01_name {
    uint64_t word, uid;
    char text[R01_NAME_MAX];
};
_Static_assert(sizeof(struct r01_session) == 32 && sizeof(struct r01_rsub) == 128 && sizeof(struct r01_in) == 64, "release 0.1");
_Static_assert(sizeof(struct r01_request) == 192 && sizeof(struct r01_leg) == 64 && sizeof(struct r01_name) == 64, "release 0.1");
struct r01_routing {
    struct r01_header header;
    uint32_t connmgrs, sessions, subs_each, cells;
    uint64_t lanes_at, sessions_at, subs_at, cells_at, requests_at, legs_at, names_at, pad0[7];
    uint64_t step, cells_high, requests_high, legs_high, names_high, pad1[3];
    uint64_t subs_high[R01_CONNMGRS];
    struct r01_in in[R01_CONNMGRS];
    struct r01_redo_log redo;
};
_Static_assert(offsetof(struct r01_routing, step) == 192 && offsetof(struct r01_routing, redo) == 2560, "release 0.1");

static inline uint64_t r01_page_up(uint64_t n) { return (n + R01_PAGE - 1) & ~(R01_PAGE - 1); }

/* Stores the words of a committed step, again if need be, and empties the log. */
int r01_redo_finish(struct r01_redo_log *log, void *base, uint64_t base_bytes, void *arena, uint64_t arena_bytes);

#endif
