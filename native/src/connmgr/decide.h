/* decide: for the messages of a step, whether the router is asked or its last decision repeated.
 *
 *   take (take.c)  ->  decide  ->  refer (refer.c) | deliver (deliver.c)  ->  commit (input.c)
 *
 * The structure: struct step in struct connmgr, about the bytes of one connection that are being parsed.
 *               `flow` says which decision may be repeated for what was taken so far; what was taken
 *               waits in `taken`. NULL: the router is asked, and references are written at once.
 * Written by:   the connmgr, in private memory. It dies with the process, and so does the step.
 * Invariants:   a step is repeated as a whole, or asked about as a whole: references are in the order of
 *               the stream. What waits in `taken` has room in the ring (DECIDE_REF_BYTES).
 */
#ifndef MIDAIR_DECIDE_H
#define MIDAIR_DECIDE_H

#include "connmgr/refer.h"

/* Bytes of references that may wait. A batch is turned because the next record is too large for it, or the
 * load of what is in it too high (refer_load): two in a row hold more than one can; or because it stands for
 * CONNMGR_BATCH_MESSAGES. What a step takes lies in one chunk, so there is room for all of it beside what may
 * be in the ring when it begins. */
#define DECIDE_REF_BYTES (12 * (BATCH_BYTES - BATCH_HEAD))
#define DECIDE_LOAD_MAX (ARENA_CHUNK_BYTES / CONNMGR_LOAD_BYTES)
#define DECIDE_BATCHES \
    (2 * (12 + DECIDE_LOAD_MAX / (BATCH_BYTES - BATCH_HEAD)) + ARENA_CHUNK_MESSAGES / (CONNMGR_BATCH_MESSAGES - 1) + 2)
_Static_assert(CONNMGR_REFS_AHEAD + CONNMGR_DUE_AHEAD + 1 + DECIDE_BATCHES < BATCH_RING, "the ring has room for them");

void decide_begin(struct connmgr *cm, const struct conn *c);
/* From here on the router is asked: what waits is referred to it. */
void decide_ask_now(struct connmgr *cm, const struct conn *c);
/* Nothing more is taken in this step. The messages are entries `first` and on of the chunk. */
void decide_end(struct connmgr *cm, struct conn *c, uint32_t chunk, uint32_t first);

static inline void decide_ask(struct connmgr *cm, const struct conn *c)
{
    if (cm->step.flow)
        decide_ask_now(cm, c);
}

/* Whether a message to that subject may go where the ones before it went. */
static inline int decide_joins(const struct connmgr *cm, const uint8_t *subject, uint32_t len)
{
    const struct flow *f = cm->step.flow;

    return f && f->subject_len == len && memcmp(f->subject, subject, len) == 0 && cm->step.ref_bytes < DECIDE_REF_BYTES;
}

static inline void decide_take(struct connmgr *cm, const struct taken *t)
{
    struct step *s = &cm->step;

    cm->taken[s->count++] = *t;
    s->ref_bytes += ref_bytes(t->texts.subject_len + t->texts.reply_len);
    s->bodies |= t->size > CONNMGR_COPY_MAX ? BODIES_KEPT : BODIES_COPIED;
}

#endif
