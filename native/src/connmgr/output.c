/* output: what waits to be written to a connection, and the writing.
 *
 * Primary: out_seg lists and blocks in the journal (J3, J4). Small frames are copied into
 * 16 KiB blocks, so their bodies can be let go at once; larger bodies stay in the arena and
 * a segment refers to them. Derived: free stacks, users per block, how many local segments
 * need each body.
 *
 * Bound: an order batch names at most 2040 recipients, each of which may need one new block
 * for its frame head and one for what follows a body; runs count for as much as they need
 * (batch_run_load), but for those to subscriptions with long sids (output_has_spare): OUTPUT_BLOCKS_KEPT are free before a batch is begun, if need be by ending the
 * connection with the most pending bytes.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define OUTPUT_BLOCKS_KEPT (JOURNAL_BLOCKS_MIN / 2) /* 4096 */
#define OUTPUT_SEGS_KEPT (4u * OUTPUT_BLOCKS_KEPT)
_Static_assert(BATCH_GATHERED == JOURNAL_BLOCK_BYTES && BATCH_FRAME_MORE >= 32 + PROTOCOL_SID_SHORT, "see batch_run_load");
#define OUTPUT_IOV_MAX 64
#define OUTPUT_WRITE_MAX (256u * 1024)

static uint32_t blocks_left(const struct connmgr *cm)
{
    return cm->block_free_count + cm->journal->blocks - (uint32_t)cm->journal->blocks_high;
}

static uint32_t segs_left(const struct connmgr *cm)
{
    return cm->seg_free_count + cm->journal->blocks * JOURNAL_SEGS_PER_BLOCK -
           (uint32_t)cm->journal->segs_high;
}

static uint32_t take_block(struct connmgr *cm)
{
    if (cm->block_free_count)
        return cm->block_free[--cm->block_free_count];
    return (uint32_t)cm->journal->blocks_high++;
}

static uint32_t take_seg(struct connmgr *cm)
{
    if (cm->seg_free_count)
        return cm->seg_free[--cm->seg_free_count];
    return (uint32_t)cm->journal->segs_high++;
}

static uint32_t seg_block(const struct out_seg *s) { return (uint32_t)((s->ref & ~SEG_SHARED) >> 32); }

void output_mark(struct connmgr *cm, struct conn *c)
{
    if (!c->dirty) {
        c->dirty = 1;
        c->next_dirty = cm->dirty_first;
        cm->dirty_first = c->slot;
    }
}

static struct out_seg *append_seg(struct connmgr *cm, struct conn *c)
{
    uint32_t seg = take_seg(cm);
    struct out_seg *s = &cm->segs[seg];

    s->pos = c->end;
    s->next = 0;
    if (c->head == CONNMGR_NONE)
        c->head = seg;
    else
        cm->segs[c->tail].next = seg + 1;
    c->tail = seg;
    return s;
}

static void unuse_block(struct connmgr *cm, uint32_t block)
{
    if (--cm->block_users[block] == 0)
        cm->block_free[cm->block_free_count++] = block;
}

static void leave_block(struct connmgr *cm, struct conn *c)
{
    if (c->write_at)
        unuse_block(cm, c->write_block);
    c->write_at = c->write_end = NULL;
}

/* Room for `bytes` (at most a block) in one piece; advance c->write_at and c->end after. */
uint8_t *output_reserve(struct connmgr *cm, struct conn *c, uint32_t bytes)
{
    output_mark(cm, c);
    if ((uint32_t)(c->write_end - c->write_at) >= bytes) {
        if (c->head == CONNMGR_NONE || cm->segs[c->tail].ref & (SEG_BODY | SEG_SHARED)) {
            uint64_t offset = (uint64_t)(c->write_at - journal_block(cm->journal, c->write_block));

            append_seg(cm, c)->ref = (uint64_t)c->write_block << 32 | offset;
            cm->block_users[c->write_block]++;
        }
        return c->write_at;
    }
    leave_block(cm, c);
    c->write_block = take_block(cm);
    append_seg(cm, c)->ref = (uint64_t)c->write_block << 32;
    cm->block_users[c->write_block] = 2;
    c->write_at = journal_block(cm->journal, c->write_block);
    c->write_end = c->write_at + JOURNAL_BLOCK_BYTES;
    return c->write_at;
}

