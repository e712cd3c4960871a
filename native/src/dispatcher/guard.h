/* guard: a shadow of the dispatcher that saves the sockets it had not handed over yet.
 *
 * Between accept() and the keeper's copy a connection exists only in the dispatcher. The guard
 * is a child that shares the dispatcher's descriptor table (CLONE_FILES): a descriptor lives
 * until both are gone. It sleeps until the kernel tells it that the dispatcher has died
 * (PR_SET_PDEATHSIG), gives every connected TCP socket it finds to the keeper under a uid at
 * or above GUARD_UID, and ends. It also shares the semaphore adjustments (CLONE_SYSVSEM): the
 * kernel applies those when the last of the two has gone, so the lease of the dispatcher
 * passes on only after the sockets are with the keeper.
 *
 * Writes nothing shared. If it is killed, the dispatcher notices and makes another.
 */
#ifndef MIDAIR_GUARD_H
#define MIDAIR_GUARD_H

#include "base/api.h"

#include <stdint.h>
#include <sys/types.h>

#define GUARD_UID (1ULL << 63)    /* no client's uid */
#define GUARD_GENERATIONS 8u      /* sets of uids: dispatchers may die in quick succession */
#define GUARD_SOCKETS_MAX 1024u   /* of one dispatcher: its backlog bound */

/* Starts the guard of this process; its pid, or a negative errno. `generation` is that of the
 * dispatcher. The caller has a single thread. */
API pid_t guard_start(const char *keeper_path, uint32_t generation);

#endif
