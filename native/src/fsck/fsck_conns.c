/* fsck_conns: connection records and their pending output. See fsck.h.
 *
 * The list of a connection does not change while head, tail, end and uid of its record stay the
 * same (end only grows), and segments do not change while they are listed. So a walk after which
 * the record reads as before has seen the list as it was; else it is walked again.
 */
#include "fsck/fsck.h"

/* The low byte, the options of enum conn_option, the reason. */
#define PHASE_KNOWN (0xffULL | (2ULL * CONN_GREET_AGAIN - CONN_VERBOSE) | 0xffULL << CONN_REASON_SHIFT)

struct list { /* a connection's record, as far as its output goes */
    uint32_t slot;
    uint64_t uid, phase, head, tail, end;
};

static struct list read_list(const struct fsck *f, uint32_t n, uint32_t slot)
{
    const struct conn_rec *r = &journal_conns(f->journals[n])[slot];
    struct list l = {.slot = slot, .uid = fsck_load(&r->uid), .phase = fsck_load(&r->phase),
                     .head = fsck_load(&r->out_head), .tail = fsck_load(&r->out_tail),
                     .end = fsck_load(&r->out_end)};

    return l;
}

static int same_list(const struct fsck *f, uint32_t n, const struct list *l)
{
    struct list now = read_list(f, n, l->slot);

    return f->dead || (now.uid == l->uid && now.head == l->head && now.tail == l->tail && now.end == l->end);
}

static uint32_t block_of(const struct out_seg *s) { return (uint32_t)((s->ref & ~SEG_SHARED) >> 32); }

/* Whether a list has the segment (or a segment in that block). */
static int list_has(const struct fsck *f, uint32_t n, const struct list *l, uint64_t segment, uint64_t block)
{
    const struct out_seg *segs = journal_segs(f->journals[n]);
    uint64_t high = fsck_load(&f->journals[n]->segs_high), at = l->head;

    for (uint64_t steps = 0; at && at <= high && steps < high; steps++) {
        const struct out_seg *s = &segs[at - 1];

        if (at - 1 == segment || (block != UINT64_MAX && !(s->ref & SEG_BODY) && block_of(s) == block))
            return 1;
        if (at == l->tail)
            return 0;
        at = s->next;
    }
    return 0;
}

/* Whether both connections have it at one moment. While they are served a segment that one has
 * given back is soon the other's, so both lists must stand still while they are compared. */
static int both_have(const struct fsck *f, uint32_t n, uint32_t one, uint32_t other, uint64_t segment, uint64_t block)
{
    for (int tries = 0; tries < FSCK_TRIES; tries++) {
        struct list a = read_list(f, n, one), b = read_list(f, n, other);
        int both = a.uid && b.uid && list_has(f, n, &a, segment, block) && list_has(f, n, &b, segment, block);

        if (same_list(f, n, &a) && same_list(f, n, &b))
            return both;
    }
    return 0;
}

#define SHARED (1u << 31) /* beside the slot: refers to the block as one of several */

/* Marks a segment or block as this walk's; the other connection + 1 if it was marked for one. */
static uint32_t claim(uint64_t *mark, uint32_t walk, uint32_t slot, int *ret_again)
{
    uint64_t old = *mark;

    *mark = (uint64_t)walk << 32 | (slot + 1);
    *ret_again = old == *mark;
    return old && (uint32_t)old != slot + 1 ? (uint32_t)old : 0;
}

