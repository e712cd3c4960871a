"""Signals to `midair up` and to its parts, and how a lame duck ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest

from midair.client import wire_nats
from midair.exits import Exit
from midair.process.lame_duck import LameDuck
from tests.support.instance import PATIENCE_S, Instance, cli, eventually, leaks_of, start
from tests.support.live import Client, held
from tests.support.reload import events, write

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
both = pytest.mark.parametrize("connmgrs", [1, 2])
IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def tell(instance: Instance, number: signal.Signals) -> None:
    assert instance.process is not None
    instance.process.send_signal(number)


@both
def test_parts_ignore_what_is_for_the_manager(make_midair: Make, connmgrs: int) -> None:
    midair = make_midair(connmgrs=connmgrs, options=("--monitor", "0"))
    before = midair.components()
    with held(midair, 4):
        for name, row in before.items():
            if name != "manager":
                for number in IGNORED:
                    os.kill(row["pid"], number)
        for name, row in before.items():
            ignored = int(_status(row["pid"])["SigIgn"], 16) | int(
                _status(row["pid"])["SigCgt"], 16
            )
            assert all(ignored >> number - 1 & 1 for number in IGNORED), name
    after = midair.components()
    assert {name: row["pid"] for name, row in after.items()} == {
        name: row["pid"] for name, row in before.items()
    }


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@both
def test_hup_reloads(make_midair: Make, connmgrs: int) -> None:
    midair = make_midair(f"[connmgr]\ncount = {connmgrs}\n")
    with held(midair, 4):
        write(midair, f"[connmgr]\ncount = {connmgrs}\n[limits]\nping_max = 3\n")
        tell(midair, signal.SIGHUP)
        eventually(lambda: events(midair, "reloaded"), "it has reloaded")
        write(midair, "[limits]\nping_max = false\n")
        tell(midair, signal.SIGHUP)
        eventually(lambda: events(midair, "reload_failed"), "it has refused")
    assert "error: reload: " in midair.stderr()
    assert "info: reload: limits.ping_max: 2 -> 3 (" in midair.stderr()
    assert midair.process is not None
    assert midair.process.poll() is None


def test_usr1_begins_the_log_file_anew(make_midair: Make, tmp_path: Path) -> None:
    log, moved = tmp_path / "midair.log", tmp_path / "midair.log.1"
    midair = make_midair(connmgrs=1, options=("--log", str(log)))
    assert "midair-dispatcher[" in log.read_text() or log.exists()
    log.rename(moved)
    tell(midair, signal.SIGUSR1)
    eventually(log.exists, "there is a new file")
    os.kill(midair.pid("router"), signal.SIGKILL)
    eventually(lambda: "router died" in log.read_text(), "what happens is written there")
    eventually(lambda: "midair-router[" in log.read_text(), "what parts say, too")
    assert "router died" not in moved.read_text()
    # Where it cannot be opened it goes on as it was.
    log.unlink()
    log.mkdir()
    tell(midair, signal.SIGUSR1)
    assert midair.stop() == 0
    assert midair.stderr() == ""


def test_a_log_file_that_cannot_be_opened_is_said_to_the_one_who_starts_it(
    instance_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "midair.log"
    done = cli("up", "--name", instance_name, "--port", "0", "--log", str(path))
    assert done.returncode == Exit.FAILED
    assert done.stderr == f"midair: log.file: {path}: No such file or directory\n"


def test_the_log_file_can_change_while_it_runs(make_midair: Make, tmp_path: Path) -> None:
    midair = make_midair("")
    write(midair, f'[log]\nfile = "{tmp_path / "a.log"}"\n')
    tell(midair, signal.SIGHUP)
    eventually(lambda: events(midair, "reloaded"), "it has reloaded")
    eventually(lambda: "log.file" in (tmp_path / "a.log").read_text(), "it goes on there")


# ---- lame duck ----


def test_clients_are_spread_evenly_over_the_time_that_is_left() -> None:
    now = time.monotonic()
    assert LameDuck(now, 10.0, 120.0).due(1000, 1.0) == 0
    began = now - 10.0
    left = 1000
    for second in range(11, 121):
        it = LameDuck(time.monotonic() - second + 0.5, 10.0, 120.0)
        left -= it.due(left, 1.0)
        assert abs(left - 1000 * (120 - second) / 110) < 20, second
    assert left == 0
    assert LameDuck(began - 200, 10.0, 120.0).due(7, 1.0) == 7


def duck(connmgrs: int, duration_s: float, grace_s: float) -> str:
    return (
        f"[server]\nlame_duck_s = {duration_s}\nlame_duck_grace_s = {grace_s}\n"
        f"[connmgr]\ncount = {connmgrs}\n"
    )


@both
def test_usr2_lets_clients_leave_and_ends(make_midair: Make, connmgrs: int) -> None:
    """As nats-server: INFO with ldm, nobody is accepted, clients leave, the instance ends."""
    midair = make_midair(duck(connmgrs, 3600, 3600))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(midair, f"duck.{n}")) for n in range(8)]
        hello = b'CONNECT {"protocol":1,"verbose":false}\r\n'
        told = wire_nats.Connection(midair.host, midair.port, hello, timeout_s=PATIENCE_S)
        stack.callback(told.close)
        told.send(wire_nats.PING)
        assert told.frame() == b"PONG"
        tell(midair, signal.SIGUSR2)
        info = told.frame()
        assert isinstance(info, bytes)
        assert info.startswith(b"INFO ")
        assert b'"ldm":true' in info
        eventually(lambda: _refused(midair), "nobody is accepted")
        for client in clients:  # who is here is served until it leaves, and did not ask for INFO
            client.echo(b"still")
        # What dies meanwhile comes back, and goes on with it.
        for name in ("dispatcher", "router", *(f"connmgr/{n}" for n in range(connmgrs))):
            os.kill(midair.pid(name), signal.SIGKILL)
        eventually(lambda: f"lame duck, {_share(connmgrs)} client" in _shown(midair), "it is shown")
        for client in clients:
            client.echo(b"and still")
        assert _refused(midair)
    assert midair.process is not None
    assert midair.process.wait(PATIENCE_S) == 0
    assert not leaks_of(midair.name)


def _share(connmgrs: int) -> int:
    """Clients of one of the connection managers: 9 on one, 5 and 4 on two."""
    return 9 if connmgrs == 1 else 4


def _shown(instance: Instance) -> str:
    return cli("status", "--name", instance.name).stdout


@both
def test_clients_that_do_not_leave_are_made_to(make_midair: Make, connmgrs: int) -> None:
    midair = make_midair(duck(connmgrs, 4, 1))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(midair, f"duck.{n}")) for n in range(8)]
        tell(midair, signal.SIGUSR2)
        for client in clients:
            _read_to_the_end(client)
        assert midair.process is not None
        assert midair.process.wait(PATIENCE_S) == 0


def _refused(instance: Instance) -> bool:
    try:
        instance.connect().close()
    except OSError:
        return True
    return False


def _read_to_the_end(client: wire_nats.Connection) -> None:
    with contextlib.suppress(wire_nats.EndedError):
        while True:
            frame = client.frame()
            assert not isinstance(frame, bytes) or not frame.startswith(b"-ERR"), frame


def test_an_instance_without_clients_ends_at_once(make_midair: Make) -> None:
    midair = make_midair(duck(1, 3600, 3600))
    done = cli("down", "--lame-duck", "--name", midair.name)
    assert (done.returncode, done.stdout) == (0, f"instance {midair.name!r} has ended\n")
    assert midair.process is not None
    assert midair.process.wait(PATIENCE_S) == 0


def test_a_lame_duck_can_be_told_to_end_at_once(make_midair: Make) -> None:
    midair = make_midair(duck(1, 3600, 3600))
    with Client(midair, "x") as client:
        client.echo(b"1")
        tell(midair, signal.SIGUSR2)
        eventually(lambda: events(midair, "lame_duck"), "it is one")
        assert "lame duck" in cli("reload", "--name", midair.name).stderr
        assert midair.stop() == 0


@both
def test_nats_py_is_told_and_goes_elsewhere(request: Any, connmgrs: int) -> None:
    """A client library gets its lame-duck callback, and reconnects to another server."""
    one = start(request.node.nodeid, duck(connmgrs, 3, 1))
    other = start(request.node.nodeid, duck(1, 3, 1))

    async def main() -> None:
        told, moved, got = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def lame() -> None:
            told.set()

        async def again() -> None:
            moved.set()

        async def heard(_message: object) -> None:
            got.set()

        client = await nats.connect(
            [f"nats://{one.address}", f"nats://{other.address}"],
            dont_randomize=True,
            reconnect_time_wait=0.1,
            lame_duck_mode_cb=lame,
            reconnected_cb=again,
        )
        await client.subscribe("x", cb=heard)
        await client.flush()
        tell(one, signal.SIGUSR2)
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        await asyncio.wait_for(moved.wait(), PATIENCE_S)
        assert client.connected_url is not None
        assert client.connected_url.port == other.port
        await client.publish("x", b"1")
        await asyncio.wait_for(got.wait(), PATIENCE_S)
        await client.close()

    try:
        asyncio.run(main())
        assert one.process is not None
        assert one.process.wait(PATIENCE_S) == 0
    finally:
        one.stop()
        other.stop()
