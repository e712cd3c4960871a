/* stats: segments with the counters of a component. Structure, writers, invariants and what a
 * crash leaves are in stats.h. */
#include "observe/stats.h"

#include "connmgr/connmgr.h"
#include "router/router.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(struct connmgr_stats) <= STATS_TOTALS_MAX * 8, "totals fit");
_Static_assert(sizeof(struct router_stats) <= STATS_TOTALS_MAX * 8, "totals fit");
_Static_assert(sizeof(struct connmgr_gauges) <= STATS_GAUGES_MAX * 8, "gauges fit");
_Static_assert(sizeof(struct router_gauges) <= STATS_GAUGES_MAX * 8, "gauges fit");

uint64_t stats_bytes(uint32_t rows)
{
    return sizeof(struct stats) + (uint64_t)rows * sizeof(struct stats_conn);
}

uint64_t stats_fingerprint(void)
{
    static const uint64_t sizes[] = {
        sizeof(struct stats), sizeof(struct stats_conn), sizeof(struct connmgr_stats),
        sizeof(struct connmgr_gauges), sizeof(struct router_stats), sizeof(struct router_gauges),
        sizeof(struct dispatcher_stats), sizeof(struct dispatcher_gauges), CLOSE_REASONS, REFUSALS,
    };
    uint64_t mixed = 0;

    for (uint32_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        mixed = (mixed ^ sizes[i]) * 0x9e3779b97f4a7c15ULL;
    return mixed;
}

void stats_format(struct stats *s, uint32_t rows)
{
    s->rows = rows;
    segment_format(s, SEGMENT_STATS, STATS_LAYOUT, stats_fingerprint(), stats_bytes(rows));
}

void stats_publish(struct stats *s, const void *totals, uint64_t totals_bytes, const void *gauges,
                   uint64_t gauges_bytes)
{
    struct timespec t;

    memcpy(s->totals, totals, totals_bytes);
    memcpy(s->gauges, gauges, gauges_bytes);
    clock_gettime(CLOCK_MONOTONIC, &t);
    s->pid = (uint64_t)getpid();
    s->published_ns = (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

int stats_read_conn(const struct stats *s, uint32_t row, struct stats_conn *ret_row)
{
    const struct stats_conn *from = &s->conns[row];
    uint64_t uid = atomic_load_explicit(&from->uid, memory_order_acquire);

    if (uid == 0)
        return 0;
    memcpy(ret_row, from, sizeof(*ret_row));
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&from->uid, memory_order_relaxed) == uid &&
           atomic_load_explicit(&ret_row->uid, memory_order_relaxed) == uid;
}

void stats_text(char *to, uint32_t room, const char *text, uint32_t len)
{
    if (len >= room) {
        len = room - 1;
        while (len && ((unsigned char)text[len] & 0xc0) == 0x80) /* not within a character */
            len--;
    }
    memcpy(to, text, len);
    memset(to + len, 0, room - len);
}
