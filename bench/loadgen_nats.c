/*
 * The NATS client protocol, as far as a load needs it: INFO, CONNECT, SUB, PUB, MSG, PING, PONG, -ERR.
 * And what the protocols share: building the greeting.
 *
 * A greeting is created by a mode before it opens the connection that borrows it, and is not written
 * afterwards. Nothing here is kept between calls. A crash leaves nothing.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loadgen.h"

static const char CONNECT_LINE[] =
    "CONNECT {\"verbose\":false,\"pedantic\":false,\"echo\":true,\"headers\":true,"
    "\"no_responders\":true,\"lang\":\"c\",\"version\":\"" LOADGEN_VERSION "\",\"name\":\"loadgen\"}\r\n";

/* ---- greetings ------------------------------------------------------------------------------------- */

void hello_add(struct hello *h, const void *bytes, size_t length)
{
    if (h->length + length > h->capacity) {
        h->capacity = (h->length + length) * 2;
        h->data = realloc(h->data, h->capacity);
        if (!h->data)
            fail(EXIT_SERVER, "out of memory (%zu bytes)", h->capacity);
    }
    memcpy(h->data + h->length, bytes, length);
    h->length += length;
}

void hello_print(struct hello *h, const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    hello_add(h, line, (size_t)length);
}

/* The ping whose answer says that everything before it has been done. */
void hello_end(struct hello *h, const struct protocol *protocol)
{
    if (protocol->ping)
        hello_add(h, protocol->ping, protocol->ping_len);
    else
        hello_print(h, "PING\r\n");
}

void hello_give(const struct hello *h, struct conn *c)
{
    c->hello = h->data;
    c->hello_len = h->length;
}

const struct protocol *protocol_find(const char *name)
{
    static const struct protocol *const all[] = {&PROTOCOL_NATS, &PROTOCOL_MQTT, &PROTOCOL_REDIS,
                                                 &PROTOCOL_RELAY};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strcmp(name, all[i]->name) == 0)
            return all[i];
    fail(EXIT_USAGE, "--protocol: nats, mqtt, redis or relay, not \"%s\"", name);
}

/* ---- NATS ------------------------------------------------------------------------------------------ */

static void nats_begin(struct hello *h)
{
    hello_add(h, CONNECT_LINE, strlen(CONNECT_LINE));
}

static void nats_subscribe(struct hello *h, const char *subject, const char *queue, uint32_t sid)
{
    hello_print(h, "SUB %s%s%s %u\r\n", subject, *queue ? " " : "", queue, sid);
}

static void nats_publish(struct hello *h, const char *subject, size_t frame_bytes)
{
    (void)h, (void)subject, (void)frame_bytes;
}

static size_t nats_frame_head(char *ret_, size_t size, const char *subject, const char *reply,
                              uint32_t body)
{
    return (size_t)snprintf(ret_, size, "PUB %s%s%s %u\r\n", subject, *reply ? " " : "", reply, body);
}

/* Copies the value of "name":"value" out of an INFO line; leaves `ret_` empty if it is not there. */
static void info_field(const char *line, size_t length, const char *name, char *ret_, size_t size)
{
    const char *at = memmem(line, length, name, strlen(name));
    if (!at)
        return;
    at += strlen(name);
    const char *end = memchr(at, '"', (size_t)(line + length - at));
    if (!end || (size_t)(end - at) >= size)
        return;
    memcpy(ret_, at, (size_t)(end - at));
    ret_[end - at] = 0;
}

static bool starts(const char *line, size_t length, const char *word)
{
    return length >= strlen(word) && memcmp(line, word, strlen(word)) == 0;
}

/* Everything but MSG. `length` is without CR LF. */
static void control_line(struct conn *c, const char *line, size_t length)
{
    if (starts(line, length, "INFO")) {
        if (c->state != CONN_INFO)
            return;
        if (!c->hub->server_version[0]) {
            info_field(line, length, "\"midair\":\"", c->hub->server_version,
                       sizeof c->hub->server_version);
            if (!c->hub->server_version[0]) /* that of a Midair is the nats-server it corresponds to */
                info_field(line, length, "\"version\":\"", c->hub->server_version,
                           sizeof c->hub->server_version);
            info_field(line, length, "\"server_name\":\"", c->hub->server_name,
                       sizeof c->hub->server_name);
        }
        conn_greet(c);
    } else if (starts(line, length, "PING")) {
        conn_queue(c, "PONG\r\n", 6);
        conn_write(c);
    } else if (starts(line, length, "PONG")) {
        conn_ponged(c);
    } else if (starts(line, length, "-ERR")) {
        char why[256];
        snprintf(why, sizeof why, "%.*s", (int)(length < 200 ? length : 200), line);
        conn_lost(c, why);
    } else if (starts(line, length, "HMSG")) {
        conn_lost(c, "a message with headers came, and none was sent (no responders?)");
    } else if (!starts(line, length, "+OK")) {
        conn_puzzled(c, line, length);
    }
}

/* Parses "MSG subject sid [reply] size" (`end` is at the CR) into the connection's head. */
static void head_parse(struct conn *c, const char *line, const char *end)
{
    const char *at = line + 4, *words[4], *ends[4];
    uint32_t count = 0;
    for (; count < 4 && at < end; count++) {
        words[count] = at;
        const char *space = memchr(at, ' ', (size_t)(end - at));
        ends[count] = space ? space : end;
        at = space ? space + 1 : end;
    }
    if (at != end || count < 3 || !number_parse(words[1], ends[1], &c->sid) ||
        !number_parse(words[count - 1], ends[count - 1], &c->size) || c->size > BODY_BYTES_MAX) {
        conn_lost(c, "not understood: a MSG line that is not \"MSG subject sid [reply] size\"");
    }
    c->subject_len = (uint32_t)(ends[0] - words[0]);
    c->reply_off = count == 4 ? (uint32_t)(words[2] - line) : 0;
    c->reply_len = count == 4 ? (uint32_t)(ends[2] - words[2]) : 0;
    c->head_len = (uint32_t)(end + 2 - line);
    head_remember(c, line);
}

static ssize_t nats_head(struct conn *c, const char *at, size_t left)
{
    const char *newline = memchr(at, '\n', left);
    if (!newline) {
        if (left > LINE_BYTES_MAX)
            conn_lost(c, "not understood: a line without end");
        return HEAD_UNFINISHED;
    }
    if (newline == at || newline[-1] != '\r')
        conn_lost(c, "not understood: a line without CR");
    if (newline - at < 4 || memcmp(at, "MSG ", 4) != 0) {
        control_line(c, at, (size_t)(newline - 1 - at));
        return newline + 1 - at;
    }
    head_parse(c, at, newline - 1);
    return HEAD_MESSAGE;
}

const struct protocol PROTOCOL_NATS = {
    .name = "nats",
    .greets = true,
    .ping = "PING\r\n",
    .ping_len = 6,
    .end_bytes = 2,
    .frame_head = nats_frame_head,
    .hello_begin = nats_begin,
    .hello_subscribe = nats_subscribe,
    .hello_publish = nats_publish,
    .head = nats_head,
};
