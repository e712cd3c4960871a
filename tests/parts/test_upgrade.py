"""`midair upgrade`: another version takes over at full work; one that cannot does no harm.

Method: a second version is built for real, in a copy of the tree. Versions that do not work
are copies of that one, broken on purpose in one place. Nothing here depends on how long
something takes; the pauses measured are printed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from midair.exits import Exit
from midair.up import release
from midair.up.component import Component
from midair.up.upgrade import choose
from midair.version import __version__
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli, eventually, leaks_of
from tests.support.live import Client, held, nobody_notices
from tests.support.releases import BROKEN, NEXT, PACKAGES, Broken, build, patch

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
PARTS = ["keeper", "router", "connmgr/0", "connmgr/1", "dispatcher"]
# With one, decisions of the router are repeated; with two, every message is routed.
EACH = pytest.mark.parametrize("connmgrs", [1, 2], ids=lambda n: f"{n}connmgr")
UPGRADE_S_MAX = 180.0


def upgrade(
    instance: Instance, what: str, to: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    words = ("upgrade", what, "--name", instance.name, "--to", str(to), *options)
    done = cli(*words, timeout=UPGRADE_S_MAX)
    print(done.stdout, end="")
    return done


def upgraded(instance: Instance, what: str, to: Path, parts: list[str], version: str) -> None:
    """Upgrades `parts`, and looks whether they, and only they, have been replaced."""
    before = instance.components()
    done = upgrade(instance, what, to)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [
        rf"{part}: starting {re.escape(version)} \.\.\. standby \.\.\. switching \.\.\. "
        r"active in \d+\.\d ms\n"
        for part in parts
    ]
    assert re.fullmatch("".join(lines), done.stdout)
    after = instance.components()
    assert list(after) == list(before)
    for name, row in after.items():
        assert row["state"] == "active"
        assert row["restarts"] == 0
        if name == "manager":  # it becomes the other release in the process that it is
            assert row["pid"] == before[name]["pid"]
            assert row["generation"] == before[name]["generation"] + (name in parts)
        else:
            assert (row["pid"] != before[name]["pid"]) == (name in parts)
        if name in parts:
            assert row["version"] == version


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("keeper", ["keeper"]),
        ("router", ["router"]),
        ("connmgr/1", ["connmgr/1"]),
        ("connmgr", ["connmgr/0", "connmgr/1"]),
        ("dispatcher", ["dispatcher"]),
        ("manager", ["manager"]),
        ("all", [*PARTS, "manager"]),
    ],
)
def test_forward_and_back_under_load(
    what: str, parts: list[str], second: Path, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=2)
    assert list(instance.components()) == ["manager", *PARTS]
    forward_and_back(instance, what, second, parts)


def test_forward_and_back_of_all_with_one_connmgr(second: Path, make_midair: Make) -> None:
    parts = [part for part in (*PARTS, "manager") if part != "connmgr/1"]
    forward_and_back(make_midair(connmgrs=1), "all", second, parts)


def forward_and_back(instance: Instance, what: str, second: Path, parts: list[str]) -> None:
    with nobody_notices(instance):
        upgraded(instance, what, second, parts, NEXT)
        upgraded(instance, what, ROOT, parts, __version__)


def test_a_virtual_environment_can_be_named(
    second: Path, make_midair: Make, tmp_path: Path
) -> None:
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    [packages] = place.glob("lib/python*/site-packages")
    for package in PACKAGES:
        (packages / package).symlink_to(second / package)
    # What Midair needs is found where this interpreter has it.
    (packages / "needed.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
    instance = make_midair(connmgrs=2)
    with held(instance, 5):
        done = upgrade(instance, "router", place)
        assert (done.returncode, done.stderr) == (0, "")
        row = instance.components()["router"]
        assert row["version"] == NEXT
        command = Path(f"/proc/{row['pid']}/cmdline").read_bytes().split(b"\0")
        assert command[0] == bytes(place / "bin" / "python")


@EACH
def test_a_crash_after_an_upgrade_brings_back_the_new_version(
    connmgrs: int, second: Path, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=connmgrs)
    with held(instance, 10):
        assert upgrade(instance, "all", second).returncode == 0
        for part in ("keeper", "router", "connmgr/0", "dispatcher"):
            killed = instance.pid(part)
            os.kill(killed, signal.SIGKILL)
            eventually(
                lambda part=part, killed=killed: (
                    instance.components()[part]["pid"] != killed
                    and instance.components()[part]["state"] == "active"
                ),
                f"{part} is back",
            )
            assert instance.components()[part]["version"] == NEXT


@EACH
def test_the_new_keeper_has_the_copies_of_the_old_one(
    connmgrs: int, second: Path, make_midair: Make
) -> None:
    """Before anybody could give them to it: the connmgrs cannot, they are stopped, then killed."""
    instance = make_midair(connmgrs=connmgrs)
    with held(instance, 300):
        stopped = [instance.pid(f"connmgr/{n}") for n in range(connmgrs)]
        for connmgr in stopped:
            os.kill(connmgr, signal.SIGSTOP)
        assert upgrade(instance, "keeper", second).returncode == 0
        for connmgr in stopped:
            os.kill(connmgr, signal.SIGKILL)


# Versions that do not work: name -> (file, code added to it)

FAILS_TO_IMPORT = 'raise ImportError("broken on purpose")\n'
EXITS_AT_START = """
def _exit(*_given):
    print("no good today", file=sys.stderr, flush=True)
    os._exit(7)
