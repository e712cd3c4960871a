"""A strict NATS client over asyncio streams: whatever is not expected is an error."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

CONNECT = (
    b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,'
    b'"lang":"python","version":"0","name":"crash"}\r\n'
)
LINE_BYTES_MAX = 1 << 16


class BrokenPromise(Exception):
    """Midair did something it promises not to do."""


class Message(NamedTuple):
    """A MSG or HMSG."""

    subject: bytes
    sid: bytes
    body: bytes  # of an HMSG, with its headers
    status: bool
    reply: bytes = b""


class Client:
    """One connection. `next()` gives the next message; PINGs are answered on the way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.info: dict[str, object] = {}
        self.pongs = 0
        self.errors: list[bytes] = []

    @classmethod
    async def open(cls, host: str, port: int, *, connect: bytes = CONNECT) -> Client:
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
        client = cls(reader, writer)
        line = await client.line()
        if not line.startswith(b"INFO "):
            raise BrokenPromise(f"the first line is {line[:80]!r}")
        client.info = json.loads(line[5:])
        writer.write(connect)
        return client

    async def line(self) -> bytes:
        try:
            line = await self.reader.readuntil(b"\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise BrokenPromise(f"connection dropped: {error!r}") from None
        return line[:-2]

    async def next(self) -> Message:
        """The next message; other frames are handled on the way."""
        while True:
            message = await self.frame()
            if message is not None:
                return message

    async def frame(self) -> Message | None:
        """One frame; None if it was no message."""
        line = await self.line()
        if line.startswith((b"MSG ", b"HMSG ")):
            words = line.split(b" ")
            size = int(words[-1])
            try:
                body = await self.reader.readexactly(size + 2)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise BrokenPromise(f"dropped inside a message: {error!r}") from None
            if body[-2:] != b"\r\n":
                raise BrokenPromise(f"corrupted stream after {line[:80]!r}: {body[-20:]!r}")
            headers = line.startswith(b"HMSG ")
            reply = words[3] if len(words) == (6 if headers else 5) else b""
            return Message(words[1], words[2], body[:-2], headers, reply)
        if line == b"PING":
            self.writer.write(b"PONG\r\n")
        elif line == b"PONG":
            self.pongs += 1
        elif line.startswith(b"-ERR"):
            self.errors.append(line)
        elif line != b"+OK" and not line.startswith(b"INFO "):
            raise BrokenPromise(f"corrupted stream: {line[:80]!r}")
        return None

    async def flush(self) -> list[Message]:
        """Waits for a PONG; what came before it."""
        self.writer.write(b"PING\r\n")
        await self.writer.drain()
        before, messages = self.pongs, []
        while self.pongs == before:
            message = await self.frame()
            if message is not None:
                messages.append(message)
        return messages

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        try:
            await self.writer.drain()
        except ConnectionError as error:
            raise BrokenPromise(f"connection dropped while writing: {error!r}") from None

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return
