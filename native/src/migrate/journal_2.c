/* journal_2: the journal of a connmgr of release 0.1 becomes one of today's. See migrate.h. */
#include "connmgr/journal.h"
#include "migrate/converter.h"
#include "migrate/release_0_1.h"

#include <errno.h>
#include <string.h>

_Static_assert(R01_BLOCK_BYTES == JOURNAL_BLOCK_BYTES && R01_SEGS_PER_BLOCK == JOURNAL_SEGS_PER_BLOCK &&
               sizeof(struct r01_seg) == sizeof(struct out_seg) && R01_CONNMGRS == PORTS_MAX,
               "output is copied as it is");
_Static_assert(sizeof(struct r01_ring) == sizeof(struct batch_ring) && sizeof(struct r01_inbox) == sizeof(struct batch_inbox) &&
               R01_BATCH_VERSION == BATCH_VERSION, "batches are copied as they are");
_Static_assert(R01_SID_MAX <= JOURNAL_SID_INLINE && R01_NAME_MAX <= JOURNAL_NAME_MAX, "texts fit");

static uint64_t fingerprint(void)
{
    return sizeof(struct r01_journal) ^ sizeof(struct r01_conn) << 24 ^ sizeof(struct r01_sub) << 32 ^
           sizeof(struct r01_seg) << 40 ^ (uint64_t)R01_BLOCK_BYTES << 44 ^ (uint64_t)R01_BATCH_VERSION << 60;
}

static uint64_t bytes(const void *from, uint64_t from_bytes)
{
    const struct r01_journal *j = from;

    if (from_bytes < sizeof(*j) || j->conns_at != r01_page_up(sizeof(*j)) ||
        j->subs_at != j->conns_at + r01_page_up((uint64_t)j->conns * sizeof(struct r01_conn)) ||
        j->segs_at != j->subs_at + r01_page_up((uint64_t)j->subs * sizeof(struct r01_sub)) ||
        j->blocks_at != j->segs_at + r01_page_up((uint64_t)j->blocks * R01_SEGS_PER_BLOCK * sizeof(struct r01_seg)) ||
        from_bytes != j->blocks_at + (uint64_t)j->blocks * R01_BLOCK_BYTES || j->index >= R01_CONNMGRS ||
        j->conns_high > j->conns || j->subs_high > j->subs || j->blocks_high > j->blocks ||
        j->segs_high > (uint64_t)j->blocks * R01_SEGS_PER_BLOCK)
        return 0;
    return journal_bytes(j->conns, j->subs, j->blocks);
}

static int finish(void *from, uint64_t from_bytes, void *arena, uint64_t arena_bytes)
{
    struct r01_journal *j = from;

    return r01_redo_finish(&j->redo, j, from_bytes, arena, arena_bytes);
}

_Static_assert(R01_PHASE_OPEN == PHASE_OPEN && R01_CONN_CONNECTED == CONN_CONNECTED, "the others keep their numbers");

/* Not connected: it was greeted. With a name: whether that is its own may not be known yet, so the router is
 * asked again (names.c). */
static uint64_t convert_phase(const struct r01_conn *f)
{
    if ((f->phase & 0xff) == R01_PHASE_OPEN && (!(f->phase & R01_CONN_CONNECTED) || f->name[0]))
        return (f->phase & ~0xffULL) | PHASE_GREETED;
    return f->phase;
}

static void convert_conn(const struct r01_conn *f, struct conn_rec *t)
{
    t->uid = f->uid;
    t->phase = convert_phase(f);
    t->in_base = f->in_base;
    t->out_base = f->out_base;
    t->in_pos = f->in_pos;
    t->buffer = f->buffer;
    t->out_head = f->out_head;
    t->out_tail = f->out_tail;
    t->out_end = f->out_end;
    t->dropped = f->dropped;
    memcpy(t->name, f->name, sizeof f->name);
}

static void convert_sub(const struct r01_sub *f, struct sub_rec *t)
{
    t->word = f->word;
    t->delivered = f->delivered;
    t->base = f->base;
    t->max = f->max;
    t->stamp = f->stamp;
    t->sid_len = f->sid_len;
    memcpy(t->sid, f->sid, sizeof f->sid);
}

static int convert(const struct conversion *c)
{
    const struct r01_journal *from = (const void *)c->from;
    const struct r01_conn *conns = (const void *)(c->from + from->conns_at);
    const struct r01_sub *subs = (const void *)(c->from + from->subs_at);
    struct journal *to = (void *)c->to;

    if (from->redo.count)
        return -EPROTO;
    journal_format(to, from->index, from->conns, from->subs, from->blocks);
    atomic_store(&to->port.header.magic, 0); /* last, below: it was needed for the offsets */
    to->port.applied = from->applied;
    to->port.done = from->done;
    to->conns_high = from->conns_high;
    to->subs_high = from->subs_high;
    to->segs_high = from->segs_high;
    to->blocks_high = from->blocks_high;
    memcpy(to->port.open_handle, from->open_handle, sizeof from->open_handle);
    memcpy(&to->port.inbox, &from->inbox, sizeof from->inbox);
    memcpy(&to->port.refs, &from->refs, sizeof from->refs);
    for (uint64_t i = 0; i < from->conns_high; i++)
        convert_conn(&conns[i], &journal_conns(to)[i]);
    for (uint64_t i = 0; i < from->subs_high; i++)
        convert_sub(&subs[i], &journal_subs(to)[i]);
    conversion_copy(c, from->segs_at, to->segs_at, from->segs_high * sizeof(struct r01_seg));
    conversion_copy(c, from->blocks_at, to->blocks_at, from->blocks_high * R01_BLOCK_BYTES);
    segment_format(to, SEGMENT_JOURNAL, JOURNAL_LAYOUT, journal_fingerprint(), to->port.header.bytes);
    return 0;
}

const struct converter journal_from_2 = {
    .kind = SEGMENT_JOURNAL,
    .layout = R01_JOURNAL_LAYOUT,
    .fingerprint = fingerprint,
    .bytes = bytes,
    .finish = finish,
    .convert = convert,
};
