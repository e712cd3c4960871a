/* redo: commit and recovery of multi-word steps. See redo.h. */
#include "shm/redo.h"

#include "base/crash.h"

static void apply(const struct redo *r, uint32_t count)
{
    const struct redo_pair *pairs = r->log->pairs;

    for (uint32_t i = 0; i < count; i++) {
        char *base = pairs[i].offset & REDO_ARENA ? r->arena : r->base;

        *(uint64_t *)(base + (pairs[i].offset & ~REDO_ARENA)) = pairs[i].value;
        if (i == count / 2)
            CRASH(REDO_HALF);
    }
}

void redo_commit(struct redo *r)
{
    if (r->count == 0)
        return;
    CRASH(REDO_READY);
    atomic_store_explicit(&r->log->count, r->count, memory_order_release); /* "redo.commit" */
    CRASH(REDO_COMMIT);
    apply(r, r->count);
    CRASH(REDO_APPLIED);
    atomic_store_explicit(&r->log->count, 0, memory_order_release); /* "redo.clear" */
    CRASH(REDO_CLEAR);
    r->count = 0;
}

uint32_t redo_recover(struct redo *r)
{
    uint32_t count = (uint32_t)atomic_load_explicit(&r->log->count, memory_order_acquire);

    apply(r, count);
    atomic_store_explicit(&r->log->count, 0, memory_order_release);
    r->count = 0;
    return count;
}
