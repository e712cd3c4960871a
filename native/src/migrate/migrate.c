/* migrate: the table of converters, and what they share. See migrate.h. */
#include "migrate/migrate.h"

#include "connmgr/journal.h"
#include "migrate/converter.h"
#include "migrate/release_0_1.h"
#include "router/routing.h"
#include "shm/arena.h"
#include "shm/conntable.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* One row for each kind and layout that can be converted. A kind that is not here is never
 * converted: statistics are made anew, traces have not changed. */
static const struct converter *const table[] = {&conntable_from_2, &arena_from_3, &journal_from_2, &routing_from_3};
#define ROWS (sizeof table / sizeof table[0])

static const struct {
    uint32_t kind, layout;
    uint64_t (*fingerprint)(void);
} today[] = {
    {SEGMENT_CONNTABLE, CONNTABLE_LAYOUT, conntable_fingerprint},
    {SEGMENT_ARENA, ARENA_LAYOUT, arena_fingerprint},
    {SEGMENT_JOURNAL, JOURNAL_LAYOUT, journal_fingerprint},
    {SEGMENT_ROUTING, ROUTING_LAYOUT, routing_fingerprint},
};

int segment_age(uint32_t kind, uint32_t layout, uint64_t fingerprint)
{
    for (size_t i = 0; i < sizeof today / sizeof today[0]; i++)
        if (today[i].kind == kind && today[i].layout == layout && today[i].fingerprint() == fingerprint)
            return SEGMENT_CURRENT;
    for (size_t i = 0; i < ROWS; i++)
        if (table[i]->kind == kind && table[i]->layout == layout && table[i]->fingerprint() == fingerprint)
            return SEGMENT_CONVERTIBLE;
    return SEGMENT_FOREIGN;
}

/* Every layout of every kind has the same header. */
static const struct converter *find(const void *from, uint64_t from_bytes)
{
    const struct segment_header *h = from;

    if (from_bytes < sizeof(*h) || h->magic != SEGMENT_MAGIC || h->bytes != from_bytes)
        return NULL;
    for (size_t i = 0; i < ROWS; i++)
        if (table[i]->kind == h->kind && table[i]->layout == h->layout && table[i]->fingerprint() == h->fingerprint)
            return table[i];
    return NULL;
}

int64_t segment_migrated_bytes(const void *from, uint64_t from_bytes)
{
    const struct converter *row = find(from, from_bytes);
    uint64_t bytes = row ? row->bytes(from, from_bytes) : 0;

    return bytes ? (int64_t)bytes : -EPROTO;
}

int segment_finish(void *from, uint64_t from_bytes, void *other, uint64_t other_bytes)
{
    const struct converter *row = find(from, from_bytes);

    if (!row || !row->bytes(from, from_bytes))
        return -EPROTO;
    return row->finish ? row->finish(from, from_bytes, other, other_bytes) : 0;
}

int segment_migrate(const void *from, uint64_t from_bytes, int from_fd, void *to)
{
    const struct converter *row = find(from, from_bytes);
    struct conversion c = {.from = from, .from_bytes = from_bytes, .from_fd = from_fd, .to = to};

    if (!row || !row->bytes(from, from_bytes))
        return -EPROTO;
    ((struct segment_header *)to)->migrated_from = row->layout;
    return row->convert(&c);
}

int conversion_data(const struct conversion *c, uint64_t *at, uint64_t end, uint64_t *ret_stop)
{
    off_t data = lseek(c->from_fd, (off_t)*at, SEEK_DATA), hole;

    if (data < 0 && errno != ENXIO) { /* a file system that does not know: all of it */
        *ret_stop = end;
        return *at < end;
    }
    if (data < 0 || (uint64_t)data >= end)
        return 0;
    hole = lseek(c->from_fd, data, SEEK_HOLE);
    if ((uint64_t)data > *at)
        *at = (uint64_t)data;
    *ret_stop = hole < 0 || (uint64_t)hole > end ? end : (uint64_t)hole;
    return 1;
}

void conversion_copy(const struct conversion *c, uint64_t from, uint64_t to, uint64_t bytes)
{
    uint64_t at = from, stop;

    for (; conversion_data(c, &at, from + bytes, &stop); at = stop)
        memcpy(c->to + to + (at - from), c->from + at, stop - at);
}

int r01_redo_finish(struct r01_redo_log *log, void *base, uint64_t base_bytes, void *arena, uint64_t arena_bytes)
{
    if (log->count > R01_REDO_PAIRS)
        return -EPROTO;
    for (uint64_t i = 0; i < log->count; i++) { /* all of them are possible before any is stored */
        uint64_t at = log->pairs[i].offset & ~R01_REDO_ARENA;
        uint64_t bytes = log->pairs[i].offset & R01_REDO_ARENA ? arena_bytes : base_bytes;

        if (at % 8 || at + 8 > bytes || ((log->pairs[i].offset & R01_REDO_ARENA) && !arena))
            return -EPROTO;
    }
    for (uint64_t i = 0; i < log->count; i++) {
        char *in = log->pairs[i].offset & R01_REDO_ARENA ? arena : base;

        *(uint64_t *)(in + (log->pairs[i].offset & ~R01_REDO_ARENA)) = log->pairs[i].value;
    }
    __atomic_store_n(&log->count, 0, __ATOMIC_RELEASE);
    return 0;
}
