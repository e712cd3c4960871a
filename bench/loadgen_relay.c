/*
 * What relay.c understands: SUB and PUB lines that say who gets whose bytes, then PING, which it
 * answers with PONG; from then on it copies. So a subscriber gets the publisher's PUB frames as they
 * are.
 *
 * Nothing here is kept between calls. A crash leaves nothing.
 */
#include <stdio.h>
#include <string.h>

#include "loadgen.h"

static void relay_begin(struct hello *h)
{
    (void)h;
}

static void relay_subscribe(struct hello *h, const char *subject, const char *queue, uint32_t sid)
{
    (void)queue, (void)sid;
    hello_print(h, "SUB %s\r\n", subject);
}

static void relay_publish(struct hello *h, const char *subject, size_t frame_bytes)
{
    hello_print(h, "PUB %s %zu\r\n", subject, frame_bytes);
}

/* "PUB subject [reply] size" (`end` is at the CR). */
static void head_parse(struct conn *c, const char *line, const char *end)
{
    const char *subject = line + 4, *space = memchr(subject, ' ', (size_t)(end - subject));
    const char *size = memrchr(subject, ' ', (size_t)(end - subject));
    if (!space || !number_parse(size + 1, end, &c->size) || c->size > BODY_BYTES_MAX)
        conn_puzzled(c, line, (size_t)(end - line));
    c->subject_len = (uint32_t)(space - subject);
    c->reply_off = space < size ? (uint32_t)(space + 1 - line) : 0;
    c->reply_len = space < size ? (uint32_t)(size - space - 1) : 0;
    c->sid = 1;
    c->head_len = (uint32_t)(end + 2 - line);
    head_remember(c, line);
}

static ssize_t relay_head(struct conn *c, const char *at, size_t left)
{
    const char *newline = memchr(at, '\n', left);
    if (!newline) {
        if (left > LINE_BYTES_MAX)
            conn_lost(c, "not understood: a line without end");
        return HEAD_UNFINISHED;
    }
    if (newline == at || newline[-1] != '\r')
        conn_lost(c, "not understood: a line without CR");
    if (newline + 1 - at == 6 && memcmp(at, "PONG", 4) == 0) {
        conn_ponged(c);
        return 6;
    }
    if (newline - at < 8 || memcmp(at, "PUB ", 4) != 0)
        conn_puzzled(c, at, (size_t)(newline - 1 - at));
    head_parse(c, at, newline - 1);
    return HEAD_MESSAGE;
}

static size_t relay_frame_head(char *ret_, size_t size, const char *subject, const char *reply,
                               uint32_t body)
{
    return PROTOCOL_NATS.frame_head(ret_, size, subject, reply, body);
}

const struct protocol PROTOCOL_RELAY = {
    .name = "relay",
    .end_bytes = 2,
    .frame_head = relay_frame_head,
    .hello_begin = relay_begin,
    .hello_subscribe = relay_subscribe,
    .hello_publish = relay_publish,
    .head = relay_head,
};
