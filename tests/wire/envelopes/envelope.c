/* envelope: a transport of the tests, which shows that the seam holds (transport.h).
 *
 * An envelope: "MDRV", then big-endian 4 bytes of plain length, 8 bytes of number, the plain bytes each xor a byte that
 * follows from the number, 4 bytes of Adler-32 of the plain bytes, begun with the low bits of the number. So the
 * same plain bytes under another number are other bytes, and a number with two contents is noticed.
 * What clients send counts from 2^40.
 */
#include "transport/transport.h"

#include <string.h>

#define HEAD 16u
#define MORE (HEAD + 4u)
#define SEALED_MAX 4096u
#define FROM_CLIENT (1ULL << 40)

static void put(uint8_t *to, uint64_t value, int bytes)
{
    while (bytes--)
        to[bytes] = (uint8_t)value, value >>= 8;
}

static uint64_t get(const uint8_t *from, int bytes)
{
    uint64_t value = 0;

    while (bytes--)
        value = value << 8 | *from++;
    return value;
}

static uint8_t key_of(uint64_t number) { return (uint8_t)(number * 37 + 11); }

static uint32_t check_of(uint64_t number, const uint8_t *plain, uint32_t len)
{
    uint32_t a = (uint32_t)(number & 0x7fff), b = (uint32_t)(number >> 15 & 0x7fff);

    for (uint32_t i = 0; i < len; i++) {
        a = (a + plain[i]) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

static uint32_t sealed_bytes(uint32_t plain) { return plain + MORE; }

static void seal(const void *keys, uint64_t number, const uint8_t *plain, uint32_t len, uint8_t *to)
{
    (void)keys;
    memcpy(to, "MDRV", 4);
    put(to + 4, len, 4);
    put(to + 8, number, 8);
    for (uint32_t i = 0; i < len; i++)
        to[HEAD + i] = plain[i] ^ key_of(number);
    put(to + HEAD + len, check_of(number, plain, len), 4);
}

static int unseal(const void *keys, uint64_t number, const uint8_t *raw, uint32_t len, uint8_t *to, uint32_t *ret_len)
{
    (void)keys;
    *ret_len = HEAD;
    if (len < HEAD)
        return 0;
    uint32_t plain = (uint32_t)get(raw + 4, 4);

    number += FROM_CLIENT;
    if (memcmp(raw, "MDRV", 4) != 0 || plain > TRANSPORT_PLAIN_MAX || get(raw + 8, 8) != number)
        return -1;
    *ret_len = plain + MORE;
    if (len < plain + MORE)
        return 0;
    for (uint32_t i = 0; i < plain; i++)
        to[i] = raw[HEAD + i] ^ key_of(number);
    if (get(raw + HEAD + plain, 4) != check_of(number, to, plain))
        return -1;
    *ret_len = plain;
    return (int)(plain + MORE);
}

extern const struct transport transport_envelope;
const struct transport transport_envelope = {
    .name = "envelope", .plain_max = SEALED_MAX, .sealed_bytes = sealed_bytes, .seal = seal, .open = unseal,
};
