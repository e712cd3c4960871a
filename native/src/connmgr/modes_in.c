/* modes_in: finds out which mode a published message asks for (docs/modes.md).
 *
 * The structure: none is kept. What headers and subject say becomes a struct ref_mode, which
 *               travels behind the texts of the reference: the router sees no headers.
 * Created by:   refer_with_mode() of take.c, on its stack, past committed lengths.
 * Invariants:   headers are read where the frame landed, and no further than MODES_HEADER_MAX.
 *               A message without a header of ours, and not to a subject of ours, has no mode.
 * After a crash: the frame is parsed again.
 */
#include "connmgr/connmgr.h"

#define DEADLINE_MS_MAX 86400000u /* a day */

static const struct {
    const char *text;
    uint8_t mode;
} modes[] = {
    {"semaphore", MODE_SEMAPHORE},     {"session", MODE_SESSION}, {"session-open", MODE_SESSION_OPEN},
    {"session-end", MODE_SESSION_END}, {"fanout", MODE_FANOUT},   {"more", MODE_MORE},
};

static uint8_t mode_of(const uint8_t *text, uint32_t len)
{
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strlen(modes[i].text) == len && memcmp(modes[i].text, text, len) == 0)
            return modes[i].mode;
    return MODE_BAD;
}

/* 0: not a number of milliseconds from 1 to a day. */
static uint32_t milliseconds(const uint8_t *text, uint32_t len)
{
    uint32_t ms = 0;

    for (uint32_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9' || ms > DEADLINE_MS_MAX)
            return 0;
        ms = ms * 10 + (text[i] - '0');
    }
    return ms <= DEADLINE_MS_MAX ? ms : 0;
}

static int is_called(const struct field *f, const char *name, uint32_t len)
{
    return f->name_len == len && memcmp(f->name, name, len) == 0;
}

static void take_header(const struct field *f, uint64_t now_ns, struct ref_mode *m)
{
    if (is_called(f, "Midair-Mode", 11)) {
        m->mode = m->mode == MODE_BAD ? MODE_BAD : mode_of(f->value, f->value_len);
    } else if (is_called(f, "Midair-Deadline", 15)) {
        uint32_t ms = milliseconds(f->value, f->value_len);

        if (ms)
            m->deadline_ns = now_ns + ms * 1000000ULL;
        else
            m->mode = MODE_BAD;
    }
}

/* 1: there was a header of ours. What a block of headers looks like is the protocol's. */
static int take_headers(const struct protocol *protocol, const uint8_t *at, const uint8_t *end, uint64_t now_ns,
                        struct ref_mode *m)
{
    struct field f;
    int found = 0;

    while ((at = protocol->next_field(at, end, "Midair-", 7, &f))) {
        take_header(&f, now_ns, m);
        found = 1;
    }
    return found;
}

static int has_prefix(const uint8_t *s, uint32_t len, const char *prefix, uint32_t prefix_len)
{
    return len > prefix_len && memcmp(s, prefix, prefix_len) == 0;
}

static int take_id(const uint8_t *digits, uint64_t *ret_id)
{
    uint64_t id = 0;

    for (uint32_t i = 0; i < MODE_ID_DIGITS; i++) {
        uint8_t c = digits[i];
        uint64_t digit = c >= '0' && c <= '9' ? c - (uint64_t)'0' : c >= 'a' && c <= 'f' ? c - (uint64_t)'a' + 10 : 16;

        if (digit == 16)
            return 0;
        id = id << 4 | digit;
    }
    *ret_id = id;
    return 1;
}

static uint8_t place_of(const uint8_t *s, uint32_t len, struct ref_mode *m)
{
    const uint32_t clients = sizeof MODE_CLIENTS_SUBJECT - 1, reply = sizeof MODE_REPLY_PREFIX - 1;

    if (len == MODE_REPLY_BYTES && has_prefix(s, len, MODE_REPLY_PREFIX, reply))
        return take_id(s + reply, &m->id) ? PLACE_REPLY : PLACE_ANY;
    if (has_prefix(s, len, MODE_IPC_PREFIX, sizeof MODE_IPC_PREFIX - 1))
        return PLACE_IPC;
    if ((len == clients || (len > clients && s[clients] == '.')) && memcmp(s, MODE_CLIENTS_SUBJECT, clients) == 0)
        return PLACE_CLIENTS;
    return PLACE_ANY;
}

int modes_recognise(const struct protocol *protocol, const uint8_t *p, const struct frame *f, uint32_t headers,
                    uint64_t now_ns, struct ref_mode *ret_mode)
{
    const uint8_t *block = p + f->body;

    memset(ret_mode, 0, sizeof(*ret_mode));
    int found = headers && take_headers(protocol, block, block + headers, now_ns, ret_mode);

    if (f->subject_len >= sizeof MODE_PREFIX && memcmp(p + f->subject, MODE_PREFIX, sizeof MODE_PREFIX - 1) == 0)
        ret_mode->place = place_of(p + f->subject, f->subject_len, ret_mode);
    return found || ret_mode->place != PLACE_ANY;
}
