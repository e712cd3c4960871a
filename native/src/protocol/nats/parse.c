/* parse: frames of the NATS client protocol, in the direction client to server. See protocol.h.
 *
 * The structure: none is kept. A parse is a pure function of one contiguous buffer that begins at a
 *               frame boundary; the frames it describes are offsets into it.
 *
 * Two ways through. parse_usual() takes a PUB or HPUB written the way every client library
 * writes it ("PUB subject [reply] size\r\n", single blanks) in one pass over the line and
 * declines everything else, which costs it no more than having looked. parse_line() takes any
 * operation, finds the end of the line, and then splits it. What was declined goes there, so
 * that almost every error is decided in that one place.
 */
#include "protocol/nats/nats.h"

#include "base/subject.h"

#include <string.h>

#define ONES 0x0101010101010101ULL
#define HIGHS 0x8080808080808080ULL
/* Bytes parse_usual() must have in hand from the last position where a word may end: a blank
 * and a size with its CRLF, for HPUB also a header size with its blank; sizes here have up to
 * 7 digits. A word scan, which reads 8 bytes, needs less. */
#define PUB_MARGIN (1 + 7 + 2)
#define HPUB_MARGIN (1 + 7 + 1 + 7 + 2)
#define CRLF 0x0a0du /* as a little-endian 16-bit word */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as little-endian");

/* An unaligned load: one instruction. */
static inline uint64_t load64(const uint8_t *p)
{
    uint64_t w;

    __builtin_memcpy(&w, p, sizeof w);
    return w;
}

static inline uint32_t load32(const uint8_t *p)
{
    uint32_t w;

    __builtin_memcpy(&w, p, sizeof w);
    return w;
}

static inline uint32_t load16(const uint8_t *p)
{
    uint16_t w;

    __builtin_memcpy(&w, p, sizeof w);
    return w;
}

static inline int is_blank(uint8_t c)
{
    return c == ' ' || c == '\t';
}

static inline int is_digit(uint8_t c)
{
    return (uint8_t)(c - '0') <= 9;
}

/* The first position at or after p whose byte is a blank or a control character, eight bytes
 * at a time; `stop` or beyond when there is none before it. The caller guarantees that eight
 * bytes can be read at any position before `stop`.
 * (w - 0x21..) & ~w & 0x80.. marks bytes below 0x21. A borrow can also mark the byte above a
 * marked one, never one below, so the lowest mark is right. */
static inline const uint8_t *token_end(const uint8_t *p, const uint8_t *stop)
{
    for (; p < stop; p += 8) {
        uint64_t w = load64(p);
        uint64_t low = (w - ONES * 0x21) & ~w & HIGHS;

        if (low)
            return p + (__builtin_ctzll(low) >> 3);
    }
    return p;
}

/* The end of a PUB or HPUB whose control line is done: is the body here, and its CRLF? */
static inline int finish_body(const uint8_t *buf, uint64_t len, uint64_t body_end)
{
    if (len >= body_end + 2)
        return load16(buf + body_end) == CRLF ? 1 : -REFUSED_UNKNOWN_OP;
    if (len > body_end && buf[body_end] != '\r')
        return -REFUSED_UNKNOWN_OP;
    return 0;
}

/* The number at p when it has 1 to 7 digits, else -1. Reads 8 bytes.
 * The digits become the low nibbles of a word, the last digit on top; three multiplications
 * then add neighbours up as tens, hundreds and ten thousands. */
static inline int32_t number_at(const uint8_t *p, const uint8_t **ret_end)
{
    uint64_t w = load64(p) ^ ONES * 0x30;
    uint64_t other = ((w + ONES * 0x76) | w) & HIGHS; /* marks bytes that are not 0..9 */
    uint32_t shift = other ? (uint32_t)__builtin_ctzll(other) & 0x38 : 0;

    if (shift == 0)
        return -1;
    *ret_end = p + (shift >> 3);
    w <<= 64 - shift;
    w = (w * 10 + (w >> 8)) & 0x00ff00ff00ff00ffULL;
    w = (w * 100 + (w >> 16)) & 0x0000ffff0000ffffULL;
    return (int32_t)(uint32_t)(w * 10000 + (w >> 32));
}

/* The end of a line: "size CRLF", for HPUB "header-size size CRLF", else -1. */
static inline int32_t sizes_at(const uint8_t *p, const int hpub, uint32_t *ret_header,
                               const uint8_t **ret_end)
{
    int32_t header = 0, total;

    if (hpub) {
        header = number_at(p, &p);
        if (header < 0 || *p++ != ' ')
            return -1;
    }
    total = number_at(p, &p);
    if (total < header || load16(p) != CRLF)
        return -1;
    *ret_header = (uint32_t)header;
    *ret_end = p + 2;
    return total;
}