void output_append(struct connmgr *cm, struct conn *c, const void *bytes, uint32_t len)
{
    const uint8_t *from = bytes;

    while (len) {
        uint8_t *to = output_reserve(cm, c, 1);
        uint32_t room = (uint32_t)(c->write_end - to), part = len < room ? len : room;

        memcpy(to, from, part);
        c->write_at += part;
        c->end += part;
        from += part;
        len -= part;
    }
}

uint8_t *output_share(struct connmgr *cm, uint32_t *ret_block)
{
    uint32_t block = take_block(cm);

    cm->block_users[block] = 1;
    *ret_block = block;
    return journal_block(cm->journal, block);
}

void output_append_shared(struct connmgr *cm, struct conn *c, uint32_t block, uint32_t len)
{
    output_mark(cm, c);
    append_seg(cm, c)->ref = SEG_SHARED | (uint64_t)block << 32;
    cm->block_users[block]++;
    c->end += len;
}

void output_shared(struct connmgr *cm, uint32_t block) { unuse_block(cm, block); }

void output_append_body(struct connmgr *cm, struct conn *c, uint64_t handle, uint32_t skip, uint32_t len)
{
    output_mark(cm, c);
    struct out_seg *s = append_seg(cm, c);

    s->ref = SEG_BODY;
    s->handle = handle;
    s->skip = skip;
    (*port_needed(&cm->port, handle))++;
    c->end += len;
}

void output_put(struct connmgr *cm)
{
    while (cm->dirty_first != CONNMGR_NONE) {
        struct conn *c = &cm->conns[cm->dirty_first];
        struct conn_rec *r = &cm->recs[c->slot];

        cm->dirty_first = c->next_dirty;
        c->dirty = 0;
        if (c->head == CONNMGR_NONE)
            continue;
        if (r->out_head != c->head + 1ULL)
            redo_put(&cm->port.redo, &r->out_head, c->head + 1ULL);
        if (r->out_tail != c->tail + 1ULL)
            redo_put(&cm->port.redo, &r->out_tail, c->tail + 1ULL);
        redo_put(&cm->port.redo, &r->out_end, c->end);
        cm->made += c->end - r->out_end;
        if (r->dropped != c->dropped)
            redo_put(&cm->port.redo, &r->dropped, c->dropped);
        if (!c->flush && !c->writing) {
            c->flush = 1;
            c->next_flush = cm->flush_first;
            cm->flush_first = c->slot;
        }
    }
}

static void free_seg(struct connmgr *cm, uint32_t seg)
{
    const struct out_seg *s = &cm->segs[seg];

    if (!(s->ref & SEG_BODY))
        unuse_block(cm, seg_block(s));
    cm->seg_free[cm->seg_free_count++] = seg;
}

static uint64_t seg_end(const struct connmgr *cm, const struct conn *c, uint32_t seg)
{
    return seg == c->tail ? c->end : cm->segs[cm->segs[seg].next - 1].pos;
}

/* Pops what the kernel has taken. Relinquish, then pop, then reuse (J4). */
static void pop_sent(struct connmgr *cm, struct conn *c)
{
    uint32_t first = c->head, seg = first;

    while (seg != CONNMGR_NONE && seg_end(cm, c, seg) <= c->sent) {
        if (cm->segs[seg].ref & SEG_BODY)
            port_release(&cm->port, cm->segs[seg].handle);
        seg = seg == c->tail ? CONNMGR_NONE : cm->segs[seg].next - 1;
    }
    if (seg == first)
        return;
    c->head = seg;
    CRASH(OUTPUT_RELINQUISHED);
    cm->recs[c->slot].out_head = seg == CONNMGR_NONE ? 0 : seg + 1ULL; /* "out.pop" */
    CRASH(OUTPUT_POP);
    while (first != seg) {
        uint32_t next = first == c->tail ? CONNMGR_NONE : cm->segs[first].next - 1;

        free_seg(cm, first);
        first = next;
    }
    if (seg == CONNMGR_NONE)
        leave_block(cm, c);
}

