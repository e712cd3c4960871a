"""`midair top`, `conns`, `subs`, `status` and the event log, of real instances."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from midair import shown
from midair.monitor import commands, gather, listing
from midair.process import events
from midair.process.runtime import Runtime
from native.stats import Conn
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli, eventually
from tests.support.live import Client
from tests.support.look import await_conn, listed, named

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]


@pytest.fixture(scope="module")
def crowd(midair: Instance) -> Iterator[Instance]:
    """An instance with three clients, each of which the other two differ from."""
    with contextlib.ExitStack() as stack:
        for name, subscriptions in (
            ("alice", ("orders.new", "orders.*.eu")),
            ("bob", ("orders.new workers", "mail.>")),
            ("carol", ()),
        ):
            stack.enter_context(named(midair, name, *subscriptions))
        for name, subs in (("alice", 2), ("bob", 2), ("carol", 0)):
            await_conn(midair, name, subs=subs)
        yield midair


def names_of(crowd: Instance, *args: str) -> list[str]:
    return [conn["name"] for conn in listed(crowd, "conns", *args)]


def test_connections_can_be_chosen(crowd: Instance) -> None:
    assert names_of(crowd) == ["alice", "bob", "carol"]
    assert names_of(crowd, "--client", "[ab]*") == ["alice", "bob"]
    assert names_of(crowd, "--ip", "127.0.0.*") == ["alice", "bob", "carol"]
    assert names_of(crowd, "--ip", "10.*") == []
    assert names_of(crowd, "--connmgr", "31") == []
    assert names_of(crowd, "--subject", "mail.>") == ["bob"]
    assert names_of(crowd, "--subject", "orders.>") == ["alice", "bob"]
    assert names_of(crowd, "--min-pending", "1") == []
    assert names_of(crowd, "--sort", "name", "--reverse") == ["carol", "bob", "alice"]
    assert names_of(crowd, "--sort", "subs", "--limit", "2") == ["alice", "bob"]
    assert names_of(crowd, "--sort", "age", "--limit", "1") == ["alice"]
    bob = listed(crowd, "conns", "--client", "bob")[0]
    assert names_of(crowd, "--id", str(bob["id"])) == ["bob"]
    assert bob["age_s"] >= 0
    assert bob["lang"] == "test"


def subjects_of(crowd: Instance, *args: str) -> list[tuple[str, str]]:
    return [(sub["name"], sub["subject"]) for sub in listed(crowd, "subs", *args)]


def test_subscriptions_can_be_chosen(crowd: Instance) -> None:
    everything = [
        ("bob", "mail.>"),
        ("alice", "orders.*.eu"),
        ("alice", "orders.new"),
        ("bob", "orders.new"),
    ]
    assert subjects_of(crowd) == everything
    assert subjects_of(crowd, "orders.*") == everything[2:]
    assert subjects_of(crowd, "--test", "orders.old.eu") == [("alice", "orders.*.eu")]
    assert subjects_of(crowd, "--queue", "work*") == [("bob", "orders.new")]
    assert subjects_of(crowd, "--client", "alice", "orders.>") == everything[1:3]
    assert subjects_of(crowd, "--limit", "1", "--sort", "queue") == [("bob", "mail.>")]
    assert subjects_of(crowd, "--connmgr", "7") == []
    table = cli("subs", "--name", crowd.name, "--limit", "3")
    assert table.returncode == 0
    assert "4 subscriptions, 3 shown (--limit)" in table.stdout


def test_tables_are_for_people(crowd: Instance) -> None:
    table = cli("conns", "--name", crowd.name)
    assert table.returncode == 0
    lines = table.stdout.splitlines()
    assert lines[0].split()[:4] == ["name", "address", "id", "connmgr"]
    assert [line.split()[0] for line in lines[1:4]] == ["alice", "bob", "carol"]
    assert lines[4] == "3 connections"


@pytest.mark.parametrize(
    "args",
    [
        ("conns", "--sort", "beauty"),
        ("conns", "--limit", "-1"),
        ("conns", "--min-pending", "much"),
        ("subs", "--connmgr", "32"),
        ("top", "--interval", "0"),
    ],
)
def test_bad_options_are_one_line(args: tuple[str, ...]) -> None:
    done = cli(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["top", "conns", "subs"])
def test_nothing_to_look_at_is_one_line(command: str) -> None:
    done = cli(command, "--name", "nobody-has-this")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "is not running" in done.stderr


def test_every_key_to_sort_by_sorts() -> None:
    assert tuple(listing.CONN_KEYS) == commands.CONN_SORTS
    assert tuple(listing.SUB_KEYS) == commands.SUB_SORTS
    for key, _ in listing.CONN_KEYS.values():
        assert key(Conn(1, 0, "", "", "", "", *[0] * 13)) is not None


# ---- top -------------------------------------------------------------------------------------


def test_top_once_has_everything(crowd: Instance) -> None:
    with named(crowd, "busy", "busy.it") as client:
        over = False

        def work() -> None:
            while not over:
                client.send(b"PUB busy.it 2\r\nhi\r\n" * 10)
                client.ping_behind_messages(10)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            done = cli("top", "--name", crowd.name, "--once", "--interval", "0.5")
        finally:
            over = True
            thread.join()
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert "\x1b" not in text
    for part in ("manager", "keeper", "router", "connmgr/0", "dispatcher"):
        assert f"\n{part} " in text
    assert "connections 4   subscriptions 5" in text
    assert "fairness 1.000 (1 busy)" in text
    assert "\nbusy " in text
    assert "slowest connections: none" in text


class Terminal:
    """`midair top` in a terminal of its own."""

    def __init__(self, instance: Instance) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "midair", "top", "--name", instance.name, "--interval", "0.1"],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def await_text(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.seen.count(text) < times:
            assert time.monotonic() < deadline, self.seen
            ready, _, _ = select.select([self._ours], [], [], 0.1)
            if ready:
                with contextlib.suppress(OSError):  # EIO: the other side has ended
                    self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize("end", ["q", "SIGINT"])
def test_top_lives_in_a_terminal_until_told(crowd: Instance, end: str) -> None:
    terminal = Terminal(crowd)
    try:
        terminal.await_text("\x1b[H", times=3)  # it draws again and again
        terminal.await_text("router")
        if end == "q":
            terminal.press(b"q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        terminal.await_text("\x1b[?1049l")  # the terminal is as it was
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()


def test_fairness_is_jains() -> None:
    assert gather.jain([]) is None
    assert gather.jain([5.0]) == 1
    assert gather.jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert gather.jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert gather.jain([1.0, 3.0]) == pytest.approx(0.8)


def test_numbers_are_readable() -> None:
    assert [shown.number(it) for it in (0, 999, 1000, 25_300_000)] == ["0", "999", "1.0k", "25.3M"]
    assert [shown.size(it) for it in (0, 1023, 1024, 5 << 20)] == ["0B", "1023B", "1.0K", "5.0M"]
    assert shown.go_duration(0) == "0s"
    assert shown.go_duration(86400 + 61) == "1d0h1m1s"
    assert shown.moment(1_000_000_001) == "1970-01-01T00:00:01.000000001Z"
    assert shown.clean("a\x1b[2Jb") == "a?[2Jb"


# ---- events ----------------------------------------------------------------------------------


def log_of(instance: Instance, kind: str, component: str) -> list[dict[str, Any]]:
    runtime = Runtime.open(instance.name)
    return [it for it in events.read(runtime) if (it["kind"], it["component"]) == (kind, component)]


def test_deaths_and_recoveries_are_logged(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1)
    assert log_of(instance, events.UP, "manager")
    with Client(instance, "s") as client:
        client.echo(b"before")
        for victim in ("connmgr/0", "router"):
            killed = instance.pid(victim)
            os.kill(killed, signal.SIGKILL)
            recovered = eventually(
                lambda victim=victim: log_of(instance, events.RECOVERED, victim), f"{victim} back"
            )
            [died] = log_of(instance, events.DIED, victim)
            assert (died["pid"], died["generation"]) == (killed, 1)
            assert died["details"]["end"] == "killed by SIGKILL"
            [back] = eventually(
                lambda victim=victim: log_of(instance, events.BACK, victim), "its absence"
            )
            assert back["pid"] == recovered[0]["pid"] == instance.pid(victim)
            assert back["generation"] == recovered[0]["generation"] == 2
            assert back["details"]["away_ms"] > 0
            assert recovered[0]["details"]["took_ms"] > 0
            for event in (died, back, recovered[0]):
                assert set(event) == {
                    *("wall_ns", "monotonic_ns", "kind", "component", "pid"),
                    *("generation", "by", "details"),
                }
                assert abs(event["wall_ns"] - time.time_ns()) < 600 * 10**9
                assert event["monotonic_ns"] <= time.monotonic_ns()
        assert log_of(instance, events.RECOVERED, "connmgr/0")[0]["details"]["connections"] == 1
        client.echo(b"after")
    said = cli("status", "--name", instance.name).stdout
    assert "router died: killed by SIGKILL" in said
    assert "router back, away for" in said
    kinds = {it["kind"] for it in instance.status()["events"]}
    assert kinds == {events.DIED, events.BACK, events.RECOVERED}
    page = cli("top", "--name", instance.name, "--once", "--interval", "0.1").stdout
    assert "router recovered in" in page


def test_upgrades_are_logged(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1)
    done = cli("upgrade", "router", "--name", instance.name)
    assert done.returncode == 0, done.stderr
    [event] = log_of(instance, events.UPGRADED, "router")
    assert event["pid"] == instance.pid("router")
    assert event["generation"] == 2
    assert set(event["details"]) == {"from", "to", "began_ns", "pause_ms", "took_ms"}
    assert 0 < event["details"]["pause_ms"] <= event["details"]["took_ms"]
    assert log_of(instance, events.DIED, "router") == []


def test_the_log_is_bounded(instance_name: str) -> None:
    runtime = Runtime.create(instance_name)
    count = 3 * events.EVENTS_BYTES_MAX // 1000
    for at in range(count):
        events.append(runtime, "test", events.DIED, "router", 1, at, text="x" * 900)
    sizes = [path.stat().st_size for path in runtime.path.glob("events*")]
    assert len(sizes) == 2
    assert max(sizes) <= events.EVENTS_BYTES_MAX
    kept = [it["generation"] for it in events.read(runtime)]
    assert kept == list(range(count - len(kept), count)), "the newest, in order"
    assert sum(sizes) > events.EVENTS_BYTES_MAX


def test_lines_of_several_writers_do_not_mix(instance_name: str) -> None:
    runtime = Runtime.create(instance_name)
    children = []
    for writer in range(4):
        child = os.fork()
        if child == 0:
            for at in range(100):
                events.append(runtime, f"w{writer}", events.DIED, "router", writer, at, text="y")
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    lines = (runtime.path / events.NAME).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 400
    for writer in range(4):
        of_one = [it["generation"] for it in found if it["pid"] == writer]
        assert of_one == list(range(100))


def test_a_log_that_cannot_be_written_stops_nobody(instance_name: str) -> None:
    runtime = Runtime.create(instance_name)
    (runtime.path / events.NAME).mkdir()
    events.append(runtime, "test", events.DIED, "router", 1, 1)
    assert list(events.read(runtime)) == []


def test_every_kind_has_words() -> None:
    for kind in events.KINDS:
        said = events.tell({"kind": kind, "component": "router", "details": {}})
        assert said != f"router {kind}", kind
