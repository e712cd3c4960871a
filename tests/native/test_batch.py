"""Rings, inboxes and a real POSIX queue: every committed record is processed once, in order.

A state machine plays a sender and a receiver that can be killed between any two of their
stores, with the queue full or not; then two real processes are killed while they work.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from native import ffi, lib
from tests.support.instance import eventually
from tests.support.queue import Queue

RING_BYTES = ffi.sizeof("struct batch_ring")
INBOX_BYTES = ffi.sizeof("struct batch_inbox")
LOG_BYTES = ffi.sizeof("struct redo_log")


@pytest.fixture(scope="module")
def the_queue() -> Iterator[Queue]:
    queue = Queue()
    QueueMachine.queue = queue
    yield queue
    queue.queue.close()


@pytest.fixture
def queue(the_queue: Queue) -> Queue:
    the_queue.empty()
    return the_queue


def record(number: int, size: int) -> bytes:
    """A record of `size` bytes that says which one it is in every byte."""
    head = number.to_bytes(4, "little") + size.to_bytes(4, "little")
    return head + bytes([number % 251]) * (size - 8)


class Sender:
    """A ring, a redo log, and one word of its own: how many records were committed."""

    BYTES = LOG_BYTES + RING_BYTES + 8

    def __init__(self, memory: Any, queue: int, fresh: bool) -> None:
        self.memory = memory  # casts do not keep it alive
        self.base = ffi.cast("char *", memory)
        self.redo = ffi.new("struct redo *")
        self.redo.log = ffi.cast("struct redo_log *", self.base)
        self.redo.base = self.base
        self.ring = ffi.cast("struct batch_ring *", self.base + LOG_BYTES)
        self.sent = ffi.cast("uint64_t *", self.ring) + 1
        self.committed = ffi.cast("uint64_t *", self.base + LOG_BYTES + RING_BYTES)
        if fresh:
            lib.batch_ring_format(self.ring)
        lib.redo_recover(self.redo)
        self.out = ffi.new("struct batch_out *")
        lib.batch_out_open(self.out, self.ring, queue, 7)
        self.appended = int(self.committed[0])

    def append(self, size: int) -> bool:
        at = lib.batch_out_append(self.out, size, 1)
        if at == ffi.NULL:
            return False
        ffi.memmove(at, record(self.appended, size), size)
        self.appended += 1
        return True

    def put(self) -> None:
        lib.batch_out_put(self.out, self.redo)
        lib.redo_put(self.redo, self.committed, self.appended)

    def commit(self) -> None:
        self.put()
        lib.redo_commit(self.redo)

    def send(self, flush: bool) -> int:
        return int(lib.batch_out_send(self.out, flush, 2))


class Receiver:
    """An inbox, a redo log, and two words: batches done, records processed."""

    BYTES = LOG_BYTES + INBOX_BYTES + 16

    def __init__(self, memory: Any, queue: int) -> None:
        self.memory = memory  # casts do not keep it alive
        self.base = ffi.cast("char *", memory)
        self.redo = ffi.new("struct redo *")
        self.redo.log = ffi.cast("struct redo_log *", self.base)
        self.redo.base = self.base
        self.inbox = ffi.cast("struct batch_inbox *", self.base + LOG_BYTES)
        self.words = ffi.cast("uint64_t *", self.base + LOG_BYTES + INBOX_BYTES)
        self.queue = queue
        lib.redo_recover(self.redo)

    @property
    def done(self) -> int:
        return int(self.words[0])

    @property
    def processed(self) -> int:
        return int(self.words[1])

    def pending(self) -> bool:
        return bool(lib.batch_in_pending(self.inbox, self.done))

    def receive(self) -> int:
        return int(lib.batch_in_receive(self.inbox, self.queue, self.done))

    def process(self) -> None:
        """Checks every record of the batch, and puts that it is done into a step."""
        batch = self.inbox.batch
        assert (batch.seq, getattr(batch, "from")) == (self.done + 1, 7)
        data = bytes(ffi.buffer(ffi.addressof(self.inbox, "batch"), batch.bytes))
        at, number = int(lib.BATCH_HEAD), self.processed
        while at < len(data):
            size = int.from_bytes(data[at + 4 : at + 8], "little")
            assert data[at : at + size] == record(number, size)
            at += size
            number += 1
        assert at == len(data)
        assert number > self.processed, "an empty batch was sent"
        lib.redo_put(self.redo, self.words, batch.seq)
        lib.redo_put(self.redo, self.words + 1, number)

    def commit(self) -> None:
        lib.redo_commit(self.redo)


sizes = st.one_of(
    st.just(lib.BATCH_RECORD_MAX), st.integers(1, lib.BATCH_RECORD_MAX // 8).map(lambda n: n * 8)
)


class QueueMachine(RuleBasedStateMachine):
    """Sender and receiver share nothing but the queue. A crash is a new object over the same
    memory, which is left as a kill at that point leaves it."""

    queue: Queue  # set by the fixture: one for all, emptied before each example

    @initialize()
    def make(self) -> None:
        self.queue.empty()
        self.sender_memory = ffi.new("char[]", Sender.BYTES)
        self.receiver_memory = ffi.new("char[]", Receiver.BYTES)
        self.sender = Sender(self.sender_memory, self.queue.fd, True)
        self.receiver = Receiver(self.receiver_memory, self.queue.fd)

    def teardown(self) -> None:
        """Whatever has happened, in the end everything committed has been processed."""
        if not hasattr(self, "receiver"):
            return
        self.sender_restarts()
        self.receiver_restarts()
        for _ in range(2 * lib.BATCH_RING):
            assert self.sender.send(True) >= 0
            while self.received():
                self.receiver.process()
                self.receiver.commit()
        assert self.receiver.processed == self.sender.committed[0]
        assert self.queue.length == 0

    def sender_restarts(self) -> None:
        self.sender = Sender(self.sender_memory, self.queue.fd, False)

    def receiver_restarts(self) -> None:
        self.receiver = Receiver(self.receiver_memory, self.queue.fd)

    # The sender

    @rule(sizes=st.lists(sizes, min_size=1, max_size=60), commit=st.integers(0, 3))
    def append(self, sizes: list[int], commit: int) -> None:
        for size in sizes:
            before = (self.sender.out.seq, self.sender.out.bytes)
            if not self.sender.append(size):
                assert lib.batch_out_room(self.sender.out) == 0
                assert (self.sender.out.seq, self.sender.out.bytes) == before
                break
        if commit:
            self.sender.commit()

    @rule()
    def killed_before_the_commit(self) -> None:
        committed = self.sender.committed[0]
        self.sender.put()
        self.sender_restarts()
        assert self.sender.committed[0] == committed == self.sender.appended

    @rule(stored=st.integers(0, 2))
    def killed_within_the_commit(self, stored: int) -> None:
        appended = self.sender.appended
        self.sender.put()
        log = ffi.cast("uint64_t *", self.sender.redo.log)
        for pair in self.sender.redo.log.pairs[0 : min(stored, self.sender.redo.count)]:
            ffi.cast("uint64_t *", self.sender.base + pair.offset)[0] = pair.value
        log[0] = self.sender.redo.count
        self.sender_restarts()
        assert self.sender.committed[0] == appended

    @rule()
    def send_what_is_closed(self) -> None:
        assert self.sender.send(False) >= 0

    @precondition(lambda self: self.sender.appended == self.sender.committed[0])
    @rule()
    def flush(self) -> None:
        assert self.sender.send(True) >= 0
        behind = self.sender.ring.tail >> 16 != self.sender.sent[0] + 1
        full = bool(self.sender.out.blocked)
        assert full == (behind and self.queue.length == self.queue.depth)

    @rule(flush=st.booleans())
    def killed_before_it_knew_that_a_batch_was_sent(self, flush: bool) -> None:
        flush = flush and self.sender.appended == self.sender.committed[0]
        if self.sender.send(flush) > 0:
            self.sender.sent[0] -= 1
        self.sender_restarts()

    # The receiver

    def received(self) -> bool:
        if self.receiver.pending():
            return True
        got = self.receiver.receive()
        assert got in (0, 1)
        assert got or self.queue.length == 0
        return got == 1

    @rule(batches=st.integers(1, 12))
    def receive(self, batches: int) -> None:
        for _ in range(batches):
            if not self.received():
                return
            self.receiver.process()
            self.receiver.commit()
            assert not self.receiver.pending()

    @rule()
    def killed_with_a_batch_in_the_inbox(self) -> None:
        got = self.received()
        self.receiver_restarts()
        assert self.receiver.pending() == got

    @rule(stored=st.integers(0, 2))
    def killed_while_it_commits(self, stored: int) -> None:
        if not self.received():
            return
        self.receiver.process()
        done = self.receiver.done
        for pair in self.receiver.redo.log.pairs[0:stored]:
            ffi.cast("uint64_t *", self.receiver.base + pair.offset)[0] = pair.value
        ffi.cast("uint64_t *", self.receiver.redo.log)[0] = 2
        self.receiver_restarts()
        assert self.receiver.done == done + 1
        assert not self.receiver.pending()

    @precondition(lambda self: not self.receiver.pending())
    @rule()
    def killed_before_it_received(self) -> None:
        self.receiver.inbox.batch.seq = 0
        self.receiver_restarts()
        assert not self.receiver.pending()


QueueMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


@pytest.mark.usefixtures("the_queue")
class TestQueueMachine(QueueMachine.TestCase):  # type: ignore[valid-type, misc]
    pass


def test_a_ring_fills_up_and_goes_on_where_it_was(queue: Queue) -> None:
    sender = Sender(ffi.new("char[]", Sender.BYTES), queue.fd, True)
    receiver = Receiver(ffi.new("char[]", Receiver.BYTES), queue.fd)
    size = lib.BATCH_RECORD_MAX  # one to a batch
    for _ in range(3):
        while sender.append(size):
            sender.commit()
            assert sender.send(False) >= 0
        assert queue.length == queue.depth
        assert sender.out.blocked
        # The queue is full, the ring has all its other slots, and one is being filled.
        assert sender.appended - receiver.processed == queue.depth + lib.BATCH_RING
        while receiver.receive() == 1:
            receiver.process()
            receiver.commit()
            assert sender.send(True) >= 0
        assert receiver.processed == sender.appended
        assert not sender.out.blocked


def test_what_cannot_happen_is_refused(queue: Queue) -> None:
    memory = ffi.new("char[]", lib.BATCH_BYTES)
    batch = ffi.cast("struct batch *", memory)
    receiver = Receiver(ffi.new("char[]", Receiver.BYTES), queue.fd)

    def offer(seq: int, size: int, length: int, version: int = lib.BATCH_VERSION) -> int:
        batch.seq, batch.bytes, batch.version = seq, length, version
        queue.queue.send(bytes(ffi.buffer(memory, size)))
        return receiver.receive()

    assert offer(2, 100, 100) == -errno.EBADMSG  # a gap
    assert offer(1, 100, 96) == -errno.EBADMSG  # not as long as it says
    assert offer(1, lib.BATCH_HEAD - 1, lib.BATCH_HEAD - 1) == -errno.EBADMSG  # not even a head
    assert offer(1, 100, 100, lib.BATCH_VERSION + 1) == -errno.EBADMSG
    assert offer(0, 100, 100) == 0  # seen long ago: dropped
    assert offer(1, 100, 100) == 1
    receiver.queue = -1
    assert receiver.receive() == -errno.EBADF


def send_forever(memory: Any, queue: int, seed: int) -> None:
    chance = random.Random(seed)
    sender = Sender(memory, queue, False)
    while True:
        for _ in range(chance.randrange(1, 50)):
            sender.append(8 * chance.randrange(1, 200))
        sender.commit()
        assert sender.send(chance.random() < 0.5) >= 0


def receive_forever(memory: Any, queue: int) -> None:
    receiver = Receiver(memory, queue)
    while True:
        if receiver.pending() or receiver.receive() == 1:
            receiver.process()
            receiver.commit()


def test_killed_processes_lose_and_repeat_nothing(queue: Queue) -> None:
    """Both ends are real processes, killed in turn without warning."""

    def shared(size: int) -> Any:
        return ffi.from_buffer("char[]", mmap.mmap(-1, (size + 4095) // 4096 * 4096))

    ours, theirs = shared(Sender.BYTES), shared(Receiver.BYTES)
    sender, receiver = Sender(ours, queue.fd, True), Receiver(theirs, queue.fd)
    chance = random.Random(7)

    def begin(role: str) -> int:
        child = os.fork()
        if child == 0:
            try:
                if role == "sender":
                    send_forever(ours, queue.fd, chance.randrange(2**32))
                else:
                    receive_forever(theirs, queue.fd)
            finally:
                os._exit(1)  # an assertion failed
        return child

    def processed(goal: int) -> bool:
        return receiver.processed >= goal

    children = {role: begin(role) for role in ("sender", "receiver")}
    try:
        for _ in range(60):
            goal = receiver.processed + chance.randrange(1, 500)
            eventually(partial(processed, goal), "records are processed")
            role = chance.choice(("sender", "receiver"))
            os.kill(children[role], signal.SIGKILL)
            ended = os.waitstatus_to_exitcode(os.waitpid(children[role], 0)[1])
            assert ended == -signal.SIGKILL, f"the {role} found something wrong"
            children[role] = begin(role)
        os.kill(children["sender"], signal.SIGKILL)
        os.waitpid(children.pop("sender"), 0)
        # What the last one had committed is sent by its successor, and arrives.
        sender = Sender(ours, queue.fd, False)

        def drained() -> bool:
            assert sender.send(True) >= 0
            return receiver.processed == int(sender.committed[0])

        eventually(drained, "everything committed is processed")
        os.kill(children["receiver"], 0)  # it has found nothing wrong
    finally:
        for child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_ring_whose_numbers_do_not_fit_has_nothing_unsent() -> None:
    """It used to be 18446744073709551615 batches, in the line about a recovery."""
    ring = ffi.new("struct batch_ring *")
    lib.batch_ring_format(ring)
    sent = ffi.cast("uint64_t *", ring) + 1
    for tail, last, unsent in (
        (1, 0, 0),
        (5, 0, 4),
        (5, 4, 0),
        (5, 5, 0),
        (0, 0, 0),
        (3, 2**40, 0),
    ):
        ring.tail, sent[0] = tail << 16 | 32, last
        assert lib.batch_unsent(ring) == unsent
