/* own: a connection's own subscription to a subject. Who asks gets its answers there, and nobody else does.
 *
 * Anybody may have subscriptions to a subject, and a connection may have very many. So whichever are fewer
 * are gone through: those of the connection, or those to the subject. Past OWN_FEW that is counted as work.
 *
 * The structure: none of its own; the lists of clients (router.h), the index.
 */
#include "router/router.h"

#include "base/subject.h"

#define OWN_FEW 32u     /* gone through for nothing */
#define WORK_OWN 4u     /* of a subscription of the connection: its text is compared */
#define WORK_MATCHED 16u /* of those to the subject, for a unit of work */

struct found {
    index_sub plain, member; /* ROUTER_NONE: none yet */
    uint32_t longest;        /* bytes of the subject of `plain` */
};

/* Whether a message to a subject, whose tokens are all ordinary ones, is for this pattern. */
static int is_for(const char *pattern, uint32_t pattern_len, const char *subject, uint32_t len)
{
    uint32_t p = 0, s = 0;

    if (pattern_len == len && memcmp(pattern, subject, len) == 0)
        return 1;
    for (;; p++, s++) { /* at the beginning of a token of both */
        uint32_t token = p;

        while (p < pattern_len && pattern[p] != SUBJECT_DOT)
            p++;
        if (p - token == 1 && pattern[token] == SUBJECT_REST && p == pattern_len)
            return 1;
        if (p - token == 1 && pattern[token] == SUBJECT_ANY) {
            while (s < len && subject[s] != SUBJECT_DOT)
                s++;
        } else {
            if (len - s < p - token || memcmp(pattern + token, subject + s, p - token) != 0)
                return 0;
            s += p - token;
            if (s < len && subject[s] != SUBJECT_DOT)
                return 0;
        }
        if (p == pattern_len || s == len)
            return p == pattern_len && s == len;
    }
}

/* Of several plain ones it is the one with the longest subject: that of its inbox, not one that listens to
 * all. Of these the oldest. Those of a connection come newest first. */
static void consider(struct router *rt, struct found *f, index_sub sub, const char *subject, uint32_t len)
{
    const struct routing_sub *s = routing_sub(rt->seg, INDEX_SUB_PORT(sub), INDEX_SUB_SLOT(sub));

    if ((!s->queue_len && f->plain != ROUTER_NONE && s->subject_len < f->longest) ||
        !is_for(clients_subject(rt, s), s->subject_len, subject, len))
        return;
    if (s->queue_len) {
        f->member = sub;
    } else {
        f->plain = sub;
        f->longest = s->subject_len;
    }
}

/* The connection's next subscriptions from *at on, `most` of them: how many. */
static uint32_t go_through(struct router *rt, struct found *f, index_sub *at, uint64_t most, const char *subject, uint32_t len)
{
    uint32_t count = 0;

    for (; *at != ROUTER_NONE && count < most; count++) {
        consider(rt, f, *at, subject, len);
        *at = rt->chains[(uint64_t)INDEX_SUB_PORT(*at) * rt->seg->subs_each + INDEX_SUB_SLOT(*at)].next;
    }
    return count;
}

static uint64_t matched(const struct index_match *m)
{
    uint64_t count = m->count;

    for (uint32_t g = 0; g < m->group_count; g++)
        count += m->groups[g].count;
    return count;
}

/* The same, of those to the subject. */
static struct found find_matched(struct router *rt, const struct index_match *m, uint32_t conn)
{
    struct found f = {ROUTER_NONE, ROUTER_NONE, 0};

    for (uint32_t i = 0; i < m->count; i++) {
        if (m->conns[i] != conn)
            continue;
        uint32_t bytes = routing_sub(rt->seg, INDEX_SUB_PORT(m->subs[i]), INDEX_SUB_SLOT(m->subs[i]))->subject_len;

        if (f.plain == ROUTER_NONE || bytes > f.longest) {
            f.plain = m->subs[i];
            f.longest = bytes;
        }
    }
    for (uint32_t g = 0; f.plain == ROUTER_NONE && f.member == ROUTER_NONE && g < m->group_count; g++)
        for (uint32_t i = 0; f.member == ROUTER_NONE && i < m->groups[g].count; i++)
            if (m->groups[g].conns[i] == conn)
                f.member = m->groups[g].subs[i];
    return f;
}

static __attribute__((noinline)) struct found find_in_many(struct router *rt, struct found f, index_sub at, uint32_t conn,
                                                           const char *subject, uint32_t len)
{
    const struct index_match *m = index_match(rt->index, subject, len, index_hash(subject, len));
    uint64_t all = matched(m);

    rt->work += m->group_count / WORK_MATCHED + WORK_OWN * go_through(rt, &f, &at, all / (WORK_OWN * WORK_MATCHED), subject, len);
    if (at == ROUTER_NONE)
        return f;
    rt->work += all / WORK_MATCHED;
    return find_matched(rt, m, conn);
}

static struct found find(struct router *rt, uint32_t conn, const char *subject, uint32_t len)
{
    struct found f = {ROUTER_NONE, ROUTER_NONE, 0};
    index_sub at = rt->client_subs[conn];

    go_through(rt, &f, &at, OWN_FEW, subject, len);
    return __builtin_expect(at == ROUTER_NONE, 1) ? f : find_in_many(rt, f, at, conn, subject, len);
}

uint32_t own_plain(struct router *rt, uint32_t conn, const char *subject, uint32_t len)
{
    return find(rt, conn, subject, len).plain;
}

uint32_t own_sub(struct router *rt, uint32_t conn, const char *subject, uint32_t len)
{
    struct found f = find(rt, conn, subject, len);

    return f.plain != ROUTER_NONE ? f.plain : f.member;
}
