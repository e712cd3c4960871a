/* fsck_arena: chunks, chains, entries and words; who refers to each message. See fsck.h.
 *
 * A message is accounted for when something on its way names it: a reference or an order that is
 * not finished, a segment of pending output, a list of recipients that goes on. One that is alive
 * before and after a pass that met it nowhere is leaked: nobody will ever complete its word.
 */
#include "fsck/fsck.h"

static uint32_t state_of(const struct arena *a, uint32_t chunk)
{
    return fsck_load32(&a->chunks[chunk].state);
}

static uint64_t word_of(const struct arena *a, uint64_t entry)
{
    return fsck_load(&arena_words((struct arena *)a)[entry]);
}

static uint64_t messages_of(const struct arena *a, uint32_t chunk)
{
    return fsck_load(&a->chunks[chunk].messages);
}

static uint32_t generation(uint64_t word_or_handle)
{
    return (uint32_t)((word_or_handle & LEDGER_GENERATION) >> 32);
}

static int is_head(uint32_t state) { return state == CHUNK_OPEN || state == CHUNK_CLOSED; }

/* Not arena_idle(): the number of messages may be anything. */
static int idle(const struct arena *a, uint32_t chunk)
{
    uint64_t messages = messages_of(a, chunk);

    for (uint64_t i = 0; i < messages && i < ARENA_CHUNK_MESSAGES; i++)
        if (!ledger_complete(word_of(a, (uint64_t)chunk * ARENA_CHUNK_MESSAGES + i)))
            return 0;
    return 1;
}

/* ---- chains ---- */

static int chain_holds(const struct arena *a, uint32_t head, uint32_t link)
{
    uint32_t next = fsck_load32(&a->chunks[head].next);

    for (uint32_t steps = 0; is_head(state_of(a, head)) && next && steps < a->chunk_count; steps++) {
        if (next > a->chunk_count)
            return 0;
        if (next - 1 == link)
            return 1;
        next = fsck_load32(&a->chunks[next - 1].next);
    }
    return 0;
}

/* Whether both lead to the link at one moment: one of them does before and after the other. */
static int both_hold(const struct fsck *f, const struct arena *a, uint32_t one, uint32_t other, uint32_t link)
{
    if (f->dead)
        return 1;
    uint32_t before = generation(word_of(a, (uint64_t)one * ARENA_CHUNK_MESSAGES));

    return chain_holds(a, one, link) && chain_holds(a, other, link) && chain_holds(a, one, link) &&
           generation(word_of(a, (uint64_t)one * ARENA_CHUNK_MESSAGES)) == before;
}

/* The links of a head. Those of a closed head without live messages may be half taken back. */
static void check_chain(struct fsck *f, uint32_t n, uint32_t head)
{
    const struct arena *a = f->arenas[n];
    uint32_t state = state_of(a, head), next = fsck_load32(&a->chunks[head].next);
    uint64_t born = generation(word_of(a, (uint64_t)head * ARENA_CHUNK_MESSAGES));

    if (!next || (state == CHUNK_CLOSED && idle(a, head)))
        return;
    while (next) {
        uint32_t link = next - 1;

        if (link >= a->chunk_count || state_of(a, link) != CHUNK_CHAIN) {
            fsck_say(f, FSCK_CHAIN_LINK, SEGMENT_ARENA, n, head, link,
                     link < a->chunk_count ? state_of(a, link) : UINT32_MAX, born);
            return;
        }
        if (f->owner[n][link] == head + 1) {
            fsck_say(f, FSCK_CHAIN_CYCLE, SEGMENT_ARENA, n, head, link, born);
            return;
        }
        if (f->owner[n][link]) {
            if (both_hold(f, a, f->owner[n][link] - 1, head, link))
                fsck_say(f, FSCK_CHAIN_SHARED, SEGMENT_ARENA, n, head, link, f->owner[n][link] - 1, born);
            return;
        }
        f->owner[n][link] = head + 1;
        next = fsck_load32(&a->chunks[link].next);
    }
}

