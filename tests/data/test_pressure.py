"""Pressure: everything is bounded, nothing accepted is lost, what had to wait goes on by itself.

The argument is in docs/pressure.md; these are the tests it names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import pytest

from midair import names
from midair.client.wire_nats import Message, pub
from midair.config import MIB
from native.stats import Reader
from tests.support.instance import Instance, eventually
from tests.support.stream import Inside, Stream, Worker

Make = Callable[..., Instance]
CHUNKS = 64  # of the arena below


def small_arena(limits: str) -> str:
    return f"[limits]\nmax_payload = 2000000\n{limits}\n[connmgr]\narena_bytes = {8 * MIB}\n"


def connect(instance: Instance, receive_buffer: int = 0) -> Stream:
    return Stream(instance.host, instance.port, receive_buffer=receive_buffer)


def body(sender: int, n: int, size: int) -> bytes:
    head = b"%d %d " % (sender, n)
    return head + b"%c" % (97 + n % 26) * (size - len(head))


@contextlib.contextmanager
def closing(*streams: Stream) -> Iterator[None]:
    """Ends them so that a thread that sends or reads on one wakes up."""
    try:
        yield
    finally:
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.socket.shutdown(socket.SHUT_RDWR)
            stream.close()


# Frames of every kind: many to a chunk, one of a chunk, one to a chunk, along a chain.
SIZES = (200, 5_000, 31_000, 60_000, 300_000, 1_900_000)


def flood(stream: Stream, sender: int, rounds: int) -> None:
    """Sends until it is told that it is too slow, or is done."""
    with contextlib.suppress(ConnectionError):
        for n in range(rounds * len(SIZES)):
            stream.send(pub(b"flood.%d" % sender, body(sender, n, SIZES[n % len(SIZES)])))


def test_everyone_floods_and_nobody_reads(make_midair: Make) -> None:
    """No deadlock: who takes nothing is ended in time, and that makes the room others wait for.

    A client that reads all the while loses nothing of what was accepted.
    """
    instance = make_midair(small_arena('max_pending = "16MiB"\nwrite_deadline_s = 0.5'), connmgrs=2)
    inside = Inside(instance.name, 2, 8 * MIB)
    reader = connect(instance)
    reader.sub(b"flood.*", b"1")
    reader.sync()
    floods = [connect(instance, receive_buffer=4096) for _ in range(40)]
    for stream in floods:
        stream.sub(b"flood.>", b"1")
    seen = [0] * len(floods)

    def check(message: Message) -> None:
        sender, n, _ = message.body.split(b" ", 2)
        at = int(sender)
        assert message.body == body(at, seen[at], SIZES[seen[at] % len(SIZES)]), (sender, n)
        seen[at] += 1

    def read() -> None:
        while (message := reader.message()) is None or message.subject != b"flood.end":
            if message is not None:
                check(message)

    with closing(reader, *floods):
        reading = Worker(read)
        workers = [Worker(partial(flood, floods[at], at, 1000)) for at in range(len(floods))]
        eventually(lambda: inside.connections() == 1, "those that do not read are ended", 120)
        for worker in workers:
            worker.done()
        last = connect(instance)
        last.send(pub(b"flood.end"))
        reading.done()
        last.close()
        assert sum(seen) > len(floods)  # the arena was filled more than once
    eventually(lambda: not any(live for live, _ in inside.census()), "no message is left")
    inside.table.close()


def test_everyone_waits_until_everyone_reads(make_midair: Make) -> None:
    """The arena is full and all senders wait; then all read, and everything goes on by itself."""
    instance = make_midair(small_arena('max_pending = "1GiB"\nwrite_deadline_s = 600'), connmgrs=1)
    inside = Inside(instance.name, 1, 8 * MIB)
    clients = [connect(instance, receive_buffer=65536) for _ in range(6)]
    for client in clients:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        client.sub(b"all.*", b"1")
        client.sync()
    sizes = (300, 6_000, 20_000, 50_000, 110_000, 700_000)
    count = 60

    def send(at: int) -> None:
        for n in range(count):
            clients[at].send(pub(b"all.%d" % at, body(at, n, sizes[(n + at) % len(sizes)])))

    with closing(*clients):
        senders = [Worker(partial(send, at)) for at in range(len(clients))]
        eventually(lambda: inside.census()[0][1] >= CHUNKS - 20, "the arena is full")
        assert all(sender.is_alive() for sender in senders)
        readers = [Worker(partial(client.take, count * len(clients))) for client in clients]
        for reader in readers:
            found = reader.done()
            for at in range(len(clients)):
                mine = [m.body for m in found if m.subject == b"all.%d" % at]
                assert mine == [body(at, n, sizes[(n + at) % len(sizes)]) for n in range(count)]
        for sender in senders:
            sender.done()
    inside.table.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


STILL = """
[limits]
max_pending = "1GiB"
write_deadline_s = 600
[manager]
watchdog_s = 600
"""
STOP_S = 2.0
GROWTH_MAX = 48 * MIB  # rings, queues, and what one read of each connection brings


@pytest.mark.parametrize("leases", [True, False], ids=["flows", "noflows"])
@pytest.mark.parametrize("connmgrs", [1, 2], ids=lambda n: f"{n}connmgr")
def test_a_router_that_stands_still(make_midair: Make, connmgrs: int, leases: bool) -> None:
    """003-65: two seconds of flood to a router that does nothing: clients are not read, what was
    accepted is bounded and not lost, newcomers are accepted; then all goes on, and is fair.

    The reader is in a queue group: so the router is asked about every message, flows or not.
    """
    instance = make_midair(
        f"{STILL}[latency]\nflow_leases = {str(leases).lower()}\n", connmgrs=connmgrs
    )
    reader = connect(instance)
    reader.sub(b"still.*", b"1", b"group")
    reader.sync()
    floods = [connect(instance) for _ in range(20)]
    for stream in floods:
        stream.sync()
    size, block, over = 5000, 20, threading.Event()
    sent = [0] * len(floods)

    def send(at: int) -> None:
        while not over.is_set():
            some = range(sent[at], sent[at] + block)
            floods[at].send(b"".join(pub(b"still.%d" % at, body(at, n, size)) for n in some))
            sent[at] += block
        floods[at].send(pub(b"still.%d" % at, b"end"))

    processes = [psutil.Process(instance.pid(f"connmgr/{n}")) for n in range(connmgrs)]
    shown = [Reader(instance.runtime, names.CONNMGR, n) for n in range(connmgrs)]
    router = instance.pid("router")
    seen, ended = [0] * len(floods), 0

    def resident() -> int:
        return sum(process.memory_info().rss for process in processes)

    def take(count: int) -> None:
        """The next messages, each the next one of its sender."""
        nonlocal ended
        for message in reader.take(count):
            at = int(message.subject[6:])
            if message.body == b"end":
                assert seen[at] == sent[at]
                ended += 1
                continue
            assert message.body == body(at, seen[at], size)
            seen[at] += 1

    with closing(reader, *floods):
        before = resident()
        with stopped(router):
            workers = [Worker(partial(send, at)) for at in range(len(floods))]
            until = time.monotonic() + STOP_S
            newcomers = [instance.connect() for _ in range(10)]  # accepted all the same
            most = 0
            while time.monotonic() < until:
                most = max(most, resident())
                time.sleep(0.01)
            assert most - before < GROWTH_MAX * connmgrs
            eventually(
                lambda: all(it.counts().gauges["reading_stopped"] for it in shown),
                "no client is read",
            )
            accepted = sum(it.counts().totals["messages_in"] for it in shown)
            # What is compared below begins with what waits in the sockets.
            eventually(lambda: min(sent) >= 100, "all have something to say")
        for newcomer in newcomers:
            with newcomer, newcomer.makefile("rb") as stream:
                assert stream.readline().startswith(b"INFO {")
        # Past what had been accepted before, everyone gets the same share of the first rounds. One
        # read brings some 50 messages of one of them.
        take(accepted)
        start = list(seen)
        take(300 * len(floods))
        shares = [seen[at] - start[at] for at in range(len(floods))]
        assert min(shares) * 4 > max(shares), shares
        over.set()
        while ended < len(floods):
            take(1)
        for worker in workers:
            worker.done()
        assert seen == sent
