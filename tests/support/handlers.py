"""Handlers of requests, for clients of `midair.client` that serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from midair.client.api import Request


class Held:
    """A handler that answers when it is told to."""

    def __init__(self, name: str = "held") -> None:
        self.name = name
        self.requests: asyncio.Queue[Request] = asyncio.Queue()

    async def __call__(self, request: Request) -> None:
        self.requests.put_nowait(request)

    async def answer(self) -> None:
        await (await self.requests.get()).reply(self.name.encode())


def named(name: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> bytes:
        return name.encode()

    return answer
