/* show: how a connmgr and the router let others see their work: see stats.h.
 *
 * Called from Python a few times a second, between two turns: never for a message. Counts of a
 * connection are kept in struct conn, where the message path has it in hand anyway; bytes are the
 * stream positions that are there already. Both functions are bounded.
 */
#ifndef MIDAIR_SHOW_H
#define MIDAIR_SHOW_H

#include "base/api.h"
#include "connmgr/connmgr.h"
#include "router/router.h"
#include "observe/stats.h"

#define SHOW_ROWS_MAX 4096u /* connections looked at in one call: about a quarter of a ms */

/* After connmgr_load, before connmgr_start: goes on counting where a predecessor was. */
API void connmgr_resume(struct connmgr *cm, const struct stats *s);
/* Totals, gauges, and the rows of the next SHOW_ROWS_MAX slots from `from` on. Returns where to go
 * on next time. */
API uint32_t connmgr_show(struct connmgr *cm, struct stats *s, uint32_t from);
/* What a client said about itself. Its row is taken if it has none yet. */
API int connmgr_describe(struct connmgr *cm, struct stats *s, uint32_t slot, uint64_t uid,
                         const char *name, uint32_t name_len, const char *lang, uint32_t lang_len,
                         const char *version, uint32_t version_len);

/* Before router_start; and then. */
API void router_resume(struct router *rt, const struct stats *s);
API void router_show(struct router *rt, struct stats *s);

#endif
