/*
 * Redis publish and subscribe (RESP 2), as far as a load needs it: SUBSCRIBE, PUBLISH, PING.
 *
 * Nothing here is kept between calls. A crash leaves nothing.
 *
 * A publisher pipelines: it does not wait for the answer to a PUBLISH (":n", how many got it), but it
 * reads them. A subscriber gets arrays: "message", channel, body; "subscribe", channel, number; "pong",
 * nothing.
 */
#include <stdio.h>
#include <string.h>

#include "loadgen.h"

static void redis_begin(struct hello *h)
{
    (void)h;
}

static void redis_subscribe(struct hello *h, const char *subject, const char *queue, uint32_t sid)
{
    (void)queue, (void)sid;
    hello_print(h, "*2\r\n$9\r\nSUBSCRIBE\r\n$%zu\r\n%s\r\n", strlen(subject), subject);
}

static void redis_publish(struct hello *h, const char *subject, size_t frame_bytes)
{
    (void)h, (void)subject, (void)frame_bytes;
}

static size_t redis_frame_head(char *ret_, size_t size, const char *subject, const char *reply,
                               uint32_t body)
{
    (void)reply;
    return (size_t)snprintf(ret_, size, "*3\r\n$7\r\nPUBLISH\r\n$%zu\r\n%s\r\n$%u\r\n",
                            strlen(subject), subject, body);
}

/* Finds the end of the line at `at` (behind its CR LF); NULL if it is not there yet. */
static const char *line_end(struct conn *c, const char *at, const char *end)
{
    const char *newline = memchr(at, '\n', (size_t)(end - at));
    if (!newline) {
        if (end - at > (ptrdiff_t)LINE_BYTES_MAX)
            conn_lost(c, "not understood: a line without end");
        return NULL;
    }
    if (newline == at || newline[-1] != '\r')
        conn_lost(c, "not understood: a line without CR");
    return newline + 1;
}

/* Reads "$n" at `at`: where its text begins and how long that is; NULL if it is not there yet. */
static const char *bulk_read(struct conn *c, const char *at, const char *end, uint32_t *ret_length)
{
    const char *text = at < end ? line_end(c, at, end) : NULL;
    if (!text)
        return NULL;
    if (*at != '$' || !number_parse(at + 1, text - 2, ret_length))
        conn_puzzled(c, at, (size_t)(text - 2 - at));
    return text;
}

static ssize_t array_take(struct conn *c, const char *array, const char *at, const char *end)
{
    uint32_t kind_len, channel_len, body_len;
    const char *kind = bulk_read(c, at, end, &kind_len), *channel, *body;
    if (!kind || end - kind < (ptrdiff_t)kind_len + 2)
        return HEAD_UNFINISHED;
    channel = bulk_read(c, kind + kind_len + 2, end, &channel_len);
    if (!channel || end - channel < (ptrdiff_t)channel_len + 2)
        return HEAD_UNFINISHED;
    if (kind_len == 4 && memcmp(kind, "pong", 4) == 0) {
        conn_ponged(c);
        return channel + channel_len + 2 - array;
    }
    at = channel + channel_len + 2;
    if (kind_len == 9 && memcmp(kind, "subscribe", 9) == 0) {
        const char *after = at < end ? line_end(c, at, end) : NULL;
        return after ? after - array : HEAD_UNFINISHED;
    }
    if (kind_len != 7 || memcmp(kind, "message", 7) != 0)
        conn_puzzled(c, kind, kind_len);
    body = bulk_read(c, at, end, &body_len);
    if (!body)
        return HEAD_UNFINISHED;
    if (body_len > BODY_BYTES_MAX)
        conn_lost(c, "not understood: a message larger than any that was sent");
    c->head_len = (uint32_t)(body - array);
    c->size = body_len;
    c->sid = 1;
    c->reply_len = 0;
    head_remember(c, array);
    return HEAD_MESSAGE;
}

static ssize_t redis_head(struct conn *c, const char *at, size_t left)
{
    const char *end = at + left, *after = line_end(c, at, end);
    if (!after)
        return HEAD_UNFINISHED;
    switch (*at) {
    case '*':
        return array_take(c, at, after, end);
    case ':':
        c->answers++;
        break;
    case '+':
        conn_ponged(c);
        break;
    default:
        conn_puzzled(c, at, (size_t)(after - 2 - at));
    }
    return after - at;
}

const struct protocol PROTOCOL_REDIS = {
    .name = "redis",
    .ping = "PING\r\n",
    .ping_len = 6,
    .end_bytes = 2,
    .throughput_only = true,
    .frame_head = redis_frame_head,
    .hello_begin = redis_begin,
    .hello_subscribe = redis_subscribe,
    .hello_publish = redis_publish,
    .head = redis_head,
};
