"""What components tell the manager: datagrams of systemd's protocol, with the sender's pid.

Facts relied on: with SO_PASSCRED the kernel adds the pid of the sender to each datagram, so nobody
speaks for another process.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

NOTICE_BYTES_MAX = 4096
NOTICES_MAX = 256  # in one turn: whoever sends on and on does not keep the manager from its work
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def read(sock: socket.socket) -> Iterator[tuple[int, dict[str, str]]]:
    """(pid, fields) of what has come."""
    for _ in range(NOTICES_MAX):
        try:
            data, ancillary, _, _ = sock.recvmsg(
                NOTICE_BYTES_MAX, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        pid = 0
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0]
        pairs = (line.partition("=") for line in data.decode(errors="replace").split("\n"))
        yield pid, {name: value for name, _, value in pairs}
