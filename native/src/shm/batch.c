/* batch: sending and receiving batches through POSIX queues. See batch.h. */
#include "shm/batch.h"

#include "base/crash.h"

#include <errno.h>

void batch_ring_format(struct batch_ring *r)
{
    r->tail = batch_tail(1, BATCH_HEAD);
}

void batch_out_open(struct batch_out *o, struct batch_ring *r, mqd_t queue, uint8_t from)
{
    memset(o, 0, sizeof(*o));
    o->ring = r;
    o->queue = queue;
    o->from = from;
    o->seq = r->tail >> 16;
    o->bytes = (uint32_t)(r->tail & 0xffff);
}

static void close_batch(struct batch_out *o, uint64_t now_ns)
{
    struct batch *b = batch_slot(o->ring, o->seq);

    b->seq = o->seq;
    b->bytes = o->bytes;
    b->from = o->from;
    b->version = BATCH_VERSION;
    b->rounds = batch_rounds(o->passes, o->more);
    o->passes = 0;
    o->said_more = o->more;
    b->closed_ns = now_ns;
    b->trace_tag = o->trace_tag;
}

void batch_out_turn(struct batch_out *o, uint64_t now_ns)
{
    close_batch(o, now_ns);
    o->seq++;
    o->bytes = BATCH_HEAD;
    o->load = 0;
    o->marked = 0;
}

int batch_out_send(struct batch_out *o, enum batch_flush flush, uint64_t now_ns)
{
    uint64_t sent = atomic_load_explicit(&o->ring->sent, memory_order_relaxed);
    int count = 0;

    o->blocked = 0;
    for (;;) {
        uint64_t committed = o->ring->tail >> 16;

        if (sent + 1 >= committed) {
            /* Only the batch being filled is left. */
            if (flush == BATCH_CLOSED || o->seq != committed || batch_out_room(o) == 0)
                return count;
            if ((o->ring->tail & 0xffff) <= BATCH_HEAD && flush != BATCH_EMPTY)
                return count;
            flush = BATCH_FILLED;
            batch_out_turn(o, now_ns);
            batch_slot(o->ring, committed)->rounds |= BATCH_ROUND_ENDS;
            o->ring->tail = batch_tail(o->seq, o->bytes); /* "batch.close" */
            CRASH(BATCH_CLOSE);
            continue;
        }
        struct batch *b = batch_slot(o->ring, sent + 1);
        if (mq_send(o->queue, (const char *)b, b->bytes, 0) != 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                return -errno;
            o->blocked = 1;
            return count;
        }
        CRASH(BATCH_TAKEN);
        sent++;
        atomic_store_explicit(&o->ring->sent, sent, memory_order_release); /* "batch.sent" */
        CRASH(BATCH_SENT);
        count++;
    }
}

int batch_in_receive(struct batch_inbox *in, mqd_t queue, uint64_t done)
{
    for (;;) {
        atomic_store_explicit((_Atomic uint64_t *)&in->batch.seq, 0, memory_order_release);
        CRASH(BATCH_EXPECT);
        ssize_t got = mq_receive(queue, (char *)&in->batch, BATCH_BYTES, NULL);

        if (got < 0) {
            if (errno == EINTR)
                continue;
            return errno == EAGAIN ? 0 : -errno;
        }
        if ((size_t)got < BATCH_HEAD || in->batch.bytes != (uint32_t)got ||
            in->batch.version != BATCH_VERSION)
            return -EBADMSG;
        if (in->batch.seq <= done)
            continue; /* resent after a crash of the sender */
        CRASH(BATCH_RECEIVED);
        return in->batch.seq == done + 1 ? 1 : -EBADMSG;
    }
}
