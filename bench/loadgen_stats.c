/*
 * Clocks, the CPU time of other processes, and the latency histogram.
 *
 * A histogram is created by a mode, written by it alone, and only grows.
 * Invariants: `count` is the sum of the buckets, `max` is exact, a quantile is off by at most half a
 * bucket (1/256 of its value). A crash leaves nothing.
 *
 * CPU time comes from the kernel's per-process CPU clock, which clock_getcpuclockid(3) opens for any
 * pid: it is in nanoseconds, covers all threads, and keeps the time of threads that have ended.
 * /proc/PID/schedstat would cover the first thread only, /proc/PID/stat counts in hundredths.
 */
#include <string.h>

#include "loadgen.h"

static uint64_t clock_read(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t clock_ns(void)
{
    return clock_read(CLOCK_MONOTONIC);
}

void cpu_meter_init(struct cpu_meter *meter, const struct options *opt)
{
    memset(meter, 0, sizeof *meter);
    meter->count = opt->pid_count;
    for (uint32_t i = 0; i < opt->pid_count; i++)
        if (clock_getcpuclockid(opt->pids[i], &meter->clocks[i]) != 0)
            fail(EXIT_USAGE, "--server-pids: there is no process %d", opt->pids[i]);
}

/* A process that ended takes its CPU time along: then there is no sum to give. */
static bool cpu_sum(const struct cpu_meter *meter, uint64_t *ret_ns)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < meter->count; i++) {
        struct timespec spent;
        if (clock_gettime(meter->clocks[i], &spent) < 0)
            return false;
        sum += (uint64_t)spent.tv_sec * 1000000000u + (uint64_t)spent.tv_nsec;
    }
    *ret_ns = sum;
    return meter->count > 0;
}

void cpu_meter_start(struct cpu_meter *meter)
{
    meter->known = cpu_sum(meter, &meter->server_ns);
    meter->own_ns = clock_read(CLOCK_PROCESS_CPUTIME_ID);
}

void cpu_meter_stop(struct cpu_meter *meter)
{
    uint64_t now;
    meter->own_ns = clock_read(CLOCK_PROCESS_CPUTIME_ID) - meter->own_ns;
    meter->known = meter->known && cpu_sum(meter, &now);
    if (meter->known)
        meter->server_ns = now - meter->server_ns;
}

/* Values below 2 * HISTOGRAM_SUB have a bucket each; above, every power of two has HISTOGRAM_SUB. */
static uint32_t bucket_of(uint64_t value)
{
    if (value < 2 * HISTOGRAM_SUB)
        return (uint32_t)value;
    uint32_t shift = 63u - (uint32_t)__builtin_clzll(value) - 7u;
    uint32_t bucket = shift * HISTOGRAM_SUB + (uint32_t)(value >> shift);
    return bucket < HISTOGRAM_BUCKETS ? bucket : HISTOGRAM_BUCKETS - 1;
}

static uint64_t bucket_middle(uint32_t bucket)
{
    if (bucket < 2 * HISTOGRAM_SUB)
        return bucket;
    uint32_t shift = bucket / HISTOGRAM_SUB - 1;
    uint64_t low = (uint64_t)(bucket - shift * HISTOGRAM_SUB) << shift;
    return low + ((uint64_t)1 << shift) / 2;
}

void histogram_add(struct histogram *h, uint64_t value)
{
    h->count++;
    h->sum += value;
    if (value > h->max)
        h->max = value;
    h->buckets[bucket_of(value)]++;
}

uint64_t histogram_quantile(const struct histogram *h, double quantile)
{
    uint64_t rank = (uint64_t)(quantile * (double)h->count), seen = 0;
    if (rank >= h->count)
        return h->max;
    for (uint32_t i = 0; i < HISTOGRAM_BUCKETS; i++) {
        seen += h->buckets[i];
        if (seen > rank) {
            uint64_t middle = bucket_middle(i);
            return middle < h->max ? middle : h->max;
        }
    }
    return h->max;
}
