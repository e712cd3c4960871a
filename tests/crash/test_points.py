"""Kills a component at every named crash point, under load that checks every promise.

Method: one instance of a build with crash points (native/crash.h), with independent client
processes that stop at the first lost, doubled or reordered message, dropped or refused
connection, or corrupted stream. For each point and each role that passes it: the component
is killed so that its successor starts with the point armed, the successor kills itself there,
and the next one recovers. A point that is never reached fails its test. At the end all
clients drain, and nothing may be left in the shared memory. Shows rules P1 to P3, J1 to J6, R1 to
R7, B1 to B5 and S5 of native/README.md with crashes.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator

import pytest

from midair.process import crash
from tests.crash.points import Storm, stormed
from tests.support.instance import ROOT

CONNMGRS = 2
SEED = int(os.environ.get("MIDAIR_SEED", "1"))

PACKAGES = ("midair", "router", "dispatcher", "connmgr", "native")
SOURCES = ROOT / "native" / "src"
TABLE = SOURCES / "base" / "crash_points.h"


def points() -> list[tuple[str, str]]:
    """(component, point) of everything there is, read from the tables in the sources."""
    found = []
    table = TABLE.read_text()
    for name, roles in re.findall(r'CRASH_POINT\(\w+, "([\w.]+)", "([\w ]+)"\)', table):
        found += [(role, name) for role in roles.split()]
    found += [(role, name) for name, role in crash.POINTS.items()]
    return [("connmgr/*" if role == "connmgr" else role, name) for role, name in found]


# With several connmgrs nothing is repeated: tests/crash/test_flows.py kills there. Plain streams
# have no envelopes: tests/crash/test_envelopes.py kills there. Requests to thousands and messages
# to many topics have a load of their own: tests/crash/test_crowds.py kills there. No port is
# added here: tests/crash/test_ports_live.py kills there.
ELSEWHERE = (
    *("flow.applied", "raw.opened", "raw.dropped", "raw.fixed"),
    *("mode.gathered", "mode.ordered", "mode.piece", "mode.legs_freed"),
    *("mode.spreading", "mode.spread", "mode.section"),
    *("lane.made", "lane.begun"),
)


def test_every_point_in_the_sources_is_in_the_table() -> None:
    used = set()
    for path in SOURCES.rglob("*.c"):
        used |= set(re.findall(r"\bCRASH\((\w+)\)", path.read_text()))
    table = TABLE.read_text()
    assert used == set(re.findall(r"CRASH_POINT\((\w+), \"", table))
    here = set()
    for path in ROOT.glob("*/**/*.py"):
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            here |= set(re.findall(r'crash\.here\("([\w.]+)"\)', path.read_text()))
    assert here == {*crash.POINTS, *crash.MIGRATION_POINTS}


def test_every_commit_point_has_a_crash_point() -> None:
    """A quoted name beside a store is a commit point; a crash point of that name follows it."""
    table = TABLE.read_text()
    names = {name for _, name in points()}
    for path in sorted(SOURCES.rglob("*.c")):
        for name in re.findall(r'/\* "([a-z]+\.[a-z.]+)"', path.read_text()):
            assert name in names, f"{path.name}: {name} is not in\n{table}"


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    roles = ("small", "small", "large", "fan", "queue", "churn", "churn", "halves")
    modes = ("requests", "sessions", "comings", "names", "silent")
    where = tmp_path_factory.mktemp("crash")
    with stormed(__name__, where, CONNMGRS, (*roles, *modes, "idle"), SEED) as storm:
        yield storm


# What a very long list passes, which another client asks for then.
LISTS = ("route.piece", "aside.put", "aside.done")
# Takes as long as a client has to answer.
ONCE = ("name.replaced",)
# Whose count is hit is chance, and only those of clients that stay are looked at in the end.
KILLS = {"count.base": 10, "pick.base": 10}


@pytest.mark.parametrize(
    ("component", "point"), [found for found in points() if found[1] not in ELSEWHERE]
)
def test_kill_at(storm: Storm, component: str, point: str) -> None:
    chance = random.Random(f"{SEED} {component} {point}")
    passes = 1 if point in ONCE else chance.randint(1, 4)
    if point in LISTS:
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
    storm.nothing_is_left()


def test_the_log_says_what_was_repaired(storm: Storm) -> None:
    text = storm.instance.stderr()
    assert len(re.findall(r"midair-connmgr/\d\[\d+\] info: recovered: ", text)) > 20
    assert len(re.findall(r"midair-router\[\d+\] info: recovered: ", text)) > 10
