"""Kills the router and the connmgrs while they ask, or publish to, very many at once.

Method: as tests/crash/test_points.py, with one connmgr and with two. Shows what a crash leaves of
rules R4 to R6 and P3 of native/README.md where a message is ordered in steps: fanout requests to
thousands, messages to several topics, messages to all of a kind.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from tests.crash.points import Storm, stormed
from tests.support.instance import cli, eventually
from tests.support.segments import Segments

SEED = int(os.environ.get("MIDAIR_SEED", "1"))
ROLES = ("crowd", "crowd", "topics", "topics", "kinds", "small", "requests", "idle")
# What only these pass, then what is around it.
OWN = (
    *("mode.gathered", "mode.ordered", "mode.piece", "mode.legs_freed"),
    *("mode.spreading", "mode.spread", "mode.section"),
)
ROUTER = (
    *("redo.ready", "redo.commit", "redo.half", "redo.applied", "redo.clear", "route.step"),
    *("route.committed", "mode.replied", "mode.leg_settled", "mode.request_settled"),
    *("mode.expired", "mode.committed", "batch.close", "batch.taken", "batch.sent"),
)
CONNMGR = (
    *("orders.applied", "orders.committed", "orders.relinquishing", "orders.relinquished"),
    *("orders.done", "count.stamp", "input.parsed", "input.committed", "redo.half", "out.pop"),
)
POINTS = [("router", it) for it in (*OWN, *ROUTER)] + [("connmgr/*", it) for it in CONNMGR]
USED = 1 << 63


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def storm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Storm]:
    where = tmp_path_factory.mktemp("crash")
    with stormed(__name__, where, request.param, ROLES, 40 + SEED) as storm:
        yield storm


@pytest.mark.parametrize(("component", "point"), POINTS)
def test_kill_at(storm: Storm, component: str, point: str) -> None:
    chance = random.Random(f"{SEED} crowds {component} {point}")
    for _ in range(3 if point in OWN else 1):
        storm.crash_at(component, point, chance.randint(1, 6))


@pytest.mark.parametrize("component", ["router", "connmgr/0", "dispatcher"])
def test_kill_anywhere(storm: Storm, component: str) -> None:
    for _ in range(8):
        killed = storm.pid(component)
        os.kill(killed, signal.SIGKILL)
        eventually(
            lambda killed=killed: storm.pid(component) != killed,
            f"{component} is back\n{storm.log()}",
        )
        storm.check_clients()


def test_nothing_was_lost_and_nothing_is_left(storm: Storm) -> None:
    for report in storm.stop():
        assert "error" not in report, report
        assert len(report) > 1, f"did nothing: {report}"
    storm.nothing_is_left()
    checked = cli("fsck", "--name", storm.instance.name)
    assert checked.returncode == 0, checked.stdout
    with Segments(storm.instance.name, storm.connmgrs) as it:
        routing, legs, requests = it.routing, it.legs(), it.requests()
        assert routing.legs_high > 1024
        eventually(
            lambda: not any(legs[at].word & USED for at in range(routing.legs_high)),
            "no leg is left",
        )
        assert not any(requests[at].word & USED for at in range(routing.requests_high))
        asides = it.asides()
        assert all(asides[n].tail > 0 for n in range(storm.connmgrs)), "some were set aside"
        assert all(asides[n].head == asides[n].tail for n in range(storm.connmgrs))
