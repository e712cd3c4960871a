/* conntable_2: the connection table of release 0.1 becomes one of today's. See migrate.h. */
#include "migrate/converter.h"
#include "migrate/release_0_1.h"
#include "shm/conntable.h"

#include <errno.h>
#include <string.h>

static uint64_t fingerprint(void)
{
    return (uint64_t)sizeof(struct r01_conntable) << 32 | sizeof(struct r01_slot) << 8 | 3;
}

static uint64_t bytes(const void *from, uint64_t from_bytes)
{
    const struct r01_conntable *t = from;

    if (from_bytes != sizeof(*t) + (uint64_t)t->capacity * sizeof(struct r01_slot) || t->high > t->capacity)
        return 0;
    return conntable_bytes(t->capacity);
}

static int convert(const struct conversion *c)
{
    const struct r01_conntable *from = (const void *)c->from;
    struct conntable *to = (void *)c->to;

    to->next_uid = from->next_uid;
    to->high = from->high;
    for (uint64_t i = 0; i < from->high; i++) {
        const struct r01_slot *f = &from->slots[i];
        struct conntable_slot *t = &to->slots[i];

        t->state = f->state;
        t->connmgr = f->connmgr;
        t->uid = f->uid;
        t->accepted_ns = f->accepted_ns;
        t->listener = f->listener;
        t->port = f->port;
        memcpy(t->ip, f->ip, sizeof f->ip);
        t->cookie = f->cookie;
        t->crowded = f->crowded;
    }
    conntable_format(to, from->capacity);
    return 0;
}

const struct converter conntable_from_2 = {
    .kind = SEGMENT_CONNTABLE,
    .layout = R01_CONNTABLE_LAYOUT,
    .fingerprint = fingerprint,
    .bytes = bytes,
    .convert = convert,
};
