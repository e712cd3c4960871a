/* fsck_modes: requests, legs and names in the router's segment. See fsck.h, and R5 in routing.h.
 *
 * The redo log stores the word of a request before those of its legs, and frees them the other way
 * round. So a used leg always has a used request; that a used request has a leg is only so while no
 * step is being stored.
 */
#include "fsck/fsck.h"

_Static_assert(JOURNAL_NAME_MAX == MODE_NAME_MAX, "a name fits both");

static uint64_t session_of(const struct fsck *f, uint32_t conn)
{
    return conn < f->routing->clients ? fsck_load(&routing_clients(f->routing)[conn].uid) : 0;
}

/* Until what a running router has committed is stored. A dead one's was finished before. */
static void wait_for_step(const struct fsck *f)
{
    for (uint32_t tries = 0; tries < 100000 && !f->dead && fsck_load(&f->routing->redo.count); tries++)
        ;
}

static void check_request(struct fsck *f, uint32_t at, uint64_t *words)
{
    const struct mode_request *q = &routing_requests(f->routing)[at];
    uint64_t word = fsck_load(&q->word), uid = fsck_load(&q->uid);

    if (!(word & MODE_USED))
        return;
    uint64_t session = session_of(f, q->conn);

    if (session != uid && fsck_load(&q->word) == word)
        fsck_say(f, FSCK_REQUEST_SESSION, SEGMENT_ROUTING, 0, at, uid, session);
    if (q->reply_len > MODE_REPLY_MAX && fsck_load(&q->word) == word)
        fsck_say(f, FSCK_REQUEST_SESSION, SEGMENT_ROUTING, 0, at, uid, q->reply_len);
    words[at] = word;
}

static void check_leg(struct fsck *f, uint32_t at, uint64_t *words)
{
    const struct mode_leg *g = &routing_legs(f->routing)[at];
    uint64_t word = fsck_load(&g->word), uid = fsck_load(&g->uid);
    uint32_t request = g->request;

    if (!(word & MODE_USED))
        return;
    int used = request < fsck_load(&f->routing->requests_high) &&
               fsck_load(&routing_requests(f->routing)[request].word) & MODE_USED;
    uint64_t session = session_of(f, g->conn);

    if (fsck_load(&g->word) != word)
        return;
    if (!used)
        fsck_say(f, FSCK_LEG_REQUEST, SEGMENT_ROUTING, 0, at, word & MODE_GENERATION, request);
    else
        words[request] = 0; /* it has one */
    if (session != uid)
        fsck_say(f, FSCK_LEG_SESSION, SEGMENT_ROUTING, 0, at, uid, session);
}

static void check_requests(struct fsck *f)
{
    uint32_t high = (uint32_t)fsck_load(&f->routing->requests_high);
    uint64_t *words = reserve(MODE_REQUESTS_MAX * 8);

    if (!words)
        return;
    for (uint32_t at = 0; at < high; at++)
        check_request(f, at, words);
    wait_for_step(f);
    for (uint32_t at = 0; at < fsck_load(&f->routing->legs_high); at++)
        check_leg(f, at, words);
    wait_for_step(f);
    for (uint32_t at = 0; at < high; at++)
        if (words[at] && fsck_load(&routing_requests(f->routing)[at].word) == words[at])
            fsck_say(f, FSCK_REQUEST_ALONE, SEGMENT_ROUTING, 0, at, routing_requests(f->routing)[at].uid);
    reserve_end(words, MODE_REQUESTS_MAX * 8);
}

static uint32_t hash_of(const char *text, uint32_t len)
{
    uint64_t h = 0xcbf29ce484222325ULL;

    for (uint32_t i = 0; i < len; i++)
        h = (h ^ (uint8_t)text[i]) * 0x100000001b3ULL;
    return (uint32_t)(h ^ h >> 32);
}

static void check_name(struct fsck *f, uint32_t conn, uint32_t *seen, uint32_t mask)
{
    const struct mode_name *n = &routing_names(f->routing)[conn];
    uint64_t word = fsck_load(&n->word), uid = fsck_load(&n->uid);
    uint32_t len = mode_name_len(word);

    if (!(word & MODE_USED))
        return;
    uint64_t session = session_of(f, conn);

    if ((session != uid || mode_name_bytes(word) > MODE_NAME_MAX || len > mode_name_bytes(word)) && fsck_load(&n->word) == word)
        fsck_say(f, FSCK_NAME_SESSION, SEGMENT_ROUTING, 0, conn, uid, session, len);
    if (len > MODE_NAME_MAX)
        return;
    for (uint32_t at = hash_of(n->text, len) & mask;; at = (at + 1) & mask) {
        if (!seen[at]) {
            seen[at] = conn + 1;
            return;
        }
        const struct mode_name *o = &routing_names(f->routing)[seen[at] - 1];

        uint64_t other = fsck_load(&o->word);

        if (other & MODE_USED && mode_name_len(other) == len && memcmp(o->text, n->text, len) == 0 &&
            fsck_load(&n->uid) == uid && fsck_load(&n->word) == word && fsck_load(&o->word) == other) {
            fsck_say(f, FSCK_NAME_TWICE, SEGMENT_ROUTING, 0, conn, uid, seen[at] - 1);
            return;
        }
    }
}

void fsck_modes(struct fsck *f)
{
    uint32_t high = (uint32_t)fsck_load(&f->routing->names_high), mask = 15;

    check_requests(f);
    while (mask < 2 * high)
        mask = 2 * mask + 1;
    uint32_t *seen = reserve((mask + 1ULL) * 4);

    for (uint32_t conn = 0; seen && conn < high; conn++)
        check_name(f, conn, seen, mask);
    if (seen)
        reserve_end(seen, (mask + 1ULL) * 4);
}
