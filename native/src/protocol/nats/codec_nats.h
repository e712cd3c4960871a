/* codec_nats: frames of the NATS client protocol, in the direction client to server.
 *
 * The structure: none is kept. A parse is a pure function of one contiguous buffer that
 *               begins at a frame boundary; the frame it describes is offsets into it.
 * Created by:   the caller, on its stack. Written by: nats_parse() alone.
 * Invariants:   not one byte past `len` is read. An answer, once it is not "not whole yet",
 *               does not change when more bytes follow: the cuts TCP makes cannot be seen.
 * After a crash: nothing is left; the bytes are parsed again from the frame boundary.
 *
 * Behaviour follows nats-server 2.9.10 as observed (docs/protocol-nats.md has the table).
 * Where it is stricter or simpler, on purpose:
 *   - The whole control line is bounded (max_control_line + NATS_LINE_SLACK bytes with its
 *     line end), also blanks before the first argument and what follows PING, PONG and +OK.
 *   - A CR inside the arguments of PUB, HPUB, SUB or UNSUB is NATS_E_PARSER.
 *   - A sid has at most NATS_SID_MAX bytes.
 *   - `-ERR` from a client is an unknown operation.
 *   - UNSUB takes a max of up to 18 digits (not 9); like there, a max that is not a number
 *     is 0, which means now.
 *   - Every refusal has a text; nats-server closes without one where we say NATS_E_PARSER,
 *     NATS_E_SID or NATS_E_HEADERS.
 */
#ifndef MIDAIR_CODEC_NATS_H
#define MIDAIR_CODEC_NATS_H

#include "base/api.h"

#include <stddef.h>
#include <stdint.h>

#define NATS_SID_MAX 27        /* bytes */
#define NATS_SIZE_DIGITS_MAX 9 /* digits of a PUB or HPUB size, leading zeros included */
#define NATS_LINE_SLACK 10     /* bytes: "CONNECT", one blank, CR and LF */
#define NATS_LINE_MAX 65535    /* bytes: lengths are 16 bits wide; a larger limit counts as this */

API enum nats_op {
    NATS_PUB = 1,
    NATS_HPUB,
    NATS_SUB,
    NATS_UNSUB,
    NATS_PING,
    NATS_PONG,
    NATS_CONNECT, /* args may be empty or broken JSON: the caller answers NATS_E_PARSER */
    NATS_OK,      /* "+OK" from a client: ignore */
    NATS_INFO,    /* ignore */
};

/* All that nats_parse() returns close the connection. */
API enum nats_error {
    NATS_E_UNKNOWN_OP = -1,   /* also a body that is not followed by CRLF */
    NATS_E_PARSER = -2,       /* wrong arguments */
    NATS_E_CONTROL_LINE = -3, /* line too long */
    NATS_E_PAYLOAD = -4,      /* announced size over max_payload */
    NATS_E_SUBJECT = -5,      /* text only: a flagged SUB is answered with it, and stays open */
    NATS_E_SID = -6,          /* sid too long */
    NATS_E_HEADERS = -7,      /* HPUB, but CONNECT did not say "headers":true */
    NATS_E_PUB_SUBJECT = -8,  /* text only: a flagged PUB or HPUB (pedantic), stays open */
};
#define NATS_ERRORS 9 /* their number, and 0 for none */

API enum nats_flag {
    /* The subject breaks the rules. SUB: always judged; answer NATS_E_SUBJECT, do not
     * subscribe. PUB and HPUB: judged only when pedantic; answer NATS_E_PUB_SUBJECT and
     * route on. Unflagged PUBs are not judged: to the router a subject with an empty token
     * has no recipients, and '*' or '>' in it are ordinary tokens. */
    NATS_FLAG_BAD_SUBJECT = 1,
    /* PUB and HPUB: single blanks, so that what follows the subject, up to the end of the frame,
     * is what follows the sid in the MSG or HMSG that delivers it. */
    NATS_FLAG_USUAL = 2,
};

API struct nats_limits {
    uint32_t max_control_line; /* bytes of arguments; nats-server's default is 4096 */
    uint32_t max_payload;      /* bytes, headers included; default 1048576 */
    uint8_t pedantic;          /* from CONNECT; before it: 1 */
    uint8_t headers;           /* from CONNECT; before it: 0 */
};

/* Offsets are from the start of the frame; what an operation does not have is 0. */
API struct nats_frame {
    uint8_t op;           /* enum nats_op */
    uint8_t flags;        /* enum nats_flag */
    uint16_t subject_len;
    uint16_t reply_len;   /* 0: no reply subject */
    uint16_t queue_len;   /* 0: no queue group */
    uint16_t sid_len;
    uint32_t subject;
    uint32_t reply;
    uint32_t queue;
    uint32_t sid;
    uint32_t args;        /* CONNECT and INFO: the JSON */
    uint32_t args_len;
    uint32_t body;        /* PUB and HPUB: headers, then payload */
    uint32_t header_len;  /* an HPUB with 0 has no headers: it is delivered as MSG */
    uint32_t total_len;   /* headers + payload */
    uint64_t max_msgs;    /* UNSUB: 0 means now */
    uint64_t bytes;       /* the whole frame with its final line end, once known, else 0 */
};
_Static_assert(sizeof(struct nats_frame) == 64, "one cache line");

/* 1: one whole frame, ret_frame->bytes long.
 * 0: not whole yet. ret_frame->bytes is 0 while the control line is incomplete (nothing else
 *    is filled then); else it is the total needed and all fields are filled: only (part of)
 *    the body or its CRLF is missing.
 * < 0: enum nats_error, as soon as it is knowable; ret_frame is then unspecified. */
API int nats_parse(const uint8_t *buf, uint64_t len, const struct nats_limits *limits,
                   struct nats_frame *ret_frame);

/* The text between the quotes of -ERR '...'. */
API const char *nats_error_text(int error);

/* 1 or 0. Tokens are separated by '.', none is empty, none contains a blank, CR or LF. With
 * wildcards a token may be '*', and the last one '>'; without, no token may be either.
 * Inside a longer token both are ordinary characters, as in nats-server. */
API int nats_subject_valid(const uint8_t *s, uint32_t len, int wildcards);

#endif
