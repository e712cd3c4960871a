/* parser: holds the NATS parser to what protocol.h says of every protocol, for AFL++ to break.
 *
 * An input is a head of HEAD_BYTES and the bytes that a client sends:
 *
 *   0      bit 0 pedantic, bit 1 headers, bit 2 repeats; bits 3 to 5 choose max_control_line, bits 6
 *          and 7 max_payload, from the tables below
 *   1      how many frames parse() may return at once, less one, modulo PROTOCOL_FRAMES
 *   2 to 5 where the stream is cut: the lengths of its pieces less one, again from the first after the
 *          last
 *
 * The stream is parsed three times: whole, in pieces as a connection gets them, and frame by frame
 * by a parser that is told to judge subjects, which sends every frame the long way round. What the
 * three say has to be the same, and what is said of a frame has to lie within it. Each buffer is as
 * long as its bytes, so that ASan sees one that is read past them. What can be delivered is written as
 * it is delivered.
 *
 * Built for AFL++ it takes inputs from shared memory, many in one process. Built by any other compiler
 * it takes files: `parser FILE...`.
 */
#include "base/put.h"
#include "protocol/nats/nats.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HEAD_BYTES 6
#define FRAMES_MAX 4096    /* frames of one input that are compared */
#define INPUT_BYTES_MAX (1 << 20)

static const uint32_t control_lines[8] = {4096, 0, 8, 18, 58, 64, 1024, UINT32_MAX};
static const uint32_t payloads[4] = {1048576, 0, 64, UINT32_MAX};

#define BROKEN(...) (fprintf(stderr, "parser: " __VA_ARGS__), fputc('\n', stderr), abort())

/* What was found in a stream, one frame after the other. */
struct story {
    uint32_t count;
    int refused;   /* 0: not; else -enum refusal of the frame behind the last */
    uint64_t used; /* bytes of the frames */
    struct frame frames[FRAMES_MAX];
    uint64_t at[FRAMES_MAX];
};

static struct story whole, pieces, plain;

/* A copy that ends where its bytes end. */
static uint8_t *exact(const uint8_t *bytes, uint64_t len)
{
    uint8_t *copy = malloc(len ? len : 1);

    if (!copy)
        BROKEN("no memory");
    if (len)
        memcpy(copy, bytes, len);
    return copy;
}

static void within(const struct frame *f, const char *what, uint64_t at, uint64_t len)
{
    uint64_t end = f->op == FRAME_MESSAGE ? f->body : f->bytes;

    if (len && (at == 0 || at + len > end))
        BROKEN("%s is at %lu, %lu bytes, of a line of %lu", what, at, len, end);
}

/* A frame whose control line is known: every offset lies in it. */
static void check_frame(const struct frame *f, const struct frame_limits *limits)
{
    uint64_t line = f->op == FRAME_MESSAGE ? f->body : f->bytes;

    if (f->op < FRAME_MESSAGE || f->op > FRAME_NOTHING)
        BROKEN("operation %u", f->op);
    if (line > (uint64_t)limits->max_control_line + NATS_LINE_SLACK || line > NATS_LINE_MAX)
        BROKEN("a line of %lu bytes", line);
    within(f, "subject", f->subject, f->subject_len);
    within(f, "reply", f->reply, f->reply_len);
    within(f, "queue group", f->queue, f->queue_len);
    within(f, "sid", f->sid, f->sid_len);
    within(f, "arguments", f->args, f->args_len);
    if (f->sid_len > protocol_nats.sid_max)
        BROKEN("a sid of %u bytes", f->sid_len);
    if (f->op != FRAME_MESSAGE)
        return;
    if (!f->subject_len || f->total_len > limits->max_payload || f->header_len > f->total_len ||
        f->bytes != (uint64_t)f->body + f->total_len + 2)
        BROKEN("a message of %u bytes, headers %u, in %lu from %u", f->total_len, f->header_len, f->bytes, f->body);
    if ((f->header_len || f->verb == NATS_HPUB) && !limits->headers)
        BROKEN("headers that were not agreed");
}

/* What a frame is, whichever way it went through the parser. */
static struct frame known(const struct frame *f)
{
    struct frame g = *f;

    g.repeats = 0;
    g.flags = f->op == FRAME_SUBSCRIBE ? f->flags : 0;
    return g;
}

static void same(const struct frame *f, const struct frame *g, const char *how)
{
    struct frame a = known(f), b = known(g);

    if (memcmp(&a, &b, sizeof a) != 0)
        BROKEN("a frame of %lu bytes at its line end %u (op %u) %s is one of %lu, %u (op %u)", f->bytes, f->body, f->op,
               how, g->bytes, g->body, g->op);
}

/* What a client agrees to may change with a CONNECT: here its length says so. */
static void agree(const struct frame *f, struct frame_limits *limits)
{
    if (f->op != FRAME_CONNECT)
        return;
    limits->pedantic ^= f->args_len & 1;
    limits->headers ^= f->args_len >> 1 & 1;
}

static void add(struct story *s, const struct frame *f)
{
    if (s->count < FRAMES_MAX) {
        s->frames[s->count] = *f;
        s->at[s->count] = s->used;
        s->count++;
    }
    s->used += f->bytes;
}

