/* conn: a client's connection from adoption to its end. See conn.h.
 *
 * Ending takes shutdown(2): the keeper holds a copy of every descriptor, so closing ours would
 * end nothing. The slot is free again only when the router has confirmed (J6).
 */
#include "connmgr/refer.h"
#include "base/crash.h"

#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sysexits.h>
#include <unistd.h>

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

/* ---- phases ---- */

/* Which phase may follow which: bits 1 << phase. */
static const uint8_t follows[PHASES] = {
    [PHASE_NONE] = 1 << PHASE_OPENING,
    [PHASE_OPENING] = 1 << PHASE_GREETED | 1 << PHASE_CLOSING, /* nothing was said yet: there is no lingering */
    [PHASE_GREETED] = 1 << PHASE_OPEN | 1 << PHASE_FINISHING | 1 << PHASE_LINGER | 1 << PHASE_CLOSING,
    [PHASE_OPEN] = 1 << PHASE_GREETED | /* it asks for a name */
                   1 << PHASE_FINISHING | 1 << PHASE_LINGER | 1 << PHASE_CLOSING,
    [PHASE_FINISHING] = 1 << PHASE_LINGER | 1 << PHASE_CLOSING,
    [PHASE_LINGER] = 1 << PHASE_CLOSING,
    [PHASE_CLOSING] = 1 << PHASE_NONE,
};

int conn_may_follow(uint32_t from, uint32_t to)
{
    return from < PHASES && to < PHASES && follows[from] >> to & 1;
}

void conn_put_phase(struct connmgr *cm, const struct conn *c)
{
    uint64_t word = c->phase;

    if (c->phase != PHASE_NONE && c->phase != PHASE_CLOSING)
        word |= c->options | (c->unread & UNREAD_ANSWER ? CONN_AWAITING : 0);
    if (c->phase == PHASE_LINGER)
        word |= (uint64_t)c->reason << CONN_REASON_SHIFT;
    redo_put(&cm->port.redo, &cm->recs[c->slot].phase, word);
}

void conn_load(struct conn *c, uint64_t word)
{
    c->phase = (uint32_t)word & 0xff;
    c->served = conn_is_heard(c) || c->phase == PHASE_FINISHING;
    c->options = (uint32_t)word & 0xff00u & ~(uint32_t)CONN_AWAITING;
    c->reason = (uint8_t)(word >> CONN_REASON_SHIFT);
    unread_set(c, word & CONN_AWAITING ? UNREAD_ANSWER : 0);
    if (c->phase == PHASE_GREETED && c->options & CONN_CONNECTED)
        unread_set(c, UNREAD_NAME);
}

static void leave_finished(struct connmgr *cm, struct conn *c)
{
    uint32_t *at = &cm->finished_first;

    while (*at != c->slot)
        at = &cm->conns[*at].next_finished;
    *at = c->next_finished;
    c->finished = 0;
}

/* The process ends before a transition that is not in the table is recorded: its successor finds the phase
 * that was committed last, and goes on from there. */
void conn_set_phase(struct connmgr *cm, struct conn *c, uint32_t phase)
{
    if (!conn_may_follow(c->phase, phase)) {
        dprintf(STDERR_FILENO, "midair-connmgr: connection %llu cannot go from phase %u to phase %u: a bug in Midair\n",
                (unsigned long long)c->uid, c->phase, phase);
        _exit(EX_SOFTWARE);
    }
    if (c->finished)
        leave_finished(cm, c);
    c->phase = phase;
    c->served = conn_is_heard(c) || phase == PHASE_FINISHING;
    if (conn_is_heard(c))
        unread_clear(cm, c, UNREAD_PHASE);
    else
        unread_forget(cm, c);
    conn_put_phase(cm, c);
}

void conn_reset(struct conn *c, uint32_t slot)
{
    memset(c, 0, sizeof(*c));
    c->slot = slot;
    c->fd = -1;
    c->unread = UNREAD_PHASE;
    c->chunk = c->head = c->tail = c->sub_first = CONNMGR_NONE;
}

