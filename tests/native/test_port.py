"""A port takes batches of orders in (rules P1 to P3): once, whatever dies between two stores.

The router is the test, which lays batches into the inbox. Crashes are those of tests/crash; here a
successor is another struct port over the same memory.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest

from native import ffi, lib

CHUNKS = lib.ARENA_CHUNKS_MIN
SOURCE, INDEX = 0, 3
DELIVER, DELETE, NO_RESPONDERS, PASSED, MODE, RUN = 1, 2, 3, 5, 10, 14  # enum order_type
MORE = 0x80  # ORDER_MORE
BIT = lib.ledger_bit(INDEX)


def page(bytes_: int) -> tuple[Any, Any]:
    """(what keeps it alive, aligned zeroed memory)"""
    memory = ffi.new("char[]", bytes_ + 4096)
    at = (int(ffi.cast("uintptr_t", memory)) + 4095) // 4096 * 4096
    return memory, ffi.cast("char *", at)


def order(
    kind: int, handle: int, second: int, third: int = 0, limit: int = 1, more: bytes = b""
) -> bytes:
    """type, limit, what is at 2 and at 4, handle, the rest: padded."""
    text = struct.pack("<BBHIQ", kind, limit, second, third, handle) + more
    return text + bytes(-len(text) % 8)


def slots(*subs: int) -> bytes:
    return struct.pack(f"<{len(subs)}I", *subs)


class Owner:
    """Takes everything that comes, and remembers it."""

    def __init__(self, log: Any, arena: Any) -> None:
        self.port = ffi.new("struct port *")
        assert lib.port_open(self.port, log, -1, -1) == 0
        assert lib.port_add_arena(self.port, SOURCE, arena) == 0
        lib.port_recover(self.port, ffi.new("uint64_t *"))
        self.got: list[tuple[int, int, tuple[int, ...]]] = []
        self.said: list[Any] = []
        self.kept = (
            ffi.callback("int(void *, const struct batch *)", self._apply, error=-1),
            ffi.callback("void(void *, const struct batch *)", lambda *_: self.said.append("kept")),
            ffi.callback(
                "void(void *, const struct batch *, int)", lambda _o, _b, x: self.said.append(x)
            ),
        )
        self.functions = ffi.new("struct port_owner *", self.kept)

    def _apply(self, _owner: Any, batch: Any) -> int:
        at, it = ffi.new("uint32_t *", lib.BATCH_HEAD), ffi.new("struct port_delivery *")
        while (got := lib.port_next(self.port, batch, at, it)) > 0:
            self.got.append((it.first, it.messages, tuple(ffi.unpack(it.subs, it.recipients))))
        return int(got)

    def process(self) -> int:
        assert lib.port_receive(self.port) == 1
        return int(lib.port_process(self.port, self.functions, ffi.NULL))


class Bed:
    """A port's memory, an arena with messages, and what the router would send."""

    def __init__(self) -> None:
        self._kept, memory = page(lib.port_bytes(64))
        self.log = ffi.cast("struct port_log *", memory)
        lib.port_segment_format(self.log, INDEX, 64)
        self._kept_too, memory = page(lib.arena_bytes(CHUNKS))
        self.arena = ffi.cast("struct arena *", memory)
        lib.arena_format(self.arena, SOURCE, CHUNKS)
        self.handles = [lib.arena_begin(self.arena, 0, n) for n in range(32)]
        self.words = ffi.cast("uint64_t *", lib.arena_words(self.arena))
        self.owner = self.successor()

    def successor(self) -> Owner:
        self.owner = Owner(self.log, self.arena)
        return self.owner

    def lay(self, *orders: bytes) -> None:
        """The next batch lies in the inbox."""
        records = b"".join(orders)
        batch = self.log.inbox.batch
        batch.bytes, batch.version = lib.BATCH_HEAD + len(records), lib.BATCH_VERSION
        ffi.memmove(batch.records, records, len(records))
        batch.seq = self.log.done + 1

    def let_go(self, n: int) -> bool:
        return bool(self.words[self.handles[n] & 0xFFFFFFFF] & BIT)


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_deliveries_of_every_kind(bed: Bed) -> None:
    h = bed.handles
    bed.lay(
        order(PASSED, 77, 0, 5, limit=0),
        order(DELIVER, h[0], 1, 4),
        order(DELIVER, h[1], 3, more=slots(4, 5, 6)),
        order(RUN, h[2], 2, 5, more=slots(8, 9)),
        order(DELETE, h[7], 2),
        order(NO_RESPONDERS, h[9], 1, 4),
        order(MODE, h[10], 16, 12, more=bytes(16)),
    )
    assert bed.owner.process() == 0
    assert bed.owner.got == [
        (h[0], 1, (4,)),
        (h[1], 1, (4, 5, 6)),
        (h[2], 5, (8, 9)),
        (h[10], 1, (12,)),
    ]
    assert bed.owner.said == ["kept", 0]
    assert (bed.log.applied, bed.log.done) == (1, 1)
    assert [bed.let_go(n) for n in range(12)] == [True] * 11 + [False]


def test_a_list_that_goes_on_in_the_next_batch(bed: Bed) -> None:
    h = bed.handles
    bed.lay(order(DELIVER | MORE, h[0], 2, limit=0, more=slots(1, 2)))
    assert bed.owner.process() == 0
    assert not bed.let_go(0)
    assert bed.log.open_handle[SOURCE] == h[0]
    owner = bed.successor()  # knows it from the log
    bed.lay(order(DELIVER, h[0], 0), order(DELIVER, h[1], 1, 3))
    assert owner.process() == 0
    assert owner.got == [(h[1], 1, (3,))]  # an end without recipients is none
    assert bed.let_go(0)
    assert bed.let_go(1)
    assert bed.log.open_handle[SOURCE] == 0


def test_what_was_committed_is_finished_not_repeated(bed: Bed) -> None:
    bed.lay(order(DELIVER, bed.handles[0], 1, 4), order(RUN, bed.handles[1], 1, 3, more=slots(4)))
    bed.log.applied = 1  # a predecessor has committed it, and died
    owner = bed.successor()
    assert owner.process() == 0
    assert (owner.got, owner.said) == ([], [1])
    assert [bed.let_go(n) for n in range(5)] == [True] * 4 + [False]
    assert (bed.log.applied, bed.log.done) == (1, 1)


def test_what_is_still_needed_is_let_go_by_the_last_who_needs_it(bed: Bed) -> None:
    handle = bed.handles[0]
    needed = bed.owner.port.needed[SOURCE]
    needed[handle & 0xFFFFFFFF] = 1
    bed.lay(order(DELIVER, handle, 1, 4), order(DELIVER, bed.handles[1], 1, 4))
    assert bed.owner.process() == 0
    assert (bed.let_go(0), bed.let_go(1)) == (False, True)


def test_a_record_that_does_not_end_is_refused(bed: Bed) -> None:
    bed.lay(order(DELIVER, bed.handles[0], 900, more=slots(1, 2)))
    assert bed.owner.process() < 0
    assert (bed.log.applied, bed.log.done) == (0, 0)
