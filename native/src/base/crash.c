/* crash: points at which a test build kills its own process. See crash.h. */
#include "base/crash.h"

#include <errno.h>
#include <stddef.h>

#ifdef MIDAIR_CRASH_POINTS

#include <signal.h>
#include <string.h>
#include <unistd.h>

static const char *const points[] = {
#define CRASH_POINT(id, name, roles) name " " roles,
#include "base/crash_points.h"
#undef CRASH_POINT
};

static enum crash_id armed = CRASH_COUNT;
static uint32_t passes_left;
static char marker[4096];

int crash_arm(const char *point, uint32_t pass, const char *path)
{
    size_t len = strlen(point);

    for (uint32_t i = 0; i < CRASH_COUNT; i++) {
        if (strncmp(points[i], point, len) != 0 || points[i][len] != ' ' || strlen(path) >= sizeof marker)
            continue;
        strcpy(marker, path);
        passes_left = pass ? pass : 1;
        armed = (enum crash_id)i;
        return 0;
    }
    return -ENOENT;
}

const char *crash_point(uint32_t i) { return i < CRASH_COUNT ? points[i] : NULL; }

void crash_here(enum crash_id id)
{
    if (id != armed || --passes_left)
        return;
    armed = CRASH_COUNT;
    if (unlink(marker) == 0)
        kill(getpid(), SIGKILL);
}

#else

int crash_arm(const char *point, uint32_t pass, const char *path)
{
    (void)point;
    (void)pass;
    (void)path;
    return -ENOENT;
}

const char *crash_point(uint32_t i)
{
    (void)i;
    return NULL;
}

#endif
