"""The manager is killed with -9 while it reloads, while one retires, and as a lame duck.

The next one settles what was begun.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from midair import config, names
from midair.process import ipc
from midair.process.runtime import ACTIVE, Runtime, State
from midair.up import arrangement, plan
from midair.up.component import Component
from tests.support.instance import PATIENCE_S, Instance, cli, eventually, leaks_of
from tests.support.live import Client, held, nobody_notices
from tests.support.reload import events, reload, reloaded, write

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
both = pytest.mark.parametrize("connmgrs", [1, 2])
# Of more than two the queue bytes of a user are not enough for a test beside this one.
one_more = pytest.mark.parametrize("connmgrs", [1, pytest.param(2, marks=pytest.mark.alone)])
SETTLE_S = 60.0


def text(connmgrs: int, more: str = "") -> str:
    return f'[server]\nlisten = ["127.0.0.1:0"]\n[connmgr]\ncount = {connmgrs}\n{more}'


def active(instance: Instance) -> dict[str, State]:
    return {
        names.component(state.role, state.index): state
        for state in Runtime.open(instance.name).states()
        if state.state == ACTIVE and state.role != names.MANAGER
    }


def astray(instance: Instance) -> list[str]:
    """Parts that run with a configuration which is not that of the instance."""
    found = arrangement.found(Runtime.open(instance.name))
    result = []
    for called, state in active(instance).items():
        assert state.origin is not None
        if state.origin.config != str(found.file):
            was = config.load_part(state.origin.config)
            like = Component.__new__(Component)
            like.role, like.index = state.role, state.index
            if plan.needs_restart(like, was, found.parts):
                result.append(called)
    return result


def settled(instance: Instance) -> bool:
    parts = arrangement.found(Runtime.open(instance.name)).parts
    wanted = {"keeper", "router", "dispatcher", *(f"connmgr/{n}" for n in range(parts.connmgrs))}
    left = [
        index
        for index in range(parts.connmgrs, names.CONNMGRS_MAX)
        if ipc.segment_exists(names.segment(instance.name, names.JOURNAL, index))
    ]
    return set(active(instance)) == wanted and not left and not astray(instance)


@one_more
@pytest.mark.parametrize("moment", ["added", "router", "in use"])
def test_killed_during_a_reload(make_midair: Make, connmgrs: int, moment: str) -> None:
    midair = make_midair(text(connmgrs))
    before = active(midair)
    link = midair.runtime_path / arrangement.IN_USE
    was = os.readlink(link)
    moments: dict[str, Callable[[], bool]] = {
        "added": lambda: f"connmgr/{connmgrs}" in active(midair),
        "router": lambda: active(midair).get("router") not in (None, before["router"]),
        "in use": lambda: os.readlink(link) != was,
    }
    with nobody_notices(midair, 10):
        write(midair, text(connmgrs + 1, "[latency]\nspin_us = 50\n"))
        assert midair.process is not None
        midair.process.send_signal(signal.SIGHUP)
        eventually(moments[moment], moment)
        midair.kill_manager()
        midair.up_again()
        eventually(lambda: settled(midair), f"settled\n{midair.stderr()[-3000:]}", SETTLE_S)
        for n in range(8):
            with Client(midair, f"after.{n}") as client:
                client.echo(b"x")
        reloaded(midair, text(connmgrs + 1, "[latency]\nspin_us = 50\n"))
        assert set(active(midair)) == {*before, f"connmgr/{connmgrs}"}
    reloaded(midair, text(connmgrs))
    eventually(lambda: settled(midair) and set(active(midair)) == set(before), "it has retired")


@one_more
def test_killed_while_one_is_retiring(make_midair: Make, connmgrs: int) -> None:
    midair = make_midair(text(connmgrs + 1))
    last = f"connmgr/{connmgrs}"
    with held(midair, 6):
        reloaded(midair, text(connmgrs))
        midair.kill_manager()
        midair.up_again()
        said = eventually(lambda: midair.components()[last]["doing"], "it says what it does")
        assert "retiring, " in said
        os.kill(midair.pid(last), signal.SIGKILL)
        eventually(lambda: "retiring, " in midair.components()[last]["doing"], "it is back")
    eventually(lambda: last not in active(midair), f"retired\n{midair.stderr()[-2000:]}")
    midair.kill_manager()  # perhaps while the others learn of it
    midair.up_again()
    eventually(lambda: settled(midair), f"settled\n{midair.stderr()[-3000:]}", SETTLE_S)
    with held(midair, 4):
        reloaded(midair, text(connmgrs + 1))
        assert last in active(midair)


def refused(instance: Instance) -> bool:
    try:
        instance.connect().close()
    except ConnectionRefusedError:
        return True
    return False


@both
def test_killed_as_a_lame_duck(make_midair: Make, connmgrs: int) -> None:
    duck = "lame_duck_s = 8\nlame_duck_grace_s = 1\n"
    midair = make_midair(text(connmgrs).replace("[connmgr]", f"{duck}[connmgr]"))
    with Client(midair, "duck") as client:
        client.echo(b"1")
        assert midair.process is not None
        midair.process.send_signal(signal.SIGUSR2)
        eventually(lambda: events(midair, "lame_duck"), "it is one")
        midair.kill_manager()
        midair.up_again()
        eventually(lambda: refused(midair), "nobody is accepted")
        assert midair.process is not None
        assert midair.process.wait(PATIENCE_S) == 0
    assert not leaks_of(midair.name)


def test_what_differs_is_applied_by_a_reload(make_midair: Make) -> None:
    midair = make_midair(text(1))
    midair.kill_manager()
    write(midair, text(1, "[limits]\nping_max = 3\n"))
    midair.up_again()
    assert "yours differs in limits.ping_max: midair reload" in midair.stderr()
    done = cli("reload", "--name", midair.name)
    assert done.stdout.splitlines()[-1] == "limits.ping_max: 2 -> 3 (connmgr/0 restarted)"


def test_a_manager_that_was_upgraded_can_reload(make_midair: Make) -> None:
    midair = make_midair(text(1))
    done = cli("upgrade", "manager", "--name", midair.name)
    assert done.returncode == 0, done.stderr
    done = reload(midair, text(1, "[limits]\nping_max = 3\n"))
    assert done.stdout.splitlines()[-1] == "limits.ping_max: 2 -> 3 (connmgr/0 restarted)"
    midair.stop()
