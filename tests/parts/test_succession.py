"""`midair upgrade manager`: another release in the same process; one that cannot does no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from midair.exits import Exit
from midair.process import events
from midair.process.runtime import Runtime
from midair.version import __version__
from tests.support.instance import (
    PATIENCE_S,
    ROOT,
    Instance,
    cli,
    eventually,
    leaks_of,
    processes_of,
    start,
)
from tests.support.live import held, nobody_notices
from tests.support.releases import BROKEN, NEXT, Broken

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
BOTH = pytest.mark.parametrize("connmgrs", [1, 2])

FAILS_TO_START = """
def _fail(self):
    raise RuntimeError("broken on purpose")
Manager._take_over = _fail
"""
HANGS_AT_START = """
import time
def _hang(self):
    time.sleep(3600)
Manager._take_over = _hang
"""
SLOW_TO_SAY = """
import time
_init = Program.__init__
def _slow(self, *given):
    time.sleep(2)
    _init(self, *given)
Program.__init__ = _slow
"""
HANGS = """
import time
def rehearse(instance):
    time.sleep(3600)
"""


def upgrade(instance: Instance, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ("upgrade", "manager", "--name", instance.name, "--to", str(to), *options)
    return cli(*words, timeout=120)


@BOTH
def test_it_manages_after_it(connmgrs: int, second: Path, make_midair: Make) -> None:
    """Restarts, logs, status and the end are the new one's, which has the same pid."""
    instance = make_midair(connmgrs=connmgrs)
    assert instance.process is not None
    before = {name: row["pid"] for name, row in instance.components().items()}
    with nobody_notices(instance):
        assert (done := upgrade(instance, second)).returncode == 0, done.stderr
        rows = instance.components()
        assert {name: row["pid"] for name, row in rows.items()} == before
        assert (rows["manager"]["version"], rows["manager"]["generation"]) == (NEXT, 2)
        assert rows["router"]["version"] == __version__
        os.kill(before["router"], signal.SIGKILL)
        eventually(
            lambda: instance.components()["router"]["pid"] not in (None, before["router"]),
            "it starts what died",
        )
        assert instance.components()["router"]["version"] == __version__, "as it was"
        assert "router died: killed by SIGKILL" in instance.stderr(), "it is its parent still"
        assert (done := upgrade(instance, ROOT)).returncode == 0, done.stderr
        assert instance.components()["manager"]["version"] == __version__
    log = list(events.read(Runtime.open(instance.name)))
    told = [it for it in log if it["kind"] == events.UPGRADED]
    assert [(it["component"], it["details"]["to"]) for it in told] == [
        ("manager", NEXT),
        ("manager", __version__),
    ]
    assert instance.process.poll() is None
    assert instance.stop(signal.SIGINT) == 0, "Ctrl-C goes to the same process"
    assert leaks_of(instance.name) == []


def test_it_is_upgraded_after_a_takeover_and_taken_over_after_that(
    second: Path, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=2)
    with held(instance, 20):
        instance.kill_manager()
        instance.up_again()
        assert (done := upgrade(instance, second)).returncode == 0, done.stderr
        instance.kill_manager()
        assert "took over 5 parts" in instance.up_again()
        assert instance.components()["manager"]["version"] == __version__


def refused(instance: Instance, done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == Exit.FAILED
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"midair: manager: {BROKEN} ")
    assert done.stderr.endswith(f"{__version__} keeps working\n")
    assert instance.components()["manager"]["version"] == __version__
    return done.stderr


@pytest.mark.parametrize("file", ["midair/up/manager.py", "midair/up/command.py"])
def test_one_that_cannot_be_imported(file: str, broken: Broken, make_midair: Make) -> None:
    instance = make_midair()
    place = broken(file, 'raise ImportError("broken on purpose")\n')
    before = {name: row["pid"] for name, row in instance.components().items()}
    with nobody_notices(instance):
        said = refused(instance, upgrade(instance, place))
    assert "did not start: exit 1 (FAILED); it said: ImportError: broken on purpose" in said
    assert {name: row["pid"] for name, row in instance.components().items()} == before


