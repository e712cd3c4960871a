/* fsck: taking segments in, redo logs, the connection table, the order of a pass. See fsck.h. */
#include "fsck/fsck.h"

#include <stdlib.h>

void fsck_add_finding(struct fsck *f, uint32_t code, uint32_t kind, uint32_t index, const uint64_t where[6])
{
    if (f->count == FSCK_FINDINGS_MAX) {
        f->counts.dropped++;
        return;
    }
    struct fsck_finding *it = &f->found[f->count++];

    *it = (struct fsck_finding){.code = code, .kind = kind, .index = index};
    memcpy(it->where, where, sizeof(it->where));
}

int fsck_open(int dead, struct fsck **ret_f)
{
    struct fsck *f = reserve(sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->dead = dead;
    *ret_f = f;
    return 0;
}

const struct fsck_finding *fsck_found(const struct fsck *f) { return f->found; }
const struct fsck_counts *fsck_get_counts(const struct fsck *f) { return &f->counts; }

void fsck_add_queue(struct fsck *f, int orders, uint32_t index, uint32_t depth, uint32_t messages)
{
    (orders ? f->orders : f->refs)[index] = (struct fsck_queue){1, depth, messages};
}

/* ---- taking segments in ---- */

static uint64_t sids_slots(const struct journal *j)
{
    uint64_t slots = 16;

    while (slots < 2 * fsck_load(&j->subs_high))
        slots *= 2;
    return slots;
}

/* The scratch memory of a segment, made (release 0) or given back. */
static int scratch_arena(struct fsck *f, uint32_t n, int give_back)
{
    uint64_t chunks = f->arenas[n]->chunk_count, entries = chunks * ARENA_CHUNK_MESSAGES;

    if (give_back) {
        reserve_end(f->seen[n], entries * 4);
        reserve_end(f->owner[n], chunks * 4);
        return 0;
    }
    f->seen[n] = reserve(entries * 4);
    f->owner[n] = reserve(chunks * 4);
    return f->seen[n] && f->owner[n] ? 0 : -ENOMEM;
}

static int scratch_journal(struct fsck *f, uint32_t n, int give_back)
{
    const struct journal *j = f->journals[n];
    uint64_t segs = (uint64_t)j->blocks * JOURNAL_SEGS_PER_BLOCK, subs = j->subs;

    if (give_back) {
        reserve_end(f->segs[n], segs * 8);
        reserve_end(f->blocks[n], (uint64_t)j->blocks * 8);
        reserve_end(f->filled[n], (uint64_t)j->blocks * 4);
        reserve_end(f->had[n], subs * 4);
        reserve_end(f->under_way[n], subs * 4);
        reserve_end(f->sids[n], (f->sids_mask[n] + 1ULL) * 4);
        reserve_end(f->sid_cells[n], subs * 4);
        return 0;
    }
    f->segs[n] = reserve(segs * 8);
    f->blocks[n] = reserve((uint64_t)j->blocks * 8);
    f->filled[n] = reserve((uint64_t)j->blocks * 4);
    f->had[n] = reserve(subs * 4);
    f->under_way[n] = reserve(subs * 4);
    f->sids_mask[n] = (uint32_t)(sids_slots(j) - 1);
    f->sids[n] = reserve((f->sids_mask[n] + 1ULL) * 4);
    f->sid_cells[n] = reserve(subs * 4);
    return f->segs[n] && f->blocks[n] && f->filled[n] && f->had[n] && f->under_way[n] && f->sids[n] && f->sid_cells[n]
               ? 0 : -ENOMEM;
}

void fsck_close(struct fsck *f)
{
    for (uint32_t n = 0; n < PORTS_MAX; n++) {
        if (f->arenas[n])
            (void)scratch_arena(f, n, 1);
        if (f->journals[n])
            (void)scratch_journal(f, n, 1);
    }
    if (f->routing)
        reserve_end(f->cells, (uint64_t)f->routing->cells * 4);
    reserve_end(f, sizeof(*f));
}

static int wrong(struct fsck *f, uint32_t kind, uint32_t n, uint64_t field, uint64_t found, uint64_t expected)
{
    fsck_say(f, FSCK_HEADER, kind, n, field, found, expected);
    return 1;
}

/* S1, field by field, so that the finding says which. */
static int header_refused(struct fsck *f, uint32_t kind, uint32_t n, const struct segment_header *h,
                          uint64_t bytes, uint32_t layout, uint64_t fingerprint)
{
    if (bytes < sizeof(*h))
        return wrong(f, kind, n, 4, bytes, sizeof(*h));
    uint64_t magic = fsck_load(&h->magic);

    if (magic == 0) {
        fsck_say(f, FSCK_UNFINISHED, kind, n, 0);
        return 1;
    }
    if (magic != SEGMENT_MAGIC)
        return wrong(f, kind, n, 0, magic, SEGMENT_MAGIC);
    if (h->kind != kind)
        return wrong(f, kind, n, 1, h->kind, kind);
    if (h->layout != layout)
        return wrong(f, kind, n, 2, h->layout, layout);
    if (h->fingerprint != fingerprint)
        return wrong(f, kind, n, 3, h->fingerprint, fingerprint);
    return h->bytes == bytes ? 0 : wrong(f, kind, n, 4, h->bytes, bytes);
}

static int add_table(struct fsck *f, struct conntable *t, uint64_t bytes)
{
    if (header_refused(f, SEGMENT_CONNTABLE, 0, &t->header, bytes, CONNTABLE_LAYOUT, conntable_fingerprint()))
        return 1;
    if (bytes < sizeof(*t) || conntable_bytes(t->capacity) != bytes)
        return 2;
    f->table = t;
    return 0;
}

static int add_arena(struct fsck *f, uint32_t n, struct arena *a, uint64_t bytes)
{
    if (header_refused(f, SEGMENT_ARENA, n, &a->header, bytes, ARENA_LAYOUT, arena_fingerprint()))
        return 1;
    uint64_t chunks = bytes < sizeof(*a) ? 0 : a->chunk_count;

    if (chunks < ARENA_CHUNKS_MIN || chunks > ARENA_CHUNKS_MAX || arena_bytes((uint32_t)chunks) != bytes ||
        a->owner != n || a->words != page_up(sizeof(*a) + chunks * sizeof(struct chunk)) ||
        a->entries != page_up(a->words + chunks * ARENA_CHUNK_MESSAGES * 8) ||
        a->data != page_up(a->entries + chunks * ARENA_CHUNK_MESSAGES * sizeof(struct arena_entry)))
        return 2;
    f->arenas[n] = a;
    return scratch_arena(f, n, 0);
}

static int add_journal(struct fsck *f, uint32_t n, struct journal *j, uint64_t bytes)
{
    if (header_refused(f, SEGMENT_JOURNAL, n, &j->port.header, bytes, JOURNAL_LAYOUT, journal_fingerprint()))
        return 1;
    if (bytes < sizeof(*j) || j->port.index != n || journal_bytes(j->conns, j->subs, j->blocks) != bytes ||
        j->conns_at != page_up(sizeof(*j)) ||
        j->subs_at != j->conns_at + page_up((uint64_t)j->conns * sizeof(struct conn_rec)) ||
        j->segs_at != j->subs_at + page_up((uint64_t)j->subs * sizeof(struct sub_rec)) ||
        j->blocks_at != j->segs_at + page_up((uint64_t)j->blocks * JOURNAL_SEGS_PER_BLOCK * sizeof(struct out_seg)))
        return 2;
    const uint64_t marks[4][2] = {{fsck_load(&j->conns_high), j->conns},
                                  {fsck_load(&j->subs_high), j->subs},
                                  {fsck_load(&j->segs_high), (uint64_t)j->blocks * JOURNAL_SEGS_PER_BLOCK},
                                  {fsck_load(&j->blocks_high), j->blocks}};

    for (uint64_t i = 0; i < 4; i++)
        if (marks[i][0] > marks[i][1]) {
            fsck_say(f, FSCK_HIGH_MARK, SEGMENT_JOURNAL, n, i, marks[i][0], marks[i][1]);
            return 1;
        }
    f->journals[n] = j;
    f->ports[n] = &j->port;
    return scratch_journal(f, n, 0);
}

static int add_port(struct fsck *f, uint32_t n, struct port_log *p, uint64_t bytes)
{
    if (header_refused(f, SEGMENT_PORT, n, &p->header, bytes, PORT_LAYOUT, port_fingerprint()))
        return 1;
    if (bytes < port_hot_bytes() || p->index != n || p->kind == PORT_CONNMGR)
        return 2;
    f->ports[n] = p;
    return 0;
}

static int add_routing(struct fsck *f, struct routing *r, uint64_t bytes)
{
    if (header_refused(f, SEGMENT_ROUTING, 0, &r->header, bytes, ROUTING_LAYOUT, routing_fingerprint()))
        return 1;
    if (bytes < sizeof(*r) || r->ports != PORTS_MAX || fsck_load(&r->ports_high) > PORTS_MAX ||
        r->cells != ROUTING_CELLS || routing_bytes(r->clients, r->subs_each) != bytes ||
        r->lanes_at != page_up(sizeof(*r)) || r->clients_at != routing_hot_bytes(r->ports) ||
        r->subs_at != r->clients_at + page_up((uint64_t)r->clients * sizeof(struct routing_client)) ||
        r->cells_at != r->subs_at + page_up((uint64_t)r->ports * r->subs_each * sizeof(struct routing_sub)) ||
        r->requests_at != r->cells_at + ROUTING_CELLS * sizeof(struct routing_cell) ||
        r->legs_at != r->requests_at + MODE_REQUESTS_MAX * sizeof(struct mode_request) ||
        r->names_at != r->legs_at + MODE_LEGS_MAX * sizeof(struct mode_leg) ||
        r->asides_at != r->names_at + page_up((uint64_t)r->clients * sizeof(struct mode_name)))
        return 2;
    const uint64_t *marks[] = {&r->requests_high, &r->legs_high, &r->names_high};
    const uint64_t bounds[] = {MODE_REQUESTS_MAX, MODE_LEGS_MAX, r->clients};

    for (uint32_t i = 0; i < 3; i++)
        if (fsck_load(marks[i]) > bounds[i]) {
            fsck_say(f, FSCK_HIGH_MARK, SEGMENT_ROUTING, 0, 7 + i, fsck_load(marks[i]), bounds[i]);
            return 1;
        }
    for (uint32_t i = 0; i <= r->ports; i++) {
        uint64_t mark = fsck_load(i ? &r->subs_high[i - 1] : &r->cells_high);
        uint64_t bound = i ? r->subs_each : r->cells;

        if (mark > bound) {
            fsck_say(f, FSCK_HIGH_MARK, SEGMENT_ROUTING, 0, i ? 5 : 4, mark, bound);
            return 1;
        }
    }
    f->routing = r;
    f->cells = reserve((uint64_t)r->cells * 4);
    return f->cells ? 0 : -ENOMEM;
}

int fsck_add(struct fsck *f, uint32_t kind, uint32_t index, void *base, uint64_t bytes)
{
    int result = -EINVAL;

    if (index >= PORTS_MAX)
        return -EINVAL;
    if (kind == SEGMENT_CONNTABLE)
        result = add_table(f, base, bytes);
    else if (kind == SEGMENT_ARENA)
        result = add_arena(f, index, base, bytes);
    else if (kind == SEGMENT_JOURNAL)
        result = add_journal(f, index, base, bytes);
    else if (kind == SEGMENT_PORT)
        result = add_port(f, index, base, bytes);
    else if (kind == SEGMENT_ROUTING)
        result = add_routing(f, base, bytes);
    if (result == 2) {
        fsck_say(f, FSCK_GEOMETRY, kind, index, 0);
        result = 1;
    }
    if (kind == SEGMENT_ROUTING && result == 0 && f->connmgrs < fsck_load(&f->routing->ports_high))
        f->connmgrs = (uint32_t)fsck_load(&f->routing->ports_high);
    if (f->given <= index)
        f->given = index + 1;
    if (f->connmgrs < f->given)
        f->connmgrs = f->given;
    return result;
}

/* ---- redo logs ---- */

static int pair_fits(uint64_t offset, uint64_t bytes, uint64_t arena_bytes)
{
    uint64_t limit = offset & REDO_ARENA ? arena_bytes : bytes, at = offset & ~REDO_ARENA;

    return at % 8 == 0 && limit >= 8 && at <= limit - 8 && at >= sizeof(struct segment_header);
}

/* Number of words of a log that can be applied; says what is wrong, or that it waits. */
static uint32_t check_log(struct fsck *f, uint32_t kind, uint32_t n, const struct redo_log *log,
                          uint64_t bytes, uint64_t arena_bytes)
{
    uint64_t count = fsck_load(&log->count);

    if (count == 0)
        return 0;
    if (count > REDO_PAIRS_MAX) {
        fsck_say(f, FSCK_REDO_BAD, kind, n, count, UINT64_MAX, 0);
        return 0;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t offset = fsck_load(&log->pairs[i].offset);

        if (!pair_fits(offset, bytes, arena_bytes)) {
            if (f->dead || fsck_load(&log->count) == count)
                fsck_say(f, FSCK_REDO_BAD, kind, n, count, i, offset);
            return 0;
        }
    }
    fsck_say(f, FSCK_REDO_WAITS, kind, n, count, fsck_load(&log->pairs[0].offset),
             fsck_load(&log->pairs[0].value));
    return (uint32_t)count;
}

static uint32_t check_port_log(struct fsck *f, uint32_t n)
{
    const struct port_log *p = f->ports[n];

    return check_log(f, p->header.kind, n, &p->redo, p->header.bytes,
                     f->arenas[n] ? f->arenas[n]->header.bytes : 0);
}

static uint32_t check_routing_log(struct fsck *f)
{
    return check_log(f, SEGMENT_ROUTING, 0, &f->routing->redo, f->routing->header.bytes, 0);
}

uint64_t fsck_finish_steps(struct fsck *f)
{
    uint64_t words = 0;

    for (uint32_t n = 0; n < f->connmgrs; n++)
        if (f->ports[n] && check_port_log(f, n)) {
            struct redo r = {.log = &f->ports[n]->redo, .base = (char *)f->ports[n],
                             .arena = (char *)f->arenas[n]};
            words += redo_recover(&r);
        }
    if (f->routing && check_routing_log(f)) {
        struct redo r = {.log = &f->routing->redo, .base = (char *)f->routing};

        words += redo_recover(&r);
    }
    return words;
}

/* ---- the connection table ---- */

struct uid_slot {
    uint64_t uid, slot;
};

static int by_uid(const void *a, const void *b)
{
    uint64_t x = ((const struct uid_slot *)a)->uid, y = ((const struct uid_slot *)b)->uid;

    return (x > y) - (x < y);
}

/* Says so if a slot that is in use is not as it was assigned (T1, T2). */
static void check_slot(struct fsck *f, uint32_t slot, uint64_t *ret_uid)
{
    const struct conntable_slot *s = &f->table->slots[slot];
    uint32_t state = fsck_load32(&s->state), connmgr = s->connmgr;
    uint64_t uid = fsck_load(&s->uid), next = fsck_load(&f->table->next_uid);

    *ret_uid = 0;
    if (state > CONN_CLOSED) {
        fsck_say(f, FSCK_TABLE_STATE, SEGMENT_CONNTABLE, 0, slot, state);
        return;
    }
    if (state == CONN_FREE || fsck_load32(&s->state) != state)
        return;
    if (uid == 0 || uid >= next)
        fsck_say(f, FSCK_TABLE_UID, SEGMENT_CONNTABLE, 0, slot, uid, 0, 0, next);
    if (connmgr >= f->connmgrs)
        fsck_say(f, FSCK_TABLE_CONNMGR, SEGMENT_CONNTABLE, 0, slot, uid, connmgr);
    *ret_uid = uid;
    f->counts.connections += state != CONN_CLOSED;
}

/* The journal's side of a slot: T3 says that the two change in turns. */
static void check_turn(struct fsck *f, uint32_t slot, uint64_t uid, uint64_t *assigned, uint64_t *closed)
{
    const struct conntable_slot *s = &f->table->slots[slot];
    uint32_t n = s->connmgr, state = fsck_load32(&s->state);
    const struct journal *j = n < PORTS_MAX ? f->journals[n] : NULL;

    if (!j || state == CONN_FREE)
        return;
    uint64_t rec = slot < fsck_load(&j->conns_high)
                       ? fsck_load(&journal_conns((struct journal *)j)[slot].uid) : 0;

    if (state == CONN_ACTIVE && rec != uid && fsck_load32(&s->state) == state)
        fsck_say(f, FSCK_TABLE_ALONE, SEGMENT_CONNTABLE, 0, slot, uid, n);
    *assigned += state == CONN_ASSIGNED && rec != uid;
    *closed += state == CONN_CLOSED;
}

static void check_table(struct fsck *f)
{
    uint64_t high = fsck_load(&f->table->high), used = 0, assigned = 0, closed = 0;
    struct uid_slot *all;

    if (high > f->table->capacity) {
        fsck_say(f, FSCK_HIGH_MARK, SEGMENT_CONNTABLE, 0, 6, high, f->table->capacity);
        return;
    }
    all = reserve(high * sizeof(*all));
    for (uint32_t slot = 0; all && slot < high; slot++) {
        uint64_t uid;

        check_slot(f, slot, &uid);
        if (!uid)
            continue;
        check_turn(f, slot, uid, &assigned, &closed);
        all[used++] = (struct uid_slot){uid, slot};
    }
    if (all)
        qsort(all, used, sizeof(*all), by_uid);
    for (uint64_t i = 1; i < used; i++)
        if (all[i].uid == all[i - 1].uid)
            fsck_say(f, FSCK_UID_TWICE, SEGMENT_CONNTABLE, 0, all[i].uid, all[i - 1].slot, all[i].slot);
    reserve_end(all, high * sizeof(*all));
    if (f->dead && assigned)
        fsck_say(f, FSCK_TABLE_ASSIGNED, SEGMENT_CONNTABLE, 0, 0, 0, 0, 0, assigned);
    if (f->dead && closed)
        fsck_say(f, FSCK_TABLE_CLOSED, SEGMENT_CONNTABLE, 0, 0, 0, 0, 0, closed);
}

uint32_t fsck_free_slots(struct fsck *f)
{
    uint32_t freed = 0;

    if (!f->table || fsck_load(&f->table->high) > f->table->capacity)
        return 0;
    for (uint32_t slot = 0; slot < fsck_load(&f->table->high); slot++) {
        const struct conntable_slot *s = &f->table->slots[slot];
        const struct journal *j = s->connmgr < PORTS_MAX ? f->journals[s->connmgr] : NULL;
        uint32_t state = fsck_load32(&s->state);
        int over = state == CONN_ACTIVE && j &&
                   (slot >= j->conns_high || journal_conns((struct journal *)j)[slot].uid == 0);

        if (state != CONN_CLOSED && !over)
            continue;
        if (s->uid >= fsck_load(&f->table->next_uid)) /* T1, as conntable_reap does it */
            atomic_store(&f->table->next_uid, s->uid + 1);
        conntable_set_state(f->table, slot, CONN_FREE);
        freed++;
    }
    return freed;
}

/* ---- the pass ---- */

int fsck_run(struct fsck *f)
{
    for (uint32_t n = 0; n < f->connmgrs && !f->dead; n++)
        if (f->ports[n])
            (void)check_port_log(f, n);
    if (f->routing && !f->dead)
        (void)check_routing_log(f);
    for (uint32_t n = 0; n < f->connmgrs; n++) {
        if (f->arenas[n])
            fsck_chunks(f, n);
        if (f->journals[n])
            fsck_subs_begin(f, n);
    }
    /* In the direction a message takes: see fsck.h. */
    for (uint32_t n = 0; n < f->connmgrs; n++)
        fsck_refs(f, n);
    for (uint32_t n = 0; n < f->connmgrs; n++)
        fsck_orders(f, n);
    for (uint32_t n = 0; n < f->connmgrs; n++)
        if (f->journals[n])
            fsck_conns(f, n);
    fsck_leaks(f);
    for (uint32_t n = 0; n < f->connmgrs; n++)
        if (f->journals[n])
            fsck_subs(f, n);
    if (f->routing) {
        fsck_sessions(f);
        fsck_modes(f);
    }
    if (f->table)
        check_table(f);
    fsck_words(f);
    return (int)f->count;
}