void conn_set_listener(const struct connmgr *cm, struct conn *c, uint32_t protocol, uint32_t transport)
{
    c->slow = cm->conf.slow[cm->table->slots[c->slot].listener % CONNMGR_LISTENERS_MAX];
    c->speaks = (uint8_t)(protocol < protocol_count() ? protocol : 0);
    c->protocol = protocols[c->speaks];
    c->carried = (uint8_t)(transport < transport_count() ? transport : 0);
    c->transport = transports[c->carried];
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
        conn_reset(&cm->conns[j->conns_high], (uint32_t)j->conns_high);
        j->conns_high++;
    }
    struct conn *c = &cm->conns[slot];
    struct conn_rec *r = &cm->recs[slot];

    conn_reset(c, slot);
    c->fd = fd;
    c->uid = uid;
    uint32_t listener = cm->table->slots[slot].listener % CONNMGR_LISTENERS_MAX;

    conn_set_listener(cm, c, cm->conf.protocol[listener], cm->conf.transport[listener]);
    c->options = c->protocol->options;
    c->heard_ns = clock_ns();
    memset(r, 0, sizeof(*r)); /* the slot is nobody's until uid is stored */
    r->in_base = in;
    r->out_base = out;
    r->protocol = c->speaks;
    r->transport = c->carried;
    conn_set_phase(cm, c, PHASE_OPENING);
    redo_put(&cm->port.redo, &r->uid, uid);
    redo_commit(&cm->port.redo);
    CRASH(ADOPT_RECORDED);
    conntable_set_state(cm->table, slot, CONN_ACTIVE);
    CRASH(ADOPT_ACTIVE);
    cm->conn_count++;
    connmgr_ask(cm, c, ASK_OPEN);
    return 0;
}

/* ---- the end ---- */

/* What a client is told when its connection ends (enum refusal); 0: nothing, and its socket is shut at
 * once. One that is told something lingers: it gets what waits for it, then this, then the end. NO_WORDS: it
 * lingers without a word. */
#define NO_WORDS 0xff
static const uint8_t told_as[CLOSE_REASONS] = {
    [CLOSE_PROTOCOL] = REFUSED_PARSER, /* if neither conn.error nor Python has more to say */
    [CLOSE_STALE] = REFUSED_STALE,
    [CLOSE_SLOW_BYTES] = REFUSED_SLOW,
    [CLOSE_SLOW_DEADLINE] = REFUSED_SLOW,
    [CLOSE_SUBSCRIPTIONS] = REFUSED_SUBSCRIPTIONS,
    [CLOSE_RATE] = REFUSED_RATE,
    [CLOSE_NAME_TAKEN] = REFUSED_NAME,
    [CLOSE_REPLACED] = REFUSED_REPLACED,
    [CLOSE_UNFINISHED] = REFUSED_STALE, /* libraries connect again after that */
    [CLOSE_LAME_DUCK] = NO_WORDS, /* clients take an error for a reason not to come back */
};

static int is_told(const struct conn *c) { return told_as[c->reason] && c->served; }

/* Appends the last words. `text`: those that Python has chosen, or NULL. */
static void tell(struct connmgr *cm, struct conn *c, const char *text, uint32_t len)
{
    if (!text && told_as[c->reason] != NO_WORDS) {
        text = c->protocol->text(c->error ? -c->error : told_as[c->reason]);
        len = (uint32_t)strlen(text);
    }
    if (text)
        reply_text(cm, c, REPLY_ERROR, text, len);
    conn_set_phase(cm, c, PHASE_LINGER);
}

/* It has been told, and the step is committed. The bytes it sent are not dropped before: they are those of a
 * connection that is served (J2). */
static void told(struct connmgr *cm, struct conn *c)
{
    CRASH(FAIL_COMMITTED);
    c->linger_since = cm->now_ns;
    input_drop(cm, c);
    streams_forget(cm, c);
    slow_written(cm, c);
    connmgr_ask(cm, c, ASK_CLOSE);
    if (c->reason == CLOSE_NAME_TAKEN)
        CRASH(NAME_REFUSED);
}

/* Others hold copies of the descriptor, so closing ours does none of these. */
static void shut(struct connmgr *cm, struct conn *c)
{
    if (c->fd < 0)
        return;
    (void)epoll_ctl(cm->epoll_in, EPOLL_CTL_DEL, c->fd, NULL);
    (void)epoll_ctl(cm->epoll_out, EPOLL_CTL_DEL, c->fd, NULL);
    streams_shut(c, SHUT_RDWR);
    close(c->fd);
    c->fd = -1;
    c->watched = c->writing = 0;
}

