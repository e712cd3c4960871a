/* stats: segments with the counters of a component. Structure, writers, invariants and what a
 * crash leaves are in stats.h. */
#include "observe/stats.h"

#include "connmgr/connmgr.h"
#include "router/router.h"
#include "base/clock.h"

#include <string.h>
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
    return SEGMENT_FINGERPRINT(sizeof(struct stats), sizeof(struct stats_conn), sizeof(struct connmgr_stats),
                               sizeof(struct connmgr_gauges), sizeof(struct router_stats), sizeof(struct router_gauges),
                               sizeof(struct dispatcher_stats), sizeof(struct dispatcher_gauges), CLOSE_REASONS, REFUSALS);
}

void stats_format(struct stats *s, uint32_t rows)
{
    s->rows = rows;
    segment_format(s, SEGMENT_STATS, STATS_LAYOUT, stats_fingerprint(), stats_bytes(rows));
}

void stats_take_rows(struct stats *s, const struct stats *from)
{
    uint64_t high = from->high < s->rows ? from->high : s->rows;

    if (high > from->rows)
        high = from->rows;
    memcpy(s->conns, from->conns, high * sizeof(struct stats_conn));
    s->high = high;
}

void stats_publish(struct stats *s, const void *totals, uint64_t totals_bytes, const void *gauges,
                   uint64_t gauges_bytes)
{
    memcpy(s->totals, totals, totals_bytes);
    memcpy(s->gauges, gauges, gauges_bytes);
    s->pid = (uint64_t)getpid();
    s->published_ns = clock_ns();
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