Program.__init__ = _exit
"""
HANGS_BEFORE_STANDBY = """
Program.acquire_lease = lambda *_given: time.sleep(3600)
"""
HANGS_ON_TAKING_OVER = """
_acquire = Program.acquire_lease
def _hang(*given):
    _acquire(*given)
    time.sleep(3600)
Program.acquire_lease = _hang
"""
DIES_ON_TAKING_OVER = """
_acquire = Program.acquire_lease
def _die(self, *given):
    _acquire(self, *given)
    self.log.error("dies on purpose")
    os._exit(9)
Program.acquire_lease = _die
"""
DIES_WHEN_ACTIVE = """
_ready = Program.ready
def _die(self, *given):
    _ready(self, *given)
    os.kill(os.getpid(), signal.SIGSEGV)
Program.ready = _die
"""
DIES_LATER = """
_ready = Program.ready
def _die(self, *given):
    import threading
    _ready(self, *given)
    threading.Timer(3.0, os._exit, [9]).start()
Program.ready = _die
"""


def keeps(instance: Instance, part: str, place: Path, *options: str) -> str:
    """An upgrade that fails before the switch: the process never notices. What is said."""
    before = instance.components()
    done = upgrade(instance, part, place, *options)
    assert done.returncode == Exit.FAILED
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"midair: {part}: ")
    assert f"{__version__} keeps working" in done.stderr
    after = instance.components()
    assert list(after) == list(before), "the new process is gone"
    for name, row in after.items():
        assert row["pid"] == before[name]["pid"]
    return done.stderr


@EACH
@pytest.mark.parametrize("part", ["keeper", "router", "connmgr/0", "dispatcher"])
def test_a_version_that_crashes_at_import(
    part: str, connmgrs: int, broken: Broken, make_midair: Make
) -> None:
    file = "midair/keeper/main.py" if part == "keeper" else f"{part.partition('/')[0]}/main.py"
    place = broken(file, "")
    (place / file).write_text(FAILS_TO_IMPORT)
    instance = make_midair(connmgrs=connmgrs)
    with nobody_notices(instance):
        said = keeps(instance, part, place)
    assert "exit 1 (FAILED); it said: ImportError: broken on purpose" in said


@EACH
def test_a_version_that_exits_at_start(connmgrs: int, broken: Broken, make_midair: Make) -> None:
    instance = make_midair(connmgrs=connmgrs)
    with nobody_notices(instance):
        said = keeps(instance, "connmgr/0", broken("midair/process/program.py", EXITS_AT_START))
    assert "did not start: exit 7; it said: no good today" in said


@EACH
def test_a_version_that_hangs_before_it_is_ready(
    connmgrs: int, broken: Broken, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=connmgrs)
    place = broken("midair/process/program.py", "import time\n" + HANGS_BEFORE_STANDBY)
    with nobody_notices(instance):
        said = keeps(instance, "router", place, "--timeout", "2")
    assert "was not ready within 2 s" in said


@pytest.mark.parametrize(
    ("header", "constant", "parts"),
    [
        ("router/routing.h", "ROUTING_LAYOUT", ["router"]),
        ("shm/batch.h", "BATCH_VERSION", ["router", "connmgr/0"]),
        ("connmgr/journal.h", "JOURNAL_LAYOUT", ["connmgr/0"]),
        ("shm/conntable.h", "CONNTABLE_LAYOUT", ["dispatcher"]),
    ],
)
def test_a_version_with_another_layout(
    header: str, constant: str, parts: list[str], broken: Broken, make_midair: Make
) -> None:
    place = broken("midair/version.py", "")
    patch(place, f"native/src/{header}", rf"#define {constant} \d+", f"#define {constant} 77")
    if constant == "BATCH_VERSION":  # the converters copy batches: they know the same one
        known = "#define R01_BATCH_VERSION"
        patch(place, "native/src/migrate/release_0_1.h", rf"{known} \d+u", f"{known} 77u")
    build(place)
    for connmgrs in (1, 2):  # of one building, which takes longest
        instance = make_midair(connmgrs=connmgrs)
        with nobody_notices(instance):
            for part in parts:
                said = keeps(instance, part, place)
                assert "exit 65 (LAYOUT_MISMATCH)" in said
                assert "was made by another version of Midair" in said
        instance.stop()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (DIES_ON_TAKING_OVER, "died 3 times when it took over: exit 9; it said: "),
        (DIES_WHEN_ACTIVE, "died 3 times when it took over: killed by SIGSEGV"),
        (HANGS_ON_TAKING_OVER, "was not active within 5 s after the switch"),
    ],
)
@pytest.mark.parametrize(
    ("part", "connmgrs"),
    [
        ("keeper", 2),
        ("router", 1),
        ("router", 2),
        ("connmgr/0", 1),
        ("connmgr/0", 2),
        ("dispatcher", 2),
    ],
)
def test_a_version_that_fails_after_the_switch(
    part: str, connmgrs: int, code: str, says: str, broken: Broken, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=connmgrs)
    place = broken("midair/process/program.py", "import time\n" + code)
    before = instance.components()
    with nobody_notices(instance):
        done = upgrade(instance, part, place, "--timeout", "5")
    assert done.returncode == Exit.FAILED
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"midair: {part}: {BROKEN} {says}")
    assert f"{__version__} is back" in done.stderr
    assert f" ... back to {__version__} ... active in " in done.stdout
    after = instance.components()
    assert list(after) == list(before)
    for name, row in after.items():
        assert (row["version"], row["state"]) == (__version__, "active")
        assert (row["pid"] != before[name]["pid"]) == (name == part)


def at_work(instance: Instance, role: str) -> list[str]:
    """The versions of the active processes of a role."""
    rows = instance.status()["components"]
    return [row["version"] for row in rows if (row["role"], row["state"]) == (role, "active")]


@pytest.mark.parametrize(("standby", "connmgrs"), [("false", 1), ("true", 1), ("false", 2)])
def test_a_version_that_keeps_dying_later_is_replaced_by_the_old_one(
    standby: str, connmgrs: int, broken: Broken, make_midair: Make
) -> None:
    limit = "[manager]\nrestart_limit = 2\nrestart_window_s = 600\n"
    instance = make_midair(config=f"{limit}standby = {standby}\n", connmgrs=connmgrs)
    with held(instance, 10):
        assert (
            upgrade(instance, "router", broken("midair/process/program.py", DIES_LATER)).returncode
            == 0
        )
        assert at_work(instance, "router") == [BROKEN]
        eventually(lambda: at_work(instance, "router") == [__version__], "the old one is back")
    said = instance.stderr()
    assert "router died 2 times in 600 s, the last time: exit 9" in said
    assert f"; going back to {__version__}\n" in said


def test_all_stops_at_the_first_failure(broken: Broken, make_midair: Make) -> None:
    place = broken("midair/version.py", "")
    (place / "router" / "main.py").write_text(FAILS_TO_IMPORT)
    instance = make_midair(connmgrs=2)
    done = upgrade(instance, "all", place)
    assert done.returncode == Exit.FAILED
    assert done.stderr.startswith(f"midair: router: {BROKEN} did not start: ")
    versions = {name: row["version"] for name, row in instance.components().items()}
    assert versions["keeper"] == BROKEN
    assert versions["router"] == versions["connmgr/0"] == versions["dispatcher"] == __version__


def test_a_second_upgrade_is_refused_and_the_first_can_be_cut_short(
    broken: Broken, second: Path, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=2)
    place = broken("midair/process/program.py", "import time\n" + HANGS_BEFORE_STANDBY)
    words = ["upgrade", "router", "--name", instance.name, "--to", str(place)]
    first = subprocess.Popen(
        [sys.executable, "-m", "midair", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(
            lambda: len([r for r in instance.status()["components"] if r["role"] == "router"]) == 2,
            "the new router has been started",
        )
        done = upgrade(instance, "dispatcher", second)
        assert done.returncode == Exit.FAILED
        assert done.stdout == ""
        assert f"another upgrade is under way (router to {BROKEN})" in done.stderr
        with Client(instance) as client:
            client.ping()
        assert cli("down", "--name", instance.name).returncode == 0
        output, errors = first.communicate(timeout=PATIENCE_S)
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == Exit.FAILED
    assert output == f"router: starting {BROKEN}\n"
    assert errors == "midair: router: the instance is ending\n"
    assert leaks_of(instance.name) == []


def test_what_cannot_be_upgraded_is_said_in_one_line(
    second: Path, broken: Broken, make_midair: Make, tmp_path: Path
) -> None:
    instance = make_midair(connmgrs=2)
    unreadable = broken("midair/version.py", "raise RuntimeError('not a version')\n")
    for what, place, code, says in [
        ("tracer", second, Exit.USAGE, "tracer: there is no such component; keeper, router"),
        ("connmgr/7", second, Exit.FAILED, "connmgr/7: there is no such component here"),
        ("router", tmp_path, Exit.USAGE, "neither a virtual environment (no bin/python) nor"),
        ("router", unreadable, Exit.FAILED, "cannot be imported there: RuntimeError: not a"),
    ]:
        done = upgrade(instance, what, place)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr
    done = cli("upgrade", "all", "--name", "no-such-instance")
    assert done.returncode == Exit.NOT_RUNNING
    assert "is not running" in done.stderr
    assert {row["restarts"] for row in instance.components().values()} == {0}


def test_a_tracer_is_no_part_of_all() -> None:
    """It is there for one recording. It has no place in the order of an upgrade."""
    components = [
        Component(role, None, "", [], [], release.own()) for role in ("tracer", "router", "keeper")
    ]
    assert [it.role for it in choose("all", components)] == ["keeper", "router"]
