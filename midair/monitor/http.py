"""HTTP: aiohttp's server, bounded in every way a client could use against it.

GET and HEAD are answered by a function that does not wait. Connections, bytes of a request, and
seconds for a request to arrive and for an answer to be taken have limits; a client that is slower
loses its connection, and so makes room for others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import http_exceptions, web

CONNECTIONS_MAX = 64
LINE_BYTES_MAX = 16384  # the first line of a request, or one of its headers
# A request has to arrive within this, the next one too, and an answer has to be taken.
PATIENCE_S = 30.0
SERVER = "midair"


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    status: int
    content_type: str
    body: bytes


Handler = Callable[[str, Mapping[str, str]], Answer]


def plain(status: int, text: str) -> Answer:
    """One line of text."""
    return Answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())


class Connection(web.RequestHandler):
    """One connection. It is cut when nothing has come to an end on it for `patience_s`."""

    def __init__(
        self, server: Server, patience_s: float, closed: Callable[[Connection], None]
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=patience_s,
            access_log=None,  # type: ignore[arg-type]  # there is none
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            lingering_time=0,  # the body of a request is not waited for
        )
        self._patience_s = patience_s
        self._closed = closed
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.moved()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        self._closed(self)
        super().connection_lost(exc)

    def moved(self) -> None:
        """A request has arrived, or its answer has been taken: the time runs anew."""
        if self._cut is not None:
            self._cut.cancel()
        if isinstance(self.transport, asyncio.WriteTransport):
            self._cut = asyncio.get_running_loop().call_later(
                self._patience_s, self.transport.abort
            )

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        done = await super().finish_response(request, resp, start_time)
        self.moved()
        return done

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no request gets one line, and none is written to the log: anybody can send it."""
        if isinstance(exc, http_exceptions.LineTooLong):
            return _response(plain(431, "the request is too long"), closes=True)
        why = (message or "").partition("\n")[0]
        return _response(plain(status, f"not an HTTP request: {why}"), closes=True)


class Refusal(asyncio.Protocol):
    """A connection too many: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        said = plain(503, "too many connections").body
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Length: {len(said)}\r\n"
        head += "Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
        transport.write(head.encode() + said)
        transport.close()


class Server(web.Server):
    """Serves one listening socket. To be made inside a running event loop."""

    def __init__(
        self, handle: Handler, log: logging.Logger, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(self._answer)
        # Made and not closed. Of a burst, aiohttp counts none before all have been accepted.
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._handle = handle
        self._log = log
        self._patience_s = patience_s

    async def start(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(self, sock=listener)

    def __call__(self) -> Connection | Refusal:  # type: ignore[override]  # both are protocols
        if len(self._open) >= CONNECTIONS_MAX:
            return Refusal()
        made = Connection(self, self._patience_s, self._open.discard)
        self._open.add(made)
        return made

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, Connection)
        request.protocol.moved()
        if request.method not in ("GET", "HEAD"):
            return _response(plain(405, "only GET and HEAD"), closes=True)
        try:
            return _response(self._handle(request.path, request.query))
        except Exception:
            self._log.exception("%s", request.path)
            return _response(plain(500, "failed; see the log of midair-monitor"))


def _response(answer: Answer, closes: bool = False) -> web.StreamResponse:
    made = web.Response(status=answer.status, body=answer.body)
    made.headers["Content-Type"] = answer.content_type
    made.headers["Cache-Control"] = "no-store"
    made.headers["Server"] = SERVER
    if closes:
        made.force_close()
    return made
