/* arena: chunks, entries and their release. See arena.h for who writes what. */
#include "shm/arena.h"

#include "base/crash.h"

#include <stdlib.h>

static uint64_t words_offset(uint32_t chunks)
{
    return page_up(sizeof(struct arena) + (uint64_t)chunks * sizeof(struct chunk));
}
static uint64_t entries_offset(uint32_t chunks)
{
    return page_up(words_offset(chunks) + (uint64_t)chunks * ARENA_CHUNK_MESSAGES * 8);
}
static uint64_t data_offset(uint32_t chunks)
{
    return page_up(entries_offset(chunks) +
                    (uint64_t)chunks * ARENA_CHUNK_MESSAGES * sizeof(struct arena_entry));
}

uint64_t arena_bytes(uint32_t chunk_count)
{
    return data_offset(chunk_count) + (uint64_t)chunk_count * ARENA_CHUNK_BYTES + ARENA_SLACK;
}

uint64_t arena_fingerprint(void)
{
    return SEGMENT_FINGERPRINT(sizeof(struct arena), sizeof(struct chunk), sizeof(struct arena_entry), ARENA_CHUNK_BYTES);
}

void arena_format(struct arena *a, uint32_t owner, uint32_t chunk_count)
{
    a->owner = owner;
    a->chunk_count = chunk_count;
    a->words = words_offset(chunk_count);
    a->entries = entries_offset(chunk_count);
    a->data = data_offset(chunk_count);
    segment_format(a, SEGMENT_ARENA, ARENA_LAYOUT, arena_fingerprint(), arena_bytes(chunk_count));
}

int arena_idle(const struct arena *a, uint32_t chunk)
{
    const ledger_word *words = arena_words((struct arena *)a) + (uint64_t)chunk * ARENA_CHUNK_MESSAGES;

    for (uint64_t i = a->chunks[chunk].messages; i-- > 0;) /* the newest lives longest */
        if (!ledger_complete(atomic_load_explicit(&words[i], memory_order_acquire)))
            return 0;
    return 1;
}

static uint32_t chunk_state(const struct arena *a, uint32_t chunk)
{
    return atomic_load(&a->chunks[chunk].state);
}

/* A closed chunk without live messages goes back on the stack, its chain first. */
static void reclaim(struct arena_pool *p, uint32_t chunk)
{
    struct arena *a = p->arena;
    uint32_t next = a->chunks[chunk].next;

    while (next) {
        uint32_t link = next - 1;

        next = a->chunks[link].next;
        a->chunks[link].next = 0;
        atomic_store(&a->chunks[link].state, CHUNK_FREE);
        p->free[p->free_count++] = link;
    }
    a->chunks[chunk].next = 0;
    atomic_store(&a->chunks[chunk].state, CHUNK_FREE);
    p->free[p->free_count++] = chunk;
}

static void reclaim_if_idle(struct arena_pool *p, uint32_t chunk)
{
    if (p->holds[chunk] == 0 && chunk_state(p->arena, chunk) == CHUNK_CLOSED &&
        arena_idle(p->arena, chunk))
        reclaim(p, chunk);
}

void arena_unhold(struct arena_pool *p, uint32_t chunk)
{
    if (--p->holds[chunk] == 0)
        reclaim_if_idle(p, chunk);
}

int arena_pool_open(struct arena_pool *p, struct arena *a)
{
    p->arena = a;
    p->free_count = 0;
    p->free = calloc(a->chunk_count, sizeof(uint32_t));
    p->holds = calloc(a->chunk_count, sizeof(uint32_t));
    p->freed = calloc(a->chunk_count, sizeof(uint32_t));
    return p->free && p->holds && p->freed ? 0 : -ENOMEM;
}

void arena_pool_close(struct arena_pool *p)
{
    free(p->free);
    free(p->holds);
    free(p->freed);
}

/* Looks at the chunks other connmgrs believe to be free. */
static void collect(struct arena_pool *p)
{
    struct arena *a = p->arena;
    uint32_t words = (a->chunk_count + 63) / 64;

    for (uint32_t i = 0; i < words; i++) {
        if (!atomic_load_explicit(&a->maybe_free[i], memory_order_relaxed))
            continue;
        uint64_t bits = atomic_exchange(&a->maybe_free[i], 0);
        while (bits) {
            uint32_t chunk = i * 64 + (uint32_t)__builtin_ctzll(bits);

            bits &= bits - 1;
            reclaim_if_idle(p, chunk);
        }
    }
}

uint32_t arena_take(struct arena_pool *p)
{
    struct arena *a = p->arena;

    if (p->free_count == 0)
        collect(p);
    if (p->free_count == 0)
        arena_sweep(p, a->chunk_count);
    if (p->free_count == 0)
        return ARENA_NONE;
    uint32_t chunk = p->free[--p->free_count];
    a->chunks[chunk].messages = 0;
    a->chunks[chunk].next = 0;
    atomic_store(&a->chunks[chunk].freed, 0);
    p->freed[chunk] = 0;
    atomic_store(&a->chunks[chunk].state, CHUNK_OPEN); /* "arena.taken" */
    CRASH(ARENA_TAKEN);
    return chunk;
}