static int is_orphan(const struct arena *a, uint32_t chunk)
{
    for (uint32_t head = 0; head < a->chunk_count; head++)
        if (is_head(state_of(a, head)) && chain_holds(a, head, chunk))
            return 0;
    return state_of(a, chunk) == CHUNK_CHAIN;
}

static void check_chains(struct fsck *f, uint32_t n)
{
    const struct arena *a = f->arenas[n];

    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++)
        if (is_head(state_of(a, chunk)))
            check_chain(f, n, chunk);
    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++)
        if (state_of(a, chunk) == CHUNK_CHAIN && !f->owner[n][chunk] && is_orphan(a, chunk))
            fsck_say(f, FSCK_CHAIN_ORPHAN, SEGMENT_ARENA, n, chunk);
}

/* ---- words and entries ---- */

static uint64_t room_behind(const struct arena *a, uint32_t head)
{
    uint64_t room = ARENA_CHUNK_BYTES;
    uint32_t next = fsck_load32(&a->chunks[head].next);

    for (uint32_t steps = 0; next && next <= a->chunk_count && steps < a->chunk_count; steps++) {
        room += ARENA_CHUNK_BYTES;
        next = fsck_load32(&a->chunks[next - 1].next);
    }
    return room;
}

static void check_entry(struct fsck *f, uint32_t n, uint64_t entry, uint64_t handle)
{
    const struct arena *a = f->arenas[n];
    const struct arena_entry *e = &arena_entries((struct arena *)a)[entry];
    uint32_t chunk = (uint32_t)(entry / ARENA_CHUNK_MESSAGES);
    const struct journal *j = f->journals[n];

    if (e->chunk == chunk && (uint64_t)e->subject + e->subject_len <= ARENA_CHUNK_BYTES &&
        (uint64_t)e->subject + e->reply + e->reply_len <= ARENA_CHUNK_BYTES && e->header_len <= e->total_len &&
        (uint64_t)e->body + e->total_len <= room_behind(a, chunk) && (!j || e->conn < j->conns))
        return;
    if (!((word_of(a, entry) ^ handle) & LEDGER_GENERATION))
        fsck_say(f, FSCK_ENTRY, SEGMENT_ARENA, n, handle);
}

/* L1: no more bits than the limit says, and only of connmgrs there are. */
static int word_is_wrong(const struct fsck *f, uint64_t word)
{
    uint32_t limit = (uint32_t)(word >> LEDGER_LIMIT_SHIFT), bits = (uint32_t)word;
    uint64_t known = (1ULL << f->connmgrs) - 1;

    return limit > f->connmgrs || bits & ~known ||
           (limit && (uint32_t)__builtin_popcount(bits) > limit);
}

static void check_word(struct fsck *f, uint32_t n, uint32_t chunk, uint32_t state, uint64_t i, uint64_t messages)
{
    const struct arena *a = f->arenas[n];
    uint64_t entry = (uint64_t)chunk * ARENA_CHUNK_MESSAGES + i, word = word_of(a, entry);
    uint64_t handle = handle_make(n, word, (uint32_t)entry);

    if (word_is_wrong(f, word))
        fsck_say(f, FSCK_WORD, SEGMENT_ARENA, n, handle, word);
    if (ledger_complete(word))
        return;
    if (state == CHUNK_FREE) {
        if (state_of(a, chunk) == CHUNK_FREE && messages_of(a, chunk) == messages)
            fsck_say(f, FSCK_FREE_LIVE, SEGMENT_ARENA, n, chunk, handle);
        return;
    }
    f->counts.messages++;
    f->seen[n][entry] = generation(word) << 2 | 1;
    check_entry(f, n, entry, handle);
}