/* After a crash: what the kernel took before it may have been relinquished already. */
void output_resume(struct connmgr *cm, struct conn *c)
{
    if (c->head != CONNMGR_NONE)
        pop_sent(cm, c);
}

/* The pieces of a body from `skip` on, `len` bytes: one, or several along a chain. */
static int body_pieces(struct connmgr *cm, const struct out_seg *s, uint64_t from, uint64_t len,
                       struct iovec *iov, int room)
{
    struct arena *a = cm->port.arenas[handle_source(s->handle)];
    const struct arena_entry *e = &arena_entries(a)[handle_entry(s->handle)];
    uint64_t at = e->body + s->skip + from;
    uint32_t chunk = e->chunk;
    int count = 0;

    for (; at >= ARENA_CHUNK_BYTES; at -= ARENA_CHUNK_BYTES)
        chunk = a->chunks[chunk].next - 1;
    while (len && count < room) {
        uint64_t part = ARENA_CHUNK_BYTES - at < len ? ARENA_CHUNK_BYTES - at : len;

        iov[count].iov_base = arena_data(a, chunk) + at;
        iov[count++].iov_len = part;
        len -= part;
        at = 0;
        if (len)
            chunk = a->chunks[chunk].next - 1;
    }
    return count;
}

static int gather(struct connmgr *cm, struct conn *c, struct iovec *iov)
{
    uint64_t from = c->sent - cm->segs[c->head].pos, total = 0;
    uint32_t seg = c->head;
    int count = 0;

    while (count < OUTPUT_IOV_MAX && total < OUTPUT_WRITE_MAX) {
        const struct out_seg *s = &cm->segs[seg];
        uint64_t len = seg_end(cm, c, seg) - s->pos - from;

        if (s->ref & SEG_BODY) {
            count += body_pieces(cm, s, from, len, iov + count, OUTPUT_IOV_MAX - count);
        } else {
            iov[count].iov_base =
                journal_block(cm->journal, seg_block(s)) + (uint32_t)s->ref + from;
            iov[count++].iov_len = len;
        }
        total += len;
        from = 0;
        if (seg == c->tail)
            break;
        seg = s->next - 1;
    }
    return count;
}

static void wait_writable(struct connmgr *cm, struct conn *c)
{
    struct epoll_event ev = {.events = EPOLLOUT | EPOLLONESHOT, .data.u32 = c->slot};

    c->writing = 1;
    if (epoll_ctl(cm->epoll_out, EPOLL_CTL_MOD, c->fd, &ev) != 0)
        (void)epoll_ctl(cm->epoll_out, EPOLL_CTL_ADD, c->fd, &ev);
}

/* Writes until nothing is pending or the kernel takes no more. */
void output_write(struct connmgr *cm, struct conn *c)
{
    c->writing = 0;
    while (c->head != CONNMGR_NONE && c->fd >= 0) {
        struct iovec iov[OUTPUT_IOV_MAX];
        ssize_t sent = streams_send(cm, c, iov, gather(cm, c, iov));

        if (sent < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != ENOBUFS) {
                conn_end(cm, c, CLOSE_WRITE_ERROR);
                return;
            }
            if (!c->stuck_since)
                c->stuck_since = cm->now_ns;
            wait_writable(cm, c);
            if (c->crowded)
                slow_written(cm, c);
            return;
        }
        CRASH(OUTPUT_WRITTEN);
        cm->stats.sends++;
        cm->stats.bytes_out += (uint64_t)sent;
        c->sent += (uint64_t)sent;
        c->stuck_since = 0;
        if (TRACE_IF(cm->trace.flights))
            trace_sent(cm, c);
        pop_sent(cm, c);
    }
    if (c->crowded)
        slow_written(cm, c);
    if (c->confirmed)
        conn_linger(cm, c);
}

