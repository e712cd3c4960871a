"""The native pieces alone, timed by pytest-benchmark: parse, ledger, index, batch, a whole turn.

    make bench-native                                       all of them
    make bench-native NATIVE_ARGS='-k index'                some
    make bench-native NATIVE_ARGS=--benchmark-autosave      kept, to compare with later

Each figure is the time of COUNT messages. Where a piece is called from here once for each message,
the call from Python is in it: such figures are good for comparing two versions of the code, not for
adding up. The turns loop in C. Times depend on what else the machine does; `make instructions`
does not.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import posix_ipc
import pytest

from bench.instructions_load import BODY
from bench.rig import Rig
from midair.process import ipc
from native import ffi, lib
from native.protocol import Limits
from tests.support.index import SubjectIndex, sub_id

FRAME = b"PUB load.one 128\r\n" + BODY + b"\r\n"
DELIVERY = b"MSG load.one 1 128\r\n" + BODY + b"\r\n"
COUNT = 200
Benchmark = Any  # pytest-benchmark has no types


# ---- parse ---------------------------------------------------------------------------------------


def test_parse_a_read_of_pubs(benchmark: Benchmark) -> None:
    data = ffi.new("uint8_t[]", FRAME * COUNT)
    limits = ffi.new("struct frame_limits *", tuple(Limits()))
    frame = ffi.new("struct frame *")
    length = len(FRAME) * COUNT

    def parse() -> int:
        at = found = 0
        while at < length:
            assert lib.protocol_parse(0, data + at, length - at, limits, frame) == 1
            at += frame.bytes
            found += 1
        return found

    assert benchmark(parse) == COUNT


@pytest.mark.parametrize("wildcards", [0, 1])
def test_check_subjects(benchmark: Benchmark, wildcards: int) -> None:
    subject = b"orders.europe.berlin.new"

    def check() -> int:
        return sum(lib.subject_valid(subject, len(subject), wildcards) for _ in range(COUNT))

    assert benchmark(check) == COUNT


# ---- ledger --------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Any]:
    chunks = lib.ARENA_CHUNKS_MIN
    with mmap.mmap(-1, lib.arena_bytes(chunks)) as memory:
        held = ffi.from_buffer(memory)
        found = ffi.cast("struct arena *", held)
        lib.arena_format(found, 0, chunks)
        pool = ffi.new("struct arena_pool *")
        assert lib.arena_pool_open(pool, found) == 0
        lib.arena_pool_recover(pool)
        assert lib.arena_take(pool) == 0
        yield found
        lib.arena_pool_close(pool)
        ffi.release(held)


@pytest.mark.parametrize("connmgrs", [1, 4])
def test_relinquish(benchmark: Benchmark, arena: Any, connmgrs: int) -> None:
    """A message is begun; each connection manager gives it up, the last one frees it."""
    limit = lib.ledger_limit(connmgrs)
    steps = [lib.ledger_bit(n) | (0 if n else limit) for n in range(connmgrs)]
    lib.arena_messages(arena, 0)[0] = 1

    def give_up() -> int:
        freed = 0
        for _ in range(COUNT):
            handle = lib.arena_begin(arena, 0, 0)
            for step in steps:
                freed += lib.arena_relinquish(arena, ffi.NULL, handle, step, 0)
        return freed

    assert benchmark(give_up) == COUNT


# ---- index ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1000, 100_000])
def index(request: pytest.FixtureRequest) -> Iterator[tuple[SubjectIndex, int]]:
    count: int = request.param
    with SubjectIndex(1, count * 2, count * 4) as made:
        for n in range(count):
            made.add(sub_id(0, n), n % 100, b"load.%06d.x" % n)
        made.add(sub_id(0, count), 1, b"load.*.x")
        made.add(sub_id(0, count + 1), 2, b"load.>", b"workers")
        yield made, count


def test_match(benchmark: Benchmark, index: tuple[SubjectIndex, int]) -> None:
    """Each of COUNT subjects has a literal, a wildcard and a queue group."""
    made, count = index
    subjects = [b"load.%06d.x" % (n * 7919 % count) for n in range(COUNT)]

    def match() -> int:
        found = 0
        for subject in subjects:
            hashed = lib.index_hash(subject, len(subject))
            result = lib.index_match(made.pointer, subject, len(subject), hashed)
            found += result.count + result.group_count
        return found

    assert benchmark(match) == 3 * COUNT


def test_subscribe_and_unsubscribe(benchmark: Benchmark, index: tuple[SubjectIndex, int]) -> None:
    made, count = index
    ids = [sub_id(0, count + 2 + n) for n in range(COUNT)]

    def churn() -> int:
        for sub in ids:
            made.add(sub, 3, b"churn.here")
        for sub in ids:
            made.remove(sub)
        return made.stats().subs

    assert benchmark(churn) == count + 2


# ---- batch ---------------------------------------------------------------------------------------


@pytest.fixture
def queue() -> Iterator[int]:
    made: posix_ipc.MessageQueue | None = None
    for depth in ipc.QUEUE_DEPTHS:
        try:
            made = posix_ipc.MessageQueue(
                None, posix_ipc.O_CREX, max_messages=depth, max_message_size=lib.BATCH_BYTES
            )
            break
        except OSError:  # this user's queue bytes do not suffice: a shorter one
            continue
    assert made is not None, "no room for a queue (RLIMIT_MSGQUEUE)"
    made.unlink()
    os.set_blocking(made.mqd, False)
    yield made.mqd
    made.close()


def test_send_and_receive_batches(benchmark: Benchmark, queue: int) -> None:
    """COUNT records of 32 bytes through a ring, a real queue and an inbox."""
    ring = ffi.new("struct batch_ring *")
    inbox = ffi.new("struct batch_inbox *")
    log = ffi.new("struct redo_log *")
    redo = ffi.new("struct redo *", {"log": log, "base": ffi.cast("char *", ring)})
    out = ffi.new("struct batch_out *")
    lib.batch_ring_format(ring)
    lib.batch_out_open(out, ring, queue, 0)
    done = 0

    def pass_on() -> int:
        nonlocal done
        sent = 0
        for _ in range(COUNT):
            assert lib.batch_out_append(out, 32, 1) != ffi.NULL
            sent += 32
            lib.batch_out_put(out, redo)
            lib.redo_commit(redo)
        assert lib.batch_out_send(out, 1, 2) >= 0
        got = 0
        while lib.batch_in_receive(inbox, queue, done) > 0:
            got += inbox.batch.bytes - lib.BATCH_HEAD
            done = inbox.batch.seq
        assert got == sent
        return COUNT

    assert benchmark(pass_on) == COUNT


# ---- turns ---------------------------------------------------------------------------------------


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.mark.parametrize("stage", ["read", "route", "deliver", "all"])
def test_turn(benchmark: Benchmark, rig: Rig, stage: str) -> None:
    """COUNT messages of 128 bytes: a stage of their way, the rest of it not timed."""
    subscriber = rig.open(b"SUB load.one 1")
    publisher = rig.open()
    steps = {
        "read": rig.turn_connmgr,
        "route": rig.turn_router,
        "deliver": rig.turn_connmgr,
    }
    delivered = 0

    def prepare() -> None:
        nonlocal delivered
        if delivered:
            rig.drain()
            assert rig.receive(subscriber, len(DELIVERY) * COUNT) == DELIVERY * COUNT
        delivered += COUNT
        rig.send(publisher, FRAME * COUNT)
        for name, step in steps.items():
            if name == stage or stage == "all":
                return
            step()

    def timed() -> None:
        for name, step in steps.items():
            if stage in (name, "all"):
                step()

    benchmark.pedantic(timed, setup=prepare, rounds=200, iterations=1)
    rig.drain()
    assert rig.connmgr.stats()["messages_in"] == delivered
    assert len(BODY) == 128
