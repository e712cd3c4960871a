/* connection: a client's connection from adoption to its end (phases of journal.h).
 *
 * Ending takes shutdown(2): the keeper holds a copy of every descriptor, so closing ours would
 * end nothing. The slot is free again only when the router has confirmed (J6).
 */
#include "connmgr/refer.h"
#include "base/crash.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

void connmgr_set_reading(struct connmgr *cm, struct conn *c, int on)
{
    if (c->fd < 0 || c->reading == on)
        return;
    c->reading = (uint8_t)on;
    if (on)
        (void)connmgr_epoll(cm->epoll_in, c->fd, EPOLLIN, c->slot);
    else
        (void)epoll_ctl(cm->epoll_in, EPOLL_CTL_DEL, c->fd, NULL);
}

void connmgr_ask(struct connmgr *cm, struct conn *c, uint8_t what)
{
    if (!c->asked) {
        c->next_asked = CONNMGR_NONE;
        if (cm->asked_last == CONNMGR_NONE)
            cm->asked_first = c->slot;
        else
            cm->conns[cm->asked_last].next_asked = c->slot;
        cm->asked_last = c->slot;
    }
    c->asked |= what;
}

void connmgr_reset(struct conn *c, uint32_t slot)
{
    memset(c, 0, sizeof(*c));
    c->slot = slot;
    c->fd = -1;
    c->chunk = c->head = c->tail = c->sub_first = CONNMGR_NONE;
}

int connmgr_adopt(struct connmgr *cm, uint32_t slot, uint64_t uid, int fd)
{
    struct journal *j = cm->journal;
    uint64_t in = 0, out = 0;

    if (slot >= j->conns || cm->recs[slot].uid != 0)
        return -EEXIST;
    int err = sockpos_read(fd, &in, &out);
    if (err)
        return err;
    while (j->conns_high <= slot) {
        connmgr_reset(&cm->conns[j->conns_high], (uint32_t)j->conns_high);
        j->conns_high++;
    }
    struct conn *c = &cm->conns[slot];
    struct conn_rec *r = &cm->recs[slot];

    connmgr_reset(c, slot);
    c->fd = fd;
    c->uid = uid;
    c->phase = PHASE_OPENING;
    c->options = CONN_VERBOSE | CONN_PEDANTIC;
    c->heard_ns = connmgr_clock_ns();
    c->slow = cm->conf.slow[cm->table->slots[slot].listener % CONNMGR_LISTENERS_MAX];
    memset(r, 0, sizeof(*r)); /* the slot is nobody's until uid is stored */
    r->in_base = in;
    r->out_base = out;
    r->protocol = cm->table->slots[slot].protocol;
    r->transport = cm->table->slots[slot].transport;
    redo_put(&cm->redo, &r->phase, c->phase | c->options);
    redo_put(&cm->redo, &r->uid, uid);
    redo_commit(&cm->redo);
    CRASH(ADOPT_RECORDED);
    conntable_set_state(cm->table, slot, CONN_ACTIVE);
    CRASH(ADOPT_ACTIVE);
    cm->conn_count++;
    connmgr_ask(cm, c, ASK_OPEN);
    return 0;
}

void connmgr_end(struct connmgr *cm, struct conn *c, int reason)
{
    if (c->phase == PHASE_CLOSING || c->phase == PHASE_NONE)
        return;
    if (c->fd >= 0) {
        /* Others hold copies of this descriptor, so closing ours does none of these. */
        (void)epoll_ctl(cm->epoll_in, EPOLL_CTL_DEL, c->fd, NULL);
        (void)epoll_ctl(cm->epoll_out, EPOLL_CTL_DEL, c->fd, NULL);
        (void)shutdown(c->fd, SHUT_RDWR);
        close(c->fd);
        c->fd = -1;
    }
    c->reading = c->writing = c->paused = 0;
    c->phase = PHASE_CLOSING;
    CRASH(END_SHUTDOWN);
    redo_put(&cm->redo, &cm->recs[c->slot].phase, PHASE_CLOSING);
    redo_commit(&cm->redo);
    CRASH(END_COMMITTED);
    if (c->stalled)
        stalled_remove(cm, c);
    if (c->held)
        held_remove(cm, c);
    input_drop(cm, c);
    output_drop(cm, c);
    slow_written(cm, c);
    cm->stats.closed[reason]++;
    cm->conn_count--;
    connmgr_event(cm, EVENT_CLOSED, c, reason);
    if (c->confirmed)
        connmgr_ended(cm, c->slot, c->uid);
    else
        connmgr_ask(cm, c, ASK_CLOSE);
}

void connmgr_linger(struct connmgr *cm, struct conn *c)
{
    if (!c->confirmed || c->head != CONNMGR_NONE || c->discarding || c->fd < 0)
        return;
    c->discarding = 1;
    c->linger_since = cm->now_ns;
    shutdown(c->fd, SHUT_WR);
    connmgr_set_reading(cm, c, 1);
}

