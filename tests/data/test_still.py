"""A connmgr that hangs: who publishes to its clients waits, nobody else does, and nothing is lost.

One of two connmgrs is stopped with SIGSTOP, and the watchdog leaves it alone. See
docs/decisions/0022-ports-that-stand-still.md.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from midair import names
from midair.client.wire_nats import msg, pub
from midair.config import MIB
from native.stats import Reader
from tests.support.instance import Instance, eventually
from tests.support.stream import Inside, Stream, Worker

Make = Callable[..., Instance]
CONFIG = """
[limits]
max_pending = "1GiB"
write_deadline_s = 600
[manager]
watchdog_s = 600
restart_limit = 100
"""


def body(number: int) -> bytes:
    """Not a run: every other one is longer, so each has a reference and an order of its own."""
    return b"%08d" % number + b"x" * (500 + number % 2)


@pytest.mark.parametrize("killed", ["", "itself", "router", "source"])
def test_nobody_else_waits_for_a_connmgr_that_hangs(make_midair: Make, killed: str) -> None:
    """003-63: its ring is full. Messages that do not concern it go on: to several, to members of
    a queue group that are elsewhere. Then it goes on, or dies, or another does."""
    instance = make_midair(CONFIG, connmgrs=2)
    inside = Inside(instance.name, 2, 256 * MIB)
    made = [Stream(instance.host, instance.port) for _ in range(10)]
    for stream in made:
        stream.sync()
    at = {n: [s for s in made if inside.connmgr_of(s) == n] for n in range(2)}
    busy, sender, here, there = at[0][:4]
    away = at[1][0]
    away.sub(b"away", b"1")
    away.sub(b"work", b"2", b"group")
    away.sync()
    for stream in (here, there):
        stream.sub(b"both", b"1")
        stream.sync()
    here.sub(b"work", b"2", b"group")
    here.sync()
    over, sent = threading.Event(), 0

    def flood() -> None:
        nonlocal sent
        while not over.is_set():
            busy.send(b"".join(pub(b"away", body(n)) for n in range(sent, sent + 500)))
            sent += 500
        busy.send(pub(b"away", b"end"))

    shown = Reader(instance.runtime, names.CONNMGR, 0)
    hung = instance.pid("connmgr/1")
    os.kill(hung, signal.SIGSTOP)
    try:
        worker = Worker(flood)
        eventually(lambda: shown.counts().totals["held"], "its publisher has to wait")
        for n in range(1000):
            number = b"%d" % n
            sender.send(pub(b"both", number))
            here.expect(msg(b"both", b"1", number))
            there.expect(msg(b"both", b"1", number))
            sender.send(pub(b"work", number))
            here.expect(msg(b"work", b"2", number))
        assert shown.counts().gauges["reading_stopped"] == 0
        held = sent
        for part in {"router": ["router"], "source": ["connmgr/0"], "itself": ["connmgr/1"]}.get(
            killed, []
        ):
            os.kill(instance.pid(part), signal.SIGKILL)
        sender.send(pub(b"both", b"after"))
        here.expect(msg(b"both", b"1", b"after"))
        there.expect(msg(b"both", b"1", b"after"))
    finally:
        if killed != "itself":
            os.kill(hung, signal.SIGCONT)
    for n in range(held + 5000):  # it goes on
        away.expect(msg(b"away", b"1", body(n)))
    over.set()
    n = held + 5000
    while (last := away.take(1)[0].body) != b"end":
        assert last == body(n)
        n += 1
    worker.done()
    assert n == sent
    for stream in made:
        stream.close()
    inside.table.close()
