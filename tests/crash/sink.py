"""A port without sockets: `python -m tests.crash.sink INSTANCE INDEX CONNMGRS SLOT ARENA_BYTES`.

It takes part under its own number like any connection manager (native/src/shm/port.h): asks the
router for a session in SLOT and for everything that `stream` of tests/crash/load.py publishes,
through references; reads each body where it lies, and lets go of it. What it has counted is in its
own segment, and changes in the very step that says which batch of orders was taken in: so it
counts each message once, whatever is killed.

Of each publisher every message must come once, in order, with the content it was sent with. One
that does not is printed, and ends the sink with 1.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any

from midair import names
from midair.process import crash, ipc
from midair.process.runtime import Runtime
from native import connmgr as native
from native import ffi, lib
from native.segment import Kind, check, open_segment
from tests.crash.load import body_of

KIND = Kind(lib.SEGMENT_PORT, lib.PORT_LAYOUT, lib.port_fingerprint(), "struct port_log *")
PATTERN = b"stream.*.x"
UID = 1 << 62  # no client's: those are counted from 1
SUB = 1 << 32  # slot 0, epoch 1
PUBLISHERS = 100  # counted apart: by seed
MESSAGES, BATCHES, BYTES, FIRST = 0, 1, 2, 3  # words; from FIRST on the count of each publisher
WORDS = FIRST + PUBLISHERS


def open_log(runtime: Runtime, index: int, create: bool = True) -> Any:
    """The segment of that port."""

    def make(seg: Any) -> None:
        lib.port_segment_format(seg, index, WORDS * 8)

    return open_segment(
        runtime.segment(names.PORT, index),
        lib.port_bytes(WORDS * 8),
        KIND,
        make=make if create else None,
        hot=lib.port_hot_bytes(),
    )


def words(log: Any) -> Any:
    """What the sink has counted, in its segment."""
    return ffi.cast("uint64_t *", lib.port_own(log))


class Sink:
    """One process in the role of the port."""

    def __init__(
        self, runtime: Runtime, index: int, connmgrs: int, slot: int, arena_bytes: int
    ) -> None:
        self.log = open_log(runtime, index)
        self.words = words(self.log)
        self.queues = [ipc.open_queue(runtime.queue(noun, index)) for noun in names.QUEUES]
        refs, orders = (queue.fd for queue in self.queues)
        self.orders, self.refs = orders, refs
        self.port = ffi.new("struct port *")
        check(lib.port_open(self.port, self.log, refs, orders), "opening the port")
        chunks = native.arena_chunks(arena_bytes)
        for n in range(connmgrs):
            arena = native.open_arena(runtime, n, chunks)
            check(lib.port_add_arena(self.port, n, arena), f"arena {n}")
        self.slot = slot
        self.error = ""
        self.delivery = ffi.new("struct port_delivery *")
        self.message = ffi.new("struct port_message *")
        self.at = ffi.new("uint32_t *")
        self._callbacks = (
            ffi.callback("int(void *, const struct batch *)", self._apply, error=-1),
            ffi.callback("void(void *, const struct batch *)", lambda *_: None),
            ffi.callback("void(void *, const struct batch *, int)", lambda *_: None),
        )
        self.owner = ffi.new("struct port_owner *", self._callbacks)

    def start(self) -> None:
        """Finishes what a predecessor began, and says again what it wants."""
        lib.port_recover(self.port, ffi.new("uint64_t *"))
        now = time.monotonic_ns()
        lib.port_refer_open(self.port, self.slot, UID, b"", now)
        nobody = (ffi.NULL, 0)
        lib.port_refer_subscribe(
            self.port, self.slot, SUB, PATTERN, len(PATTERN), *nobody, *nobody, now
        )
        check(lib.port_refer_commit(self.port, now), "sending references")

    def _apply(self, _owner: Any, batch: Any) -> int:
        try:
            self._take(batch)
        except Exception as error:
            self.error = repr(error)
            return -1
        return 0

    def _take(self, batch: Any) -> None:
        """Every delivery of the batch, then the new counts into the step."""
        counts: dict[int, int] = {}
        self.at[0] = lib.BATCH_HEAD
        while check(lib.port_next(self.port, batch, self.at, self.delivery), "an order"):
            it = self.delivery
            if it.recipients != 1 or it.subs[0] != 0:
                raise ValueError(f"{it.recipients} recipients, the first {it.subs[0]}")
            for handle in range(it.first, it.first + it.messages):
                self._count(handle, counts)
        counts[BATCHES] = self.words[BATCHES] + 1
        for word, value in counts.items():
            lib.redo_put(ffi.addressof(self.port, "redo"), self.words + word, value)

    def _count(self, handle: int, counts: dict[int, int]) -> None:
        lib.port_describe(self.port, handle, self.message)
        it = self.message
        subject = bytes(ffi.buffer(it.subject, it.subject_len))
        body = bytearray(it.total_len)
        lib.port_read(self.port, handle, 0, ffi.from_buffer(body), len(body))
        seed = int(subject.split(b".")[1])
        for word, more in ((MESSAGES, 1), (BYTES, len(body))):
            counts[word] = counts.get(word, self.words[word]) + more
        seq, _, rest = bytes(body).partition(b":")
        if not rest:
            return  # the last ones: `-1:`, and those that check_counts() sends
        word = FIRST + seed % PUBLISHERS
        expected = counts.get(word, self.words[word])
        if int(seq) != expected:
            raise ValueError(f"{subject!r}: got {int(seq)}, expected {expected}")
        if bytes(body) != body_of(seed, expected, int(rest.split(b":", 1)[0])):
            raise ValueError(f"{subject!r}: content of {expected} differs")
        counts[word] = expected + 1

    def turn(self) -> None:
        """Takes what there is; waits a moment if that is nothing."""
        got = check(lib.port_receive(self.port), "receiving orders")
        if got:
            if lib.port_process(self.port, self.owner, ffi.NULL) < 0:
                raise SystemExit(f"sink: {self.error or 'a batch that is none'}")
            return
        blocked = [self.refs] if self.port.refs.blocked else []
        select.select([self.orders], blocked, [], 0.1)
        if blocked:
            check(lib.port_refer_commit(self.port, time.monotonic_ns()), "sending references")


def main() -> int:
    instance, *numbers = sys.argv[1:]
    index, connmgrs, slot, arena_bytes = map(int, numbers)
    crash.arm(names.component(names.PORT, index))
    sink = Sink(Runtime.open(instance), index, connmgrs, slot, arena_bytes)
    sink.start()
    print("at work", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # ends with the test
        sink.turn()
    return 0


if __name__ == "__main__":
    sys.exit(main())
