/* clock: the time of this machine that only grows, in nanoseconds. All processes see the same. */
#ifndef MIDAIR_CLOCK_H
#define MIDAIR_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

#endif
