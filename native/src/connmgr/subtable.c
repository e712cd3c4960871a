/* subtable: the subscriptions of this connmgr's clients, by (connection, sid).
 *
 * Primary: sub_rec in the journal. Derived: a chained hash, one list per connection, a stack
 * of free slots. A slot leaves the hash when the client unsubscribes, but is reused only when
 * the router has said that no order will name it again (J6). A sid that does not fit its record goes on
 * in slots of the same table (J7): they count against what connmgr.subscriptions allows,
 * and as its client's (subtable_may_add).
 */
#include "connmgr/connmgr.h"
#include "base/crash.h"
#include "base/siphash.h"

_Static_assert(PROTOCOL_SID_SHORT <= JOURNAL_SID_INLINE, "a short sid lies in its record");
_Static_assert(PROTOCOL_SID_MAX <= UINT16_MAX, "its length fits its record");

/* Keyed: who chooses sids cannot choose which of them share a bucket. */
static uint32_t hash_of(const struct connmgr *cm, uint32_t conn, const char *sid, uint32_t len)
{
    const uint64_t key[2] = {cm->sub_key[0], cm->sub_key[1] ^ conn};

    return (uint32_t)siphash_bytes(key, sid, len) & cm->sub_hash_mask;
}

uint32_t connmgr_sub_bucket(const struct connmgr *cm, uint32_t conn, const char *sid, uint32_t len)
{
    return hash_of(cm, conn, sid, len);
}

static uint32_t sub_conn(const struct sub_rec *s) { return (uint32_t)s->word; }

/* ---- long sids (J7) ---- */

static struct sid_cell *cell_at(struct connmgr *cm, uint32_t slot) { return (struct sid_cell *)&cm->subs[slot]; }

static uint32_t sid_bytes(const struct sub_rec *s) { return s->sid_len == JOURNAL_SID_LONG ? s->sid_bytes : s->sid_len; }

const char *subtable_sid(struct connmgr *cm, const struct sub_rec *s, uint32_t *ret_len)
{
    uint32_t left = sid_bytes(s), part = JOURNAL_SID_INLINE;
    char *to = cm->sid_text;

    *ret_len = left;
    if (s->sid_len != JOURNAL_SID_LONG)
        return s->sid;
    memcpy(to, s->sid, part);
    for (uint32_t cell = s->sid_more; left -= part; cell = cell_at(cm, cell - 1)->next) {
        to += part;
        part = left < JOURNAL_CELL_TEXT ? left : JOURNAL_CELL_TEXT;
        memcpy(to, cell_at(cm, cell - 1)->text, part);
    }
    return cm->sid_text;
}

static uint32_t slots_of(const struct sub_rec *s) { return 1 + journal_sid_cells(sid_bytes(s)); }

static uint32_t hash_sub(struct connmgr *cm, const struct sub_rec *s)
{
    uint32_t len;
    const char *sid = subtable_sid(cm, s, &len);

    return hash_of(cm, sub_conn(s), sid, len);
}

static int has_sid(struct connmgr *cm, const struct sub_rec *s, const uint8_t *sid, uint32_t len)
{
    if (len <= JOURNAL_SID_INLINE)
        return s->sid_len == len && memcmp(s->sid, sid, len) == 0;
    return s->sid_len == JOURNAL_SID_LONG && s->sid_bytes == len && memcmp(subtable_sid(cm, s, &len), sid, len) == 0;
}

uint32_t subtable_find(struct connmgr *cm, uint32_t conn, const uint8_t *sid, uint32_t len)
{
    uint32_t at = cm->sub_hash[hash_of(cm, conn, (const char *)sid, len)];

    while (at) {
        const struct sub_rec *s = &cm->subs[at - 1];

        if (sub_conn(s) == conn && has_sid(cm, s, sid, len))
            return at - 1;
        at = cm->links[at - 1].hash_next;
    }
    return CONNMGR_NONE;
}

static void unhash(struct connmgr *cm, uint32_t sub)
{
    const struct sub_rec *s = &cm->subs[sub];
    uint32_t *at = &cm->sub_hash[hash_sub(cm, s)];

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
        uint32_t *bucket = &cm->sub_hash[hash_sub(cm, s)];

        l->hash_next = *bucket;
        *bucket = sub + 1;
        c->subs++;
        c->sub_slots += slots_of(s);
    }
    l->conn_prev = CONNMGR_NONE;
    l->conn_next = c->sub_first;
    if (c->sub_first != CONNMGR_NONE)
        cm->links[c->sub_first].conn_prev = sub;
    c->sub_first = sub;
}

/* The caller has made sure that there is one. */
static uint32_t take(struct connmgr *cm)
{
    if (cm->sub_free_count)
        return cm->sub_free[--cm->sub_free_count];
    return (uint32_t)cm->journal->subs_high++;
}

uint32_t subtable_left(const struct connmgr *cm)
{
    return cm->sub_free_count + cm->journal->subs - (uint32_t)cm->journal->subs_high;
}

