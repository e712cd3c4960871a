/* unfinished: large frames that do not grow give their place up to those that wait for it.
 *
 * A frame that has chunks of its own waits for its sender alone (input.c). While another large frame waits for chunks,
 * its sender has limited patience: if less than GROWS_BYTES of it come in that time, then
 *   - of one that has little so far (CONNMGR_BULK_BYTES) that little goes back to a shared chunk, as before it had
 *     chunks of its own; what comes next waits for chunks behind the others;
 *   - one that has more, or if too much has been begun already, is ended (CLOSE_UNFINISHED): its bytes have left the kernel, and there is nowhere else for them.
 *     Nothing that was accepted is lost by that: a message is accepted when it is whole.
 * The more wait, the shorter the patience: a place that many wait for one after the other is not held by each of them in
 * turn. Time in which its connmgr did not look, or did not read it, counts for nobody.
 *
 * Unfinished frames in shared chunks are bounded (cm->begun_max). At that bound nothing new is begun: then who has
 * begun as much as the average or more and was silent for SILENT_NS is ended, too, until half of the bound is free
 * (unfinished_tick).
 *
 * The structure: the list of connections that have chunks of their own, linked by next_own and prev_own.
 * Written by:   the connmgr, in private memory. After a crash everybody's patience begins anew.
 */
#include "connmgr/connmgr.h"

#include <sys/ioctl.h>

#define PATIENCE_NS 2000000000ULL    /* of one that one other waits for */
#define PATIENCE_NS_MIN 200000000ULL /* of one that many wait for */
#define GROWS_BYTES 4096u
#define LOOK_NS 20000000ULL          /* between two looks */
#define SILENT_NS 2000000000ULL

static void begin(const struct connmgr *cm, struct conn *c)
{
    c->grown_len = c->len;
    c->grown_ns = cm->now_ns;
}

void unfinished_own(struct connmgr *cm, struct conn *c, int own)
{
    if (own == c->own_chunk)
        return;
    c->own_chunk = (uint8_t)own;
    if (own) {
        cm->bulk++;
        c->prev_own = CONNMGR_NONE;
        c->next_own = cm->own_first;
        if (cm->own_first != CONNMGR_NONE)
            cm->conns[cm->own_first].prev_own = c->slot;
        cm->own_first = c->slot;
        begin(cm, c);
        return;
    }
    cm->bulk--;
    if (c->prev_own == CONNMGR_NONE)
        cm->own_first = c->next_own;
    else
        cm->conns[c->prev_own].next_own = c->next_own;
    if (c->next_own != CONNMGR_NONE)
        cm->conns[c->next_own].prev_own = c->prev_own;
}

static uint64_t patience(const struct connmgr *cm)
{
    uint64_t waiting = 0, least = PATIENCE_NS / PATIENCE_NS_MIN;

    for (uint32_t slot = cm->stalled[STALLED_LARGE].first; slot != CONNMGR_NONE && waiting < least; waiting++)
        slot = cm->conns[slot].next_stalled;
    return waiting ? PATIENCE_NS / waiting : PATIENCE_NS;
}

static int has_more_to_read(const struct conn *c)
{
    int waiting = 0;

    return ioctl(c->fd, FIONREAD, &waiting) != 0 || waiting;
}

static void give_up(struct connmgr *cm, struct conn *c)
{
    if (c->len > CONNMGR_BULK_BYTES || cm->begun + c->len > cm->begun_max)
        conn_end(cm, c, CLOSE_UNFINISHED);
    else if (input_pack(cm, c))
        cm->stats.compacted++;
}

void unfinished_look(struct connmgr *cm)
{
    uint64_t since = cm->now_ns - cm->own_looked_ns;

    if (cm->stalled[STALLED_LARGE].first == CONNMGR_NONE || since < LOOK_NS)
        return;
    uint64_t most = patience(cm);

    cm->own_looked_ns = cm->now_ns;
    for (uint32_t slot = cm->own_first, next; slot != CONNMGR_NONE; slot = next) {
        struct conn *c = &cm->conns[slot];

        next = c->next_own;
        if (since > 4 * LOOK_NS || c->unread || !cm->in_armed || c->len >= c->grown_len + GROWS_BYTES || c->len < c->grown_len)
            begin(cm, c);
        else if (cm->now_ns - c->grown_ns >= most && !has_more_to_read(c) && cm->event_count <= CONNMGR_EVENTS_MAX / 2)
            give_up(cm, c);
    }
}

void unfinished_tick(struct connmgr *cm)
{
    uint64_t begun = 0, average;
    uint32_t count = 0;

    if (input_may_begin(cm) || cm->stalled[STALLED_FRESH].first == CONNMGR_NONE)
        return;
    for (uint32_t slot = 0; slot < cm->journal->conns_high; slot++) {
        begun += cm->conns[slot].begun;
        count += cm->conns[slot].begun != 0;
    }
    average = count ? begun / count : 0;
    for (uint32_t slot = 0; slot < cm->journal->conns_high && cm->event_count <= CONNMGR_EVENTS_MAX / 2; slot++) {
        struct conn *c = &cm->conns[slot];

        if (c->begun && c->begun >= average && !c->unread && cm->now_ns - c->heard_ns >= SILENT_NS && !has_more_to_read(c))
            conn_end(cm, c, CLOSE_UNFINISHED);
        if (cm->begun <= cm->begun_max / 2)
            return;
    }
}
