/* nats: the NATS client protocol, as one implementation of protocol.h.
 *
 *   parse.c   bytes of clients to frames, header blocks to fields
 *   encode.c  messages, statuses and replies to bytes
 *   texts.c   what clients are told when something is refused
 *
 * Behaviour follows nats-server 2.9.10 as observed (docs/protocol-nats.md has the table).
 * Where it is stricter or simpler, on purpose:
 *   - The whole control line is bounded (max_control_line + NATS_LINE_SLACK bytes with its
 *     line end), also blanks before the first argument and what follows PING, PONG and +OK.
 *   - A CR inside the arguments of PUB, HPUB, SUB or UNSUB is REFUSED_PARSER.
 *   - `-ERR` from a client is an unknown operation.
 *   - UNSUB takes a max of up to 18 digits (not 9); like there, a max that is not a number
 *     is 0, which means now.
 *   - Every refusal has a text; nats-server closes without one where we say REFUSED_PARSER,
 *     REFUSED_SID or REFUSED_HEADERS.
 */
#ifndef MIDAIR_NATS_H
#define MIDAIR_NATS_H

#include "protocol/protocol.h"

#define NATS_SIZE_DIGITS_MAX 9 /* digits of a PUB or HPUB size, leading zeros included */
#define NATS_LINE_SLACK 10     /* bytes: "CONNECT", one blank, CR and LF */
#define NATS_LINE_MAX PROTOCOL_SID_MAX /* bytes: a larger limit counts as this. So a sid may be as long as a line allows */

API enum nats_verb { /* frame.verb */
    NATS_PUB = 1,
    NATS_HPUB, /* with a header_len of 0 it has no headers: it is delivered as MSG */
    NATS_SUB,
    NATS_UNSUB,
    NATS_PING,
    NATS_PONG,
    NATS_CONNECT, /* args may be empty or broken JSON: the caller answers REFUSED_PARSER */
    NATS_OK,      /* "+OK" from a client: ignored */
    NATS_INFO,    /* ignored */
};

extern const struct protocol protocol_nats;

/* The members of protocol_nats: see protocol.h. */
uint32_t nats_parse(const uint8_t *buf, uint64_t len, const struct frame_limits *limits, struct frame *ret_frames,
                    uint32_t most, int *ret_status);
const uint8_t *nats_next_field(const uint8_t *at, const uint8_t *end, const char *prefix, uint32_t prefix_len,
                               struct field *ret_field);
uint8_t *nats_put_run(uint8_t *to, const uint8_t *end, const struct usual *messages, uint32_t count, const char *sid,
                      uint32_t sid_len, uint32_t *ret_count);
uint8_t *nats_put_message(uint8_t *to, const struct message *m, const char *sid, uint32_t sid_len);
uint8_t *nats_put_status(uint8_t *to, uint32_t code, const char *text, const struct field *fields, uint32_t count);
uint8_t *nats_put_field(uint8_t *to, const uint8_t *headers, uint32_t header_len, const struct field *field,
                        uint32_t *ret_kept);
uint8_t *nats_put_reply(uint8_t *to, enum reply reply, const char *text, uint32_t len);
const char *nats_text(int refusal);

#endif
