"""What the data-path tests share: instances of 1, 2 and 4 connection managers, and a check.

After each test all its connections are closed, and then nothing may be left: no connection in
the table, no message in any arena, no chunk in use but the one that is open.
"""

from __future__ import annotations

import itertools

from midair.client.wire_nats import Message, pub
from midair.config import MIB
from tests.support.instance import Instance, eventually
from tests.support.stream import Inside, Stream

ARENA_BYTES = 256 * MIB
CHUNK = 128 * 1024  # of an arena: a larger frame lies along a chain of chunks

CONFIG = f"""
[limits]
max_payload = "64MiB"
max_pending = "1GiB"
max_subscriptions = 0
write_deadline_s = 600
[connmgr]
arena_bytes = {ARENA_BYTES}
subscriptions = 262144
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


def numbers(messages: list[Message]) -> list[int]:
    return [int(message.body) for message in messages]
