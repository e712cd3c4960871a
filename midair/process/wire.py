"""Messages between dispatcher, keeper and connection managers.

All three speak over AF_UNIX SOCK_SEQPACKET sockets, so a message arrives whole, with its
descriptors (SCM_RIGHTS), or not at all. Numbers are little-endian. Every message starts
with `op, count`; `count` entries follow; descriptors, where the op carries them, are as
many as entries and in the same order.

To a connmgr:
    HANDOFF  count x (uid, slot, listener), count <= HANDOFFS_MAX, with descriptors
To the keeper:
    HOLD     count x uid, with descriptors: keep these
    DROP     count x uid: close your copies
    GIVE     count x uid: send me your copies; count 0 asks for all
    PING     count 0
From the keeper:
    HELD     count x uid, count <= FDS_MAX, with descriptors
    END      count 0: nothing more comes for this GIVE
    PONG     count 0
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable, Sequence

HEAD = struct.Struct("<II")  # op, count
UID = struct.Struct("<Q")
HANDOFF_ENTRY = struct.Struct("<QII")  # uid, slot in the connection table, listener

HANDOFF = 1

HOLD = 1
DROP = 2
GIVE = 3
HELD = 4
END = 5
PING = 6
PONG = 7

HANDOFFS_MAX = 64  # entries of one HANDOFF
FDS_MAX = 253  # descriptors of one message: the kernel's SCM_MAX_FD
UIDS_MAX = 4096  # uids of one DROP or GIVE: 32 KiB, below the default socket buffer
MESSAGE_BYTES_MAX = HEAD.size + UIDS_MAX * UID.size
ANCILLARY_BYTES_MAX = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)


class WireError(Exception):
    """A message that is not of this protocol: the connection it came on is closed."""


class CutShort(WireError):
    """The receiver had no room for the descriptors (RLIMIT_NOFILE): they are lost."""

    def __init__(self, entries: int) -> None:
        super().__init__(f"message of {entries} entries cut short")
        self.entries = entries


def pack_uids(op: int, uids: Sequence[int] = ()) -> bytes:
    """A keeper message."""
    return HEAD.pack(op, len(uids)) + b"".join(map(UID.pack, uids))


def unpack_uids(data: bytes) -> tuple[int, list[int]]:
    """(op, uids) of a keeper message."""
    op, count = _head(data)
    if len(data) != HEAD.size + count * UID.size:
        raise WireError(f"op {op}: {count} uids in {len(data)} bytes")
    return op, [uid for (uid,) in UID.iter_unpack(data[HEAD.size :])]


def pack_handoff(entries: Sequence[tuple[int, int, int]]) -> bytes:
    """A HANDOFF of (uid, slot, listener) entries."""
    return HEAD.pack(HANDOFF, len(entries)) + b"".join(HANDOFF_ENTRY.pack(*e) for e in entries)


def unpack_handoff(data: bytes) -> list[tuple[int, int, int]]:
    """The (uid, slot, listener) entries of a HANDOFF."""
    op, count = _head(data)
    if op != HANDOFF or len(data) != HEAD.size + count * HANDOFF_ENTRY.size:
        raise WireError(f"hand-off: op {op}, {count} entries in {len(data)} bytes")
    return list(HANDOFF_ENTRY.iter_unpack(data[HEAD.size :]))


def send(sock: socket.socket, data: bytes, fds: Iterable[int] = ()) -> None:
    """Sends one message, whole. BlockingIOError: it would have to wait, nothing was sent."""
    rights = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors (close-on-exec). Empty data: the peer has gone."""
    data, ancillary, flags, _ = sock.recvmsg(
        MESSAGE_BYTES_MAX, ANCILLARY_BYTES_MAX, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise CutShort(HEAD.unpack_from(data)[1] if len(data) >= HEAD.size else 0)
    return data, list(fds)


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors that nobody will use."""
    for fd in fds:
        os.close(fd)


def _head(data: bytes) -> tuple[int, int]:
    if len(data) < HEAD.size:
        raise WireError(f"{len(data)} bytes")
    op, count = HEAD.unpack_from(data)
    return op, count
