"""Stream positions are what the kernel has handed over, however the peer ended it."""

from __future__ import annotations

import socket
import struct

import pytest

from native import ffi, lib
from tests.support.instance import eventually

TCP_CLOSE = 7  # of the kernel's tcp_states.h
TCP_CLOSE_WAIT = 8
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


def position(sock: socket.socket) -> int:
    """Bytes the kernel says we have taken."""
    taken, given = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    assert lib.sockpos_read(sock.fileno(), taken, given) == 0
    return int(taken[0])


def is_in(sock: socket.socket, state: int) -> bool:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == state


@pytest.mark.parametrize("unread", [0, 3])
@pytest.mark.parametrize("end", ["stays", "closes", "resets", "closes, then resets"])
def test_what_was_taken_is_known_whatever_the_peer_did(end: str, unread: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), 30)
        ours, _ = server.accept()
    with client, ours:
        before = position(ours)
        client.sendall(b"x" * (10 + unread))
        assert ours.recv(10, socket.MSG_WAITALL) == b"x" * 10
        eventually(lambda: len(ours.recv(9, socket.MSG_PEEK)) == unread if unread else True, "all")
        if end.startswith("closes"):
            client.shutdown(socket.SHUT_WR)
            eventually(lambda: is_in(ours, TCP_CLOSE_WAIT), "its FIN has come")
        if end.endswith("resets"):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            client.close()
            eventually(lambda: is_in(ours, TCP_CLOSE), "it is reset")
        assert position(ours) - before == 10
