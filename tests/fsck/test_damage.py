"""What `midair fsck` sees of damage at random, and what it cannot see (docs/operations.md).

The same dead instance as in test_rules.py. Every kind of word that fsck is said to judge is
overwritten with values that are drawn at random from those it must not have; fsck has to report an
error each time. What nobody can judge (bodies, output, times) is overwritten too, and is no error.
Then anything anywhere is: fsck has to come to an end.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from midair.fsck import command as fsck
from midair.fsck.checks import ERROR
from native import lib
from tests.fsck.test_rules import CONNMGRS, Dead, remove
from tests.support.segments import CHUNK_BYTES, CHUNK_MESSAGES, SEG_BODY, SUB_ACTIVE, Segments, ffi

SEEDS = 12
KINDS = ("conntable", "arena", "journal", "routing")
Draw = random.Random
# Sets one word, drawn at random, to a value it must not have.
Damage = Callable[[Segments, Dead, Draw], None]


@pytest.fixture(scope="module")
def dead(request: pytest.FixtureRequest) -> Iterator[Dead]:
    it = Dead(request.node.nodeid)
    yield it
    remove(it.name)


def another(draw: Draw, old: int, bits: int) -> int:
    """Any other value."""
    return (old + draw.randrange(1, 1 << bits)) % (1 << bits)


def header(of: Callable[[Segments, Draw], Any]) -> Damage:
    def damage(s: Segments, _dead: Dead, draw: Draw) -> None:
        it = of(s, draw)
        field, bits = draw.choice(
            [("magic", 64), ("kind", 32), ("layout", 32), ("fingerprint", 64), ("bytes", 64)]
        )
        s.set(it, field, another(draw, int(getattr(it, field)), bits) or 1)

    return damage


def release(of: Callable[[Segments, Draw], Any]) -> Damage:
    def damage(s: Segments, _dead: Dead, draw: Draw) -> None:
        s.set(of(s, draw), "release", bytes(draw.randrange(128, 256) for _ in range(24)))

    return damage


def word(of: Callable[[Segments, Dead, Draw], Any], *fields: str, low: int = 2**31) -> Damage:
    """One of the fields is so large that it leads nowhere."""

    def damage(s: Segments, dead: Dead, draw: Draw) -> None:
        it, field = of(s, dead, draw), draw.choice(fields)
        kind = dict(ffi.typeof(it).fields if ffi.typeof(it).kind == "struct" else
                    ffi.typeof(it).item.fields)[field].type  # fmt: skip
        top = 1 << 8 * ffi.sizeof(kind)
        s.set(it, field, draw.randrange(min(low, top - 1), top))

    return damage


def zeros(of: Callable[[Segments, Dead, Draw], Any]) -> Damage:
    """One of an array of reserved words."""

    def damage(s: Segments, dead: Dead, draw: Draw) -> None:
        array = of(s, dead, draw)
        top = 1 << 8 * ffi.sizeof(ffi.typeof(array).item)
        s.set(array, draw.randrange(len(array)), draw.randrange(1, top))

    return damage


def any_of(draw: Draw, found: Any) -> Any:
    return draw.choice(list(found))


def used_slot(s: Segments, dead: Dead, draw: Draw) -> Any:
    return s.table.slots[draw.choice([dead.publisher, dead.one, dead.two])]


def reader(s: Segments, dead: Dead, draw: Draw) -> Any:
    """The record of a connection with output pending."""
    return s.conns(1)[draw.choice([dead.one, dead.two])]


def active_sub(s: Segments, _dead: Dead, draw: Draw) -> Any:
    subs = s.subs(1)
    high = s.journals[1].subs_high
    return subs[any_of(draw, (n for n in range(high) if subs[n].word & SUB_ACTIVE))]


def routed_sub(s: Segments, _dead: Dead, draw: Draw) -> Any:
    subs = s.routing_subs(1)
    high = s.routing.subs_high[1]
    return subs[any_of(draw, (n for n in range(high) if subs[n].word & SUB_ACTIVE))]


def head_of_chain(s: Segments, _dead: Dead, draw: Draw) -> Any:
    arena = s.arenas[0]
    heads = [
        n for n in range(arena.chunk_count) if arena.chunks[n].next and arena.chunks[n].messages
    ]
    return arena.chunks[any_of(draw, heads)]


def any_chunk(s: Segments, _dead: Dead, draw: Draw) -> Any:
    return s.arenas[0].chunks[draw.randrange(s.arenas[0].chunk_count)]


def live_entry(s: Segments, dead: Dead, draw: Draw) -> Any:
    """Of a message that pending output refers to."""
    segs = s.segs(1)
    output = s.output(1, draw.choice([dead.one, dead.two]))[64:]
    handles = [segs[at].handle for at in output if segs[at].ref & SEG_BODY]
    return s.entries(0)[any_of(draw, handles) & 0xFFFFFFFF]


def output_segment(s: Segments, dead: Dead, draw: Draw) -> Any:
    segs = s.segs(1)
    output = s.output(1, draw.choice([dead.one, dead.two]))
    return segs[any_of(draw, [at for at in output[:-1] if not segs[at].ref & SEG_BODY])]


def redo_count(of: Callable[[Segments], Any]) -> Damage:
    def damage(s: Segments, _dead: Dead, draw: Draw) -> None:
        s.set(of(s), "count", draw.randrange(2**20, 2**64))

    return damage


# What is claimed to be seen, by kind of segment.
SEEN: dict[str, list[Damage]] = {
    "conntable": [
        header(lambda s, _: s.table.header),
        release(lambda s, _: s.table.header),
        word(lambda s, _d, _r: s.table, "capacity", "high"),
        word(used_slot, "state", "connmgr", "uid"),
        word(used_slot, "listener", low=64),
        zeros(lambda s, d, r: used_slot(s, d, r).reserved),
        zeros(lambda s, d, r: used_slot(s, d, r).pad),
        zeros(lambda s, _d, _r: s.table.reserved),
    ],
    "arena": [
        header(lambda s, r: s.arenas[r.randrange(CONNMGRS)].header),
        release(lambda s, r: s.arenas[r.randrange(CONNMGRS)].header),
        word(lambda s, _d, _r: s.arenas[0], "chunk_count", "words", "entries", "data"),
        word(any_chunk, "state", low=4),
        word(any_chunk, "messages", low=CHUNK_MESSAGES + 1),
        word(head_of_chain, "next"),
        word(live_entry, "chunk", "body", "subject"),
        zeros(lambda s, d, r: any_chunk(s, d, r).pad),
        zeros(lambda s, _d, _r: s.arenas[0].pad),
    ],
    "journal": [
        header(lambda s, r: s.journals[r.randrange(CONNMGRS)].port.header),
        release(lambda s, r: s.journals[r.randrange(CONNMGRS)].port.header),
        word(lambda s, _d, _r: s.journals[1], "conns", "subs", "blocks"),
        word(lambda s, _d, _r: s.journals[1], "conns_at", "subs_at", "segs_at", "blocks_at"),
        word(lambda s, _d, _r: s.journals[1], "conns_high", "subs_high", "segs_high"),
        word(lambda s, _d, _r: s.journals[1], "blocks_high"),
        word(lambda s, _d, _r: s.journals[1].port, "applied", "done"),
        word(lambda s, _d, _r: s.journals[1].port.refs, "sent"),
        redo_count(lambda s: s.journals[1].port.redo),
        word(reader, "phase", "out_head", low=2**33),
        word(reader, "protocol", "transport", low=64),
        word(reader, "in_raw", "in_number", "in_place", "in_plain", "out_raw", low=1),
        word(reader, "out_number", "out_place", "out_len", "in_end", "in_stash", low=1),
        word(output_segment, "next"),
        word(active_sub, "sid_len", low=65),
        word(active_sub, "sid_more", low=1),
        zeros(lambda s, d, r: reader(s, d, r).reserved),
        zeros(lambda s, d, r: active_sub(s, d, r).reserved),
        zeros(lambda s, _d, _r: s.journals[1].reserved1),
        zeros(lambda s, _d, _r: s.journals[1].port.refs.pad),
    ],
    "routing": [
        header(lambda s, _: s.routing.header),
        release(lambda s, _: s.routing.header),
        word(lambda s, _d, _r: s.routing, "ports", "clients", "subs_each", "cells"),
        word(lambda s, _d, _r: s.routing, "lanes_at", "clients_at", "subs_at", "cells_at"),
        word(lambda s, _d, _r: s.routing, "requests_at", "legs_at", "names_at"),
        word(lambda s, _d, _r: s.routing, "cells_high", "requests_high", "legs_high"),
        word(lambda s, _d, _r: s.routing, "names_high"),
        word(lambda s, _d, _r: s.lane(1).orders, "sent"),
        word(lambda s, _d, _r: getattr(s.routing, "in")[0], "done"),
        redo_count(lambda s: s.routing.redo),
        word(routed_sub, "uid", "more"),
        zeros(lambda s, d, r: routed_sub(s, d, r).reserved),
        zeros(lambda s, _d, _r: s.routing.reserved0),
        zeros(lambda s, _d, _r: s.lane(0).orders.pad),
        zeros(lambda s, d, r: s.sessions()[r.choice([d.one, d.two])].reserved),
    ],
}


def errors(name: str) -> list[str]:
    return [str(it) for it in fsck.examine(name).findings if it.severity == ERROR]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_claimed_to_be_seen_is_seen(dead: Dead, kind: str) -> None:
    assert errors(dead.name) == []
    with Segments(dead.name, CONNMGRS) as it:
        for at, damage in enumerate(SEEN[kind]):
            for seed in range(SEEDS):
                try:
                    damage(it, dead, random.Random(f"{kind} {at} {seed}"))
                    assert errors(dead.name), f"{kind}: damage {at}, seed {seed} is not seen"
                finally:
                    it.restore()
    assert errors(dead.name) == []


def bodies_and_output(s: Segments, dead: Dead, draw: Draw) -> tuple[Any, int]:
    """(where, bytes) of something whose value nobody can know."""
    entry = live_entry(s, dead, draw)
    arena = ffi.cast("char *", s.arenas[0])
    body = arena + s.arenas[0].data + entry.chunk * CHUNK_BYTES + entry.body
    ref = output_segment(s, dead, draw).ref
    journal = ffi.cast("char *", s.journals[1])
    block = journal + s.journals[1].blocks_at + (ref >> 32 & 0xFFFFFF) * lib.JOURNAL_BLOCK_BYTES
    return draw.choice([(body, min(64, entry.total_len)), (block + (ref & 0xFFFFFFFF), 8)])


def test_what_cannot_be_seen_is_no_error(dead: Dead) -> None:
    """Bytes of bodies and of output, times, counts: any value may be right."""
    with Segments(dead.name, CONNMGRS) as it:
        for seed in range(4 * SEEDS):
            draw = random.Random(f"unseen {seed}")
            where, size = bodies_and_output(it, dead, draw)
            before = bytes(ffi.buffer(where, size))
            ffi.memmove(where, draw.randbytes(size), size)
            try:
                it.set(live_entry(it, dead, draw), "received_ns", draw.randrange(2**64))
                it.set(used_slot(it, dead, draw), "accepted_ns", draw.randrange(1, 2**64))
                it.set(active_sub(it, dead, draw), "delivered", draw.randrange(2**64))
                assert errors(dead.name) == []
            finally:
                it.restore()
                ffi.memmove(where, before, size)
    assert errors(dead.name) == []


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_damaged_fsck_comes_to_an_end(dead: Dead, kind: str) -> None:
    """64 bytes anywhere in the first megabyte, 20 times: each time it ends by itself."""
    [path] = [
        path
        for (noun, index), path in fsck.segments(dead.name).items()
        if noun == kind and index == (1 if kind == "journal" else 0)
    ]
    fd = os.open(f"/dev/shm{path}", os.O_RDWR)
    try:
        for seed in range(20):
            draw = random.Random(f"{kind} anything {seed}")
            at = draw.randrange(64, min(os.fstat(fd).st_size, 1 << 20) - 64)
            before = os.pread(fd, 64, at)
            os.pwrite(fd, draw.randbytes(64), at)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    fsck.examine(dead.name)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0, f"{kind}, seed {seed}"
            os.pwrite(fd, before, at)
    finally:
        os.close(fd)
    assert errors(dead.name) == []
