/* census: reads the subscriptions in a routing segment that the router is writing.
 *
 * Created by:   nothing here; see routing.h. Written by: the router alone. Whoever calls this has
 *               mapped the segment read-only.
 * Invariants:   a subscription's text does not change while its word stays the same (R2: it is
 *               written before the word says active, and a slot is reused with another epoch). So
 *               the word is read before and after copying: equal means that the copy is whole.
 * After a crash of the router: what its successor finds is what is read here.
 */
#ifndef MIDAIR_CENSUS_H
#define MIDAIR_CENSUS_H

#include "base/api.h"
#include "router/routing.h"

#define CENSUS_TEXT_MAX 8192u /* subject and queue group: more than a batch record can bring */

API struct census_filter {
    const char *pattern; /* subscriptions whose subject it covers; NULL: all */
    uint32_t pattern_len;
    uint32_t test_len;
    const char *test;    /* subscriptions that would get this subject; NULL: all */
    uint64_t uid;        /* of one connection; 0: all */
};

API struct census_sub {
    uint64_t uid;    /* of the connection */
    uint64_t routed; /* queue groups: messages sent its way */
    uint64_t max;    /* queue groups: ends after that many messages; 0: never */
    uint32_t connmgr, slot;
    uint32_t subject_len, queue_len;
    uint32_t sid_len, pad;
    char sid[REF_SID_MAX + 2];  /* what its client calls it: as much of it as the router has */
    char text[CENSUS_TEXT_MAX]; /* subject, then queue group */
};

/* Looks at up to `slots` slots of `connmgr` from *at on, and moves *at behind what it looked at. 1: a
 * subscription that passes the filter is in ret_sub; 0: none among those; -1: there are no more. */
API int census_next(const struct routing *r, uint32_t connmgr, const struct census_filter *filter,
                    uint32_t slots, uint32_t *at, struct census_sub *ret_sub);

/* Whether a pattern (`*`: one token, `>`: the rest) covers a subject, which may be one itself. */
API int census_covers(const char *pattern, uint32_t pattern_len, const char *subject, uint32_t len);

#endif
