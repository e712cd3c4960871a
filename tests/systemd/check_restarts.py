"""Midair under a real systemd: every part is restarted, killed and stopped under load.

Not part of the ordinary tests (it needs root and systemd-container, and boots a machine):
`make test-systemd`, or `python -m pytest tests/systemd/check_*.py`.

Method: one container for all tests. 200 idle connections are open from the first test to the
last, and then each must get one message, once. In each test messages flow and clients connect
while something is done to a unit; loadgen fails on anything lost, doubled, reordered, refused
or ended; and exactly the processes that should have been replaced have been.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import loadgen
from midair.exits import Exit
from tests.systemd.container import Container, add_drop_in, eventually, install
from tests.systemd.load import Load, Workload, ended

IDLE = 200
KEEPER, ROUTER, DISPATCHER = "midair-keeper", "midair-router", "midair-dispatcher"
CONNMGRS = ("midair-connmgr@0", "midair-connmgr@1")
SERVICES = (KEEPER, ROUTER, *CONNMGRS, DISPATCHER)
SOCKETS = tuple(f"{name}.socket" for name in (KEEPER, *CONNMGRS, DISPATCHER))
pytestmark = pytest.mark.timeout(1200)  # the first one makes, installs and boots the container

KILLS = 12  # of one service in a row: more than systemd's usual limit of 5 starts in 10 s


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Iterator[Container]:
    """A booted container with Midair in it; its journal is shown if a test failed."""
    container = Container()
    try:
        loadgen.build()
        container.make()
        install(container)
        add_drop_in(container, f"{ROUTER}.service", "[Service]\nWatchdogSec=3s\n")
        container.boot()
        yield container
        if request.session.testsfailed:
            print(container.journal("-u", "midair*", "-n", "300"))
    finally:
        container.end()


def active(machine: Container) -> bool:
    done = machine.run("systemctl", "is-active", "midair.target", *SERVICES, *SOCKETS, check=False)
    return set(done.stdout.split()) == {"active"}


def pids(machine: Container) -> dict[str, str]:
    """The main process of each service, as numbered in the container."""
    return {name: machine.show(name, "MainPID") for name in SERVICES}


def await_replaced(machine: Container, before: dict[str, str], *names: str) -> None:
    """Until exactly these services have new processes and everything is active again."""
    eventually(
        lambda: (
            all(pids(machine)[name] not in ("0", before[name]) for name in names)
            and active(machine)
        ),
        f"{', '.join(names)} replaced",
    )
    after = pids(machine)
    assert {name for name in SERVICES if after[name] != before[name]} == set(names)


def sockets_kept(machine: Container) -> int:
    """How many client sockets the keeper has."""
    pid = machine.show(KEEPER, "MainPID")
    found = machine.run("find", f"/proc/{pid}/fd", "-lname", "socket:*", "-printf", "%l\n").stdout
    held = {line.strip("socket:[]") for line in found.split()}
    rows = [row.split() for row in Path(f"/proc/{machine.leader}/net/tcp").read_text().splitlines()]
    return len(held & {row[9] for row in rows})


@pytest.fixture(scope="session")
def workload(machine: Container) -> Workload:
    eventually(lambda: active(machine), "every unit is active")
    return Workload(machine)


@pytest.fixture(scope="session")
def crowd(machine: Container, workload: Workload) -> Iterator[Load]:
    """The idle connections."""
    load = Load(machine, "idle", connections=IDLE)
    with ended(load):
        load.await_ready()
        yield load


@pytest.fixture
def before(machine: Container, crowd: Load) -> Iterator[dict[str, str]]:
    """The processes before a test; after it the crowd must still be there."""
    eventually(lambda: sockets_kept(machine) >= IDLE, "the keeper has every socket")
    yield pids(machine)
    if not crowd.running:
        crowd.finish()  # says why it ended
    assert crowd.running
    assert active(machine)


def test_01_boots_into_service(machine: Container, workload: Workload, crowd: Load) -> None:
    assert machine.run("systemctl", "is-enabled", "midair.target").stdout.strip() == "enabled"
    units = [f"/etc/systemd/system/{name}.service" for name in SERVICES]
    assert machine.run("systemd-analyze", "verify", *units).stderr == ""
    report = json.loads(machine.run("/opt/midair/bin/midair", "status", "--json").stdout)
    assert report["listen"] == ["127.0.0.1:4222"]
    assert {row["state"] for row in report["components"]} == {"active"}
    assert len(report["components"]) == len(SERVICES)
    workload.during(lambda: None)


@pytest.mark.parametrize("name", [ROUTER, DISPATCHER, *CONNMGRS, KEEPER])
def test_02_restart_one(
    machine: Container, workload: Workload, before: dict[str, str], name: str
) -> None:
    workload.during(lambda: machine.systemctl("restart", name))
    await_replaced(machine, before, name)


@pytest.mark.parametrize("name", [ROUTER, DISPATCHER, *CONNMGRS, KEEPER])
def test_03_kill_one(
    machine: Container, workload: Workload, before: dict[str, str], name: str
) -> None:
    def kill() -> None:
        machine.run("kill", "-KILL", before[name])
        await_replaced(machine, before, name)

    workload.during(kill)


def test_04_restart_the_target(
    machine: Container, workload: Workload, before: dict[str, str]
) -> None:
    """All at once, but the keeper: it holds the sockets meanwhile."""

    workload.during(lambda: machine.systemctl("restart", "midair.target"))
    await_replaced(machine, before, ROUTER, *CONNMGRS, DISPATCHER)


def test_05_restart_the_keeper_and_then_the_target(
    machine: Container, workload: Workload, before: dict[str, str]
) -> None:
    """Nobody waits in between: the connection managers have given it their sockets by then."""

    def restart() -> None:
        machine.systemctl("restart", KEEPER)
        machine.systemctl("restart", "midair.target")

    workload.during(restart)
    await_replaced(machine, before, *SERVICES)


def test_06_kill_all_but_the_keeper(
    machine: Container, workload: Workload, before: dict[str, str]
) -> None:
    names = [name for name in SERVICES if name != KEEPER]

    def kill() -> None:
        machine.run("kill", "-KILL", *(before[name] for name in names))
        await_replaced(machine, before, *names)

    workload.during(kill)


@pytest.mark.parametrize("name", [ROUTER, CONNMGRS[0]])
def test_07_deaths_in_a_row_meet_no_limit(
    machine: Container, workload: Workload, before: dict[str, str], name: str
) -> None:
    def kill() -> None:
        for _ in range(KILLS):
            old = pids(machine)
            machine.run("kill", "-KILL", old[name])
            await_replaced(machine, old, name)

    workload.during(kill)
    assert machine.show(name, "Result") == "success"


def test_08_the_watchdog_ends_a_router_that_hangs(
    machine: Container, workload: Workload, before: dict[str, str]
) -> None:
    def hang() -> None:
        machine.run("kill", "-STOP", before[ROUTER])
        await_replaced(machine, before, ROUTER)

    workload.during(hang)
    assert "Watchdog timeout" in machine.journal("-u", ROUTER)


# Tries to open each file named, for reading, with the rights of process argv[1].
OPEN_AS = """
import json, os, sys
status = dict(line.split(":", 1) for line in open(f"/proc/{sys.argv[1]}/status"))
os.setgroups([int(word) for word in status["Groups"].split()])
os.setresgid(*[int(word) for word in status["Gid"].split()[:3]])
os.setresuid(*[int(word) for word in status["Uid"].split()[:3]])
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        print("open", os.path.basename(path))
    except OSError as error:
        print(error.strerror, os.path.basename(path))
