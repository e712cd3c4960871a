"""After a storm, with its clients still connected: what is there, and nothing else.

Each check waits until it holds, because chunks are swept and closed connections are reaped
in the background, and says what it found instead when it does not.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from midair import config, names
from midair.keeper.client import KeeperClient
from midair.process import ipc, wire
from midair.process.runtime import Runtime
from native import connmgr as native
from native.conntable import ASSIGNED, CLOSED, ConnTable, Slot
from tests.storm.killer import Killer, StormError

PATIENCE_S = 90.0  # an upgraded keeper keeps what nobody claims for a minute
DESCRIPTORS = 64  # that a process may have beside those of clients


class Debris:
    """The checks of one instance."""

    def __init__(self, killer: Killer, conf: config.Config, stderr_path: Path) -> None:
        self.killer = killer
        self.runtime: Runtime = killer.runtime
        self.conf = conf
        self.stderr_path = stderr_path
        self.table = ConnTable.attach(self.runtime)
        chunks = native.arena_chunks(conf.connmgr.arena_bytes)
        self.arenas = [
            native.open_arena(self.runtime, index, chunks) for index in range(conf.connmgrs)
        ]

    def close(self) -> None:
        self.table.close()

    def eventually(self, look: Callable[[], str]) -> None:
        """Until `look()` finds nothing to say."""
        deadline = time.monotonic() + PATIENCE_S
        while found := look():
            if time.monotonic() > deadline:
                raise StormError(f"left after {PATIENCE_S:g} s: {found}")
            self.killer.sleep(0.05)

    def used(self) -> list[Slot]:
        return [slot for slot in self.table.used() if slot.state != CLOSED]

    def connections(self, ports: list[int]) -> None:
        """The table lists exactly the connections that are open, and all are served."""

        def look() -> str:
            used = self.used()
            there = {slot.port for slot in used}
            assigned = [slot.uid for slot in used if slot.state == ASSIGNED]
            if len(used) == len(ports) and there == set(ports) and not assigned:
                return ""
            more, fewer = sorted(there - set(ports)), sorted(set(ports) - there)
            return (
                f"connection table: {len(used)} connections, {len(ports)} are open; assigned "
                f"{assigned[:9]}; ports too many {more[:9]}, missing {fewer[:9]}"
            )

        self.eventually(look)

    def keeper(self) -> None:
        """It holds exactly what is served."""
        client = KeeperClient(self.runtime.socket(names.KEEPER_SOCKET))

        def look() -> str:
            held = dict(client.give(None))
            wire.close_all(held.values())
            served = {slot.uid for slot in self.used()}
            if set(held) == served:
                return ""
            return (
                f"keeper: too many {sorted(set(held) - served)[:9]}, "
                f"missing {sorted(served - set(held))[:9]} of {len(served)}"
            )

        try:
            self.eventually(look)
        finally:
            client.close()

    def arenas_empty(self) -> None:
        """No message lives; only the chunk that is open is in use."""

        def look() -> str:
            census = [native.arena_census(arena) for arena in self.arenas]
            if all(live == 0 and busy <= 1 for live, busy in census):
                return ""
            return f"arenas (messages alive, chunks in use): {census}"

        self.eventually(look)

    def descriptors(self) -> None:
        """As many as there are connections, and a few."""
        counts = self.table.counts()
        most = {names.ROUTER: 0, names.DISPATCHER: 0, names.KEEPER: sum(counts)}
        for index in range(self.conf.connmgrs):
            most[names.component(names.CONNMGR, index)] = counts[index]

        def look() -> str:
            found = []
            for who, clients in most.items():
                for pid in self.killer.pids(who):
                    there = len(os.listdir(f"/proc/{pid}/fd"))
                    if there > clients + DESCRIPTORS:
                        found.append(f"{who} has {there} descriptors for {clients} connections")
            return "; ".join(found)

        self.eventually(look)

    def recovered(self, who: str, pattern: str) -> tuple[int, ...]:
        """Kills a component once more; the numbers it says it recovered."""
        pid = self.killer.kill(who)
        fresh = self.killer.await_pid(who, other_than=pid)
        self.killer.await_up(who)
        found: tuple[int, ...] = ()

        def look() -> str:
            nonlocal found
            for line in self.stderr_path.read_text().splitlines():
                if f"[{fresh}]" in line and (match := re.search(pattern, line)):
                    found = tuple(map(int, match.groups()))
                    return ""
            return f"{who} (pid {fresh}) does not say what it recovered"

        self.eventually(look)
        return found

    def primary_state(self, subs: int) -> None:
        """Killed once more, each finds what its clients know of, no more and no less."""
        (found,) = self.recovered(names.ROUTER, r"recovered: (\d+) subscriptions")
        if found != subs:
            raise StormError(f"the router has {found} subscriptions, its clients {subs}")
        for index in range(self.conf.connmgrs):
            who = names.component(names.CONNMGR, index)
            wanted = len([slot for slot in self.used() if slot.connmgr == index])
            if not wanted:
                continue
            pattern = r"recovered: (\d+) connections, (\d+) sockets"
            counts = self.recovered(who, pattern)
            if counts != (wanted, wanted):
                raise StormError(f"{who} has {wanted} connections and recovered {counts}")


def own_deaths(text: str) -> list[str]:
    """Deaths in the manager's log that were not our doing, and errors."""
    killed = f"killed by {signal.SIGKILL.name}"
    return [
        line
        for line in text.splitlines()
        if killed not in line and any(sign in line for sign in (" died: ", "Traceback", " error: "))
    ]


def leftovers(name: str, directory: Path) -> list[str]:
    """All there is of an instance that has ended."""
    found = ipc.leftovers(name)
    if directory.exists():
        found.append(f"directory {directory}")
    return found
