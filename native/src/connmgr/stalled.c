/* stalled: connections that cannot be read now, because there is no room for what they say.
 *
 * Three lists, each first come, first served (struct stalled). A connection is in one of them
 * exactly when it has UNREAD_ROOM; c->stalled says in which. Private memory of the connmgr: after a
 * crash nobody waits, everybody is read, and who finds no room waits again.
 *
 * Those that wait go before those that do not (stalled_retry comes before reading, and
 * input_read lets nobody overtake). A turn serves a bounded number of them and stops at the
 * first of each list that cannot go on, so its cost does not grow with their number.
 */
#include "connmgr/refer.h"

#define RETRIES_A_TURN 64 /* of each list */

void stalled_open(struct connmgr *cm)
{
    for (int i = 0; i < STALLED_LISTS; i++)
        cm->stalled[i].first = cm->stalled[i].last = CONNMGR_NONE;
}

int stalled_any(const struct connmgr *cm)
{
    return cm->stalled[STALLED_BEGUN].first != CONNMGR_NONE || cm->stalled[STALLED_LARGE].first != CONNMGR_NONE ||
           cm->stalled[STALLED_FRESH].first != CONNMGR_NONE;
}

static int wants_own(const struct conn *c)
{
    return c->need > CONNMGR_BULK_BYTES && c->need > c->len && !c->own_chunk;
}

void stalled_add(struct connmgr *cm, struct conn *c)
{
    uint32_t which = c->len == 0 ? STALLED_FRESH : wants_own(c) ? STALLED_LARGE : STALLED_BEGUN;
    struct stalled *list = &cm->stalled[which];

    cm->stats.stalls++;
    if (c->unread & UNREAD_ROOM)
        return;
    unread_set(c, UNREAD_ROOM);
    c->stalled = (uint8_t)which;
    c->next_stalled = CONNMGR_NONE;
    c->prev_stalled = list->last;
    if (list->last == CONNMGR_NONE)
        list->first = c->slot;
    else
        cm->conns[list->last].next_stalled = c->slot;
    list->last = c->slot;
}

void stalled_remove(struct connmgr *cm, struct conn *c)
{
    struct stalled *list = &cm->stalled[c->stalled];

    if (c->prev_stalled == CONNMGR_NONE)
        list->first = c->next_stalled;
    else
        cm->conns[c->prev_stalled].next_stalled = c->next_stalled;
    if (c->next_stalled == CONNMGR_NONE)
        list->last = c->prev_stalled;
    else
        cm->conns[c->next_stalled].prev_stalled = c->prev_stalled;
    unread_clear(cm, c, UNREAD_ROOM);
}

/* Serves the first of a list. 0: it has to go on waiting, and so have those behind it. */
static int serve(struct connmgr *cm, struct conn *c)
{
    if (c->unread & ~UNREAD_ROOM) { /* not its turn yet: who clears the other cause calls input_wake() */
        stalled_remove(cm, c);
        return 1;
    }
    if (!refer_have_room(cm)) {
        cm->stalled_ring = 1;
        return 0;
    }
    if (c->len && c->need <= c->len) { /* it has frames that were not looked at */
        if (cm->chunk_messages[c->chunk] == ARENA_CHUNK_MESSAGES && !input_place(cm, c))
            return 0;
        stalled_remove(cm, c);
        input_parse(cm, c);
        return 1;
    }
    if ((c->len == 0 && !input_may_begin(cm)) || !input_place(cm, c))
        return 0;
    stalled_remove(cm, c);
    input_receive(cm, c);
    return 1;
}

/* Begun frames first: finishing them is what makes room. */
void stalled_retry(struct connmgr *cm)
{
    cm->retrying = 1;
    cm->stalled_more = cm->stalled_ring = 0;
    for (int i = 0; i < STALLED_LISTS; i++) {
        uint32_t last = cm->stalled[i].last;

        for (int n = 0; cm->stalled[i].first != CONNMGR_NONE; n++) {
            struct conn *c = &cm->conns[cm->stalled[i].first];

            if (n == RETRIES_A_TURN || cm->event_count > CONNMGR_EVENTS_MAX / 2) {
                cm->stalled_more = 1;
                break;
            }
            if (!serve(cm, c) || c->slot == last)
                break;
            (void)refer_send(cm, REFER_READING);
        }
    }
    cm->retrying = 0;
}

/* Each unfinished frame keeps its chunk from being reused. When chunks run short, those in chunks
 * that hold little are moved together, so that a thousand slow senders cannot hold the whole arena. */
void stalled_compact(struct connmgr *cm)
{
    uint32_t *held = (uint32_t *)cm->scratch, chunks = cm->port.pool.arena->chunk_count;

    if (cm->stalled[STALLED_LARGE].first == CONNMGR_NONE &&
        arena_available(&cm->port.pool) >= CONNMGR_CHUNKS_RESERVED)
        return;
    memset(held, 0, (size_t)chunks * sizeof(*held));
    for (uint32_t slot = 0; slot < cm->journal->conns_high; slot++)
        if (cm->conns[slot].begun)
            held[cm->conns[slot].chunk] += cm->conns[slot].begun;
    for (uint32_t slot = 0; slot < cm->journal->conns_high; slot++) {
        struct conn *c = &cm->conns[slot];

        if (!c->begun || c->unread & UNREAD_DECISION || c->chunk == cm->fill_chunk || held[c->chunk] > ARENA_CHUNK_BYTES / 2)
            continue;
        if (!input_pack(cm, c))
            return;
        cm->stats.compacted++;
    }
}
