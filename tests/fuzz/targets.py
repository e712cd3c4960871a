"""What reads sockets in Python, as functions of one input: an exception is a finding.

`TARGETS[name]()` makes a target; calling it with the bytes of an input feeds them to the real thing
through a real socket, and looks whether it still works. What the thing may answer with (a refusal,
a closed connection) is no exception. `atheris_run.py` calls them with what a fuzzer makes up,
`replay.py` with what lies in corpus/; each in a process of its own (child.py), because a manager
takes signals for itself, and nothing here is ever closed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from connmgr import protocols
from connmgr.protocols import nats
from midair import names
from midair.keeper.main import Keeper
from midair.process import wire
from midair.process.runtime import Runtime
from midair.up import arrangement, listeners, notices, release
from midair.up.logfile import LogFile
from midair.up.manager import Manager
from midair.up.process import Life, Process
from midair.up.source import Source
from native import connmgr as native
from native.conntable import ConnTable
from tests.fuzz.child import name_of

PATIENCE_S = 10.0
PIECE = struct.Struct("<BH")  # of an input of several messages: descriptors, bytes of the message
PIECES_MAX = 8
CONTROL_BYTES_MAX = 65536


class Target:
    """One that keeps nothing."""

    def __call__(self, data: bytes) -> None:
        raise NotImplementedError


class Place:
    """A runtime directory of its own."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.name = name_of(os.getpid())
        before = os.environ.get("MIDAIR_RUNTIME_DIR")
        os.environ["MIDAIR_RUNTIME_DIR"] = str(self.base)
        self.runtime = Runtime.create(self.name)
        del os.environ["MIDAIR_RUNTIME_DIR"]
        if before is not None:
            os.environ["MIDAIR_RUNTIME_DIR"] = before


class Control(Target):
    """A request to the manager: the message of one connection to its control socket.

    The parts of this instance are not started, so an upgrade is refused after it was looked at.
    """

    def __init__(self) -> None:
        self.place = Place()
        log = logging.Logger("fuzz")
        log.addHandler(logging.NullHandler())
        source = Source(name=self.place.name, port=0, connmgrs=1)
        arranged = arrangement.first(source.load().counted(), self.place.runtime)
        self.manager = Manager(
            arranged, self.place.runtime, log, None, lambda: None, source, LogFile()
        )
        self.watched = len(self.manager._selector.get_map())

    def turn(self) -> None:
        while ready := self.manager._selector.select(0):
            for key, _ in ready:
                key.data(key.fileobj)

    def __call__(self, data: bytes) -> None:
        self.say(data[:CONTROL_BYTES_MAX])
        answers = self.say(b'{"op": "status", "v": 1}')
        assert [answer["instance"] for answer in answers] == [self.place.name]
        assert len(self.manager._selector.get_map()) == self.watched, "a connection was kept"

    def say(self, data: bytes) -> list[dict[str, object]]:
        """What the manager answers."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self.place.runtime.socket(names.CONTROL_SOCKET))
            with contextlib.suppress(BrokenPipeError):
                sock.send(data)
            if not data:
                sock.shutdown(socket.SHUT_WR)
            self.turn()
            answers = []
            while answer := sock.recv(CONTROL_BYTES_MAX):
                answers.append(json.loads(answer))
                assert answers[-1]["v"] == 1
            return answers


class Notify(Target):
    """A datagram to the manager's notify socket, as if one of its parts had sent it."""

    def __init__(self) -> None:
        self.place = Place()
        self.socket = listeners.open_notify(self.place.runtime, False)
        self.sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.connect(self.place.runtime.socket(names.NOTIFY_SOCKET))
        # A part that sleeps; the manager would find it by the pid of the sender.
        argv = ["/bin/sleep", "1000000"]
        self.process = Process.start(self.place.runtime, release.own(), argv, {}, [], None)

    def __call__(self, data: bytes) -> None:
        self.sender.send(data[:CONTROL_BYTES_MAX])
        for pid, fields in notices.read(self.socket):
            assert pid == os.getpid()
            self.process.life = Life.STARTING
            self.process.notified(fields)
            self.process.hung_s()


class Connect(Target):
    """What a client says in CONNECT; the first byte is what was agreed before."""

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(protocols.RefusedError):
            client = nats.connect(data[1:], data[0] << 8 if data else 0)
            # As native/connmgr.py gives them to C.
            assert len(client.ipc_name.encode()) < native.NAME_MAX
            for text in (client.name, client.lang, client.version):
                text.encode(errors="replace")


def pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(descriptors, message) of an input of several messages."""
    at = 0
    for _ in range(PIECES_MAX):
        if at + PIECE.size > len(data):
            return
        count, size = PIECE.unpack_from(data, at)
        at += PIECE.size
        yield count % 4, data[at : at + size]
        at += size


class Kept(Target):
    """Messages of one connection to the keeper, some with descriptors."""

    def __init__(self) -> None:
        self.place = Place()
        listener = listeners.open_peer(self.place.runtime, names.KEEPER_SOCKET)
        self.keeper = Keeper(listener)
        self.null = os.open(os.devnull, os.O_RDONLY)
        self.here = self.connect()
        self.keeper.turn(0.0)
        self.open = self.descriptors()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(self.place.runtime.socket(names.KEEPER_SOCKET))
        sock.setblocking(False)
        return sock

    @staticmethod
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def __call__(self, data: bytes) -> None:
        with self.connect() as sock:
            for count, message in pieces(data):
                with contextlib.suppress(OSError):  # it may have closed the connection
                    wire.send(sock, message, [self.null] * count)
                    self.keeper.turn(0.0)
                with contextlib.suppress(OSError, wire.WireError):
                    while True:
                        got, fds = wire.receive(sock)
                        wire.close_all(fds)
                        if not got:
                            break
        self.keeper.turn(0.0)
        # It answers others, and has no more than it says it holds.
        wire.send(self.here, wire.pack_uids(wire.DROP, list(self.keeper.held)))
        wire.send(self.here, wire.pack_uids(wire.PING))
        self.keeper.turn(0.0)
        assert wire.unpack_uids(wire.receive(self.here)[0]) == (wire.PONG, [])
        assert not self.keeper.held
        self.keeper.dropped.clear()
        assert self.descriptors() == self.open, "a descriptor was kept"


class Handoff(Target):
    """Messages of a dispatcher to a connmgr: what is taken for a client must be in the table."""

    def __init__(self) -> None:
        self.place = Place()
        self.table = ConnTable.open(self.place.runtime, 4, create=True)

    def __call__(self, data: bytes) -> None:
        wire.heard(data)
        with contextlib.suppress(wire.WireError):
            wire.version_of(data)
            wire.unpack_uids(data)
        with contextlib.suppress(wire.WireError):
            for uid, slot, _ in wire.unpack_handoff(data):
                assert not self.table.is_assigned(slot, uid, 0)


TARGETS: dict[str, Callable[[], Target]] = {
    "control": Control,
    "notify": Notify,
    "connect": Connect,
    "keeper": Kept,
    "handoff": Handoff,
}
