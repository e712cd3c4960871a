"""Taking an instance over from a manager that has died: what is found, and what becomes of it.

Parts outlive their manager. What the next one needs lies in the runtime directory:

    *.state        of each process, written by itself: who it is and what it does (runtime.py)
    *.origin       the same: its release, and where its log goes. A process without these two has
                   ended with the manager (spawn.py)
    config.toml    the configuration that the parts were given; it stays the one of the instance
    manager.json   what only a manager knows (`Memory`): releases to go back to, counts of restarts

The order matters once: the socket for notifications is there before the state files are read, so
what a process became was either written before, or is told.

What was in the middle of happening is settled: an upgrade whose new process is at work has
succeeded; if it is not, that process is ended, as are those that wait for a role without need.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from midair import config, config_uses, names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.process.lease import Lease
from midair.process.runtime import Runtime, State, start_ticks
from midair.up.component import Component
from midair.up.process import PIPE_SUFFIX, Life, Process
from midair.up.release import Release

CONFIG = "config.toml"
MEMORY = "manager.json"
GONE_S = 5.0  # how long parts that end with their manager may take to do so
STOP_S = 3.0  # how long parts may take to end before they are killed


# Whether there is something to take over


def only_manager(runtime: Runtime) -> Lease:
    """Takes the manager's lease, or says who has it."""
    lease = Lease(runtime, names.MANAGER)
    if not lease.resume() and not lease.try_acquire():
        raise MidairError(
            f"instance {runtime.instance!r} is already running (pid {lease.holder_pid()}); "
            "stop it with `midair down`, or start another with --name",
            Exit.ALREADY_RUNNING,
        )
    return lease


def parts(runtime: Runtime) -> list[State]:
    """Who is alive, but for the manager."""
    return [state for state in runtime.states() if state.role != names.MANAGER]


def look(runtime: Runtime) -> Config | None:
    """For who has the lease: the configuration of the instance to take over; None: there is none.

    Those that only look at an instance are ended if they are all that is left of it.
    """
    strangers = [state.pid for state in parts(runtime) if not state.managed]
    if not wait_gone(strangers, GONE_S):
        raise MidairError(
            f"components of instance {runtime.instance!r} are running under another service "
            f"manager (pids {', '.join(map(str, strangers))}); stop them there, or use --name",
            Exit.ALREADY_RUNNING,
        )
    if all(state.role in names.ONLOOKERS for state in parts(runtime)):
        end_parts(runtime)
        return None
    return config.load_part(runtime.path / CONFIG)


def differences(conf: Config, asked: Config, running: Config) -> list[str]:
    """Keys that a user gives other values than were asked for, or than are used."""
    found = []
    conf = config_uses.settled(conf)
    for change in config_uses.changes(asked, conf):
        table, key = change.key.split(".")
        wanted, used = getattr(conf, table), getattr(running, table)
        if not _same(table, key, wanted, used, conf, running):
            found.append(change.key)
    return found


def _same(table: str, key: str, wanted: Any, used: Any, conf: Config, running: Config) -> bool:
    """A free port was chosen, and the number of cores was counted, when the instance began."""
    if (table, key) == ("connmgr", "count"):
        return conf.connmgrs == running.connmgrs
    if (table, key) == ("monitor", "listen"):
        return _same_address(wanted.listen, used.listen)
    if (table, key) == ("server", "listen"):
        return len(wanted.listen) == len(used.listen) and all(
            _same_address(a.address, b.address)
            and {**vars(a), "address": ""} == {**vars(b), "address": ""}
            for a, b in zip(wanted.listen, used.listen, strict=True)
        )
    return bool(getattr(wanted, key) == getattr(used, key))


def _same_address(wanted: str, used: str) -> bool:
    if not wanted or not used:
        return wanted == used
    (host, port), (at_host, at_port) = config.split_address(wanted), config.split_address(used)
    if host != at_host:
        with contextlib.suppress(OSError):  # a name stands for an address
            host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return host == at_host and port in (0, at_port)


