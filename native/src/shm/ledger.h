/* ledger: one 64-bit atomic word per message says who has let go of it.
 *
 *   limit:6 | generation:26 | relinquished-by:32
 *
 * Created by:   the port that received the message (ledger_init), before anyone else
 *               has seen its handle.
 * Written by:   any port, with ledger_or / ledger_or_redo only.
 * Invariants (`limit` says how many ports the router touched):
 *   L1  While a generation lives, bits are only added, by `ledger_or()` and
 *       `ledger_or_redo()`. Each port adds its own bit; the holder of the order that
 *       carries the limit adds the limit, or who received the message, before it is
 *       committed, if no order is needed (F1). Adding the same again changes nothing.
 *   L2  Whatever the order of these steps, exactly one call sees the word become complete
 *       (as many bits as the limit says). That call has freed the message, and no earlier
 *       one.
 *   L3  A step that may be a repetition compares the generation in the handle with the one
 *       in the word, in the same atomic operation. A word that was given to a new message
 *       is left alone.
 * After a crash: a bit may be set twice without harm. A redo may meet a word that has been
 *               freed and given to a new message: ledger_or_redo compares the generation.
 *               26 bits, because chunks are reused last-freed-first: under load one word can
 *               live hundreds of times in the time a restart takes.
 *
 * A handle names a message: source:6 | generation:26 | entry:32. The generation sits at
 * the same bits in both, so comparing them is one xor and one and.
 */
#ifndef MIDAIR_LEDGER_H
#define MIDAIR_LEDGER_H

#include "base/api.h"
#include "base/limits.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>

#define LEDGER_BITS 0x00000000ffffffffULL
#define LEDGER_GENERATION 0x03ffffff00000000ULL
#define LEDGER_LIMIT_SHIFT 58

API typedef _Atomic uint64_t ledger_word;

API static inline uint64_t handle_make(uint32_t source, uint64_t word, uint32_t entry)
{
    return (uint64_t)source << LEDGER_LIMIT_SHIFT | (word & LEDGER_GENERATION) | entry;
}
API static inline uint32_t handle_source(uint64_t handle) { return (uint32_t)(handle >> LEDGER_LIMIT_SHIFT); }
API static inline uint32_t handle_entry(uint64_t handle) { return (uint32_t)handle; }

API static inline int ledger_complete(uint64_t word)
{
    uint32_t limit = (uint32_t)(word >> LEDGER_LIMIT_SHIFT);
    uint32_t bits = (uint32_t)word;

    if (limit <= 1) /* the common case: one port touched, or the limit not yet known */
        return limit == 1 && bits != 0;
    return (uint32_t)__builtin_popcount(bits) == limit;
}

/* A new message in this entry: next generation, nobody has let go. Returns the word. */
static inline uint64_t ledger_init(ledger_word *word)
{
    uint64_t old = atomic_load_explicit(word, memory_order_relaxed);
    uint64_t fresh = (old + (1ULL << 32)) & LEDGER_GENERATION;

    atomic_store_explicit(word, fresh, memory_order_relaxed);
    return fresh;
}

/* The same in the generation of another word. */
static inline uint64_t ledger_init_as(ledger_word *word, const ledger_word *first)
{
    uint64_t fresh = atomic_load_explicit(first, memory_order_relaxed) & LEDGER_GENERATION;

    atomic_store_explicit(word, fresh, memory_order_relaxed);
    return fresh;
}

API static inline uint64_t ledger_limit(uint32_t limit) { return (uint64_t)limit << LEDGER_LIMIT_SHIFT; }
API static inline uint64_t ledger_bit(uint32_t port) { return 1ULL << port; }

/* Adds bits and/or limit; 1 if this call completed the word. The caller holds the message. */
API static inline int ledger_or(ledger_word *word, uint64_t add)
{
    uint64_t old = atomic_fetch_or_explicit(word, add, memory_order_acq_rel);

    return !ledger_complete(old) && ledger_complete(old | add);
}

/* The same for a caller that received the message itself. If it is also the only one touched, which
 * a limit of 1 says, nobody else writes the word, and an atomic operation would be for nothing. */
static inline int ledger_or_own(ledger_word *word, uint64_t add)
{
    uint64_t old = atomic_load_explicit(word, memory_order_relaxed), all = old | add;

    if (all >> LEDGER_LIMIT_SHIFT != 1)
        return ledger_or(word, add);
    atomic_store_explicit(word, all, memory_order_release);
    return !ledger_complete(old) && ledger_complete(all);
}

/* The same when the step may be a repetition: a word of another generation is left alone. */
static inline int ledger_or_redo(ledger_word *word, uint64_t handle, uint64_t add)
{
    uint64_t old = atomic_load_explicit(word, memory_order_acquire);

    do {
        if ((old ^ handle) & LEDGER_GENERATION)
            return 0;
    } while (!atomic_compare_exchange_weak_explicit(word, &old, old | add, memory_order_acq_rel,
                                                    memory_order_acquire));
    return !ledger_complete(old) && ledger_complete(old | add);
}

#endif
