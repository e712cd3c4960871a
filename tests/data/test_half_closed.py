"""A client that ends its sending side gets what it is owed, then the end (`nc -N`).

Owed is what the things it said before cause, as by nats-server: answers to its PINGs, its own
messages to its own subscriptions, a 503. All of that is routed, so it comes whatever is away or
dies meanwhile; only a client that does not read, or a router that does not answer, is not waited
for longer than limits.write_deadline_s.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from midair import names
from midair.client.wire_nats import PING, msg, pub, sub
from native.stats import CLOSE_REASONS, Reader
from tests.support.instance import Instance, eventually, start
from tests.support.natsserver import nats_server, without_subject
from tests.support.stream import Stream

Make = Callable[..., Instance]
ASKED = "[latency]\nflow_leases = false\n"
# (name, what is said, what comes up to the end)
TALKS = [
    ("nothing", b"", b""),
    ("ping", PING, b"PONG\r\n"),
    ("echo", sub(b"a", b"1") + pub(b"a", b"hi") + PING, msg(b"a", b"1", b"hi") + b"PONG\r\n"),
    (
        "many",
        sub(b"a", b"1") + pub(b"a", b"x" * 100) * 3000 + PING,
        msg(b"a", b"1", b"x" * 100) * 3000 + b"PONG\r\n",
    ),
    (
        "large",
        sub(b"a", b"1") + pub(b"a", b"y" * 700_000) * 4 + PING,
        msg(b"a", b"1", b"y" * 700_000) * 4 + b"PONG\r\n",
    ),
    (
        "a-frame-that-is-not-finished",
        sub(b"a", b"1") + pub(b"a", b"hi") + PING + b"PUB a 500000\r\n" + b"z" * 300_000,
        msg(b"a", b"1", b"hi") + b"PONG\r\n",
    ),
    (
        "no-responders",
        sub(b"r", b"1") + pub(b"nobody", b"", b"r"),
        b"HMSG r 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    ),
]


def hold(place: Instance, said: bytes) -> bytes:
    """All that comes after INFO, of a client that says this and ends its side at once."""
    with closing(Stream(place.host, place.port)) as client:
        client.socket.sendall(said)
        client.socket.shutdown(socket.SHUT_WR)
        return client.to_end()


@pytest.fixture(scope="module", params=["1", "1, the router asked", "2", "nats-server"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    if request.param == "nats-server":
        with nats_server(tmp_path_factory.mktemp("ports")) as (found, _):
            yield found
        return
    config = ASKED if "asked" in request.param else ""
    instance = start(request.node.nodeid, config, "--connmgrs", request.param[0])
    yield instance
    instance.stop()
    assert " died" not in instance.stderr()


@pytest.mark.parametrize(("said", "owed"), [it[1:] for it in TALKS], ids=[it[0] for it in TALKS])
def test_what_it_said_is_answered_to_the_end(place: Instance, said: bytes, owed: bytes) -> None:
    assert without_subject(hold(place, said)) == owed


def test_what_it_published_reaches_others(place: Instance) -> None:
    with closing(Stream(place.host, place.port)) as other:
        other.sub(b"others", b"1")
        other.sync()
        assert hold(place, pub(b"others", b"x") * 200) == b""
        other.expect(msg(b"others", b"1", b"x") * 200)


def closed(instance: Instance, connmgrs: int) -> dict[str, int]:
    """Connections that ended, by reason."""
    found: dict[str, int] = {}
    for index in range(connmgrs):
        counts = Reader(instance.runtime, names.CONNMGR, index).counts().totals["closed"]
        for reason, count in zip(CLOSE_REASONS, counts, strict=True):
            if count:
                found[reason] = found.get(reason, 0) + count
    return found


@contextmanager
def standing_still(instance: Instance) -> Iterator[None]:
    """The router does nothing meanwhile."""
    router = instance.pid("router")
    os.kill(router, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(router, signal.SIGCONT)


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_over_the_death_of_its_connmgr(make_midair: Make, connmgrs: int) -> None:
    """Killed when it has taken what the client said, and the router has answered nothing yet."""
    instance = make_midair(ASKED, connmgrs=connmgrs)
    said = sub(b"a", b"7" * 100) + pub(b"a", b"x" * 50) * 500 + PING
    clients = [Stream(instance.host, instance.port) for _ in range(4)]
    pids = [instance.pid(f"connmgr/{n}") for n in range(connmgrs)]
    for client in clients:
        client.sync()
    with standing_still(instance):
        for at, client in enumerate(clients):
            client.socket.sendall(said.replace(b" a ", b" a.%d " % at))
            client.socket.shutdown(socket.SHUT_WR)
        taken = 4 * len(said)
        eventually(lambda: _bytes_in(instance, connmgrs) > taken, "what they said was taken")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for n, pid in enumerate(pids):
            eventually(
                lambda n=n, pid=pid: (
                    (row := instance.components()[f"connmgr/{n}"])["pid"] != pid
                    and row["state"] == "active"
                ),
                "a successor",
            )
    for at, client in enumerate(clients):
        owed = msg(b"a.%d" % at, b"7" * 100, b"x" * 50) * 500 + b"PONG\r\n"
        assert client.to_end() == owed
        client.close()
    eventually(lambda: closed(instance, connmgrs) == {"client": 4}, "each has ended")


def _bytes_in(instance: Instance, connmgrs: int) -> int:
    return sum(
        Reader(instance.runtime, names.CONNMGR, n).counts().totals["bytes_in"]
        for n in range(connmgrs)
    )


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_nobody_waits_for_ever_for_the_router(make_midair: Make, connmgrs: int) -> None:
    limits = "[limits]\nwrite_deadline_s = 0.2\n[manager]\nwatchdog_s = 3600\n"
    instance = make_midair(limits, connmgrs=connmgrs)
    with closing(Stream(instance.host, instance.port)) as client:
        client.sync()
        with standing_still(instance):
            client.send(PING)
            client.socket.shutdown(socket.SHUT_WR)
            assert client.to_end() == b""
        eventually(lambda: closed(instance, connmgrs) == {"client": 1}, "it has ended")


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_one_that_does_not_read_is_not_waited_for(make_midair: Make, connmgrs: int) -> None:
    limits = '[limits]\nwrite_deadline_s = 0.2\nmax_pending = "64MiB"\n'
    instance = make_midair(limits, connmgrs=connmgrs)
    body = b"x" * 1_000_000
    with closing(Stream(instance.host, instance.port, receive_buffer=4096)) as client:
        client.sub(b"a", b"1")
        client.send(pub(b"a", body) * 20)
        client.socket.shutdown(socket.SHUT_WR)
        eventually(lambda: closed(instance, connmgrs) == {"slow_deadline": 1}, "it has ended")
        assert client.to_end().count(b"MSG a 1 ") < 20


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_a_thousand_at_once(make_midair: Make, connmgrs: int) -> None:
    """More ends at once than events fit: each is answered, and nothing of them is left."""
    instance = make_midair(connmgrs=connmgrs)
    clients = [Stream(instance.host, instance.port) for _ in range(700)]
    for client in clients:
        client.send(sub(b"a", b"1") + PING)
    for client in clients:
        client.socket.shutdown(socket.SHUT_WR)
    for client in clients:
        assert client.to_end() == b"PONG\r\n"
        client.close()
    eventually(lambda: closed(instance, connmgrs) == {"client": 700}, "each has ended")
    assert " warning: " not in instance.stderr()
