"""Raw NATS connections for the data-path tests: whole streams, compared byte by byte.

One publisher and one subscriber make a stream that can be written down in advance, so order,
content and framing are compared at once (`Stream.expect`). Where several publishers mix, the
messages are taken apart (`Stream.take`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midair.client import wire_nats
from midair.client.wire_nats import EndedError, Message
from midair.process.runtime import Runtime
from native import connmgr as native
from native.conntable import ACTIVE, ASSIGNED, ConnTable

# Nothing waits this long on a working machine; it turns a hang into a failure.
PATIENCE_S = 60


class Stream(wire_nats.Connection):
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
        hello = wire_nats.connect(headers=headers, no_responders=headers, echo=echo)
        super().__init__(host, port, hello, receive_buffer=receive_buffer, timeout_s=timeout_s)

    def sub(self, subject: bytes, sid: bytes, queue: bytes = b"") -> None:
        self.send(wire_nats.sub(subject, sid, queue))

    def line(self) -> bytes:
        """The next frame, which is no message; empty at the end of the stream."""
        try:
            found = self.frame()
        except EndedError:
            return b""
        assert isinstance(found, bytes), found
        return found

    def expect(self, expected: bytes) -> None:
        """The stream goes on with exactly these bytes."""
        while (got := self.reader.take(len(expected))) is None:
            self.receive()
        if got != expected:
            at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
            around = slice(max(0, at - 60), at + 60)
            raise AssertionError(f"at byte {at}: {got[around]!r}, expected {expected[around]!r}")

    def take(self, count: int) -> list[Message]:
        """The next `count` messages."""
        found: list[Message] = []
        while len(found) < count:
            message = self.message()
            if message is not None:
                found.append(message)
        return found

    def take_until(self, subject: bytes) -> list[Message]:
        """The messages before one with that subject, which is dropped."""
        found: list[Message] = []
        while True:
            message = self.message()
            if message is None:
                continue
            if message.subject == subject:
                return found
            found.append(message)

    def to_end(self) -> bytes:
        """Everything up to the end of the stream (or its reset)."""
        with contextlib.suppress(EndedError):
            while True:
                self.receive()
        return self.reader.take(self.reader.waiting) or b""


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
        runtime = Runtime.open(name)
        self.table = ConnTable.attach(runtime)
        chunks = native.arena_chunks(arena_bytes)
        self.arenas = [native.open_arena(runtime, index, chunks) for index in range(connmgrs)]

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
