/* census: a walk through somebody else's routing segment. See census.h. */
#include "observe/census.h"
#include "base/subject.h"

#include <string.h>

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

int census_covers(const char *pattern, uint32_t pattern_len, const char *subject, uint32_t len)
{
    uint32_t p = 0, s = 0;

    while (p < pattern_len) {
        uint32_t pe = p, se = s;

        while (pe < pattern_len && pattern[pe] != SUBJECT_DOT)
            pe++;
        if (pe - p == 1 && pattern[p] == SUBJECT_REST && pe == pattern_len)
            return s < len;
        if (s >= len)
            return 0;
        while (se < len && subject[se] != SUBJECT_DOT)
            se++;
        if (pe - p == 1 && pattern[p] == SUBJECT_ANY) {
            if (se - s == 1 && subject[s] == SUBJECT_REST)
                return 0; /* wider than one token */
        } else if (pe - p != se - s || memcmp(pattern + p, subject + s, pe - p) != 0) {
            return 0;
        }
        if ((pe == pattern_len) != (se == len))
            /* One is longer: covered only if what is left of the pattern is `>`. */
            return 0;
        p = pe + 1;
        s = se + 1;
    }
    return s > len;
}

/* The text may belong to somebody else by now: every length and link is doubted. */
static int copy_text(const struct routing *r, const struct routing_sub *s, struct census_sub *to)
{
    const struct routing_cell *cells = (const struct routing_cell *)((const char *)r + r->cells_at);
    uint32_t left = (uint32_t)s->subject_len + s->queue_len, part, cell = s->more;
    char *at = to->text;

    to->subject_len = s->subject_len;
    to->queue_len = s->queue_len;
    to->sid_len = s->sid_len < REF_SID_MAX ? s->sid_len : REF_SID_MAX;
    memcpy(to->sid, s->sid, to->sid_len);
    if (left > CENSUS_TEXT_MAX || to->subject_len + to->queue_len != left)
        return 0;
    part = left < ROUTING_TEXT_INLINE ? left : ROUTING_TEXT_INLINE;
    memcpy(at, s->text, part);
    while (left -= part) {
        at += part;
        if (cell == 0 || cell > r->cells)
            return 0;
        part = left < ROUTING_CELL_TEXT ? left : ROUTING_CELL_TEXT;
        memcpy(at, cells[cell - 1].text, part);
        cell = cells[cell - 1].next;
    }
    return 1;
}

static int passes(const struct census_filter *f, const struct census_sub *s)
{
    if (f->uid && f->uid != s->uid)
        return 0;
    if (f->pattern && !census_covers(f->pattern, f->pattern_len, s->text, s->subject_len))
        return 0;
    return !f->test || census_covers(s->text, s->subject_len, f->test, f->test_len);
}

int census_next(const struct routing *r, uint32_t connmgr, const struct census_filter *filter,
                uint32_t slots, uint32_t *at, struct census_sub *ret_sub)
{
    uint64_t high = connmgr < r->ports ? load(&r->subs_high[connmgr]) : 0;

    if (high > r->subs_each)
        high = r->subs_each;
    for (; slots && *at < high; slots--) {
        uint32_t slot = (*at)++;
        const struct routing_sub *s = (const struct routing_sub *)((const char *)r + r->subs_at) +
                                      (uint64_t)connmgr * r->subs_each + slot;
        uint64_t word = load(&s->word);

        if (!(word & ROUTING_ACTIVE))
            continue;
        ret_sub->uid = s->uid;
        ret_sub->routed = s->routed;
        ret_sub->max = s->max;
        ret_sub->connmgr = connmgr;
        ret_sub->slot = slot;
        int whole = copy_text(r, s, ret_sub);

        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (whole && __atomic_load_n(&s->word, __ATOMIC_RELAXED) == word && passes(filter, ret_sub))
            return 1;
    }
    return *at < high ? 0 : -1;
}
