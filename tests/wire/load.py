"""One publisher or subscriber process of the load test, driven over stdin and stdout.

    load.py URL publish SUBJECT COUNT     prints "ready", waits for a line, publishes the
                                          numbers 0..COUNT-1, prints COUNT when all are taken
    load.py URL subscribe SUBJECT [QUEUE] prints "ready"; `count` prints how many messages have
                                          come, `finish` prints {subject: [numbers]} and ends

Before it answers, a subscriber makes a round trip on the connection that carries the load, so
asking again is waiting for the load, not for a clock.
"""

from __future__ import annotations

import asyncio
import json
import sys

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

FLUSH_EVERY = 500  # messages; keeps what a publisher has in flight small
PATIENCE_S = 60


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


async def line_from_parent() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def settle(connection: Client) -> None:
    """Everything sent so far is with the server; nats-py's PING may overtake it, so twice."""
    await connection.flush(PATIENCE_S)
    await connection.flush(PATIENCE_S)


async def publish(url: str, subject: str, count: int) -> None:
    connection = await nats.connect(url, allow_reconnect=False)
    answer("ready")
    await line_from_parent()
    filler = b" " + b"x" * 100
    for number in range(count):
        await connection.publish(subject, b"%d" % number + filler)
        if number % FLUSH_EVERY == 0:
            await connection.flush(PATIENCE_S)
    await settle(connection)
    answer(count)
    await connection.close()


async def subscribe(url: str, subject: str, queue: str) -> None:
    numbers: dict[str, list[int]] = {}

    async def on_message(message: Msg) -> None:
        numbers.setdefault(message.subject, []).append(int(message.data.split(b" ", 1)[0]))

    connection = await nats.connect(url, allow_reconnect=False)
    await connection.subscribe(subject, queue=queue, cb=on_message)
    await settle(connection)
    answer("ready")
    while True:
        command = (await line_from_parent()).strip()
        await connection.flush(PATIENCE_S)
        if command == "count":
            answer(sum(map(len, numbers.values())))
            continue
        if command == "finish":
            await connection.drain()
            answer(numbers)
        break


if __name__ == "__main__":
    url, role, subject, *rest = sys.argv[1:]
    if role == "publish":
        asyncio.run(publish(url, subject, int(rest[0])))
    else:
        asyncio.run(subscribe(url, subject, rest[0] if rest else ""))
