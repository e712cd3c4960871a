"""What waits for the router: small, whatever clients send, and hand-offs are never part of it.

The router is stopped with SIGSTOP, which stands for one that is slow or away, and the watchdog
leaves it alone. The bounds are those of docs/pressure.md.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from midair import names
from midair.client.wire_nats import msg, pub
from midair.config import MIB
from native import lib
from native.stats import Reader
from tests.support.instance import Instance, eventually
from tests.support.stream import Inside, Stream, Worker

Make = Callable[..., Instance]
DEPTH = 10  # of the queue, as it is by default
# In the ring, in the queue, and the one that the router has. A large one takes the place of two.
BATCHES = lib.CONNMGR_REFS_AHEAD + DEPTH + 1
assert lib.CONNMGR_WAITING_BATCHES == BATCHES
QUANTUM = lib.CONNMGR_RECV_MAX

PATIENT = """
[limits]
max_pending = "1GiB"
write_deadline_s = 600
[manager]
watchdog_s = 600
"""
FLOWS = [
    pytest.param(1, True, id="1connmgr-flows"),
    pytest.param(1, False, id="1connmgr"),
    pytest.param(2, True, id="2connmgr"),
]


def flows(on: bool) -> str:
    return f"[latency]\nflow_leases = {str(on).lower()}\n"


@contextlib.contextmanager
def stopped(instance: Instance, component: str) -> Iterator[None]:
    pid = instance.pid(component)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def together(instance: Instance, inside: Inside, count: int) -> tuple[int, list[Stream]]:
    """Connections of one connmgr, and its number."""
    made = [Stream(instance.host, instance.port) for _ in range(count * inside.connmgrs)]
    for stream in made:
        stream.sync()
    at = inside.connmgr_of(made[0])
    kept = [stream for stream in made if inside.connmgr_of(stream) == at][:count]
    for stream in made:
        if stream not in kept:
            stream.close()
    assert len(kept) == count
    return at, kept


def standstill(shown: Reader) -> int:
    """Waits until no client is read any more; how many messages have come in by then."""
    seen = -1

    def over() -> bool:
        nonlocal seen
        now = shown.counts()
        before, seen = seen, now.totals["messages_in"]
        full = now.gauges["refs_queued"] == now.gauges["refs_depth"]
        return bool(now.gauges["reading_stopped"]) and full and before == seen

    eventually(over, "reading has stopped")
    return seen


@pytest.mark.parametrize("size", [16, 5000])
@pytest.mark.parametrize(("connmgrs", "leases"), FLOWS)
def test_a_quiet_connection_is_behind_little(
    make_midair: Make, connmgrs: int, leases: bool, size: int
) -> None:
    """003-64, 003-65: one connection floods while the router stands still. What is taken from it is
    bounded in messages and in bytes, and so is what comes before the first message of another.

    A queue group: the router is asked about every message, whether or not there are flows.
    """
    instance = make_midair(PATIENT + flows(leases), connmgrs=connmgrs)
    inside = Inside(instance.name, connmgrs, 256 * MIB)
    at, (busy, quiet, reader) = together(instance, inside, 3)
    reader.sub(b"busy", b"1", b"group")
    reader.sub(b"quiet", b"2", b"group")
    reader.sync()
    shown = Reader(instance.runtime, names.CONNMGR, at)
    body = b"%07d." + b"x" * (size - 8)
    count = 100_000 if size == 16 else 3_000  # more than sockets and all of this hold
    busy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # they would hold megabytes
    frame_bytes = len(pub(b"busy", body % 0))

    # Made beforehand: a busy machine shall not make it a trickle.
    blocks = [
        b"".join(pub(b"busy", body % k) for k in range(n, n + 1000)) for n in range(0, count, 1000)
    ]

    def flood() -> None:
        for block in blocks:
            busy.send(block)

    before = standing = shown.counts().totals["messages_in"]
    with stopped(instance, "router"):
        worker = Worker(flood)
        standing = standstill(shown) - before
        quiet.send(pub(b"quiet", b"now"))
    most = min(lib.CONNMGR_WAITING_MESSAGES, BATCHES * (lib.CONNMGR_BATCH_BODIES // size + 1))
    assert 1000 * 16 // size < standing <= most, "what waits for the router"

    behind = seen = 0
    for message in reader.take(count + 1):
        if message.subject == b"quiet":
            behind = seen
            continue
        assert message.body == body % seen, "nothing lost, in order"
        seen += 1
    assert seen == count
    # Both are readable when the router goes on; the quiet one is read in the next pass. What was
    # read of the busy one, and could not be taken, comes first.
    assert 0 < behind <= most + 3 * QUANTUM // frame_bytes
    worker.done()
    for stream in (busy, quiet, reader):
        stream.close()
    inside.table.close()


# ---- hand-offs ----------------------------------------------------------------------------------


def allow_descriptors(count: int) -> None:
    """As many as the hard limit allows; skips the test if these are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"{count} descriptors are needed, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


SHALLOW = "[queues]\ndepth = 2\n"  # so that fewer connections fill it
# Openings of which all that could be in the ring and in such a queue would be full, of one connmgr.
FULL = (64 + 2) * 204 // 8


