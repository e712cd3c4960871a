"""Looking for broken rules in the segments of an instance (native/fsck.c)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from midair import names
from native import ffi, lib
from native.segment import check

KINDS: dict[str, int] = {
    names.CONNTABLE: lib.SEGMENT_CONNTABLE,
    names.ARENA: lib.SEGMENT_ARENA,
    names.JOURNAL: lib.SEGMENT_JOURNAL,
    names.PORT: lib.SEGMENT_PORT,
    names.ROUTING: lib.SEGMENT_ROUTING,
}
NOUNS = {kind: noun for noun, kind in KINDS.items()}
# Number of a check -> its name: enum fsck_code without its prefix, in small letters.
CODES: dict[int, str] = {
    value: name.removeprefix("FSCK_").lower()
    for value, name in ffi.typeof("enum fsck_code").elements.items()
    if name != "FSCK_CODES"
}
assert len(CODES) == lib.FSCK_CODES
COUNTS = tuple(name for name, _ in ffi.typeof("struct fsck_counts").fields)


@dataclass(frozen=True)
class Raw:
    """A finding as C has it: the check, the segment, and the numbers the check is about."""

    check: str
    noun: str
    index: int
    where: tuple[int, ...]

    @property
    def identity(self) -> tuple[str, str, int, tuple[int, ...]]:
        """What makes it the same finding when it is found again."""
        return self.check, self.noun, self.index, self.where[:4]


class Pass:
    """One pass over mapped segments. They stay mapped as long as it is open."""

    def __init__(self, dead: bool) -> None:
        found = ffi.new("struct fsck **")
        check(lib.fsck_open(int(dead), found), "checking")
        self._f = found[0]
        self._buffers: list[Any] = []

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lib.fsck_close(self._f)
        for buffer in self._buffers:
            ffi.release(buffer)

    def add(self, noun: str, index: int, mapped: mmap.mmap) -> bool:
        """Takes a segment in; False if it cannot be used, which is a finding."""
        buffer = ffi.from_buffer(mapped)
        self._buffers.append(buffer)
        base = ffi.cast("void *", buffer)
        result = lib.fsck_add(self._f, KINDS[noun], index, base, len(mapped))
        return check(result, f"checking {noun}") == 0

    def add_queue(self, orders: bool, index: int, depth: int, messages: int) -> None:
        lib.fsck_add_queue(self._f, int(orders), index, depth, messages)

    def finish_steps(self) -> int:
        """Stores what committed steps still have to store, in the mappings: words stored."""
        return int(lib.fsck_finish_steps(self._f))

    def run(self) -> list[Raw]:
        """The pass itself; with what adding the segments found."""
        count = lib.fsck_run(self._f)
        found = lib.fsck_found(self._f)
        return [
            Raw(
                CODES[found[at].code],
                NOUNS[found[at].kind],
                found[at].index,
                tuple(int(word) for word in found[at].where),
            )
            for at in range(count)
        ]

    def counts(self) -> dict[str, int]:
        it = lib.fsck_get_counts(self._f)
        return {name: int(getattr(it, name)) for name in COUNTS}

    def free_leaks(self) -> int:
        """Completes the words of leaked messages: how many."""
        return int(lib.fsck_free_leaks(self._f))

    def free_slots(self) -> int:
        """Frees slots of connections that are over: how many."""
        return int(lib.fsck_free_slots(self._f))
