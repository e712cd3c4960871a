"""The redo log: wherever a step is cut, nothing of it happened or all of it.

First every prefix of the stores of a step, made by hand from the log C has written; then real
processes, killed while they commit.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from native import ffi, lib
from tests.support.instance import eventually

WORDS = 48  # of the segment, and as many of the arena
LOG_BYTES = ffi.sizeof("struct redo_log")
BYTES = LOG_BYTES + 2 * WORDS * 8

Image = bytes  # all words, segment and arena


class Steps:
    """A segment (log and words) and an arena, one behind the other, and their writer."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.base = ffi.cast("char *", memory)
        self.words = ffi.cast("uint64_t *", self.base + LOG_BYTES)
        self.redo = ffi.new("struct redo *")
        self.redo.log = ffi.cast("struct redo_log *", self.base)
        self.redo.base = self.base
        self.redo.arena = self.base + LOG_BYTES + WORDS * 8
        self.count = ffi.cast("uint64_t *", self.base)  # the first word of the log

    def put(self, at: int, value: int) -> None:
        """Words at or past WORDS are the arena's."""
        put = lib.redo_put if at < WORDS else lib.redo_put_arena
        put(self.redo, self.words + at, value)

    def image(self) -> Image:
        return bytes(ffi.buffer(self.words, 2 * WORDS * 8))

    def load(self, image: Image) -> None:
        ffi.memmove(self.words, image, len(image))

    def restart(self) -> int:
        """A new process takes over what is in the memory: how many words it stored."""
        self.redo.count = 0
        return int(lib.redo_recover(self.redo))


puts = st.lists(
    st.tuples(st.integers(0, 2 * WORDS - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=30
)


def changed(image: Image, step: list[tuple[int, int]]) -> Image:
    words = bytearray(image)
    for at, value in step:
        words[at * 8 : at * 8 + 8] = value.to_bytes(8, "little")
    return bytes(words)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(puts, min_size=1, max_size=4))
def test_a_step_cut_anywhere_did_nothing_or_everything(steps: list[list[tuple[int, int]]]) -> None:
    memory = ffi.new("uint64_t[]", BYTES // 8)
    it = Steps(memory)
    for step in steps:
        before = it.image()
        after = changed(before, step)
        for at, value in step:  # killed while it is being put together: nothing happened
            it.put(at, value)
            assert it.image() == before
            assert it.count[0] == 0
        log = bytes(ffi.buffer(it.redo.log, LOG_BYTES))
        assert it.restart() == 0
        assert it.image() == before
        for stored in range(len(step) + 1):  # killed after so many of its words
            ffi.memmove(it.base, log, LOG_BYTES)
            it.count[0] = len(step)
            it.load(changed(before, step[:stored]))
            assert it.restart() == len(step)
            assert it.image() == after
            assert it.restart() == 0
        # Killed between the last word and the clearing, then again while recovering.
        ffi.memmove(it.base, log, LOG_BYTES)
        it.count[0] = len(step)
        it.load(changed(after, step[: len(step) // 2]))
        assert it.restart() == len(step)
        assert it.image() == after
        # And not killed at all.
        it.load(before)
        for at, value in step:
            it.put(at, value)
        lib.redo_commit(it.redo)
        assert it.image() == after
        assert (it.redo.count, it.count[0]) == (0, 0)


def test_a_step_of_the_largest_size() -> None:
    it = Steps(ffi.new("uint64_t[]", BYTES // 8))
    for n in range(lib.REDO_PAIRS_MAX):
        it.put(n % (2 * WORDS), n)
    lib.redo_commit(it.redo)
    last = lib.REDO_PAIRS_MAX
    for at in range(2 * WORDS):
        assert it.words[at] == max(range(at, last, 2 * WORDS))
    image = it.image()
    lib.redo_commit(it.redo)  # an empty step is no step
    assert it.image() == image
    assert lib.REDO_PAIRS_SOFT < lib.REDO_PAIRS_MAX


def test_killed_committers_leave_whole_steps() -> None:
    """Each step sets as many words as a log holds to one value; they must never differ.

    The steps are prepared, so that a process that makes them is in the middle of one most of
    the time.
    """
    count = lib.REDO_PAIRS_MAX
    words_bytes = count * 8
    shared = mmap.mmap(-1, LOG_BYTES + words_bytes + 8)
    base = ffi.cast("char *", ffi.from_buffer("char[]", shared))
    made = ffi.cast("uint64_t *", base + LOG_BYTES + words_bytes)  # steps made; not in the log
    redo = ffi.new("struct redo *", {"log": ffi.cast("struct redo_log *", base), "base": base})
    values = [bytes([n]) * 8 for n in range(4)]
    prepared = [
        b"".join((LOG_BYTES + at * 8).to_bytes(8, "little") + value for at in range(count))
        for value in values
    ]

    def make_steps() -> None:
        lib.redo_recover(redo)
        while True:
            step = made[0] + 1
            ffi.memmove(redo.log.pairs, prepared[step % len(prepared)], count * 16)
            redo.count = count
            lib.redo_commit(redo)
            made[0] = step

    def reached(goal: int) -> bool:
        return int(made[0]) >= goal

    chance = random.Random(1)
    within = 0  # kills in the middle of a step
    for _ in range(100):
        child = os.fork()
        if child == 0:
            try:
                make_steps()
            finally:
                os._exit(1)
        goal = made[0] + chance.randrange(1, 20)
        eventually(partial(reached, goal), "steps are made")
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        redo.count = 0
        within += lib.redo_recover(redo) > 0
        words = bytes(ffi.buffer(base + LOG_BYTES, words_bytes))
        now, following = made[0] % len(values), (made[0] + 1) % len(values)
        assert words in (values[now] * count, values[following] * count)
        if words == values[following] * count:
            made[0] += 1
    assert within > 0
