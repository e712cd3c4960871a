"""A small HTTP server: GET and HEAD, one answer after the other, nothing it must remember.

Bounded in every way a client could use against it: connections, bytes of a request, and seconds
for a request to arrive and for an answer to be taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 16384
REQUEST_S = 30.0  # also how long a connection is kept between two requests
ANSWER_S = 30.0


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    status: int
    content_type: str
    body: bytes


Handler = Callable[[str, Mapping[str, str]], Answer]


class Server:
    """Serves one listening socket."""

    def __init__(self, handle: Handler, log: logging.Logger) -> None:
        self._handle = handle
        self._log = log
        self._open = 0

    async def start(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._serve, sock=listener, limit=REQUEST_BYTES_MAX)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS_MAX:
                while await self._one(reader, writer):
                    pass
            else:
                await self._send(writer, plain(503, "too many connections"), True, False)
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone, or is too slow
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), ANSWER_S)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer. True: the connection may bring another one."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
        except asyncio.LimitOverrunError:
            await self._send(writer, plain(431, "the request is too long"), True, False)
            return False
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            await self._send(writer, plain(400, "not an HTTP request"), True, False)
            return False
        method, target, version = words
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        wanted = headers.get("connection", "").lower()
        keep = not has_body and wanted != "close"
        keep = keep and (version != "HTTP/1.0" or wanted == "keep-alive")
        if method not in ("GET", "HEAD"):
            answer = plain(405, "only GET and HEAD")
            keep = False
        else:
            answer = self._answer(target)
        await self._send(writer, answer, method != "HEAD", keep)
        return keep

    def _answer(self, target: str) -> Answer:
        try:
            parts = urlsplit(target)
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
        except ValueError:
            return plain(400, "not an address")
        try:
            return self._handle(parts.path, query)
        except Exception:
            self._log.exception("%s", parts.path)
            return plain(500, "failed; see the log of midair-monitor")

    async def _send(
        self, writer: asyncio.StreamWriter, answer: Answer, with_body: bool, keep: bool
    ) -> None:
        phrase = HTTPStatus(answer.status).phrase
        head = (
            f"HTTP/1.1 {answer.status} {phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n"
            "Cache-Control: no-store\r\n"
            f"Connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        )
        writer.write(head.encode("latin-1") + (answer.body if with_body else b""))
        await asyncio.wait_for(writer.drain(), ANSWER_S)


def plain(status: int, text: str) -> Answer:
    """One line of text."""
    return Answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())
