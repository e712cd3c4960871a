"""A client library as people use it (nats-py), told never to reconnect."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import nats
from nats.aio.msg import Msg

from tests.storm.clients import Orders, say
from tests.storm.wire import PATIENCE_S
from tests.support.promise import BrokenPromise


async def _run(name: str, port: int, seed: int) -> None:
    orders = Orders()
    chance = random.Random(seed)
    errors: list[str] = []
    leaving = False

    async def on_error(error: Exception) -> None:
        errors.append(repr(error))

    async def on_closed() -> None:
        if not leaving:
            errors.append("closed")

    async def on_disconnected() -> None:
        if not leaving:
            errors.append("disconnected")

    async def connect() -> Any:
        return await nats.connect(
            f"nats://127.0.0.1:{port}",
            name=name,
            connect_timeout=int(PATIENCE_S),
            allow_reconnect=False,
            error_cb=on_error,
            closed_cb=on_closed,
            disconnected_cb=on_disconnected,
            ping_interval=int(PATIENCE_S),
            pending_size=64 * 1024 * 1024,
        )

    got: list[bytes] = []
    try:
        publisher, subscriber = await connect(), await connect()
    except Exception as error:
        raise BrokenPromise(f"connecting: {error!r} {errors}") from None

    async def on_message(message: Msg) -> None:
        got.append(message.data)

    async def on_request(message: Msg) -> None:
        await message.respond(message.data[::-1])

    await subscriber.subscribe(f"{name}.s", cb=on_message, pending_bytes_limit=1 << 30)
    await subscriber.subscribe(f"{name}.r", cb=on_request)
    await subscriber.flush(timeout=int(PATIENCE_S))
    asyncio.get_running_loop().add_reader(0, orders.read)
    say("ready", connections=2)
    sent = asked = checked = 0

    def check() -> None:
        nonlocal checked
        if errors:
            raise BrokenPromise("; ".join(errors))
        for body in got[checked:]:
            if body != b"%d" % checked:
                raise BrokenPromise(f"{body[:40]!r} where {checked} was to come")
            checked += 1

    while not orders.stop:
        for _ in range(chance.randint(1, 20)):
            if sent - checked < 2000:
                await publisher.publish(f"{name}.s", b"%d" % sent)
                sent += 1
        body = b"ask %d" % asked
        try:
            answer = await publisher.request(f"{name}.r", body, timeout=PATIENCE_S)
        except Exception as error:
            raise BrokenPromise(f"request {asked}: {error!r} {errors}") from None
        asked += 1
        if answer.data != body[::-1]:
            raise BrokenPromise(f"request {asked} was answered {answer.data[:60]!r}")
        check()
        await asyncio.sleep(chance.expovariate(20.0))
    await publisher.flush(timeout=int(PATIENCE_S))
    for _ in range(int(PATIENCE_S * 50)):
        check()
        if checked == sent:
            break
        await asyncio.sleep(0.02)
    else:
        raise BrokenPromise(f"{sent - checked} of {sent} messages are missing")
    await subscriber.flush(timeout=int(PATIENCE_S))
    check()
    ports = [
        it._transport._io_writer.get_extra_info("sockname")[1] for it in (publisher, subscriber)
    ]
    # One subscription of the publisher is the library's own, for the answers to its requests.
    say("drained", sent=sent + asked, received=checked + asked, ports=ports, subs=3)
    while not orders.close:
        await asyncio.sleep(0.1)
        check()
    if checked != len(got) or checked != sent:
        raise BrokenPromise("messages came twice")
    leaving = True
    await publisher.close()
    await subscriber.close()
    say("closed")


def run(name: str, port: int, seed: int) -> None:
    asyncio.run(_run(name, port, seed))
