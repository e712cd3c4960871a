/* fsck_subs: sessions and subscriptions, in the journals and in the router's segment. See fsck.h.
 *
 * What the router has, the connmgr has, too: it says so first, and gives a slot back only after
 * the router has let go (J6). What the connmgr has and the router has not is on its way: named by a
 * reference that is not finished, or by an order that refuses it.
 */
#include "fsck/fsck.h"

#define SUB_EPOCH ROUTING_EPOCH

static struct sub_rec *sub_at(struct fsck *f, uint32_t n, uint32_t sub)
{
    return &journal_subs(f->journals[n])[sub];
}

static uint32_t epoch_of(uint64_t word) { return (uint32_t)((word & SUB_EPOCH) >> 32); }

void fsck_subs_begin(struct fsck *f, uint32_t n)
{
    for (uint32_t sub = 0; sub < fsck_load(&f->journals[n]->subs_high); sub++) {
        uint64_t word = fsck_load(&sub_at(f, n, sub)->word);

        if (word & SUB_ACTIVE)
            f->had[n][sub] = epoch_of(word) + 1;
    }
}

/* ---- the connmgr's side ---- */

static uint32_t hash_of(uint32_t conn, const char *sid, uint32_t len)
{
    uint64_t h = 0xcbf29ce484222325ULL ^ conn;

    for (uint32_t i = 0; i < len; i++)
        h = (h ^ (uint8_t)sid[i]) * 0x100000001b3ULL;
    return (uint32_t)(h ^ h >> 32);
}

/* The bytes of a sid, of at most PROTOCOL_SID_MAX; 0: its length, or where it goes on, cannot be. */
static uint32_t read_sid(struct fsck *f, uint32_t n, const struct sub_rec *s, char *to)
{
    uint32_t len = s->sid_len == JOURNAL_SID_LONG ? s->sid_bytes : s->sid_len, part = len;

    if (len > PROTOCOL_SID_MAX || (len > JOURNAL_SID_INLINE) != (s->sid_len == JOURNAL_SID_LONG))
        return 0;
    if (part > JOURNAL_SID_INLINE)
        part = JOURNAL_SID_INLINE;
    memcpy(to, s->sid, part);
    uint32_t cell = fsck_load32(&s->sid_more);

    for (uint32_t left = len; left -= part;) {
        if (cell == 0 || cell > fsck_load(&f->journals[n]->subs_high))
            return 0;
        const struct sid_cell *c = (const void *)sub_at(f, n, cell - 1);

        to += part;
        part = left < JOURNAL_CELL_TEXT ? left : JOURNAL_CELL_TEXT;
        memcpy(to, c->text, part);
        cell = fsck_load32(&c->next);
    }
    return len;
}

/* J7: a long sid goes on in slots that are no subscriptions, as many as it takes, each its own. */
static void check_cells(struct fsck *f, uint32_t n, uint32_t sub, uint64_t word)
{
    const struct sub_rec *s = sub_at(f, n, sub);
    uint32_t len = s->sid_bytes, cell = fsck_load32(&s->sid_more);

    if (s->sid_len != JOURNAL_SID_LONG || len > PROTOCOL_SID_MAX)
        return;
    for (uint32_t left = journal_sid_cells(len); left || cell; left--) {
        int out = !left || !cell || cell > fsck_load(&f->journals[n]->subs_high);
        const struct sid_cell *c = out ? NULL : (const void *)sub_at(f, n, cell - 1);
        uint32_t other = out ? 0 : f->sid_cells[n][cell - 1];

        if (out || fsck_load(&c->word) & (SUB_ACTIVE | SUB_DYING) || (other && other != sub + 1)) {
            /* Given back meanwhile: then it is not what it was. */
            int theirs = !other || fsck_load(&sub_at(f, n, other - 1)->word) & (SUB_ACTIVE | SUB_DYING);

            if (theirs && fsck_load(&s->word) == word)
                fsck_say(f, FSCK_SUB_CELL, SEGMENT_JOURNAL, n, sub, epoch_of(word), cell, other);
            return;
        }
        f->sid_cells[n][cell - 1] = sub + 1;
        cell = fsck_load32(&c->next);
    }
}

