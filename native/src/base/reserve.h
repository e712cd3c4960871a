/* reserve: zeroed private memory that costs nothing until it is touched. */
#ifndef MIDAIR_RESERVE_H
#define MIDAIR_RESERVE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

/* NULL: none. */
static inline void *reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

static inline void reserve_end(void *p, uint64_t bytes)
{
    if (p)
        munmap(p, bytes ? bytes : 1);
}

#endif
