"""Clients whose messages cost much: they cost the others little, and the router never hangs.

Shows 003-71: a client does not take the share of others, in time as in messages. What a message
costs is counted in tests/native/test_bounded.py; here are the processes, with one and two connmgrs.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Callable, Iterator

import pytest

from midair.client.wire_nats import EndedError
from midair.config import MIB
from native import lib
from native.stats import Reader
from tests.support.instance import Instance, eventually
from tests.support.stream import Inside, Stream, Worker

Make = Callable[..., Instance]
CONNMGRS = pytest.mark.parametrize("connmgrs", [1, 2])
ARENA = 64 * MIB
CONFIG = f"""
[limits]
max_pending = "1GiB"
max_subscriptions = 0
write_deadline_s = 600
[connmgr]
arena_bytes = {ARENA}
output_bytes = "512MiB"
[manager]
watchdog_s = 5
"""
SUBSCRIPTIONS = 100_000  # of one client to one subject: a list longer than a ring of batches
LISTS = 20


class Attacked:
    """An instance, and the connections of a test."""

    def __init__(self, instance: Instance, connmgrs: int) -> None:
        self.instance = instance
        self.inside = Inside(instance.name, connmgrs, ARENA)
        self.stats = Reader(instance.runtime, "router")
        self.streams: list[Stream] = []

    def connect(self, subject: bytes = b"") -> Stream:
        """A client that has its INFO, and a PONG for its PING."""
        stream = Stream(self.instance.host, self.instance.port)
        self.streams.append(stream)
        if subject:
            stream.sub(subject, b"1")
        stream.sync()
        return stream

    def many(self) -> Stream:
        """A client with very many subscriptions to one subject."""
        stream = self.connect()
        for at in range(0, SUBSCRIPTIONS, 10_000):
            stream.send(b"".join(b"SUB all %d\r\n" % n for n in range(at, at + 10_000)))
        stream.sync()
        return stream

    def restarts(self) -> int:
        return int(self.instance.components()["router"]["restarts"])

    def totals(self) -> dict[str, int]:
        return self.stats.counts().totals

    def subscriptions(self) -> int:
        return int(self.stats.counts().gauges["subscriptions"])


@pytest.fixture
def attacked(make_midair: Make, connmgrs: int) -> Iterator[Attacked]:
    """Nothing of it is ever found to hang."""
    made = Attacked(make_midair(CONFIG, connmgrs=connmgrs), connmgrs)
    yield made
    for stream in made.streams:
        stream.close()
    made.inside.table.close()
    assert "silent for" not in made.instance.stderr()


def drain(stream: Stream, messages: int) -> None:
    """Exactly so many messages, each to all of the subscriptions in order, and then a PONG."""
    each = b"".join(b"MSG all %d 1\r\nx\r\n" % n for n in range(SUBSCRIPTIONS))
    for _ in range(messages):
        stream.expect(each)
    stream.expect(b"PONG\r\n")


def waiting(stream: Stream) -> int:
    """Messages that have arrived, as far as they have."""
    found = 0
    while select.select([stream.socket], [], [], 0)[0]:
        found += stream.socket.recv(1 << 20).count(b"MSG")
    return found


@CONNMGRS
def test_long_lists_hold_nobody_up(attacked: Attacked, connmgrs: int) -> None:
    """Newcomers of every connmgr are answered before the lists before them are done.

    Whoever listens beside the many gets each message at some point of its list. A newcomer that is
    answered while some have not come was not behind them. If it came too late, it tries again.
    """
    client, beside = attacked.many(), attacked.connect(b"all")
    early: set[int] = set()
    for _ in range(20):
        client.send(b"PUB all 1\r\nx\r\n" * LISTS + b"PING\r\n")
        reader = Worker(lambda: drain(client, LISTS))
        eventually(lambda: select.select([beside.socket], [], [], 0)[0], "the first list")
        newcomers = [attacked.connect() for _ in range(2 * connmgrs)]
        if (seen := waiting(beside)) < LISTS:
            early |= {attacked.inside.connmgr_of(newcomer) for newcomer in newcomers}
        for newcomer in newcomers:
            newcomer.close()
        reader.done()
        while seen < LISTS:
            select.select([beside.socket], [], [])
            seen += waiting(beside)
        if len(early) == connmgrs:
            break
    assert early == set(range(connmgrs))
    assert attacked.restarts() == 0


@CONNMGRS
def test_a_router_that_dies_within_a_list(attacked: Attacked, connmgrs: int) -> None:
    """Every subscription gets every message once, however often; a quiet flow goes on."""
    client, quiet = attacked.many(), attacked.connect(b"quiet")
    for kill in range(3):
        client.send(b"PUB all 1\r\nx\r\n" * LISTS + b"PING\r\n")
        select.select([client.socket], [], [])  # it has begun
        os.kill(attacked.instance.pid("router"), signal.SIGKILL)
        reader = Worker(lambda: drain(client, LISTS))
        quiet.send(b"PUB quiet 1\r\n%d\r\n" % kill)
        assert [message.body for message in quiet.take(1)] == [b"%d" % kill]
        reader.done()
        eventually(lambda want=kill + 1: attacked.restarts() == want, "the router is back")
    attacked.connect().close()


@CONNMGRS
def test_a_client_that_has_very_many_subscriptions_and_goes(
    attacked: Attacked, connmgrs: int
) -> None:
    """What it left to be done is not done for nobody: the router is free for the others."""
    client = attacked.many()
    client.send(b"PUB all 1\r\nx\r\n" * 5000)  # half a billion deliveries
    select.select([client.socket], [], [])
    client.close()
    inside = attacked.inside
    eventually(lambda: attacked.subscriptions() == 0, "its subscriptions are gone")
    eventually(lambda: inside.connections() == 0, "its connection is ended")
    eventually(lambda: not any(live for live, _ in inside.census()), "no message is left")
    assert attacked.totals()["deliveries"] < 5000 * SUBSCRIPTIONS // 10
    assert attacked.restarts() == 0


def subscribe(stream: Stream, patterns: Iterator[bytes]) -> None:
    for n, pattern in enumerate(patterns):
        stream.send(b"SUB %s %d\r\n" % (pattern, n))
    stream.sync()


def forms(tokens: int) -> Iterator[bytes]:
    return (b".".join(it) for it in itertools.product((b"a", b"*"), repeat=tokens))


@CONNMGRS
def test_patterns_of_every_form(attacked: Attacked, connmgrs: int) -> None:
    """Who subscribes to 2^14 of them is told and closed; what one may have costs others little."""
    quiet = attacked.connect(b"*.a.>")
    greedy = attacked.connect()
    with pytest.raises((EndedError, ConnectionError)):
        subscribe(greedy, forms(14))
    said = greedy.to_end()
    assert b"-ERR 'maximum subscriptions exceeded'" in said or not said  # its end may be a reset

    modest = attacked.connect()
    modest.send(b"".join(b"SUB %s.end %d\r\n" % (it, n) for n, it in enumerate(forms(10))))
    modest.sync()
    eventually(lambda: attacked.subscriptions() == 2**10 + 1, "they are there")
    before = attacked.totals()
    messages = 400
    prefix = b"a." * 10
    modest.send(b"".join(b"PUB %s%d 1\r\nx\r\n" % (prefix, n) for n in range(messages)))
    quiet.send(b"PUB b.a.c 1\r\nx\r\n")
    attacked.connect().close()
    modest.sync()
    assert {message.subject for message in quiet.take(messages + 1)} >= {b"b.a.c"}
    routed = before["messages"] + messages + 1
    eventually(lambda: attacked.totals()["messages"] >= routed, "all routed")
    steps = (attacked.totals()["work"] - before["work"]) / lib.INDEX_WORK_STEP
    assert steps < 2 * 2**11 * (messages + 1)
    assert attacked.restarts() == 0