/* The sids of a connection differ. */
static void check_sid(struct fsck *f, uint32_t n, uint32_t sub, uint64_t word)
{
    const struct sub_rec *s = sub_at(f, n, sub);
    char sid[PROTOCOL_SID_MAX], other[PROTOCOL_SID_MAX];
    uint32_t len = read_sid(f, n, s, sid), mask = f->sids_mask[n];

    if (len == 0) {
        if (fsck_load(&s->word) == word)
            fsck_say(f, FSCK_SUB_SID, SEGMENT_JOURNAL, n, sub, epoch_of(word), s->sid_len);
        return;
    }
    for (uint32_t at = hash_of((uint32_t)word, sid, len) & mask, steps = 0; steps <= mask; at = (at + 1) & mask, steps++) {
        uint32_t *slot = &f->sids[n][at];

        if (!*slot) {
            *slot = sub + 1;
            return;
        }
        const struct sub_rec *o = sub_at(f, n, *slot - 1);
        uint64_t theirs = fsck_load(&o->word);

        if (theirs & SUB_ACTIVE && (uint32_t)theirs == (uint32_t)word && o->sid_len == s->sid_len &&
            read_sid(f, n, o, other) == len && memcmp(other, sid, len) == 0 && fsck_load(&s->word) == word && fsck_load(&o->word) == theirs) {
            fsck_say(f, FSCK_SUB_TWICE, SEGMENT_JOURNAL, n, sub, epoch_of(word), (uint32_t)word, *slot - 1);
            return;
        }
    }
}

/* Active here since before the references were read: then the router has it, was asked to have it,
 * or has counted out what a member of a queue group asked for. */
static void check_routed(struct fsck *f, uint32_t n, uint32_t sub, uint64_t word, uint64_t phase)
{
    const struct routing *r = f->routing;
    uint32_t epoch = epoch_of(word);

    if (!r || n >= r->ports || ((phase & 0xff) != PHASE_OPEN && (phase & 0xff) != PHASE_GREETED) || f->unreadable_refs[n] ||
        f->had[n][sub] != epoch + 1 || f->under_way[n][sub] == epoch + 1)
        return;
    uint64_t theirs = sub < fsck_load(&r->subs_high[n]) ? fsck_load(&routing_sub(f->routing, n, sub)->word) : 0;
    int counted_out = !(word & SUB_PLAIN) && fsck_load(&sub_at(f, n, sub)->max);

    if (theirs == (ROUTING_ACTIVE | (word & SUB_EPOCH) | (uint32_t)word) || counted_out)
        return;
    if (fsck_load(&sub_at(f, n, sub)->word) == word &&
        fsck_load(&journal_conns(f->journals[n])[(uint32_t)word].phase) == phase)
        fsck_say(f, FSCK_SUB_UNROUTED, SEGMENT_JOURNAL, n, sub, epoch, (uint32_t)word);
}

void fsck_subs(struct fsck *f, uint32_t n)
{
    const struct journal *j = f->journals[n];

    for (uint32_t sub = 0; sub < fsck_load(&j->subs_high); sub++) {
        uint64_t word = fsck_load(&sub_at(f, n, sub)->word);
        uint32_t conn = (uint32_t)word;

        if (!(word & (SUB_ACTIVE | SUB_DYING)))
            continue;
        if ((word & (SUB_ACTIVE | SUB_DYING)) == (SUB_ACTIVE | SUB_DYING)) {
            fsck_say(f, FSCK_SUB_FLAGS, SEGMENT_JOURNAL, n, sub, word);
            continue;
        }
        f->counts.subscriptions += (word & SUB_ACTIVE) != 0;
        const struct conn_rec *r = conn < fsck_load(&j->conns_high)
                                       ? &journal_conns((struct journal *)j)[conn] : NULL;

        if (!r || !fsck_load(&r->uid)) {
            if (fsck_load(&sub_at(f, n, sub)->word) == word)
                fsck_say(f, FSCK_SUB_CONN, SEGMENT_JOURNAL, n, sub, epoch_of(word), conn);
            continue;
        }
        check_cells(f, n, sub, word);
        if (!(word & SUB_ACTIVE))
            continue;
        check_sid(f, n, sub, word);
        check_routed(f, n, sub, word, fsck_load(&r->phase));
    }
}

/* ---- the router's side ---- */