def test_one_that_hangs(broken: Broken, make_midair: Make) -> None:
    instance = make_midair()
    place = broken("midair/up/command.py", HANGS)
    said = refused(instance, upgrade(instance, place, "--timeout", "2"))
    assert "was not ready within 2 s" in said
    assert instance.components()["manager"]["generation"] == 1


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_one_that_hangs_when_it_takes_over(
    broken: Broken, make_midair: Make, connmgrs: int
) -> None:
    """The check could not know. It ends, the parts go on, and the next manager takes over."""
    instance = make_midair(connmgrs=connmgrs)
    place = broken("midair/up/manager.py", HANGS_AT_START)
    before = {name: row["pid"] for name, row in instance.components().items()}
    with nobody_notices(instance):
        done = upgrade(instance, place, "--timeout", "5")
        assert done.returncode != 0
        assert instance.process is not None
        assert instance.process.wait(PATIENCE_S) == -signal.SIGALRM
        assert instance.process.stdout is not None
        instance.process.stdout.close()
        instance.up_again()
        after = {name: row["pid"] for name, row in instance.components().items()}
        assert after.pop("manager") != before.pop("manager")
        assert after == before
    assert instance.stop() == 0
    assert leaks_of(instance.name) == []


def test_one_that_fails_when_it_takes_over_goes_back(broken: Broken, make_midair: Make) -> None:
    """The check could not know. It is the old release again, in the same process."""
    instance = make_midair(connmgrs=2)
    place = broken("midair/up/manager.py", FAILS_TO_START)
    before = {name: row["pid"] for name, row in instance.components().items()}
    with nobody_notices(instance):
        said = refused(instance, upgrade(instance, place))
        assert "did not start: RuntimeError: broken on purpose" in said
        assert {name: row["pid"] for name, row in instance.components().items()} == before
        os.kill(before["router"], signal.SIGKILL)
        eventually(
            lambda: instance.components()["router"]["pid"] not in (None, before["router"]),
            "the old one manages",
        )
    log = list(events.read(Runtime.open(instance.name)))
    assert [it["component"] for it in log if it["kind"] == events.UPGRADE_FAILED] == ["manager"]
    assert instance.stop() == 0
    assert leaks_of(instance.name) == []


def test_a_part_that_is_just_being_started_is_not_lost(broken: Broken, make_midair: Make) -> None:
    """It takes its time to say who it is; the manager becomes another program meanwhile."""
    place = broken("midair/process/program.py", SLOW_TO_SAY)
    instance = start("slow", "", "--connmgrs", "1", place=place)
    try:
        with held(instance, 5):
            killed = instance.pid("router")
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: instance.pid("router") not in (None, killed), "it is being started")
            starting = instance.pid("router")
            done = cli("upgrade", "manager", "--name", instance.name, timeout=120)
            assert done.returncode == 0, done.stderr
            assert instance.components()["manager"]["version"] == __version__
            assert instance.pid("router") == starting
        with_guard = len(instance.components()) + 1
        assert len(processes_of(instance.name)) == with_guard, "nobody else was started"
    finally:
        assert instance.stop() == 0
    assert leaks_of(instance.name) == []


def test_one_of_the_release_before_is_refused(broken: Broken, make_midair: Make) -> None:
    """It has no module to become."""
    instance = make_midair()
    place = broken("midair/version.py", "")
    (place / "midair/up/successor.py").unlink()
    assert "No module named midair.up.successor" in refused(instance, upgrade(instance, place))


def test_a_signal_on_the_way_is_not_lost(second: Path, make_midair: Make) -> None:
    """SIGTERM at moments all over the change: it ends the instance, whichever release gets it."""
    for _ in range(3):
        instance = make_midair()
        assert instance.process is not None
        upgrading = subprocess.Popen(
            [
                *(sys.executable, "-m", "midair", "upgrade", "manager"),
                *("--name", instance.name, "--to", str(second)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with upgrading:
            assert upgrading.stdout is not None
            said = b""
            while b"switching" not in said and (got := os.read(upgrading.stdout.fileno(), 4096)):
                said += got
            instance.process.send_signal(signal.SIGTERM)
            upgrading.wait(PATIENCE_S)
        assert instance.process.wait(PATIENCE_S) == 0
        assert leaks_of(instance.name) == []
