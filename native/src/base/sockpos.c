/* sockpos: exact stream positions from the kernel. See sockpos.h. */
#include "base/sockpos.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

/* The states of linux/include/net/tcp_states.h, which is not a user header. */
enum { TCP_TIME_WAIT = 6, TCP_CLOSE = 7, TCP_CLOSE_WAIT = 8, TCP_LAST_ACK = 9, TCP_CLOSING = 11 };

#define SOCKPOS_TRIES 1000

static int read_info(int fd, struct tcp_info *info)
{
    socklen_t len = sizeof(*info);

    memset(info, 0, sizeof(*info));
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len) == 0 ? 0 : -errno;
}

/* A reset after the peer's FIN says EPIPE, one without it ECONNRESET. Reading it clears it: who asks again,
 * or after a send() that met it, cannot know whether there was a FIN. */
static int was_closing(int fd)
{
    int err = 0;
    socklen_t len = sizeof(err);

    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &len) == 0 && err == EPIPE;
}

/* In these states the peer's FIN has arrived. SIOCINQ does not count it, bytes_received does. */
static uint64_t got_fin(int fd, const struct tcp_info *info)
{
    switch (info->tcpi_state) {
    case TCP_CLOSE:
        return (uint64_t)was_closing(fd);
    case TCP_CLOSE_WAIT:
    case TCP_LAST_ACK:
    case TCP_CLOSING:
    case TCP_TIME_WAIT:
        return 1;
    default:
        return 0;
    }
}

int sockpos_reset(int fd)
{
    struct tcp_info info;

    return read_info(fd, &info) == 0 && info.tcpi_state == TCP_CLOSE;
}

int sockpos_read(int fd, uint64_t *ret_taken, uint64_t *ret_given)
{
    struct tcp_info before, after;

    for (int i = 0; i < SOCKPOS_TRIES; i++) {
        int waiting = 0, unacked = 0;
        int err = read_info(fd, &before);

        if (err)
            return err;
        if (ioctl(fd, SIOCINQ, &waiting) != 0 || ioctl(fd, SIOCOUTQ, &unacked) != 0)
            return -errno;
        err = read_info(fd, &after);
        if (err)
            return err;
        if (before.tcpi_bytes_received != after.tcpi_bytes_received ||
            before.tcpi_bytes_acked != after.tcpi_bytes_acked)
            continue;
        *ret_taken = after.tcpi_bytes_received - (uint64_t)waiting - got_fin(fd, &after);
        *ret_given = after.tcpi_bytes_acked + (uint64_t)unacked;
        return 0;
    }
    return -EAGAIN;
}
