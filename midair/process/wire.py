"""Messages between dispatcher, keeper and connection managers.

All three speak over AF_UNIX SOCK_SEQPACKET sockets, so a message arrives whole, with its
descriptors (SCM_RIGHTS), or not at all. Numbers are little-endian. Every message starts
with `op, version, count`; `count` entries follow; descriptors, where the op carries them, are as
many as entries and in the same order.

Two processes may be of different releases. Each speaks the newest version that both understand:
the one that connects asks (ASK), and speaks version 0 until it has read the answer (HELLO); it
is answered in the version of its last message. Version 0 is that of release 0.1, which took the
first four bytes for the op, and leaves ASK without an answer. A message of a version that is not
understood closes its connection, with one line in the log: it is never taken for something else.

    ASK      op 1, version 0, count 0: to everyone
    HELLO    the answer; its version is the newest that is understood
To a connmgr (HELLO comes after all that was sent to it before the question, by whomever, is read):
    HANDOFF  count x (uid, slot, listener), count <= HANDOFFS_MAX, with descriptors
To the keeper:
    HOLD     count x uid, with descriptors: keep these
    DROP     count x uid: close your copies
    GIVE     count x uid: send me your copies; count 0 asks for all of clients
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

from midair.version import __version__

HEAD = struct.Struct("<HHI")  # op, version, count
UID = struct.Struct("<Q")
HANDOFF_ENTRY = struct.Struct("<QII")  # uid, slot in the connection table, listener

VERSION = 1  # the newest that this release understands; it understands all before it

HANDOFF = 1

HOLD = 1
DROP = 2
GIVE = 3
HELD = 4
END = 5
PING = 6
PONG = 7
HELLO = 8

# Release 0.1 takes it for an empty HOLD or HANDOFF, which does nothing.
ASK = HEAD.pack(1, 0, 0)

HANDOFFS_MAX = 64  # entries of one HANDOFF
FDS_MAX = 253  # descriptors of one message: the kernel's SCM_MAX_FD
UIDS_MAX = 4096  # uids of one DROP or GIVE: 32 KiB, below the default socket buffer
MESSAGE_BYTES_MAX = HEAD.size + UIDS_MAX * UID.size
ANCILLARY_BYTES_MAX = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)


class WireError(Exception):
    """A message that is not of this protocol: the connection it came on is closed."""


class NewerError(WireError):
    """A message of a version that this release does not understand."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"message of version {version}; this release ({__version__}) understands up to "
            f"{VERSION}"
        )


class CutShort(WireError):
    """The receiver had no room for the descriptors (RLIMIT_NOFILE): they are lost."""

    def __init__(self, entries: int) -> None:
        super().__init__(f"message of {entries} entries cut short")
        self.entries = entries


def is_ask(data: bytes) -> bool:
    """Whether it asks for our version."""
    return data == ASK


def hello() -> bytes:
    """The answer to ASK."""
    return HEAD.pack(HELLO, VERSION, 0)


def heard(data: bytes) -> int | None:
    """If it is a HELLO: the version to speak from now on. It may be of a newer release."""
    if len(data) < HEAD.size:
        return None
    op, version, _ = HEAD.unpack_from(data)
    return min(version, VERSION) if op == HELLO else None


def pack_uids(op: int, uids: Sequence[int] = (), version: int = 0) -> bytes:
    """A keeper message."""
    return HEAD.pack(op, version, len(uids)) + b"".join(map(UID.pack, uids))


def unpack_uids(data: bytes) -> tuple[int, list[int]]:
    """(op, uids) of a keeper message."""
    op, _, count = _head(data)
    if len(data) != HEAD.size + count * UID.size:
        raise WireError(f"op {op}: {count} uids in {len(data)} bytes")
    return op, [uid for (uid,) in UID.iter_unpack(data[HEAD.size :])]


def version_of(data: bytes) -> int:
    """Of a message that is understood."""
    return _head(data)[1]


def pack_handoff(entries: Sequence[tuple[int, int, int]], version: int = 0) -> bytes:
    """A HANDOFF of (uid, slot, listener) entries."""
    head = HEAD.pack(HANDOFF, version, len(entries))
    return head + b"".join(HANDOFF_ENTRY.pack(*entry) for entry in entries)


def unpack_handoff(data: bytes) -> list[tuple[int, int, int]]:
    """The (uid, slot, listener) entries of a HANDOFF."""
    op, _, count = _head(data)
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
    room = (MESSAGE_BYTES_MAX, ANCILLARY_BYTES_MAX, socket.MSG_CMSG_CLOEXEC)
    try:
        data, ancillary, flags, _ = sock.recvmsg(*room)
    except ConnectionResetError:
        # Said once, if the peer died before it had read all that we sent. What it had sent
        # is still there, and may be the last copy of a socket.
        data, ancillary, flags, _ = sock.recvmsg(*room)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise CutShort(HEAD.unpack_from(data)[2] if len(data) >= HEAD.size else 0)
    if not data:  # nobody of ours sends that: the same as the end
        close_all(fds)
        return data, []
    return data, list(fds)


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors that nobody will use."""
    for fd in fds:
        os.close(fd)


def _head(data: bytes) -> tuple[int, int, int]:
    if len(data) < HEAD.size:
        raise WireError(f"{len(data)} bytes")
    op, version, count = HEAD.unpack_from(data)
    if version > VERSION:
        raise NewerError(version)
    return op, version, count
