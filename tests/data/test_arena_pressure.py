"""A small arena under pressure: reading stops, nothing accepted is lost, service resumes.

Unfinished frames and large messages cannot hold the whole arena.
"""

from __future__ import annotations

import select
from collections.abc import Callable

import pytest

from midair import names
from midair.client.wire_nats import CONNECT, Message, Polled, pub
from native.stats import CLOSE_REASONS, Reader
from tests.support.instance import Instance
from tests.support.stream import Stream, Worker

SMALL = """
[limits]
max_payload = "2MiB"
[connmgr]
arena_bytes = "8MiB"
"""
CHUNK = 128 * 1024


def test_unfinished_frames_do_not_hold_the_arena(make_midair: Callable[..., Instance]) -> None:
    """More half-sent messages than there are chunks, each begun in a chunk of its own."""
    server = make_midair(SMALL, connmgrs=1)
    unfinished = 8 * 2**20 // CHUNK * 3
    with Stream(server.host, server.port) as reader, Stream(server.host, server.port) as busy:
        reader.sub(b"p.*", b"1")
        reader.sub(b"q", b"2")
        reader.sync()
        waiting = [Stream(server.host, server.port) for _ in range(unfinished)]
        try:
            for at, stream in enumerate(waiting):
                stream.send(b"PUB p.%d 9000\r\n" % at + b"h" * 4000)
                # Fills the rest of the chunk, and shows that there is service.
                busy.send(pub(b"q", b"b" * (CHUNK // 8)) * 8)
                assert {message.subject for message in reader.take(8)} == {b"q"}
            for stream in waiting:
                stream.send(b"h" * 5000 + b"\r\n")
            got = reader.take(unfinished)
            assert {message.subject for message in got} == {
                b"p.%d" % at for at in range(unfinished)
            }
            assert all(message.body == b"h" * 9000 for message in got)
        finally:
            for stream in waiting:
                stream.close()


def test_large_messages_wait_for_room_and_arrive(make_midair: Callable[..., Instance]) -> None:
    """Forty megabytes of messages through an arena of eight, to a reader that is slow to start."""
    server = make_midair(SMALL, connmgrs=1)
    with Stream(server.host, server.port) as reader:
        reader.sub(b"big.*", b"1")
        reader.sync()
        senders = [Polled(server.host, server.port, CONNECT) for _ in range(20)]
        got: list[Message] = []
        try:
            for at, sender in enumerate(senders):
                sender.send(pub(b"big.%d" % at, b"x" * 2**21))
            while len(got) < len(senders):
                left = {sender.socket: sender for sender in senders if sender.out}
                _, writable, _ = select.select([], list(left), [], 0.05)
                for sock in writable:
                    left[sock].write()
                if sum(not sender.out for sender in senders) > len(got):  # one was sent whole
                    got += reader.take(1)
            assert {message.subject for message in got} == {
                b"big.%d" % at for at in range(len(senders))
            }
            assert all(message.body == b"x" * 2**21 for message in got)
        finally:
            for sender in senders:
                sender.close()


TINY = """
[limits]
max_payload = "4MiB"
[connmgr]
arena_bytes = "8MiB"
"""
HALF = 30  # clients that send half of a message


def half_sent(server: Instance, size: int, sent: int) -> list[Polled]:
    """Clients that have begun a message, and say `sent` bytes of its body while they are read."""
    clients = [Polled(server.host, server.port, CONNECT) for _ in range(HALF)]
    for client in clients:
        client.send(b"PUB half %d\r\n" % size + b"h" * sent)
    return clients


def deliver(server: Instance, size: int, clients: list[Polled]) -> None:
    """A whole message arrives, while the others say no more than they had to say."""
    with Stream(server.host, server.port) as reader, Stream(server.host, server.port) as sender:
        reader.sub(b"whole", b"1")
        reader.sync()
        worker = Worker(lambda: sender.send(pub(b"whole", b"w" * size)))
        arrived = Worker(lambda: reader.take(1))
        while arrived.is_alive():
            left = {client.socket: client for client in clients if client.out}
            for sock in select.select([], list(left), [], 0.02)[1]:
                try:
                    left[sock].write()
                except ConnectionError:  # it has given its place up
                    left[sock].out.clear()
        assert [message.body for message in arrived.done()] == [b"w" * size]
        worker.done()


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_half_sent_messages_give_their_place_up(
    make_midair: Callable[..., Instance], connmgrs: int
) -> None:
    """Each of them has more than half of the arena, one after the other; none of them goes on."""
    server = make_midair(TINY, connmgrs=connmgrs)
    clients = half_sent(server, 4 * 2**20, 2 * 2**20)
    try:
        deliver(server, 4 * 2**20, clients)
        told = [client for client in clients if not client.out]
        assert any(client_end(client) == b"-ERR 'Stale Connection'\r\n" for client in told)
    finally:
        for client in clients:
            client.close()
    closed = ends(server, connmgrs)
    assert closed["unfinished"] > 0
    assert closed.keys() <= {"unfinished", "client", "read_error", "write_error"}


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_who_has_said_little_keeps_its_connection(
    make_midair: Callable[..., Instance], connmgrs: int
) -> None:
    """What has come of a message is put aside, and the message goes on when its turn comes."""
    server = make_midair(TINY, connmgrs=connmgrs)
    clients = half_sent(server, 3 * 2**20, 1000)
    try:
        deliver(server, 4 * 2**20, clients)
        with Stream(server.host, server.port) as reader:
            reader.sub(b"half", b"1")
            reader.sync()
            for client in clients:
                client.send(b"h" * (3 * 2**20 - 1000) + b"\r\n")
            arrived = Worker(lambda: reader.take(HALF))
            while arrived.is_alive():
                left = {client.socket: client for client in clients if client.out}
                for sock in select.select([], list(left), [], 0.02)[1]:
                    left[sock].write()
            assert {message.body for message in arrived.done()} == {b"h" * 3 * 2**20}
    finally:
        for client in clients:
            client.close()
    assert "unfinished" not in ends(server, connmgrs)


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_small_ones_that_were_begun_do_not_keep_others_from_beginning(
    make_midair: Callable[..., Instance], connmgrs: int
) -> None:
    """More is begun than may be, and nobody goes on: those who were silent make room."""
    server = make_midair(TINY, connmgrs=connmgrs)
    clients = [Stream(server.host, server.port) for _ in range(40 * connmgrs)]
    try:
        for client in clients:
            client.sync()
            client.send(b"PUB half 32000\r\n" + b"h" * 31000)
        with Stream(server.host, server.port) as late:
            late.sub(b"late", b"1")
            late.send(pub(b"late", b"x"))
            assert [message.body for message in late.take(1)] == [b"x"]
    finally:
        for client in clients:
            client.close()


def client_end(client: Polled) -> bytes:
    """What a client is told last; nothing if its connection was not ended."""
    client.socket.setblocking(False)
    said = b""
    try:
        while got := client.socket.recv(65536):
            said += got
    except OSError:
        return b""
    return said.rpartition(b"\r\n-ERR")[2] and b"-ERR" + said.rpartition(b"-ERR")[2]


def ends(server: Instance, connmgrs: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for index in range(connmgrs):
        counts = Reader(server.runtime, names.CONNMGR, index).counts().totals["closed"]
        for reason, count in zip(CLOSE_REASONS, counts, strict=True):
            if count:
                found[reason] = found.get(reason, 0) + count
    return found