/* Frames of `len` bytes, that the parser has not seen the end of. 1: go on, 0: wait for more. */
static int take(struct story *s, const uint8_t *bytes, uint64_t len, struct frame_limits *limits, uint32_t most,
                struct frame *announced)
{
    uint8_t *buf = exact(bytes, len);
    struct frame frames[PROTOCOL_FRAMES + 1];
    uint64_t from = 0, start = s->used;
    int status = 0;

    while (from < len) {
        uint32_t count;

        memset(frames, 0xa5, sizeof frames);
        count = nats_parse(buf + from, len - from, limits, frames, most, &status);
        if (count > most)
            BROKEN("%u frames, at most %u were asked for", count, most);
        if (status < -REFUSALS || status > 1)
            BROKEN("status %d", status);
        for (uint32_t i = 0; i < count; i++) {
            struct frame *f = &frames[i];

            check_frame(f, limits);
            if (i == 0 && announced->bytes)
                same(announced, f, "as announced");
            announced->bytes = 0;
            if (f->repeats && !limits->repeats)
                BROKEN("repeats that were not asked for");
            for (uint32_t n = 0; n <= f->repeats; n++)
                add(s, f);
            agree(f, limits);
            if (f->op == FRAME_CONNECT && i + 1 < count)
                BROKEN("frames behind a CONNECT, whose limits are not known");
        }
        from = s->used - start;
        if (from > len)
            BROKEN("%lu bytes used of %lu", from, len);
        if (status == 0) {
            const struct frame *f = &frames[count];

            if (f->bytes) {
                check_frame(f, limits);
                if (f->bytes <= len - from)
                    BROKEN("a frame of %lu bytes is not whole in %lu", f->bytes, len - from);
                if (announced->bytes)
                    same(announced, f, "as announced before");
                *announced = *f;
            } else if (announced->bytes) {
                BROKEN("a frame that was announced is not known any more");
            }
            break;
        }
        if (status < 0) {
            s->refused = status;
            break;
        }
        if (!count)
            BROKEN("no frame, and nothing behind it");
    }
    free(buf);
    return status >= 0;
}

static void tell(struct story *s, const uint8_t *stream, uint64_t len, struct frame_limits limits, uint32_t most,
                 const uint8_t *cuts)
{
    struct frame announced = {0};
    uint64_t end = 0;
    uint32_t n = 0;

    s->count = 0;
    s->refused = 0;
    s->used = 0;
    do {
        end = cuts && end + cuts[n % 4] + 1u < len ? end + cuts[n % 4] + 1u : len;
        n++;
        if (!take(s, stream + s->used, end - s->used, &limits, most, &announced))
            break;
    } while (end < len);
}

static void compare(const struct story *s, const struct story *t, const char *how)
{
    if (s->count != t->count || s->used != t->used)
        BROKEN("%u frames, %lu bytes whole; %s %u, %lu", s->count, s->used, how, t->count, t->used);
    if (s->refused != t->refused)
        BROKEN("refused with %d whole, %s with %d", s->refused, how, t->refused);
    for (uint32_t i = 0; i < s->count; i++)
        same(&s->frames[i], &t->frames[i], how);
}

/* ---- what is delivered ---- */

struct seen {
    uint64_t words[6];
    uint32_t count;
};

/* The words of a delivered line, the numbers at its end as numbers: 007 is 7. */
static const uint8_t *read_line(const uint8_t *line, const uint8_t *end, uint32_t numbers, struct seen *ret)
{
    const uint8_t *p = line;
    const uint8_t *starts[7];

    ret->count = 0;
    for (;;) {
        if (ret->count == 6)
            BROKEN("a delivered line of more than six words");
        starts[ret->count++] = p;
        while (p < end && *p != ' ' && !(*p == '\r' && p + 1 < end && p[1] == '\n'))
            p++;
        if (p >= end)
            BROKEN("a delivered line without an end");
        if (*p == '\r')
            break;
        p++;
    }
    starts[ret->count] = p + 1;
    if (ret->count < numbers + 3)
        BROKEN("a delivered line of %u words", ret->count);
    for (uint32_t i = 0; i < ret->count; i++) {
        uint64_t value = 0;

        for (const uint8_t *c = starts[i]; c < starts[i + 1] - 1; c++)
            value = i < ret->count - numbers ? value * 31 + *c : value * 10 + (uint64_t)(*c - '0');
        ret->words[i] = value;
    }
    return p + 2;
}

