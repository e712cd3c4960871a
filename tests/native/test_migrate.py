"""Segments of release 0.1 become segments of today's layout (native/src/migrate).

Method: segments are written as that release would have left them, from its frozen structs, with
noise in every field that is data. They are converted, and every record is compared by the names of
its fields: what both layouts have is the same, what only the new one has is zero. Shows rules M1 to
M4.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from midair import names
from midair.errors import LayoutError
from midair.process import ipc
from midair.process.runtime import Runtime
from native import lib, migrate
from native.migrate import Age, Memory
from tests.support.segments import declare
from tests.support.segments import ffi as new_ffi

old_ffi = declare(("release_0_1",))
MAGIC, PAGE = ipc.MAGIC, 4096
CHUNKS, CONNS, SUBS, BLOCKS, SESSIONS, CONNMGRS = 64, 96, 80, 16, 200, 3
CELLS, REQUESTS, LEGS = 65536, 65536, 131072
FREE, OPEN, CLOSED, CHAIN = range(4)
CONNECTED = 1 << 13


def page_up(n: int) -> int:
    return (n + PAGE - 1) // PAGE * PAGE


class Segment:
    """A file in /dev/shm, mapped, as a struct of one of the two releases."""

    def __init__(self, name: str, ffi: Any, kind: str, size: int = 0) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0)
        fd = os.open(ipc.SHM / name[1:], flags, 0o600)
        if size:
            os.ftruncate(fd, size)
        self.map = mmap.mmap(fd, 0)
        os.close(fd)
        self.name = name
        self.ffi = ffi
        self.it = ffi.cast(f"struct {kind} *", ffi.from_buffer(self.map))

    def at(self, offset: int, kind: str) -> Any:
        return self.ffi.cast(f"struct {kind} *", self.ffi.cast("char *", self.it) + offset)

    def bytes(self, offset: int, count: int) -> bytes:
        return self.map[offset : offset + count]

    def close(self) -> None:
        self.it = None
        self.map.close()


class Release01:
    """Makes segments of release 0.1, with noise in their data."""

    def __init__(self, instance: str, seed: int) -> None:
        self.place = Runtime.create(instance)
        self.random = random.Random(seed)
        self.made: list[Segment] = []

    def segment(self, noun: str, index: int | None, struct: str, size: int) -> Segment:
        name = self.place.segment(noun, index)
        self.made.append(Segment(name, old_ffi, struct, size))
        return self.made[-1]

    def finish(self, made: Segment, kind: int, layout: int, fingerprint: int) -> Segment:
        header = made.it.header
        header.kind, header.layout = kind, layout
        header.fingerprint, header.bytes = fingerprint, len(made.map)
        header.magic = MAGIC
        return made

    def noise(self, at: Any, kind: str) -> None:
        struct = old_ffi.sizeof(f"struct {kind}")
        old_ffi.memmove(at, self.random.randbytes(struct), struct)

    def records(self, made: Segment, offset: int, kind: str, count: int) -> None:
        first = made.at(offset, kind)
        for n in range(count):
            self.noise(first + n, kind)

    def table(self) -> Segment:
        made = self.segment(names.CONNTABLE, None, "r01_conntable", 128 + CONNS * 128)
        made.it.capacity, made.it.next_uid, made.it.high = CONNS, 777, CONNS - 5
        self.records(made, 128, "r01_slot", CONNS - 5)
        return self.finish(made, lib.SEGMENT_CONNTABLE, 2, 128 << 32 | 128 << 8 | 3)

    def arena(self, index: int) -> Segment:
        chunks = old_ffi.sizeof("struct r01_arena")
        words = page_up(chunks + CHUNKS * 64)
        entries = page_up(words + CHUNKS * 4096 * 8)
        data = page_up(entries + CHUNKS * 4096 * 40)
        size = data + CHUNKS * 128 * 1024 + 64
        made = self.segment(names.ARENA, index, "r01_arena", size)
        arena = made.it
        arena.owner, arena.chunk_count = index, CHUNKS
        arena.words, arena.entries, arena.data = words, entries, data
        for n in range(0, CHUNKS, 3):
            chunk = arena.chunks[n]
            chunk.state = self.random.choice((FREE, OPEN, CLOSED, CHAIN))
            chunk.next = self.random.randint(0, CHUNKS)
            chunk.messages = self.random.choice((0, 1, 100, 4096))
            chunk.freed = self.random.randint(0, 9)
            for word in range(0, 4096, 7):
                old_ffi.cast("uint64_t *", made.at(words, "r01_chunk"))[n * 4096 + word] = (
                    self.random.getrandbits(64)
                )
            self.records(made, entries + n * 4096 * 40, "r01_entry", chunk.messages)
            for entry in range(chunk.messages):  # 0 or 1: what is above it is the protocol now
                made.at(entries + n * 4096 * 40, "r01_entry")[entry].usual &= 1
            made.map[data + n * 131072 : data + n * 131072 + 131072] = self.random.randbytes(131072)
        arena.maybe_free[0] = self.random.getrandbits(64)
        sizes = (chunks, 64 << 16, 40 << 32, 128 * 1024 << 40)
        return self.finish(made, lib.SEGMENT_ARENA, 3, _xor(sizes))

    def journal(self, index: int) -> Segment:
        head = old_ffi.sizeof("struct r01_journal")
        conns = page_up(head)
        subs = conns + page_up(CONNS * 128)
        segs = subs + page_up(SUBS * 64)
        blocks = segs + page_up(BLOCKS * 8 * 32)
        made = self.segment(names.JOURNAL, index, "r01_journal", blocks + BLOCKS * 16384)
        journal = made.it
        self.noise(old_ffi.addressof(made.it.inbox), "r01_inbox")
        self.noise(old_ffi.addressof(made.it.refs), "r01_ring")
        journal.index, journal.conns, journal.subs, journal.blocks = index, CONNS, SUBS, BLOCKS
        journal.conns_at, journal.subs_at = conns, subs
        journal.segs_at, journal.blocks_at = segs, blocks
        journal.applied, journal.done = 41, 40
        journal.conns_high, journal.subs_high = CONNS - 3, SUBS - 4
        journal.segs_high, journal.blocks_high = BLOCKS * 8 - 1, BLOCKS - 2
        for n in range(32):
            journal.open_handle[n] = self.random.getrandbits(64)
        self.records(made, conns, "r01_conn", CONNS - 3)
        for n in range(CONNS - 3):  # NONE to CLOSING; OPEN is CONNECTED and has no name
            conn = made.at(conns, "r01_conn")[n]
            conn.phase = self.random.getrandbits(24) & ~0xFF | CONNECTED | n % 5
            if n % 5 == lib.PHASE_OPEN:
                old_ffi.memmove(conn.name, bytes(48), 48)
        self.records(made, subs, "r01_sub", SUBS - 4)
        self.records(made, segs, "r01_seg", BLOCKS * 8 - 1)
        made.map[blocks : blocks + 5 * 16384] = self.random.randbytes(5 * 16384)
        sizes = (head, 128 << 24, 64 << 32, 32 << 40, 16384 << 44, 4 << 60)
        return self.finish(made, lib.SEGMENT_JOURNAL, 2, _xor(sizes))

    def routing(self) -> Segment:
        size = {name: old_ffi.sizeof(f"struct r01_{name}") for name in ("routing", "lane")}
        lanes = page_up(size["routing"])
        sessions = lanes + page_up(CONNMGRS * size["lane"])
        subs = sessions + page_up(SESSIONS * 32)
        cells = subs + page_up(CONNMGRS * SUBS * 128)
        requests = cells + CELLS * 128
        legs = requests + REQUESTS * 192
        named = legs + LEGS * 64
        end = named + page_up(SESSIONS * 64)
        made = self.segment(names.ROUTING, None, "r01_routing", end)
        it = made.it
        it.connmgrs, it.sessions, it.subs_each, it.cells = CONNMGRS, SESSIONS, SUBS, CELLS
        it.lanes_at, it.sessions_at, it.subs_at, it.cells_at = lanes, sessions, subs, cells
        it.requests_at, it.legs_at, it.names_at = requests, legs, named
        it.step, it.cells_high = 99, 300
        it.requests_high, it.legs_high, it.names_high = 50, 60, SESSIONS - 1
        for n in range(CONNMGRS):
            it.subs_high[n] = SUBS - n
            self.records(made, subs + n * SUBS * 128, "r01_rsub", SUBS - n)
            self.noise(old_ffi.addressof(getattr(it, "in")[n]), "r01_in")
        self.records(made, lanes, "r01_lane", CONNMGRS)
        self.records(made, sessions, "r01_session", SESSIONS)
        made.map[cells : cells + 300 * 128] = self.random.randbytes(300 * 128)
        self.records(made, requests, "r01_request", 50)
        self.records(made, legs, "r01_leg", 60)
        self.records(made, named, "r01_name", SESSIONS - 1)
        sizes = (
            *(size["routing"], 128 << 24, 32 << 32, size["lane"] << 40, 192 << 48, 64 << 56),
            4 << 60,
        )
        return self.finish(made, lib.SEGMENT_ROUTING, 3, _xor(sizes))


def _xor(sizes: tuple[int, ...]) -> int:
    mixed = 0
    for size in sizes:
        mixed ^= size
    return mixed & (1 << 64) - 1


@pytest.fixture(params=(1, 2))
def old(request: pytest.FixtureRequest, instance_name: str) -> Iterator[Release01]:
    made = Release01(instance_name, request.param)
    yield made
    for segment in made.made:
        with contextlib.suppress(ValueError, BufferError):
            segment.close()


def raw(ffi: Any, value: Any) -> bytes | int:
    if not isinstance(value, ffi.CData):
        return int(value)
    is_array = ffi.typeof(value).kind == "array"
    return bytes(ffi.buffer(value if is_array else ffi.addressof(value)))


# A leg whose responder was given a reply subject without a token.
MARKS = {("mode_leg", "bare")}


def same(old: Any, old_kind: str, new: Any, new_kind: str) -> None:
    """Every field both have is equal (a longer text ends in zeros); the others are zero.

    But for what says that it is of the old release, MARKS: the test of its segment looks at it.
    """
    before = {name for name, _ in old_ffi.typeof(f"struct {old_kind}").fields}
    padding = {name for name in before if name.startswith(("pad", "reserved"))}
    for name, _ in new_ffi.typeof(f"struct {new_kind}").fields:
        if name in ("redo", "header"):
            continue
        value = getattr(new, name)
        if isinstance(value, bytes):  # a single char
            value = value[0]
        found = raw(new_ffi, value)
        if (new_kind, name) in MARKS:
            continue
        if name not in before or name in padding:
            assert not any(found) if isinstance(found, bytes) else found == 0, (new_kind, name)
            continue
        expected = raw(old_ffi, getattr(old, name))
        if isinstance(found, bytes):
            assert isinstance(expected, bytes)
            assert found[: len(expected)] == expected, (new_kind, name)
            assert not any(found[len(expected) :]), (new_kind, name)
        else:
            assert found == expected, (new_kind, name)
    missing = before - padding - {name for name, _ in new_ffi.typeof(f"struct {new_kind}").fields}
    assert missing == set(), f"{new_kind} has lost {missing}"


def converted(memory: Memory, name: str, kind: str, layout: int, before: int) -> Segment:
    assert migrate.age(name) is Age.CONVERTIBLE
    made = memory.convert()
    assert made >= 1
    assert migrate.age(name) is Age.CURRENT
    assert not (ipc.SHM / (name[1:] + migrate.BESIDE)).exists()
    header = ipc.segment_header(name)
    assert header is not None
    assert (header.layout, header.bytes) == (layout, os.stat(ipc.SHM / name[1:]).st_size)
    result = Segment(name, new_ffi, kind)
    mapped = new_ffi.cast("struct segment_header *", result.it)
    assert mapped.migrated_from == before
    return result


def rows(old: Segment, at: int, kind: str, new: Segment, to: int, into: str, count: int) -> None:
    before, after = old.at(at, kind), new.at(to, into)
    for n in range(count):
        same(before[n], kind, after[n], into)


def test_the_connection_table(old: Release01) -> None:
    before = old.table()
    memory = migrate.for_dispatcher(old.place)
    after = converted(memory, before.name, "conntable", lib.CONNTABLE_LAYOUT, 2)
    assert (after.it.capacity, after.it.next_uid, after.it.high) == (CONNS, 777, CONNS - 5)
    rows(before, 128, "r01_slot", after, 128, "conntable_slot", CONNS)
    assert memory.outdated() == []


def test_an_arena(old: Release01) -> None:
    before = old.arena(1)
    after = converted(
        Memory(old.place, [before.name], [before.name]), before.name, "arena", lib.ARENA_LAYOUT, 3
    )
    it = after.it
    assert (it.owner, it.chunk_count) == (1, CHUNKS)
    assert bytes(old_ffi.buffer(before.it.maybe_free)) == bytes(new_ffi.buffer(it.maybe_free))
    words = CHUNKS * 4096 * 8
    assert before.bytes(before.it.words, words) == after.bytes(it.words, words), "every generation"
    used = 0
    for n in range(CHUNKS):
        chunk = before.it.chunks[n]
        same(chunk, "r01_chunk", it.chunks[n], "chunk")
        if chunk.state == FREE:
            continue
        used += 1
        data = slice(before.it.data + n * 131072, before.it.data + (n + 1) * 131072)
        assert before.map[data] == after.bytes(it.data + n * 131072, 131072)
        if chunk.state != CHAIN:
            at, to = before.it.entries + n * 4096 * 40, it.entries + n * 4096 * 48
            rows(before, at, "r01_entry", after, to, "arena_entry", chunk.messages)
    assert used, "the seed has none"
    chunks = CHUNKS * 131072
    assert os.stat(ipc.SHM / before.name[1:]).st_blocks * 512 < chunks, "holes stay holes"


def test_a_journal(old: Release01) -> None:
    old.arena(2)
    before = old.journal(2)
    memory = migrate.for_connmgr(old.place, 2, 3)
    after = converted(memory, before.name, "journal", lib.JOURNAL_LAYOUT, 2)
    it, was = after.it, before.it
    for name in ("conns", "subs", "blocks", "conns_high", "subs_high"):
        assert getattr(it, name) == getattr(was, name)
    for name in ("index", "applied", "done"):
        assert getattr(it.port, name) == getattr(was, name)
    assert (it.segs_high, it.blocks_high) == (was.segs_high, was.blocks_high)
    assert (it.port.kind, it.port.redo.count) == (0, 0)
    for name in ("open_handle", "inbox", "refs"):
        assert raw(new_ffi, getattr(it.port, name)) == raw(old_ffi, getattr(was, name))
    rows(before, was.conns_at, "r01_conn", after, it.conns_at, "conn_rec", CONNS)
    rows(before, was.subs_at, "r01_sub", after, it.subs_at, "sub_rec", SUBS)
    rows(before, was.segs_at, "r01_seg", after, it.segs_at, "out_seg", BLOCKS * 8)
    blocks = BLOCKS * 16384
    assert before.bytes(was.blocks_at, blocks) == after.bytes(it.blocks_at, blocks)


def test_the_routing_segment(old: Release01) -> None:
    before = old.routing()
    memory = migrate.for_router(old.place)
    after = converted(memory, before.name, "routing", lib.ROUTING_LAYOUT, 3)
    it, was = after.it, before.it
    assert (it.ports, it.ports_high) == (lib.PORTS_MAX, was.connmgrs)
    assert it.clients == was.sessions
    for name in ("subs_each", "cells", "step", "cells_high", "names_high"):
        assert getattr(it, name) == getattr(was, name)
    assert (it.requests_high, it.legs_high) == (was.requests_high, was.legs_high)
    for name in ("subs_high", "in"):
        assert raw(new_ffi, getattr(it, name)) == raw(old_ffi, getattr(was, name))
    assert not any(it.kinds)
    for n in range(CONNMGRS):
        size = old_ffi.sizeof("struct r01_lane")
        at, to = was.lanes_at + n * size, it.lanes_at + n * size
        assert before.bytes(at, size) == after.bytes(to, size)
        at, to = was.subs_at + n * SUBS * 128, it.subs_at + n * SUBS * 192
        rows(before, at, "r01_rsub", after, to, "routing_sub", SUBS)
    rows(before, was.sessions_at, "r01_session", after, it.clients_at, "routing_client", SESSIONS)
    assert before.bytes(was.cells_at, CELLS * 128) == after.bytes(it.cells_at, CELLS * 128)
    rows(before, was.requests_at, "r01_request", after, it.requests_at, "mode_request", 60)
    rows(before, was.legs_at, "r01_leg", after, it.legs_at, "mode_leg", 70)
    legs = after.at(it.legs_at, "mode_leg")
    assert [legs[n].bare for n in range(70)] == [int(n < was.legs_high) for n in range(70)]
    rows(before, was.names_at, "r01_name", after, it.names_at, "mode_name", SESSIONS)


def test_who_was_greeted_and_who_has_a_name(old: Release01) -> None:
    """They are in a phase of their own today; of a name the router is asked again."""
    old.arena(0)
    before = old.journal(0)
    first = before.at(before.it.conns_at, "r01_conn")
    first[3].phase, first[4].phase, first[5].phase = 0x302, CONNECTED | 0x302, CONNECTED | 0x302
    for n, name in ((3, b""), (4, b""), (5, b"type.instance")):
        old_ffi.memmove(first[n].name, name.ljust(48, b"\0"), 48)
    assert migrate.for_connmgr(old.place, 0, 1).convert() == 2
    after = Segment(before.name, new_ffi, "journal")
    rows = after.at(after.it.conns_at, "conn_rec")
    assert rows[3].phase == 0x300 | lib.PHASE_GREETED
    assert rows[4].phase == CONNECTED | 0x300 | lib.PHASE_OPEN
    assert rows[5].phase == CONNECTED | 0x300 | lib.PHASE_GREETED
    assert new_ffi.string(rows[5].name) == b"type.instance"


def commit(journal: Segment, pairs: list[tuple[int, int]]) -> None:
    """A step that the release before committed and did not live to store."""
    for n, (offset, value) in enumerate(pairs):
        journal.it.redo.pairs[n].offset, journal.it.redo.pairs[n].value = offset, value
    journal.it.redo.count = len(pairs)


def test_a_committed_step_is_finished_first(old: Release01) -> None:
    arena, journal = old.arena(0), old.journal(0)
    in_pos = journal.it.conns_at + 7 * 128 + old_ffi.offsetof("struct r01_conn", "in_pos")
    messages = old_ffi.offsetof("struct r01_arena", "chunks") + 5 * 64 + 8
    commit(journal, [(in_pos, 123456), (messages | 1 << 63, 17)])
    assert migrate.for_connmgr(old.place, 0, 1).convert() == 2
    after = Segment(journal.name, new_ffi, "journal")
    assert after.at(after.it.conns_at, "conn_rec")[7].in_pos == 123456
    assert after.it.port.redo.count == 0
    bodies = Segment(arena.name, new_ffi, "arena")
    assert bodies.it.chunks[5].messages == 17


def test_a_step_of_an_arena_that_is_gone_is_not_guessed(old: Release01) -> None:
    """It cannot be left behind: the journal's step is finished before the arena is converted."""
    arena, journal = old.arena(0), old.journal(0)
    Memory(old.place, [arena.name], [arena.name]).convert()
    commit(journal, [(8 | 1 << 63, 1)])
    with pytest.raises(LayoutError, match="is not what its header says"):
        migrate.for_connmgr(old.place, 0, 1).convert()
    assert migrate.age(journal.name) is Age.CONVERTIBLE


