"""One client connection that believes nothing: every byte of its stream is parsed strictly.

A connection that ends before we close it, an error of the server, a byte that belongs to no
frame: each raises BrokenPromise, which fails the storm. The socket does not block; `Loop` turns
all connections of a process.
"""

from __future__ import annotations

import random
import selectors
import time
from collections import deque
from collections.abc import Callable

from midair.client import wire_nats
from midair.client.wire_nats import EndedError, FrameError, Message, Polled, RefusedError
from tests.support.promise import BrokenPromise

PATIENCE_S = 120.0  # nothing waits this long: it turns a hang into a failure
LINE_MAX = 5000

OnMessage = Callable[["Connection", bytes, bytes, bytes, bytes, bytes], None]


class NotGreetedError(BrokenPromise):
    """Accepted, and closed before INFO."""


def bytes_of(seed: int, size: int) -> bytes:
    """The same bytes for the same seed."""
    return random.Random(seed).randbytes(size)


class Connection(Polled):
    """A connection past its CONNECT. `on_message(conn, subject, sid, reply, headers, body)`."""

    def __init__(
        self,
        port: int,
        on_message: OnMessage | None = None,
        *,
        name: str = "storm",
        verbose: bool = False,
        receive_buffer: int = 0,
    ) -> None:
        self.name = name
        self.on_message = on_message
        self.verbose = verbose
        self.subs = 0  # subscriptions that should exist
        self.pings = 0
        self.expected: deque[bytes] = deque()  # answers a verbose client waits for, in order
        self.silent = False  # nothing but PING may come any more
        self.paused = False  # not reading now
        self.fresh = True  # what came right behind INFO has yet to be looked at
        if verbose:
            self.expected.append(b"+OK")
        try:
            super().__init__(
                "127.0.0.1",
                port,
                wire_nats.connect(verbose=verbose, name=name),
                receive_buffer=receive_buffer,
                timeout_s=PATIENCE_S,
                line_bytes_max=LINE_MAX,
            )
        except EndedError:
            raise NotGreetedError(str(self.broken("closed before INFO"))) from None
        except RefusedError as error:
            raise self.broken(f"instead of INFO: {error}") from None
        except (FrameError, OSError) as error:
            raise self.broken(f"while connecting: {type(error).__name__}: {error}") from None

    def broken(self, why: str) -> BrokenPromise:
        return BrokenPromise(f"connection {self.name} (port {getattr(self, 'port', 0)}): {why}")

    # Out

    def write(self) -> None:
        try:
            super().write()
        except OSError as error:
            raise self.broken(f"while writing: {error}") from None

    def subscribe(self, subject: bytes, sid: bytes, queue: bytes = b"") -> None:
        self.subs += 1
        self.send(wire_nats.sub(subject, sid, queue))
        if self.verbose:
            self.expected.append(b"+OK")

    def ping(self) -> None:
        self.pings += 1
        self.send(wire_nats.PING)
        if self.verbose:
            self.expected.append(b"PONG")

    # In

    def read(self, most: int = wire_nats.READ_BYTES) -> None:
        """One recv, parsed."""
        try:
            self.receive(most)
        except OSError as error:
            raise self.broken(f"while reading: {error}; {self.reader.waiting} unparsed") from None
        self.parse()

    def parse(self) -> None:
        try:
            for frame in self.reader:
                if not isinstance(frame, Message):
                    self._line(frame)
                elif self.silent or self.on_message is None:
                    raise self.broken(f"a message nobody waits for: {frame.line!r}")
                else:
                    self.on_message(self, *frame)
        except FrameError as error:
            raise self.broken(str(error)) from None

    def _line(self, line: bytes) -> None:
        if line == b"PING":
            self.send(wire_nats.PONG)
            return
        if line not in (b"PONG", b"+OK"):
            raise self.broken(f"not what was to come: {line!r}")
        if self.verbose:
            if not self.expected or self.expected[0] != line:
                wanted = self.expected[0] if self.expected else b"nothing"
                raise self.broken(f"{line!r} where {wanted!r} was to come")
            self.expected.popleft()
        elif line == b"+OK":
            raise self.broken("+OK without being verbose")
        self.note(line)
        if self.pongs > self.pings:
            raise self.broken("a PONG too many")

    @property
    def settled(self) -> bool:
        """Everything was written and answered, and no half frame is left."""
        return not self.out and self.pongs == self.pings and not self.reader.waiting


class Loop:
    """Turns connections. `turn` waits at most `wait_s`."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.connections: list[Connection] = []

    def add(self, connection: Connection) -> Connection:
        self.connections.append(connection)
        self.selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def turn(self, wait_s: float) -> None:
        for connection in self.connections:
            if connection.fresh:
                connection.fresh = False
                connection.parse()
            wanted = 0 if connection.paused else selectors.EVENT_READ
            wanted |= selectors.EVENT_WRITE if connection.out else 0
            key = self.selector.get_map().get(connection.socket.fileno())
            if (key.events if key else 0) == wanted:
                continue
            if key:
                self.selector.unregister(connection.socket)
            if wanted:
                self.selector.register(connection.socket, wanted, connection)
        for key, mask in self.selector.select(max(0.0, wait_s)):
            if not isinstance(key.data, Connection):
                key.data()
                continue
            if mask & selectors.EVENT_WRITE:
                key.data.write()
            if mask & selectors.EVENT_READ:
                key.data.read()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Turns until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise BrokenPromise(f"not within {PATIENCE_S:g} s: {what}")
            self.turn(0.05)

    def sync(self) -> None:
        """A PING and its PONG on every connection."""
        for connection in self.connections:
            connection.paused = False
            connection.ping()
        self.until(
            lambda: all(connection.settled for connection in self.connections),
            "every connection answers PING",
        )
