/* recover: a connmgr's start, fresh or after a crash.
 *
 * Finishes a committed step, loads connections, takes the sockets that survived and asks the
 * kernel how far their streams got, then rebuilds everything derived and goes on where the
 * predecessor was. Connections whose socket did not survive are ended.
 */
#include "connmgr/refer.h"

#include <errno.h>

int connmgr_load(struct connmgr *cm)
{
    struct journal *j = cm->journal;
    int found = 0;

    cm->now_ns = clock_ns();
    cm->stats.found_words = port_recover(&cm->port, &cm->stats.found_batches);
    if (cm->port.refs.bytes > BATCH_HEAD)
        cm->port.refs.load = BATCH_BYTES; /* not known: nothing is added to it */
    if (cm->port.refs.seq > 1) { /* which are large is not known either */
        cm->large_count = CONNMGR_LARGE_MAX;
        for (uint32_t i = 0; i < CONNMGR_LARGE_MAX; i++)
            cm->large[i] = cm->port.refs.seq - (cm->port.refs.bytes == BATCH_HEAD);
    }
    refer_settle_room(cm);
    for (uint32_t slot = 0; slot < j->conns_high; slot++) {
        struct conn *c = &cm->conns[slot];
        const struct conn_rec *r = &cm->recs[slot];

        conn_reset(c, slot);
        if (!r->uid)
            continue;
        c->uid = r->uid;
        conn_load(c, r->phase);
        c->in_pos = r->in_pos;
        c->end = r->out_end;
        c->dropped = r->dropped;
        conn_set_listener(cm, c, r->protocol, r->transport);
        c->heard_ns = cm->now_ns;
        if (r->out_head) {
            c->head = (uint32_t)r->out_head - 1;
            c->tail = (uint32_t)r->out_tail - 1;
            c->sent = cm->segs[c->head].pos;
        } else {
            c->sent = c->end;
        }
        c->lost = c->phase != PHASE_CLOSING;
        found++;
    }
    return found;
}

int connmgr_found(const struct connmgr *cm, uint32_t slot, uint64_t *ret_uid)
{
    const struct conn *c = &cm->conns[slot];

    *ret_uid = c->uid;
    return slot < cm->journal->conns_high && c->lost;
}

int connmgr_readopt(struct connmgr *cm, uint32_t slot, uint64_t uid, int fd)
{
    struct conn *c = &cm->conns[slot];
    uint64_t in = 0, out = 0;

    if (slot >= cm->journal->conns_high || c->uid != uid || !c->lost)
        return -ENOENT;
    struct stream_places places;
    int err = sockpos_read(fd, &in, &out);

    if (!err)
        err = streams_find(cm, c, fd, in, out, &places);
    if (!err && conn_is_heard(c)) /* of the others nothing more is parsed (J2) */
        err = input_recover(cm, c, places.in);
    if (!err) {
        out = places.out;
        if ((c->phase == PHASE_LINGER || c->phase == PHASE_FINISHING) && places.fin)
            out--; /* our FIN: conn_linger() or close_now() came so far */
        if (out < c->sent || out > c->end)
            err = -EBADMSG;
    }
    /* After a reset the kernel's counts may be off by the peer's FIN (sockpos.c): nobody is there for whom
     * it would matter. */
    if (err == -EBADMSG && sockpos_reset(fd)) {
        c->lost = LOST_LEFT;
        return -ECONNRESET;
    }
    if (err)
        return err;
    cm->stats.found_input += c->len;
    cm->stats.found_output += out - c->sent;
    c->sent = out;
    c->fd = fd;
    c->lost = 0;
    conntable_set_state(cm->table, slot, CONN_ACTIVE);
    return 0;
}

/* A slot of the connection table that says ACTIVE, but whose session the journal no longer
 * has: the predecessor died between the two. */
static void settle_table(struct connmgr *cm)
{
    for (uint32_t slot = 0; slot < cm->journal->conns_high; slot++) {
        const struct conntable_slot *t = &cm->table->slots[slot];

        if (t->connmgr == cm->conf.index && cm->recs[slot].uid != t->uid &&
            atomic_load_explicit(&t->state, memory_order_acquire) == CONN_ACTIVE)
            conntable_set_state(cm->table, slot, CONN_CLOSED);
    }
}

int connmgr_start(struct connmgr *cm)
{
    struct journal *j = cm->journal;

    settle_table(cm);
    arena_pool_recover(&cm->port.pool);
    for (uint32_t chunk = 0; chunk < cm->port.pool.arena->chunk_count; chunk++)
        if (cm->port.pool.holds[chunk])
            cm->chunk_messages[chunk] = (uint32_t)cm->port.pool.arena->chunks[chunk].messages;
    output_recover(cm);
    memset(cm->scratch, 0, j->segs_high);
    subtable_recover(cm);
    cm->port.recovering = 1;
    for (uint32_t slot = 0; slot < j->conns_high; slot++) {
        struct conn *c = &cm->conns[slot];

        output_resume(cm, c);
        if (c->phase == PHASE_CLOSING) {
            output_drop(cm, c);
            connmgr_ask(cm, c, ASK_CLOSE);
        } else if ((c->phase == PHASE_LINGER || c->phase == PHASE_FINISHING) && !c->lost) {
            cm->conn_count++;
            c->linger_since = cm->now_ns;
            connmgr_ask(cm, c, ASK_CLOSE);
            output_write(cm, c);
            slow_recover(cm, c);
        } else if (c->phase != PHASE_NONE && c->lost) {
            cm->conn_count++;
            conn_end(cm, c, c->lost == LOST_LEFT ? CLOSE_CLIENT : CLOSE_SERVER);
        } else if (c->phase != PHASE_NONE) {
            cm->conn_count++;
            if (c->phase == PHASE_OPENING) {
                connmgr_ask(cm, c, ASK_OPEN);
                continue;
            }
            if (c->options & CONN_CONNECTED)
                connmgr_ask(cm, c, ASK_READY);
            output_write(cm, c);
            slow_recover(cm, c);
            unread_clear(cm, c, UNREAD_PHASE);
            if (c->chunk != CONNMGR_NONE)
                input_parse(cm, c);
        }
    }
    output_flush(cm);
    cm->port.recovering = 0;
    return (int)cm->event_count;
}
