/* guard: saves the sockets of a dispatcher that died. See guard.h.
 *
 * After clone() the child has a copy of an interpreter it must not use: it calls the kernel and
 * nothing else.
 */
#include "dispatcher/guard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define HOLD 1u              /* midair/process/wire.py */
#define SOCKETS_A_MESSAGE 253 /* the kernel's SCM_MAX_FD */

/* A connected TCP socket: what accept() returned and nobody has closed. */
static int is_client(int fd)
{
    int domain = 0, type = 0, listening = 1;
    socklen_t len = sizeof(int);
    struct sockaddr_storage peer;
    socklen_t peer_len = sizeof peer;

    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) != 0 ||
        (domain != AF_INET && domain != AF_INET6))
        return 0;
    len = sizeof(int);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) != 0 || type != SOCK_STREAM)
        return 0;
    len = sizeof(int);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &len) != 0 || listening)
        return 0;
    return getpeername(fd, (struct sockaddr *)&peer, &peer_len) == 0;
}

/* Descriptors of this process, read with the bare system call: nothing is allocated. */
static uint32_t find_clients(int *fds, uint32_t room)
{
    char buffer[4096] __attribute__((aligned(8)));
    uint32_t count = 0;
    int dir = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long got;

    if (dir < 0)
        return 0;
    while ((got = syscall(SYS_getdents64, dir, buffer, sizeof buffer)) > 0) {
        for (long at = 0; at < got;) {
            struct dirent64 *entry = (struct dirent64 *)(buffer + at);
            int fd = 0;

            at += entry->d_reclen;
            for (const char *c = entry->d_name; *c; c++)
                fd = *c < '0' || *c > '9' ? -1 : fd * 10 + (*c - '0');
            if (fd > 2 && fd != dir && count < room && is_client(fd))
                fds[count++] = fd;
        }
    }
    close(dir);
    return count;
}

static void send_part(int keeper, const int *fds, uint32_t count, uint64_t uid)
{
    struct { uint32_t op, count; uint64_t uids[SOCKETS_A_MESSAGE]; } body;
    char control[CMSG_SPACE(sizeof(int) * SOCKETS_A_MESSAGE)] __attribute__((aligned(8)));
    struct iovec iov = {&body, 8 + 8 * (size_t)count};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
                         .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    body.op = HOLD;
    body.count = count;
    for (uint32_t i = 0; i < count; i++)
        body.uids[i] = uid + i;
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * count);
    memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
    (void)sendmsg(keeper, &msg, MSG_NOSIGNAL);
}

/* The keeper, or the service manager that listens for it: as trust.check_peer() of midair/process/trust.py. */
static int is_ours(int keeper)
{
    struct ucred who;
    socklen_t len = sizeof who;

    return getsockopt(keeper, SOL_SOCKET, SO_PEERCRED, &who, &len) == 0 && (who.uid == geteuid() || who.uid == 0);
}

static void save(const char *path, uint64_t uid)
{
    static int fds[GUARD_SOCKETS_MAX];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    uint32_t count = find_clients(fds, GUARD_SOCKETS_MAX);
    int keeper;

    if (count == 0)
        return;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    keeper = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (keeper < 0 || connect(keeper, (struct sockaddr *)&address, sizeof address) != 0 || !is_ours(keeper))
        return;
    for (uint32_t at = 0; at < count; at += SOCKETS_A_MESSAGE) {
        uint32_t part = count - at < SOCKETS_A_MESSAGE ? count - at : SOCKETS_A_MESSAGE;

        send_part(keeper, fds + at, part, uid + at);
    }
}

static void stand_guard(pid_t parent, const char *path, uint64_t uid) __attribute__((noreturn));
static void stand_guard(pid_t parent, const char *path, uint64_t uid)
{
    sigset_t told;
    int number;

    sigemptyset(&told);
    sigaddset(&told, SIGUSR1);
    sigprocmask(SIG_SETMASK, &told, NULL);
    signal(SIGTERM, SIG_IGN); /* a stop is for the dispatcher; this follows by itself */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGUSR1, SIG_IGN);
    signal(SIGUSR2, SIG_IGN);
    signal(SIGCHLD, SIG_DFL);
    prctl(PR_SET_NAME, "midair-guard");
    prctl(PR_SET_PDEATHSIG, SIGUSR1);
    while (getppid() == parent)
        (void)sigwait(&told, &number);
    save(path, uid);
    _exit(0);
}

pid_t guard_start(const char *keeper_path, uint32_t generation)
{
    pid_t parent = getpid();
    long pid = syscall(SYS_clone, CLONE_FILES | CLONE_SYSVSEM | SIGCHLD, NULL, NULL, NULL, NULL);

    if (pid < 0)
        return -errno;
    if (pid == 0)
        stand_guard(parent, keeper_path,
                    GUARD_UID + (uint64_t)(generation % GUARD_GENERATIONS) * GUARD_SOCKETS_MAX);
    return (pid_t)pid;
}
