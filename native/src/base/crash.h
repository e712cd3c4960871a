/* crash: named points at which a test build kills its own process.
 *
 * Every commit point has one right before and one right after it; crash_points.h is the table
 * of all of them, so a point that is not in the table does not compile, and one that is in it
 * is gone through by tests/crash/test_points.py, which fails if it is never reached.
 * In a normal build CRASH() is no instruction, but keeps the compiler from moving stores across it:
 * the order that the tests go through is the one that is built.
 */
#ifndef MIDAIR_CRASH_H
#define MIDAIR_CRASH_H

#include "base/api.h"

#include <stdatomic.h>
#include <stdint.h>

/* The n-th pass of the point removes the file `path` and, if it was there, kills the process:
 * the file makes sure that it happens once. 0, or -ENOENT: there is no such point in this build. */
API int crash_arm(const char *point, uint32_t pass, const char *path);
/* Point number i ("name roles"), or NULL past the last; NULL in a normal build. */
API const char *crash_point(uint32_t i);

#ifdef MIDAIR_CRASH_POINTS
enum crash_id {
#define CRASH_POINT(id, name, roles) CRASH_##id,
#include "base/crash_points.h"
#undef CRASH_POINT
    CRASH_COUNT
};
void crash_here(enum crash_id id);
#define CRASH(id) crash_here(CRASH_##id)
#else
#define CRASH(id) atomic_signal_fence(memory_order_seq_cst)
#endif

#endif
