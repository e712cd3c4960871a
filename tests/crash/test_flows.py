"""Kills the connmgr and the router of an instance whose flows go past the router.

Method: as tests/crash/test_points.py, with one connmgr, since with several nothing is repeated. All
kinds of clients are there: those that subscribe and unsubscribe end flows all the time, those that
stay check order, number and content of every message, and in the end how many each is said to have
had. Shows what a crash leaves of rules F1 to F4 of native/README.md.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from midair import names
from native.stats import Reader
from tests.crash.points import Storm, stormed
from tests.support.instance import eventually

SEED = int(os.environ.get("MIDAIR_SEED", "1"))
ROLES = ("small", "small", "fan", "large", "queue", "churn", "halves", "requests", "idle")
# What the step of a flow passes, then what is around it.
POINTS = (
    *("flow.applied", "redo.ready", "redo.commit", "redo.half", "redo.applied", "redo.clear"),
    *("count.base", "count.stamp", "input.received", "input.parsed", "input.committed"),
    *("output.written", "out.pop", "orders.applied", "orders.committed", "orders.done"),
    *("batch.close", "batch.sent", "batch.received", "conn.buffer"),
    *("finish.committed", "finish.written", "end.shutdown", "sid.cells", "sub.free"),
)
KILLS = {"flow.applied": 10, "count.base": 5}


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    with stormed(__name__, tmp_path_factory.mktemp("crash"), 1, ROLES, 10 + SEED) as storm:
        yield storm


def repeated(storm: Storm) -> int:
    count: int = Reader(storm.instance.runtime, names.CONNMGR, 0).counts().totals["repeated"]
    return count


@pytest.mark.parametrize("point", POINTS)
def test_kill_at(storm: Storm, point: str) -> None:
    chance = random.Random(f"{SEED} flow {point}")
    for _ in range(KILLS.get(point, 1)):
        storm.crash_at("connmgr/*", point, chance.randint(1, 40))


@pytest.mark.parametrize("point", ["route.piece", "aside.put", "aside.done", "redo.commit"])
def test_kill_the_router_within_a_list(storm: Storm, point: str) -> None:
    """What goes past the router goes on beside it; every subscription gets each message once."""
    client = storm.add("huge", 100 * SEED + 60)
    storm.crash_at("router", point, random.Random(f"{SEED} list {point}").randint(1, 20))
    storm.clients.remove(client)
    client.send_signal(signal.SIGTERM)
    out, _ = client.communicate(timeout=90)
    assert client.returncode == 0, out


@pytest.mark.parametrize("component", ["router", "connmgr/0", "dispatcher", "keeper"])
def test_kill_anywhere(storm: Storm, component: str) -> None:
    for _ in range(10):
        killed = storm.pid(component)
        os.kill(killed, signal.SIGKILL)
        eventually(
            lambda killed=killed: storm.pid(component) != killed,
            f"{component} is back\n{storm.log()}",
        )
        storm.check_clients()


def test_flows_begin_again(storm: Storm) -> None:
    before = repeated(storm)
    eventually(lambda: repeated(storm) > before + 1000, "messages are repeated")


def test_nothing_was_lost_and_nothing_is_left(storm: Storm) -> None:
    for report in storm.stop():
        assert "error" not in report, report
        assert len(report) > 1, f"did nothing: {report}"
    storm.nothing_is_left()
