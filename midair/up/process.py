"""One process of a component, as `midair up` sees it: started by it, or by a manager before it.

The life of a process: STARTING (spawned) -> STANDBY (it waits for the lease; left out when
the lease is free) -> READY (it sent READY=1) -> DOWN (it died, by itself or killed).

What it writes goes through a named pipe in the runtime directory, which it holds open for reading
too: while there is no manager, the pipe keeps 64 KiB of it, and nobody waits for its log or dies of
it. The next manager opens the pipe and reads on.

Facts relied on:
- a pidfd means one process, never a later one of the same number; it is readable when that has
  ended, and is allowed for every process of ours, not only for children;
- how a process ended is told to its parent by waitid(). Of others, /proc/<pid>/stat says it while
  nobody has waited for them (the last field), and PIDFD_GET_INFO (Linux 6.15) from then on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from midair.exits import FATAL, describe
from midair.process import spawn
from midair.process.runtime import ACTIVE, STANDBY, Runtime, State, start_ticks
from midair.up import release as releases
from midair.up.listeners import Listening
from midair.up.release import Release

START_S = 30.0  # a process that says nothing for this long while starting is hung
PIPE_SUFFIX = ".log"
UNKNOWN_END = "ended, nobody knows how (another manager had started it)"
_LINE_BYTES_MAX = 4096
# struct pidfd_info: mask, cgroup, eleven numbers, exit code.
_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 8


@dataclass(frozen=True)
class Setup:
    """What a process is started with; `midair reload` gives its component another one."""

    config: Path
    listen: tuple[Listening, ...] = ()
    watchdog_s: float = 10.0

    def without_sockets(self) -> Setup:
        return replace(self, listen=())


class Life(Enum):
    DOWN = "down"
    STARTING = "starting"
    STANDBY = "standby"
    READY = "ready"


class Process:
    """A process of a component. It is started once, and dies once."""

    def __init__(self, release: Release, pid: int, pidfd: int, pipe: Path | None) -> None:
        self.release = release
        self.setup = Setup(Path())
        self.clients_left: int | None = None  # of a connmgr that takes no more, as it says
        self.empty = False  # nobody needs it: it says so when it is retiring
        self.pid = pid
        self.pidfd = pidfd
        self.life = Life.STARTING
        self.waited = False  # it has been a standby
        self.retired = False  # its end is wanted
        self.gone_quiet = False  # it was killed because it said nothing
        self.ready_at = 0.0  # monotonic
        self.last_line = ""
        self.last_end = ""
        self.last_code: int | None = None  # of its end; below 0: the signal
        self.hopeless = False  # its exit code says that another start cannot help
        self.started_at = self.heard_at = time.monotonic()
        self.stderr_fd = -1  # our end of its stderr; -1: it has none that we could read
        self._pipe = pipe
        self._partial = b""
        if pipe is not None:
            with contextlib.suppress(OSError):
                self.stderr_fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    @classmethod
    def start(
        cls,
        runtime: Runtime,
        release: Release,
        argv: Sequence[str],
        environ: Mapping[str, str],
        listen: Sequence[tuple[str, int]],
        user: spawn.User | None,
    ) -> Process:
        """Spawns it."""
        pipe = _make_pipe(runtime)
        writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            pid = spawn.spawn(argv, environ, listen, writer, user)
            # Nobody else waits for a child of ours: the number is its own until we do.
            return cls(release, pid, os.pidfd_open(pid), pipe)
        finally:
            os.close(writer)

    @classmethod
    def adopt(cls, runtime: Runtime, state: State) -> Process | None:
        """A process that another manager started, and that has said who it is. None: it is dead."""
        try:
            pidfd = os.pidfd_open(state.pid)
        except ProcessLookupError:
            return None
        if start_ticks(state.pid) != state.start_ticks:  # asked after the pidfd was there
            os.close(pidfd)
            return None
        release, pipe = releases.own(), None
        if state.origin is not None:
            release = Release(state.origin.python, state.origin.root, state.version)
            if state.origin.stderr:
                pipe = runtime.path / state.origin.stderr
        process = cls(release, state.pid, pidfd, pipe)
        process.started_at = time.monotonic() - state.uptime_s
        if state.state == ACTIVE:
            process.life = Life.READY
            process.ready_at = process.heard_at
        elif state.state == STANDBY:
            process.life = Life.STANDBY
            process.waited = True
        return process

    @property
    def alive(self) -> bool:
        return self.life is not Life.DOWN

    def notified(self, fields: Mapping[str, str]) -> None:
        """A notification of the process arrived."""
        self.heard_at = time.monotonic()
        if "CLIENTS_LEFT" in fields:
            with contextlib.suppress(ValueError):
                self.clients_left = int(fields["CLIENTS_LEFT"])
            self.empty = fields.get("EMPTY") == "1"
        if fields.get("READY") == "1" and self.life is not Life.READY:
            self.life = Life.READY
            self.ready_at = self.heard_at
            with contextlib.suppress(ValueError, OverflowError):  # it says when that was
                said = int(fields.get("MONOTONIC_USEC", "")) / 1e6
                self.ready_at = min(self.heard_at, said)
        elif fields.get("STATUS") == STANDBY and self.life is Life.STARTING:
            self.life = Life.STANDBY
            self.waited = True

    def hung_s(self) -> float | None:
        """For how long it has said nothing, if that is too long and nobody has noticed yet."""
        if not self.alive or self.gone_quiet:
            return None
        silent = time.monotonic() - self.heard_at
        watchdog_s = self.setup.watchdog_s
        allowed = max(START_S, watchdog_s) if self.life is Life.STARTING else watchdog_s
        return silent if silent > allowed else None

    def kill(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def retire(self) -> None:
        """Ends it because it is not needed any more. There is one way to end: to die."""
        self.retired = True
        self.kill(signal.SIGKILL)

    def reap(self, wait: bool = False) -> bool:
        """True if the process has died since the last call."""
        if not self.alive or not self._has_ended(wait):
            return False
        self.last_code = code = self._exit_code()
        self.last_end = UNKNOWN_END if code is None else describe(code)
        self.hopeless = code in FATAL
        self.life = Life.DOWN
        self._close()
        return True

    def how_it_ended(self) -> str:
        """For a message: its end, and the last thing it said."""
        return self.last_end + (f"; it said: {self.last_line}" if self.last_line else "")

    def read_stderr(self) -> None:
        """Passes on what the process wrote, and remembers its last line."""
        while self.stderr_fd >= 0:
            try:
                data = os.read(self.stderr_fd, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-_LINE_BYTES_MAX:]
            full = [line for line in lines if line.strip()]
            if full:
                self.last_line = full[-1].decode(errors="replace").strip()

    def _has_ended(self, wait: bool) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if wait else 0))

    def _exit_code(self) -> int | None:
        """How it ended, as subprocess says it; None: nobody knows."""
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if found is not None:
                by_itself = found.si_code == os.CLD_EXITED
                return found.si_status if by_itself else -found.si_status
        with contextlib.suppress(OSError, ValueError, IndexError):
            *head, status = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            if head[0] == "Z":
                signal.pidfd_send_signal(self.pidfd, 0)  # fails if that was a later process
                return os.waitstatus_to_exitcode(int(status))
        with contextlib.suppress(OSError):
            info = bytearray(_INFO.size)
            struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(status)
        return None

    def _close(self) -> None:
        """Takes its last words, and what it had of us."""
        self.read_stderr()
        if self._partial.strip():
            self.last_line = self._partial.decode(errors="replace").strip()
        self._partial = b""
        for fd in (self.stderr_fd, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.stderr_fd = self.pidfd = -1
        if self._pipe is not None:
            self._pipe.unlink(missing_ok=True)


def _make_pipe(runtime: Runtime) -> Path:
    """A named pipe for one process, empty, and of this user alone."""
    number = 0
    while True:
        path = runtime.path / f"{os.getpid()}-{number}{PIPE_SUFFIX}"
        try:
            os.mkfifo(path, 0o600)
            return path
        except FileExistsError:
            number += 1