"""


def test_09_the_router_cannot_open_bodies(
    machine: Container, workload: Workload, before: dict[str, str]
) -> None:
    router = before[ROUTER]
    segments = machine.run("find", "/dev/shm", "-name", "midair-*.midair.*").stdout.split()
    own = [path for path in segments if path.endswith(".routing")]
    closed = ("arena", "journal", "conntable", "trace")
    others = [path for path in segments if path.split(".")[2] in closed]
    assert len(own) == 1
    assert {path.split(".")[2] for path in others} == set(closed)
    said = ""

    def look() -> None:
        nonlocal said
        said = machine.run("/usr/bin/python3", "-c", OPEN_AS, router, *own, *others).stdout

    workload.during(look)
    names = [path.rsplit("/", 1)[1] for path in (*own, *others)]
    wanted = [f"open {names[0]}", *(f"Permission denied {name}" for name in names[1:])]
    assert said.splitlines() == wanted
    mapped = machine.run("grep", "-c", "/dev/shm/midair", f"/proc/{router}/maps").stdout
    assert int(mapped) > 0
    maps = machine.run("grep", "-o", "/dev/shm/midair-.*", f"/proc/{router}/maps").stdout
    assert set(maps.split()) == {
        *own,
        *(path for path in segments if path.endswith(".stats-router")),
    }


def test_10_the_journal_tells_of_recoveries(machine: Container, before: dict[str, str]) -> None:
    assert re.search(r"recovered: \d+ subscriptions", machine.journal("-u", ROUTER))
    for name in CONNMGRS:
        assert re.search(r"recovered: \d+ connections, \d+ sockets", machine.journal("-u", name))
    everything = machine.journal("-u", "midair*")
    for never in ("start-limit-hit", "trigger-limit-hit", "Traceback", "error:"):
        assert never not in everything


def test_11_the_crowd_has_lost_nothing(machine: Container, crowd: Load) -> None:
    report = crowd.finish()
    assert report["reached"] == IDLE


def test_12_one_too_many_is_refused_once(machine: Container) -> None:
    """More units than connmgr.count: its exit code keeps systemd from trying for ever."""
    extra = "midair-connmgr@2"
    assert machine.run("systemctl", "start", extra, check=False).returncode != 0
    assert machine.show(extra, "ExecMainStatus") == str(int(Exit.BAD_CONFIG))
    assert machine.show(extra, "ActiveState") == "failed"
    assert machine.show(extra, "NRestarts") == "0"
    assert "connmgr.count is 2" in machine.journal("-u", extra)
    machine.systemctl("stop", f"{extra}.socket")
    machine.systemctl("reset-failed", extra)
    assert active(machine)


def test_13_stop_ends_everything_and_start_begins_afresh(
    machine: Container, workload: Workload
) -> None:
    def inactive() -> bool:
        units = ("midair-instance", *SERVICES, *SOCKETS)
        done = machine.run("systemctl", "is-active", *units, check=False)
        return set(done.stdout.split()) == {"inactive"}

    machine.systemctl("stop", "midair.target")
    eventually(inactive, "every unit is inactive")
    assert machine.run(
        "find", "/dev/shm", "/dev/mqueue", "/run/midair", check=False
    ).stdout.split() == [
        "/dev/shm",
        "/dev/mqueue",
    ]
    assert machine.run("ipcs", "-s").stdout.count("0x") == 0
    machine.systemctl("start", "midair.target")
    assert active(machine)
    workload.during(lambda: None)


def test_14_a_start_overtakes_a_stop(machine: Container, workload: Workload) -> None:
    """The stop of the target is over before that of its parts is."""
    machine.systemctl("stop", "midair.target")
    machine.systemctl("start", "midair.target")
    eventually(lambda: active(machine), "every unit is active")
    workload.during(lambda: None)


MONITOR = "midair-monitor"
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"


def test_15_the_monitor_is_started_when_asked_for(machine: Container, workload: Workload) -> None:
    """It reads as a user of its own, comes back when killed, and disturbs nobody."""

    def ask(path: str) -> Any:
        url = f"http://127.0.0.1:8222{path}"
        return json.loads(machine.run("/opt/midair/bin/python", "-c", ASK, url).stdout)

    others = pids(machine)
    unit = f"/etc/systemd/system/{MONITOR}.service"
    assert machine.run("systemd-analyze", "verify", unit).stderr == ""
    machine.systemctl("enable", "--now", MONITOR)
    allowed = machine.show(MONITOR, "SystemCallFilter").split()
    assert "read" in allowed
    assert not {"mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive"} & set(allowed)
    assert ask("/healthz") == {"status": "ok"}
    said = ask("/varz")["midair"]
    assert said["unreadable"] == {}
    assert len(said["components"]) == len(SERVICES) + 1
    assert {it["state"] for it in said["components"]} == {"active"}
    workload.during(lambda: machine.systemctl("kill", "-s", "KILL", MONITOR))
    eventually(lambda: machine.show(MONITOR, "NRestarts") == "1", "the monitor is back")
    eventually(  # the load has gone, and its subscriptions with it; the counters follow
        lambda: ask("/subsz?subs=1")["total"] == ask("/varz")["subscriptions"],
        "both say how many subscriptions there are",
    )
    assert ask("/varz")["in_msgs"] > 0
    assert pids(machine) == others
    machine.systemctl("disable", "--now", MONITOR)
    machine.systemctl("stop", f"{MONITOR}.socket")
    assert active(machine)


TRACER = "midair-tracer"
TRACES = "/var/lib/midair-traces"


def test_16_the_tracer_is_started_when_asked_for(machine: Container, workload: Workload) -> None:
    """It writes where it may, goes on after a kill, and disturbs nobody."""

    def trace(*words: str) -> str:
        return machine.run("/opt/midair/bin/midair", "trace", *words).stdout

    others = pids(machine)
    unit = f"/etc/systemd/system/{TRACER}.service"
    assert machine.run("systemd-analyze", "verify", unit).stderr == ""
    machine.systemctl("start", TRACER)
    trace("on", "--run", "noon", "--out", TRACES)
    workload.during(lambda: machine.systemctl("kill", "-s", "KILL", TRACER))
    eventually(lambda: machine.show(TRACER, "NRestarts") == "1", "the tracer is back")
    trace("off")
    manifest = json.loads(machine.run("cat", f"{TRACES}/noon/manifest.json").stdout)
    assert manifest["counts"]["records"] > 0
    listed = machine.run("stat", "-c", "%U %a", f"{TRACES}/noon/manifest.json").stdout
    assert listed == "midair 644\n"
    assert pids(machine) == others
    machine.systemctl("stop", TRACER)
    assert active(machine)