void fsck_chunks(struct fsck *f, uint32_t n)
{
    const struct arena *a = f->arenas[n];

    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++) {
        uint32_t state = state_of(a, chunk);
        uint64_t messages = messages_of(a, chunk);

        if (state > CHUNK_CHAIN) {
            fsck_say(f, FSCK_CHUNK_STATE, SEGMENT_ARENA, n, chunk, state);
            continue;
        }
        f->counts.chunks += state != CHUNK_FREE;
        if (messages > ARENA_CHUNK_MESSAGES || (state == CHUNK_CHAIN && messages)) {
            if (state_of(a, chunk) == state)
                fsck_say(f, FSCK_CHUNK_MESSAGES, SEGMENT_ARENA, n, chunk, messages, state);
            continue;
        }
        for (uint64_t i = 0; i < messages; i++)
            check_word(f, n, chunk, state, i, messages);
    }
    check_chains(f, n);
}

/* ---- who is met on the way ---- */

int fsck_meet(struct fsck *f, uint64_t handle)
{
    uint32_t n = handle_source(handle);
    const struct arena *a = n < PORTS_MAX ? f->arenas[n] : NULL;
    uint64_t entry = handle_entry(handle);

    if (!a)
        return n < f->connmgrs ? 1 : -1; /* that arena was not taken in: nothing to say */
    if (entry >= (uint64_t)a->chunk_count * ARENA_CHUNK_MESSAGES)
        return -1;
    if (f->seen[n][entry] >> 2 == generation(handle) && f->seen[n][entry] & 1)
        f->seen[n][entry] |= 2;
    uint64_t word = word_of(a, entry);

    return !((word ^ handle) & LEDGER_GENERATION) && !ledger_complete(word);
}

/* Whether every place a message can be in was read. */
static int all_read(const struct fsck *f)
{
    int all = f->routing && !f->counts.unreadable;

    for (uint32_t n = 0; n < f->given; n++)
        all = all && f->ports[n] && (f->arenas[n] || !f->journals[n]);
    return all;
}

void fsck_leaks(struct fsck *f)
{
    uint64_t unknown = 0;
    int all = all_read(f);

    for (uint32_t n = 0; n < f->connmgrs; n++) {
        const struct arena *a = f->arenas[n];

        for (uint32_t chunk = 0; a && chunk < a->chunk_count; chunk++) {
            uint64_t messages = messages_of(a, chunk);

            if (state_of(a, chunk) == CHUNK_FREE || messages > ARENA_CHUNK_MESSAGES)
                continue;
            for (uint64_t i = 0; i < messages; i++) {
                uint64_t entry = (uint64_t)chunk * ARENA_CHUNK_MESSAGES + i, word = word_of(a, entry);

                if (f->seen[n][entry] != (generation(word) << 2 | 1) || ledger_complete(word))
                    continue;
                unknown += !all;
                if (all)
                    fsck_say(f, FSCK_LEAK, SEGMENT_ARENA, n, handle_make(n, word, (uint32_t)entry), 0, 0,
                             0, word, arena_entries((struct arena *)a)[entry].conn);
            }
        }
    }
    if (unknown)
        fsck_say(f, FSCK_UNKNOWN, SEGMENT_ARENA, 0, 0, 0, 0, 0, unknown, f->counts.unreadable);
}

uint32_t fsck_free_leaks(struct fsck *f)
{
    uint32_t freed = 0;

    for (uint32_t i = 0; i < f->count; i++) {
        if (f->found[i].code != FSCK_LEAK)
            continue;
        uint64_t handle = f->found[i].where[0];
        ledger_word *word = &arena_words(f->arenas[f->found[i].index])[handle_entry(handle)];
        uint64_t old = atomic_load(word), bits = old & LEDGER_BITS;

        if (!bits)
            bits = ledger_bit(f->found[i].index);
        atomic_store(word, (old & LEDGER_GENERATION) | bits |
                               ledger_limit((uint32_t)__builtin_popcountll(bits)));
        freed++;
    }
    return freed;
}
