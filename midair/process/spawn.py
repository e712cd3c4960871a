"""Starting a component process: descriptors from 3 on, a user, and no life that nobody knows of.

This is fork() and exec() by hand because LISTEN_PID has to be the pid of the child, which
only the child knows before exec(). The caller has no other threads, so the child may run
Python between the two; whatever goes wrong there is written to its stderr.

Facts relied on: PR_SET_PDEATHSIG sends the signal when the thread that forked ends, is
cleared by a change of user (so it is set after that), and is lost if the parent died
before the call (so the parent is checked after it). It stays over exec(): a process dies with the
manager until it has said who it is (`outlive_parent`), and from then on the next one finds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midair.errors import ConfigError
from midair.process.sdnotify import FIRST_FD

# What the manager is told by signals; a part that gets one ignores it.
FOR_THE_MANAGER = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_EXEC_FAILED = 127
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class User:
    """A user to run a component as."""

    name: str
    uid: int
    gid: int


def find_user(name: str) -> User:
    """The user of that name, for router.user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"router.user: there is no user {name!r}") from None
    return User(name, entry.pw_uid, entry.pw_gid)


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    listen: Sequence[tuple[str, int]],
    stderr_fd: int,
    user: User | None = None,
) -> int:
    """Starts `argv` and returns its pid.

    `listen`: (name, descriptor) of the sockets it gets, in this order, by systemd's
    protocol. It runs in a process group of its own: Ctrl-C is for the manager alone.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _become(argv, dict(environ), listen, stderr_fd, user, parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            said = f"cannot start {argv[0]}: {error}\n"
            os.write(stderr_fd, said.encode(errors="backslashreplace"))
    finally:  # whatever happens: a copy of the manager that goes on would end all that it started
        os._exit(_EXEC_FAILED)


def end_with_parent(number: signal.Signals) -> None:
    """In a child: it gets this signal when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def outlive_parent() -> None:
    """In a child that can be found from now on: it goes on when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _become(
    argv: Sequence[str],
    environ: dict[str, str],
    listen: Sequence[tuple[str, int]],
    stderr_fd: int,
    user: User | None,
    parent: int,
) -> None:
    """In the child: sets everything up and execs."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for number in FOR_THE_MANAGER:  # from its first instruction on
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setpgid(0, 0)

    # Copies above the target range first, so that no dup2 overwrites one still needed.
    above = FIRST_FD + len(listen)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for _, fd in listen]
    stderr_fd = fcntl.fcntl(stderr_fd, fcntl.F_DUPFD_CLOEXEC, above)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stderr_fd, 1)  # stdout is the manager's: its one line must stay the only one
    os.dup2(stderr_fd, 2)
    for at, fd in enumerate(moved):
        os.dup2(fd, FIRST_FD + at)

    if user is not None:
        os.setgroups([user.gid])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_EXEC_FAILED)
    if listen:
        environ["LISTEN_PID"] = str(os.getpid())
        environ["LISTEN_FDS"] = str(len(listen))
        environ["LISTEN_FDNAMES"] = ":".join(name for name, _ in listen)
    if "WATCHDOG_USEC" in environ:
        environ["WATCHDOG_PID"] = str(os.getpid())
    os.execve(argv[0], list(argv), environ)
