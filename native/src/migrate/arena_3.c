/* arena_3: an arena of release 0.1 becomes one of today's. See migrate.h.
 *
 * Words are kept for all chunks, also the free ones: the next message of an entry gets the generation
 * after the one that is there, and a handle of an earlier one must not fit it (L3). Entries and data
 * are kept of the chunks that are in use.
 */
#include "migrate/converter.h"
#include "migrate/release_0_1.h"
#include "shm/arena.h"

#include <errno.h>

_Static_assert(R01_CHUNK_BYTES == ARENA_CHUNK_BYTES && R01_CHUNK_MESSAGES == ARENA_CHUNK_MESSAGES &&
               R01_CHUNKS_MAX == ARENA_CHUNKS_MAX && R01_CHUNK_FREE == CHUNK_FREE && R01_CHUNK_CHAIN == CHUNK_CHAIN,
               "chunks are what they were: entries have the same numbers");

static uint64_t fingerprint(void)
{
    return sizeof(struct r01_arena) ^ sizeof(struct r01_chunk) << 16 ^ sizeof(struct r01_entry) << 32 ^
           (uint64_t)R01_CHUNK_BYTES << 40;
}

static uint64_t bytes(const void *from, uint64_t from_bytes)
{
    const struct r01_arena *a = from;
    uint64_t n = a->chunk_count;

    if (n > R01_CHUNKS_MAX || a->owner >= R01_CONNMGRS || a->words != r01_page_up(sizeof(*a) + n * sizeof(struct r01_chunk)) ||
        a->entries != r01_page_up(a->words + n * R01_CHUNK_MESSAGES * 8) ||
        a->data != r01_page_up(a->entries + n * R01_CHUNK_MESSAGES * sizeof(struct r01_entry)) ||
        from_bytes != a->data + n * R01_CHUNK_BYTES + R01_ARENA_SLACK)
        return 0;
    return arena_bytes((uint32_t)n);
}

static void convert_entries(const struct r01_entry *from, struct arena_entry *to, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        to[i] = (struct arena_entry){
            .chunk = from[i].chunk,
            .subject = from[i].subject,
            .body = from[i].body,
            .total_len = from[i].total_len,
            .header_len = from[i].header_len,
            .subject_len = from[i].subject_len,
            .reply_len = from[i].reply_len,
            .reply = from[i].reply,
            .usual = from[i].usual,
            .conn = from[i].conn,
            .received_ns = from[i].received_ns,
        };
}

static int convert(const struct conversion *c)
{
    const struct r01_arena *from = (const void *)c->from;
    const struct r01_entry *entries = (const void *)(c->from + from->entries);
    struct arena *to = (void *)c->to;

    arena_format(to, from->owner, from->chunk_count);
    atomic_store(&to->header.magic, 0); /* last, below: it was needed for the offsets */
    for (uint32_t i = 0; i < R01_CHUNKS_MAX / 64; i++)
        to->maybe_free[i] = from->maybe_free[i];
    conversion_copy(c, from->words, to->words, (uint64_t)from->chunk_count * R01_CHUNK_MESSAGES * 8);
    for (uint32_t i = 0; i < from->chunk_count; i++) {
        const struct r01_chunk *f = &from->chunks[i];
        uint64_t first = (uint64_t)i * R01_CHUNK_MESSAGES;

        if (f->messages > R01_CHUNK_MESSAGES || f->next > from->chunk_count)
            return -EPROTO;
        to->chunks[i].state = f->state;
        to->chunks[i].next = f->next;
        to->chunks[i].messages = f->messages;
        to->chunks[i].freed = f->freed;
        if (f->state == R01_CHUNK_FREE)
            continue;
        if (f->state != R01_CHUNK_CHAIN)
            convert_entries(&entries[first], &arena_entries(to)[first], f->messages);
        conversion_copy(c, from->data + (uint64_t)i * R01_CHUNK_BYTES,
                        to->data + (uint64_t)i * ARENA_CHUNK_BYTES, R01_CHUNK_BYTES);
    }
    arena_format(to, from->owner, from->chunk_count);
    return 0;
}

const struct converter arena_from_3 = {
    .kind = SEGMENT_ARENA,
    .layout = R01_ARENA_LAYOUT,
    .fingerprint = fingerprint,
    .bytes = bytes,
    .convert = convert,
};
