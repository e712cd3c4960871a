/*
 * Pre-built frames: a publisher owns one buffer of many equal PUB frames. To send the next batch only
 * the sequence numbers (and, with many subjects, six digits of the subject) are patched in place and
 * the whole buffer goes out with one send(2).
 *
 * Created by publisher_init(), written by publisher_fill(), and only while the connection has
 * no unsent bulk. Invariants: every frame has the same length; `sent` only grows
 * and counts frames given to the connection. A crash leaves nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loadgen.h"

/* The bytes after the body head: the same in every body, so that --verify is one comparison. */
const char *body_fill(void)
{
    static char *fill;
    if (!fill) {
        fill = allocate(BODY_BYTES_MAX, 1);
        for (uint32_t i = 0; i < BODY_BYTES_MAX; i++)
            fill[i] = (char)('a' + i % 23);
    }
    return fill;
}

/* About what one message occupies on the wire and in a server's buffers. */
uint64_t frame_bytes_of(uint32_t size)
{
    return (uint64_t)size + 32;
}

static char thousand[1000][3];

/* Three digits. */
void digits_patch(char *at, uint32_t value)
{
    memcpy(at, thousand[value], 3);
}

void publisher_init(struct publisher *p, const struct options *opt, const char *subject,
                    uint32_t subject_index, const char *reply)
{
    char line[256];
    const struct protocol *protocol = opt->protocol;
    p->size = opt->size;
    p->subject = subject_index;
    p->body_offset = protocol->frame_head(line, sizeof line, subject, reply, opt->size);
    p->frame_bytes = p->body_offset + opt->size + protocol->end_bytes;
    p->batch_frames = (uint32_t)(BATCH_BYTES / p->frame_bytes);
    if (p->batch_frames == 0)
        p->batch_frames = 1;
    p->frames = allocate(p->batch_frames, p->frame_bytes);
    p->many = opt->subject_mode == SUBJECT_MANY && strncmp(subject, "load.", 5) == 0;
    p->subjects = opt->subjects;
    p->digits_offset = strlen("PUB load.");
    for (int i = 0; i < 1000; i++)
        for (int digit = 2, rest = i; digit >= 0; digit--, rest /= 10)
            thousand[i][digit] = (char)('0' + rest % 10);
    for (uint32_t i = 0; i < p->batch_frames; i++) {
        char *frame = p->frames + i * p->frame_bytes, *body = frame + p->body_offset;
        memcpy(frame, line, p->body_offset);
        if (opt->size >= sizeof(struct body_head)) {
            struct body_head head = {BODY_MAGIC ^ subject_index, p->conn.index, 0};
            memcpy(body, &head, sizeof head);
            memcpy(body + sizeof head, body_fill(), opt->size - sizeof head);
        } else {
            memcpy(body, body_fill(), opt->size);
        }
        memcpy(body + opt->size, "\r\n", protocol->end_bytes);
    }
    /* Any odd multiple keeps the states of different publishers apart; zero is not allowed. */
    p->random = (opt->seed + 1) * 0x9e3779b97f4a7c15u + (uint64_t)p->conn.index * 0x2545f4914f6cdd1du;
    if (p->random == 0)
        p->random = 1;
}

static uint32_t subject_choose(struct publisher *p)
{
    uint64_t x = p->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    p->random = x;
    return (uint32_t)(((x >> 32) * p->subjects) >> 32);
}

/* Greets for a publisher; `subscribe` is a subject it also listens to, or empty. */
void publisher_hello(struct publisher *p, const char *subject, const char *subscribe)
{
    const struct protocol *protocol = p->conn.hub->opt->protocol;
    struct hello hello = {0};
    protocol->hello_begin(&hello);
    if (*subscribe)
        protocol->hello_subscribe(&hello, subscribe, "", 1);
    protocol->hello_publish(&hello, subject, p->frame_bytes);
    hello_end(&hello, protocol);
    hello_give(&hello, &p->conn);
}

/* Patches up to `count` frames and hands them to the connection as bulk; returns how many. */
uint64_t publisher_fill(struct publisher *p, uint64_t count)
{
    if (count > p->batch_frames)
        count = p->batch_frames;
    char *frame = p->frames;
    bool sequenced = p->size >= sizeof(struct body_head);
    for (uint64_t i = 0; i < count; i++, frame += p->frame_bytes) {
        char *body = frame + p->body_offset;
        uint64_t sequence = p->sent + i;
        if (p->many) {
            uint32_t subject = subject_choose(p), tag = BODY_MAGIC ^ subject;
            digits_patch(frame + p->digits_offset, subject / 1000);
            digits_patch(frame + p->digits_offset + 3, subject % 1000);
            if (sequenced)
                memcpy(body + offsetof(struct body_head, tag), &tag, sizeof tag);
        }
        if (p->mixed) {
            uint32_t subject = mixed_subject(p->mixed, p->conn.index, sequence);
            uint32_t tag = BODY_MAGIC ^ subject;
            mixed_subject_patch(frame + p->digits_offset, subject);
            memcpy(body + offsetof(struct body_head, tag), &tag, sizeof tag);
        }
        if (sequenced)
            memcpy(body + offsetof(struct body_head, sequence), &sequence, sizeof sequence);
    }
    p->conn.bulk = p->frames;
    p->conn.bulk_len = count * p->frame_bytes;
    p->conn.bulk_pos = 0;
    p->sent += count;
    return count;
}
