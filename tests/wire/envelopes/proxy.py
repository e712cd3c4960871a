"""Carries plain clients to a listener whose transport is that of envelope.c.

`python -m tests.wire.envelopes.proxy HOST PORT SEED` prints where it listens, then serves until it
is killed. Each connection is one behind it. An envelope that is not what it has to be is printed,
and ends it with 1: then all of its clients lose their connections.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from tests.wire.envelopes.codec import PLAIN_MAX, BrokenEnvelope, Opener, Sealer

READ_BYTES = 1 << 16


async def to_server(
    client: asyncio.StreamReader, server: asyncio.StreamWriter, chance: random.Random
) -> None:
    """In envelopes of all sizes; what is written at once ends anywhere in one."""
    sealer = Sealer()
    while plain := await client.read(READ_BYTES):
        raw = bytearray()
        while plain:
            size = chance.choice((1, 7, 100, 1000, 4096, PLAIN_MAX, PLAIN_MAX))
            raw += sealer.seal(plain[:size])
            plain = plain[size:]
        cut = chance.randrange(len(raw))
        server.write(raw[:cut])
        await server.drain()
        if chance.random() < 0.1:
            await asyncio.sleep(0.001)
        server.write(raw[cut:])
        await server.drain()
    server.write_eof()


async def to_client(server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
    opener = Opener()
    while raw := await server.read(READ_BYTES):
        client.write(opener.feed(raw))
        await client.drain()
    client.write_eof()


async def carry(
    host: str,
    port: int,
    chance: random.Random,
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    server = await asyncio.open_connection(host, port)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(to_server(client[0], server[1], chance))
            group.create_task(to_client(server[0], client[1]))
    except* BrokenEnvelope as broken:
        print(f"broken: {broken.exceptions}", flush=True)
        os._exit(1)
    except* OSError:  # one side was reset: so is the other
        for writer in (client[1], server[1]):
            writer.transport.abort()
    finally:
        for writer in (client[1], server[1]):
            writer.close()


async def serve(host: str, port: int, seed: int) -> None:
    chance = random.Random(seed)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await carry(host, port, chance, (reader, writer))

    made = await asyncio.start_server(accepted, "127.0.0.1", 0, backlog=1024)
    print(made.sockets[0].getsockname()[1], flush=True)
    await made.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
