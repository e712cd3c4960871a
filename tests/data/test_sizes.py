"""Messages of every size, from nothing to 64 MiB, through 1, 2 and 4 connection managers."""

from __future__ import annotations

import hashlib
import itertools
import random
from functools import partial

import pytest

from midair.client.wire_nats import Message, hpub, msg, pub
from midair.config import MIB
from tests.support.net import CHUNK, Net, numbers
from tests.support.stream import Stream, Worker, pieces

COPY_MAX = 4096  # a larger body is written from the arena, not copied
BLOCK = 16 * 1024  # of pending output


def boundaries() -> list[int]:
    """Body sizes around every limit inside; frame sizes too, which are a line longer."""
    sizes = {0, 1, 2, 100_000, 200_000, MIB}
    for limit in (COPY_MAX, BLOCK, 2 * BLOCK, 4 * BLOCK, CHUNK, 2 * CHUNK):
        line = len(b"PUB size.00 %d\r\n\r\n" % limit)
        sizes.update(limit + off for off in (-1, 0, 1))
        sizes.update(limit - line + off for off in range(-2, 3))
    return sorted(sizes)


def test_sizes_around_every_limit(net: Net) -> None:
    clients = net.spread(2)
    subscriber, rest = clients[0], [net.open() for _ in range(3)]
    subscriber.sub(b"size.*", b"1")
    subscriber.sync()
    sizes = boundaries()

    def publish(at: int, client: Stream) -> dict[int, bytes]:
        chance = random.Random(at)
        order = sizes[:]
        chance.shuffle(order)
        hashes = {}
        for size in order:
            body = chance.randbytes(size)
            hashes[size] = hashlib.sha256(body).digest()
            frame = pub(b"size.%02d" % at, body) + pub(b"size.%02d" % at, b"small")
            if at == 0:
                client.send(frame)
            else:
                lengths = (chance.choice((1, 7, 4096, 60_000, 200_000)) for _ in itertools.count())
                for piece in pieces(frame, lengths):
                    client.send(piece)
        return hashes

    publishers = [*clients[1:], *rest]
    workers = [Worker(partial(publish, at, client)) for at, client in enumerate(publishers)]
    found = subscriber.take(2 * len(sizes) * len(publishers))
    for at, worker in enumerate(workers):
        hashes = worker.done()
        mine = [m.body for m in found if m.subject == b"size.%02d" % at]
        assert mine[1::2] == [b"small"] * len(sizes)
        assert {len(body): hashlib.sha256(body).digest() for body in mine[::2]} == hashes
        assert [len(body) for body in mine[::2]] == list(hashes)


@pytest.mark.parametrize("size", [16_000_000, 64 * MIB])
def test_huge_messages_several_at_once(net: Net, size: int) -> None:
    clients = net.spread(4)
    readers = clients[:2]
    for reader in readers:
        reader.sub(b"huge.*", b"1")
        reader.sub(b"small", b"2")
        reader.sync()
    publishers = [net.open() for _ in range(3)]
    block = random.Random(size).randbytes(1_000_003)
    bodies = [
        (b"%d" % at + block * (size // len(block) + 1))[:size] for at in range(len(publishers))
    ]

    def publish(at: int) -> None:
        client, chance = publishers[at], random.Random(at)
        lengths = (chance.randrange(1, 3_000_000) for _ in itertools.count())
        for piece in pieces(pub(b"huge.%d" % at, bodies[at]), lengths):
            client.send(piece)

    def gather(client: Stream) -> list[Message]:
        return client.take(len(publishers) + 200)

    senders = [Worker(partial(publish, at)) for at in range(3)]
    receivers = [Worker(partial(gather, reader)) for reader in readers]
    for n in range(200):  # meanwhile
        clients[-1].send(pub(b"small", b"%d" % n))
        if n % 20 == 0:
            clients[-1].sync()
    hashes = {hashlib.sha256(body).digest() for body in bodies}
    for worker in senders:
        worker.done()
    for worker in receivers:
        found: list[Message] = worker.done()
        assert numbers([m for m in found if m.sid == b"2"]) == list(range(200))
        assert {hashlib.sha256(m.body).digest() for m in found if m.sid == b"1"} == hashes


def test_headers_of_every_size(net: Net) -> None:
    clients = net.spread(2)
    sender, receiver = clients[0], clients[1]
    receiver.sub(b"head", b"1")
    receiver.sync()
    expected = []
    for size in (0, 1, COPY_MAX - 50, COPY_MAX, BLOCK, CHUNK - 20, CHUNK, 300_000):
        for length in (1, 3000, CHUNK):
            headers = b"NATS/1.0\r\nK: " + b"v" * length + b"\r\n\r\n"
            body = random.Random(size).randbytes(size)
            sender.send(hpub(b"head", headers, body))
            sizes = (len(headers), len(headers) + size)
            expected.append(b"HMSG head 1 %d %d\r\n" % sizes + headers + body + b"\r\n")
    receiver.expect(b"".join(expected))


def test_two_hundred_thousand_tiny_messages_in_one_go(net: Net) -> None:
    clients = net.spread(2)
    bodies = [(b"%x" % n)[: n % 17].rjust(n % 17, b".") for n in range(200_000)]
    for client in clients:
        client.sub(b"t.*", b"1")
        client.sync()
    data = b"".join(pub(b"t.%d" % (n % 10), body) for n, body in enumerate(bodies))
    publisher = net.open()
    sender = Worker(lambda: publisher.send(data))
    expected = b"".join(msg(b"t.%d" % (n % 10), b"1", body) for n, body in enumerate(bodies))
    readers = [Worker(partial(client.expect, expected)) for client in clients]
    for worker in (sender, *readers):
        worker.done()
