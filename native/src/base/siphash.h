/* siphash: SipHash-2-4 of one word. Who does not know the key cannot tell its value for one word from
 * those for others. */
#ifndef MIDAIR_SIPHASH_H
#define MIDAIR_SIPHASH_H

#include <stdint.h>

static inline uint64_t siphash_left(uint64_t x, unsigned bits) { return x << bits | x >> (64 - bits); }

static inline void siphash_rounds(uint64_t v[4], unsigned rounds)
{
    while (rounds--) {
        v[0] += v[1];
        v[1] = siphash_left(v[1], 13) ^ v[0];
        v[0] = siphash_left(v[0], 32);
        v[2] += v[3];
        v[3] = siphash_left(v[3], 16) ^ v[2];
        v[0] += v[3];
        v[3] = siphash_left(v[3], 21) ^ v[0];
        v[2] += v[1];
        v[1] = siphash_left(v[1], 17) ^ v[2];
        v[2] = siphash_left(v[2], 32);
    }
}

/* Of the eight bytes of `word`, the lowest first. */
static inline uint64_t siphash_word(const uint64_t key[2], uint64_t word)
{
    const uint64_t end = 8ULL << 56; /* how many bytes there were */
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575ULL, key[1] ^ 0x646f72616e646f6dULL,
                     key[0] ^ 0x6c7967656e657261ULL, key[1] ^ 0x7465646279746573ULL};

    v[3] ^= word;
    siphash_rounds(v, 2);
    v[0] ^= word;
    v[3] ^= end;
    siphash_rounds(v, 2);
    v[0] ^= end;
    v[2] ^= 0xff;
    siphash_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

#endif
