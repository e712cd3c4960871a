"""`midair reload`: what can change in place does, parts that need it are restarted unnoticed, and
what does not work changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from midair import config, config_uses, names
from midair.config import Config, Listener
from midair.config_uses import USES
from midair.exits import Exit
from midair.process import ipc
from midair.up import listeners, plan
from midair.up.doors import Doors, known_doors, open_doors
from midair.up.listeners import Listening
from tests.support.instance import BASE, Instance, cli, eventually
from tests.support.live import Client, held, nobody_notices
from tests.support.reload import events, reload, reloaded, write

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
both = pytest.mark.parametrize("connmgrs", [1, 2])
# Of more than two the queue bytes of a user are not enough for a test beside this one.
one_more = pytest.mark.parametrize("connmgrs", [1, pytest.param(2, marks=pytest.mark.alone)])


def pids(instance: Instance) -> dict[str, int]:
    return {name: row["pid"] for name, row in instance.components().items()}


def count(connmgrs: int, more: str = "", listen: str = '"127.0.0.1:0"') -> str:
    """A configuration with so many connection managers."""
    return f"[server]\nlisten = [{listen}]\n[connmgr]\ncount = {connmgrs}\n{more}"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ---- the table ----


def test_every_key_says_who_uses_it() -> None:
    keys = {
        f"{table.name}.{key.name}"
        for table in dataclasses.fields(Config)
        for key in dataclasses.fields(getattr(Config(), table.name))
    }
    assert set(USES) == keys
    for key, use in USES.items():
        assert set(use.parts) <= set(config_uses.RESTART_ORDER), key
        assert not (use.parts and use.down), key


@pytest.mark.parametrize("key", [key for key, use in USES.items() if use.down])
def test_what_segments_are_made_by_is_refused_by_name(key: str) -> None:
    changed = {
        "server.name": '"other"',
        "router.user": '"nobody"',
        "router.other_ports": "1",
        "queues.depth": "4",
    }
    table, name = key.split(".")
    text = f"[{table}]\n{name} = {changed.get(key, 134217728 if 'bytes' in key else 2048)}"
    if key == "connmgr.output_bytes":
        text = '[connmgr]\noutput_bytes = "128MiB"'
    with pytest.raises(config.ConfigError, match=f"cannot change .*: {re.escape(key)} .*nothing"):
        plan.compare(Config(), config.parse(text))


# ---- listeners keep their places ----


def places(doors: Doors) -> list[tuple[str, bool]]:
    return [(item.address.split(":")[0], bool(item.closed)) for item in doors.for_parts]


def test_a_listener_keeps_its_place_and_leaves_it_closed() -> None:
    a, b, c = (Listener(f"127.0.0.{n}:0") for n in (1, 2, 3))
    first = open_doors([a, b])
    port = first.addresses[1]
    second = first.changed([c, b])
    assert places(second) == [("127.0.0.1", True), ("127.0.0.2", False), ("127.0.0.3", False)]
    assert second.addresses[0] == port
    third = second.changed([dataclasses.replace(b, slow_consumer="drop-newest")])
    assert places(third) == [("127.0.0.1", True), ("127.0.0.2", False), ("127.0.0.3", True)]
    assert third.addresses == [port]
    close(first.all_but(third))
    close(second.all_but(third))
    for it in third.listening:
        assert it.sock is not None
        listeners.listen(it.sock)
    with socket.create_connection(config.split_address(port)):
        pass
    close(third.listening)


def test_places_are_used_again_when_there_are_no_others() -> None:
    doors = open_doors([Listener("127.0.0.1:0")])
    for _ in range(config.LISTENERS_MAX - 1):
        doors = _next(doors, [Listener(f"127.0.0.1:{free_port()}")])
    assert len(doors.for_parts) == config.LISTENERS_MAX
    doors = _next(doors, [Listener(f"127.0.0.1:{free_port()}")])
    assert len(doors.for_parts) == config.LISTENERS_MAX
    assert not doors.for_parts[0].closed
    close(doors.listening)


def _next(doors: Doors, wanted: list[Listener]) -> Doors:
    after = doors.changed(wanted)
    close(doors.all_but(after))
    return after


def close(listening: list[Listening]) -> None:
    for it in listening:
        if it.sock is not None:
            it.sock.close()


def test_a_manager_that_takes_over_knows_the_places() -> None:
    listen = [Listener("127.0.0.1:0", slow_consumer="drop-newest"), Listener("127.0.0.2:0")]
    first = open_doors(listen)
    second = first.changed(listen[1:])
    known = known_doors(listen[1:], second.for_parts)
    assert known.for_parts == second.for_parts
    assert [it.uid for it in known.listening] == [it.uid for it in second.listening]
    again = known.changed(listen[1:])  # what was asked for is what there is
    assert again.for_parts == second.for_parts
    close(first.listening)


# ---- what is refused, before anything is done ----


@both
def test_a_file_that_is_wrong_changes_nothing(make_midair: Make, connmgrs: int) -> None:
    midair = make_midair(count(connmgrs))
    before = pids(midair)
    done = reload(midair, count(connmgrs, "[limits]\nmax_pendign = 5\n"))
    path = BASE / f"{midair.name}.toml"
    assert done.returncode == Exit.BAD_CONFIG
    assert done.stderr.startswith(f"midair: {path}:6: limits.max_pendign: there is no such key")
    assert done.stderr.count("\n") == 1
    done = reload(midair, count(connmgrs, listen='"127.0.0.1:0", "192.0.2.1:4222"'))
    assert done.returncode == Exit.CANNOT_LISTEN
    assert done.stderr.startswith("midair: cannot listen on 192.0.2.1:4222: ")
    done = reload(midair, count(connmgrs, 'arena_bytes = "64MiB"\nsubscriptions = 4096\n'))
    assert done.returncode == Exit.BAD_CONFIG
    assert "connmgr.arena_bytes" in done.stderr
    assert "connmgr.subscriptions" in done.stderr
    assert pids(midair) == before
    assert len(events(midair, "reload_failed")) == 3
    assert list(midair.runtime_path.glob("config-*.toml")) == [
        midair.runtime_path / "config-1.toml"
    ]


@pytest.mark.alone
def test_more_connection_managers_than_queue_bytes_allow(make_midair: Make) -> None:
    midair = make_midair(count(1))
    before = pids(midair)
    done = reload(midair, count(names.CONNMGRS_MAX))
    assert done.returncode == Exit.NO_RESOURCES
    assert re.search(r"limit of \d+ bytes of message queues .*; nothing was changed", done.stderr)
    assert done.stderr.count("\n") == 1
    assert pids(midair) == before
    left = [it for it in ipc.leftovers(midair.name) if it.startswith("queue")]
    assert len(left) == len(names.QUEUES)


def test_without_a_file_there_is_nothing_to_reload(instance_name: str) -> None:
    done = cli("reload", "--name", instance_name)
    assert done.returncode == Exit.NOT_RUNNING


# ---- what works ----


@both
def test_dry_run_shows_and_touches_nothing(make_midair: Make, connmgrs: int) -> None:
    midair = make_midair(count(connmgrs))
    before = pids(midair)
    text = count(connmgrs, '[limits]\nmax_pending = "32MiB"\n[manager]\nrestart_limit = 7\n')
    done = reload(midair, text, "--dry-run")
    who = ", ".join(f"connmgr/{n}" for n in range(connmgrs))
    assert done.stdout.splitlines() == [
        f"limits.max_pending: 67108864 -> 33554432 ({who} would be restarted)",
        "manager.restart_limit: 5 -> 7 (in place)",
    ]
    assert pids(midair) == before
    assert "67108864" in (midair.runtime_path / "config.toml").read_text()
    assert not events(midair, "reloaded")


@both
def test_a_reload_under_load_is_not_noticed(make_midair: Make, connmgrs: int) -> None:
    """003-10, 003-69: with one connection manager and with two."""
    midair = make_midair(count(connmgrs))
    before = pids(midair)
    more = '[limits]\nmax_pending = "32MiB"\n[latency]\nspin_us = 50\n'
    more += '[log]\nlevel = "warning"\n'
    with nobody_notices(midair):
        lines = reloaded(midair, count(connmgrs, more))
        again = reloaded(midair, count(connmgrs, more))
        reloaded(midair, count(connmgrs))
    connmgr = ", ".join(f"connmgr/{n}" for n in range(connmgrs))
    assert lines == [
        f"limits.max_pending: 67108864 -> 33554432 ({connmgr} restarted)",
        f"latency.spin_us: auto -> 50 (router, {connmgr} restarted)",
        f"log.level: info -> warning (keeper, router, {connmgr}, dispatcher restarted)",
    ]
    assert again == ["nothing to change: the file says what is in use"]
    after = midair.components()
    assert all(row["pid"] != before[name] for name, row in after.items() if name != "manager")
    assert all(row["restarts"] == 0 and row["state"] == "active" for row in after.values())
    assert next(it["details"]["changes"] for it in events(midair, "reloaded")) == lines
    assert "reloaded: limits.max_pending" in cli("status", "--name", midair.name).stdout


def test_a_limit_holds_after_the_reload(make_midair: Make) -> None:
    midair = make_midair(count(1))
    with Client(midair, "x") as client:
        client.echo(b"y" * 2048)
        reloaded(midair, count(1, "[limits]\nmax_payload = 1024\n"))
        client.send(b"PUB x 2048\r\n" + b"y" * 2048 + b"\r\n")
        assert b"Maximum Payload" in client.read_error(closes=True)


def test_as_a_program_reads_it(make_midair: Make) -> None:
    midair = make_midair(count(1))
    done = reload(midair, count(1, "[limits]\nping_max = 3\n"), "--json")
    said = json.loads(done.stdout)
    assert said["changes"] == [
        {
            "key": "limits.ping_max",
            "old": 2,
            "new": 3,
            "restarted": ["connmgr/0"],
            "more": [],
            "text": "limits.ping_max: 2 -> 3 (connmgr/0 restarted)",
        }
    ]
    assert [it["component"] for it in said["active"]] == ["connmgr/0"]


@both
def test_listeners_come_and_go(make_midair: Make, connmgrs: int) -> None:
    one, two, three = (f"127.0.0.1:{free_port()}" for _ in range(3))
    midair = make_midair(count(connmgrs, listen=f'"{one}", "{two}"'))
    by_two = Instance(*config.split_address(two), name=midair.name)
    by_three = Instance(*config.split_address(three), name=midair.name)
    with held(midair, 4), Client(by_two, "two.stays") as stays:
        stays.echo(b"before")
        slow = f'{{address = "{three}", slow_consumer = "drop-newest"}}'
        reloaded(midair, count(connmgrs, listen=f'"{one}", {slow}'))
        with Client(by_three, "three") as client:
            client.echo(b"new")
        with pytest.raises(ConnectionRefusedError):
            by_two.connect()
        assert midair.status()["listen"] == [one, three]
        for name in ("dispatcher", "connmgr/0"):  # it is the same when they die
            os.kill(midair.pid(name), signal.SIGKILL)
        eventually(lambda: midair.components()["connmgr/0"]["restarts"] == 1, "it is back")
        with Client(by_three, "three") as client:
            client.echo(b"again")
        stays.echo(b"after")
    reloaded(midair, count(connmgrs, listen=f'"{two}"'))
    with Client(by_two, "two") as client:
        client.echo(b"back")


def test_the_monitor_comes_moves_and_goes(make_midair: Make) -> None:
    midair = make_midair(count(1))
    for _ in range(2):
        address = f"127.0.0.1:{free_port()}"
        reloaded(midair, count(1, f'[monitor]\nlisten = "{address}"\n'))
        eventually(lambda: "monitor" in midair.components(), "there is a monitor")

        def healthy(address: str = address) -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{address}/healthz") as answer,
            ):
                return bool(answer.status == 200)
            return False

        eventually(healthy, "it answers there")
    lines = reloaded(midair, count(1))
    assert lines == [f'monitor.listen: {address} -> "" (monitor ended)']
    assert "monitor" not in midair.components()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(config.split_address(address))


def test_standbys_come_and_go(make_midair: Make) -> None:
    midair = make_midair(count(1))
    reloaded(midair, count(1, "[manager]\nstandby = true\n"))

    def states() -> list[str]:
        return [row["state"] for row in midair.status()["components"]]

    eventually(lambda: states().count("standby") == 3, "router, connmgr and dispatcher have one")
    reloaded(midair, count(1, "[limits]\nping_max = 3\n[manager]\nstandby = true\n"))
    eventually(lambda: states().count("standby") == 3, "they have one again")
    reloaded(midair, count(1))
    eventually(lambda: states().count("standby") == 0, "nobody has one")
    assert set(states()) == {"active"}


# ---- what does not come up ----


@one_more
def test_a_part_that_does_not_come_up_takes_everything_back(
    make_midair: Make, connmgrs: int
) -> None:
    midair = make_midair(count(connmgrs))
    before = pids(midair)
    address = f"127.0.0.1:{free_port()}"
    broken = f'"127.0.0.1:0", {{address = "{address}", protocol = "smoke"}}'
    with nobody_notices(midair, 10):
        done = reload(midair, count(connmgrs + 1, "[latency]\nspin_us = 50\n", broken))
    assert done.returncode == Exit.FAILED
    assert "smoke" in done.stderr
    assert "everything is back to the old configuration" in done.stderr
    assert done.stderr.count("\n") == 1
    after = midair.components()
    assert set(after) == set(before)
    assert after["keeper"]["pid"] == before["keeper"]
    text = (midair.runtime_path / "config.toml").read_text()
    assert f"count = {connmgrs}\n" in text
    assert "smoke" not in text
    assert not Path(f"/dev/shm/midair.{midair.name}.journal.{connmgrs}").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(config.split_address(address))
    assert "smoke" in events(midair, "reload_failed")[0]["details"]["error"]
    # And what is right is done the next time.
    reloaded(midair, count(connmgrs, "[latency]\nspin_us = 50\n"))


def test_another_one_is_refused_meanwhile(make_midair: Make) -> None:
    midair = make_midair(count(1))
    write(midair, count(1, '[log]\nlevel = "warning"\n'))
    assert midair.process is not None
    midair.process.send_signal(signal.SIGHUP)
    midair.process.send_signal(signal.SIGHUP)
    eventually(lambda: events(midair, "reloaded"), "it has reloaded")
    done = cli("upgrade", "router", "--name", midair.name)
    assert done.returncode == 0
