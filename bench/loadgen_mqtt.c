/*
 * MQTT 3.1.1 at QoS 0, as far as a load needs it: CONNECT with a clean session and an identifier that
 * the broker chooses, SUBSCRIBE, PUBLISH, PINGREQ.
 *
 * Nothing here is kept between calls. A crash leaves nothing.
 *
 * A packet is one byte of type and flags, its remaining length in groups of seven bits, the rest. A
 * topic is two bytes of length and its text; what follows it in a PUBLISH of QoS 0 is the body.
 */
#include <stdio.h>
#include <string.h>

#include "loadgen.h"

enum { CONNACK = 0x20, PUBLISH = 0x30, SUBSCRIBE = 0x82, SUBACK = 0x90, PINGRESP = 0xd0 };

#define LENGTH_BYTES_MAX 4u   /* groups of seven bits in a remaining length */

static size_t length_write(char *at, size_t length)
{
    size_t n = 0;
    do {
        unsigned group = length & 127u;
        length >>= 7;
        at[n++] = (char)(group | (length ? 128u : 0u));
    } while (length);
    return n;
}

static size_t text_write(char *at, const char *text)
{
    size_t length = strlen(text);
    at[0] = (char)(length >> 8);
    at[1] = (char)length;
    memcpy(at + 2, text, length);
    return length + 2;
}

static void mqtt_begin(struct hello *h)
{
    /* Protocol level 4, clean session, no keep-alive, no identifier. */
    static const char connect[] = "\x10\x0c\x00\x04MQTT\x04\x02\x00\x00\x00\x00";
    hello_add(h, connect, sizeof connect - 1);
}

static void mqtt_subscribe(struct hello *h, const char *subject, const char *queue, uint32_t sid)
{
    char packet[256];
    (void)queue;
    packet[0] = (char)SUBSCRIBE;
    size_t at = 1 + length_write(packet + 1, strlen(subject) + 5);
    packet[at++] = (char)(sid >> 8);
    packet[at++] = (char)sid;
    at += text_write(packet + at, subject);
    packet[at++] = 0;
    hello_add(h, packet, at);
}

static void mqtt_publish(struct hello *h, const char *subject, size_t frame_bytes)
{
    (void)h, (void)subject, (void)frame_bytes;
}

static size_t mqtt_frame_head(char *ret_, size_t size, const char *subject, const char *reply,
                              uint32_t body)
{
    (void)reply, (void)size;
    ret_[0] = PUBLISH;
    size_t at = 1 + length_write(ret_ + 1, strlen(subject) + 2 + body);
    return at + text_write(ret_ + at, subject);
}

/* The packets that confirm; each says whether it does. */
static void packet_take(struct conn *c, unsigned type, const char *rest, size_t length)
{
    if (type == CONNACK) {
        if (length < 2 || rest[1] != 0)
            conn_lost(c, "CONNACK refuses the connection");
    } else if (type == SUBACK) {
        if (length < 3 || (unsigned char)rest[2] > 2)
            conn_lost(c, "SUBACK refuses the subscription");
    } else if (type == PINGRESP) {
        conn_ponged(c);
    } else {
        conn_lost(c, "not understood: an MQTT packet that nobody asked for");
    }
}

static ssize_t mqtt_head(struct conn *c, const char *at, size_t left)
{
    unsigned type = (unsigned char)at[0];
    size_t length = 0, n = 1;
    for (;; n++) {
        if (n == left)
            return HEAD_UNFINISHED;
        length |= (size_t)((unsigned char)at[n] & 127u) << (7 * (n - 1));
        if (!((unsigned char)at[n] & 128u))
            break;
        if (n == LENGTH_BYTES_MAX)
            conn_lost(c, "not understood: a remaining length of more than four bytes");
    }
    n++;
    if (type != PUBLISH) {
        if (left < n + length)
            return HEAD_UNFINISHED;
        packet_take(c, type, at + n, length);
        return (ssize_t)(n + length);
    }
    if (left < n + 2)
        return HEAD_UNFINISHED;
    size_t topic = (size_t)(unsigned char)at[n] << 8 | (unsigned char)at[n + 1];
    if (topic + 2 > length || length - topic - 2 > BODY_BYTES_MAX)
        conn_lost(c, "not understood: a PUBLISH whose topic does not fit");
    if (left < n + 2 + topic)
        return HEAD_UNFINISHED;
    c->head_len = (uint32_t)(n + 2 + topic);
    c->size = (uint32_t)(length - topic - 2);
    c->sid = 1;
    c->reply_len = 0;
    head_remember(c, at);
    return HEAD_MESSAGE;
}

const struct protocol PROTOCOL_MQTT = {
    .name = "mqtt",
    .ping = "\xc0\x00",
    .ping_len = 2,
    .throughput_only = true,
    .frame_head = mqtt_frame_head,
    .hello_begin = mqtt_begin,
    .hello_subscribe = mqtt_subscribe,
    .hello_publish = mqtt_publish,
    .head = mqtt_head,
};
