"""Clients that use the messaging modes (docs/modes.md), and check what each mode promises.

What they do is that of the crash tests (tests/crash/modes.py): requests to one of a group and to
all, with and without an answer; sessions; responders and requesters that leave in the middle; a
name that is taken, called, watched and given up. Whatever is killed: a request is asked once, each
answer comes once and in order, and each end is told once, to whoever waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from midair.client.wire_nats import CONNECT
from tests.crash import modes
from tests.crash.client import Client
from tests.crash.load import Load
from tests.storm.clients import Orders, say
from tests.storm.wire import PATIENCE_S
from tests.support.promise import BrokenPromise

ROLES: dict[str, Callable[[Load], Awaitable[None]]] = {
    "asks": modes.requests,  # semaphore, fanout, deadlines, nobody there
    "sessions": modes.sessions,
    "comings": modes.comings,
    "names": modes.names,  # ipc, presence
}
ROUNDS_A_SECOND = 20.0  # of one client, at most: there are others


class Paced(Load):
    """Load that leaves room for others, and closes what it opened."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__("127.0.0.1", port, seed)
        self.clients: list[Client] = []
        self.at_work = asyncio.Event()

    async def open(self, hello: bytes = CONNECT) -> Client:
        self.clients = [client for client in self.clients if not client.writer.is_closing()]
        self.clients.append(await super().open(hello))
        return self.clients[-1]

    async def pause(self) -> None:
        await asyncio.sleep(self.random.expovariate(ROUNDS_A_SECOND))

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n
        self.at_work.set()


async def _run(kind: str, port: int, seed: int) -> None:
    orders = Orders()
    load = Paced(port, seed)

    def obey() -> None:
        orders.read()
        if orders.stop:
            load.stopping.set()

    asyncio.get_running_loop().add_reader(0, obey)
    work = asyncio.ensure_future(ROLES[kind](load))
    ready = asyncio.ensure_future(load.at_work.wait())
    await asyncio.wait({work, ready}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        say("ready", connections=len(load.clients))
    await work
    for client in load.clients:
        await client.close()
    done = sum(load.counts.values())
    # They have closed what they had: there is nothing that has to be there.
    say("drained", sent=done, received=done, modes=load.counts, ports=[], subs=0)
    while not orders.close:
        await asyncio.sleep(0.1)
    say("closed")


def run(kind: str, port: int, seed: int) -> None:
    modes.PATIENCE_S = PATIENCE_S  # a storm is harder on its clients than one kill
    try:
        asyncio.run(_run(kind, port, seed))
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, BrokenPromise):
            raise error from None
        raise
