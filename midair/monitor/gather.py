"""What there is to see of a running instance, at one moment.

Read from the statistics segments (native/stats.h) and the routing segment, mapped read-only, from
the runtime directory and from /proc. Nobody is asked and nothing is written, so looking disturbs
no one, and works while a component is away: its last figures are still there.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from midair import names
from midair.errors import LayoutError, MissingError, PermissionsError
from midair.process import events, ipc
from midair.process.runtime import ACTIVE, Runtime, State
from native.census import Census, Sub
from native.stats import Conn, Counts, Reader

STALE_S = 5.0  # a component at work publishes several times a second


@dataclass(frozen=True)
class Usage:
    """What a process has used: CPU since it began, and memory that is its own."""

    cpu_s: float
    memory: int  # bytes, without shared memory


@dataclass(frozen=True)
class Snapshot:
    """One look."""

    at: float  # monotonic
    wall: float
    states: list[State]
    usage: dict[int, Usage]  # by pid
    counts: dict[str, Counts]  # by component: connmgr/0, router, dispatcher
    conns: dict[int, Conn] = field(default_factory=dict)  # by uid
    shared_bytes: int = 0  # of /dev/shm

    def active(self, component: str) -> State | None:
        """The process at work in a role."""
        for state in self.states:
            if state.state == ACTIVE and names.component(state.role, state.index) == component:
                return state
        return None

    def connmgrs(self) -> list[Counts]:
        return [it for it in self.counts.values() if it.role == names.CONNMGR]

    def total(self, name: str) -> int:
        """A counter, summed over the connection managers."""
        return sum(int(it.totals[name]) for it in self.connmgrs())

    def gauge(self, name: str) -> int:
        """A gauge, summed over the connection managers."""
        return sum(int(it.gauges[name]) for it in self.connmgrs())

    def closed(self) -> list[int]:
        """Connections that ended, by reason."""
        found = [it.totals["closed"] for it in self.connmgrs()]
        return [sum(column) for column in zip(*found, strict=True)]

    def router(self, name: str) -> int:
        """A counter or gauge of the router; 0 before it has published any."""
        it = self.counts.get(names.ROUTER)
        return 0 if it is None else int({**it.totals, **it.gauges}[name])


class Sources:
    """The segments of an instance, kept open and opened again when they are replaced."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.problems: dict[str, str] = {}  # component -> why its figures cannot be read
        self._readers: dict[str, Reader] = {}
        self._census: Census | None = None

    def look(self, with_conns: bool = True) -> Snapshot:
        """Everything as it is now."""
        states = self.runtime.states()
        readers = self._open_readers()
        counts = {called: reader.counts() for called, reader in readers.items()}
        conns: dict[int, Conn] = {}
        if with_conns:
            for reader in readers.values():
                conns.update((conn.uid, conn) for conn in reader.conns())
        return Snapshot(
            at=time.monotonic(),
            wall=time.time(),
            states=states,
            usage={s.pid: it for s in states if (it := usage(s.pid)) is not None},
            counts=counts,
            conns=conns,
            shared_bytes=shared_bytes(self.runtime),
        )

    def subs(self, pattern: str = "", test: str = "", uid: int = 0) -> Iterator[Sub]:
        """The subscriptions, see census.py. MissingError, PermissionsError, LayoutError."""
        if self._census is None or not self._census.current:
            self._census = Census(self.runtime)
        return self._census.subs(pattern, test, uid)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The event log, of some kinds or whole; the oldest first."""
        return [it for it in events.read(self.runtime) if not kinds or it.get("kind") in kinds]

    def _open_readers(self) -> dict[str, Reader]:
        found: dict[str, Reader] = {}
        self.problems = {}
        for role, index in roles(self.runtime):
            called = names.component(role, index)
            reader = self._readers.get(called)
            try:
                if reader is None or not reader.current:
                    reader = Reader(self.runtime, role, index)
            except MissingError:
                continue
            except (LayoutError, PermissionsError) as error:
                self.problems[called] = str(error)
                continue
            found[called] = reader
        self._readers = found
        return found


def roles(runtime: Runtime) -> Iterator[tuple[str, int | None]]:
    """(role, index) of every component that publishes figures."""
    prefix = f"{runtime.prefix}.{names.STATS}."
    found = (path.name.removeprefix(prefix) for path in ipc.SHM.glob(f"{prefix}*"))
    for index in sorted(int(word) for word in found if re.fullmatch("[0-9]{1,4}", word)):
        yield names.CONNMGR, index
    yield names.ROUTER, None
    yield names.DISPATCHER, None


def usage(pid: int) -> Usage | None:
    """Of a process that may be gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
    except psutil.Error:
        return None
    cpu_s = times.user + times.system
    # These are ticks, which miss what runs for less than one; schedstat counts nanoseconds.
    with contextlib.suppress(OSError, ValueError):
        cpu_s = max(cpu_s, int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9)
    return Usage(cpu_s, max(0, memory.rss - memory.shared))