uint32_t arena_extend(struct arena_pool *p, uint32_t last)
{
    struct arena *a = p->arena;
    uint32_t link = arena_take(p);

    atomic_store(&a->chunks[link].state, CHUNK_CHAIN);
    a->chunks[last].next = link + 1;
    return link;
}

uint32_t arena_available(struct arena_pool *p)
{
    collect(p);
    return p->free_count;
}

void arena_close(struct arena_pool *p, uint32_t chunk)
{
    atomic_store(&p->arena->chunks[chunk].state, CHUNK_CLOSED); /* "arena.closed" */
    CRASH(ARENA_CLOSED);
    reclaim_if_idle(p, chunk);
}

/* A word of the chunk was completed. The state is read after the count is raised, and
 * arena_close reads the count after it has stored the state: one of the two looks. The owner
 * counts what it frees by itself; the others count together, and tell it when a chunk that may be
 * free by now is closed. */
static void hint(struct arena *a, struct arena_pool *pool, uint32_t chunk)
{
    struct chunk *c = &a->chunks[chunk];
    uint64_t bit = 1ULL << (chunk % 64);

    if (pool) {
        uint64_t freed = ++pool->freed[chunk] + atomic_load_explicit(&c->freed, memory_order_relaxed);

        if (freed >= c->messages && chunk_state(a, chunk) == CHUNK_CLOSED)
            reclaim_if_idle(pool, chunk);
        return;
    }
    atomic_fetch_add(&c->freed, 1);
    if (chunk_state(a, chunk) == CHUNK_CLOSED && !(atomic_load(&a->maybe_free[chunk / 64]) & bit))
        atomic_fetch_or(&a->maybe_free[chunk / 64], bit);
}

int arena_relinquish(struct arena *a, struct arena_pool *pool, uint64_t handle, uint64_t add, int redo)
{
    ledger_word *word = &arena_words(a)[handle_entry(handle)];
    int mine = redo ? ledger_or_redo(word, handle, add) : pool ? ledger_or_own(word, add) : ledger_or(word, add);

    if (!mine)
        return 0;
    CRASH(LEDGER_COMPLETE);
    hint(a, pool, handle_entry(handle) / ARENA_CHUNK_MESSAGES);
    return 1;
}

void arena_sweep(struct arena_pool *p, uint32_t count)
{
    struct arena *a = p->arena;

    while (count--) {
        p->swept = p->swept + 1 < a->chunk_count ? p->swept + 1 : 0;
        reclaim_if_idle(p, p->swept);
    }
}

/* Messages of the chunk that are complete. The owner stores this in `freed`, where other ports add what
 * they free meanwhile. A count that is too high makes the owner look at the chunk too early, which is
 * harmless; one that is too low would leave a free chunk unfound until the next sweep. */
static uint32_t completed(const struct arena *a, uint32_t chunk)
{
    const ledger_word *words = arena_words((struct arena *)a) + (uint64_t)chunk * ARENA_CHUNK_MESSAGES;
    uint32_t count = 0;

    for (uint64_t i = 0; i < a->chunks[chunk].messages; i++)
        count += (uint32_t)ledger_complete(atomic_load_explicit(&words[i], memory_order_acquire));
    return count;
}

uint32_t arena_pool_recover(struct arena_pool *p)
{
    struct arena *a = p->arena;

    p->free_count = 0;
    /* Heads first: a chain link is free exactly when no busy head leads to it. */
    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++) {
        uint32_t state = chunk_state(a, chunk);

        if ((state == CHUNK_OPEN || state == CHUNK_CLOSED) &&
            (!arena_idle(a, chunk) || p->holds[chunk])) {
            atomic_store(&a->chunks[chunk].state, CHUNK_CLOSED);
            p->freed[chunk] = completed(a, chunk);
            continue;
        }
        if (state != CHUNK_CHAIN) {
            a->chunks[chunk].next = 0;
            atomic_store(&a->chunks[chunk].state, CHUNK_FREE);
        }
    }
    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++)
        if (chunk_state(a, chunk) == CHUNK_CHAIN)
            atomic_store(&a->chunks[chunk].state, CHUNK_FREE);
    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++)
        if (chunk_state(a, chunk) == CHUNK_CLOSED)
            for (uint32_t next = a->chunks[chunk].next; next; next = a->chunks[next - 1].next)
                atomic_store(&a->chunks[next - 1].state, CHUNK_CHAIN);
    for (uint32_t chunk = a->chunk_count; chunk-- > 0;)
        if (chunk_state(a, chunk) == CHUNK_FREE) {
            a->chunks[chunk].next = 0; /* a link of what is no chain any more has one */
            p->free[p->free_count++] = chunk;
        }
    return a->chunk_count - p->free_count;
}

void arena_census(const struct arena *a, uint64_t *ret_live, uint64_t *ret_busy_chunks)
{
    uint64_t live = 0, busy = 0;

    for (uint32_t chunk = 0; chunk < a->chunk_count; chunk++) {
        if (chunk_state(a, chunk) == CHUNK_FREE)
            continue;
        busy++;
        for (uint64_t i = 0; chunk_state(a, chunk) != CHUNK_CHAIN && i < a->chunks[chunk].messages; i++)
            live += !ledger_complete(atomic_load(
                &arena_words((struct arena *)a)[(uint64_t)chunk * ARENA_CHUNK_MESSAGES + i]));
    }
    *ret_live = live;
    *ret_busy_chunks = busy;
}