/* R2: the text of a subscription, in its cells, each of them its own. */
static void check_text(struct fsck *f, uint32_t n, uint32_t sub, uint64_t word)
{
    const struct routing *r = f->routing;
    const struct routing_sub *s = routing_sub(f->routing, n, sub);
    uint32_t text = s->subject_len + s->queue_len, more = fsck_load32(&s->more), wanted = 0, found = 0;
    uint32_t me = n * r->subs_each + sub + 1;

    if (text > ROUTING_TEXT_INLINE)
        wanted = (text - ROUTING_TEXT_INLINE + ROUTING_CELL_TEXT - 1) / ROUTING_CELL_TEXT;
    uint32_t cell = more;

    for (; cell && cell <= fsck_load(&r->cells_high) && found <= wanted; found++) {
        uint32_t *user = &f->cells[cell - 1];

        if (*user && *user != me && fsck_load(&s->word) == word) {
            const struct routing_sub *o = routing_sub(f->routing, 0, *user - 1);

            /* Given back by the other meanwhile: then the other is not active any more. */
            if (fsck_load(&o->word) & ROUTING_ACTIVE)
                fsck_say(f, FSCK_CELL_SHARED, SEGMENT_ROUTING, n, sub, epoch_of(word), cell - 1, *user - 1);
            return;
        }
        *user = me;
        cell = fsck_load32(&routing_cells(f->routing)[cell - 1].next);
    }
    if ((cell || found != wanted || s->subject_len == 0) && fsck_load(&s->word) == word)
        fsck_say(f, FSCK_ROUTED_TEXT, SEGMENT_ROUTING, n, sub, epoch_of(word), more, cell);
}

static void check_routing_sub(struct fsck *f, uint32_t n, uint32_t sub)
{
    const struct routing_sub *s = routing_sub(f->routing, n, sub);
    uint64_t word = fsck_load(&s->word), uid = fsck_load(&s->uid);
    uint32_t conn = (uint32_t)word;

    if (!(word & ROUTING_ACTIVE))
        return;
    if (f->journals[n]) {
        uint64_t theirs = sub < fsck_load(&f->journals[n]->subs_high) ? fsck_load(&sub_at(f, n, sub)->word) : 0;

        if ((!(theirs & (SUB_ACTIVE | SUB_DYING)) || (theirs ^ word) & SUB_EPOCH || (uint32_t)theirs != conn) &&
            fsck_load(&s->word) == word)
            fsck_say(f, FSCK_ROUTED_FREE, SEGMENT_ROUTING, n, sub, epoch_of(word), theirs);
    }
    uint64_t session = conn < f->routing->clients ? fsck_load(&routing_clients(f->routing)[conn].uid) : 0;

    if (session != uid && fsck_load(&s->word) == word)
        fsck_say(f, FSCK_ROUTED_SESSION, SEGMENT_ROUTING, n, sub, epoch_of(word), uid, session);
    check_text(f, n, sub, word);
}

/* A session lives until its connmgr says that the connection is over, and the connmgr keeps the
 * record until the session is. */
static void check_session(struct fsck *f, uint32_t slot)
{
    const struct routing_client *s = &routing_clients(f->routing)[slot];
    uint64_t uid = fsck_load(&s->uid), n = fsck_load(&s->word) >> 32, theirs = 0;

    if (!uid)
        return;
    f->counts.sessions++;
    if (n < f->connmgrs && !f->journals[n])
        return;
    if (n < f->connmgrs && slot < fsck_load(&f->journals[n]->conns_high))
        theirs = fsck_load(&journal_conns(f->journals[n])[slot].uid);
    if (theirs != uid && fsck_load(&s->uid) == uid)
        fsck_say(f, FSCK_SESSION_ALONE, SEGMENT_ROUTING, 0, slot, uid, n, theirs);
}

void fsck_sessions(struct fsck *f)
{
    uint64_t slots = f->routing->clients, used = 0;

    /* No further than connections ever were: looking at a hole makes it real memory. */
    for (uint32_t n = 0; n < f->connmgrs; n++)
        if (f->journals[n] && used < fsck_load(&f->journals[n]->conns_high))
            used = fsck_load(&f->journals[n]->conns_high);
    for (uint32_t slot = 0; slot < slots && slot < used; slot++)
        check_session(f, slot);
    for (uint32_t n = 0; n < f->routing->ports; n++)
        for (uint32_t sub = 0; sub < fsck_load(&f->routing->subs_high[n]); sub++)
            check_routing_sub(f, n, sub);
}
