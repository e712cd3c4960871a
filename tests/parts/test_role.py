"""The shape of a program: what it does in which order, alone and beside one at work.

Method: real processes of a small role that says what is called; the lease decides between them.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from midair.process import events
from midair.process.runtime import Runtime
from tests.support.instance import PATIENCE_S, ROOT, eventually

# What it works on is a file, which a first one makes.
PROGRAM = """
import sys
from pathlib import Path
from midair import names
from midair.errors import MissingError
from midair.process import role

class Told(role.Role):
    turns = 0

    def open(self, create):
        self.path = self.program.runtime.path / "thing"
        if not create and not self.path.exists():
            raise MissingError("no thing")
        if create:
            self.path.touch()
        print("open", create, self.program.lease.held, flush=True)

    def recover(self):
        print("recover", flush=True)
        return {"old_things": 3} if self.program.generation > 1 else {}

    def turn(self, timeout_s):
        self.turns += 1
        if self.turns < 3:
            print("turn", timeout_s, self.program.state, flush=True)
        else:
            import select
            select.select([self.program.wake_fd], [], [], timeout_s)

    def show(self):
        if self.turns < 3:
            print("show", flush=True)

sys.exit(role.run(names.ROUTER, Told))
"""
# Ready before the first turn: of what waits for it its predecessor may have died.
SERVES = [b"recover", b"turn 0.0 active", b"show", b"turn 1.0 active"]
TAKES_OVER = SERVES

Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Processes]:
    made: Processes = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


def start(name: str, started: Processes) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", PROGRAM, "--name", name]
    started.append(
        subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    )
    return started[-1]


def lines(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    found = []
    assert process.stdout is not None
    for _ in range(count):
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready, f"only {found}"
        found.append(process.stdout.readline().rstrip())
    return found


def test_the_first_makes_what_there_is_not(instance_name: str, started: Processes) -> None:
    process = start(instance_name, started)
    assert lines(process, 5) == [b"open True True", *SERVES]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    kinds = [it["kind"] for it in events.read(Runtime.open(instance_name))]
    assert kinds == [events.ACTIVE]


def test_the_second_opens_what_there_is_and_waits(instance_name: str, started: Processes) -> None:
    first = start(instance_name, started)
    lines(first, 5)
    second = start(instance_name, started)
    assert lines(second, 1) == [b"open False False"]
    assert second.stdout is not None
    assert not select.select([second.stdout], [], [], 0.5)[0], "nothing before it has the lease"
    os.kill(first.pid, signal.SIGKILL)
    assert lines(second, 4) == TAKES_OVER
    second.send_signal(signal.SIGTERM)
    _, said = second.communicate(timeout=PATIENCE_S)
    assert b"recovered: 3 old things; in " in said
    *_, last = events.read(Runtime.open(instance_name))
    assert (last["kind"], last["details"]["old_things"]) == (events.RECOVERED, 3)


def test_what_was_not_there_is_made_after_the_wait(instance_name: str, started: Processes) -> None:
    first = start(instance_name, started)
    lines(first, 5)
    (Runtime.open(instance_name).path / "thing").unlink()
    second = start(instance_name, started)
    eventually(
        lambda: (
            ("standby", second.pid)
            in [(it.state, it.pid) for it in Runtime.open(instance_name).states()]
        ),
        "the second waits",
    )
    os.kill(first.pid, signal.SIGKILL)
    assert lines(second, 5)[0] == b"open True True"