static void close_now(struct connmgr *cm, struct conn *c)
{
    shut(cm, c);
    conn_set_phase(cm, c, PHASE_CLOSING);
    CRASH(END_SHUTDOWN);
    redo_commit(&cm->port.redo);
    CRASH(END_COMMITTED);
    input_drop(cm, c);
    streams_forget(cm, c);
    output_drop(cm, c);
    slow_written(cm, c);
    cm->stats.closed[c->reason]++;
    cm->conn_count--;
    connmgr_event(cm, EVENT_CLOSED, c, c->reason);
    if (c->confirmed)
        conn_ended(cm, c->slot, c->uid);
    else
        connmgr_ask(cm, c, ASK_CLOSE);
}

static void end_with(struct connmgr *cm, struct conn *c, enum close_reason reason, const char *text, uint32_t len)
{
    if (c->phase == PHASE_CLOSING || c->phase == PHASE_NONE)
        return;
    if (c->phase == PHASE_FINISHING && reason == CLOSE_WRITE_ERROR)
        reason = CLOSE_CLIENT; /* it had closed both sides */
    if (cm->in_step) {
        if (c->reason)
            return;
        c->reason = (uint8_t)reason;
        c->next_ending = cm->ending_first;
        cm->ending_first = c->slot;
        return;
    }
    if (!c->reason)
        c->reason = (uint8_t)reason;
    if (!is_told(c)) {
        close_now(cm, c);
        return;
    }
    tell(cm, c, text, len);
    output_put(cm);
    redo_commit(&cm->port.redo);
    told(cm, c);
    output_flush(cm);
}

void conn_end(struct connmgr *cm, struct conn *c, enum close_reason reason) { end_with(cm, c, reason, NULL, 0); }

void conn_tell_ending(struct connmgr *cm)
{
    for (uint32_t slot = cm->ending_first; slot != CONNMGR_NONE; slot = cm->conns[slot].next_ending)
        if (is_told(&cm->conns[slot]))
            tell(cm, &cm->conns[slot], NULL, 0);
}

void conn_settle_ending(struct connmgr *cm)
{
    while (cm->ending_first != CONNMGR_NONE) {
        struct conn *c = &cm->conns[cm->ending_first];

        cm->ending_first = c->next_ending;
        if (c->phase == PHASE_LINGER)
            told(cm, c);
        else
            close_now(cm, c);
    }
}

int connmgr_end(struct connmgr *cm, uint32_t slot, uint64_t uid, int reason, const char *text, uint32_t len)
{
    struct conn *c = &cm->conns[slot];

    if (slot >= cm->journal->conns_high || c->uid != uid || c->reason || reason <= CLOSE_NONE ||
        reason >= CLOSE_REASONS || len > CONNMGR_TEXT_MAX)
        return -ENOENT;
    end_with(cm, c, (enum close_reason)reason, len ? text : NULL, len);
    return 0;
}

/* A client that ends its side has said all it will. What that causes goes by way of the router, like the end of
 * its session, and comes before the router's word that the session is over: answers to its PINGs, what it published to
 * subscriptions of its own, a 503. So the router is told of the end at once, the client is served until the word comes,
 * and its socket is shut when it has everything. If nothing moves for conf.write_deadline_ns (connmgr_tick), or it has
 * closed both sides, its socket is shut before that.
 *
 * Killed before the commit: the successor reads the same end. After it: the phase says that nothing is read, and the
 * router is told again. */
void conn_finish(struct connmgr *cm, struct conn *c)
{
    conn_set_phase(cm, c, PHASE_FINISHING);
    redo_commit(&cm->port.redo);
    CRASH(FINISH_COMMITTED);
    unread_seen(cm, c);
    c->linger_since = cm->now_ns;
    input_drop(cm, c);
    streams_forget(cm, c);
    connmgr_ask(cm, c, ASK_CLOSE);
}

/* Those that have everything. An event tells Python of each, and there is room for so many at once. */
void conn_shut_finished(struct connmgr *cm)
{
    while (cm->finished_first != CONNMGR_NONE && cm->event_count <= CONNMGR_EVENTS_MAX / 2) {
        struct conn *c = &cm->conns[cm->finished_first];

        cm->finished_first = c->next_finished;
        c->finished = 0;
        if (c->phase == PHASE_FINISHING)
            conn_end(cm, c, CLOSE_CLIENT);
    }
}

