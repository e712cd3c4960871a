"""Rounds: the router waits for a busy connmgr that is behind, and not for one that is not.

The router is real, over real queues. The two connmgrs are the test, which says in the head of each
batch how far a sender has come. What the router has taken is what is no longer in the queue.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from midair.process.runtime import Runtime
from native import ffi, lib
from native.router import Router, open_routing
from tests.support.instance import eventually
from tests.support.queue import Queue

AHEAD_MAX = 8  # passes a busy connmgr may be ahead of another
HEAD = struct.Struct("<QIHBBQQ")


class Sender:
    """What a connmgr says about itself: batches without references."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.queue = Queue()
        self.sent = 0

    def say(self, passes: int, more: bool) -> None:
        self.sent += 1
        rounds = passes << 2 | more << 1 | lib.BATCH_ROUND_ENDS
        version = lib.BATCH_VERSION
        head = HEAD.pack(self.sent, HEAD.size, rounds, self.index, version, 0, 0)
        assert len(head) == ffi.offsetof("struct batch", "records")
        self.queue.queue.send(head)


class Two:
    """A router, and two connmgrs that never were."""

    def __init__(self, runtime: Runtime) -> None:
        self.slow, self.fast = Sender(0), Sender(1)
        self.orders = [Queue(), Queue()]
        self.router = Router(
            open_routing(runtime, 2, 16, 1024),
            2,
            1024,
            0,
            False,
            refs=[self.slow.queue.fd, self.fast.queue.fd],
            orders=[queue.fd for queue in self.orders],
        )
        self.router.start()

    def taken(self) -> int:
        """Batches of the fast one that the router has taken, after its next turn."""
        self.router.turn(1)
        return self.fast.sent - self.fast.queue.length


@pytest.fixture
def two(place: Runtime) -> Iterator[Two]:
    made = Two(place)
    yield made
    for queue in (made.slow.queue, made.fast.queue, *made.orders):
        queue.queue.close()


def test_who_is_ahead_waits_for_who_is_busy(two: Two) -> None:
    two.slow.say(0, more=True)
    two.router.turn(1)
    for _ in range(5):
        two.fast.say(4, more=True)
    # 4 and 8 passes are allowed; the third batch brings it to 12, and that is seen after it.
    assert two.taken() == 3
    assert two.taken() == 3
    two.slow.say(AHEAD_MAX, more=True)
    two.router.turn(1)
    assert two.taken() == 5


def test_nobody_waits_for_who_says_it_has_nothing_more(two: Two) -> None:
    two.slow.say(0, more=True)
    two.router.turn(1)
    for _ in range(5):
        two.fast.say(9, more=True)
    assert two.taken() == 1
    two.slow.say(0, more=False)
    two.router.turn(1)
    assert two.taken() == 5


def test_who_was_idle_has_saved_nothing_up(two: Two) -> None:
    two.fast.say(1000, more=True)
    assert two.taken() == 1
    two.slow.say(0, more=True)
    two.router.turn(1)
    two.fast.say(AHEAD_MAX, more=True)
    two.fast.say(1, more=True)
    two.fast.say(1, more=True)
    assert two.taken() == 3  # the slow one begins where the fast one is, not a thousand behind
    two.fast.say(1, more=True)
    assert two.taken() == 3


def test_who_does_not_come_is_not_waited_for(two: Two) -> None:
    two.slow.say(0, more=True)
    two.router.turn(1)
    for _ in range(5):
        two.fast.say(9, more=True)
    assert two.taken() == 1
    eventually(lambda: two.taken() == 5, "the router gives up waiting")
