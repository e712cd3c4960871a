"""Who is killed when: a plan made from a seed, and the one who carries it out.

The plan is the same for the same seed; at which instruction a kill strikes is not: that is
the machine's doing. Only processes of the instance we started are ever sent a signal: those that
have its name on their command line.

Two rules keep within what Midair promises. The keeper is killed alone, or with the manager:
everybody else is up before, and connmgrs and dispatcher are left alone after, until the new keeper
holds every socket again (asked of the keeper itself). When the manager is killed, another one takes
over, and who was killed with it, or in the middle of that, waits for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from midair import names
from midair.process.runtime import ACTIVE, Runtime
from midair.up.roster import MODULES
from tests.support.copies import Copies

ROLE_OF = {module: role for role, module in MODULES.items()}
APPEAR_S = 30.0  # nothing takes this long to be started again
WHOLE_S = 60.0


class StormError(Exception):
    """What the storm found."""


@dataclass(frozen=True)
class Action:
    """One step of the plan. Its text is what is printed."""

    kind: str
    who: tuple[str, ...] = ()
    delays_s: tuple[float, ...] = ()
    gap_s: float = 0.0  # before it
    settled: bool = False  # wait until those it is about are up before

    def __str__(self) -> str:
        delays = ", ".join(f"{delay * 1e3:.0f}" for delay in self.delays_s)
        words = [self.kind, *self.who, f"({delays} ms)" if delays else ""]
        return " ".join(word for word in words if word) + (" when up" if self.settled else "")


def plan(seed: int, components: list[str], upgrades: bool) -> Iterator[Action]:
    """The actions of a seed, without end."""
    manager = names.MANAGER in components
    components = [name for name in components if name != names.MANAGER]
    chance = random.Random(seed)
    mortal = [name for name in components if name != names.KEEPER]
    weights = {
        "kill": 40,
        "burst": 10,
        "double": 15,
        "all": 8,
        "keeper": 6 if names.KEEPER in components else 0,
        "pause": 8,
        "stop and kill": 6,
        "mix": 7,
        "rest": 6,
        "upgrade": 10 if upgrades else 0,
        "upgrade and kill": 10 if upgrades else 0,
        "manager": 10 if manager else 0,
        "manager and kill": 8 if manager else 0,
        "manager again": 5 if manager else 0,
        "manager and keeper": 2 if manager and names.KEEPER in components else 0,
        "upgrade manager": 4 if manager and upgrades else 0,
        "upgrade and manager": 6 if manager and upgrades else 0,
    }
    if not mortal:
        weights = {"keeper": 9 if components else 0, "manager": 9 if manager else 0, "rest": 1}
    kinds, odds = list(weights), list(weights.values())

    def some(low: float, high: float, count: int = 1) -> tuple[float, ...]:
        return tuple(chance.uniform(low, high) for _ in range(count))

    while True:
        kind = chance.choices(kinds, odds)[0]
        gap_s = min(chance.expovariate(8.0), 0.5)
        settled = chance.random() < 0.7
        one = chance.choice(mortal) if mortal else ""
        if kind == "kill":
            yield Action(kind, (one,), (), gap_s, settled)
        elif kind == "upgrade":
            yield Action(kind, (chance.choice(components),), (), gap_s, settled)
        elif kind == "burst":
            count = chance.randint(2, 6)
            who = tuple(chance.choices(mortal, k=count))
            yield Action(kind, who, some(0, 0.01, count), gap_s, settled)
        elif kind == "double":
            delays = some(0, 0.05, chance.randint(1, 3))
            yield Action(kind, (one,), delays, gap_s, settled)
        elif kind == "all":
            yield Action(kind, tuple(mortal), (), gap_s, settled)
        elif kind == "keeper":
            yield Action(kind, (names.KEEPER,), (), gap_s, True)
        elif kind in ("pause", "stop and kill"):
            who = (chance.choice(components) if kind == "pause" else one,)
            yield Action(kind, who, some(0, 0.3), gap_s, settled)
        elif kind == "mix":
            stopped = chance.choice(components)
            yield Action(kind, (stopped, chance.choice(mortal)), some(0, 0.3, 2), gap_s, settled)
        elif kind == "manager":
            yield Action(kind, (), some(0, 0.5), gap_s)
        elif kind == "manager and kill":  # those that nobody starts again until it is back
            who = tuple(chance.sample(mortal, chance.randint(1, min(2, len(mortal)))))
            yield Action(kind, who, some(0, 0.02, 2), gap_s, settled)
        elif kind == "manager again":
            yield Action(kind, (one,), some(0, 0.6, chance.randint(1, 3)), gap_s, settled)
        elif kind == "manager and keeper":
            yield Action(kind, (names.KEEPER,), some(0, 0.3), gap_s, True)
        elif kind == "upgrade manager":
            yield Action(kind, (one,), some(0, 0.8), gap_s, settled)
        elif kind == "upgrade and manager":
            yield Action(kind, (one,), some(0, 1.0), gap_s, True)
        elif kind == "upgrade and kill":
            who = (one, chance.choice(mortal))
            yield Action(kind, who, some(0, 1.0), gap_s, settled)
        else:
            yield Action("rest", (), some(0.3, 1.5))


@dataclass
class Killer:
    """Carries out actions on one instance.

    `up` starts a manager, which takes over; `manager` is the one that was started last.
    """

    manager: subprocess.Popen[bytes]
    up: Callable[[], subprocess.Popen[bytes]]
    components: list[str]  # all there should be, whether they may be killed or not
    runtime: Runtime
    log_path: Path
    look: Callable[[], None]  # called all the time; raises when something broke
    started: float = field(default_factory=time.monotonic)
    kills: int = 0
    by_component: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)  # may still be seen for a moment
    keeper_new: bool = False  # it was killed, and nobody has looked since

    # Who there is

    def children(self) -> dict[str, list[int]]:
        """Component name -> pids, the oldest first; those that have ended are left out."""
        found: dict[str, list[int]] = {}
        seen: dict[int, str] = {}
        for pid in psutil.pids():
            if pid in self.killed:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[words.index("--name") + 1] != self.runtime.instance:
                    continue
                role = ROLE_OF[words[words.index("-m") + 1]]
                index = int(words[words.index("--index") + 1]) if "--index" in words else None
                seen[pid] = names.component(role, index)
        for pid in sorted(seen, key=_started):
            if _parent(pid) not in seen:  # the guard is a child of the dispatcher
                found.setdefault(seen[pid], []).append(pid)
        return found

    def pids(self, who: str) -> list[int]:
        return self.children().get(who, [])

    def await_pid(self, who: str, other_than: int = 0) -> int:
        """The pid of a component, as soon as there is one (that is not a certain one)."""
        deadline = time.monotonic() + APPEAR_S
        while True:
            for pid in self.pids(who):
                if pid != other_than:
                    return pid
            if time.monotonic() > deadline:
                raise StormError(f"{who} was not started again within {APPEAR_S:g} s")
            self.sleep(0.001)

    def is_up(self, who: str) -> bool:
        pids = self.pids(who)
        return any(
            state.state == ACTIVE
            and state.pid in pids
            and names.component(state.role, state.index) == who
            for state in self.runtime.states()
        )

    def await_up(self, who: str) -> None:
        deadline = time.monotonic() + APPEAR_S
        while not self.is_up(who):
            if time.monotonic() > deadline:
                raise StormError(f"{who} is not up {APPEAR_S:g} s after its start")
            self.sleep(0.01)

    def await_whole(self) -> None:
        """Until the new keeper holds a copy of every socket that is served."""
        if not self.keeper_new:
            return
        deadline = time.monotonic() + WHOLE_S
        self.await_up(names.KEEPER)
        copies = Copies(self.runtime)
        try:
            while not copies.complete():
                if time.monotonic() > deadline:
                    raise StormError(f"the new keeper lacks sockets {WHOLE_S:g} s after its start")
                self.sleep(0.05)
        finally:
            copies.close()
        self.keeper_new = False

    # What is done to them

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.02))

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.started:9.3f} s  kill {self.kills:5}  {text}")
        with self.log_path.open("a") as file:
            file.write(self.log[-1] + "\n")

    def signal(self, who: str, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if number == signal.SIGKILL:
                self.killed.add(pid)
                self.kills += 1
                self.by_component[who.split("/")[0]] += 1

    def kill(self, who: str) -> int:
        pid = self.await_pid(who)
        self.signal(who, pid, signal.SIGKILL)
        return pid

    def do(self, action: Action) -> None:
        if any(who.split("/")[0] in (names.CONNMGR, names.DISPATCHER) for who in action.who):
            self.await_whole()
        if action.settled:
            for who in action.who:
                self.await_up(who)
        self.sleep(action.gap_s)
        self.note(str(action))
        self.by_kind[action.kind] += 1
        getattr(self, "do_" + action.kind.replace(" ", "_"))(action)

    def do_kill(self, action: Action) -> None:
        self.kill(action.who[0])

    def do_burst(self, action: Action) -> None:
        for who, delay_s in zip(action.who, action.delays_s, strict=True):
            self.kill(who)
            self.sleep(delay_s)

    def do_double(self, action: Action) -> None:
        """Again and again, while it starts and recovers."""
        pid = self.kill(action.who[0])
        for delay_s in action.delays_s:
            pid = self.await_pid(action.who[0], other_than=pid)
            if action.settled:
                self.await_up(action.who[0])
            self.sleep(delay_s)
            self.signal(action.who[0], pid, signal.SIGKILL)

    def do_all(self, action: Action) -> None:
        found = [(who, self.await_pid(who)) for who in action.who]
        for who, pid in found:
            self.signal(who, pid, signal.SIGKILL)

    def do_keeper(self, action: Action) -> None:
        self.await_whole()
        for who in self.components:
            self.await_up(who)
        self.keeper_new = True
        pid = self.kill(names.KEEPER)
        self.await_pid(names.KEEPER, other_than=pid)

    def do_pause(self, action: Action) -> None:
        pid = self.await_pid(action.who[0])
        self.signal(action.who[0], pid, signal.SIGSTOP)
        try:
            self.sleep(action.delays_s[0])
        finally:
            self.signal(action.who[0], pid, signal.SIGCONT)

    def do_stop_and_kill(self, action: Action) -> None:
        pid = self.await_pid(action.who[0])
        self.signal(action.who[0], pid, signal.SIGSTOP)
        try:
            self.sleep(action.delays_s[0])
        finally:
            self.signal(action.who[0], pid, signal.SIGKILL)

    def do_mix(self, action: Action) -> None:
        """One is stopped, another killed meanwhile, then the first goes on or is killed too."""
        stopped, killed = action.who
        pid = self.await_pid(stopped)
        self.signal(stopped, pid, signal.SIGSTOP)
        last = signal.SIGKILL if stopped != names.KEEPER and action.settled else signal.SIGCONT
        try:
            self.sleep(action.delays_s[0])
            if killed != stopped:
                self.kill(killed)
            self.sleep(action.delays_s[1])
        finally:
            self.signal(stopped, pid, last)

    def do_rest(self, action: Action) -> None:
        self.sleep(action.delays_s[0])

    # The manager

    def kill_manager(self) -> None:
        self.signal(names.MANAGER, self.manager.pid, signal.SIGKILL)
        self.manager.wait()
        assert self.manager.stdout is not None
        self.manager.stdout.close()

    def take_over(self) -> None:
        self.manager = self.up()

    def await_manager(self) -> None:
        """Until it has taken over, and says so."""
        assert self.manager.stdout is not None
        os.set_blocking(self.manager.stdout.fileno(), False)
        deadline, said = time.monotonic() + WHOLE_S, b""
        while not said.endswith(b"\n"):
            said += self.manager.stdout.read(4096) or b""
            if time.monotonic() > deadline:
                raise StormError(f"midair up has not taken over within {WHOLE_S:g} s: {said!r}")
            self.sleep(0.01)
        if b"took over" not in said:
            raise StormError(f"midair up did not take over: {said!r}")

    def do_manager(self, action: Action) -> None:
        self.kill_manager()
        self.sleep(action.delays_s[0])  # nobody notices
        self.take_over()
        self.await_manager()

    def do_manager_and_kill(self, action: Action) -> None:
        """It and one or two others, in one moment; the order is not ours to choose."""
        self.kill_manager()
        for who, delay_s in zip(action.who, action.delays_s, strict=False):
            for pid in self.pids(who)[:1]:
                self.signal(who, pid, signal.SIGKILL)
            self.sleep(delay_s)
        self.take_over()
        self.await_manager()

    def do_manager_again(self, action: Action) -> None:
        """Again and again, while it takes over, and another one beside it."""
        self.kill_manager()
        for delay_s in action.delays_s:
            self.take_over()
            self.sleep(delay_s)
            for pid in self.pids(action.who[0])[:1]:
                self.signal(action.who[0], pid, signal.SIGKILL)
            self.kill_manager()
        self.take_over()
        self.await_manager()

    def do_manager_and_keeper(self, action: Action) -> None:
        self.await_whole()
        for who in self.components:
            self.await_up(who)
        self.keeper_new = True
        pid = self.pids(names.KEEPER)[0]
        self.kill_manager()
        self.signal(names.KEEPER, pid, signal.SIGKILL)
        self.sleep(action.delays_s[0])
        self.take_over()
        self.await_manager()

    def do_upgrade_manager(self, action: Action) -> None:
        """To the same release; another part is killed meanwhile."""
        upgrade = self.start_upgrade(names.MANAGER)
        self.sleep(action.delays_s[0])
        self.kill(action.who[0])
        self.end_upgrade(upgrade, names.MANAGER, must=True)

    def do_upgrade_and_manager(self, action: Action) -> None:
        """The manager is killed while it replaces another."""
        upgrade = self.start_upgrade(action.who[0])
        self.sleep(action.delays_s[0])
        self.kill_manager()
        self.end_upgrade(upgrade, action.who[0], must=False)
        self.take_over()
        self.await_manager()

    # Upgrades

    def start_upgrade(self, who: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "midair", "upgrade", who, "--name", self.runtime.instance]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end_upgrade(self, upgrade: subprocess.Popen[str], who: str, must: bool) -> None:
        deadline = time.monotonic() + WHOLE_S
        try:
            while upgrade.poll() is None:
                if time.monotonic() > deadline:
                    raise StormError(f"midair upgrade {who} did not end within {WHOLE_S:g} s")
                self.sleep(0.01)
        finally:
            if upgrade.poll() is None:
                upgrade.kill()
            said = upgrade.communicate()[0].strip()
        self.note(f"upgrade {who} ended with {upgrade.returncode}: {said}")
        if must and upgrade.returncode != 0:
            raise StormError(f"midair upgrade {who} failed: {said}")

    def do_upgrade(self, action: Action) -> None:
        who = action.who[0]
        if who == names.KEEPER:
            self.await_whole()
            for other in self.components:
                self.await_up(other)
            self.keeper_new = True
        self.end_upgrade(self.start_upgrade(who), who, must=True)

    def do_upgrade_and_kill(self, action: Action) -> None:
        """Kills while a successor warms up or takes over: any of the two processes."""
        upgraded, killed = action.who
        upgrade = self.start_upgrade(upgraded)
        self.sleep(action.delays_s[0])
        pids = self.pids(killed)
        if pids:
            self.signal(killed, pids[-1 if action.settled else 0], signal.SIGKILL)
        self.end_upgrade(upgrade, upgraded, must=False)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat behind the name; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _started(pid: int) -> tuple[int, int]:
    """Sorts by age; numbers of processes begin anew some time."""
    fields = _stat(pid)
    return (int(fields[19]) if fields else 0), pid
