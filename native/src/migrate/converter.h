/* converter: what the converters of migrate.c are made of. See migrate.h. */
#ifndef MIDAIR_CONVERTER_H
#define MIDAIR_CONVERTER_H

#include <stddef.h>
#include <stdint.h>

struct conversion { /* private to the process, for one call */
    const uint8_t *from;
    uint64_t from_bytes;
    int from_fd;
    uint8_t *to;
};

struct converter { /* one row of the table */
    uint32_t kind, layout;
    uint64_t (*fingerprint)(void);
    /* Size of the successor; 0: the header's capacities and offsets contradict each other. */
    uint64_t (*bytes)(const void *from, uint64_t from_bytes);
    /* As segment_finish(); NULL: nothing can be unfinished. */
    int (*finish)(void *from, uint64_t from_bytes, void *other, uint64_t other_bytes);
    /* 0, or -EPROTO. Formats `to`, its header last. */
    int (*convert)(const struct conversion *c);
};
extern const struct converter conntable_from_2, arena_from_3, journal_from_2, routing_from_3;

/* The next piece of [*at, end) of `from` that is not a hole: *at is moved to its first byte, *ret_stop
 * is behind its last. 0: there is none. */
int conversion_data(const struct conversion *c, uint64_t *at, uint64_t end, uint64_t *ret_stop);
/* Copies [from, from + bytes) to offset `to` of the new segment, but for its holes. */
void conversion_copy(const struct conversion *c, uint64_t from, uint64_t to, uint64_t bytes);

#endif
