"""Large batches of references: one read is one of them while the router keeps up, and what waits
for it when it does not is bounded all the same.

Everything is real but the processes (bench/rig.py), so the test says when the router has its turn.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from bench.rig import Rig
from native import lib

BODY = b"%015d."
FRAME = b"PUB a 16\r\n" + BODY + b"\r\n"
READ = 2000  # messages, less than a recv takes
assert lib.CONNMGR_BATCH_MESSAGES < READ < lib.CONNMGR_LARGE_MESSAGES
WAITING: int = lib.CONNMGR_WAITING_MESSAGES
TURNS_MAX = 10_000


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def frames(first: int, count: int) -> bytes:
    return b"".join(FRAME % n for n in range(first, first + count))


def got(first: int, count: int) -> bytes:
    head = b"MSG a 1 16\r\n"
    return b"".join(head + BODY % n + b"\r\n" for n in range(first, first + count))


class Flood:
    """A client that sends without end, and one that gets it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.reader = rig.open(b"SUB a 1")
        self.sender = rig.open()
        self.sent = self.read = 0
        self.left = b""

    def keep_up(self, rounds: int) -> int:
        """Reads of READ messages, each routed before the next; how many batches they were."""
        before = self.rig.router.stats()["batches"]
        for _ in range(rounds):
            self.rig.send(self.sender, frames(self.sent, READ))
            self.sent += READ
            self.rig.turn_connmgr()
            self.rig.turn_router()
            taken = self.rig.router.stats()["batches"]
            self.rig.drain()
            self.expect(READ)
        assert taken == self.rig.router.stats()["batches"], "no reads but those"
        return taken - before

    def expect(self, count: int) -> None:
        wanted = got(self.read, count)
        assert self.rig.receive(self.reader, len(wanted)) == wanted
        self.read += count

    def push(self) -> None:
        """As much as the socket takes."""
        with contextlib.suppress(BlockingIOError):
            while True:
                if not self.left:
                    self.left = frames(self.sent, READ)
                    self.sent += READ
                done = self.sender.send(self.left, socket.MSG_DONTWAIT)
                self.left = self.left[done:]

    def standstill(self) -> int:
        """Messages that are taken while the router has no turn."""
        counts = self.rig.connmgr.stats
        before = seen = counts()["messages_in"]
        idle = 0
        while idle < 20:
            self.push()
            self.rig.turn_connmgr()
            now = counts()["messages_in"]
            idle = idle + 1 if now == seen else 0
            seen = now
        return seen - before

    def queued(self) -> tuple[int, int]:
        """Messages and batches that the router takes from its queue."""
        counts = self.rig.router.stats
        before, seen = counts(), -1
        while seen != counts()["batches"]:
            seen = counts()["batches"]
            self.rig.turn_router()
        return counts()["messages"] - before["messages"], counts()["batches"] - before["batches"]

    def finish(self) -> None:
        """Everything that was sent arrives, in order."""
        wanted, arrived = got(self.read, self.sent - self.read), b""
        for _ in range(TURNS_MAX):
            if self.left:
                with contextlib.suppress(BlockingIOError):
                    self.left = self.left[self.sender.send(self.left, socket.MSG_DONTWAIT) :]
            self.rig.turn_router()
            self.rig.turn_connmgr()
            arrived += self.rig.peek(self.reader)
            if len(arrived) >= len(wanted):
                break
        assert arrived == wanted


def test_one_read_is_one_batch(rig: Rig) -> None:
    flood = Flood(rig)
    flood.keep_up(3)  # at first it is not known which batches are large
    assert flood.keep_up(5) == 5


@pytest.mark.parametrize("rounds", [0, 4], ids=["at-once", "after-a-while"])
def test_what_waits_is_bounded(rig: Rig, rounds: int) -> None:
    """003-64, 003-65: whether or not large ones are on their way when the router stops."""
    flood = Flood(rig)
    if rounds:
        flood.keep_up(rounds)
    standing = flood.standstill()
    assert standing <= WAITING, "bounded"
    messages, batches = flood.queued()
    assert messages > 1000
    assert not rounds or messages > batches * lib.CONNMGR_BATCH_MESSAGES, "some of them were large"
    flood.finish()