static int parse_line(const uint8_t *buf, uint64_t len, const struct frame_limits *limits,
                      struct frame *ret_frame) __attribute__((noinline));

/* The longest line parse_usual() takes. None of pedantic clients (interactive ones: libraries switch
 * it off), whose subjects are judged. */
static uint64_t usual_line(const struct frame_limits *limits)
{
    if (limits->pedantic)
        return 0;
    return limits->max_control_line < NATS_LINE_MAX ? limits->max_control_line : NATS_LINE_MAX;
}

/* Inlined once for each operation: PUB into the loop over a read, HPUB into a function of its own. */
static inline __attribute__((always_inline)) int
parse_usual(const uint8_t *buf, uint64_t len, const struct frame_limits *limits, uint64_t usual_max,
            struct frame *ret_frame, const int hpub)
{
    const uint32_t subject = hpub ? 5 : 4; /* "HPUB ", "PUB " */
    const uint64_t margin = hpub ? HPUB_MARGIN : PUB_MARGIN;
    uint64_t line_max = len < usual_max ? len : usual_max;
    const uint8_t *stop, *word, *p;
    uint32_t subject_len, header = 0;
    int32_t size;

    if (line_max < margin + 8 || (hpub && !limits->headers))
        return parse_line(buf, len, limits, ret_frame);
    stop = buf + line_max - margin;
    p = token_end(buf + subject, stop);
    subject_len = (uint32_t)(p - buf) - subject;
    if (p >= stop || subject_len == 0 || *p != ' ')
        return parse_line(buf, len, limits, ret_frame);
    word = p + 1;
    size = sizes_at(word, hpub, &header, &p);
    *ret_frame = (struct frame){
        .op = FRAME_MESSAGE,
        .verb = hpub ? NATS_HPUB : NATS_PUB,
        .flags = FRAME_USUAL,
        .subject_len = (uint16_t)subject_len,
        .subject = subject,
    };
    if (size < 0) {
        p = token_end(word, stop);
        if (p >= stop || p == word || *p != ' ')
            return parse_line(buf, len, limits, ret_frame);
        ret_frame->reply = (uint32_t)(word - buf);
        ret_frame->reply_len = (uint16_t)(p - word);
        size = sizes_at(p + 1, hpub, &header, &p);
        if (size < 0)
            return parse_line(buf, len, limits, ret_frame);
    }
    if ((uint32_t)size > limits->max_payload)
        return -REFUSED_PAYLOAD;
    ret_frame->body = (uint32_t)(p - buf);
    ret_frame->header_len = header;
    if (hpub && !header) /* becomes a MSG, which has no room for a header size */
        ret_frame->flags = 0;
    ret_frame->total_len = (uint32_t)size;
    ret_frame->bytes = (uint64_t)(p - buf) + (uint32_t)size + 2;
    return finish_body(buf, len, ret_frame->bytes - 2);
}

static __attribute__((noinline)) int parse_hpub(const uint8_t *buf, uint64_t len,
                                                const struct frame_limits *limits, uint64_t usual_max,
                                                struct frame *ret_frame)
{
    return parse_usual(buf, len, limits, usual_max, ret_frame, 1);
}

static const struct operation {
    char name[8]; /* lower case */
    uint8_t len;
    uint8_t verb;
    uint8_t blank; /* must be followed by a blank */
    uint8_t op;
} operations[] = {
    {"pub", 3, NATS_PUB, 1, FRAME_MESSAGE},
    {"hpub", 4, NATS_HPUB, 1, FRAME_MESSAGE},
    {"sub", 3, NATS_SUB, 1, FRAME_SUBSCRIBE},
    {"unsub", 5, NATS_UNSUB, 1, FRAME_UNSUBSCRIBE},
    {"ping", 4, NATS_PING, 0, FRAME_PING},
    {"pong", 4, NATS_PONG, 0, FRAME_NOTHING},
    {"+ok", 3, NATS_OK, 0, FRAME_NOTHING},
    {"connect", 7, NATS_CONNECT, 0, FRAME_CONNECT},
    {"info", 4, NATS_INFO, 0, FRAME_NOTHING},
};

/* 1: found. 0: too few bytes to tell. -REFUSED_UNKNOWN_OP: none can follow. */
static int find_operation(const uint8_t *buf, uint64_t len, const struct operation **ret_op)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        const struct operation *o = &operations[i];
        uint64_t n = 0;

        while (n < o->len && n < len) {
            uint8_t c = buf[n];

            if (c >= 'A' && c <= 'Z')
                c |= 0x20;
            if (c != (uint8_t)o->name[n])
                break;
            n++;
        }
        if (n == o->len) {
            if (o->blank && n < len && !is_blank(buf[n]))
                return -REFUSED_UNKNOWN_OP;
            *ret_op = o;
            return 1;
        }
        if (n == len)
            return 0;
    }
    return -REFUSED_UNKNOWN_OP;
}