static void check_block(struct fsck *f, uint32_t n, const struct list *l, uint32_t seg, uint64_t bytes)
{
    const struct out_seg *s = &journal_segs(f->journals[n])[seg];
    uint32_t block = block_of(s), offset = (uint32_t)s->ref;
    int again;

    if (block >= fsck_load(&f->journals[n]->blocks_high) || offset > JOURNAL_BLOCK_BYTES ||
        bytes > JOURNAL_BLOCK_BYTES - offset) {
        fsck_say(f, FSCK_OUT_BLOCK, SEGMENT_JOURNAL, n, l->slot, l->uid, seg, block, offset, bytes);
        return;
    }
    uint32_t shared = s->ref & SEG_SHARED ? SHARED : 0;
    uint32_t other = claim(&f->blocks[n][block], f->walks, l->slot | shared, &again);
    uint32_t who = (other - 1) & ~SHARED;

    if (other && !(shared && (other - 1) & SHARED) && who != l->slot && both_have(f, n, who, l->slot, UINT64_MAX, block))
        fsck_say(f, FSCK_BLOCK_SHARED, SEGMENT_JOURNAL, n, l->slot, l->uid, block, who);
    if (shared)
        return;
    /* A block is filled from its start to its end, so its segments come in that order. */
    if (again && offset < f->filled[n][block])
        fsck_say(f, FSCK_OUT_OVERLAP, SEGMENT_JOURNAL, n, l->slot, l->uid, seg, block);
    f->filled[n][block] = offset + (uint32_t)bytes;
}

static void check_body(struct fsck *f, uint32_t n, const struct list *l, uint32_t seg, uint64_t bytes, uint64_t nth)
{
    const struct out_seg *s = &journal_segs(f->journals[n])[seg];
    uint64_t handle = fsck_load(&s->handle);
    int alive = fsck_meet(f, handle);

    if (alive <= 0) {
        /* Being dropped, or taken by the kernel with the last sendmsg: what that took is popped
         * right after, so it is at the head of a list and only for a moment. */
        int gone = (l->phase & 0xff) == PHASE_CLOSING || (f->dead && nth < FSCK_TAKEN_MAX);

        if (alive < 0 || !gone)
            fsck_say(f, FSCK_OUT_BODY, SEGMENT_JOURNAL, n, l->slot, l->uid, seg, handle);
        return;
    }
    const struct arena *a = f->arenas[handle_source(handle)];
    const struct arena_entry *e = a ? &arena_entries((struct arena *)a)[handle_entry(handle)] : NULL;

    if (e && s->skip + bytes > e->total_len)
        fsck_say(f, FSCK_OUT_BODY_RANGE, SEGMENT_JOURNAL, n, l->slot, l->uid, seg, handle, s->skip, bytes);
}

/* J3 and J4 of one list. */
static void walk(struct fsck *f, uint32_t n, const struct list *l)
{
    const struct out_seg *segs = journal_segs(f->journals[n]);
    uint64_t high = fsck_load(&f->journals[n]->segs_high), at = l->head;

    f->walks++;
    for (uint64_t nth = 0;; nth++) {
        if (at == 0 || at > high) {
            fsck_say(f, FSCK_OUT_LINK, SEGMENT_JOURNAL, n, l->slot, l->uid, at, 0, high);
            return;
        }
        uint32_t seg = (uint32_t)at - 1, next = fsck_load32(&segs[seg].next);
        uint64_t pos = fsck_load(&segs[seg].pos), end = l->end;
        int again;
        uint32_t other = claim(&f->segs[n][seg], f->walks, l->slot, &again);

        if (other && both_have(f, n, other - 1, l->slot, seg, UINT64_MAX)) {
            fsck_say(f, FSCK_OUT_SHARED, SEGMENT_JOURNAL, n, l->slot, l->uid, seg, other - 1);
            return;
        }
        if (at != l->tail && next && next <= high) {
            if (f->segs[n][next - 1] == f->segs[n][seg]) { /* marked in this walk */
                fsck_say(f, FSCK_OUT_CYCLE, SEGMENT_JOURNAL, n, l->slot, l->uid, next - 1);
                return;
            }
            end = fsck_load(&segs[next - 1].pos);
        }
        if (end < pos) {
            fsck_say(f, FSCK_OUT_POS, SEGMENT_JOURNAL, n, l->slot, l->uid, seg, pos, end);
            return;
        }
        if (segs[seg].ref & SEG_BODY)
            check_body(f, n, l, seg, end - pos, nth);
        else
            check_block(f, n, l, seg, end - pos);
        if (at == l->tail)
            return;
        at = next;
    }
}

