"""Raw NATS connections for the data-path tests: whole streams, compared byte by byte.

One publisher and one subscriber make a stream that can be written down in advance, so order,
content and framing are compared at once (`Stream.expect`). Where several publishers mix, the
messages are taken apart (`Stream.take`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midair.process.runtime import Runtime
from native import connmgr as native
from native.conntable import ACTIVE, ASSIGNED, ConnTable

# Nothing waits this long on a working machine; it turns a hang into a failure.
PATIENCE_S = 60
READ_BYTES = 1 << 20


class RefusedError(Exception):
    """The server said something else than INFO."""


@dataclass(frozen=True, slots=True)
class Message:
    subject: bytes
    sid: bytes
    reply: bytes
    headers: bytes
    body: bytes


def pub(subject: bytes, body: bytes = b"", reply: bytes = b"") -> bytes:
    return b"PUB %b %b%b%d\r\n%b\r\n" % (subject, reply, b" " if reply else b"", len(body), body)


def hpub(subject: bytes, headers: bytes, body: bytes) -> bytes:
    sizes = (len(headers), len(headers) + len(body))
    return b"HPUB %b %d %d\r\n" % (subject, *sizes) + headers + body + b"\r\n"


def msg(subject: bytes, sid: bytes, body: bytes = b"", reply: bytes = b"") -> bytes:
    return b"MSG %b %b %b%b%d\r\n%b\r\n" % (
        subject,
        sid,
        reply,
        b" " if reply else b"",
        len(body),
        body,
    )


class Stream:
    """One connection, past its INFO and CONNECT."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        echo: bool = True,
        headers: bool = True,
        receive_buffer: int = 0,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        if receive_buffer:  # before connect(), or the window has been offered already
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self.socket.getsockname()[1]
        self.buffer = bytearray()
        self.at = 0  # of the first byte in the buffer that was not taken
        self.pongs = 0
        self.errors: list[bytes] = []
        line = self.line()
        if not line.startswith(b"INFO "):
            self.close()
            raise RefusedError(line.decode())
        self.info: dict[str, Any] = json.loads(line[5:])
        options = {
            "verbose": False,
            "pedantic": False,
            "headers": headers,
            "no_responders": headers,
            "echo": echo,
        }
        self.send(b"CONNECT " + json.dumps(options).encode() + b"\r\n")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def sub(self, subject: bytes, sid: bytes, queue: bytes = b"") -> None:
        self.send(b"SUB %b %b %b\r\n" % (subject, queue, sid))

    def sync(self) -> list[Message]:
        """Until everything sent so far has taken effect (PING and PONG).

        Returns the messages that came before the PONG.
        """
        self.send(b"PING\r\n")
        wanted = self.pongs + 1
        ahead: list[Message] = []
        while self.pongs < wanted:
            found = self.frame()
            if found is not None:
                ahead.append(found)
        return ahead

    def fill(self) -> bool:
        """Reads more; False at the end of the stream."""
        if self.at > READ_BYTES:
            del self.buffer[: self.at]
            self.at = 0
        got = self.socket.recv(READ_BYTES)
        self.buffer += got
        return bool(got)

    def line(self) -> bytes:
        """The next line without its end; empty at the end of the stream."""
        start = self.at
        while (end := self.buffer.find(b"\r\n", start)) < 0:
            start = max(self.at, len(self.buffer) - 1)
            moved = self.at
            if not self.fill():
                return b""
            start -= moved - self.at
        found = bytes(self.buffer[self.at : end])
        self.at = end + 2
        return found

    def exactly(self, size: int) -> bytes:
        """The next `size` bytes."""
        while len(self.buffer) - self.at < size:
            assert self.fill(), f"the stream ended, {size} bytes were to come"
        found = bytes(self.buffer[self.at : self.at + size])
        self.at += size
        return found

    def expect(self, expected: bytes) -> None:
        """The stream goes on with exactly these bytes."""
        got = self.exactly(len(expected))
        if got != expected:
            at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
            around = slice(max(0, at - 60), at + 60)
            raise AssertionError(f"at byte {at}: {got[around]!r}, expected {expected[around]!r}")

    def frame(self) -> Message | None:
        """The next message, or None for anything else."""
        line = self.line()
        kind, _, rest = line.partition(b" ")
        if kind == b"MSG":
            words, header_size = rest.split(b" "), 0
        elif kind == b"HMSG":
            words = rest.split(b" ")
            header_size = int(words.pop(-2))
        else:
            if line == b"PONG":
                self.pongs += 1
            elif line == b"PING":
                self.send(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                self.errors.append(line)
            elif not line:
                raise EOFError(f"the stream ended; errors: {self.errors}")
            elif not line.startswith((b"INFO ", b"+OK")):
                raise AssertionError(f"unknown frame {line[:100]!r}")
            return None
        data = self.exactly(int(words[-1]) + 2)
        assert data[-2:] == b"\r\n", line
        reply = words[2] if len(words) == 4 else b""
        return Message(words[0], words[1], reply, data[:header_size], data[header_size:-2])

    def take(self, count: int) -> list[Message]:
        """The next `count` messages."""
        found: list[Message] = []
        while len(found) < count:
            message = self.frame()
            if message is not None:
                found.append(message)
        return found

    def take_until(self, subject: bytes) -> list[Message]:
        """The messages before one with that subject, which is dropped."""
        found: list[Message] = []
        while True:
            message = self.frame()
            if message is None:
                continue
            if message.subject == subject:
                return found
            found.append(message)

    def to_end(self) -> bytes:
        """Everything up to the end of the stream (or its reset)."""
        with contextlib.suppress(ConnectionResetError):
            while self.fill():
                pass
        found = bytes(self.buffer[self.at :])
        self.at = len(self.buffer)
        return found

    def close(self) -> None:
        self.socket.close()


class Worker(threading.Thread):
    """A thread whose failure is the test's."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def done(self) -> Any:
        """Waits for it; its result, or its exception."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "a client hangs"
        if self.error is not None:
            raise self.error
        return self.result


class Inside:
    """A running instance seen from inside: its connection table and its arenas."""

    def __init__(self, name: str, connmgrs: int, arena_bytes: int) -> None:
        self.connmgrs = connmgrs
        self.table = ConnTable.attach(Runtime.open(name))
        chunks = native.arena_chunks(arena_bytes)
        self.arenas = [native.open_arena(name, index, chunks) for index in range(connmgrs)]

    def connmgr_of(self, stream: Stream) -> int:
        """The connmgr that serves a connection."""
        found = [
            slot.connmgr
            for slot in self.table.used()
            if slot.port == stream.port and slot.state in (ASSIGNED, ACTIVE)
        ]
        assert len(found) == 1, found
        return found[0]

    def connections(self) -> int:
        """Connections that are served, or have ended without the router's word yet."""
        return sum(slot.state in (ASSIGNED, ACTIVE) for slot in self.table.used())

    def census(self) -> list[tuple[int, int]]:
        """(messages alive, chunks in use) of each arena."""
        return [native.arena_census(arena) for arena in self.arenas]


def pieces(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    """The data cut into pieces of these sizes."""
    at = 0
    while at < len(data):
        size = next(sizes)
        yield data[at : at + size]
        at += size


def maps_of(pid: int) -> str:
    """What a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()
