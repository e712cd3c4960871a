/* transport: what lies between the bytes that the kernel counts and those that a protocol reads.
 *
 * Two streams: the *raw* one is what the kernel takes and gives, the *plain* one is what protocols read
 * and write. For the plain transport they are one. Other transports (TLS, WebSocket) carry the plain
 * stream in *envelopes*. An envelope has a number, a place in the plain stream and a length. Its raw bytes
 * follow from these, the plain bytes and the keys of the connection alone.
 *
 * A transport is a struct of functions that do no input and no output. The four calls that do (receive,
 * send, shut, and the mapping of the kernel's positions after a crash) are in connmgr/streams.c, once for all
 * transports. They keep the rule that lets a connection survive: envelopes are fixed in shared memory before
 * their first byte is given to the kernel (J3), and raw bytes are not taken from the kernel before what was
 * in their envelope lies in shared memory (J2). So a number never covers two contents.
 *
 * Chosen by the listener, recorded with the connection. Called once for each envelope; plain for nothing.
 */
#ifndef MIDAIR_TRANSPORT_H
#define MIDAIR_TRANSPORT_H

#include "base/api.h"

#include <stdint.h>

#define TRANSPORT_PLAIN_MAX 16384u /* plain bytes in the largest envelope, either way */
#define TRANSPORT_MORE_MAX 512u    /* raw bytes that an envelope may have beyond those */

struct transport {
    const char *name;
    uint32_t plain_max; /* plain bytes in the largest envelope that is sealed; 0: there are no envelopes */
    /* Raw bytes of an envelope around `plain` bytes (1 to plain_max). */
    uint32_t (*sealed_bytes)(uint32_t plain);
    /* `keys`: what the handshake of the connection left; NULL: no transport of this release has one.
     * Writes envelope `number` with `len` plain bytes. */
    void (*seal)(const void *keys, uint64_t number, const uint8_t *plain, uint32_t len, uint8_t *to);
    /* Opens envelope `number`, which begins at `raw`; its plain bytes (TRANSPORT_PLAIN_MAX at most) go to `to`.
     * Returns its raw bytes; 0: it is not whole, *ret_len is how many raw bytes it has at least; negative: it
     * is none. */
    int (*open)(const void *keys, uint64_t number, const uint8_t *raw, uint32_t len, uint8_t *to, uint32_t *ret_len);
};

/* All transports of this build, by number (conn_rec.transport): registry.c. The first one is plain. */
extern const struct transport *const transports[];
extern const struct transport transport_plain;

API uint32_t transport_count(void);
API const char *transport_name(uint32_t transport);

#endif