@pytest.mark.parametrize(
    ("connmgrs", "count"),
    [
        pytest.param(1, 2500, id="1connmgr"),
        pytest.param(2, 5000, id="2connmgr"),
        pytest.param(1, 10_000, id="1connmgr-10000", marks=pytest.mark.slow),
        pytest.param(2, 10_000, id="2connmgr-10000", marks=pytest.mark.slow),
    ],
)
def test_hand_offs_do_not_stop_reading(make_midair: Make, connmgrs: int, count: int) -> None:
    """003-69: thousands connect while the router is away. Who is connected is read all the same,
    and a flow goes on; all that came are greeted afterwards, and those that left are forgotten."""
    assert count // connmgrs > FULL
    allow_descriptors(count + 500)
    instance = make_midair(PATIENT + SHALLOW, connmgrs=connmgrs)
    inside = Inside(instance.name, connmgrs, 256 * MIB)
    shown = [Reader(instance.runtime, names.CONNMGR, n) for n in range(connmgrs)]
    _, (sender, reader) = together(instance, inside, 2)
    reader.sub(b"s", b"1")
    reader.sync()
    sender.send(pub(b"s", b"first"))
    reader.expect(msg(b"s", b"1", b"first"))
    came: list[socket.socket] = []
    said = 0

    def come() -> None:
        while len(came) < count:
            came.append(instance.connect())

    def read_so_far() -> int:
        return sum(it.counts().totals["messages_in"] for it in shown)

    with stopped(instance, "router"):
        worker = Worker(come)
        while worker.is_alive() or inside.connections() < count + 2:
            sender.send(pub(b"s", b"%d" % said))
            if connmgrs == 1:  # with several, no decision is repeated
                reader.expect(msg(b"s", b"1", b"%d" % said))
            else:
                eventually(lambda sent=said + 2: read_so_far() == sent, "the sender is read")
            said += 1
        worker.done()
        eventually(lambda: read_so_far() == said + 1, "everything said was read")
        assert not any(it.counts().gauges["reading_stopped"] for it in shown)
        gone = came[: count // 2]
        del came[: count // 2]
        for sock in gone:
            sock.close()
    if connmgrs > 1:
        for n in range(said):
            reader.expect(msg(b"s", b"1", b"%d" % n))
    for sock in came:
        with sock, sock.makefile("rb") as stream:
            assert stream.readline().startswith(b"INFO {")
    eventually(lambda: inside.connections() == 2, "those that left are forgotten")
    sender.send(pub(b"s", b"last"))
    reader.expect(msg(b"s", b"1", b"last"))
    for stream in (sender, reader):
        stream.close()
    inside.table.close()


# ---- shares -------------------------------------------------------------------------------------

SHARE_BODY = 1000
SHARE_MESSAGES = 100_000  # compared; a pass brings some 60


@pytest.mark.parametrize("spread", [(1, 2), (1, 4)], ids=["1+2", "1+4"])
def test_shares_do_not_depend_on_the_connmgr(make_midair: Make, spread: tuple[int, int]) -> None:
    """003-61, 003-71: busy connections, one on the first connmgr and more on the second, publish to
    somebody who listens. Every one gets the same share, not every connmgr."""
    instance = make_midair(PATIENT, connmgrs=2)
    inside = Inside(instance.name, 2, 256 * MIB)
    made = [Stream(instance.host, instance.port) for _ in range(2 * max(spread) + 2)]
    for stream in made:
        stream.sync()
    by_connmgr = [[s for s in made if inside.connmgr_of(s) == n] for n in range(2)]
    busy = by_connmgr[0][: spread[0]] + by_connmgr[1][: spread[1]]
    reader = by_connmgr[1][spread[1]]  # whom it serves costs the second one time, too
    reader.sub(b"share.*", b"1")
    reader.sync()
    over = threading.Event()

    def flood(at: int) -> None:
        block = pub(b"share.%d" % at, b"x" * SHARE_BODY) * 200
        with contextlib.suppress(OSError):
            while not over.is_set():
                busy[at].send(block)

    heads = [b"MSG share.%d 1 " % at for at in range(len(busy))]
    counts = [0] * len(busy)
    rest = b""

    def read_on() -> None:
        nonlocal rest
        data = rest + reader.socket.recv(1 << 20)
        for at, head in enumerate(heads):
            counts[at] += data.count(head)
        rest = data[-len(heads[0]) + 1 :]

    workers = [Worker(partial(flood, at)) for at in range(len(busy))]
    while min(counts) < 2000:  # all are at it
        read_on()
    start = list(counts)
    while sum(counts) - sum(start) < SHARE_MESSAGES:
        read_on()
    shares = [now - then for now, then in zip(counts, start, strict=True)]
    over.set()
    for stream in made:
        with contextlib.suppress(OSError):
            stream.socket.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        worker.done()
    for stream in made:
        stream.close()
    inside.table.close()
    alone, others = shares[0], shares[1:]
    assert max(others) < 1.5 * min(others), shares
    # By connmgr it would get as much as all of the others together, or more. If its connmgr does
    # not get its time on a busy machine it may get less: who does not come is not waited for.
    assert alone < 1.5 * min(others), shares
    assert 4 * alone > max(others), shares
