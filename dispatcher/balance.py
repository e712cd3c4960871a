"""Which connmgr gets the next client: the one with the fewest, then the least busy.

The number of connections is what decides, because it is known exactly and at once; CPU
use breaks ties. Counts are kept as connections are given out, and taken afresh from the
connection table at most once a second, which is how closed connections are noticed.

A connmgr that is away gets its share: its socket is the service manager's, and it will be back.
One whose socket does not exist (fewer units enabled than configured) gets none, nor does one that
the router or another connmgr does not know yet, because it was started before there was one: nobody
may get a message whose body it has not mapped. Unless that is true of all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import psutil

from midair import names
from midair.process.runtime import ACTIVE, Runtime, State

REFRESH_S = 1.0


class Balance:
    """Connections and CPU use of each connmgr."""

    def __init__(
        self,
        connmgrs: int,
        count: Callable[[], list[int]],
        runtime: Runtime,
        serving: int | None = None,
    ) -> None:
        """`serving`: so many of them get new clients, the others are retiring. None: all."""
        self.counts = [0] * connmgrs
        self.busy = [0.0] * connmgrs
        self._serving = connmgrs if serving is None else serving
        self._served = list(range(self._serving))  # those that can be given clients
        self._count = count
        self._runtime = runtime
        self._processes: dict[int, psutil.Process] = {}
        self._due = 0.0

    def choose(self) -> int:
        """The index of the connmgr for one more connection, which is counted to it."""
        self.refresh()
        index = min(self._served, key=lambda at: (self.counts[at], self.busy[at]))
        self.counts[index] += 1
        return index

    def take_back(self, index: int) -> None:
        """The connection just counted was not given after all."""
        self.counts[index] -= 1

    @property
    def total(self) -> int:
        return sum(self.counts)

    def refresh(self, force: bool = False) -> None:
        """Counts afresh, at most once in REFRESH_S unless forced."""
        now = time.monotonic()
        if now < self._due and not force:
            return
        self._due = now + REFRESH_S
        self.counts = self._count()[: len(self.counts)]
        if len(self.counts) > 1:
            states = self._runtime.states()
            known = self._known(states)
            everyone = range(self._serving)
            found = [at for at in everyone if at < known and self._has_socket(at)]
            self._served = found or list(everyone)
            self._measure(states)

    def _known(self, states: Sequence[State]) -> int:
        """So many ports are known to all who must know them."""
        said = [state.ports for state in states if state.state == ACTIVE and state.ports]
        return min(said, default=len(self.counts))

    def _has_socket(self, index: int) -> bool:
        return os.path.exists(self._runtime.socket(names.handoff_socket(index)))

    def _measure(self, states: Sequence[State]) -> None:
        """CPU use since the last call, of the processes that act as connmgrs now."""
        pids = {
            state.index: state.pid
            for state in states
            if state.role == names.CONNMGR and state.state == ACTIVE and state.index is not None
        }
        for index in range(len(self.counts)):
            process = self._processes.get(index)
            try:
                if index not in pids:
                    self._processes.pop(index, None)
                    self.busy[index] = 0.0
                    continue
                if process is None or process.pid != pids[index]:
                    process = self._processes[index] = psutil.Process(pids[index])
                self.busy[index] = process.cpu_percent(None)
            except psutil.Error:
                self._processes.pop(index, None)
                self.busy[index] = 0.0
