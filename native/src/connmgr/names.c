/* names: a client asks for a name (docs/modes.md), and another one has it.
 *
 * Who asks: its connection stays in PHASE_GREETED, with UNREAD_NAME, and its connmgr says REF_READY again
 * each second until the router says that the name is given, or taken. So whichever process dies, it is
 * asked again, and neither the router nor the other connmgr has to remember anything.
 *
 * Who has the name: it is sent a PING. If it says anything within conf.name_answer_ns, it is alive, and who asked is
 * told that the name is taken. If it does not, its connection is as good as lost: it is ended
 * (CLOSE_REPLACED), the router drops the name with its session, and gives it to who asks next. One that
 * could not have answered counts as alive: it is not read now, bytes of it wait to be read, or the PING waits
 * behind other output of which the kernel took some since. While no client is read, the question waits.
 *
 * The structure: struct name_question of the holder, private. After a crash there is no question; it is asked again.
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"

#include <sys/ioctl.h>

void names_given(struct connmgr *cm, const struct order_conn *o)
{
    struct conn *c = &cm->conns[o->conn];

    if (c->uid != o->uid || !(c->unread & UNREAD_NAME) || c->reason)
        return;
    conn_set_phase(cm, c, PHASE_OPEN);
    CRASH(NAME_OPENED);
    unread_clear(cm, c, UNREAD_NAME);
    input_wake(cm, c);
}

/* The name may have been given to it since: then it does not wait any more. */
void names_taken(struct connmgr *cm, const struct order_conn *o)
{
    struct conn *c = &cm->conns[o->conn];

    if (c->uid == o->uid && c->unread & UNREAD_NAME)
        conn_end(cm, c, CLOSE_NAME_TAKEN);
}

static void keep(struct connmgr *cm, struct conn *c)
{
    c->name_asked = 0;
    connmgr_ask(cm, c, ASK_KEPT);
}

void names_asked(struct connmgr *cm, const struct order_name *o)
{
    struct conn *c = &cm->conns[o->conn];

    if (o->conn >= cm->journal->conns_high || c->uid != o->uid || !conn_is_heard(c) || c->reason)
        return; /* it is ending: so is its claim to the name */
    c->question.asker_port = o->asker_port;
    c->question.asker = o->asker;
    c->question.asker_uid = o->asker_uid;
    if (!cm->conf.name_answer_ns) {
        keep(cm, c);
        return;
    }
    if (c->name_asked)
        return;
    reply_say(cm, c, REPLY_PING);
    CRASH(NAME_QUESTION);
    c->name_asked = 1;
    c->question.since_ns = cm->now_ns;
    c->question.end = c->end;
    c->question.sent = c->sent;
}

void names_heard(struct connmgr *cm, struct conn *c) { keep(cm, c); }

/* Whether its silence says nothing: see above. */
static int could_not_answer(const struct conn *c)
{
    int waiting = 0;

    if (c->unread || ioctl(c->fd, FIONREAD, &waiting) != 0 || waiting)
        return 1;
    return c->sent < c->question.end && c->sent != c->question.sent;
}

void names_tick(struct connmgr *cm, struct conn *c)
{
    if (c->unread & UNREAD_NAME)
        connmgr_ask(cm, c, ASK_READY);
    if (!c->name_asked || !conn_is_heard(c) || cm->now_ns - c->question.since_ns < cm->conf.name_answer_ns)
        return;
    if (!cm->in_armed) { /* nobody is read now, as the router is away: it has its time again */
        c->question.since_ns = cm->now_ns;
        return;
    }
    if (could_not_answer(c)) {
        keep(cm, c);
        return;
    }
    c->name_asked = 0;
    conn_end(cm, c, CLOSE_REPLACED);
    CRASH(NAME_REPLACED);
}
