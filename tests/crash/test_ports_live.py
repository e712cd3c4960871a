"""Connection managers come and go under load that checks every promise, and parts are killed.

Method: as test_points.py; the number of connection managers is changed by `midair reload`. Clients
on a retiring one stay until they leave by themselves, so its end takes clients that come and go:
the ones here are spread by the dispatcher, and those of one round leave before the next.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from midair import names
from midair.process.runtime import Runtime
from tests.crash.points import CONFIG, Storm, stormed
from tests.support.instance import Instance, cli, eventually
from tests.support.live import Client
from tests.support.reload import RELOAD_S_MAX, events, reload, reloaded, write

SEED = int(os.environ.get("MIDAIR_SEED", "1"))
ROLES = ("small", "small", "large", "fan", "queue", "churn", "requests", "sessions")


def text(connmgrs: int, more: str = "") -> str:
    return CONFIG.replace("[connmgr]\n", f"[connmgr]\ncount = {connmgrs}\n") + more


@pytest.fixture
def storm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storm]:
    """With as many connection managers as the test is called with."""
    count: int = request.param
    config = text(count)
    with stormed(__name__, tmp_path, count, ROLES, SEED, config, options=()) as storm:
        yield storm


# Of more than two the queue bytes of a user are not enough for a test beside this one.
three = pytest.param(2, marks=pytest.mark.alone)
one_and_two = pytest.mark.parametrize("storm", [1, three], indirect=True)


def wait_for_work(storm: Storm, since: int = 0) -> None:
    """Until every client has done something; those before number `since` are known to have."""
    for client in storm.clients[since:]:
        assert client.stdout is not None
        assert "at work" in client.stdout.readline()


def leave(storm: Storm) -> None:
    """All clients end, and say whether a promise was broken."""
    for report in storm.stop():
        assert "error" not in report, report
        assert len(report) > 1, f"did nothing: {report}"


def again(storm: Storm, round_: int) -> None:
    """More clients."""
    before = len(storm.clients)
    for at, role in enumerate(ROLES):
        storm.add(role, 1000 * round_ + 100 * SEED + at)
    wait_for_work(storm, before)


def until_retired(storm: Storm, index: int) -> None:
    name = names.component(names.CONNMGR, index)

    def gone() -> bool:
        storm.check_clients()
        return name not in storm.instance.components()

    def left() -> list[str]:
        prefix = storm.instance.runtime.prefix
        return [path.name for path in names.SHM.glob(f"{prefix}.*.{index}")]

    eventually(gone, f"{name} has retired\n{storm.log()}", 60)
    eventually(lambda: not left(), f"nothing is left of it\n{storm.log()}", 60)
    eventually(lambda: events(storm.instance, "retired"), "and that was noted")
    storm.connmgrs = index


def on(storm: Storm, index: int) -> int:
    """Clients of a connection manager."""
    done = cli("conns", "--json", "--limit", "0", "--name", storm.instance.name)
    return done.stdout.count(f'"connmgr": {index}')


@one_and_two
def test_one_is_added_and_retires(storm: Storm) -> None:
    """003-10, 003-61: whatever the number of connection managers."""
    count = storm.connmgrs
    wait_for_work(storm)
    reloaded(storm.instance, text(count + 1))
    storm.connmgrs = count + 1
    again(storm, 1)
    assert on(storm, count) > 0, "the new one has clients"
    storm.check_clients()
    lines = reloaded(storm.instance, text(count))
    assert lines == [
        f"connmgr.count: {count + 1} -> {count} (connmgr/{count}, dispatcher restarted; "
        f"connmgr/{count} retiring)"
    ]
    shown = cli("status", "--name", storm.instance.name).stdout
    eventually(
        lambda: "retiring, " in cli("status", "--name", storm.instance.name).stdout,
        f"the status says so\n{shown}",
    )
    before = on(storm, count)
    for n in range(20):  # nobody comes to it any more
        with Client(storm.instance, f"new.{n}") as client:
            client.echo(b"x")
    assert on(storm, count) <= before
    leave(storm)
    until_retired(storm, count)
    looked = cli("fsck", "--name", storm.instance.name)
    assert looked.returncode == 0, looked.stdout
    # And once more: the number has had a life before.
    again(storm, 2)
    reloaded(storm.instance, text(count + 1))
    storm.connmgrs = count + 1
    again(storm, 3)
    assert on(storm, count) > 0
    leave(storm)
    storm.nothing_is_left()


@one_and_two
def test_one_that_is_retiring_can_be_kept(storm: Storm) -> None:
    count = storm.connmgrs
    wait_for_work(storm)
    reloaded(storm.instance, text(count + 1))
    again(storm, 1)
    reloaded(storm.instance, text(count))
    lines = reloaded(storm.instance, text(count + 1))
    assert f"connmgr/{count} not retiring any more" in lines[0]
    storm.connmgrs = count + 1
    again(storm, 2)
    leave(storm)
    storm.nothing_is_left()
    assert storm.instance.components()[f"connmgr/{count}"]["doing"] == ""


class Killer(threading.Thread):
    """Kills parts again and again, the keeper excepted, until it is told to stop."""

    def __init__(self, instance: Instance, seed: int) -> None:
        super().__init__(daemon=True)
        self._runtime = Runtime.open(instance.name)
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self.kills = 0

    def run(self) -> None:
        spared = (names.MANAGER, names.KEEPER)
        while not self._over.wait(self._chance.uniform(0.05, 0.6)):
            states = [state for state in self._runtime.states() if state.role not in spared]
            if states:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._chance.choice(states).pid, signal.SIGKILL)
                    self.kills += 1

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self.join()


def insist(storm: Storm, wanted: str) -> None:
    """Reloads until it works: a part that is killed too often takes everything back."""
    for _ in range(20):
        done = reload(storm.instance, wanted)
        storm.check_clients()
        if done.returncode == 0:
            return
        # Under way, all back, or not all back, because of one kill too many.
        said = ("under way", "is back", "killed by SIGKILL")
        assert any(words in done.stderr for words in said), done.stderr
    pytest.fail(f"it never works\n{storm.log()}")


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
@one_and_two
def test_while_parts_are_killed(storm: Storm, rounds: int) -> None:
    """Adding and retiring, again and again, under load, with kills of everything but the keeper."""
    count = storm.connmgrs
    wait_for_work(storm)
    for round_ in range(1, rounds + 1):
        with Killer(storm.instance, SEED + round_) as killer:
            insist(storm, text(count + 1))
            again(storm, round_)
            insist(storm, text(count, '[log]\nlevel = "warning"\n' if round_ == 2 else ""))
            leave(storm)
        assert killer.kills > 3
        until_retired(storm, count)
        again(storm, 10 * round_)
    leave(storm)
    storm.nothing_is_left()


@pytest.mark.parametrize("point", ["lane.made", "lane.begun"])
@one_and_two
def test_kill_at(storm: Storm, point: str) -> None:
    """The router dies while it makes the lane of a port that is added (rule R8)."""
    count = storm.connmgrs
    wait_for_work(storm)
    for _ in range(2):  # the second is the second life of the port
        marker = storm.armed.with_suffix(".reached")
        marker.touch()
        temporary = storm.armed.with_suffix(".new")
        temporary.write_text(f"router {point} 1 {marker}\n")
        temporary.rename(storm.armed)
        write(storm.instance, text(count + 1))
        try:
            done = cli("reload", "--name", storm.instance.name, timeout=RELOAD_S_MAX)
            assert not marker.exists(), f"{point} was not reached"
        finally:
            storm.armed.unlink()
            marker.unlink(missing_ok=True)
        assert done.returncode == 0, f"{done.stderr}\n{storm.log()}"
        assert "died" in done.stdout
        again(storm, 1)
        assert on(storm, count) > 0
        reloaded(storm.instance, text(count))
        leave(storm)
        until_retired(storm, count)
        again(storm, 2)
    leave(storm)
    storm.nothing_is_left()
