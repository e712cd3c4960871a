/* refer: the references of this connmgr, and when they leave. The only writer of them.
 *
 * The structure: the ring of references in the journal (batch.h), records.h.
 * Written by:   the connmgr, past the committed tail; they become valid with the step they are made in.
 * Invariants:   no function here fails: the caller has made sure of room (refer_have_room).
 *               What a batch stands for is bounded: CONNMGR_BATCH_BODIES bytes (refer_load), and the last message in
 *               it, however large that is; CONNMGR_BATCH_MESSAGES messages. What
 *               clients say is in CONNMGR_REFS_AHEAD batches of the ring at most, and those of a step that
 *               was to be repeated (DECIDE_BATCHES). What no client frame brings is in batches of its own,
 *               CONNMGR_DUE_AHEAD at most: it is never counted when it is asked whether clients may be read.
 * After a crash: what was not committed is overwritten. What is due is found again in the records. Which batches
 *               are large is not known: the last ones may be.
 *
 * So what waits for the router in front of a message is bounded in messages and in bytes, whatever the
 * others send: the batches of the ring, those in the queue, and the one that the router has.
 *
 * Large batches cost everybody less: each batch wakes the router, and the batch of orders that it makes wakes
 * others and is a write. A batch may be large (CONNMGR_LARGE_MESSAGES, CONNMGR_LARGE_BODIES) if it is alone in the
 * ring and fewer than CONNMGR_LARGE_MAX large ones may wait for the router: it keeps up. For each of these the ring
 * has one batch less: so all together stand for no more than others would.
 */
#ifndef MIDAIR_REFER_H
#define MIDAIR_REFER_H

#include "connmgr/connmgr.h"

/* What the bytes of a message count for in its batch, beside its reference. */
static inline uint32_t refer_load(uint32_t size) { return size / CONNMGR_LOAD_BYTES; }

/* Room for the references of any one frame: a reading connmgr stops well before the ring is full, so
 * that this fails only while the router is away, or slower than the clients. */
static inline int refer_have_room(const struct connmgr *cm) { return cm->port.refs.seq < cm->port.refs.end; }
static inline void refer_settle_room(struct connmgr *cm)
{
    uint64_t sent = atomic_load_explicit(&cm->port.log->refs.sent, memory_order_relaxed);

    cm->port.refs.end = sent + cm->due_count + CONNMGR_REFS_AHEAD - cm->large_count;
}

/* How many of `wanted` messages of that size may join the one that the reference of `bytes` is about: as many as the
 * batch it will be in may stand for. */
uint32_t refer_most(struct connmgr *cm, uint32_t bytes, uint32_t size, uint32_t wanted);

/* A message; `more` bytes are left free behind the texts. */
static inline struct ref_message *refer_message(struct connmgr *cm, const struct conn *c, uint64_t handle, uint32_t size,
                                                uint8_t flags, const struct refer_texts *t, uint32_t more)
{
    uint32_t bytes = ref_bytes(t->subject_len + t->reply_len) + more;
    struct ref_message *r = batch_out_append(&cm->port.refs, bytes, cm->now_ns);

    cm->port.refs.load += refer_load(size);

    r->type = REF_MESSAGE;
    r->flags = flags;
    r->subject_len = (uint16_t)t->subject_len;
    r->reply_len = (uint16_t)t->reply_len;
    r->bytes = (uint16_t)bytes;
    r->conn = c->slot;
    r->size = size;
    r->handle = handle;
    memcpy(r->text, t->subject, t->subject_len);
    if (t->reply_len)
        memcpy(r->text + t->subject_len, t->reply, t->reply_len);
    return r;
}

/* `more` messages of `size` bytes each, refer_most() at most, join the last one referred to, whose handles
 * follow its own: it is a run. */
void refer_join(struct connmgr *cm, struct ref_message *r, uint32_t more, uint32_t size);

void refer_mode(struct connmgr *cm, const struct conn *c, uint64_t handle, uint32_t size, uint8_t flags,
                const struct refer_texts *t, const struct ref_mode *mode, const char *topics);
/* The FRAME_SUBSCRIBE that lies at `p`. */
void refer_subscribe(struct connmgr *cm, const struct conn *c, uint32_t sub, const uint8_t *p, const struct frame *f);
void refer_unsubscribe(struct connmgr *cm, uint32_t conn, uint32_t sub, uint64_t max);
void refer_ping(struct connmgr *cm, const struct conn *c, uint16_t settle);

/* The references that no client frame brings, as far as there is room: a step of its own. What finds none
 * stays due: it is in the records of its connections and subscriptions. */
void refer_due(struct connmgr *cm);
void refer_sent(struct connmgr *cm); /* some batches have left */
static inline int refer_any_due(const struct connmgr *cm)
{
    return cm->sub_due_count || cm->asked_first != CONNMGR_NONE || cm->holds_due_count;
}

/* When a batch leaves. Each one sent may wake the router, which costs more than what is in a small one. */
enum refer_when {
    REFER_READING = BATCH_CLOSED,  /* after each connection that was read: batches that are full */
    REFER_ROUND = BATCH_FILLED,    /* nothing more to read now: also the one being filled */
    REFER_FLOOD_OVER = BATCH_EMPTY, /* the same, even if it is empty: other connmgrs wait for the word */
};
/* Batches sent, or a negative errno. Nothing uncommitted may be pending, but for REFER_READING. */
static inline int refer_send(struct connmgr *cm, enum refer_when when)
{
    int sent = batch_out_send(&cm->port.refs, (enum batch_flush)when, cm->now_ns);

    if (sent > 0)
        refer_sent(cm);
    return sent;
}

#endif
