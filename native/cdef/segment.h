void segment_format(void *seg, uint32_t kind, uint32_t layout, uint64_t fingerprint, uint64_t bytes);
int segment_check(const void *seg, uint32_t kind, uint32_t layout, uint64_t fingerprint, uint64_t bytes);
void *segment_map(int fd, uint64_t bytes, uint64_t hot);
void *segment_view(int fd, uint64_t bytes);
void segment_unmap(void *seg, uint64_t bytes);
enum segment_kind { SEGMENT_CONNTABLE, SEGMENT_ARENA, SEGMENT_JOURNAL, SEGMENT_ROUTING, SEGMENT_STATS, SEGMENT_TRACE,
    SEGMENT_TRACE_CONTROL, ... };
