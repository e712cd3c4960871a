"""Processes that hang, standbys that wait, and the lease that only one of them has.

A process stopped with SIGSTOP stands for every kind of hanging: it holds its lease, its
sockets and its place in the queues, and does nothing. Nothing here depends on how long
something takes.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import sysv_ipc

from midair import names
from midair.process.lease import Lease
from midair.process.runtime import Runtime
from tests.support.instance import PATIENCE_S, Instance, eventually
from tests.support.live import Client, OneActive, held, nobody_notices

pytestmark = [
    pytest.mark.alone,  # watchdogs of a second: a busy machine would make healthy processes hang
    pytest.mark.skipif(
        "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
    ),
]
Make = Callable[..., Instance]
PARTS = ["keeper", "router", "connmgr/0", "dispatcher"]
STANDING_BY = PARTS[1:]
QUICK = "[manager]\nwatchdog_s = 1\nrestart_limit = 100\n"
STANDBY = "standby = true\n"
PATIENT = "[manager]\nwatchdog_s = 3600\n"
# With one, decisions of the router are repeated; with two, every message is routed.
EACH = pytest.mark.parametrize("connmgrs", [1, 2], ids=lambda n: f"{n}connmgr")


def rows(instance: Instance, part: str, state: str) -> list[dict[str, Any]]:
    """The processes of a component that are in that state."""
    role, _, index = part.partition("/")
    return [
        row
        for row in instance.status()["components"]
        if (row["role"], row["index"], row["state"]) == (role, int(index) if index else None, state)
    ]


def pid_of(instance: Instance, part: str, state: str = "active") -> int:
    [row] = eventually(lambda: rows(instance, part, state), f"{part} is {state}")
    return int(row["pid"])


def replaced(instance: Instance, part: str, pid: int, state: str = "active") -> int:
    """Waits until another process is in that state, and there is no trace of the first."""

    def others() -> list[int]:
        found = [row["pid"] for row in rows(instance, part, state)]
        return [] if pid in found else found

    [other] = eventually(others, f"another {part} is {state}")
    assert isinstance(other, int)
    return other


def fully_staffed(instance: Instance) -> None:
    for part in STANDING_BY:
        pid_of(instance, part, "standby")


def wait_for_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], PATIENCE_S)[0], f"process {pid} does not end"
    finally:
        os.close(fd)


# Stopped


@EACH
@pytest.mark.parametrize("part", PARTS)
def test_a_stopped_component_is_killed_and_nothing_is_lost(
    part: str, connmgrs: int, make_midair: Make
) -> None:
    instance = make_midair(config=QUICK, connmgrs=connmgrs)
    with nobody_notices(instance), OneActive(instance):
        for _ in range(2):
            stopped = pid_of(instance, part)
            os.kill(stopped, signal.SIGSTOP)
            replaced(instance, part, stopped)
    assert instance.stderr().count(f"{part} silent for") >= 2
    for other in PARTS:
        assert (rows(instance, other, "active")[0]["restarts"] > 0) == (other == part)


@pytest.mark.parametrize("part", STANDING_BY)
def test_a_stopped_standby_is_replaced(part: str, make_midair: Make) -> None:
    instance = make_midair(config=QUICK + STANDBY, connmgrs=2)
    with held(instance, 5), OneActive(instance):
        at_work, stopped = pid_of(instance, part), pid_of(instance, part, "standby")
        os.kill(stopped, signal.SIGSTOP)
        replaced(instance, part, stopped, "standby")
        assert pid_of(instance, part) == at_work
    assert f"{part} silent for" in instance.stderr()


@EACH
def test_a_component_that_goes_on_in_time_is_left_alone(connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(config=PATIENT, connmgrs=connmgrs)
    before = [row["pid"] for row in instance.status()["components"]]
    with nobody_notices(instance):
        for part in PARTS:
            os.kill(pid_of(instance, part), signal.SIGSTOP)
        for part in PARTS:
            os.kill(pid_of(instance, part), signal.SIGCONT)
    assert [row["pid"] for row in instance.status()["components"]] == before


def test_a_manager_that_did_not_listen_blames_nobody(make_midair: Make) -> None:
    """It was stopped for longer than its components may be silent."""
    instance = make_midair(config="[manager]\nwatchdog_s = 0.5\n")
    assert instance.process is not None
    before = [row["pid"] for row in instance.status()["components"]]
    for _ in range(5):
        instance.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 1.0  # two watchdog intervals
        with Client(instance) as client:
            while time.monotonic() < until:
                client.ping()
        instance.process.send_signal(signal.SIGCONT)
        assert [row["pid"] for row in instance.status()["components"]] == before
    assert "silent" not in instance.stderr()


# Standbys


def test_without_being_asked_for_there_is_no_standby(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1)
    assert [row["state"] for row in instance.status()["components"]] == ["active"] * 5


@EACH
@pytest.mark.parametrize("part", STANDING_BY)
def test_a_standby_takes_over_and_is_replaced(part: str, connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(config="[manager]\nrestart_limit = 100\n" + STANDBY, connmgrs=connmgrs)
    fully_staffed(instance)
    with nobody_notices(instance), OneActive(instance):
        for _ in range(3):
            at_work, next_one = pid_of(instance, part), pid_of(instance, part, "standby")
            os.kill(at_work, signal.SIGKILL)
            assert replaced(instance, part, at_work) == next_one
            replaced(instance, part, next_one, "standby")
    assert rows(instance, part, "active")[0]["restarts"] == 3
    assert not rows(instance, "keeper", "standby"), "there are two copies of a socket, not three"


def test_all_of_them_at_once(make_midair: Make) -> None:
    """Everything but the keeper is killed in one moment; the standbys take over."""
    instance = make_midair(config="[manager]\nrestart_limit = 100\n" + STANDBY, connmgrs=2)
    fully_staffed(instance)
    parts = ["router", "connmgr/0", "connmgr/1", "dispatcher"]
    with nobody_notices(instance), OneActive(instance):
        killed = {part: pid_of(instance, part) for part in parts}
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        for part, pid in killed.items():
            replaced(instance, part, pid)
    fully_staffed(instance)


@EACH
def test_standbys_are_upgraded_too(connmgrs: int, make_midair: Make) -> None:
    instance = make_midair(config="[manager]\n" + STANDBY, connmgrs=connmgrs)
    fully_staffed(instance)
    with nobody_notices(instance):
        before = {state: pid_of(instance, "router", state) for state in ("active", "standby")}
        done = instance.cli("upgrade", "router", "--name", instance.name, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert pid_of(instance, "router") not in before.values()
        assert replaced(instance, "router", before["standby"], "standby") != before["active"]
    assert rows(instance, "router", "active")[0]["restarts"] == 0


# The lease


def test_nobody_takes_over_from_one_that_is_only_stopped(make_midair: Make) -> None:
    instance = make_midair(config=PATIENT + STANDBY, connmgrs=2)
    fully_staffed(instance)
    runtime = Runtime.open(instance.name)
    with held(instance, 5), OneActive(instance):
        for part in STANDING_BY:
            role, _, index = part.partition("/")
            lease = Lease(runtime, role, int(index) if index else None)
            at_work, next_one = pid_of(instance, part), pid_of(instance, part, "standby")
            os.kill(at_work, signal.SIGSTOP)
            for _ in range(200):
                assert not lease.try_acquire()
                assert lease.holder_pid() == at_work
            assert pid_of(instance, part, "standby") == next_one
            os.kill(at_work, signal.SIGCONT)


@pytest.mark.parametrize("part", STANDING_BY)
def test_one_that_lost_its_lease_while_stopped_ends_without_a_word(
    part: str, make_midair: Make
) -> None:
    """The semaphore is set by force, which the kernel never does; the standby takes over."""
    instance = make_midair(config=PATIENT + STANDBY, connmgrs=2)
    fully_staffed(instance)
    runtime = Runtime.open(instance.name)
    role, _, index = part.partition("/")
    key = names.lease_key(runtime.owner_uid, instance.name, role, int(index) if index else None)
    with held(instance, 10):
        stopped, next_one = pid_of(instance, part), pid_of(instance, part, "standby")
        os.kill(stopped, signal.SIGSTOP)
        sysv_ipc.Semaphore(key).value = 1
        eventually(
            lambda: next_one in [row["pid"] for row in rows(instance, part, "active")],
            "the standby has taken over",
        )
        os.kill(stopped, signal.SIGCONT)
        wait_for_end(stopped)
        assert replaced(instance, part, stopped) == next_one
        said = instance.stderr()
        assert f"the lease of {part} was taken away (pid {next_one} has it): exit" in said
        assert f"{part} died: exit 70 (SOFTWARE)" in said


def test_one_that_lost_its_lease_notices_even_if_it_was_never_stopped(make_midair: Make) -> None:
    """Nobody else has it either: the manager starts another."""
    instance = make_midair(connmgrs=2)
    runtime = Runtime.open(instance.name)
    key = names.lease_key(runtime.owner_uid, instance.name, names.ROUTER)
    with held(instance, 5):
        first = pid_of(instance, "router")
        sysv_ipc.Semaphore(key).value = 1
        replaced(instance, "router", first)
    assert "the lease of router was taken away (nobody has it): exit" in instance.stderr()
