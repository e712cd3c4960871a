"""A request, a session, a fanout and a name in the middle, while parts of the server are replaced.

Method: clients are processes of their own (`midair reply`, tests/crash/modes.py) or connections of
this one. Each mode is brought to a point where something is outstanding, then the router, the
connection managers, the dispatcher, or all at once, are killed with SIGKILL or upgraded, and it
goes on as if nothing had happened. Shows rules R5 and R6 of native/README.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import psutil
import pytest

from midair import names
from midair.client.api import (
    Client,
    ExpiredError,
    Gone,
    GoneError,
    NameTakenError,
    address,
    connect,
)
from midair.process.runtime import ACTIVE, Runtime
from tests.support.handlers import Held, named
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli, eventually, start
from tests.support.server import run

CONNMGRS = 2
CONFIG = """
[manager]
restart_limit = 100000
"""
PARTS = {
    "router": ["router"],
    "connmgrs": [f"connmgr/{n}" for n in range(CONNMGRS)],
    "dispatcher": ["dispatcher"],
    "all": ["router", "dispatcher", *(f"connmgr/{n}" for n in range(CONNMGRS))],
}
Strike = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Instance]:
    instance = start(request.node.nodeid, CONFIG, "--connmgrs", str(CONNMGRS))
    yield instance
    done = cli("fsck", "--name", instance.name)
    assert done.returncode == 0, done.stdout
    assert instance.stop() == 0


def active(instance: Instance) -> dict[str, int]:
    """Component -> pid of those at work."""
    return {
        names.component(it.role, it.index): it.pid
        for it in Runtime.open(instance.name).states()
        if it.state == ACTIVE and psutil.pid_exists(it.pid)
    }


def kill(instance: Instance, parts: list[str]) -> None:
    before = eventually(
        lambda: found if set(parts) <= set(found := active(instance)) else None, "all at work"
    )
    for part in parts:
        os.kill(before[part], signal.SIGKILL)

    def replaced() -> bool:
        now = active(instance)
        return all(now.get(part, before[part]) != before[part] for part in parts)

    eventually(replaced, f"{parts} work again\n{instance.stderr()[-2000:]}")


def upgrade(instance: Instance) -> None:
    done = cli("upgrade", "all", "--name", instance.name, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["kill router", "kill connmgrs", "kill dispatcher", "kill all", "upgrade"])
def strike(request: pytest.FixtureRequest, server: Instance) -> Strike:
    verb, _, what = request.param.partition(" ")

    async def now() -> None:
        if verb == "upgrade":
            await asyncio.to_thread(upgrade, server)
        else:
            await asyncio.to_thread(kill, server, PARTS[what])

    return now


async def several(server: Instance, stack: AsyncExitStack, count: int) -> list[Client]:
    made = [await connect(server.address, allow_reconnect=False) for _ in range(count)]
    for client in made:
        await stack.enter_async_context(client)
    return made


def test_broadcast(server: Instance, strike: Strike) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            one, two, sender = await several(server, stack, 3)
            heard = [await it.nats.subscribe("news") for it in (one, two)]
            await one.flush()
            await two.flush()
            for at in range(200):
                await sender.publish("news", b"%d" % at)
                if at == 100:
                    await strike()
            for subscription in heard:
                got = [int((await subscription.next_msg(PATIENCE_S)).data) for _ in range(200)]
                assert got == list(range(200))

    run(test(), 90)


def test_semaphore(server: Instance, strike: Strike) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            client, worker, busy = await several(server, stack, 3)
            handler, idle = Held("worker"), Held("idle")
            await worker.serve("work", handler, queue="group")
            await worker.flush()
            answer = asyncio.create_task(client.ask("work", b"x"))
            request = await handler.requests.get()
            await busy.serve("work", idle, queue="group")
            await busy.flush()
            await strike()
            # The new router still knows that the first one is busy.
            others = [asyncio.create_task(client.ask("work", b"y"))]
            await idle.answer()
            assert await others[0] == b"idle"
            await request.more(b"almost")
            await strike()
            await request.reply(b"done")
            assert await answer == b"done"
            assert handler.requests.empty()

    run(test(), 90)


def test_deadline(server: Instance, strike: Strike) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            client, worker = await several(server, stack, 2)
            handler = Held()
            await worker.serve("slow", handler)
            await worker.flush()
            answer = asyncio.create_task(client.ask("slow", b"x", deadline_s=0.3))
            await handler.requests.get()
            await strike()
            with pytest.raises(ExpiredError):
                await answer

    run(test(), 90)


def test_session(server: Instance, strike: Strike) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            client, *workers = await several(server, stack, 4)
            for at, worker in enumerate(workers):
                await worker.serve("talk", named(str(at)), queue="group")
                await worker.flush()
            sessions = [client.session("talk") for _ in range(3)]
            who = [await session.request(b"hello") for session in sessions]
            assert sorted(who) == [b"0", b"1", b"2"]
            for _ in range(2):
                await strike()
                assert [await session.request(b"still?") for session in sessions] == who
            await workers[int(who[0])].close()
            with pytest.raises(GoneError):
                await sessions[0].receive()
            assert [await session.request(b"still?") for session in sessions[1:]] == who[1:]
            for session in sessions:
                await session.end()

    run(test(), 90)


def test_fanout(server: Instance, strike: Strike) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            client, *others = await several(server, stack, 4)
            handlers = [Held(str(at)) for at in range(3)]
            for other, handler in zip(others, handlers, strict=True):
                await other.serve("all", handler)
                await other.flush()
            replies = await client.fanout("all", b"x")
            assert replies.expected == 3
            requests = [await handler.requests.get() for handler in handlers]
            await requests[0].reply(b"0")
            await strike()
            await requests[1].reply(b"1")
            number = others[2].nats.client_id
            await others[2].close()
            got = [it async for it in replies]
            assert got[0] == b"0"
            assert {*got} == {b"0", b"1", Gone(number or 0, "")}
            assert len(got) == 3

    run(test(), 90)


def test_ipc(server: Instance, strike: Strike) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            (client,) = await several(server, stack, 1)
            watched = await client.watch("tool.*")
            tool = await connect(server.address, type="tool", instance="one", allow_reconnect=False)
            await tool.listen(named("tool"))
            await tool.flush()
            await strike()
            assert await client.ask(address("tool", "one"), b"x") == b"tool"
            with pytest.raises(NameTakenError):
                await connect(server.address, type="tool", instance="one")
            assert [it.instance for it in await client.clients()] == ["one"]
            await tool.close()
            assert [(await anext(watched)).event for _ in range(2)] == ["up", "down"]

    run(test(), 90)


# ---- every mode at once, by processes of their own -----------------------------------------------

ROLES = ("requests", "sessions", "comings", "names", "silent")


def test_all_modes_under_load(server: Instance, strike: Strike) -> None:
    where = (server.host, str(server.port))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.crash.load", role, *where, str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, role in enumerate(ROLES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
        for _ in range(4):
            run(strike(), 90)
            assert [it.poll() for it in processes] == [None] * len(ROLES)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            out, _ = process.communicate(timeout=90)
            report = json.loads(out.splitlines()[-1])
            assert process.returncode == 0, out
            assert len(report) > 1, f"did nothing: {report}"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_commands_do_not_notice(server: Instance, strike: Strike) -> None:
    """A session between two commands: `midair req` keeps it open while parts are replaced."""
    at = ("--server", server.address)
    responder = subprocess.Popen(
        [sys.executable, "-m", "midair", "reply", *at, "basket", "--queue", "shop"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    requester = subprocess.Popen(
        [sys.executable, "-m", "midair", "req", *at, "basket", "-", "--mode", "session"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert responder.stderr is not None
        assert b"Ctrl-C ends" in responder.stderr.readline()
        run(strike(), 90)
        out, _ = requester.communicate(b"one\ntwo\nthree\n", timeout=PATIENCE_S)
        assert (requester.returncode, out) == (0, b"one\ntwo\nthree\n")
    finally:
        for process in (responder, requester):
            process.kill()
            process.communicate()
