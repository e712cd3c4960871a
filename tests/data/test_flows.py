"""Flows of a running instance: they go past the router, and only where they may."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from midair import names
from midair.client.wire_nats import msg, pub
from native.stats import Reader
from tests.support.instance import Instance, eventually
from tests.support.stream import Stream

Make = Callable[..., Instance]
OFF = "[latency]\nflow_leases = false\n"


def repeated(midair: Instance) -> int:
    """As of the last time the connmgr said so, a few times a second."""
    count: int = Reader(midair.runtime, names.CONNMGR, 0).counts().totals["repeated"]
    return count


def await_messages(midair: Instance, count: int) -> int:
    """Until so many have come in; how many of them were repeated."""
    reader = Reader(midair.runtime, names.CONNMGR, 0)
    eventually(lambda: reader.counts().totals["messages_in"] == count, f"{count} messages")
    return repeated(midair)


@contextlib.contextmanager
def stopped(midair: Instance, component: str) -> Iterator[None]:
    pid = midair.pid(component)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def midair(make_midair: Make) -> Instance:
    return make_midair(connmgrs=1)


@contextlib.contextmanager
def streams(midair: Instance, count: int) -> Iterator[list[Stream]]:
    with contextlib.ExitStack() as stack:
        found = [Stream(midair.host, midair.port) for _ in range(count)]
        for stream in found:
            stack.callback(stream.close)
        yield found


def say(sender: Stream, number: int, *readers: Stream) -> None:
    """A message that the readers get, each before the next is sent."""
    sender.send(pub(b"s", b"%d" % number))
    for reader in readers:
        reader.expect(msg(b"s", b"1", b"%d" % number))


def test_a_flow_does_not_notice_that_the_router_is_away(midair: Instance) -> None:
    with streams(midair, 3) as (sender, reader, late):
        reader.sub(b"s", b"1")
        reader.sync()
        late.sync()
        say(sender, 0, reader)
        with stopped(midair, "router"):
            for number in range(1, 1000):
                say(sender, number, reader)
            # What changes something waits for it, and so does what comes after that.
            late.send(b"SUB s 1\r\nPING\r\n")
            eventually(lambda: _refs_waiting(midair), "the router has something to do")
            sender.send(pub(b"s", b"1000"))
        late.expect(b"PONG\r\n" + msg(b"s", b"1", b"1000"))
        reader.expect(msg(b"s", b"1", b"1000"))
        assert await_messages(midair, 1001) == 999


def _refs_waiting(midair: Instance) -> int:
    count: int = Reader(midair.runtime, names.CONNMGR, 0).counts().gauges["refs_queued"]
    return count


@pytest.mark.parametrize("component", ["router", "connmgr/0"])
def test_a_flow_begins_again_after_a_death(midair: Instance, component: str) -> None:
    with streams(midair, 2) as (sender, reader):
        reader.sub(b"s", b"1")
        reader.sync()
        numbers = itertools.count()

        def said_again() -> bool:
            for _ in range(100):
                say(sender, next(numbers), reader)
            return repeated(midair) > before

        before = 0
        for _ in range(3):
            eventually(said_again, "messages are repeated")
            os.kill(midair.pid(component), signal.SIGKILL)
            before = repeated(midair) + 100
        eventually(said_again, "messages are repeated")


@pytest.mark.parametrize(("config", "connmgrs"), [(OFF, 1), ("", 2)], ids=["off", "2connmgr"])
def test_nothing_is_repeated(make_midair: Make, config: str, connmgrs: int) -> None:
    midair = make_midair(config=config, connmgrs=connmgrs)
    with streams(midair, 4) as (*senders, reader):
        reader.sub(b"s", b"1")
        reader.sync()
        for number in range(60):
            say(senders[number % 3], number, reader)
        readers = [Reader(midair.runtime, names.CONNMGR, n) for n in range(connmgrs)]
        totals = eventually(
            lambda: (
                (now := [it.counts().totals for it in readers])
                and sum(it["messages_in"] for it in now) == 60
                and now
            ),
            "all are counted",
        )
        assert [it["repeated"] for it in totals] == [0] * connmgrs


def test_a_consumer_that_is_slow_is_treated_as_such(make_midair: Make) -> None:
    """What waits for it is bounded, whoever decided that it gets it."""
    midair = make_midair(config='[limits]\nmax_pending = "1MiB"\n', connmgrs=1)
    with streams(midair, 3) as (sender, reader, slow):
        for stream in (reader, slow):
            stream.sub(b"s", b"1")
            stream.sync()
        body = b"x" * 4000
        for _ in range(5000):  # 20 MB, more than the kernel keeps for one that does not read
            sender.send(pub(b"s", body))
            reader.expect(msg(b"s", b"1", body))
        assert await_messages(midair, 5000) > 100
        seen = slow.to_end()
        assert seen.endswith(b"-ERR 'Slow Consumer'\r\n")
        assert seen.count(b"MSG s 1 4000\r\n") < 5000
