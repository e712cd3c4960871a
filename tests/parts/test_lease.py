"""Leases: one holder at a time; the kernel passes it on when the holder is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import sysv_ipc

from midair import names
from midair.errors import MidairError
from midair.process import lease
from midair.process.lease import Lease
from midair.process.runtime import Runtime
from tests.support.instance import PATIENCE_S, ROOT

# Takes the lease and says so; says before that when it has to wait.
HOLDER = """
import sys
from midair.process.lease import Lease
from midair.process.runtime import Runtime
lease = Lease(Runtime.open(sys.argv[1]), "router")
lease.acquire(lambda: print("waiting", flush=True))
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def runtime(instance_name: str) -> Runtime:
    return Runtime.create(instance_name)


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(runtime: Runtime, holders: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    holders.append(
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, runtime.instance],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select() knows of every line
        )
    )
    return holders[-1]


def says(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    assert ready, "it says nothing"
    return process.stdout.readline().decode().strip()


def test_one_holder_at_a_time(runtime: Runtime, holders: list[subprocess.Popen[bytes]]) -> None:
    first = hold(runtime, holders)
    assert says(first) == "holding"
    mine = Lease(runtime, names.ROUTER)
    assert not mine.try_acquire()
    assert mine.holder_pid() == first.pid
    assert Lease(runtime, names.DISPATCHER).try_acquire(), "another role is another lease"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_standby_takes_over_from_a_killed_holder(
    number: signal.Signals, runtime: Runtime, holders: list[subprocess.Popen[bytes]]
) -> None:
    first, second = hold(runtime, holders), None
    assert says(first) == "holding"
    second = hold(runtime, holders)
    assert says(second) == "waiting"
    assert Lease(runtime, names.ROUTER).holder_pid() == first.pid
    first.send_signal(number)
    assert says(second) == "holding"
    assert Lease(runtime, names.ROUTER).holder_pid() == second.pid


def test_a_chain_of_kills_never_loses_or_doubles_the_lease(
    runtime: Runtime, holders: list[subprocess.Popen[bytes]]
) -> None:
    waiting = [hold(runtime, holders) for _ in range(5)]
    watching = Lease(runtime, names.ROUTER)
    for left in range(5, 0, -1):
        holding = [process for process in waiting if process.pid == wait_for_holder(watching)]
        assert len(holding) == 1
        heard = says(holding[0])
        assert (heard if heard == "holding" else says(holding[0])) == "holding"
        holding[0].kill()
        holding[0].wait()
        waiting.remove(holding[0])
        assert len(waiting) == left - 1
    assert watching.try_acquire()


def wait_for_holder(watching: Lease) -> int:
    """A waiter that takes the lease is scheduled by the kernel in its own time."""
    while (pid := watching.holder_pid()) is None or not os.path.exists(f"/proc/{pid}"):
        os.sched_yield()
    return pid


def test_a_child_does_not_hold_its_parents_lease(runtime: Runtime) -> None:
    mine = Lease(runtime, names.ROUTER)
    assert mine.try_acquire()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert mine.holder_pid() == os.getpid()


def test_release_and_take_again(runtime: Runtime) -> None:
    mine = Lease(runtime, names.ROUTER)
    for _ in range(3):
        assert mine.acquire()
        mine.release()
        assert mine.holder_pid() is None


def test_a_holder_knows_that_it_is_one(
    runtime: Runtime, holders: list[subprocess.Popen[bytes]]
) -> None:
    mine = Lease(runtime, names.ROUTER)
    assert not mine.is_ours()
    assert mine.try_acquire()
    assert mine.is_ours()
    waiting = hold(runtime, holders)
    assert says(waiting) == "waiting"
    assert mine.is_ours(), "whoever only waits changes nothing"
    set_by_force(mine.key)
    assert says(waiting) == "holding"
    assert not mine.is_ours()
    assert mine.holder_pid() == waiting.pid


def test_a_lease_taken_by_force_is_not_given_back_by_the_one_who_lost_it(
    runtime: Runtime, holders: list[subprocess.Popen[bytes]]
) -> None:
    """Else the death of the old holder would let in a third process beside the new one."""
    first = hold(runtime, holders)
    assert says(first) == "holding"
    mine = Lease(runtime, names.ROUTER)
    set_by_force(mine.key)
    assert mine.try_acquire()
    first.kill()
    first.wait()
    assert mine.is_ours()
    assert not Lease(runtime, names.ROUTER)._operate(-1, lease.IPC_NOWAIT, None)


def set_by_force(key: int) -> None:
    sysv_ipc.Semaphore(key).value = 1


def test_a_stopped_holder_still_holds(
    runtime: Runtime, holders: list[subprocess.Popen[bytes]]
) -> None:
    first, second = hold(runtime, holders), None
    assert says(first) == "holding"
    second = hold(runtime, holders)
    assert says(second) == "waiting"
    first.send_signal(signal.SIGSTOP)
    mine = Lease(runtime, names.ROUTER)
    for _ in range(1000):
        assert not mine.try_acquire()
        assert mine.holder_pid() == first.pid
    first.kill()
    assert says(second) == "holding"


def test_a_waiter_gives_up_when_told_to(
    runtime: Runtime, holders: list[subprocess.Popen[bytes]]
) -> None:
    assert says(hold(runtime, holders)) == "holding"
    waited: list[int] = []
    turns = iter([True, True, False])
    assert not Lease(runtime, names.ROUTER).acquire(lambda: waited.append(1), lambda: next(turns))
    assert waited == [1]


def test_a_creator_that_died_half_way_is_repaired(runtime: Runtime) -> None:
    key = names.lease_key(runtime.owner_uid, runtime.instance, names.ROUTER)
    sysv_ipc.Semaphore(key, sysv_ipc.IPC_CREX, initial_value=0)
    assert Lease(runtime, names.ROUTER).try_acquire()


def test_a_waiter_notices_that_the_instance_ended(runtime: Runtime) -> None:
    mine = Lease(runtime, names.ROUTER)
    assert lease.remove(runtime.owner_uid, runtime.instance, names.ROUTER)
    with pytest.raises(MidairError, match="has ended"):
        mine.try_acquire()


def test_keys_differ() -> None:
    keys = {
        names.lease_key(uid, instance, role, index)
        for uid in (0, 1000)
        for instance in ("a", "b")
        for role in names.ROLES
        for index in range(32)
    }
    assert len(keys) == 2 * 2 * len(names.ROLES) * 32
    assert all(0 < key < 2**31 for key in keys)
