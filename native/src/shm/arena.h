/* arena: where message bodies lie, and which of them are still needed.
 *
 * One segment for each port that publishes: each connmgr. A log-structured set of chunks; sockets are received straight
 * into the open chunk, frames stay where they landed. A chunk that is closed and holds no
 * live message is reused, the one freed last first, so that the path stays in the cache.
 *
 *   header | chunk headers | ledger words | entries | chunk data
 *
 * Created by:   whichever port comes first (what is written then is the same). Mapped by all ports that
 *               read bodies, never by the router.
 * Written by:   the owner: everything, except
 *               - ledger words: any port, by the rules of ledger.h;
 *               - `freed` and `maybe_free`: any port adds, the owner clears; both are only
 *                 hints about when to look.
 * Entries are numbered chunk * ARENA_CHUNK_MESSAGES + n.
 * Invariants:
 *   A1  A message lives while its entry is below `messages` of its chunk and its word is
 *       not complete. Completing the word frees it: there is no second step that a crash
 *       could leave out. Entries at or past `messages` belong to a step that did not
 *       commit.
 *   A2  A chunk is not handed out while it is open, while a message in it lives, or while
 *       unparsed bytes of a connection lie in it. A chunk of a chain lives and goes with
 *       its head.
 *   A3  No chunk is lost. `freed` and `maybe_free` only say when to look. A hint that a
 *       crash swallowed is made up for by `arena_sweep()` (256 chunks a second, and all
 *       before the arena counts as full) and by `arena_pool_recover()`.
 *   A4  The chunk freed last is taken first, so that the path stays in the cache.
 *   A5  Entries of a chunk have the same generation as long as it is not taken anew, so the
 *       handles of messages in a row follow each other: that is how a run names them.
 */
#ifndef MIDAIR_ARENA_H
#define MIDAIR_ARENA_H

#include "base/api.h"
#include "shm/ledger.h"
#include "shm/segment.h"

#define ARENA_LAYOUT 4
#define ARENA_SLACK 64u /* bytes behind the last chunk that may be read: short copies go past an end */
#define ARENA_CHUNK_BYTES (128u * 1024)
#define ARENA_CHUNK_MESSAGES 4096u
#define ARENA_CHUNKS_MIN 64u
#define ARENA_CHUNKS_MAX 65536u
#define ARENA_NONE UINT32_MAX

enum chunk_state {
    CHUNK_FREE = 0,
    CHUNK_OPEN = 1,   /* being received into */
    CHUNK_CLOSED = 2, /* full; free when its live bits are gone */
    CHUNK_CHAIN = 3,  /* a continuation of a message larger than a chunk */
};

struct chunk {
    _Atomic uint32_t state; /* owner: enum chunk_state */
    uint32_t next;          /* owner: next chunk of the chain + 1, or 0 */
    uint64_t messages;      /* owner, by redo: entries handed out */
    _Atomic uint64_t freed; /* hint: words that others completed since it was taken */
    uint64_t pad[5];
};
_Static_assert(sizeof(struct chunk) == 64, "one cache line");

struct arena_entry {        /* owner, before the reference leaves; constant while live */
    uint32_t chunk;         /* where the frame lies */
    uint32_t subject;       /* offset in the chunk */
    uint32_t body;          /* offset in the chunk (or its chain) */
    uint32_t total_len;     /* headers and payload */
    uint32_t header_len;
    uint16_t subject_len;
    uint16_t reply_len;
    uint16_t reply;         /* offset from the subject */
    uint8_t usual;          /* 1: its frame can be sent as it lies to who speaks that protocol (FRAME_USUAL) */
    uint8_t protocol;       /* whose frame it is: a number of registry.c */
    uint32_t conn;          /* slot of the sending connection */
    uint64_t received_ns;   /* CLOCK_MONOTONIC */
    uint32_t account;       /* of the sender; 0: the global one */
    uint32_t reserved;
};
_Static_assert(sizeof(struct arena_entry) == 48, "frozen layout");

