"""Kills at crash points, in an instance whose clients check every promise."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from midair import names
from midair.process.runtime import ACTIVE as STATE_ACTIVE
from midair.process.runtime import Runtime
from native import connmgr as native
from native.conntable import ConnTable
from tests.support.copies import Copies
from tests.support.instance import ROOT, Instance, eventually, start

CONFIG = """
[limits]
max_payload = "4MiB"
max_pending = "256KiB"
slow_consumer = "backpressure"
name_answer_s = 4
[connmgr]
arena_bytes = "64MiB"
[manager]
restart_limit = 100000
"""


class Storm:
    """The instance, the file that arms a point, and the clients."""

    def __init__(self, instance: Instance, armed: Path, connmgrs: int, port: int) -> None:
        self.instance = instance
        self.port = port  # where clients connect
        self.connmgrs = connmgrs
        self.armed = armed
        self.runtime = Runtime.create(instance.name)
        self.clients: list[subprocess.Popen[str]] = []
        self.marked = 0

    def add(self, role: str, seed: int) -> subprocess.Popen[str]:
        where = (self.instance.host, str(self.port))
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
            return [f"connmgr/{n}" for n in range(self.connmgrs)]
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

    def nothing_is_left(self) -> None:
        """The clients are gone: so are their connections, and every message."""
        table = ConnTable.open(self.runtime, 65536, create=False)
        eventually(lambda: not [s for s in table.used() if s.state in (1, 2)], "connections gone")
        chunks = native.arena_chunks(64 * 2**20)
        for index in range(self.connmgrs):
            arena = native.open_arena(self.runtime, index, chunks)

            def clean(arena: object = arena) -> bool:
                live, busy = native.arena_census(arena)
                return live == 0 and busy <= 1

            eventually(clean, f"arena {index} empty: {native.arena_census(arena)}")

    def abandon(self) -> None:
        for client in self.clients:
            client.kill()
            client.communicate()


@contextlib.contextmanager
def directly(instance: Instance) -> Iterator[int]:
    yield instance.port


@contextlib.contextmanager
def stormed(
    owner: str,
    where: Path,
    connmgrs: int,
    roles: Sequence[str],
    seed: int,
    config: str = CONFIG,
    build: Sequence[str] = (),
    through: Callable[[Instance], contextlib.AbstractContextManager[int]] = directly,
    options: Sequence[str] | None = None,
) -> Iterator[Storm]:
    """An instance with that many connmgrs under the load of these roles.

    `build`: more options of the build; `through`: where clients connect instead; `options`: of
    `midair up`, instead of the number of connmgrs.
    """
    out = ROOT / "build" / ("crash-more" if build else "crash")
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:  # a test beside this one may be building, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            [sys.executable, "native/build.py", "--crash-points", "--out", str(out), *build],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert made.returncode == 0, made.stderr
    armed = where / "armed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDAIR_NATIVE", str(out))
        patch.setenv("MIDAIR_CRASH", str(armed))
        words = ("--connmgrs", str(connmgrs)) if options is None else options
        instance = start(owner, config, *words)
    try:
        with through(instance) as port:
            storm = Storm(instance, armed, connmgrs, port)
            try:
                for at, role in enumerate(roles):
                    storm.add(role, 100 * seed + at)
                yield storm
            finally:
                storm.abandon()
    finally:
        instance.stop()
