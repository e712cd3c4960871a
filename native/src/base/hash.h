/* hash: the constant that spreads bits. */
#ifndef MIDAIR_HASH_H
#define MIDAIR_HASH_H

#include <stdint.h>

/* 2^64 divided by the golden ratio, odd: multiplying by it spreads low bits over the high ones. */
#define HASH_SPREAD 0x9e3779b97f4a7c15ULL

static inline uint64_t hash_spread(uint64_t n) { return n * HASH_SPREAD; }

#endif
