/* line: a wire protocol of lines, for tests alone. It shows that a protocol is a folder and one
 * registration: nothing outside this folder knows it.
 *
 *   client                      server
 *   P subject body              M id subject body
 *   S subject id                E text
 *   U id                        ?    (are you there?)
 *   Q                           A    (the answer to Q)
 *   !    (yes)
 *
 * Each is a line that ends with LF. There are no replies, headers, groups or greetings.
 */
#include "base/put.h"
#include "base/subject.h"
#include "protocol/protocol.h"

#define SID_MAX 32u
#define LINE_MAX_BYTES 16384u /* a line is found by its end, so it is bounded whatever the limits are */

struct word {
    uint32_t at, len;
};

static struct word word_at(const uint8_t *buf, uint32_t at, uint32_t end)
{
    struct word w = {.at = at};

    while (at < end && buf[at] != ' ')
        at++;
    w.len = at - w.at;
    return w;
}

static int set_sid(struct frame *f, struct word w)
{
    if (w.len == 0)
        return -REFUSED_PARSER;
    if (w.len > SID_MAX)
        return -REFUSED_SID;
    f->sid = w.at;
    f->sid_len = (uint16_t)w.len;
    return 1;
}

static int parse_message(const uint8_t *buf, uint32_t end, const struct frame_limits *limits, struct frame *f)
{
    struct word subject = word_at(buf, 2, end);
    uint32_t body = subject.at + subject.len + 1;

    if (subject.len == 0 || body > end)
        return -REFUSED_PARSER;
    if (end - body > limits->max_payload)
        return -REFUSED_PAYLOAD;
    f->op = FRAME_MESSAGE;
    f->flags = FRAME_USUAL;
    f->subject = subject.at;
    f->subject_len = (uint16_t)subject.len;
    f->body = body;
    f->total_len = end - body;
    return 1;
}

static int parse_subscribe(const uint8_t *buf, uint32_t end, struct frame *f)
{
    struct word subject = word_at(buf, 2, end);

    f->op = FRAME_SUBSCRIBE;
    f->subject = subject.at;
    f->subject_len = (uint16_t)subject.len;
    if (!subject_valid(buf + subject.at, subject.len, 1))
        f->flags = FRAME_BAD_SUBJECT;
    return subject.at + subject.len < end ? set_sid(f, word_at(buf, subject.at + subject.len + 1, end)) : -REFUSED_PARSER;
}

static int parse_one(const uint8_t *buf, uint64_t len, const struct frame_limits *limits, struct frame *f)
{
    uint64_t most = len < LINE_MAX_BYTES ? len : LINE_MAX_BYTES;
    const uint8_t *newline = memchr(buf, '\n', most);
    uint32_t end = newline ? (uint32_t)(newline - buf) : 0;

    *f = (struct frame){.op = FRAME_NOTHING};
    if (!newline)
        return most == LINE_MAX_BYTES ? -REFUSED_CONTROL_LINE : 0;
    f->bytes = end + 1;
    if (end == 1 && buf[0] == 'Q')
        f->op = FRAME_PING;
    if (end == 1 && (buf[0] == 'Q' || buf[0] == '!'))
        return 1;
    if (end < 3 || buf[1] != ' ')
        return -REFUSED_UNKNOWN_OP;
    switch (buf[0]) {
    case 'P':
        return parse_message(buf, end, limits, f);
    case 'S':
        return parse_subscribe(buf, end, f);
    case 'U':
        f->op = FRAME_UNSUBSCRIBE;
        return set_sid(f, word_at(buf, 2, end));
    default:
        return -REFUSED_UNKNOWN_OP;
    }
}

/* Whether the frame at `p` differs from the one before it in its body only. */
static int is_repeat(const uint8_t *p, uint64_t len, const struct frame *f)
{
    return len >= f->bytes && memcmp(p, p - f->bytes, f->body) == 0 && p[f->bytes - 1] == '\n' &&
           !memchr(p + f->body, '\n', f->total_len);
}

static uint32_t parse(const uint8_t *buf, uint64_t len, const struct frame_limits *limits, struct frame *ret_frames,
                      uint32_t most, int *ret_status)
{
    const uint8_t *end = buf + len;
    uint32_t count = 0;

    *ret_status = 1;
    for (; count < most && buf < end; count++) {
        struct frame *f = &ret_frames[count];

        *ret_status = parse_one(buf, (uint64_t)(end - buf), limits, f);
        if (*ret_status <= 0)
            return count;
        buf += f->bytes;
        while (f->op == FRAME_MESSAGE && limits->repeats && f->repeats < UINT16_MAX &&
               is_repeat(buf, (uint64_t)(end - buf), f)) {
            f->repeats++;
            buf += f->bytes;
        }
    }
    return count;
}

static const uint8_t *next_field(const uint8_t *at, const uint8_t *end, const char *prefix, uint32_t prefix_len,
                                 struct field *ret_field)
{
    (void)at, (void)end, (void)prefix, (void)prefix_len, (void)ret_field;
    return NULL;
}

static uint8_t *put_head(uint8_t *to, const uint8_t *subject, uint32_t subject_len, const char *sid, uint32_t sid_len)
{
    to = put_text(put_text(to, "M ", 2), sid, sid_len);
    *to++ = ' ';
    return put_text(to, subject, subject_len);
}

static uint8_t *put_run(uint8_t *to, const uint8_t *end, const struct usual *messages, uint32_t count, const char *sid,
                        uint32_t sid_len, uint32_t *ret_count)
{
    uint32_t i = 0;

    for (; i < count && end - to >= (ptrdiff_t)(3 + sid_len + messages[i].subject_len + messages[i].tail_len); i++) {
        const struct usual *m = &messages[i];

        to = put_head(to, m->subject, m->subject_len, sid, sid_len);
        to = put_text(to, m->subject + m->subject_len, m->tail_len);
    }
    *ret_count = i;
    return to;
}

static uint8_t *put_message(uint8_t *to, const struct message *m, const char *sid, uint32_t sid_len)
{
    to = put_head(to, m->subject, m->subject_len, sid, sid_len);
    *to++ = ' ';
    return to;
}

static uint8_t *put_reply(uint8_t *to, enum reply reply, const char *text, uint32_t len)
{
    switch (reply) {
    case REPLY_PING:
        return put_text(to, "?\n", 2);
    case REPLY_PONG:
        return put_text(to, "A\n", 2);
    case REPLY_OK:
        return to;
    default:
        return put_text(put_text(put_text(to, "E ", 2), text, len), "\n", 1);
    }
}

static const char *text(int refusal)
{
    switch (refusal) {
    case REFUSED_UNKNOWN_OP:
        return "what?";
    case REFUSED_SUBJECT:
        return "not a subject";
    case REFUSED_PAYLOAD:
        return "too much";
    case REFUSED_STALE:
        return "silence";
    default:
        return "no";
    }
}

const struct protocol protocol_line = {
    .name = "line",
    .sid_max = SID_MAX,
    .usual_more = {3, 3}, /* "M ", and the blank before the subject */
    .end = "\n",
    .end_len = 1,
    .parse = parse,
    .next_field = next_field,
    .put_run = put_run,
    .put_message = put_message,
    .put_reply = put_reply,
    .text = text,
};
