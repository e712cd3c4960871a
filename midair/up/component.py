"""One component as `midair up` sees it: a role that should be filled, and its processes.

There is one process at work, and at times a second one that waits for its lease: a standby,
or the next version during an upgrade. Which of them is at work is decided by the lease, not
here; the processes say how far they are.

The life of a process: STARTING (spawned) -> STANDBY (it waits for the lease; left out when
the lease is free) -> READY (it sent READY=1) -> DOWN (it died, by itself or killed).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum

from midair import names
from midair.exits import FATAL, describe
from midair.process import spawn
from midair.process.runtime import STANDBY
from midair.up.release import Release

START_S = 30.0  # a process that says nothing for this long while starting is hung
_LINE_BYTES_MAX = 4096


class Life(Enum):
    DOWN = "down"
    STARTING = "starting"
    STANDBY = "standby"
    READY = "ready"


class Process:
    """A process that was started for a component. It is started once, and dies once."""

    def __init__(
        self,
        release: Release,
        argv: Sequence[str],
        environ: Mapping[str, str],
        listen: Sequence[tuple[str, int]],
        user: spawn.User | None,
    ) -> None:
        self.release = release
        self.life = Life.STARTING
        self.waited = False  # it has been a standby
        self.retired = False  # its end is wanted
        self.ready_at = 0.0  # monotonic
        self.last_line = ""
        self.last_end = ""
        self.last_code = 0  # of its end; below 0: the signal
        self.hopeless = False  # its exit code says that another start cannot help
        self.started_at = self.heard_at = time.monotonic()
        self._partial = b""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        self.stderr_fd = reader  # our end of its stderr
        try:
            self.pid = spawn.spawn(argv, environ, listen, writer, user)
        finally:
            os.close(writer)

    @property
    def alive(self) -> bool:
        return self.life is not Life.DOWN

    def notified(self, fields: Mapping[str, str]) -> None:
        """A notification of the process arrived."""
        self.heard_at = time.monotonic()
        if fields.get("READY") == "1" and self.life is not Life.READY:
            self.life = Life.READY
            self.ready_at = self.heard_at
            # It says when that was, if it is ours.
            with contextlib.suppress(ValueError, OverflowError):
                self.ready_at = int(fields.get("MONOTONIC_USEC", "")) / 1e6
        elif fields.get("STATUS") == STANDBY and self.life is Life.STARTING:
            self.life = Life.STANDBY
            self.waited = True

    def hung_s(self, watchdog_s: float) -> float | None:
        """For how long it has said nothing, if that is too long."""
        if not self.alive:
            return None
        silent = time.monotonic() - self.heard_at
        allowed = max(START_S, watchdog_s) if self.life is Life.STARTING else watchdog_s
        return silent if silent > allowed else None

    def kill(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def retire(self) -> None:
        """Ends it because it is not needed any more. There is one way to end: to die."""
        self.retired = True
        self.kill(signal.SIGKILL)

    def reap(self, wait: bool = False) -> bool:
        """True if the process has died since the last call."""
        if not self.alive:
            return False
        try:
            pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return False
        self.read_stderr()
        if self._partial.strip():
            self.last_line = self._partial.decode(errors="replace").strip()
        self._partial = b""
        os.close(self.stderr_fd)
        self.stderr_fd = -1
        code = os.waitstatus_to_exitcode(status)
        self.last_end = describe(code)
        self.last_code = code
        self.hopeless = code in FATAL
        self.life = Life.DOWN
        return True

    def how_it_ended(self) -> str:
        """For a message: its end, and the last thing it said."""
        return self.last_end + (f"; it said: {self.last_line}" if self.last_line else "")

    def read_stderr(self) -> None:
        """Passes on what the process wrote, and remembers its last line."""
        while True:
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


class Component:
    """A role to keep filled, and the release to fill it with."""

    def __init__(
        self,
        role: str,
        index: int | None,
        module: str,
        arguments: Sequence[str],
        listen: Sequence[tuple[str, int]],
        release: Release,
        user: spawn.User | None = None,
    ) -> None:
        self.role = role
        self.index = index
        self.called = names.component(role, index)
        self.release = release
        self.previous: Release | None = None  # to go back to when `release` keeps dying
        self.processes: list[Process] = []
        self.candidate: Process | None = None  # of the next release, started by an upgrade
        self.switching = False  # an upgrade decides what is started
        self.restarts = 0
        self.standby_after = 0.0  # monotonic: no standby is started before
        self.start_after = 0.0  # monotonic: it is not started again before
        self.away_since = 0.0  # monotonic: nobody has been at work since; 0: somebody is
        self._module = module
        self._arguments = arguments
        self._listen = listen
        self._user = user
        self._deaths: deque[float] = deque()

    @property
    def active(self) -> Process | None:
        """The process that is at work."""
        ready = [process for process in self.processes if process.life is Life.READY]
        return ready[-1] if ready else None

    @property
    def staff(self) -> list[Process]:
        """The processes that are here to stay: not an upgrade's candidate, not retired."""
        return [p for p in self.processes if not p.retired and p is not self.candidate]

    def start(self, environ: Mapping[str, str], release: Release | None = None) -> Process:
        """Spawns a process, of its own release if no other is given."""
        release = release or self.release
        process = Process(
            release,
            [*release.command(self._module), *self._arguments],
            release.environ(environ),
            self._listen,
            self._user,
        )
        self.processes.append(process)
        return process

    def died(self) -> None:
        """Counts a death that nobody wanted."""
        self.restarts += 1
        self._deaths.append(time.monotonic())

    def deaths(self, window_s: float) -> int:
        """How often it died within the last `window_s` seconds."""
        while self._deaths and self._deaths[0] < time.monotonic() - window_s:
            self._deaths.popleft()
        return len(self._deaths)

    def go_back(self) -> bool:
        """Takes the release before this one again; False: there is none."""
        if self.previous is None:
            return False
        self.release, self.previous = self.previous, None
        self._deaths.clear()
        return True
