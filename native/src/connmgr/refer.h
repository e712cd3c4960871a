/* refer: the references of this connmgr, and when they leave. The only writer of them.
 *
 * The structure: the ring of references in the journal (batch.h), records.h.
 * Written by:   the connmgr, past the committed tail; they become valid with the step they are made in.
 * Invariants:   no function here fails: the caller has made sure of room (refer_have_room).
 *               What a batch stands for is bounded (refer_load). What
 *               clients say is in CONNMGR_REFS_AHEAD batches of the ring at most, and those of a step that
 *               was to be repeated (DECIDE_BATCHES). What no client frame brings is in batches of its own,
 *               CONNMGR_DUE_AHEAD at most: it is never counted when it is asked whether clients may be read.
 * After a crash: what was not committed is overwritten. What is due is found again in the records.
 *
 * So what waits for the router in front of a message is bounded in messages and in bytes, whatever the
 * others send: the batches of the ring, those in the queue, and the one that the router has.
 */
#ifndef MIDAIR_REFER_H
#define MIDAIR_REFER_H

#include "connmgr/connmgr.h"

/* What a message counts for in its batch, beside its reference: one of a run for as much as the smallest
 * record would, and its bytes. So a batch stands for CONNMGR_BATCH_MESSAGES and CONNMGR_BATCH_BODIES at most,
 * and the last message in it, however large that is. */
static inline uint32_t refer_load(uint32_t size) { return size / CONNMGR_LOAD_BYTES; }

/* Room for the references of any one frame: a reading connmgr stops well before the ring is full, so
 * that this fails only while the router is away, or slower than the clients. */
static inline int refer_have_room(const struct connmgr *cm) { return cm->port.refs.seq < cm->port.refs.end; }
static inline void refer_settle_room(struct connmgr *cm)
{
    cm->port.refs.end = atomic_load_explicit(&cm->port.log->refs.sent, memory_order_relaxed) + CONNMGR_REFS_AHEAD + cm->due_count;
}

/* How many messages of that size may join the one that the reference of `bytes` is about: what is left in the
 * batch it will be in. */
static inline uint32_t refer_most(const struct connmgr *cm, uint32_t bytes, uint32_t size)
{
    uint32_t used = cm->port.refs.bytes + cm->port.refs.load;

    if (used + bytes > BATCH_BYTES)
        used = BATCH_HEAD;
    used += bytes + refer_load(size);
    return used < BATCH_BYTES ? (BATCH_BYTES - used) / (CONNMGR_LOAD_EACH + refer_load(size)) : 0;
}

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
static inline void refer_join(struct connmgr *cm, struct ref_message *r, uint32_t more, uint32_t size)
{
    struct ref_run *run = (struct ref_run *)r;

    run->messages = (uint16_t)(more + 1);
    run->flags |= REF_RUN;
    run->size_all += more * size;
    cm->port.refs.load += more * (CONNMGR_LOAD_EACH + refer_load(size));
}

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
