"""The NATS protocol as a client speaks it: bytes to frames and back, and plain connections.

    Reader           sans-IO: fed what has come, gives whole frames; what is none is a FrameError
    pub, sub, ...    sans-IO: what a client says, as bytes
    Connection       over a socket that blocks; `Polled` over one that does not
    AsyncConnection  over asyncio

For programs that check what a server does: the drill, the bench suite, the tests. A reader believes
nothing: a frame is exactly what the protocol says, blank by blank, or it is an error. A connection
that ends is not made again, since an end is what those programs look for. Applications use
`midair.client`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

PING, PONG = b"PING\r\n", b"PONG\r\n"
END = b"\r\n"
HEADERS = b"NATS/1.0\r\n"  # how headers begin; an empty line ends them
LINE_BYTES_MAX = 1 << 16
READ_BYTES = 1 << 18
GATHER = 64  # pieces written by one call
PATIENCE_S = 60.0

_FRAME = re.compile(
    rb"MSG (\S+) (\S+) (?:(\S+) )?(0|[1-9]\d*)"
    rb"|HMSG (\S+) (\S+) (?:(\S+) )?([1-9]\d*) ([1-9]\d*)"
    rb"|(PING|PONG|\+OK|-ERR .+|INFO \{.*\} ?)"
)


class FrameError(ValueError):
    """Bytes that belong to no frame."""


class EndedError(ConnectionError):
    """The server has closed the connection, or it was reset."""


class RefusedError(ConnectionError):
    """The server said something else than INFO."""


# ---- what a client says --------------------------------------------------------------------------


def connect(**options: object) -> bytes:
    """CONNECT: not verbose, not pedantic, with headers and no_responders, unless said otherwise."""
    usual = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
    return b"CONNECT %b\r\n" % json.dumps({**usual, **options}).encode()


CONNECT = connect()


def pub(subject: bytes, body: bytes = b"", reply: bytes = b"") -> bytes:
    return b"PUB %b %b%d\r\n%b\r\n" % (subject, _word(reply), len(body), body)


def hpub(subject: bytes, headers: bytes, body: bytes = b"", reply: bytes = b"") -> bytes:
    """`headers` from NATS/1.0 to the empty line."""
    sizes = (len(headers), len(headers) + len(body))
    return b"HPUB %b %b%d %d\r\n%b%b\r\n" % (subject, _word(reply), *sizes, headers, body)


def sub(subject: bytes, sid: bytes, queue: bytes = b"") -> bytes:
    return b"SUB %b %b%b\r\n" % (subject, _word(queue), sid)


def unsub(sid: bytes, most: int = 0) -> bytes:
    """`most`: it ends after that many messages, counted from its beginning; 0: now."""
    return b"UNSUB %b %d\r\n" % (sid, most) if most else b"UNSUB %b\r\n" % sid


def _word(word: bytes) -> bytes:
    return word + b" " if word else b""


# ---- what a server says --------------------------------------------------------------------------


class Message(NamedTuple):
    """A MSG, or with headers an HMSG."""

    subject: bytes
    sid: bytes
    reply: bytes
    headers: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        """Its first line as it came, without the end."""
        sizes = b"%d" % (len(self.headers) + len(self.body))
        kind = b"MSG"
        if self.headers:
            kind, sizes = b"HMSG", b"%d %b" % (len(self.headers), sizes)
        return b"%b %b %b %b%b" % (kind, self.subject, self.sid, _word(self.reply), sizes)

    @property
    def frame(self) -> bytes:
        """All of it as it came."""
        return b"%b\r\n%b%b\r\n" % (self.line, self.headers, self.body)


def msg(subject: bytes, sid: bytes, body: bytes = b"", reply: bytes = b"") -> bytes:
    """A message without headers, as it comes."""
    return Message(subject, sid, reply, b"", body).frame


Frame = Message | bytes  # bytes: a line that is no message, without its end


class Reader:
    """Fed what has come, in any pieces; gives whole frames."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.line_bytes_max = line_bytes_max
        self._data = bytearray()
        self._at = 0  # of the first byte that was not given out
        self._need = 0  # there is no whole frame before this many bytes

    def feed(self, data: bytes) -> None:
        if self._at:
            del self._data[: self._at]
            self._need -= self._at
            self._at = 0
        self._data += data

    def next(self) -> Frame | None:
        """The next frame; None: more has to come."""
        data, at = self._data, self._at
        if len(data) < self._need or at == len(data):
            return None
        eol = data.find(END, at, at + self.line_bytes_max)
        if eol < 0:
            if len(data) - at >= self.line_bytes_max:
                raise FrameError(f"no end of line in {bytes(data[at : at + 200])!r}")
            return None
        found = _FRAME.fullmatch(data, at, eol)
        if found is None:
            raise FrameError(f"not a frame: {bytes(data[at : min(eol, at + 200)])!r}")
        subject, sid, reply, size, hsubject, hsid, hreply, head, total, line = found.groups()
        if line is not None:
            self._at = eol + 2
            return bytes(line)
        body = eol + 2 + int(head or 0)
        end = eol + 2 + int(size or total)
        if len(data) < end + 2:
            self._need = end + 2
            return None
        if data[end : end + 2] != END or body > end:
            raise FrameError(f"bad end of the message {bytes(data[at:eol])!r}")
        self._at = end + 2
        return Message(
            bytes(subject or hsubject),
            bytes(sid or hsid),
            bytes(reply or hreply or b""),
            bytes(data[eol + 2 : body]),
            bytes(data[body:end]),
        )

    def __iter__(self) -> Iterator[Frame]:
        """The frames that have come whole."""
        while (frame := self.next()) is not None:
            yield frame

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes, whatever they are; None: more have to come."""
        if len(self._data) - self._at < size:
            return None
        self._at += size
        self._need = 0
        return bytes(self._data[self._at - size : self._at])

    @property
    def waiting(self) -> int:
        """Bytes that were not given out yet."""
        return len(self._data) - self._at


class Noted:
    """What the lines between messages have said so far."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}
        self.pongs = 0
        self.oks = 0
        self.errors: list[bytes] = []

    def note(self, line: bytes) -> bytes:
        """Takes note of a line; what has to be answered."""
        if line == b"PING":
            return PONG
        if line == b"PONG":
            self.pongs += 1
        elif line == b"+OK":
            self.oks += 1
        elif line.startswith(b"-ERR"):
            self.errors.append(line)
        else:
            self.info = json.loads(line[5:])
        return b""


