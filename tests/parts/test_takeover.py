"""The manager is killed with -9: the parts work on, and the next `midair up` takes them over.

Method: clients and load that check everything run around each kill. What a manager does (restarts,
watchdog, standbys, upgrades, the log of the parts) is tried again after a takeover.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from midair import names
from midair.errors import MissingError
from midair.exits import Exit
from midair.keeper import listening
from midair.keeper.client import KeeperClient
from midair.process import events, wire
from midair.process.runtime import ACTIVE, Runtime
from midair.version import __version__
from tests.support.instance import (
    PATIENCE_S,
    ROOT,
    Instance,
    cli,
    eventually,
    leaks_of,
    new_name,
    processes_of,
    start,
)
from tests.support.live import Client, held, nobody_notices
from tests.support.previous import previous_release

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
PARTS = ["keeper", "router", "connmgr/0", "connmgr/1", "dispatcher"]
BOTH = pytest.mark.parametrize("connmgrs", [1, 2])


def parts_of(connmgrs: int) -> list[str]:
    return [part for part in PARTS if part != "connmgr/1" or connmgrs == 2]


def pids(instance: Instance) -> dict[str, int]:
    """Of the parts at work, as they say themselves: there may be no manager to ask."""
    return {
        names.component(state.role, state.index): state.pid
        for state in Runtime.open(instance.name).states()
        if state.state == ACTIVE and state.role != names.MANAGER
    }


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def back(instance: Instance, part: str, killed: int) -> int:
    """Waits until another process is at work; its pid."""
    found = eventually(lambda: pids(instance).get(part, killed) != killed, f"{part} is back")
    assert found
    return pids(instance)[part]


# Without a manager


@BOTH
def test_everything_goes_on_without_a_manager(connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(connmgrs=connmgrs)
    before = pids(instance)
    with nobody_notices(instance):
        instance.kill_manager()
        with Client(instance, "new") as client:  # accepted after the kill
            for number in range(100):
                client.echo(b"%d" % number)
    assert pids(instance) == before
    report = instance.status()
    assert report["listen"] == [instance.address]
    assert "there is no manager" in cli("status", "--name", instance.name).stdout


@BOTH
def test_the_next_manager_takes_over(connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(connmgrs=connmgrs)
    before = pids(instance)
    count = len(before)
    with nobody_notices(instance):
        for generation in range(2, 5):
            instance.kill_manager()
            line = instance.up_again()
            assert f"took over {count} parts of instance {instance.name}, listening on" in line
            assert f"listening on {instance.address}" in line
            assert pids(instance) == before, "none was started anew"
            row = instance.components()["manager"]
            assert (row["generation"], row["state"]) == (generation, "active")
    assert "configuration" not in instance.stderr()
    told = [it for it in events.read(Runtime.open(instance.name)) if it["kind"] == "taken_over"]
    assert [it["details"]["parts"] for it in told] == [count] * 3
    assert instance.stop() == 0
    assert leaks_of(instance.name) == []


@BOTH
@pytest.mark.parametrize("part", PARTS)
def test_what_died_meanwhile_is_started_again(part: str, connmgrs: int, make_midair: Make) -> None:
    if part not in parts_of(connmgrs):
        pytest.skip("there is no second connmgr")
    instance = make_midair(connmgrs=connmgrs)
    before = pids(instance)
    with held(instance, 20):
        instance.kill_manager()
        kill(before[part])
        line = instance.up_again()
        assert f"took over {len(before) - 1} parts" in line
        assert f"started {part} again" in line
        after = pids(instance)
        assert {name for name in after if after[name] != before[name]} == {part}
        with Client(instance, "new") as client:
            client.echo(b"served")
    assert instance.components()[part]["restarts"] == 1


@BOTH
@pytest.mark.parametrize("part", PARTS)
def test_manager_and_a_part_in_the_same_moment(part: str, connmgrs: int, make_midair: Make) -> None:
    """Under load; those that connect meanwhile wait, whoever it is that is away."""
    if part not in parts_of(connmgrs):
        pytest.skip("there is no second connmgr")
    instance = make_midair(connmgrs=connmgrs)
    assert instance.process is not None
    with nobody_notices(instance):
        for _ in range(2):
            killed = pids(instance)[part]
            kill(killed)
            instance.kill_manager()
            instance.up_again()
            back(instance, part, killed)


def test_those_in_the_backlog_wait_for_the_next_manager(make_midair: Make) -> None:
    """Nobody accepts: the listening socket is held by the keeper alone."""
    instance = make_midair()
    dispatcher = pids(instance)["dispatcher"]
    instance.kill_manager()
    kill(dispatcher)
    eventually(lambda: "dispatcher" not in pids(instance), "it is dead")
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(instance.connect()) for _ in range(50)]
        instance.up_again()
        for sock in waiting:
            assert sock.recv(5) == b"INFO "


# After a takeover


@pytest.fixture
def taken(make_midair: Make) -> Instance:
    """An instance that was taken over, with standbys."""
    config = "[manager]\nwatchdog_s = 2\nrestart_limit = 100\nstandby = true\n"
    instance = make_midair(config=config, connmgrs=2)
    instance.kill_manager()
    instance.up_again()
    return instance


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_restarts_and_the_watchdog_work_again(number: signal.Signals, taken: Instance) -> None:
    with nobody_notices(taken):
        for part in PARTS:
            pid = pids(taken)[part]
            kill(pid, number)
            back(taken, part, pid)
    active = [row for row in taken.status()["components"] if row["state"] == "active"]
    restarts = {names.component(row["role"], row["index"]): row["restarts"] for row in active}
    assert restarts == {"manager": 0, **dict.fromkeys(PARTS, 1)}
    said = taken.stderr()
    for part in PARTS:
        assert (f"{part} silent for" in said) == (number == signal.SIGSTOP)
    end = "exit 0 (OK)" if number == signal.SIGTERM else "killed by SIGKILL"
    assert all(f"{part} died: {end}" in said for part in PARTS), "how they ended is known"


def test_standbys_are_taken_over_and_replaced(taken: Instance) -> None:
    def standbys() -> set[str]:
        return {
            names.component(row["role"], row["index"])
            for row in taken.status()["components"]
            if row["state"] == "standby"
        }

    wanted = {"router", "connmgr/0", "connmgr/1", "dispatcher"}
    eventually(lambda: standbys() == wanted, "each has one")
    taken.kill_manager()
    before = {s.pid for s in Runtime.open(taken.name).states() if s.role != names.MANAGER}
    assert "took over 9 parts" in taken.up_again()
    after = {s.pid for s in Runtime.open(taken.name).states() if s.role != names.MANAGER}
    assert after == before, "none too many, none too few"
    killed = pids(taken)["router"]
    kill(killed)
    back(taken, "router", killed)
    eventually(lambda: standbys() == wanted, "it has one again")


def test_parts_are_upgraded_after_a_takeover(taken: Instance) -> None:
    with nobody_notices(taken):
        before = pids(taken)
        done = cli("upgrade", "all", "--name", taken.name, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        after = pids(taken)
        assert not {before[part] for part in PARTS} & {after[part] for part in PARTS}


def test_the_log_of_the_parts_is_not_lost(make_midair: Make) -> None:
    """What is said without a manager is kept, up to a bound, and nobody waits for it."""
    instance = make_midair(config='[log]\nlevel = "debug"\n')
    with held(instance, 1) as clients:
        instance.kill_manager()
        before = instance.stderr()
        with Client(instance) as client:
            client.ping()
        instance.up_again()
        eventually(lambda: "client 2" in instance.stderr()[len(before) :], "it was kept")
        instance.kill_manager()
        for _ in range(2000):  # more than a pipe holds: four lines each
            Client(instance).close()
        clients[0].echo(b"served")
        instance.up_again()
        before = instance.stderr()
        with Client(instance) as client:
            client.ping()
        eventually(lambda: instance.stderr() != before, "it is read again")


def test_the_monitor_is_taken_over(make_midair: Make) -> None:
    instance = make_midair(options=("--monitor", "0"))
    host, port = instance.status()["monitor"].split(":")
    before = pids(instance)["monitor"]
    instance.kill_manager()
    line = instance.up_again()
    assert f"monitor: http://{host}:{port}/" in line
    assert pids(instance)["monitor"] == before
    kill(before)
    back(instance, "monitor", before)

    def answers() -> bool:
        with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
            sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return sock.recv(64).startswith(b"HTTP/1.0 200")

    eventually(answers, "the monitor answers")


# Ends


@BOTH
def test_down_ends_the_parts_of_a_dead_manager(connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(connmgrs=connmgrs)
    instance.kill_manager()
    assert processes_of(instance.name)
    done = cli("down", "--name", instance.name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "its manager was gone" in done.stdout
    assert leaks_of(instance.name) == []


def test_down_ends_parts_that_do_not_listen(make_midair: Make) -> None:
    instance = make_midair()
    for pid in pids(instance).values():
        kill(pid, signal.SIGSTOP)
    instance.kill_manager()
    done = cli("down", "--name", instance.name)
    assert done.returncode == 0, done.stderr
    assert leaks_of(instance.name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_manager_that_took_over_ends_everything(
    number: signal.Signals, make_midair: Make
) -> None:
    instance = make_midair(connmgrs=2)
    instance.kill_manager()
    instance.up_again()
    assert instance.stop(number) == 0
    assert leaks_of(instance.name) == []


# Another release


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return previous_release(tmp_path_factory)


def test_parts_of_this_release_are_taken_over_from_a_manager_of_the_release_before(
    previous: Path, request: pytest.FixtureRequest
) -> None:
    """It cannot be upgraded; but once all parts have been, it can be killed."""
    instance = start(request.node.nodeid, "", "--connmgrs", "2", place=previous)
    try:
        with held(instance, 20):
            done = cli("upgrade", "all", "--name", instance.name, timeout=150)
            assert done.returncode == 0, done.stderr
            before = pids(instance)
            instance.kill_manager()
            instance.place = ROOT
            assert "took over 5 parts" in instance.up_again()
            assert pids(instance) == before
            for part in ("dispatcher", "connmgr/0", "router", "keeper"):
                kill(before[part])
                back(instance, part, before[part])
            with Client(instance, "new") as client:
                client.echo(b"served")
        assert {row["version"] for row in instance.components().values()} == {__version__}
    finally:
        assert instance.stop() == 0
    assert leaks_of(instance.name) == []


# Another configuration


def test_a_configuration_that_differs_is_said(make_midair: Make, tmp_path: Path) -> None:
    instance = make_midair()
    instance.kill_manager()
    other = tmp_path / "other.toml"
    other.write_text("[limits]\nmax_payload = 4096\n[log]\nlevel = 'debug'\n")
    instance.up_again("--config", str(other), "--connmgrs", "2")
    said = [line for line in instance.stderr().splitlines() if "configuration" in line]
    assert len(said) == 1
    assert "yours differs in limits.max_payload, connmgr.count, log.level" in said[0]
    with instance.connect() as sock:
        assert b'"max_payload":1048576' in sock.recv(4096), "it goes on with its own"
    assert "connmgr/1" not in instance.components()


# Moments


def parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def begin(words: list[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, cwd=ROOT, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)


def test_the_manager_is_killed_while_it_starts_an_instance(request: pytest.FixtureRequest) -> None:
    """At moments all over the start: whatever is there is ended, or can be taken over."""
    name = new_name(request.node.nodeid)
    words = [sys.executable, "-m", "midair", "up", "--name", name, "--port", "0"]
    taken = 0
    for wanted in range(9):
        with begin(words) as process:
            eventually(lambda wanted=wanted: len(processes_of(name)) > wanted % 6, "it has begun")
            process.kill()

        def known() -> bool:
            """All have a state file, or are the guard, which is a child of the dispatcher."""
            found = set()
            with contextlib.suppress(MissingError):
                found = {state.pid for state in Runtime.open(name).states()}
            return all(pid in found or parent(pid) in found for pid in processes_of(name))

        eventually(known, "who has not said who it is has ended with the manager")
        with begin(words) as process:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert "listening on" in line
            taken += "took over" in line
            if wanted % 2:
                process.kill()
                process.wait()
                assert cli("down", "--name", name).returncode == 0
            else:
                process.terminate()
                assert process.wait(PATIENCE_S) == 0
        assert leaks_of(name) == []
    print(f"{taken} of 9 were taken over")


@BOTH
def test_the_manager_is_killed_while_it_takes_over(connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(connmgrs=connmgrs)
    words = [sys.executable, "-m", "midair", *instance.words]
    runtime = Runtime.open(instance.name)
    with held(instance, 20):
        instance.kill_manager()
        for at in range(8):
            if at % 2 and (router := pids(instance).get("router")):
                kill(router)
            generation = int((runtime.path / "manager.generation").read_text())
            with begin(words) as process:
                eventually(
                    lambda generation=generation: (
                        int((runtime.path / "manager.generation").read_text()) > generation
                    ),
                    "it has begun",
                )
                process.kill()
        instance.up_again()
        assert set(pids(instance)) == set(parts_of(connmgrs))


@BOTH
@pytest.mark.parametrize("part", ["router", "connmgr/0", "dispatcher", "keeper"])
def test_the_manager_is_killed_during_an_upgrade(
    part: str, connmgrs: int, make_midair: Make
) -> None:
    """When the candidate has just been started, and when it waits for its role."""
    instance = make_midair(connmgrs=connmgrs)
    runtime = Runtime.open(instance.name)

    def at(part: str) -> list[int]:
        found = runtime.states()
        return [s.pid for s in found if names.component(s.role, s.index) == part]

    with nobody_notices(instance):
        for wanted in ("starting", "standby"):
            before = pids(instance)[part]
            upgrade = subprocess.Popen(
                [sys.executable, "-m", "midair", "upgrade", part, "--name", instance.name],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

            def others(wanted: str = wanted, before: int = before) -> bool:
                found = [
                    state
                    for state in runtime.states()
                    if names.component(state.role, state.index) == part and state.pid != before
                ]
                return any(state.state == wanted or state.state == ACTIVE for state in found)

            eventually(others, f"the candidate is {wanted}")
            instance.kill_manager()
            said = upgrade.communicate(timeout=PATIENCE_S)[1]
            assert upgrade.returncode == Exit.NOT_RUNNING
            assert "the manager has gone" in said
            instance.up_again()
            at_work = eventually(lambda: pids(instance).get(part), f"{part} is at work")
            eventually(lambda at_work=at_work: at(part) == [at_work], "no candidate is left")


# The keeper has the listening sockets


def test_the_keeper_holds_every_listening_socket(make_midair: Make) -> None:
    instance = make_midair(connmgrs=2)
    runtime = Runtime.open(instance.name)
    client = KeeperClient(runtime.socket(names.KEEPER_SOCKET))
    wanted = {
        listening.uid(names.FD_CLIENT),
        listening.uid(names.FD_KEEPER),
        listening.uid(names.FD_HANDOFF, 0),
        listening.uid(names.FD_HANDOFF, 1),
    }

    def kept() -> set[int]:
        given = dict(client.give(listening.UIDS))
        wire.close_all(given.values())
        return set(given)

    try:
        eventually(lambda: kept() == wanted, "it has them all")
        for _ in range(2):
            killed = pids(instance)["keeper"]
            kill(killed)
            back(instance, "keeper", killed)
            eventually(lambda: kept() == wanted, "so has the next one")
    finally:
        client.close()


def test_what_a_manager_knows_is_not_forgotten(make_midair: Make) -> None:
    instance = make_midair()
    killed = pids(instance)["router"]
    kill(killed)
    back(instance, "router", killed)
    eventually(lambda: instance.components()["router"]["restarts"] == 1, "it was counted")
    instance.kill_manager()
    instance.up_again()
    assert instance.components()["router"]["restarts"] == 1
    known = json.loads((instance.runtime_path / "manager.json").read_text())
    assert known["router"]["restarts"] == 1