/* The caller has made sure that there are slots. */
static void write_sid(struct connmgr *cm, struct sub_rec *s, const uint8_t *sid, uint32_t len)
{
    uint32_t *link = &s->sid_more;

    s->sid_more = 0;
    s->sid_bytes = (uint16_t)len;
    s->sid_len = (uint8_t)(len <= JOURNAL_SID_INLINE ? len : JOURNAL_SID_LONG);
    if (len <= JOURNAL_SID_INLINE) {
        memcpy(s->sid, sid, len);
        return;
    }
    memcpy(s->sid, sid, JOURNAL_SID_INLINE);
    for (uint32_t at = JOURNAL_SID_INLINE; at < len; at += JOURNAL_CELL_TEXT) {
        uint32_t slot = take(cm), part = len - at < JOURNAL_CELL_TEXT ? len - at : JOURNAL_CELL_TEXT;
        struct sid_cell *cell = cell_at(cm, slot);

        memcpy(cell->text, sid + at, part);
        cell->next = 0;
        *link = slot + 1;
        link = &cell->next;
    }
    CRASH(SID_CELLS);
}

static void free_sid(struct connmgr *cm, const struct sub_rec *s)
{
    if (s->sid_len != JOURNAL_SID_LONG)
        return;
    for (uint32_t cell = s->sid_more; cell; cell = cell_at(cm, cell - 1)->next)
        cm->sub_free[cm->sub_free_count++] = cell - 1;
}

int subtable_may_add(const struct connmgr *cm, const struct conn *c, uint32_t sid_len)
{
    uint32_t slots = 1 + journal_sid_cells(sid_len);

    if (cm->conf.max_subscriptions && c->subs >= cm->conf.max_subscriptions)
        return 0;
    return !cm->conf.few_subscriptions || c->sub_slots + slots <= cm->conf.few_subscriptions ||
           subtable_left(cm) >= cm->journal->subs / SUBTABLE_KEPT + slots;
}

/* The word is put into the step being committed. The working value is stored at once too:
 * until the commit the slot is named by nothing that survives a crash. */
uint32_t subtable_add(struct connmgr *cm, struct conn *c, const uint8_t *sid, uint32_t len, int plain)
{
    if (subtable_left(cm) <= journal_sid_cells(len))
        return CONNMGR_NONE;
    uint32_t sub = take(cm);
    struct sub_rec *s = &cm->subs[sub];
    uint64_t epoch = ((s->word >> 32) + 1) & 0x1fffffff;

    s->delivered = s->base = 0;
    s->stamp = 0;
    s->max = 0;
    s->account = 0;
    write_sid(cm, s, sid, len);
    /* Neither active nor dying: still free after a crash. */
    s->word = (plain ? SUB_PLAIN : 0) | epoch << 32 | c->slot;
    link_in(cm, sub, c, 1);
    redo_put(&cm->port.redo, &s->word, SUB_ACTIVE | s->word);
    return sub;
}

/* Nobody finds it by its sid any more, and it is none of its client's. */
static void leave(struct connmgr *cm, uint32_t sub)
{
    const struct sub_rec *s = &cm->subs[sub];
    struct conn *c = &cm->conns[sub_conn(s)];

    unhash(cm, sub);
    c->subs--;
    c->sub_slots -= slots_of(s);
}

/* Unsubscribed. The caller tells the router, or has it told when there is room (sub_due). */
void subtable_die(struct connmgr *cm, uint32_t sub)
{
    struct sub_rec *s = &cm->subs[sub];

    leave(cm, sub);
    redo_put(&cm->port.redo, &s->word, (s->word & ~SUB_ACTIVE) | SUB_DYING);
}

/* The router will not name it again. */
void subtable_free(struct connmgr *cm, uint32_t sub)
{
    struct sub_rec *s = &cm->subs[sub];
    struct sub_link *l = &cm->links[sub];

    if (s->word & SUB_ACTIVE) /* its connection ended */
        leave(cm, sub);
    if (l->conn_prev != CONNMGR_NONE)
        cm->links[l->conn_prev].conn_next = l->conn_next;
    else
        cm->conns[sub_conn(s)].sub_first = l->conn_next;
    if (l->conn_next != CONNMGR_NONE)
        cm->links[l->conn_next].conn_prev = l->conn_prev;
    s->word &= 0x1fffffff00000000ULL; /* "sub.free" */
    CRASH(SUB_FREE);
    free_sid(cm, s);
    cm->sub_free[cm->sub_free_count++] = sub;
}

/* A slot that is a cell: its links are not those of a subscription. */
#define LINK_OF_CELL CONNMGR_NONE

static void mark_cells(struct connmgr *cm)
{
    for (uint32_t sub = 0; sub < cm->journal->subs_high; sub++) {
        const struct sub_rec *s = &cm->subs[sub];

        if (s->word & (SUB_ACTIVE | SUB_DYING) && s->sid_len == JOURNAL_SID_LONG)
            for (uint32_t cell = s->sid_more; cell; cell = cell_at(cm, cell - 1)->next)
                cm->links[cell - 1].hash_next = LINK_OF_CELL;
    }
}

void subtable_recover(struct connmgr *cm)
{
    cm->sub_free_count = 0;
    mark_cells(cm);
    for (uint32_t sub = (uint32_t)cm->journal->subs_high; sub-- > 0;) {
        struct sub_rec *s = &cm->subs[sub];

        if (s->word & (SUB_ACTIVE | SUB_DYING)) {
            link_in(cm, sub, &cm->conns[sub_conn(s)], (s->word & SUB_ACTIVE) != 0);
            if (s->stamp == (uint32_t)(cm->port.log->applied + 1))
                s->delivered = s->base;
            if (s->word & SUB_DYING)
                cm->sub_due[cm->sub_due_count++] = sub;
        } else if (cm->links[sub].hash_next != LINK_OF_CELL) {
            cm->sub_free[cm->sub_free_count++] = sub;
        }
    }
}