struct arena {
    struct segment_header header;
    uint32_t owner;                            /* creator, once: number of the port */
    uint32_t chunk_count;                      /* creator, once */
    uint64_t words, entries, data;             /* creator, once: offsets in the segment */
    uint64_t pad[4];
    _Atomic uint64_t maybe_free[ARENA_CHUNKS_MAX / 64]; /* hints for the owner */
    struct chunk chunks[];
};

API static inline ledger_word *arena_words(struct arena *a) { return (ledger_word *)((char *)a + a->words); }
static inline struct arena_entry *arena_entries(struct arena *a)
{
    return (struct arena_entry *)((char *)a + a->entries);
}
static inline uint8_t *arena_data(struct arena *a, uint32_t chunk)
{
    return (uint8_t *)a + a->data + (uint64_t)chunk * ARENA_CHUNK_BYTES;
}

API uint64_t arena_bytes(uint32_t chunk_count);
API uint64_t arena_fingerprint(void);
API void arena_format(struct arena *a, uint32_t owner, uint32_t chunk_count);

/* The owner's derived state. */
API struct arena_pool {
    struct arena *arena;
    uint32_t free_count;
    uint32_t *free;  /* stack of free chunks, chunk_count entries */
    uint32_t *holds; /* per chunk: connections with unparsed bytes in it */
    uint32_t *freed; /* per chunk: words the owner completed since it was taken */
    uint32_t swept;  /* where arena_sweep goes on */
};

/* Allocates the derived state (at start only) and rebuilds nothing yet. -ENOMEM. */
API int arena_pool_open(struct arena_pool *p, struct arena *a);
API void arena_pool_close(struct arena_pool *p);

/* Rebuilds the stack from chunk states and words. `holds` must be counted already. Returns
 * how many chunks are in use. */
API uint32_t arena_pool_recover(struct arena_pool *p);
/* Looks at `count` chunks, going round: finds the free ones nobody gave a hint about. */
API void arena_sweep(struct arena_pool *p, uint32_t count);

/* A connection's unparsed bytes begin, or cease, to lie in the chunk. */
API static inline void arena_hold(struct arena_pool *p, uint32_t chunk) { p->holds[chunk]++; }
API void arena_unhold(struct arena_pool *p, uint32_t chunk);

/* Takes a free chunk and opens it; ARENA_NONE when there is none. */
API uint32_t arena_take(struct arena_pool *p);
/* Takes a chunk as the continuation of `last`; the caller made sure there is one. */
API uint32_t arena_extend(struct arena_pool *p, uint32_t last);
/* How many chunks could be taken now (collects hints first). */
API uint32_t arena_available(struct arena_pool *p);
/* The chunk will get no more entries; frees it at once if nothing in it lives. */
API void arena_close(struct arena_pool *p, uint32_t chunk);
/* Whether no message in the chunk lives. */
int arena_idle(const struct arena *a, uint32_t chunk);

/* A new message, the n-th of a chunk in an arena the caller owns: its handle. The first (0) comes before
 * the others, and makes their generation. */
API static inline uint64_t arena_begin(struct arena *a, uint32_t chunk, uint32_t n)
{
    uint32_t first = chunk * ARENA_CHUNK_MESSAGES;
    ledger_word *words = &arena_words(a)[first];

    return handle_make(a->owner, n ? ledger_init_as(&words[n], words) : ledger_init(words), first + n);
}

/* Adds bits or limit to the word of a message; 1 if that freed it. `redo`: the step may be a
 * repetition, so the generation is compared. `pool` is NULL unless the caller is the owner. */
API int arena_relinquish(struct arena *a, struct arena_pool *pool, uint64_t handle, uint64_t add, int redo);

/* The word of `messages` that a step commits. */
API static inline uint64_t *arena_messages(struct arena *a, uint32_t chunk)
{
    return &a->chunks[chunk].messages;
}

/* Messages alive and chunks not free: for status and tests. */
API void arena_census(const struct arena *a, uint64_t *ret_live, uint64_t *ret_busy_chunks);

#endif
