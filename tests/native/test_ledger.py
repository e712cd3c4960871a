"""The ledger (rules L1 to L3 of native/README.md): any order of steps frees exactly once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native import ffi, lib

CHUNKS = lib.ARENA_CHUNKS_MIN


@pytest.fixture(scope="module")
def arena() -> Any:
    memory = ffi.new("char[]", lib.arena_bytes(CHUNKS) + 4096)
    at = (int(ffi.cast("uintptr_t", memory)) + 4095) // 4096 * 4096
    arena = ffi.cast("struct arena *", at)
    lib.arena_format(arena, 0, CHUNKS)
    pool = ffi.new("struct arena_pool *")
    assert lib.arena_pool_open(pool, arena) == 0
    lib.arena_pool_recover(pool)
    assert lib.arena_take(pool) == 0
    yield arena
    lib.arena_pool_close(pool)
    ffi.release(memory)


def begin(arena: Any) -> int:
    """A live message in entry 0 of chunk 0."""
    handle = int(lib.arena_begin(arena, 0, 0))
    lib.arena_messages(arena, 0)[0] = 1
    return handle


def live(arena: Any) -> int:
    out, busy = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    lib.arena_census(arena, out, busy)
    return int(out[0])


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, bool, bool]]:
    """(connmgr, carries the limit, is a repetition) in any order, each at least once."""
    connmgrs = draw(st.lists(st.integers(0, 31), min_size=1, max_size=32, unique=True))
    holder = draw(st.sampled_from(connmgrs))
    first = [(c, c == holder, False) for c in draw(st.permutations(connmgrs))]
    result = []
    for step in first:
        result.append(step)
        if draw(st.booleans()):  # a crash: the same step again, some time later
            at = draw(st.integers(0, len(result)))
            result.insert(max(at, result.index(step) + 1), (step[0], step[1], True))
    return result


@given(plan=steps())
def test_any_order_frees_exactly_once_and_not_early(plan: list[Any], arena: Any) -> None:
    handle = begin(arena)
    limit = len({c for c, _, _ in plan})
    done: set[int] = set()
    told = False
    freed = 0
    for connmgr, carries, again in plan:
        add = lib.ledger_bit(connmgr) | (lib.ledger_limit(limit) if carries else 0)
        freed += lib.arena_relinquish(arena, ffi.NULL, handle, add, again)
        done.add(connmgr)
        told |= carries
        complete = told and len(done) == limit
        assert freed == (1 if complete else 0)
        assert live(arena) == (0 if complete else 1)
    assert freed == 1


@given(plan=steps(), reuses=st.integers(1, 5))
def test_a_repetition_after_reuse_touches_nothing(plan: list[Any], reuses: int, arena: Any) -> None:
    handle = begin(arena)
    limit = len({c for c, _, _ in plan})
    for connmgr, carries, again in plan:
        add = lib.ledger_bit(connmgr) | (lib.ledger_limit(limit) if carries else 0)
        lib.arena_relinquish(arena, ffi.NULL, handle, add, again)
    for _ in range(reuses):
        fresh = begin(arena)
        assert fresh != handle
        for connmgr, carries, _ in plan:
            add = lib.ledger_bit(connmgr) | (lib.ledger_limit(limit) if carries else 0)
            assert lib.arena_relinquish(arena, ffi.NULL, handle, add, True) == 0
        assert lib.arena_relinquish(
            arena, ffi.NULL, fresh, lib.ledger_bit(3) | lib.ledger_limit(1), False
        )


def test_generation_wraps_without_touching_its_neighbours() -> None:
    top = lib.handle_make(63, lib.LEDGER_GENERATION, 0xFFFFFFFF)
    assert lib.handle_source(top) == 63
    assert lib.handle_entry(top) == 0xFFFFFFFF
    assert not lib.ledger_complete(lib.LEDGER_GENERATION | 1)


def test_exactly_one_of_many_threads_frees(arena: Any) -> None:
    """Real concurrency: the C call releases the interpreter lock."""
    workers, rounds = 8, 300
    freed = [0] * rounds
    handles: list[int] = []
    gate = threading.Barrier(workers)

    def work(me: int) -> None:
        for n in range(rounds):
            if gate.wait() == 0:
                handles.append(begin(arena))
            gate.wait()
            add = lib.ledger_bit(me) | (lib.ledger_limit(workers) if me == n % workers else 0)
            if lib.arena_relinquish(arena, ffi.NULL, handles[n], add, me % 2):
                freed[n] += 1  # only the one that freed writes here

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert freed == [1] * rounds


@given(uses=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_handles_of_a_chunk_follow_each_other(arena: Any, uses: list[int]) -> None:
    """However many messages the chunk held before; and none of them was there before."""
    seen: set[int] = set()
    for count in uses:  # each time the chunk is taken anew
        handles = [int(lib.arena_begin(arena, 0, n)) for n in range(count)]
        assert handles == [handles[0] + n for n in range(count)]
        assert not seen.intersection(handles)
        seen.update(handles)
