"""The limits of the configuration: who breaks one is told and closed, nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from midair import config
from midair.client.wire_nats import RefusedError, hpub, msg, pub
from midair.config import MIB
from midair.version import NATS_LEVEL, __version__
from tests.support.instance import ROOT, Instance, eventually, new_name
from tests.support.stream import Inside, Stream, Worker

Make = Callable[..., Instance]


def connect(instance: Instance, **options: Any) -> Stream:
    return Stream(instance.host, instance.port, **options)


@contextlib.contextmanager
def pair(instance: Instance) -> Iterator[Callable[[], None]]:
    """Two clients that were there before; what is yielded checks that they notice nothing."""
    here, there = connect(instance), connect(instance)
    here.sub(b"pair.here", b"1")
    there.sub(b"pair.there", b"1")
    here.sync()
    there.sync()

    def check() -> None:
        here.send(pub(b"pair.there", b"to there"))
        there.expect(msg(b"pair.there", b"1", b"to there"))
        there.send(pub(b"pair.here", b"to here"))
        here.expect(msg(b"pair.here", b"1", b"to here"))

    try:
        check()
        yield check
        check()
        assert here.sync() == there.sync() == []
    finally:
        here.close()
        there.close()


def refused(stream: Stream, error: bytes) -> None:
    """The stream ends with this error and nothing else."""
    assert stream.to_end() == b"-ERR '%b'\r\n" % error
    stream.close()


def test_max_connections(make_midair: Make) -> None:
    instance = make_midair("[limits]\nmax_connections = 5", connmgrs=2)
    with pair(instance) as check:
        others = [connect(instance) for _ in range(3)]
        for _ in range(10):
            check()
            with instance.connect() as one_too_many, one_too_many.makefile("rb") as stream:
                assert stream.read() == b"-ERR 'maximum connections exceeded'\r\n"
        for turn in range(3):
            others.pop(0).close()

            def accepted() -> Stream | None:
                try:
                    return connect(instance)
                except RefusedError:  # the end is not noticed yet
                    return None

            others.append(eventually(accepted, f"place {turn} is free again"))
            others[-1].sub(b"mine", b"1")
            others[-1].send(pub(b"mine", b"x"))
            others[-1].expect(msg(b"mine", b"1", b"x"))
            check()
        for other in others:
            other.close()


def test_max_subscriptions(make_midair: Make) -> None:
    instance = make_midair("[limits]\nmax_subscriptions = 10", connmgrs=1)
    with pair(instance) as check:
        client = connect(instance)
        client.send(b"".join(b"SUB s.%d %d\r\n" % (n, n) for n in range(10)))
        client.send(b"SUB other 3\r\n")  # a sid that is in use: ignored, not counted
        client.sync()
        client.send(b"UNSUB 0\r\nSUB s.10 10\r\n")  # a place that is free again at once
        client.send(b"UNSUB 10 1\r\n" + pub(b"s.10", b"last"))
        client.expect(msg(b"s.10", b"10", b"last"))
        client.sub(b"s.11", b"11")
        client.send(b"".join(pub(b"s.%d" % n) for n in range(12)))
        client.expect(b"".join(msg(b"s.%d" % n, b"%d" % n) for n in (*range(1, 10), 11)))
        client.sub(b"s.12", b"12")
        refused(client, b"maximum subscriptions exceeded")
        check()


def test_max_subscriptions_counts_out_a_queue_member_once(make_midair: Make) -> None:
    """Also when more than its maximum was on its way to it already."""
    instance = make_midair("[limits]\nmax_subscriptions = 3", connmgrs=1)
    member, publisher = connect(instance), connect(instance)
    member.sub(b"end", b"e")
    for n in range(40):
        member.sub(b"q", b"%d" % n, b"g")
        member.sync()
        publisher.send(pub(b"q", b"x") * 200)
        member.send(b"UNSUB %d 1\r\n" % n)
        publisher.send(pub(b"end"))
        assert {m.sid for m in member.take_until(b"end")} <= {b"%d" % n}
        member.sync()
    member.sub(b"two", b"2")
    member.sub(b"three", b"3")
    assert member.sync() == []
    member.sub(b"four", b"4")
    refused(member, b"maximum subscriptions exceeded")
    publisher.close()


def test_max_payload(make_midair: Make) -> None:
    instance = make_midair("[limits]\nmax_payload = 1000", connmgrs=1)
    with pair(instance):
        client = connect(instance)
        assert client.info["max_payload"] == 1000
        client.sub(b"p", b"1")
        headers = b"NATS/1.0\r\n\r\n"
        client.send(pub(b"p", b"x" * 1000) + hpub(b"p", headers, b"x" * (1000 - len(headers))))
        client.expect(msg(b"p", b"1", b"x" * 1000))
        assert [len(m.headers + m.body) for m in client.take(1)] == [1000]
        client.send(b"PUB p 1001\r\n")  # at once: the body need not come
        refused(client, b"Maximum Payload Violation")
        client = connect(instance)
        client.send(hpub(b"p", headers, b"x" * (1001 - len(headers))))
        refused(client, b"Maximum Payload Violation")


@pytest.mark.parametrize("limit", [256, 4096, 6000])
def test_max_control_line(make_midair: Make, limit: int) -> None:
    instance = make_midair(f"[limits]\nmax_control_line = {limit}", connmgrs=2)
    with pair(instance):
        client, other = connect(instance), connect(instance)
        longest = b"x" * (limit - len(" 1"))
        client.sub(longest, b"1")
        client.sync()
        for sender in (client, other):
            sender.send(pub(longest, b"body"))
            client.expect(msg(longest, b"1", b"body"))
        # The most a reference may have to carry: subject and reply share the line.
        half = b"y" * (limit // 2 - 3)
        client.sub(half, b"2")
        client.sync()
        other.send(pub(half, b"body", half))
        client.expect(msg(half, b"2", b"body", half))
        client.send(b"SUB " + b"z" * (limit + 10))
        refused(client, b"maximum control line exceeded")
        other.send(b"PUB " + b"z" * limit + b" 1000000\r\n")
        refused(other, b"maximum control line exceeded")


def test_silent_clients_are_asked_and_then_closed(make_midair: Make) -> None:
    instance = make_midair("[limits]\nping_interval_s = 0.05\nping_max = 2", connmgrs=1)
    silent, answering = connect(instance), connect(instance)
    asked = 0
    receiver = Worker(silent.to_end)
    while receiver.is_alive():
        if answering.line() == b"PING":
            asked += 1
            answering.send(b"PONG\r\n")
    assert receiver.done() == b"PING\r\nPING\r\n-ERR 'Stale Connection'\r\n"
    # The one that answers has been asked as often, and more often than it may stay silent.
    while asked < 4:
        assert answering.line() == b"PING"
        asked += 1
        answering.send(b"PONG\r\n")
    answering.sub(b"still", b"1")
    answering.send(pub(b"still", b"here"))
    assert answering.take(1)[0].body == b"here"
    silent.close()
    answering.close()


SLOW = {
    "pending": '[limits]\nmax_pending = "64KiB"\nwrite_deadline_s = 600',
    "deadline": '[limits]\nmax_pending = "1GiB"\nwrite_deadline_s = 0.1',
}


@pytest.mark.parametrize("limit", list(SLOW))
@pytest.mark.parametrize("size", [100, 20_000])
def test_a_slow_consumer_is_closed_and_the_others_get_everything(
    make_midair: Make, limit: str, size: int
) -> None:
    instance = make_midair(SLOW[limit], connmgrs=2)
    inside = Inside(instance.name, 2, 256 * MIB)
    slow = connect(instance, receive_buffer=4096)
    slow.sub(b"flood", b"s")
    slow.sync()
    there = inside.connmgr_of(slow)
    quick = [connect(instance) for _ in range(4)]
    assert there in {inside.connmgr_of(client) for client in quick}
    for client in quick:
        client.sub(b"flood", b"q")
        client.sync()
    publisher = connect(instance)
    before = inside.connections()
    sent = 0
    # In steps that everyone has read before the next: only `slow` falls behind.
    for _ in range(4000):
        if inside.connections() < before:
            break
        some = [b"%d." % (sent + n) + b"x" * size for n in range(max(1, 50_000 // size))]
        sent += len(some)
        publisher.send(b"".join(pub(b"flood", body) for body in some))
        expected = b"".join(msg(b"flood", b"q", body) for body in some)
        for client in quick:
            client.expect(expected)
    # It has two seconds to read why; it does not.
    eventually(lambda: inside.connections() == before - 1, "the slow one is closed")
    got = slow.to_end()
    everything = b"".join(msg(b"flood", b"s", b"%d." % n + b"x" * size) for n in range(sent))
    assert everything.startswith(got)
    assert len(got) < len(everything)
    for client in (*quick, publisher):
        assert client.sync() == []
        client.close()
    slow.close()
    inside.table.close()


SMALL_ARENA = """
[limits]
max_pending = "1GiB"
write_deadline_s = 600
[connmgr]
arena_bytes = "8MiB"
"""


@pytest.mark.parametrize(
    ("connections", "size", "each"),
    [
        (300, 5000, 20),
        (400, 30_000, 5),
        (60, 33_000, 20),
        (300, 40_000, 5),
        (100, 120_000, 5),
        (20, 1_000_000, 5),
    ],
)
def test_more_begun_than_the_arena_holds(
    make_midair: Make, connections: int, size: int, each: int
) -> None:
    """Frames wait for room when chunks run short; all of them get it in the end."""
    instance = make_midair(SMALL_ARENA, connmgrs=1)
    reader = Stream(instance.host, instance.port, timeout_s=20)
    reader.sub(b"small.*", b"1")
    reader.sync()
    publishers = [Stream(instance.host, instance.port) for _ in range(connections)]

    def body(at: int, n: int) -> bytes:
        return random.Random(at * each + n).randbytes(size)

    def publish(at: int) -> None:
        for n in range(each):
            publishers[at].send(pub(b"small.%d" % at, body(at, n)))

    workers = [Worker(partial(publish, at)) for at in range(connections)]
    try:
        found = reader.take(connections * each)
    finally:
        for stream in (reader, *publishers):
            stream.socket.shutdown(socket.SHUT_RDWR)  # wakes the worker that sends on it
            stream.close()
        for worker in workers:
            worker.join()
    shares: dict[bytes, list[bytes]] = {}
    for message in found:
        shares.setdefault(message.subject, []).append(message.body)
    for at in range(connections):
        assert shares[b"small.%d" % at] == [body(at, n) for n in range(each)]


def test_a_sender_that_has_to_wait_is_not_stale(make_midair: Make) -> None:
    """While the arena is full nobody is read: what they say is not heard, and not their fault."""
    limits = "[limits]\nping_interval_s = 0.05\nping_max = 2"
    instance = make_midair(SMALL_ARENA.replace("[limits]", limits), connmgrs=1)
    slow = connect(instance, receive_buffer=4096)
    slow.sub(b"wait", b"1")
    slow.sync()
    stop = threading.Event()

    def beat() -> None:  # alive, whether it reads or not: a PING waits behind what it has to read
        while not stop.wait(0.02):
            slow.send(b"PONG\r\n")

    beating = Worker(beat)
    publishers = [connect(instance) for _ in range(3)]
    count, body = 300, bytes(50_000)
    workers = [Worker(partial(client.send, pub(b"wait", body) * count)) for client in publishers]
    try:
        # Long enough that one who is read and stays silent is closed, twice.
        other = make_midair(limits, connmgrs=1)
        for _ in range(2):
            with contextlib.closing(connect(other)) as witness:
                assert witness.to_end().endswith(b"-ERR 'Stale Connection'\r\n")
        done = instance.cli("conns", "--json", "--name", instance.name)
        read = {row["id"]: row["messages_in"] for row in json.loads(done.stdout)}
        # They wait. Where they have put what was not read, in the kernel or not yet, is theirs.
        assert all(read[client.info["client_id"]] < count for client in publishers)
        assert all(m.body == body for m in slow.take(count * len(publishers)))
        stop.set()
        beating.done()
        for worker in workers:
            worker.done()
    finally:
        stop.set()
        for client in (slow, *publishers):
            client.close()


@contextlib.contextmanager
def listening(owner: str, *addresses: str) -> Iterator[list[tuple[str, int]]]:
    """An instance that listens on several addresses; yields where."""
    name = new_name(owner)
    process = subprocess.Popen(
        [sys.executable, "-m", "midair", "up", "--config", "/dev/stdin", "--name", name],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        listen = ", ".join(f'"{address}"' for address in addresses)
        process.stdin.write(f"[server]\nlisten = [{listen}]\n[connmgr]\ncount = 2\n".encode())
        process.stdin.close()
        line = process.stdout.readline().decode()
        assert "listening on " in line
        found = line.split("listening on ")[1].split(";")[0].split(", ")
        yield [config.split_address(address) for address in found]
    finally:
        process.terminate()
        assert process.wait() == 0
        process.stdout.close()


def test_several_listeners_serve_the_same_subjects(request: pytest.FixtureRequest) -> None:
    with listening(request.node.nodeid, "127.0.0.1:0", "[::1]:0", "127.0.0.2:0") as places:
        assert [host for host, _ in places] == ["127.0.0.1", "::1", "127.0.0.2"]
        clients = [Stream(host, port) for host, port in places]
        for client in clients:
            client.sub(b"every", b"1")
            client.sync()
        for n, sender in enumerate(clients):
            sender.send(pub(b"every", b"%d" % n))
            for client in clients:
                client.expect(msg(b"every", b"1", b"%d" % n))
        assert [client.info["client_ip"] for client in clients[:2]] == ["127.0.0.1", "::1"]
        assert len({client.info["client_id"] for client in clients}) == 3
        assert len({client.info["server_id"] for client in clients}) == 1
        for client in clients:
            # The first address is the one that is announced.
            assert (client.info["host"], client.info["port"]) == places[0]
            client.close()


def test_a_listener_for_every_address_takes_both_families(request: pytest.FixtureRequest) -> None:
    with listening(request.node.nodeid, "[::]:0") as [(host, port)]:
        assert host == "::"
        with Stream("127.0.0.1", port) as one, Stream("::1", port) as other:
            assert [it.info["client_ip"] for it in (one, other)] == ["127.0.0.1", "::1"]
            other.sub(b"both", b"1")
            other.sync()
            one.send(pub(b"both", b"hi"))
            other.expect(msg(b"both", b"1", b"hi"))


def test_beside_a_listener_of_ipv4_it_takes_the_other_family(
    request: pytest.FixtureRequest,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with listening(request.node.nodeid, f"[::]:{port}", f"127.0.0.1:{port}") as places:
        assert places == [("::", port), ("127.0.0.1", port)]
        with Stream("127.0.0.1", port) as one, Stream("::1", port) as other:
            assert [it.info["client_ip"] for it in (one, other)] == ["127.0.0.1", "::1"]


def test_info(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1)
    with contextlib.closing(connect(instance)) as client:
        info = dict(client.info)
    assert info.pop("client_id") > 0
    assert info == {
        "server_id": f"MIDAIR-{instance.name}",
        "server_name": instance.name,
        "version": NATS_LEVEL,
        "midair": __version__,
        "proto": 1,
        "host": instance.host,
        "port": instance.port,
        "headers": True,
        "max_payload": MIB,
        "client_ip": socket.gethostbyname("localhost"),
    }
