"""The arena (rules A1 to A4 of native/README.md): no overlap, no leak, chunks are reused.

A state machine plays the owner, another connmgr that frees, connections that hold unparsed
bytes, and crashes of the owner; a plain Python model says what must be free.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from native import ffi, lib

CHUNKS = lib.ARENA_CHUNKS_MIN
MESSAGES = lib.ARENA_CHUNK_MESSAGES
DONE = lib.ledger_bit(0) | lib.ledger_limit(1)


class ArenaMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.memory = ffi.new("char[]", lib.arena_bytes(CHUNKS) + 4096)
        at = (int(ffi.cast("uintptr_t", self.memory)) + 4095) // 4096 * 4096
        self.arena = ffi.cast("struct arena *", at)
        lib.arena_format(self.arena, 0, CHUNKS)
        self.pool = ffi.new("struct arena_pool *")
        assert lib.arena_pool_open(self.pool, self.arena) == 0
        assert lib.arena_pool_recover(self.pool) == 0  # chunks in use
        self.open: dict[int, int] = {}  # chunk -> messages handed out
        self.closed: set[int] = set()
        self.chain: dict[int, list[int]] = {}  # head -> links
        self.live: dict[int, set[int]] = {}  # chunk -> handles
        self.holds: dict[int, int] = {}
        self.lost = False  # a hint, since the beginning

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            lib.arena_pool_close(self.pool)
            ffi.release(self.memory)

    # The model

    def busy(self) -> set[int]:
        """Chunks that must not be handed out."""
        heads = set(self.open) | {c for c in self.closed if self.live.get(c) or self.holds.get(c)}
        return heads | {link for head in heads for link in self.chain.get(head, ())}

    def forget_idle(self) -> None:
        for chunk in list(self.closed):
            if not self.live.get(chunk) and not self.holds.get(chunk):
                self.closed.discard(chunk)
                self.chain.pop(chunk, None)

    def take(self) -> int | None:
        before = self.busy()
        chunk = int(lib.arena_take(self.pool))
        if chunk == lib.ARENA_NONE:
            assert len(before) == CHUNKS, "a chunk leaked"
            return None
        assert chunk not in before, "a chunk in use was handed out"
        self.forget_idle()
        self.open[chunk] = 0
        self.live[chunk] = set()
        return chunk

    # What the owner does

    @rule()
    def take_chunk(self) -> None:
        self.take()

    @rule(links=st.integers(1, 4))
    def take_chain(self, links: int) -> None:
        if lib.arena_available(self.pool) < links + 1:
            return
        head = last = self.take()
        assert head is not None
        self.chain[head] = []
        for _ in range(links):
            before = self.busy()
            last = int(lib.arena_extend(self.pool, last))
            assert last not in before
            self.chain[head].append(last)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 200), commit=st.booleans())
    def receive(self, data: st.DataObject, count: int, commit: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.open)))
        first = self.open[chunk]
        last = min(first + count, MESSAGES)
        handles = [int(lib.arena_begin(self.arena, chunk, n)) for n in range(first, last)]
        if not commit:  # the step dies here: nobody ever hears of these
            return self.crash()
        lib.arena_messages(self.arena, chunk)[0] = last
        self.open[chunk] = last
        self.live[chunk].update(handles)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[chunk]
        self.closed.add(chunk)
        lib.arena_close(self.pool, chunk)
        self.forget_idle()

    @precondition(lambda self: self.open or self.closed)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(set(self.open) | self.closed)))
        lib.arena_hold(self.pool, chunk)
        self.holds[chunk] = self.holds.get(chunk, 0) + 1

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(c for c, n in self.holds.items() if n)))
        self.holds[chunk] -= 1
        lib.arena_unhold(self.pool, chunk)
        self.forget_idle()

    # What anybody does

    @precondition(lambda self: any(self.live.values()))
    @rule(seed=st.integers(0, 2**32), mine=st.booleans(), twice=st.booleans())
    def let_go(self, seed: int, mine: bool, twice: bool) -> None:
        """Somebody lets go; on behalf of the owner or not, perhaps again after a crash."""
        rng = random.Random(seed)
        chunk = rng.choice(sorted(c for c, h in self.live.items() if h))
        handles = sorted(self.live[chunk])
        for handle in rng.sample(handles, rng.randint(1, len(handles))):
            pool = self.pool if mine else ffi.NULL
            assert lib.arena_relinquish(self.arena, pool, handle, DONE, 0) == 1
            if twice:
                assert lib.arena_relinquish(self.arena, pool, handle, DONE, 1) == 0
            self.live[chunk].discard(handle)
        self.forget_idle()

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def lose_a_hint(self, data: st.DataObject) -> None:
        """Somebody dies right after completing a word: no hint reaches the owner."""
        chunk = data.draw(st.sampled_from(sorted(self.closed)))
        if not self.live.get(chunk):
            return
        self.lost = True
        handle = self.live[chunk].pop()
        words = ffi.cast("char *", lib.arena_words(self.arena))
        assert lib.ledger_or(words + 8 * (handle & 0xFFFFFFFF), DONE) == 1
        lib.arena_sweep(self.pool, CHUNKS)
        self.forget_idle()

    # What may happen to the owner

    @rule()
    def crash(self) -> None:
        """The owner dies and a new one recovers: open chunks are closed, nothing is lost."""
        lib.arena_pool_close(self.pool)
        assert lib.arena_pool_open(self.pool, self.arena) == 0
        for chunk, count in self.holds.items():
            for _ in range(count):
                lib.arena_hold(self.pool, chunk)
        lib.arena_pool_recover(self.pool)
        self.closed |= set(self.open)
        self.open.clear()
        self.forget_idle()

    @invariant()
    def live_is_live(self) -> None:
        if not hasattr(self, "pool"):
            return
        out, busy = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        lib.arena_census(self.arena, out, busy)
        if self.lost:  # counting no longer tells when a chunk is free, only looking does
            lib.arena_sweep(self.pool, CHUNKS)
        assert out[0] == sum(map(len, self.live.values()))
        assert lib.arena_available(self.pool) == CHUNKS - len(self.busy())


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_chunk_freed_last_is_taken_first() -> None:
    machine = ArenaMachine()
    machine.make()
    try:
        first, second = machine.take(), machine.take()
        for chunk in (second, first):
            assert chunk is not None
            del machine.open[chunk]
            lib.arena_close(machine.pool, chunk)
        assert lib.arena_take(machine.pool) == first
        assert lib.arena_take(machine.pool) == second
    finally:
        machine.teardown()
