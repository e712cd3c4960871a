"""Kills a component at every named crash point, under load that checks every promise.

Method: one instance of a build with crash points (native/crash.h), with independent client
processes that stop at the first lost, doubled or reordered message, dropped or refused
connection, or corrupted stream. For each point and each role that passes it: the component
is killed so that its successor starts with the point armed, the successor kills itself there,
and the next one recovers. A point that is never reached fails its test. At the end all
clients drain, and nothing may be left in the shared memory. Shows rules J1 to J6, R1 to R6,
B1 to B5 and S5 of native/README.md with crashes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Instance, eventually, start
from storm.copies import Copies

from midair import crash, names
from midair.runtime import ACTIVE as STATE_ACTIVE
from midair.runtime import Runtime
from native import connmgr as native
from native.conntable import ConnTable

CONNMGRS = 2
CONFIG = """
[limits]
max_payload = "4MiB"
max_pending = "256KiB"
slow_consumer = "backpressure"
[connmgr]
arena_bytes = "64MiB"
[manager]
restart_limit = 100000
"""
SEED = int(os.environ.get("MIDAIR_SEED", "1"))


def points() -> list[tuple[str, str]]:
    """(component, point) of everything there is, read from the tables in the sources."""
    found = []
    table = (ROOT / "native" / "crash_points.h").read_text()
    for name, roles in re.findall(r'CRASH_POINT\(\w+, "([\w.]+)", "([\w ]+)"\)', table):
        found += [(role, name) for role in roles.split()]
    found += [(role, name) for name, role in crash.POINTS.items()]
    return [("connmgr/*" if role == "connmgr" else role, name) for role, name in found]


def test_every_point_in_the_sources_is_in_the_table() -> None:
    used = set()
    for path in (ROOT / "native").glob("*.c"):
        used |= set(re.findall(r"\bCRASH\((\w+)\)", path.read_text()))
    table = (ROOT / "native" / "crash_points.h").read_text()
    assert used == set(re.findall(r"CRASH_POINT\((\w+), \"", table))
    here = set()
    for path in ROOT.glob("*/*.py"):
        if path.parent.name != "tests":
            here |= set(re.findall(r'crash\.here\("([\w.]+)"\)', path.read_text()))
    assert here == set(crash.POINTS)


def test_every_commit_point_has_a_crash_point() -> None:
    """A quoted name beside a store is a commit point; a crash point of that name follows it."""
    table = (ROOT / "native" / "crash_points.h").read_text()
    names = {name for _, name in points()}
    for path in sorted((ROOT / "native").glob("*.c")):
        for name in re.findall(r'/\* "([a-z]+\.[a-z.]+)"', path.read_text()):
            assert name in names, f"{path.name}: {name} is not in\n{table}"


class Storm:
    """The instance, the file that arms a point, and the clients."""

    def __init__(self, instance: Instance, armed: Path) -> None:
        self.instance = instance
        self.armed = armed
        self.runtime = Runtime.create(instance.name)
        self.clients: list[subprocess.Popen[str]] = []
        self.marked = 0

    def add(self, role: str, seed: int) -> subprocess.Popen[str]:
        where = (self.instance.host, str(self.instance.port))
        made = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.load", role, *where, str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.clients.append(made)
        return made

    def pid(self, component: str) -> int:
        """Of the active process in that role, once there is one.

        The dead are known by their pid being gone: the manager has noticed.
        """

        def find() -> int:
            for state in self.runtime.states():
                if state.state == STATE_ACTIVE and component == names.component(
                    state.role, state.index
                ):
                    return state.pid if psutil.pid_exists(state.pid) else 0
            return 0

        pid = eventually(find, f"{component} is active\n{self.instance.stderr()[-2000:]}")
        assert isinstance(pid, int)
        return pid

    def check_clients(self) -> None:
        for client in self.clients:
            if client.poll() is not None:
                assert client.stdout is not None
                pytest.fail(f"a client gave up: {client.stdout.read()}\n{self.log()}")

    def log(self) -> str:
        return self.instance.stderr()[-3000:]

    def deaths(self, component: str) -> int:
        """How many the manager has noticed so far."""
        return sum(
            self.instance.stderr().count(f" warning: {process} died: ")
            for process in self.processes(component)
        )

    def processes(self, component: str) -> list[str]:
        if component == "connmgr/*":
            return [f"connmgr/{n}" for n in range(CONNMGRS)]
        return [component]

    def crash_at(self, component: str, point: str, passes: int) -> None:
        """Has the component die at the point, and waits for its successor."""
        temporary = self.armed.with_suffix(".new")
        self.marked += 1
        marker = self.armed.with_suffix(f".{self.marked}")
        marker.touch()
        deaths = self.deaths(component) + 1
        temporary.write_text(f"{component} {point} {passes} {marker}\n")
        temporary.rename(self.armed)
        for process in self.processes(component):
            with contextlib.suppress(ProcessLookupError):  # it came there before us
                os.kill(self.pid(process), signal.SIGKILL)
                deaths += 1

        def reached() -> bool:
            self.check_clients()
            return not marker.exists()

        try:
            eventually(reached, f"{component} reaches {point} ({passes} times)\n{self.log()}")
        finally:
            self.armed.unlink()
            marker.unlink(missing_ok=True)
        eventually(lambda: self.deaths(component) >= deaths, f"{component} died\n{self.log()}")
        for process in self.processes(component):
            self.pid(process)
        if component == names.KEEPER:
            copies = Copies(self.runtime)
            try:
                eventually(copies.complete, f"the keeper has every socket again\n{self.log()}")
            finally:
                copies.close()
        self.check_clients()

    def stop(self) -> list[dict[str, object]]:
        """Drains the clients; what they counted."""
        reports = []
        for client in self.clients:
            if client.poll() is None:
                client.send_signal(signal.SIGTERM)
        for client in self.clients:
            out, _ = client.communicate(timeout=90)
            reports.append(json.loads(out.splitlines()[-1]))
            assert client.returncode == 0, f"{out}\n{self.log()}"
        self.clients.clear()
        return reports

    def abandon(self) -> None:
        for client in self.clients:
            client.kill()
            client.communicate()


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    build = ROOT / "build" / "crash"
    build.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        [sys.executable, "native/build.py", "--crash-points", "--out", str(build)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    armed = tmp_path_factory.mktemp("crash") / "armed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDAIR_NATIVE", str(build))
        patch.setenv("MIDAIR_CRASH", str(armed))
        instance = start(__name__, CONFIG, "--connmgrs", str(CONNMGRS))
    storm = Storm(instance, armed)
    try:
        roles = ("small", "small", "large", "fan", "queue", "churn", "churn")
        modes = ("requests", "sessions", "comings", "names")
        for seed, role in enumerate((*roles, *modes)):
            storm.add(role, 100 * SEED + seed)
        storm.add("idle", 100 * SEED + 50)
        yield storm
    finally:
        storm.abandon()
        instance.stop()


# Whose count is hit is chance, and only those of clients that stay are looked at in the end.
KILLS = {"count.base": 10, "pick.base": 10}


@pytest.mark.parametrize(("component", "point"), points())
def test_kill_at(storm: Storm, component: str, point: str) -> None:
    chance = random.Random(f"{SEED} {component} {point}")
    passes = chance.randint(1, 4)
    if point == "route.piece":
        client = storm.add("huge", 100 * SEED + 60)
        storm.crash_at(component, point, passes)
        storm.clients.remove(client)
        client.send_signal(signal.SIGTERM)
        out, _ = client.communicate(timeout=90)
        assert client.returncode == 0, out
        return
    storm.crash_at(component, point, passes)
    for _ in range(1, KILLS.get(point, 1)):
        storm.crash_at(component, point, chance.randint(1, 40))


def test_everything_at_once_with_the_keeper_alive(storm: Storm) -> None:
    for _ in range(3):
        for component in ("router", "dispatcher", *(f"connmgr/{n}" for n in range(CONNMGRS))):
            os.kill(storm.pid(component), signal.SIGKILL)
        for component in ("router", "dispatcher", *(f"connmgr/{n}" for n in range(CONNMGRS))):
            storm.pid(component)
        storm.check_clients()


def test_nothing_was_lost_and_nothing_is_left(storm: Storm) -> None:
    for report in storm.stop():
        assert "error" not in report, report
        assert len(report) > 1, f"did nothing: {report}"
    name = storm.instance.name
    table = ConnTable.open(name, 65536, create=False)
    eventually(lambda: not [s for s in table.used() if s.state in (1, 2)], "connections gone")
    chunks = native.arena_chunks(64 * 2**20)
    for index in range(CONNMGRS):
        arena = native.open_arena(name, index, chunks)

        def clean(arena: object = arena) -> bool:
            live, busy = native.arena_census(arena)
            return live == 0 and busy <= 1

        eventually(clean, f"arena {index} empty: {native.arena_census(arena)}")


def test_the_log_says_what_was_repaired(storm: Storm) -> None:
    text = storm.instance.stderr()
    assert len(re.findall(r"midair-connmgr/\d\[\d+\] info: recovered: ", text)) > 20
    assert len(re.findall(r"midair-router\[\d+\] info: recovered: ", text)) > 10