# What only a manager knows


@dataclass(frozen=True)
class Remembered:
    """Of one component."""

    release: Release
    previous: Release | None = None
    restarts: int = 0
    deaths: tuple[float, ...] = ()  # monotonic: the clock of the machine, not of a process


class Memory:
    """The file with what only a manager knows, written when that changes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._text = ""

    def read(self) -> dict[str, Remembered]:
        """Component -> what is known. Without a file that can be read: nothing."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            data = self._runtime.read_own(MEMORY)
            return msgspec.json.decode(data, type=dict[str, Remembered])
        return {}

    def keep(self, components: Sequence[Component]) -> None:
        known = {
            c.called: asdict(
                Remembered(c.release, c.previous, c.restarts, tuple(c.deaths_at)),
            )
            for c in components
        }
        text = json.dumps(known)
        if text != self._text:
            self._runtime.write(MEMORY, text, 0o600)
            self._text = text


# Taking over


def adopt(
    runtime: Runtime, components: list[Component], known: dict[str, Remembered], standby: bool
) -> int:
    """Gives components the processes that are alive, and what is known of them; how many."""
    by_name = {c.called: c for c in components}
    for called, it in known.items():
        if component := by_name.get(called):
            component.release, component.previous = it.release, it.previous
            component.restarts = it.restarts
            component.deaths_at.extend(it.deaths)
    adopted = 0
    for state in parts(runtime):
        process = Process.adopt(runtime, state)
        if process is None:
            continue
        component = by_name.get(names.component(state.role, state.index))
        if component is None:  # of a configuration that there is not
            process.kill(signal.SIGKILL)
            continue
        process.setup = component.setup
        if state.origin is not None and state.origin.config:
            process.setup = replace(component.setup, config=Path(state.origin.config))
        component.processes.append(process)
        adopted += 1
    for component in components:
        settle(component, standby and component.role not in (names.KEEPER, *names.ONLOOKERS))
    _remove_pipes(runtime)
    return adopted


def all_known(runtime: Runtime, components: Sequence[Component]) -> bool:
    """Whether another manager would find all processes there are."""
    found = {state.pid for state in runtime.states()}
    return all(p.pid in found for c in components for p in c.processes)


def settle(component: Component, standby: bool) -> None:
    """Ends what was in the middle of happening when the last manager died."""
    active = component.active
    if active is not None and active.release != component.release:
        component.previous, component.release = component.release, active.release
    wanted = [
        process
        for process in component.processes
        if process.life is not Life.READY and process.release == component.release
    ]
    wanted = wanted[: (1 if standby or active is None else 0)]
    for process in component.processes:
        if process.life is not Life.READY and process not in wanted:
            process.retire()


def _remove_pipes(runtime: Runtime) -> None:
    """Logs of processes that have died while nobody read them."""
    used = {state.origin.stderr for state in runtime.states() if state.origin is not None}
    for path in runtime.path.glob(f"*{PIPE_SUFFIX}"):
        if path.name not in used:
            path.unlink(missing_ok=True)


# Without a manager


def end_parts(runtime: Runtime) -> int:
    """For who has the manager's lease: ends all parts of `midair up`; how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + STOP_S
    while alive := [state for state in parts(runtime) if state.managed]:
        late = time.monotonic() > deadline
        for state in alive:
            if late or state.pid not in ended:
                _signal(state, signal.SIGKILL if late else signal.SIGTERM)
            ended.add(state.pid)
        patience_s = 0.1 if late else max(0.0, deadline - time.monotonic())
        wait_gone([state.pid for state in alive], patience_s)
    return len(ended)


def _signal(state: State, number: signal.Signals) -> None:
    """To that process, and never to a later one of its number."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(state.pid)
        try:
            if start_ticks(state.pid) == state.start_ticks:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def wait_gone(pids: Sequence[int], timeout_s: float) -> bool:
    """Waits until none of the processes is left; False if that takes too long."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(fd)
    return True