/* The frame as it lies and the frame with a line of ours say the same. */
static void deliver(const uint8_t *p, const struct frame *f)
{
    static const char sid[PUT_TINY_MAX] = "7";
    static uint8_t first[NATS_LINE_MAX + 4096 + 2 * PROTOCOL_FRAME_MORE], second[sizeof first];
    struct message m = {p + f->subject, p + f->reply, f->subject_len, f->reply_len, f->header_len, f->total_len};
    uint32_t numbers = f->header_len ? 2 : 1, count;
    struct seen one, two;
    const uint8_t *end, *body;

    if (f->total_len > 4096)
        return;
    end = nats_put_message(second, &m, sid, 1);
    if (read_line(second, end, numbers, &two) != end)
        BROKEN("a delivered line does not end where it ends");
    if (!(f->flags & FRAME_USUAL))
        return;
    struct usual u = {
        .subject = p + f->subject,
        .subject_len = f->subject_len,
        .tail_len = (uint32_t)f->bytes - f->subject - f->subject_len,
        .headers = f->header_len != 0,
    };
    /* Subjects are copied by PUT_SHORT_MAX bytes: in the arena there is slack behind every frame. */
    uint8_t *slack = malloc(f->bytes + PUT_SHORT_MAX);
    if (!slack)
        BROKEN("no memory");
    memcpy(slack, p, f->bytes);
    memset(slack + f->bytes, 0, PUT_SHORT_MAX);
    u.subject = slack + f->subject;
    end = nats_put_run(first, first + sizeof first, &u, 1, sid, 1, &count);
    if (count != 1)
        BROKEN("a run that was not written");
    if ((uint64_t)(end - first) != protocol_nats.usual_more[u.headers] + u.subject_len + 1 + u.tail_len)
        BROKEN("%ld bytes delivered, %u were counted", (long)(end - first),
               protocol_nats.usual_more[u.headers] + u.subject_len + 1 + u.tail_len);
    body = read_line(first, end, numbers, &one);
    if (one.count != two.count || memcmp(one.words, two.words, one.count * sizeof *one.words) != 0)
        BROKEN("a message as it lies and one with a line of its own differ");
    if ((uint64_t)(end - body) != (uint64_t)f->total_len + 2 || memcmp(body, p + f->body, f->total_len + 2) != 0)
        BROKEN("the body is not delivered as it came");
    free(slack);
}

/* Header blocks: fields lie in them, and a field that is added stands before their end. */
static void headers(const uint8_t *p, const struct frame *f)
{
    static const char *const prefixes[] = {"", "Midair-"};
    static uint8_t out[256];
    uint8_t *block = exact(p + f->body, f->header_len);
    const uint8_t *end = block + f->header_len;
    struct field added = {(const uint8_t *)"Midair-Dropped", (const uint8_t *)"7", 14, 1};
    uint32_t kept;

    for (uint32_t i = 0; i < 2; i++) {
        const uint8_t *at = block;
        struct field field = {0};
        uint32_t n = (uint32_t)strlen(prefixes[i]);

        while ((at = nats_next_field(at, end, prefixes[i], n, &field))) {
            if (field.name < block || field.name + field.name_len > end || field.value < block ||
                field.value + field.value_len > end || at > end)
                BROKEN("a field outside of its block");
            if (memcmp(field.name, prefixes[i], n) != 0)
                BROKEN("a field of another name");
        }
    }
    if (nats_put_field(out, block, f->header_len, &added, &kept) && kept > f->header_len)
        BROKEN("%u bytes are kept of %u", kept, f->header_len);
    free(block);
}

static void run(const uint8_t *input, uint64_t size)
{
    struct frame_limits limits = {0};
    const uint8_t *stream = input + HEAD_BYTES;
    uint64_t len;
    uint32_t most;

    if (size < HEAD_BYTES)
        return;
    len = size - HEAD_BYTES;
    limits.pedantic = input[0] & 1;
    limits.headers = input[0] >> 1 & 1;
    limits.repeats = input[0] >> 2 & 1;
    limits.max_control_line = control_lines[input[0] >> 3 & 7];
    limits.max_payload = payloads[input[0] >> 6];
    most = input[1] % PROTOCOL_FRAMES + 1;

    tell(&whole, stream, len, limits, most, NULL);
    tell(&pieces, stream, len, limits, most, input + 2);
    compare(&whole, &pieces, "in pieces");
    struct frame_limits judging = limits;
    judging.pedantic = !judging.pedantic;
    judging.repeats = 0;
    tell(&plain, stream, len, judging, 1, NULL);
    compare(&whole, &plain, "the other way round");
    for (uint32_t i = 0; i < whole.count; i++) {
        const struct frame *f = &whole.frames[i];

        if (f->op != FRAME_MESSAGE)
            continue;
        deliver(stream + whole.at[i], f);
        if (f->header_len)
            headers(stream + whole.at[i], f);
    }
}

#ifdef __AFL_FUZZ_TESTCASE_LEN
__AFL_FUZZ_INIT();

int main(void)
{
    __AFL_INIT();
    uint8_t *input = __AFL_FUZZ_TESTCASE_BUF;

    while (__AFL_LOOP(20000)) {
        int len = __AFL_FUZZ_TESTCASE_LEN;

        if (len > 0)
            run(input, (uint64_t)len);
    }
    return 0;
}
#else
int main(int argc, char **argv)
{
    static uint8_t input[INPUT_BYTES_MAX];

    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");

        if (!file) {
            perror(argv[i]);
            return 2;
        }
        fprintf(stderr, "%s\n", argv[i]);
        run(input, fread(input, 1, sizeof input, file));
        fclose(file);
    }
    return 0;
}
#endif
