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

#include "base/subject.h"

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

static int is_separator(uint8_t c) { return c == ',' || c == ' ' || c == '\t'; }

/* Adds the topics of a header to those there are, a blank between two. 0: they are none, or too many. */
static int take_topics(const uint8_t *at, uint32_t len, struct ref_mode *m, char *topics)
{
    const uint8_t *end = at + len;
    uint32_t count = 0;

    for (uint32_t i = 0; i < m->topics_len; i++)
        count += topics[i] == ' ';
    count += m->topics_len != 0;
    for (;;) {
        while (at < end && is_separator(*at))
            at++;
        if (at == end)
            return count != 0;
        const uint8_t *begin = at;

        while (at < end && !is_separator(*at))
            at++;
        uint32_t bytes = (uint32_t)(at - begin), blank = m->topics_len != 0;

        if (++count > MODE_TOPICS_MAX || m->topics_len + blank + bytes > MODE_TOPICS_BYTES || !subject_valid(begin, bytes, 0) ||
            (bytes >= sizeof MODE_PREFIX - 1 && memcmp(begin, MODE_PREFIX, sizeof MODE_PREFIX - 1) == 0))
            return 0;
        if (blank)
            topics[m->topics_len++] = ' ';
        memcpy(topics + m->topics_len, begin, bytes);
        m->topics_len = (uint16_t)(m->topics_len + bytes);
    }
}

static void take_header(const struct field *f, uint64_t now_ns, struct ref_mode *m, char *topics)
{
    if (is_called(f, "Midair-Mode", 11)) {
        m->mode = m->mode == MODE_BAD ? MODE_BAD : mode_of(f->value, f->value_len);
    } else if (is_called(f, "Midair-Deadline", 15)) {
        uint32_t ms = milliseconds(f->value, f->value_len);

        if (ms)
            m->deadline_ns = now_ns + ms * 1000000ULL;
        else
            m->mode = MODE_BAD;
    } else if (is_called(f, "Midair-Topics", 13) && !take_topics(f->value, f->value_len, m, topics)) {
        m->mode = MODE_BAD;
    }
}

/* 1: there was a header of ours. What a block of headers looks like is the protocol's. */
static int take_headers(const struct protocol *protocol, const uint8_t *at, const uint8_t *end, uint64_t now_ns,
                        struct ref_mode *m, char *topics)
{
    struct field f;
    int found = 0;

    while ((at = protocol->next_field(at, end, "Midair-", 7, &f))) {
        take_header(&f, now_ns, m, topics);
        found = 1;
    }
    return found;
}

static int has_prefix(const uint8_t *s, uint32_t len, const char *prefix, uint32_t prefix_len)
{
    return len > prefix_len && memcmp(s, prefix, prefix_len) == 0;
}

/* The number that hexadecimal digits are. */
static int take_hex(const uint8_t *digits, uint64_t *ret_id)
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

    if ((len == MODE_REPLY_BYTES || len == MODE_REPLY_BYTES_0_1) && has_prefix(s, len, MODE_REPLY_PREFIX, reply))
        return take_hex(s + reply, &m->id) ? PLACE_REPLY : PLACE_ANY; /* whether the token is right is the router's to say */
    if (has_prefix(s, len, MODE_IPC_PREFIX, sizeof MODE_IPC_PREFIX - 1))
        return PLACE_IPC;
    if (has_prefix(s, len, MODE_KIND_PREFIX, sizeof MODE_KIND_PREFIX - 1) ||
        has_prefix(s, len, MODE_ORG_PREFIX, sizeof MODE_ORG_PREFIX - 1))
        return PLACE_KIND;
    if ((len == clients || (len > clients && s[clients] == '.')) && memcmp(s, MODE_CLIENTS_SUBJECT, clients) == 0)
        return PLACE_CLIENTS;
    return PLACE_ANY;
}

int modes_recognise(const struct protocol *protocol, const uint8_t *p, const struct frame *f, uint32_t headers,
                    uint64_t now_ns, struct ref_mode *ret_mode, char *ret_topics)
{
    const uint8_t *block = p + f->body;

    memset(ret_mode, 0, sizeof(*ret_mode));
    int found = headers && take_headers(protocol, block, block + headers, now_ns, ret_mode, ret_topics);

    if (f->subject_len >= sizeof MODE_PREFIX && memcmp(p + f->subject, MODE_PREFIX, sizeof MODE_PREFIX - 1) == 0)
        ret_mode->place = place_of(p + f->subject, f->subject_len, ret_mode);
    /* Topics go with what is for everybody, and have to fit the reference. */
    if (ret_mode->topics_len &&
        (ret_mode->mode != MODE_NONE || ret_mode->place != PLACE_ANY ||
         ref_bytes(f->subject_len + f->reply_len) + sizeof(*ret_mode) + batch_pad(ret_mode->topics_len) > BATCH_RECORD_MAX)) {
        ret_mode->mode = MODE_BAD;
        ret_mode->topics_len = 0;
    }
    return found || ret_mode->place != PLACE_ANY;
}
