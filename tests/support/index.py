"""The subject index: from a published subject to its recipients. See index.h.

The router's C calls the index itself; this wrapper is for tests and for bench/bench_native.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from native import ffi, lib

PORTS_MAX: int = lib.PORTS_MAX
SLOT_BITS: int = lib.INDEX_SLOT_BITS
SUBJECT_BYTES_MAX: int = lib.INDEX_SUBJECT_MAX


def sub_id(port: int, slot: int) -> int:
    """A subscription id, as INDEX_SUB()."""
    return port << SLOT_BITS | slot


@dataclass(frozen=True)
class Group:
    """One queue group of a match: exactly one member gets the message."""

    queue: int
    subs: tuple[int, ...]
    conns: tuple[int, ...]
    turn: int


@dataclass(frozen=True)
class Match:
    """A copy of the recipients of one subject."""

    subs: tuple[int, ...]
    conns: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Stats:
    """The fields of struct index_stats."""

    subs: int
    nodes: int
    nodes_cached: int
    nodes_max: int
    trie_nodes: int
    queues: int
    blocks: int
    table_size: int
    text_used_bytes: int
    block_used_bytes: int
    builds: int
    evictions: int
    steps: int
    forms: int


class SubjectIndex:
    """An index of its own mapping, closed with close() or the end of a with block."""

    def __init__(self, ports: int, subs_per_port: int, subjects: int, conns: int = 0) -> None:
        ret = ffi.new("struct index **")
        self._work = ffi.new("uint64_t *")
        conf = ffi.new("struct index_conf *", (ports, subs_per_port, subjects, conns, self._work))
        _check(lib.index_open(conf, ret))
        self._ix: Any = ret[0]

    @property
    def pointer(self) -> Any:
        """The struct index * for C that works on it; valid until close()."""
        if self._ix is None:
            raise ValueError("the index is closed")
        return self._ix

    def add(self, sub: int, conn: int, subject: bytes, queue: bytes = b"") -> None:
        """Adds a subscription; one that is there already in the same form is left alone.

        FileExistsError: the id is taken by another; OSError(ENOSPC): a pool is full.
        """
        _check(lib.index_add(self.pointer, sub, conn, subject, len(subject), queue, len(queue)))

    def remove(self, sub: int) -> None:
        """Removes a subscription; FileNotFoundError: it was not there."""
        _check(lib.index_remove(self.pointer, sub))

    def match(self, subject: bytes, pick: bool = False) -> Match:
        """The recipients of a subject. pick: pass the turn of each group on, as a router does.

        The turn in the copy is the one before it was passed on.
        """
        ix = self.pointer
        found = lib.index_match(ix, subject, len(subject), lib.index_hash(subject, len(subject)))
        groups = []
        for i in range(found.group_count):
            g = found.groups[i]
            subs, conns = _words(g.subs, g.count), _words(g.conns, g.count)
            turn = lib.index_group_pick(found.groups + i) if pick else g.next
            groups.append(Group(g.queue, subs, conns, turn))
        return Match(
            _words(found.subs, found.count),
            _words(found.conns, found.count),
            tuple(groups),
        )

    def restoring(self, on: bool) -> None:
        """While it is on, forms are not bounded."""
        lib.index_restoring(self.pointer, on)

    @property
    def work(self) -> int:
        """What matches have cost so far."""
        return int(self._work[0])

    def stats(self) -> Stats:
        """Counts of everything the index holds."""
        ret = ffi.new("struct index_stats *")
        lib.index_stats(self.pointer, ret)
        return Stats(**{name: getattr(ret, name) for name in Stats.__dataclass_fields__})

    def close(self) -> None:
        """Unmaps the index; closing twice is allowed."""
        if self._ix is not None:
            lib.index_close(self._ix)
            self._ix = None

    def __enter__(self) -> SubjectIndex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _words(array: Any, count: int) -> tuple[int, ...]:
    return tuple(ffi.unpack(array, count)) if count else ()


def _check(code: int) -> None:
    if code < 0:
        raise OSError(-code, os.strerror(-code))
