/* sockpos: how many bytes of a TCP stream the kernel has handed to, and taken from, us.
 *
 * taken = tcpi_bytes_received - SIOCINQ, given = tcpi_bytes_acked + SIOCOUTQ. The parts are
 * read by different calls and the peer goes on in between, so TCP_INFO is read before and
 * after the two ioctls, until the two agree. A FIN from the peer counts as a byte received
 * and is taken off again; of a socket that was reset after its FIN that is known the first time it
 * is read, and later readings are one too high. Both counts are meaningful only relative to an
 * earlier reading of the same socket.
 */
#ifndef MIDAIR_SOCKPOS_H
#define MIDAIR_SOCKPOS_H

#include "base/api.h"

#include <stdint.h>

/* 0, or a negative errno (-EAGAIN: the peer is so busy that no two readings agreed). */
API int sockpos_read(int fd, uint64_t *ret_taken, uint64_t *ret_given);
/* Whether the peer has reset it: nobody is there any more. */
int sockpos_reset(int fd);

#endif
