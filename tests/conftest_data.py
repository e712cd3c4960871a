"""What the data-path tests share: instances of 1, 2 and 4 connection managers, and a check.

After each test all its connections are closed, and then nothing may be left: no connection in
the table, no message in any arena, no chunk in use but the one that is open.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from clients.stream import Inside, Message, Stream, pub
from conftest import Instance, eventually, start

from midair.config import MIB

ARENA_BYTES = 256 * MIB
CHUNK = 128 * 1024  # of an arena: a larger frame lies along a chain of chunks

CONFIG = f"""
[limits]
max_payload = "64MiB"
max_pending = "1GiB"
write_deadline_s = 600
[connmgr]
arena_bytes = {ARENA_BYTES}
subscriptions = 131072
"""


class Net:
    """An instance and the connections of one test."""

    def __init__(self, instance: Instance, inside: Inside) -> None:
        self.instance = instance
        self.inside = inside
        self.connmgrs = inside.connmgrs
        self.streams: list[Stream] = []

    def open(self, echo: bool = True, receive_buffer: int = 0, headers: bool = True) -> Stream:
        stream = Stream(
            self.instance.host,
            self.instance.port,
            echo=echo,
            headers=headers,
            receive_buffer=receive_buffer,
        )
        self.streams.append(stream)
        return stream

    def spread(self, count: int = 0) -> list[Stream]:
        """At least `count` connections, one of them on each connmgr and no fewer than two.

        The dispatcher chooses; it knows of closed connections after a second, so it may take
        a few more connections until every connmgr has one.
        """
        count = max(count, self.connmgrs, 2)
        by_connmgr: dict[int, list[Stream]] = {}
        for _ in range(1000):
            if len(by_connmgr) == self.connmgrs and sum(map(len, by_connmgr.values())) >= count:
                break
            stream = self.open()
            by_connmgr.setdefault(self.inside.connmgr_of(stream), []).append(stream)
        assert set(by_connmgr) == set(range(self.connmgrs))
        rounds = itertools.zip_longest(*by_connmgr.values())
        return [stream for each in rounds for stream in each if stream is not None][:count]

    def finish(self) -> None:
        """Closes everything; fails if anything is left of it."""
        self.close()
        eventually(lambda: self.inside.connections() == 0, "all connections are ended")
        eventually(lambda: not any(live for live, _ in self.inside.census()), "no message is left")
        # Chunks that another connmgr emptied are taken back by their owner when it looks for
        # several at once, as it does for a large message.
        for stream in self.spread():
            stream.send(pub(b"nobody", bytes(2 * CHUNK)))
            stream.sync()
        self.close()
        eventually(lambda: self.inside.connections() == 0, "all connections are ended")
        eventually(
            lambda: all(live == 0 and busy <= 1 for live, busy in self.inside.census()),
            "no chunk is in use but the open one",
        )

    def close(self) -> None:
        while self.streams:
            self.streams.pop().close()


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"{n}connmgr")
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Instance, Inside]]:
    connmgrs: int = request.param
    instance = start(request.node.nodeid, CONFIG, "--connmgrs", str(connmgrs))
    inside = Inside(instance.name, connmgrs, ARENA_BYTES)
    yield instance, inside
    inside.table.close()
    restarted = [row for row in instance.status()["components"] if row["restarts"]]
    assert instance.stop() == 0
    assert restarted == []
    assert not [line for line in instance.stderr().splitlines() if " info: " not in line]


@pytest.fixture
def net(running: tuple[Instance, Inside]) -> Iterator[Net]:
    net = Net(*running)
    yield net
    net.finish()


def numbers(messages: list[Message]) -> list[int]:
    return [int(message.body) for message in messages]