# ---- over sockets --------------------------------------------------------------------------------


class Connection(Noted):
    """A connection past its INFO, and past CONNECT if `hello` has one. Its socket blocks."""

    def __init__(
        self,
        host: str,
        port: int,
        hello: bytes = CONNECT,
        *,
        receive_buffer: int = 0,
        timeout_s: float = PATIENCE_S,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        super().__init__()
        self.reader = Reader(line_bytes_max)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.settimeout(timeout_s)
            if receive_buffer:  # before connect(), or the window has been offered already
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.connect((host, port))
            self.port: int = self.socket.getsockname()[1]  # our end
            greeting = self.frame()
            if not isinstance(greeting, bytes) or not greeting.startswith(b"INFO "):
                raise RefusedError(str(greeting, "utf-8") if isinstance(greeting, bytes) else "?")
            self.note(greeting)
            self.socket.sendall(hello)
        except BaseException:
            self.socket.close()
            raise

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, most: int = READ_BYTES) -> None:
        """One recv."""
        try:
            got = self.socket.recv(most)
        except ConnectionResetError as error:
            raise EndedError(str(error)) from error
        if not got:
            raise EndedError(f"closed by the server; errors: {self.errors}")
        self.reader.feed(got)

    def frame(self) -> Frame:
        """The next frame, as it comes."""
        while (frame := self.reader.next()) is None:
            self.receive()
        return frame

    def message(self) -> Message | None:
        """The next frame; None if it is no message: then it was noted, and answered."""
        frame = self.frame()
        if isinstance(frame, Message):
            return frame
        if answer := self.note(frame):
            self.send(answer)
        return None

    def sync(self) -> list[Message]:
        """Until everything sent so far has taken effect; the messages that came before that."""
        wanted = self.pongs + 1
        self.send(PING)
        ahead: list[Message] = []
        while self.pongs < wanted:
            if (found := self.message()) is not None:
                ahead.append(found)
        return ahead

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Polled(Connection):
    """A connection for a selector: once it is made its socket does not block.

    `synced`: when it is made, all of `hello` has taken effect. Messages before that are dropped.
    """

    def __init__(
        self, host: str, port: int, hello: bytes = CONNECT, *, synced: bool = False, **options: Any
    ) -> None:
        self.out: deque[memoryview] = deque()
        self.out_bytes = 0  # that wait to be written
        super().__init__(host, port, hello, **options)
        if synced:
            try:
                self.sync()
            except BaseException:
                self.close()
                raise
        self.socket.setblocking(False)

    def send(self, data: bytes) -> None:
        """Puts it behind what waits to be written."""
        self.out.append(memoryview(data))
        self.out_bytes += len(data)
        if len(self.out) == 1:
            self.write()

    def write(self) -> None:
        """As much as the kernel takes."""
        while self.out:
            try:
                if len(self.out) > 1 and len(self.out[0]) < 65536:
                    done = self.socket.sendmsg(list(itertools.islice(self.out, GATHER)))
                else:
                    done = self.socket.send(self.out[0])
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise EndedError(str(error)) from error
            self.out_bytes -= done
            while self.out and done >= len(self.out[0]):
                done -= len(self.out.popleft())
            if done:
                self.out[0] = self.out[0][done:]

    def receive(self, most: int = READ_BYTES) -> None:
        """One recv, which may bring nothing."""
        try:
            super().receive(most)
        except BlockingIOError:
            return


class AsyncConnection(Noted):
    """A connection past its INFO and CONNECT, over asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self.reader = Reader()
        self.writer = writer
        self._stream = reader

    @classmethod
    async def open(cls, host: str, port: int, hello: bytes = CONNECT) -> Self:
        made = cls(*await asyncio.open_connection(host, port))
        greeting = await made.frame()
        if not isinstance(greeting, bytes) or not greeting.startswith(b"INFO "):
            made.writer.close()
            raise RefusedError(str(greeting))
        made.note(greeting)
        made.put(hello)
        return made

    def put(self, data: bytes) -> None:
        """Sends it without waiting for anything."""
        self.writer.write(data)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self) -> Frame:
        """The next frame, as it comes."""
        while (frame := self.reader.next()) is None:
            got = await self._stream.read(READ_BYTES)
            if not got:
                raise EndedError(f"closed by the server; errors: {self.errors}")
            self.reader.feed(got)
        return frame

    async def message(self) -> Message | None:
        """The next frame; None if it is no message: then it was noted, and answered."""
        frame = await self.frame()
        if isinstance(frame, Message):
            return frame
        if answer := self.note(frame):
            self.put(answer)
        return None

    async def next(self) -> Message:
        """The next message."""
        while (message := await self.message()) is None:
            pass
        return message

    async def sync(self) -> list[Message]:
        """Until everything sent so far has taken effect; the messages that came before that."""
        wanted = self.pongs + 1
        await self.send(PING)
        ahead: list[Message] = []
        while self.pongs < wanted:
            if (found := await self.message()) is not None:
                ahead.append(found)
        return ahead

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return
