/* put: text and numbers written one behind the other, as frames are.
 *
 * Each returns where the next one goes. The caller has reserved the room. What is
 * written is private to the caller until its step commits.
 */
#ifndef MIDAIR_PUT_H
#define MIDAIR_PUT_H

#include <stdint.h>
#include <string.h>

#define PUT_SHORT_MAX 32u /* bytes that put_short() may write, whatever the length */

static inline uint8_t *put_text(uint8_t *to, const void *text, uint32_t len)
{
    memcpy(to, text, len);
    return to + len;
}

/* The same for what is usually short: a copy of fixed size that goes past its end, where the caller
 * has reserved PUT_SHORT_MAX and the source has slack (ARENA_SLACK, or the rest of its struct). */
static inline uint8_t *put_short(uint8_t *to, const void *text, uint32_t len)
{
    if (len <= PUT_SHORT_MAX)
        memcpy(to, text, PUT_SHORT_MAX);
    else
        memcpy(to, text, len);
    return to + len;
}

/* The same for what is shorter still: the sid of a subscription, whose record has it in the first
 * cache line so far. */
#define PUT_TINY_MAX 16u
static inline uint8_t *put_tiny(uint8_t *to, const void *text, uint32_t len)
{
    if (len <= PUT_TINY_MAX)
        memcpy(to, text, PUT_TINY_MAX);
    else
        memcpy(to, text, len);
    return to + len;
}

/* Digits; returns what it was given the type of. */
static inline void *put_number(void *at, uint64_t n)
{
    uint8_t digits[20], *to = at;
    int i = 0;

    do
        digits[i++] = (uint8_t)('0' + n % 10);
    while (n /= 10);
    while (i)
        *to++ = digits[--i];
    return to;
}

#endif