void output_flush(struct connmgr *cm)
{
    while (cm->flush_first != CONNMGR_NONE) {
        struct conn *c = &cm->conns[cm->flush_first];

        cm->flush_first = c->next_flush;
        c->flush = 0;
        output_write(cm, c);
    }
}

/* The connection is over: lets go of every body it still needed. */
void output_drop(struct connmgr *cm, struct conn *c)
{
    uint32_t seg = c->head;

    if (TRACE_IF(cm->trace.flights))
        trace_forget(cm, c);
    if (seg == CONNMGR_NONE)
        return;
    for (uint32_t at = seg;; at = cm->segs[at].next - 1) {
        if (cm->segs[at].ref & SEG_BODY)
            port_release(&cm->port, cm->segs[at].handle);
        if (at == c->tail)
            break;
    }
    cm->recs[c->slot].out_head = 0; /* "out.drop" */
    CRASH(OUTPUT_DROP);
    for (;;) {
        uint32_t next = cm->segs[seg].next - 1, last = seg == c->tail;

        free_seg(cm, seg);
        if (last)
            break;
        seg = next;
    }
    c->head = c->tail = CONNMGR_NONE;
    leave_block(cm, c);
}

uint32_t output_take_block(struct connmgr *cm)
{
    uint32_t block = take_block(cm);

    cm->block_users[block] = 1;
    return block;
}

void output_free_block(struct connmgr *cm, uint32_t block) { unuse_block(cm, block); }

uint32_t output_blocks_left(const struct connmgr *cm) { return blocks_left(cm); }

int output_has_room(const struct connmgr *cm)
{
    return blocks_left(cm) >= OUTPUT_BLOCKS_KEPT && segs_left(cm) >= OUTPUT_SEGS_KEPT;
}

/* Room for frames with long sids, which the router does not count (batch_run_load): a block each at most, beside what the
 * rest of a batch may take. */
int output_has_spare(const struct connmgr *cm, uint32_t frames)
{
    return blocks_left(cm) >= OUTPUT_BLOCKS_KEPT + frames + 1;
}

/* Before a batch is begun: see the bound at the top. 1 if a connection had to go. */
int output_make_room(struct connmgr *cm)
{
    int ended = 0;

    while (!output_has_room(cm)) {
        struct conn *worst = NULL;

        for (uint32_t i = 0; i < cm->journal->conns_high; i++) {
            struct conn *c = &cm->conns[i];

            if (c->fd >= 0 && (!worst || c->end - c->sent > worst->end - worst->sent))
                worst = c;
        }
        if (!worst || worst->head == CONNMGR_NONE)
            return ended;
        conn_end(cm, worst, CLOSE_SLOW_ROOM);
        ended = 1;
    }
    return ended;
}

/* Rebuilds the free stacks and the counts from the lists of all connections. */
void output_recover(struct connmgr *cm)
{
    struct journal *j = cm->journal;
    uint8_t *listed = cm->scratch; /* one byte per segment: fresh, so zero; the caller clears it again */

    for (uint32_t i = 0; i < j->conns_high; i++) {
        struct conn *c = &cm->conns[i];

        streams_recover(cm, c);
        if (c->head == CONNMGR_NONE)
            continue;
        for (uint32_t seg = c->head;; seg = cm->segs[seg].next - 1) {
            const struct out_seg *s = &cm->segs[seg];

            listed[seg] = 1;
            if (s->ref & SEG_BODY)
                (*port_needed(&cm->port, s->handle))++;
            else
                cm->block_users[seg_block(s)]++;
            if (seg == c->tail)
                break;
        }
    }
    for (uint32_t seg = (uint32_t)j->segs_high; seg-- > 0;)
        if (!listed[seg])
            cm->seg_free[cm->seg_free_count++] = seg;
    for (uint32_t block = (uint32_t)j->blocks_high; block-- > 0;)
        if (!cm->block_users[block])
            cm->block_free[cm->block_free_count++] = block;
}