void connmgr_end_later(struct connmgr *cm, struct conn *c)
{
    c->next_marked = cm->marked_first;
    cm->marked_first = c->slot;
}

void connmgr_end_marked(struct connmgr *cm)
{
    while (cm->marked_first != CONNMGR_NONE) {
        struct conn *c = &cm->conns[cm->marked_first];

        cm->marked_first = c->next_marked;
        if (c->ending == CLOSE_SLOW_BYTES + 1)
            slow_end(cm, c, CLOSE_SLOW_BYTES);
        else
            connmgr_end(cm, c, c->ending - 1);
    }
}

/* The answer to what a predecessor asked may come before we have asked again. */
static void leave_asked(struct connmgr *cm, struct conn *c)
{
    uint32_t *at = &cm->asked_first, last = CONNMGR_NONE;

    while (*at != CONNMGR_NONE && *at != c->slot) {
        last = *at;
        at = &cm->conns[last].next_asked;
    }
    if (*at == CONNMGR_NONE)
        return;
    *at = c->next_asked;
    if (cm->asked_last == c->slot)
        cm->asked_last = last;
}

void connmgr_ended(struct connmgr *cm, uint32_t slot, uint64_t uid)
{
    struct conn *c = &cm->conns[slot];

    if (slot >= cm->journal->conns_high || c->uid != uid)
        return;
    if (c->phase == PHASE_LINGER) {
        c->confirmed = 1;
        connmgr_linger(cm, c);
        return;
    }
    if (c->phase != PHASE_CLOSING)
        return;
    while (c->sub_first != CONNMGR_NONE)
        subtable_free(cm, c->sub_first);
    CRASH(ENDED_SUBS);
    if (c->asked)
        leave_asked(cm, c);
    redo_put(&cm->redo, &cm->recs[slot].phase, PHASE_NONE);
    redo_put(&cm->redo, &cm->recs[slot].uid, 0);
    redo_commit(&cm->redo);
    CRASH(ENDED_RECORDED);
    conntable_set_state(cm->table, slot, CONN_CLOSED);
    connmgr_event(cm, EVENT_ENDED, c, 0);
    connmgr_reset(c, slot);
}

int connmgr_connected(struct connmgr *cm, uint32_t slot, uint64_t uid, uint32_t options,
                      const char *name, uint32_t name_len)
{
    struct conn *c = &cm->conns[slot];
    struct nats_limits limits = {cm->conf.max_control_line, cm->conf.max_payload, 0, 0};
    struct nats_frame f;

    if (slot >= cm->journal->conns_high || c->uid != uid || c->phase != PHASE_OPEN || !c->paused)
        return -ENOENT;
    if (name_len >= JOURNAL_NAME_MAX)
        return -EINVAL;
    if (nats_parse(arena_data(cm->pool.arena, c->chunk) + c->at, c->len, &limits, &f) != 1 ||
        f.op != NATS_CONNECT)
        return -EBADMSG;
    c->paused = 0;
    c->options = options | CONN_CONNECTED;
    c->has_flow = 0; /* decided for a sender with other options, perhaps (F2) */
    flow_never(c);
    memset(cm->recs[slot].name, 0, JOURNAL_NAME_MAX);
    memcpy(cm->recs[slot].name, name, name_len);
    c->at += (uint32_t)f.bytes;
    c->len -= (uint32_t)f.bytes;
    c->in_pos += f.bytes;
    redo_put(&cm->redo, &cm->recs[slot].phase, c->phase | c->options);
    if (options & CONN_VERBOSE)
        output_append(cm, c, "+OK\r\n", 5);
    input_commit(cm, c);
    CRASH(CONNECT_TAKEN);
    connmgr_ask(cm, c, ASK_READY);
    if (name_len) /* whether it may be called that is known before the answer to its first PING */
        refer_due(cm);
    if (c->len)
        input_parse(cm, c);
    else
        input_drop(cm, c);
    output_flush(cm);
    return 0;
}

int connmgr_fail(struct connmgr *cm, uint32_t slot, uint64_t uid, const char *text, uint32_t len, int reason)
{
    struct conn *c = &cm->conns[slot];

    if (slot >= cm->journal->conns_high || c->uid != uid || c->phase >= PHASE_LINGER || len > 1024)
        return -ENOENT;
    if (c->stalled)
        stalled_remove(cm, c);
    if (c->held)
        held_remove(cm, c);
    connmgr_set_reading(cm, c, 0);
    c->ending = (int8_t)(reason + 1);
    c->failed = 1;
    c->phase = PHASE_LINGER;
    c->linger_since = cm->now_ns;
    output_append(cm, c, text, len);
    redo_put(&cm->redo, &cm->recs[slot].phase, c->phase | c->options | (uint64_t)c->ending << CONN_ENDING_SHIFT);
    output_put(cm);
    redo_commit(&cm->redo);
    CRASH(FAIL_COMMITTED);
    input_drop(cm, c); /* not before: one that is open has its bytes (J2) */
    connmgr_ask(cm, c, ASK_CLOSE);
    output_flush(cm);
    return 0;
}
