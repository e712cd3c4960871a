"""What the real-client tests share: which server they talk to, and a proxy to cut connections.

The server is the `midair` fixture. `MIDAIR_TEST_SERVER=host:port` puts another one in its
place: run against a stock nats-server, these tests show that they ask for nothing that a
NATS server does not do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

# Nothing here waits this long on a working server; it turns a hang into a failure.
PATIENCE_S = 20


@dataclass(frozen=True)
class Server:
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"


def run(test: Coroutine[Any, Any, T], patience_s: float = PATIENCE_S) -> T:
    """Runs an asynchronous test to its end, or fails when it hangs."""

    async def bounded() -> T:
        return await asyncio.wait_for(test, patience_s)

    return asyncio.run(bounded())


class Proxy:
    """Forwards TCP to the server, counts the PONGs coming back, and can cut every connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pongs = 0
        self.pong = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self.server.host, self.server.port)
        self.writers += [writer, up_writer]
        for source, sink, counted in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.create_task(self.forward(source, sink, counted))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
                if counted and b"PONG" in data:
                    async with self.pong:
                        self.pongs += data.count(b"PONG")
                        self.pong.notify_all()
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def wait_for_pongs(self, count: int) -> None:
        async with self.pong:
            await self.pong.wait_for(lambda: self.pongs >= count)

    def cut(self) -> None:
        """Both sides see their connection reset."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@asynccontextmanager
async def proxied(server: Server) -> AsyncIterator[Proxy]:
    proxy = Proxy(server)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        proxy.cut()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)
        await listener.wait_closed()
