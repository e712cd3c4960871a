struct census_filter {
    const char *pattern;
    uint32_t pattern_len;
    uint32_t test_len;
    const char *test;
    uint64_t uid;
};
struct census_sub {
    uint64_t uid;
    uint64_t routed;
    uint64_t max;
    uint32_t connmgr, slot;
    uint32_t subject_len, queue_len;
    char text[...];
};
int census_next(const struct routing *r, uint32_t connmgr, const struct census_filter *filter,
                uint32_t slots, uint32_t *at, struct census_sub *ret_sub);
int census_covers(const char *pattern, uint32_t pattern_len, const char *subject, uint32_t len);
