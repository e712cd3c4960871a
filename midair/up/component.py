"""One component as `midair up` sees it: a role that should be filled, and its processes.

There is one process at work, and at times a second one that waits for its lease: a standby,
or the next version during an upgrade. Which of them is at work is decided by the lease, not
here; the processes say how far they are (process.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from midair import names
from midair.process import spawn
from midair.process.runtime import Runtime
from midair.up.listeners import Listening
from midair.up.process import Life, Process, Setup
from midair.up.release import Release


class Component:
    """A role to keep filled, and the release to fill it with."""

    def __init__(
        self,
        role: str,
        index: int | None,
        module: str,
        arguments: Sequence[str],
        setup: Setup,
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
        self.setup = setup  # what its processes are given
        self._module = module
        self._arguments = arguments
        self._user = user
        self.deaths_at: deque[float] = deque()  # monotonic

    @property
    def active(self) -> Process | None:
        """The process that is at work."""
        ready = [process for process in self.processes if process.life is Life.READY]
        return ready[-1] if ready else None

    @property
    def staff(self) -> list[Process]:
        """The processes that are here to stay: not an upgrade's candidate, not retired."""
        return [p for p in self.processes if not p.retired and p is not self.candidate]

    @property
    def listen(self) -> Sequence[Listening]:
        return self.setup.listen

    @property
    def can_start(self) -> bool:
        """Whether all that its processes are given is there."""
        return all(it.sock is not None for it in self.listen)

    def start(
        self,
        runtime: Runtime,
        environ: Mapping[str, str],
        release: Release | None = None,
        setup: Setup | None = None,
    ) -> Process:
        """Spawns a process, of its own release and setup if no others are given."""
        release, setup = release or self.release, setup or self.setup
        watchdog = {"WATCHDOG_USEC": str(int(setup.watchdog_s * 1e6))}
        process = Process.start(
            runtime,
            release,
            [*release.command(self._module), *self._arguments, "--config", str(setup.config)],
            release.environ({**environ, **watchdog}),
            [(it.fd_name, it.sock.fileno()) for it in setup.listen if it.sock is not None],
            self._user,
        )
        process.setup = setup
        self.processes.append(process)
        return process

    def died(self) -> None:
        """Counts a death that nobody wanted."""
        self.restarts += 1
        self.deaths_at.append(time.monotonic())

    def deaths(self, window_s: float) -> int:
        """How often it died within the last `window_s` seconds."""
        while self.deaths_at and self.deaths_at[0] < time.monotonic() - window_s:
            self.deaths_at.popleft()
        return len(self.deaths_at)

    def go_back(self) -> bool:
        """Takes the release before this one again; False: there is none."""
        if self.previous is None:
            return False
        self.release, self.previous = self.previous, None
        self.deaths_at.clear()
        return True