static void check_output(struct fsck *f, uint32_t n, uint32_t slot)
{
    uint32_t before = f->count;

    for (int tries = 0; tries < FSCK_TRIES; tries++) {
        struct list l = read_list(f, n, slot);

        f->count = before;
        if (!l.uid || !l.head)
            return;
        if ((l.phase & 0xff) == PHASE_CLOSING)
            fsck_say(f, FSCK_OUT_LEFT, SEGMENT_JOURNAL, n, slot, l.uid, l.phase & 0xff);
        walk(f, n, &l);
        if (!same_list(f, n, &l))
            continue;
        if (l.head <= fsck_load(&f->journals[n]->segs_high)) {
            uint64_t pos = fsck_load(&journal_segs(f->journals[n])[l.head - 1].pos);

            f->counts.pending_bytes += l.end > pos ? l.end - pos : 0;
        }
        return;
    }
    f->count = before; /* it never stood still, so it is being written: nothing can be said */
}

/* The table's side (T3): taken up before the record is made, given back after it is cleared. */
static void check_table_side(struct fsck *f, uint32_t n, uint32_t slot, uint64_t uid)
{
    const struct conntable_slot *t;

    if (!f->table || slot >= f->table->capacity)
        return;
    t = &f->table->slots[slot];
    uint32_t state = fsck_load32(&t->state), connmgr = t->connmgr;
    uint64_t theirs = fsck_load(&t->uid);

    if (theirs == uid && connmgr == n && (state == CONN_ACTIVE || state == CONN_ASSIGNED))
        return;
    if (fsck_load(&journal_conns(f->journals[n])[slot].uid) == uid && fsck_load32(&t->state) == state)
        fsck_say(f, FSCK_CONN_TABLE, SEGMENT_JOURNAL, n, slot, uid, theirs, (uint64_t)state << 32 | connmgr);
}

static int is_served(uint64_t phase) { return (phase & 0xff) == PHASE_OPEN || (phase & 0xff) == PHASE_GREETED; }

/* The router's side: it has a session before it answers, and until it is told to end it (J6). */
static void check_router_side(struct fsck *f, uint32_t n, uint32_t slot, uint64_t uid, uint64_t phase)
{
    const struct conn_rec *r = &journal_conns(f->journals[n])[slot];

    if (!f->routing || slot >= f->routing->clients || !is_served(phase))
        return;
    uint64_t theirs = fsck_load(&routing_clients(f->routing)[slot].uid);

    if (theirs != uid && fsck_load(&r->uid) == uid && fsck_load(&r->phase) == phase)
        fsck_say(f, FSCK_CONN_SESSION, SEGMENT_JOURNAL, n, slot, uid, theirs);
}

static void check_conn(struct fsck *f, uint32_t n, uint32_t slot)
{
    const struct conn_rec *r = &journal_conns(f->journals[n])[slot];
    uint64_t phase = fsck_load(&r->phase), uid = fsck_load(&r->uid), buffer = fsck_load(&r->buffer);
    uint64_t low = phase & 0xff, chunk = buffer >> 32;

    if (fsck_load(&r->phase) != phase)
        return;
    if (uid == 0 ? phase != 0 : low < PHASE_OPENING || low >= PHASES || phase & ~PHASE_KNOWN)
        fsck_say(f, FSCK_CONN_PHASE, SEGMENT_JOURNAL, n, slot, uid, phase);
    if (uid == 0)
        return;
    if (buffer && f->arenas[n] && (chunk == 0 || chunk > f->arenas[n]->chunk_count ||
                                   (uint32_t)buffer > ARENA_CHUNK_BYTES) &&
        fsck_load(&r->uid) == uid)
        fsck_say(f, FSCK_CONN_BUFFER, SEGMENT_JOURNAL, n, slot, uid, buffer);
    check_table_side(f, n, slot, uid);
    check_router_side(f, n, slot, uid, phase);
}

void fsck_conns(struct fsck *f, uint32_t n)
{
    for (uint32_t slot = 0; slot < fsck_load(&f->journals[n]->conns_high); slot++) {
        check_conn(f, n, slot);
        check_output(f, n, slot);
    }
}
