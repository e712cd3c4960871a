"""One client connection that believes nothing: every byte of its stream is parsed strictly.

A connection that ends before we close it, an error of the server, a byte that belongs to no
frame: each raises BrokenError, which fails the storm. The socket does not block; `Loop` turns
all connections of a process.
"""

from __future__ import annotations

import json
import random
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable

PATIENCE_S = 120.0  # nothing waits this long: it turns a hang into a failure
READ_BYTES = 1 << 18
LINE_MAX = 5000

_LINE = re.compile(
    rb"MSG (?P<s>\S+) (?P<i>\S+) (?:(?P<r>\S+) )?(?P<n>0|[1-9]\d*)"
    rb"|HMSG (?P<hs>\S+) (?P<hi>\S+) (?:(?P<hr>\S+) )?(?P<hh>[1-9]\d*) (?P<hn>[1-9]\d*)"
    rb"|(?P<word>PING|PONG|\+OK)"
)

OnMessage = Callable[["Connection", bytes, bytes, bytes, bytes, bytes], None]


class BrokenError(Exception):
    """The server broke its word."""


class NotGreetedError(BrokenError):
    """Accepted, and closed before INFO."""


def bytes_of(seed: int, size: int) -> bytes:
    """The same bytes for the same seed."""
    return random.Random(seed).randbytes(size)


class Connection:
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
        self.pongs = 0
        self.pings = 0
        self.stage = "connecting"
        self.expected: deque[bytes] = deque()  # answers a verbose client waits for, in order
        self.silent = False  # nothing but PING may come any more
        self.paused = False  # not reading now
        self.waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self.fresh = True  # what came right behind INFO has yet to be looked at
        self._in = bytearray()
        self._at = 0
        self.socket = socket.socket()
        try:
            self.socket.settimeout(PATIENCE_S)
            if receive_buffer:  # before connect(), or the window has been offered already
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.connect(("127.0.0.1", port))
            self.port: int = self.socket.getsockname()[1]
            self.stage = "waiting for INFO"
            self._await_info()
            options = {
                "verbose": verbose,
                "pedantic": False,
                "headers": True,
                "no_responders": True,
                "name": name,
            }
            self.stage = "connected"
            self.socket.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
            if verbose:
                self.expected.append(b"+OK")
            self.socket.setblocking(False)
        except OSError as error:
            self.socket.close()
            raise self.broken(f"{type(error).__name__}: {error}") from None
        except BaseException:
            self.socket.close()
            raise

    def broken(self, why: str) -> BrokenError:
        port = getattr(self, "port", 0)
        return BrokenError(f"connection {self.name} (port {port}), {self.stage}: {why}")

    def _await_info(self) -> None:
        while (end := self._in.find(b"\r\n")) < 0:
            try:
                got = self.socket.recv(READ_BYTES)
            except ConnectionResetError:
                got = b""
            if not got:
                raise NotGreetedError(str(self.broken("closed by the server")))
            self._in += got
        line = bytes(self._in[:end])
        if not line.startswith(b"INFO {"):
            raise self.broken(f"instead of INFO: {line[:100]!r}")
        json.loads(line[5:])
        del self._in[: end + 2]

    # Out

    def send(self, data: bytes) -> None:
        """Puts it behind what waits to be written."""
        self.waiting.append(memoryview(data))
        self.waiting_bytes += len(data)
        if len(self.waiting) == 1:
            self.write()

    def write(self) -> None:
        """As much as the kernel takes."""
        while self.waiting:
            try:
                if len(self.waiting) > 1 and len(self.waiting[0]) < 65536:
                    done = self.socket.sendmsg([self.waiting[i] for i in range(self._gather())])
                else:
                    done = self.socket.send(self.waiting[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise self.broken(f"while writing: {error}") from None
            self.waiting_bytes -= done
            while done:
                first = self.waiting[0]
                if done < len(first):
                    self.waiting[0] = first[done:]
                    break
                done -= len(first)
                self.waiting.popleft()

    def _gather(self) -> int:
        return min(len(self.waiting), 64)

    def subscribe(self, subject: bytes, sid: bytes, queue: bytes = b"") -> None:
        self.subs += 1
        self.send(b"SUB %b %b%b%b\r\n" % (subject, queue, b" " if queue else b"", sid))
        if self.verbose:
            self.expected.append(b"+OK")

    def ping(self) -> None:
        self.pings += 1
        self.send(b"PING\r\n")
        if self.verbose:
            self.expected.append(b"PONG")

    # In

    def read(self, most: int = READ_BYTES) -> int:
        """One recv, parsed; how many bytes it brought."""
        try:
            got = self.socket.recv(most)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.broken(f"while reading: {error}") from None
        if not got:
            raise self.broken(f"closed by the server; unparsed: {bytes(self._in[:100])!r}")
        self._in += got
        self.parse()
        return len(got)

    def parse(self) -> None:
        data = self._in
        at, end = self._at, len(data)
        while at < end:
            eol = data.find(b"\r\n", at, at + LINE_MAX)
            if eol < 0:
                if end - at >= LINE_MAX:
                    raise self.broken(f"no end of line in {bytes(data[at : at + 200])!r}")
                break
            found = _LINE.fullmatch(data, at, eol)
            if found is None:
                raise self.broken(f"not a frame: {bytes(data[at : min(eol, at + 200)])!r}")
            word = found["word"]
            if word is not None:
                at = eol + 2
                self._word(bytes(word))
                continue
            header = int(found["hh"]) if found["hh"] else 0
            size = int(found["n"] or found["hn"])
            body = eol + 2
            if end < body + size + 2:
                break
            if data[body + size : body + size + 2] != b"\r\n" or header > size:
                raise self.broken(f"bad end of the message {bytes(data[at:eol])!r}")
            if self.silent or self.on_message is None:
                raise self.broken(f"a message nobody waits for: {bytes(data[at:eol])!r}")
            at = body + size + 2
            self.on_message(
                self,
                bytes(found["s"] or found["hs"]),
                bytes(found["i"] or found["hi"]),
                bytes(found["r"] or found["hr"] or b""),
                bytes(data[body : body + header]),
                bytes(data[body + header : body + size]),
            )
        if at > READ_BYTES or at == end:
            del data[:at]
            at = 0
        self._at = at

    def _word(self, word: bytes) -> None:
        if word == b"PING":
            self.send(b"PONG\r\n")
            return
        if self.verbose:
            if not self.expected or self.expected[0] != word:
                wanted = self.expected[0] if self.expected else b"nothing"
                raise self.broken(f"{word!r} where {wanted!r} was to come")
            self.expected.popleft()
        elif word == b"+OK":
            raise self.broken("+OK without being verbose")
        if word == b"PONG":
            self.pongs += 1
            if self.pongs > self.pings:
                raise self.broken("a PONG too many")

    @property
    def settled(self) -> bool:
        """Everything was written and answered, and no half frame is left."""
        return not self.waiting and self.pongs == self.pings and self._at == len(self._in)

    def close(self) -> None:
        self.socket.close()


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
            wanted |= selectors.EVENT_WRITE if connection.waiting else 0
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
                raise BrokenError(f"not within {PATIENCE_S:g} s: {what}")
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
