"""A strict client over asyncio: whatever is not expected breaks a promise."""

from __future__ import annotations

from typing import Self

from midair.client.wire_nats import (
    CONNECT,
    AsyncConnection,
    Frame,
    FrameError,
    Message,
    RefusedError,
)
from tests.support.promise import BrokenPromise


class Client(AsyncConnection):
    """One connection. `next()` gives the next message; PINGs are answered on the way."""

    @classmethod
    async def open(cls, host: str, port: int, hello: bytes = CONNECT) -> Self:
        try:
            return await super().open(host, port, hello)
        except RefusedError as error:
            raise BrokenPromise(f"instead of INFO: {error}") from None

    async def frame(self) -> Frame:
        try:
            return await super().frame()
        except ConnectionError as error:
            left = self.reader.waiting
            raise BrokenPromise(f"connection dropped, {left} bytes unparsed: {error!r}") from None
        except FrameError as error:
            raise BrokenPromise(f"corrupted stream: {error}") from None

    async def plain(self) -> Message:
        """The next message, which has neither headers nor a reply subject."""
        message = await self.next()
        if message.headers or message.reply:
            raise BrokenPromise(f"not what was sent: {message!r}")
        return message

    async def send(self, data: bytes) -> None:
        try:
            await super().send(data)
        except ConnectionError as error:
            raise BrokenPromise(f"connection dropped while writing: {error!r}") from None
