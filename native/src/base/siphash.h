/* siphash: SipHash-2-4 of bytes, or of one word. Who does not know the key cannot tell the value of one from
 * those of others. */
#ifndef MIDAIR_SIPHASH_H
#define MIDAIR_SIPHASH_H

#include <stdint.h>
#include <string.h>

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

/* Of `len` bytes. */
static inline uint64_t siphash_bytes(const uint64_t key[2], const char *bytes, uint32_t len)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575ULL, key[1] ^ 0x646f72616e646f6dULL,
                     key[0] ^ 0x6c7967656e657261ULL, key[1] ^ 0x7465646279746573ULL};

    for (uint64_t left = len, end = 0; !end; left -= 8, bytes += 8) {
        uint64_t word = 0;

        end = left < 8;
        memcpy(&word, bytes, end ? left : 8);
        if (end)
            word |= (uint64_t)len << 56;
        v[3] ^= word;
        siphash_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    siphash_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest");

/* Of the eight bytes of `word`, the lowest first. */
static inline uint64_t siphash_word(const uint64_t key[2], uint64_t word)
{
    return siphash_bytes(key, (const char *)&word, sizeof(word));
}

#endif
