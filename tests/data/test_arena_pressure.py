"""A small arena under pressure: reading stops, nothing accepted is lost, service resumes.

Unfinished frames and large messages cannot hold the whole arena.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from midair.client.wire_nats import CONNECT, Message, Polled, pub
from tests.support.instance import Instance
from tests.support.stream import Stream

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
