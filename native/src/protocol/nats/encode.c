/* encode: frames of the NATS client protocol, in the direction server to client. See protocol.h.
 *
 * Two ways. put_run() sends messages as they lie in the arena: what a publisher wrote behind the
 * subject, sizes and body, is what a subscriber reads behind the sid. put_message() writes a head of
 * its own before whatever body the caller appends. */
#include "protocol/nats/nats.h"

#include "base/put.h"

static const char version[] = "NATS/1.0";

/* Most bytes that put_usual() may write. */
static inline uint32_t usual_most(const struct usual *m, uint32_t sid_len)
{
    return 6 + m->subject_len + sid_len + PUT_SHORT_MAX + m->tail_len;
}
_Static_assert(6 + PUT_SHORT_MAX <= PROTOCOL_FRAME_MORE, "what a caller reserves is enough");

static inline uint8_t *put_usual(uint8_t *to, const struct usual *m, const char *sid, uint32_t sid_len)
{
    if (m->headers)
        *to++ = 'H';
    memcpy(to, "MSG ", 4);
    to = put_short(to + 4, m->subject, m->subject_len);
    *to++ = ' ';
    to = put_tiny(to, sid, sid_len);
    return put_text(to, m->subject + m->subject_len, m->tail_len);
}

uint8_t *nats_put_run(uint8_t *to, const uint8_t *end, const struct usual *messages, uint32_t count, const char *sid,
                      uint32_t sid_len, uint32_t *ret_count)
{
    const struct usual *m = messages, *last = messages + count;

    for (; m < last && end - to >= (ptrdiff_t)usual_most(m, sid_len); m++)
        to = put_usual(to, m, sid, sid_len);
    *ret_count = (uint32_t)(m - messages);
    return to;
}

/* MSG subject sid [reply] total, or HMSG subject sid [reply] header-size total. */
uint8_t *nats_put_message(uint8_t *to, const struct message *m, const char *sid, uint32_t sid_len)
{
    if (m->header_len)
        *to++ = 'H';
    to = put_text(to, "MSG ", 4);
    to = put_text(to, m->subject, m->subject_len);
    *to++ = ' ';
    to = put_text(to, sid, sid_len);
    *to++ = ' ';
    if (m->reply_len) {
        to = put_text(to, m->reply, m->reply_len);
        *to++ = ' ';
    }
    if (m->header_len) {
        to = put_number(to, m->header_len);
        *to++ = ' ';
    }
    to = put_number(to, m->total_len);
    return put_text(to, "\r\n", 2);
}

static uint8_t *put_line(uint8_t *to, const struct field *f)
{
    to = put_text(to, f->name, f->name_len);
    to = put_text(to, ": ", 2);
    to = put_text(to, f->value, f->value_len);
    return put_text(to, "\r\n", 2);
}

uint8_t *nats_put_status(uint8_t *to, uint32_t code, const char *text, const struct field *fields, uint32_t count)
{
    to = put_text(to, version, sizeof version - 1);
    if (code) {
        *to++ = ' ';
        to = put_number(to, code);
    }
    if (*text) {
        *to++ = ' ';
        to = put_text(to, text, (uint32_t)strlen(text));
    }
    to = put_text(to, "\r\n", 2);
    for (uint32_t i = 0; i < count; i++)
        to = put_line(to, &fields[i]);
    return put_text(to, "\r\n", 2);
}

uint8_t *nats_put_field(uint8_t *to, const uint8_t *headers, uint32_t header_len, const struct field *field,
                        uint32_t *ret_kept)
{
    *ret_kept = header_len ? header_len - 2 : 0; /* all but the last line end */
    if (!header_len)
        to = put_text(put_text(to, version, sizeof version - 1), "\r\n", 2);
    else if (header_len < 4 || memcmp(headers + header_len - 4, "\r\n\r\n", 4) != 0)
        return NULL;
    return put_text(put_line(to, field), "\r\n", 2);
}

uint8_t *nats_put_reply(uint8_t *to, enum reply reply, const char *text, uint32_t len)
{
    switch (reply) {
    case REPLY_PING:
        return put_text(to, "PING\r\n", 6);
    case REPLY_PONG:
        return put_text(to, "PONG\r\n", 6);
    case REPLY_OK:
        return put_text(to, "+OK\r\n", 5);
    default:
        to = put_text(to, "-ERR '", 6);
        return put_text(put_text(to, text, len), "'\r\n", 3);
    }
}