def test_what_a_killed_owner_had_begun_is_made_anew(old: Release01) -> None:
    before = old.table()
    (ipc.SHM / (before.name[1:] + migrate.BESIDE)).write_bytes(b"half of it")
    converted(migrate.for_dispatcher(old.place), before.name, "conntable", lib.CONNTABLE_LAYOUT, 2)


@pytest.mark.parametrize("field", ["capacity", "high"])
def test_what_contradicts_its_header_is_left_alone(old: Release01, field: str) -> None:
    before = old.table()
    setattr(before.it, field, CONNS + 1)
    whole = before.map[:]
    with pytest.raises(LayoutError, match="is not what its header says"):
        migrate.for_dispatcher(old.place).convert()
    assert before.map[:] == whole
    assert migrate.age(before.name) is Age.CONVERTIBLE


def test_what_nobody_can_convert_is_foreign(old: Release01) -> None:
    before = old.table()
    assert migrate.age(old.place.segment(names.ROUTING)) is Age.MISSING
    for field, value in (("layout", 99), ("layout", 1), ("fingerprint", 5), ("kind", 77)):
        was = getattr(before.it.header, field)
        setattr(before.it.header, field, value)
        assert migrate.age(before.name) is Age.FOREIGN
        setattr(before.it.header, field, was)
    assert migrate.age(before.name) is Age.CONVERTIBLE
    before.it.header.magic = 0
    assert migrate.age(before.name) is Age.MISSING
