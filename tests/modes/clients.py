"""Clients of the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from midair.client.api import Client, connect
from tests.support.instance import Instance


@asynccontextmanager
async def clients(server: Instance, count: int) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(await connect(server.address)) for _ in range(count)
        ]
        yield made