struct words {
    uint32_t count;
    uint32_t start[4], len[4];
};

/* Splits [at, end) at blanks. -REFUSED_PARSER: a stray CR, or more than four words. */
static int split_words(const uint8_t *buf, uint32_t at, uint32_t end, struct words *ret_words)
{
    ret_words->count = 0;
    for (;;) {
        uint32_t n = ret_words->count, start;

        while (at < end && is_blank(buf[at]))
            at++;
        if (at == end)
            return 0;
        if (n == 4)
            return -REFUSED_PARSER;
        start = at;
        while (at < end && !is_blank(buf[at]))
            if (buf[at++] == '\r')
                return -REFUSED_PARSER;
        ret_words->start[n] = start;
        ret_words->len[n] = at - start;
        ret_words->count = n + 1;
    }
}

/* A decimal number of at most digits_max digits. Returns 1, or 0 when it is not one. */
static int parse_number(const uint8_t *s, uint32_t len, uint32_t digits_max, uint64_t *ret_value)
{
    uint64_t value = 0;

    if (len == 0 || len > digits_max)
        return 0;
    for (uint32_t i = 0; i < len; i++) {
        if (!is_digit(s[i]))
            return 0;
        value = value * 10 + (uint64_t)(s[i] - '0');
    }
    *ret_value = value;
    return 1;
}

static int parse_size(const uint8_t *buf, const struct words *w, uint32_t i, uint32_t *ret_size)
{
    uint64_t value;

    if (!parse_number(buf + w->start[i], w->len[i], NATS_SIZE_DIGITS_MAX, &value))
        return -REFUSED_PARSER;
    *ret_size = (uint32_t)value;
    return 0;
}

/* PUB subject [reply] size; HPUB subject [reply] header-size total-size. */
static int parse_publish(const uint8_t *buf, const struct words *w,
                         const struct frame_limits *limits, struct frame *f)
{
    uint32_t sizes = f->verb == NATS_HPUB ? 2 : 1;

    if (f->verb == NATS_HPUB && !limits->headers)
        return -REFUSED_HEADERS;
    if (w->count != 1 + sizes && w->count != 2 + sizes)
        return -REFUSED_PARSER;
    f->subject = w->start[0];
    f->subject_len = (uint16_t)w->len[0];
    if (w->count == 2 + sizes) {
        f->reply = w->start[1];
        f->reply_len = (uint16_t)w->len[1];
    }
    if (parse_size(buf, w, w->count - 1, &f->total_len) < 0)
        return -REFUSED_PARSER;
    if (sizes == 2 && parse_size(buf, w, w->count - 2, &f->header_len) < 0)
        return -REFUSED_PARSER;
    if (f->header_len > f->total_len)
        return -REFUSED_PARSER;
    if (f->total_len > limits->max_payload)
        return -REFUSED_PAYLOAD;
    if (limits->pedantic && !subject_valid(buf + f->subject, f->subject_len, 0))
        f->flags = FRAME_BAD_SUBJECT;
    f->body = (uint32_t)f->bytes;
    f->bytes += (uint64_t)f->total_len + 2;
    return 0;
}

static int set_sid(const struct words *w, uint32_t i, struct frame *f)
{
    f->sid = w->start[i];
    f->sid_len = (uint16_t)w->len[i];
    return 0;
}

/* SUB subject [queue] sid. */
static int parse_sub(const uint8_t *buf, const struct words *w, struct frame *f)
{
    if (w->count != 2 && w->count != 3)
        return -REFUSED_PARSER;
    f->subject = w->start[0];
    f->subject_len = (uint16_t)w->len[0];
    if (w->count == 3) {
        f->queue = (uint16_t)w->start[1];
        f->queue_len = (uint16_t)w->len[1];
    }
    if (!subject_valid(buf + f->subject, f->subject_len, 1))
        f->flags = FRAME_BAD_SUBJECT;
    return set_sid(w, w->count - 1, f);
}

/* UNSUB sid [max]. */
static int parse_unsub(const uint8_t *buf, const struct words *w, struct frame *f)
{
    if (w->count != 1 && w->count != 2)
        return -REFUSED_PARSER;
    if (w->count == 2)
        (void)parse_number(buf + w->start[1], w->len[1], 18, &f->max_msgs);
    return set_sid(w, 0, f);
}

static int parse_line(const uint8_t *buf, uint64_t len, const struct frame_limits *limits,
                      struct frame *f)
{
    uint64_t line_max = (uint64_t)limits->max_control_line + NATS_LINE_SLACK;
    const struct operation *o;
    const uint8_t *newline;
    struct words words;
    uint32_t end;
    int r;

