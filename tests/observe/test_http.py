"""The HTTP server of the monitor: what a client can do to it, and what it cannot.

Method: the server itself, with little patience, and clients that speak by hand over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from midair.monitor import http
from tests.support.instance import PATIENCE_S

LARGE = bytes(16 << 20)  # more than the sockets take
CLOSE = b"HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def handle(path: str, _query: object) -> http.Answer:
    if path == "/large":
        return http.Answer(200, "application/octet-stream", LARGE)
    if path == "/fails":
        raise ValueError("on purpose")
    return http.plain(200, "fine")


def served(test: Callable[[int], Awaitable[None]], patience_s: float) -> None:
    """Runs a test beside a server, with its port."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        server = await http.Server(handle, logging.getLogger("test"), patience_s).start(listener)
        try:
            await asyncio.wait_for(test(listener.getsockname()[1]), PATIENCE_S)
        finally:
            server.close()

    asyncio.run(run())


async def ask(port: int, data: bytes) -> bytes:
    """All that is answered until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_slow_clients_make_room_for_others() -> None:
    """As many as there may be say nothing, half of a request, or do not take their answers."""

    async def test(port: int) -> None:
        with ExitStack() as stack:
            slow = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(http.CONNECTIONS_MAX)
            ]
            for sock in slow[:20]:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
            for sock in slow[20:40]:
                sock.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = await ask(port, b"")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert answer.endswith(b"\r\n\r\ntoo many connections\n")
            while True:
                answer = await ask(port, b"GET / " + CLOSE)
                if not answer.startswith(b"HTTP/1.1 503 "):
                    break
                await asyncio.sleep(0.05)
            assert answer.endswith(b"\r\n\r\nfine\n")

    served(test, patience_s=1.0)


def test_a_request_that_never_ends_is_cut_however_often_a_byte_comes() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        end = asyncio.ensure_future(reader.read())
        while not end.done():
            writer.write(b"A: b\r\n")
            await asyncio.wait([end], timeout=0.05)
        writer.close()
        assert isinstance(end.exception(), ConnectionError | None)
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    served(test, patience_s=0.3)


def test_a_large_answer_that_is_taken_arrives_whole() -> None:
    async def test(port: int) -> None:
        answer = await ask(port, b"GET /large " + CLOSE)
        assert len(answer.partition(b"\r\n\r\n")[2]) == len(LARGE)

    served(test, patience_s=PATIENCE_S)


def test_a_body_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def test(port: int) -> None:
        answer = await ask(
            port,
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\nabc",
        )
        assert answer.startswith(b"HTTP/1.1 405 ")
        answer = await ask(
            port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 5\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 ")

    served(test, patience_s=PATIENCE_S)
    assert caplog.records == []


def test_what_fails_inside_is_said_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(port: int) -> None:
        assert (await ask(port, b"GET /fails " + CLOSE)).startswith(b"HTTP/1.1 500 ")
        assert (await ask(port, b"GET / HTTP/1.0\r\n\r\n")).endswith(b"fine\n")
        for nonsense in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nNo: host\r\n\r\n"):
            answer = await ask(port, nonsense)
            assert b" 400 " in answer
            assert b"not an HTTP request: " in answer

    served(test, patience_s=PATIENCE_S)
    assert [record.message for record in caplog.records] == ["/fails"]