int connmgr_greet_again(struct connmgr *cm, uint32_t slot, uint64_t uid)
{
    struct conn *c = &cm->conns[slot];

    if (slot >= cm->journal->conns_high || c->uid != uid || c->phase != PHASE_OPEN || !(c->options & CONN_GREET_AGAIN))
        return -ENOENT;
    if (!output_has_room(cm))
        return -ENOSPC;
    reply_greet(cm, c);
    output_put(cm);
    redo_commit(&cm->port.redo);
    output_flush(cm);
    return 0;
}

void conn_linger(struct connmgr *cm, struct conn *c)
{
    if (!c->confirmed || c->head != CONNMGR_NONE || c->discarding || c->fd < 0)
        return;
    if (c->phase == PHASE_FINISHING) {
        CRASH(FINISH_WRITTEN);
        if (!c->finished) {
            c->finished = 1;
            c->next_finished = cm->finished_first;
            cm->finished_first = c->slot;
        }
        return;
    }
    c->discarding = 1;
    c->linger_since = cm->now_ns;
    streams_shut(c, SHUT_WR);
    unread_clear(cm, c, UNREAD_PHASE);
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

void conn_ended(struct connmgr *cm, uint32_t slot, uint64_t uid)
{
    struct conn *c = &cm->conns[slot];

    if (slot >= cm->journal->conns_high || c->uid != uid)
        return;
    if (c->phase == PHASE_LINGER || c->phase == PHASE_FINISHING) {
        c->confirmed = 1;
        conn_linger(cm, c);
        return;
    }
    if (c->phase != PHASE_CLOSING)
        return;
    while (c->sub_first != CONNMGR_NONE)
        subtable_free(cm, c->sub_first);
    CRASH(ENDED_SUBS);
    if (c->asked)
        leave_asked(cm, c);
    conn_set_phase(cm, c, PHASE_NONE);
    redo_put(&cm->port.redo, &cm->recs[slot].uid, 0);
    redo_commit(&cm->port.redo);
    CRASH(ENDED_RECORDED);
    conntable_set_state(cm->table, slot, CONN_CLOSED);
    connmgr_event(cm, EVENT_ENDED, c, 0);
    conn_reset(c, slot);
}

int connmgr_connected(struct connmgr *cm, uint32_t slot, uint64_t uid, uint32_t options,
                      const char *name, uint32_t name_len)
{
    struct conn *c = &cm->conns[slot];
    struct frame_limits limits = take_limits(cm, c);
    struct frame f[2];
    int status;

    if (slot >= cm->journal->conns_high || c->uid != uid || !(c->unread & UNREAD_DECISION))
        return -ENOENT;
    if (name_len >= JOURNAL_NAME_MAX)
        return -EINVAL;
    if (c->protocol->parse(input_bytes(cm, c), c->len, &limits, f, 1, &status) != 1 || f->op != FRAME_CONNECT)
        return -EBADMSG;
    c->options = options | CONN_CONNECTED;
    c->has_flow = 0; /* decided for a sender with other options, perhaps (F2) */
    flow_never(c);
    memset(cm->recs[slot].name, 0, JOURNAL_NAME_MAX);
    memcpy(cm->recs[slot].name, name, name_len);
    input_move_on(c, (uint32_t)f->bytes);
    uint32_t phase = name_len ? PHASE_GREETED : PHASE_OPEN; /* whether it has the name is the router's to say */

    if (c->phase != phase)
        conn_set_phase(cm, c, phase);
    else
        conn_put_phase(cm, c);
    if (options & CONN_VERBOSE)
        reply_say(cm, c, REPLY_OK);
    input_commit(cm, c);
    CRASH(CONNECT_TAKEN);
    connmgr_ask(cm, c, ASK_READY);
    if (name_len)
        unread_set(c, UNREAD_NAME);
    unread_clear(cm, c, UNREAD_DECISION);
    if (c->len)
        input_parse(cm, c);
    else
        input_drop(cm, c);
    output_flush(cm);
    return 0;
}