    memset(f, 0, sizeof *f);
    r = find_operation(buf, len, &o);
    if (r <= 0)
        return r;
    if (line_max > NATS_LINE_MAX)
        line_max = NATS_LINE_MAX;
    newline = memchr(buf, '\n', len < line_max ? len : line_max);
    if (!newline)
        return len < line_max ? 0 : -REFUSED_CONTROL_LINE;
    end = (uint32_t)(newline - buf);
    f->bytes = (uint64_t)end + 1;
    f->op = o->op;
    f->verb = o->verb;
    if (end > o->len && buf[end - 1] == '\r')
        end--;
    switch (f->verb) {
    case NATS_PUB:
    case NATS_HPUB:
    case NATS_SUB:
    case NATS_UNSUB:
        r = split_words(buf, o->len, end, &words);
        break;
    case NATS_CONNECT:
    case NATS_INFO:
        f->args = o->len;
        while (f->args < end && is_blank(buf[f->args]))
            f->args++;
        f->args_len = end - f->args;
        return 1;
    default: /* whatever follows PING, PONG and +OK on the line is ignored */
        return 1;
    }
    if (r < 0)
        return r;
    if (f->op == FRAME_SUBSCRIBE)
        r = parse_sub(buf, &words, f);
    else if (f->op == FRAME_UNSUBSCRIBE)
        r = parse_unsub(buf, &words, f);
    else
        r = parse_publish(buf, &words, limits, f);
    if (r < 0)
        return r;
    if (!f->body)
        return 1;
    return finish_body(buf, len, f->bytes - 2);
}

/* One frame: 1, 0 or -enum refusal. */
static inline int parse_one(const uint8_t *buf, uint64_t len, const struct frame_limits *limits, uint64_t usual_max,
                            struct frame *ret_frame)
{
    /* "PUB " and "HPUB " in either case. Setting that bit makes a 'p' only of 'P' and 'p', and
     * so on; the blank is compared as it is. */
    if (len >= 4 && (load32(buf) | 0x00202020u) == 0x20627570u)
        return parse_usual(buf, len, limits, usual_max, ret_frame, 0);
    if (len >= 5 && (load32(buf) | 0x20202020u) == 0x62757068u && buf[4] == ' ')
        return parse_hpub(buf, len, limits, usual_max, ret_frame);
    return parse_line(buf, len, limits, ret_frame);
}

/* Whether the frame at `p` has the control line of the one before it, `f`, and is whole. Most that
 * have not differ in the last bytes, the end of the subject and the size: a line has eight at least. */
static inline int is_repeat(const uint8_t *p, uint64_t len, const struct frame *f)
{
    const uint8_t *end = p + f->body;

    return len >= f->bytes && memcmp(end - 8, end - 8 - f->bytes, 8) == 0 && memcmp(p, p - f->bytes, f->body) == 0 &&
           load16(p + f->bytes - 2) == CRLF;
}

uint32_t nats_parse(const uint8_t *buf, uint64_t len, const struct frame_limits *limits, struct frame *ret_frames,
                    uint32_t most, int *ret_status)
{
    struct frame *f = ret_frames, *last = ret_frames + most;
    const uint8_t *end = buf + len;
    uint64_t usual_max = usual_line(limits);
    const int repeats = limits->repeats;
    int status = 1;

    while (f < last && buf < end) {
        status = parse_one(buf, (uint64_t)(end - buf), limits, usual_max, f);
        if (status <= 0)
            break;
        buf += f->bytes;
        if (repeats && f->flags == FRAME_USUAL && !f->header_len && !f->reply_len &&
            is_repeat(buf, (uint64_t)(end - buf), f)) {
            uint32_t count = 0;

            do
                buf += f->bytes;
            while (++count < UINT16_MAX && is_repeat(buf, (uint64_t)(end - buf), f));
            f->repeats = (uint16_t)count;
        }
        if (f++->op == FRAME_CONNECT)
            break;
    }
    *ret_status = status;
    return (uint32_t)(f - ret_frames);
}

const uint8_t *nats_next_field(const uint8_t *at, const uint8_t *end, const char *prefix, uint32_t prefix_len,
                               struct field *ret_field)
{
    while (at && at + prefix_len + 1 < end) {
        const uint8_t *line = at, *stop = memchr(line, '\n', (size_t)(end - line)), *value;

        if (!stop)
            return NULL;
        at = stop + 1;
        if (memcmp(line, prefix, prefix_len) != 0)
            continue;
        value = memchr(line, ':', (size_t)(stop - line));
        ret_field->name = line;
        ret_field->name_len = value ? (uint32_t)(value - line) : 0;
        value = value ? value + 1 : stop;
        while (value < stop && is_blank(*value))
            value++;
        while (stop > value && (is_blank(stop[-1]) || stop[-1] == '\r'))
            stop--;
        ret_field->value = value;
        ret_field->value_len = (uint32_t)(stop - value);
        return at;
    }
    return NULL;
}
