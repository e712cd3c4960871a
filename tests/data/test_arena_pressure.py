"""A small arena under pressure: reading stops, nothing accepted is lost, service resumes.

Unfinished frames and large messages cannot hold the whole arena.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from tests.support.instance import Instance
from tests.wire.conformance import QUIET, Wire

SMALL = """
[limits]
max_payload = "2MiB"
[connmgr]
arena_bytes = "8MiB"
"""
CHUNK = 128 * 1024


def publish(sock: socket.socket, subject: bytes, size: int, byte: bytes) -> None:
    sock.sendall(b"PUB %s %d\r\n%s\r\n" % (subject, size, byte * size))


def test_unfinished_frames_do_not_hold_the_arena(make_midair: Callable[..., Instance]) -> None:
    """More half-sent messages than there are chunks, each begun in a chunk of its own."""
    server = make_midair(SMALL, connmgrs=1)
    unfinished = 8 * 2**20 // CHUNK * 3
    with Wire(server.host, server.port) as reader, Wire(server.host, server.port) as busy:
        reader.send(QUIET + b"SUB p.* 1\r\nSUB q 2\r\nPING\r\n")
        reader.read_until(1, 0)
        busy.send(QUIET)
        waiting = [Wire(server.host, server.port) for _ in range(unfinished)]
        try:
            for at, wire in enumerate(waiting):
                wire.send(QUIET + b"PUB p.%d 9000\r\n" % at + b"h" * 4000)
                # Fills the rest of the chunk, and shows that there is service.
                for _ in range(8):
                    publish(busy.socket, b"q", CHUNK // 8, b"b")
                reader.read_until(1, len(reader.messages) + 8)
                reader.messages.clear()
            for wire in waiting:
                wire.send(b"h" * 5000 + b"\r\n")
            reader.read_until(1, unfinished)
            got = {message.split(b" ")[1] for message in reader.messages}
            assert got == {b"p.%d" % at for at in range(unfinished)}
            assert all(m.endswith(b"|" + b"h" * 9000) for m in reader.messages)
        finally:
            for wire in waiting:
                wire.close()


def test_large_messages_wait_for_room_and_arrive(make_midair: Callable[..., Instance]) -> None:
    """Forty megabytes of messages through an arena of eight, to a reader that is slow to start."""
    server = make_midair(SMALL, connmgrs=1)
    with Wire(server.host, server.port) as reader:
        reader.send(QUIET + b"SUB big.* 1\r\nPING\r\n")
        reader.read_until(1, 0)
        senders = [Wire(server.host, server.port) for _ in range(20)]
        try:
            for wire in senders:
                wire.socket.setblocking(False)
            left = {
                wire.socket: QUIET + b"PUB big.%d %d\r\n" % (at, 2**21) + b"x" * 2**21 + b"\r\n"
                for at, wire in enumerate(senders)
            }
            while left or len(reader.messages) < len(senders):
                _, writable, _ = select.select([], list(left), [], 0.05)
                for sock in writable:
                    left[sock] = left[sock][sock.send(left[sock]) :]
                    if not left[sock]:
                        del left[sock]
                if len(senders) - len(left) > len(reader.messages):  # one was sent whole
                    reader.read_one()
            assert {m.split(b" ")[1] for m in reader.messages} == {
                b"big.%d" % at for at in range(len(senders))
            }
            assert all(len(m.split(b"|", 1)[1]) == 2**21 for m in reader.messages)
        finally:
            for wire in senders:
                wire.close()
