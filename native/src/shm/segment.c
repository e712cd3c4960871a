/* segment: headers of shared segments and their mapping. See segment.h. */
#include "shm/segment.h"

#include "base/hash.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels answer EINVAL and mlock faults in */
#endif

uint64_t segment_fingerprint(const uint64_t *sizes, uint32_t count)
{
    uint64_t mixed = 0;

    for (uint32_t i = 0; i < count; i++)
        mixed = hash_spread(mixed ^ sizes[i]);
    return mixed;
}

void segment_format(void *seg, uint32_t kind, uint32_t layout, uint64_t fingerprint, uint64_t bytes)
{
    struct segment_header *h = seg;

    h->kind = kind;
    h->layout = layout;
    h->fingerprint = fingerprint;
    h->bytes = bytes;
    strncpy(h->release, MIDAIR_RELEASE, sizeof h->release - 1);
    atomic_store_explicit(&h->magic, SEGMENT_MAGIC, memory_order_release);
}

int segment_check(const void *seg, uint32_t kind, uint32_t layout, uint64_t fingerprint, uint64_t bytes)
{
    const struct segment_header *h = seg;
    uint64_t magic = atomic_load_explicit(&h->magic, memory_order_acquire);

    if (magic == 0)
        return -ENODATA;
    if (magic != SEGMENT_MAGIC || h->kind != kind || h->layout != layout ||
        h->fingerprint != fingerprint || h->bytes != bytes)
        return -EPROTO;
    return 0;
}

void *segment_map(int fd, uint64_t bytes, uint64_t hot)
{
    void *seg = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (seg == MAP_FAILED)
        return NULL;
    if (hot && madvise(seg, hot, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
        munmap(seg, bytes);
        return NULL;
    }
    if (hot)
        (void)mlock(seg, hot); /* best effort: an ordinary user may lock 8 MiB */
    return seg;
}

void *segment_view(int fd, uint64_t bytes)
{
    void *seg = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    return seg == MAP_FAILED ? NULL : seg;
}

void segment_unmap(void *seg, uint64_t bytes)
{
    munmap(seg, bytes);
}
