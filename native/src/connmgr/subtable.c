/* subtable: the subscriptions of this connmgr's clients, by (connection, sid).
 *
 * Primary: sub_rec in the journal. Derived: a chained hash, one list per connection, a stack
 * of free slots. A slot leaves the hash when the client unsubscribes, but is reused only when
 * the router has said that no order will name it again (J6).
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"
#include "base/hash.h"

_Static_assert(PROTOCOL_SID_MAX <= JOURNAL_SID_MAX, "every sid has room in its record");

static uint32_t hash_of(const struct connmgr *cm, uint32_t conn, const char *sid, uint32_t len)
{
    uint64_t h = HASH_SPREAD ^ conn;

    for (uint32_t i = 0; i < len; i++)
        h = (h ^ (uint8_t)sid[i]) * 0x100000001b3ULL;
    h ^= h >> 32;
    h *= HASH_SPREAD;
    return (uint32_t)(h >> 32) & cm->sub_hash_mask;
}

static uint32_t sub_conn(const struct sub_rec *s) { return (uint32_t)s->word; }

uint32_t subtable_find(struct connmgr *cm, uint32_t conn, const uint8_t *sid, uint32_t len)
{
    uint32_t at = cm->sub_hash[hash_of(cm, conn, (const char *)sid, len)];

    while (at) {
        const struct sub_rec *s = &cm->subs[at - 1];

        if (sub_conn(s) == conn && s->sid_len == len && memcmp(s->sid, sid, len) == 0)
            return at - 1;
        at = cm->links[at - 1].hash_next;
    }
    return CONNMGR_NONE;
}

static void unhash(struct connmgr *cm, uint32_t sub)
{
    const struct sub_rec *s = &cm->subs[sub];
    uint32_t *at = &cm->sub_hash[hash_of(cm, sub_conn(s), s->sid, s->sid_len)];

    while (*at && *at - 1 != sub)
        at = &cm->links[*at - 1].hash_next;
    if (*at)
        *at = cm->links[sub].hash_next;
}

static void link_in(struct connmgr *cm, uint32_t sub, struct conn *c, int hashed)
{
    struct sub_link *l = &cm->links[sub];

    if (hashed) {
        const struct sub_rec *s = &cm->subs[sub];
        uint32_t *bucket = &cm->sub_hash[hash_of(cm, c->slot, s->sid, s->sid_len)];

        l->hash_next = *bucket;
        *bucket = sub + 1;
        c->subs++;
    }
    l->conn_prev = CONNMGR_NONE;
    l->conn_next = c->sub_first;
    if (c->sub_first != CONNMGR_NONE)
        cm->links[c->sub_first].conn_prev = sub;
    c->sub_first = sub;
}

static uint32_t take(struct connmgr *cm)
{
    if (cm->sub_free_count)
        return cm->sub_free[--cm->sub_free_count];
    if (cm->journal->subs_high == cm->journal->subs)
        return CONNMGR_NONE;
    return (uint32_t)cm->journal->subs_high++;
}

/* The word is put into the step being committed. The working value is stored at once too:
 * until the commit the slot is named by nothing that survives a crash. */
uint32_t subtable_add(struct connmgr *cm, struct conn *c, const uint8_t *sid, uint32_t len, int plain)
{
    uint32_t sub = take(cm);

    if (sub == CONNMGR_NONE)
        return CONNMGR_NONE;
    struct sub_rec *s = &cm->subs[sub];
    uint64_t epoch = ((s->word >> 32) + 1) & 0x1fffffff;

    s->delivered = s->base = 0;
    s->stamp = 0;
    s->max = 0;
    s->sid_more = s->account = 0;
    s->sid_len = (uint8_t)len;
    memcpy(s->sid, sid, len);
    /* Neither active nor dying: still free after a crash. */
    s->word = (plain ? SUB_PLAIN : 0) | epoch << 32 | c->slot;
    link_in(cm, sub, c, 1);
    redo_put(&cm->port.redo, &s->word, SUB_ACTIVE | s->word);
    return sub;
}

/* Unsubscribed. The caller tells the router, or has it told when there is room (sub_due). */
void subtable_die(struct connmgr *cm, uint32_t sub)
{
    struct sub_rec *s = &cm->subs[sub];

    unhash(cm, sub);
    cm->conns[sub_conn(s)].subs--;
    redo_put(&cm->port.redo, &s->word, (s->word & ~SUB_ACTIVE) | SUB_DYING);
}

/* The router will not name it again. */
void subtable_free(struct connmgr *cm, uint32_t sub)
{
    struct sub_rec *s = &cm->subs[sub];
    struct sub_link *l = &cm->links[sub];

    if (s->word & SUB_ACTIVE) { /* its connection ended */
        unhash(cm, sub);
        cm->conns[sub_conn(s)].subs--;
    }
    if (l->conn_prev != CONNMGR_NONE)
        cm->links[l->conn_prev].conn_next = l->conn_next;
    else
        cm->conns[sub_conn(s)].sub_first = l->conn_next;
    if (l->conn_next != CONNMGR_NONE)
        cm->links[l->conn_next].conn_prev = l->conn_prev;
    s->word &= 0x1fffffff00000000ULL; /* "sub.free" */
    CRASH(SUB_FREE);
    cm->sub_free[cm->sub_free_count++] = sub;
}

void subtable_recover(struct connmgr *cm)
{
    cm->sub_free_count = 0;
    for (uint32_t sub = (uint32_t)cm->journal->subs_high; sub-- > 0;) {
        struct sub_rec *s = &cm->subs[sub];

        if (s->word & (SUB_ACTIVE | SUB_DYING)) {
            link_in(cm, sub, &cm->conns[sub_conn(s)], (s->word & SUB_ACTIVE) != 0);
            if (s->stamp == (uint32_t)(cm->port.log->applied + 1))
                s->delivered = s->base;
            if (s->word & SUB_DYING)
                cm->sub_due[cm->sub_due_count++] = sub;
        } else {
            cm->sub_free[cm->sub_free_count++] = sub;
        }
    }
}
