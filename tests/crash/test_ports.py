"""A port without sockets takes part beside the connection managers, and is killed like them.

Method: an instance of a build with crash points, with one port more than connection managers; load
that checks every promise (tests/crash/load.py); and a sink (tests/crash/sink.py) that is
subscribed to what the load publishes, as a process of its own. The sink kills itself at every
point of the way of a batch, and is killed at random together with router and connection managers.
In the end its count of each publisher is exactly what that has sent, and nothing is left in the
shared memory. Shows rules P1 and P2 for a port that is no connection manager.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import posix_ipc
import pytest

from midair import names
from midair.fsck import command as fsck
from native.census import Census
from tests.crash import sink
from tests.crash.points import CONFIG, Storm, stormed
from tests.support.instance import ROOT, eventually

CONNMGRS = 2
PORT = CONNMGRS  # the first number behind theirs
SLOT = 65536  # the first behind those of clients: limits.max_connections
ARENA_BYTES = 64 * 2**20  # as in CONFIG
SEED = int(os.environ.get("MIDAIR_SEED", "1"))
ROLES = ("small", "small", "large", "fan", "churn")

# What a port passes, whatever its owner is: redo.c, batch.c, port.c.
POINTS = (
    *("redo.ready", "redo.commit", "redo.half", "redo.applied", "redo.clear"),
    *("batch.close", "batch.taken", "batch.sent", "batch.expect", "batch.received"),
    *("orders.applied", "orders.committed", "orders.relinquishing", "orders.relinquished"),
    *("orders.done", "ledger.complete"),
)


class Sinks:
    """The processes in the role of the port, one after the other."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.process: subprocess.Popen[str] | None = None
        self.started = 0

    def start(self) -> subprocess.Popen[str]:
        where = (self.storm.instance.name, PORT, CONNMGRS, SLOT, ARENA_BYTES)
        environment = {
            **os.environ,
            "MIDAIR_NATIVE": str(ROOT / "build" / "crash"),
            "MIDAIR_CRASH": str(self.storm.armed),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.sink", *map(str, where)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started += 1
        return self.process

    def alive(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            _, err = self.process.communicate()
            pytest.fail(f"the sink gave up: {err}\n{self.storm.log()}")

    def kill(self) -> None:
        assert self.process is not None
        self.alive()
        self.process.kill()
        self.process.communicate()

    def crash_at(self, point: str, passes: int) -> None:
        """Has a sink die at the point; the next one lives."""
        self.kill()
        marker = self.storm.armed.with_suffix(f".sink{self.started}")
        marker.touch()
        temporary = self.storm.armed.with_suffix(".new")
        temporary.write_text(f"{names.component(names.PORT, PORT)} {point} {passes} {marker}\n")
        temporary.rename(self.storm.armed)
        process = self.start()
        try:
            eventually(
                lambda: process.poll() is not None,
                f"the sink reaches {point} ({passes} times)\n{self.storm.log()}",
            )
        finally:
            self.storm.armed.unlink()
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"{out}{err}"
        assert not marker.exists()
        self.start()
        self.storm.check_clients()

    def count(self, word: int) -> int:
        return int(sink.words(sink.open_log(self.storm.instance.runtime, PORT, create=False))[word])

    def goes_on(self) -> None:
        before = self.count(sink.MESSAGES)

        def more() -> bool:
            self.alive()
            self.storm.check_clients()
            return self.count(sink.MESSAGES) > before

        eventually(more, f"the sink counts on from {before}\n{self.storm.log()}")


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    # Three pairs of queues: shallow ones, so that there is room for those of another test.
    config = CONFIG + "[router]\nother_ports = 1\n[queues]\ndepth = 4\n"
    where = tmp_path_factory.mktemp("ports")
    with stormed(__name__, where, CONNMGRS, (), SEED, config) as storm:
        made = Sinks(storm)
        made.start()
        assert made.process is not None
        assert made.process.stdout is not None
        assert made.process.stdout.readline() == "at work\n"
        subscribed(storm)
        for at, role in enumerate(ROLES):
            storm.add(role, 100 * SEED + at)
        try:
            yield made
        finally:
            if made.process.poll() is None:
                made.process.kill()
            made.process.communicate()


def subscribed(storm: Storm) -> None:
    """The router knows what the sink wants; what is published before that does not go there."""

    def known() -> bool:
        return any(sub.connmgr == PORT for sub in Census(storm.instance.runtime).subs())

    eventually(known, f"the sink is subscribed\n{storm.log()}")


@pytest.mark.parametrize("point", POINTS)
def test_the_sink_is_killed_at(sinks: Sinks, point: str) -> None:
    chance = random.Random(f"{SEED} {point}")
    # What a start sends is one batch; what it gets are many.
    passes = 1 if point in ("batch.close", "batch.taken", "batch.sent") else chance.randint(1, 9)
    sinks.crash_at(point, passes)
    sinks.goes_on()


def test_everything_is_killed_at_random(sinks: Sinks) -> None:
    storm = sinks.storm
    chance = random.Random(f"{SEED} everything")
    others = ["router", *(f"connmgr/{n}" for n in range(CONNMGRS))]
    for _ in range(12):
        dead = chance.sample(others, chance.randint(0, len(others)))
        for component in dead:
            os.kill(storm.pid(component), signal.SIGKILL)
        sinks.kill()
        if chance.random() < 0.5:
            for component in dead:
                storm.pid(component)
        sinks.start()
        for component in dead:
            storm.pid(component)
        sinks.goes_on()


def test_who_is_away_gets_everything_later(sinks: Sinks) -> None:
    """What waits for a port that is gone is kept, and the load goes on once it is back."""
    ring = sink.open_log(sinks.storm.instance.runtime, PORT, create=False)
    sinks.kill()
    before, done = sinks.count(sink.MESSAGES), ring.done
    eventually(lambda: queued(sinks) > 0, f"orders wait for the sink\n{sinks.storm.log()}")
    assert (sinks.count(sink.MESSAGES), ring.done) == (before, done)
    sinks.start()
    sinks.goes_on()


def queued(sinks: Sinks) -> int:
    queue = posix_ipc.MessageQueue(sinks.storm.instance.runtime.queue(names.ORDERS, PORT))
    try:
        return int(queue.current_messages)
    finally:
        queue.close()


def test_the_memory_is_sound_with_it(sinks: Sinks) -> None:
    report = fsck.examine(sinks.storm.instance.name)
    assert not [found for found in report.findings if found.severity != fsck.NOTE], report.findings


def test_every_message_was_counted_once(sinks: Sinks) -> None:
    storm = sinks.storm
    reports = dict(zip(ROLES_BY_SEED, storm.stop(), strict=True))
    for seed, report in reports.items():
        assert "error" not in report, report
        if report["role"] not in ("small", "large"):
            continue
        sent = report["received"]
        assert isinstance(sent, int)
        assert sent > 100 * (report["role"] == "small")
        word = sink.FIRST + seed % sink.PUBLISHERS
        eventually(lambda word=word, sent=sent: sinks.count(word) == sent, f"{sent} are counted")
    storm.nothing_is_left()
    sinks.alive()


ROLES_BY_SEED = [100 * SEED + at for at in range(len(ROLES))]