def shared_bytes(runtime: Runtime) -> int:
    """Shared memory that is really used, all segments of the instance together."""
    total = 0
    for path in ipc.SHM.glob(f"{runtime.prefix}.*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue
    return total


def away(snapshot: Snapshot, connmgrs: int) -> list[str]:
    """What is wrong with an instance, in words; nothing: it is healthy."""
    wanted = [names.KEEPER, names.ROUTER]
    wanted += [names.component(names.CONNMGR, index) for index in range(connmgrs)]
    wanted.append(names.DISPATCHER)
    found = []
    for component in wanted:
        state = snapshot.active(component)
        if state is None:
            found.append(f"{component} is away")
            continue
        counts = snapshot.counts.get(component)
        if counts is None:  # the keeper has none, or ours to read
            continue
        silent_s = state.uptime_s  # those that are there may be its predecessor's
        if counts.pid == state.pid:
            silent_s = min(silent_s, snapshot.at - counts.published_ns / 1e9)
        if silent_s > STALE_S:
            found.append(f"{component} has said nothing for {silent_s:.0f} s")
    return found


@dataclass(frozen=True)
class ConnRate:
    """A connection between two looks, per second."""

    conn: Conn
    messages_in: float
    messages_out: float
    bytes_in: float
    bytes_out: float

    @property
    def messages(self) -> float:
        return self.messages_in + self.messages_out

    @property
    def bytes(self) -> float:
        return self.bytes_in + self.bytes_out


class Rates:
    """What happened between two looks, per second."""

    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.seconds = max(1e-3, now.at - before.at)
        self._before, self._now = before, now
        self.conns = [self._conn(conn) for conn in now.conns.values()]

    def total(self, name: str) -> float:
        """Of a counter of the connection managers."""
        return max(0, self._now.total(name) - self._before.total(name)) / self.seconds

    def cpu_percent(self, pid: int) -> float:
        """Of one core."""
        was, now = self._before.usage.get(pid), self._now.usage.get(pid)
        if now is None:
            return 0.0
        return max(0.0, now.cpu_s - (0.0 if was is None else was.cpu_s)) / self.seconds * 100

    def busy(self) -> list[ConnRate]:
        """Connections that sent messages, the busiest first."""
        found = [it for it in self.conns if it.messages_in > 0]
        return sorted(found, key=lambda it: it.messages_in, reverse=True)

    def fairness(self) -> float | None:
        """Jain's index over the message rates of the busy senders: 1 is an equal share for
        each, 1/n all for one of n. None: nobody sends."""
        return jain([it.messages_in for it in self.busy()])

    def _conn(self, conn: Conn) -> ConnRate:
        was = self._before.conns.get(conn.uid)

        def rate(name: str) -> float:
            earlier = 0 if was is None else getattr(was, name)
            return float(max(0, getattr(conn, name) - earlier)) / self.seconds

        counted = ("messages_in", "messages_out", "bytes_in", "bytes_out")
        return ConnRate(conn, *(rate(name) for name in counted))


def jain(rates: list[float]) -> float | None:
    """(sum x)^2 / (n * sum x^2)."""
    squares = sum(rate * rate for rate in rates)
    return None if not squares else sum(rates) ** 2 / (len(rates) * squares)
