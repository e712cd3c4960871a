"""How each rule of shared memory is broken, for test_rules.py: one word, or a few, changed.

The numbers are those of native/README.md. What is changed is in an instance that was killed with
output pending for two connections of connmgr 1, and with orders and references waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from native.conntable import CLOSED, FREE
from tests.support.segments import (
    CHUNK_MESSAGES,
    GENERATION,
    SEG_BODY,
    SEG_SHARED,
    SUB_ACTIVE,
    SUB_DYING,
    Segments,
    ffi,
    leak,
)

SID_LONG = 255
TAKEN_MAX = 64  # segments that one system call may take


class Places(Protocol):
    """Slots of the connections: a publisher on connmgr 0, two readers on connmgr 1."""

    publisher: int
    one: int
    two: int


Break = Callable[[Segments, Places], None]
BREAKS: list[tuple[str, str, str, Break]] = []  # check, rule, segment, how


def breaks(check: str, rule: str, segment: str) -> Callable[[Break], Break]:
    def note(how: Break) -> Break:
        BREAKS.append((check, rule, segment, how))
        return how

    return note


def live_message(s: Segments) -> int:
    """Handle of a message that pending output needs, and only one list after its first 64."""
    journal = s.segs(1)
    return int(next(journal[seg].handle for seg in bodies(s, 1)))


def bodies(s: Segments, connmgr: int) -> list[int]:
    """Segments with bodies that the kernel cannot have taken: those of the first connection."""
    record = next(i for i in range(64) if s.conns(connmgr)[i].out_head)
    segs = s.segs(connmgr)
    return [seg for seg in s.output(connmgr, record)[TAKEN_MAX:] if segs[seg].ref & SEG_BODY]


def chains(s: Segments) -> list[int]:
    """Heads of chains with a live message."""
    arena = s.arenas[0]
    return [
        c for c in range(arena.chunk_count) if arena.chunks[c].next and arena.chunks[c].messages
    ]


def free_sub(s: Segments, connmgr: int, sid: bytes) -> int:
    """The first active subscription with that sid."""
    subs = s.subs(connmgr)
    return next(
        i
        for i in range(s.journals[connmgr].subs_high)
        if subs[i].word & SUB_ACTIVE and ffi.buffer(subs[i].sid)[: subs[i].sid_len] == sid
    )


def waiting_order(s: Segments) -> Any:
    """The first order of the first batch that connmgr 1 was not sent yet."""
    ring = s.lane(1).orders
    return s.first_record(s.slot(ring, ring.sent + 1), "order_deliver")


def waiting_ref(s: Segments) -> Any:
    ring = s.journals[0].port.refs
    return s.first_record(s.slot(ring, ring.sent + 1), "ref_message")


for field, value in (
    ("magic", 1),
    ("kind", 2),
    ("layout", 99),
    ("fingerprint", 5),
    ("bytes", 4096),
):

    @breaks("header", "S1", "journal.1")
    def _(s: Segments, _at: Places, field: str = field, value: int = value) -> None:
        s.set(s.journals[1].port.header, field, value)


@breaks("unfinished", "S2", "arena.1")
def _(s: Segments, _at: Places) -> None:
    s.set(s.arenas[1].header, "magic", 0)


@breaks("geometry", "S1", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.routing, "subs_at", s.routing.subs_at + 4096)


@breaks("high_mark", "S1", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[0], "segs_high", 1 << 40)


@breaks("high_mark", "S1", "conntable")
def _(s: Segments, _at: Places) -> None:
    s.set(s.table, "high", s.table.capacity + 1)


@breaks("redo_waits", "J1", "journal.0")
def _(s: Segments, _at: Places) -> None:
    journal = s.journals[0]
    s.set(journal.port.redo.pairs[0], "offset", ffi.offsetof("struct port_log", "applied"))
    s.set(journal.port.redo.pairs[0], "value", journal.port.applied)
    s.set(journal.port.redo, "count", 1)


@breaks("redo_bad", "R1", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.routing.redo.pairs[0], "offset", 1 << 40)
    s.set(s.routing.redo, "count", 1)


@breaks("ring_tail", "B2", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[0].port.refs, "tail", s.journals[0].port.refs.tail | 0xFFFF)


@breaks("ring_sent", "B2", "routing")
def _(s: Segments, _at: Places) -> None:
    ring = s.lane(0).orders
    s.set(ring, "sent", ring.tail >> 16)


@breaks("ring_span", "B2", "journal.0")
def _(s: Segments, _at: Places) -> None:
    ring = s.journals[0].port.refs
    s.set(ring, "tail", (ring.sent + 65) << 16 | 40)


@breaks("seq_ahead", "B3", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(getattr(s.routing, "in")[0], "done", s.journals[0].port.refs.sent + 2)


@breaks("seq_behind", "B3", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(getattr(s.routing, "in")[0], "done", s.journals[0].port.refs.sent - 40)


@breaks("seq_lost", "B3", "routing")
def _(s: Segments, _at: Places) -> None:
    journal = s.journals[0]
    s.set(journal.port, "done", journal.port.done - 1)
    s.set(journal.port, "applied", journal.port.done)
    s.set(journal.port.inbox.batch, "seq", 0)


@breaks("batch_header", "B2", "routing")
def _(s: Segments, _at: Places) -> None:
    ring = s.lane(1).orders
    s.set(s.slot(ring, ring.sent + 1), "version", 7)


@breaks("record", "B1", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(waiting_ref(s), "type", 99)


@breaks("record", "B1", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(waiting_order(s), "recipients", 60000)


@breaks("inbox_gap", "B4", "journal.1")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[1].port.inbox.batch, "seq", s.journals[1].port.done + 2)


@breaks("inbox_batch", "B4", "journal.0")
def _(s: Segments, _at: Places) -> None:
    inbox = s.journals[0].port.inbox.batch
    s.set(inbox, "seq", s.journals[0].port.done + 1)
    s.set(s.first_record(inbox, "order"), "type", 77)


@breaks("in_at", "R4", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(getattr(s.routing, "in")[0], "at", 33)


@breaks("in_progress", "R4", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(getattr(s.routing, "in")[1], "progress", 5)


@breaks("aside", "R7", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.aside(0), "tail", 2 * 2**20)


@breaks("aside_entry", "R7", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.aside(1), "tail", 128)


@breaks("applied", "J5", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[0].port, "applied", s.journals[0].port.done + 2)


@breaks("applied_inbox", "J5", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[0].port, "applied", s.journals[0].port.done + 1)
    s.set(s.journals[0].port.inbox.batch, "seq", 0)


@breaks("open_handle", "L2", "journal.1")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[1].port.open_handle, 0, live_message(s) ^ 1 << 32)


@breaks("handle", "L3", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(waiting_order(s), "handle", 60 << 58)


@breaks("ref_dead", "L2", "journal.0")
def _(s: Segments, _at: Places) -> None:
    words, entry = s.word(waiting_ref(s).handle)
    s.set(words, entry, words[entry] + (1 << 32) & GENERATION)


@breaks("order_dead", "L2", "routing")
def _(s: Segments, _at: Places) -> None:
    words, entry = s.word(waiting_order(s).handle)
    s.set(words, entry, words[entry] | 1 << 58 | 2)


@breaks("order_sub", "J6", "routing")
def _(s: Segments, _at: Places) -> None:
    order = waiting_order(s)
    assert order.recipients == 2
    s.set(order.subs, 1, 900)


@breaks("table_state", "T3", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "state", 9)


@breaks("table_connmgr", "T2", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "connmgr", 20)


@breaks("table_uid", "T1", "conntable")
def _(s: Segments, _at: Places) -> None:
    s.set(s.table, "next_uid", 2)


@breaks("uid_twice", "T1", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "uid", s.table.slots[at.two].uid)


@breaks("table_alone", "T3", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(1)[at.one], "uid", 0)


@breaks("table_assigned", "T4", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "state", 1)
    s.set(s.conns(1)[at.one], "uid", 0)


@breaks("table_closed", "T3", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "state", CLOSED)


@breaks("conn_phase", "J1", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(1)[at.one], "phase", 7)


@breaks("conn_table", "T3", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "state", FREE)


@breaks("conn_buffer", "J2", "journal.0")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(0)[at.publisher], "buffer", (s.arenas[0].chunk_count + 1) << 32)


@breaks("conn_session", "J6", "journal.0")
def _(s: Segments, at: Places) -> None:
    s.set(s.sessions()[at.publisher], "uid", 0)


@breaks("out_link", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.segs(1)[s.output(1, at.one)[10]], "next", s.journals[1].segs_high + 1)


@breaks("out_link", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    """The list ends before its tail."""
    s.set(s.segs(1)[s.output(1, at.one)[10]], "next", 0)


@breaks("out_cycle", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    out = s.output(1, at.one)
    s.set(s.segs(1)[out[10]], "next", out[5] + 1)


@breaks("out_shared", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    one, two = s.output(1, at.one), s.output(1, at.two)
    s.set(s.segs(1)[one[-3]], "next", two[-2] + 1)
    s.set(s.conns(1)[at.one], "out_tail", two[-1] + 1)
    s.set(s.conns(1)[at.one], "out_end", s.conns(1)[at.two].out_end)


@breaks("out_pos", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.segs(1)[s.output(1, at.one)[10]], "pos", 3)


@breaks("out_block", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.segs(1)[a_block(s, at.one)], "ref", s.journals[1].blocks_high << 32)


@breaks("out_overlap", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    segs = s.segs(1)
    in_blocks = [seg for seg in s.output(1, at.one) if not segs[seg].ref & SEG_BODY]
    before, after = next(
        (a, b) for a, b in itertools.pairwise(in_blocks) if segs[a].ref >> 32 == segs[b].ref >> 32
    )
    s.set(segs[after], "ref", segs[before].ref)


@breaks("block_shared", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    segs = s.segs(1)
    s.set(segs[a_block(s, at.one)], "ref", segs[a_block(s, at.two)].ref)


@breaks("block_shared", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    """One of several, where the other has it alone."""
    segs = s.segs(1)
    s.set(segs[a_block(s, at.one)], "ref", segs[a_block(s, at.two)].ref | SEG_SHARED)


def a_block(s: Segments, slot: int) -> int:
    return next(seg for seg in s.output(1, slot) if not s.segs(1)[seg].ref & SEG_BODY)


@breaks("out_body", "J4", "journal.1")
def _(s: Segments, _at: Places) -> None:
    words, entry = s.word(live_message(s))
    s.set(words, entry, words[entry] | 1 << 58 | 2)


@breaks("out_body_range", "J3", "journal.1")
def _(s: Segments, _at: Places) -> None:
    s.set(s.segs(1)[bodies(s, 1)[0]], "skip", 1 << 31)


@breaks("out_left", "J3", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(1)[at.one], "phase", 4)


@breaks("sub_flags", "J6", "journal.0")
def _(s: Segments, _at: Places) -> None:
    sub = s.subs(0)[free_sub(s, 0, b"3")]
    s.set(sub, "word", sub.word | SUB_DYING)


@breaks("sub_conn", "J6", "journal.0")
def _(s: Segments, _at: Places) -> None:
    sub = s.subs(0)[free_sub(s, 0, b"3")]
    s.set(sub, "word", sub.word & ~0xFFFFFFFF | 60)


@breaks("sub_sid", "J6", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.subs(0)[free_sub(s, 0, b"3")], "sid_len", 0)


def long_sid(s: Segments) -> Any:
    subs = s.subs(0)
    found = (subs[i] for i in range(s.journals[0].subs_high))
    return next(it for it in found if it.word & SUB_ACTIVE and it.sid_len == SID_LONG)


@breaks("sub_cell", "J7", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(long_sid(s), "sid_more", free_sub(s, 0, b"3") + 1)


@breaks("sub_cell", "J7", "journal.0")
def _(s: Segments, _at: Places) -> None:
    """A chain that is longer than its sid."""
    s.set(long_sid(s), "sid_bytes", 70)


@breaks("sub_sid", "J6", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(long_sid(s), "sid_more", 0)


@breaks("sub_twice", "J6", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.subs(0)[free_sub(s, 0, b"3")], "sid", b"1")


@breaks("sub_unrouted", "R2", "journal.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.routing_subs(0)[free_sub(s, 0, b"3")], "word", 0)


@breaks("routed_free", "J6", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.subs(0)[free_sub(s, 0, b"3")], "word", 0)


@breaks("routed_free", "J6", "routing")
def _(s: Segments, _at: Places) -> None:
    """Of another epoch."""
    sub = s.subs(0)[free_sub(s, 0, b"3")]
    s.set(sub, "word", sub.word + (1 << 32))


@breaks("routed_session", "R2", "routing")
def _(s: Segments, _at: Places) -> None:
    sub = s.routing_subs(0)[free_sub(s, 0, b"3")]
    s.set(sub, "uid", sub.uid + 1)


@breaks("routed_text", "R2", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.routing_subs(0)[free_sub(s, 0, b"1")], "more", 0)


@breaks("cell_shared", "R2", "routing")
def _(s: Segments, _at: Places) -> None:
    subs = s.routing_subs(0)
    s.set(subs[free_sub(s, 0, b"1")], "more", subs[free_sub(s, 0, b"2")].more)


@breaks("session_alone", "J6", "routing")
def _(s: Segments, at: Places) -> None:
    s.set(s.sessions()[at.one], "word", 0)


USED = 1 << 63


@breaks("release", "S1", "conntable")
def _(s: Segments, _at: Places) -> None:
    s.set(s.table.header, "release", b"\xff" * 24)


@breaks("release", "S1", "journal.1")
def _(s: Segments, _at: Places) -> None:
    s.set(s.journals[1].port.header, "migrated_from", 99)


@breaks("reserved", "S1", "arena.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.arenas[0].chunks[3].pad, 2, 1 << 40)


@breaks("reserved", "S1", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(1)[at.one].reserved, 1, 5)


@breaks("reserved", "S1", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.lane(1).orders.pad, 5, 1)


@breaks("reserved", "S1", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.publisher].reserved, 0, 1)


@breaks("table_peer", "T2", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.publisher], "ip", b"\x01" * 46)


@breaks("table_peer", "T2", "conntable")
def _(s: Segments, at: Places) -> None:
    s.set(s.table.slots[at.one], "listener", 999)


@breaks("conn_speaks", "J1", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(1)[at.one], "protocol", 999)


@breaks("conn_speaks", "J1", "journal.1")
def _(s: Segments, at: Places) -> None:
    s.set(s.conns(1)[at.two], "name", b"x" * 64)


@breaks("envelope", "J2", "journal.1")
def _(s: Segments, at: Places) -> None:
    """Of a connection without envelopes."""
    s.set(s.conns(1)[at.one], "in_number", 7)


@breaks("envelope", "J2", "journal.1")
def _(s: Segments, at: Places) -> None:
    """Of one that has them: more was parsed than was opened."""
    s.set(s.conns(1)[at.two], "transport", 1)
    s.set(s.conns(1)[at.two], "in_plain", 0)


def ask(s: Segments, conn: int) -> Any:
    """A request of that connection, to nobody yet."""
    request = s.requests()[0]
    s.set(s.routing, "requests_high", 1)
    s.set(request, "conn", conn)
    s.set(request, "uid", s.sessions()[conn].uid)
    s.set(request, "word", USED | 1)
    return request


def asked(s: Segments, conn: int) -> Any:
    """That connection as responder of request 0."""
    leg = s.legs()[0]
    s.set(s.routing, "legs_high", 1)
    s.set(leg, "conn", conn)
    s.set(leg, "uid", s.sessions()[conn].uid)
    s.set(leg, "word", USED | 1)
    return leg


def call(s: Segments, conn: int, name: bytes) -> Any:
    """That connection has a name."""
    it = s.names()[conn]
    s.set(s.routing, "names_high", max(conn + 1, s.routing.names_high))
    s.set(it, "uid", s.sessions()[conn].uid)
    s.set(it, "text", name)
    s.set(it, "word", USED | len(name))
    return it


@breaks("high_mark", "S1", "routing")
def _(s: Segments, _at: Places) -> None:
    s.set(s.routing, "names_high", 65)


@breaks("request_session", "R5", "routing")
def _(s: Segments, at: Places) -> None:
    request = ask(s, at.one)
    asked(s, at.two)
    s.set(request, "uid", request.uid + 1000)


@breaks("request_alone", "R5", "routing")
def _(s: Segments, at: Places) -> None:
    ask(s, at.one)


@breaks("leg_request", "R5", "routing")
def _(s: Segments, at: Places) -> None:
    asked(s, at.two)


@breaks("leg_session", "R5", "routing")
def _(s: Segments, at: Places) -> None:
    ask(s, at.one)
    leg = asked(s, at.two)
    s.set(leg, "uid", leg.uid + 1000)


@breaks("name_session", "R5", "routing")
def _(s: Segments, at: Places) -> None:
    it = call(s, at.one, b"some.name")
    s.set(it, "uid", it.uid + 1000)


@breaks("name_twice", "R5", "routing")
def _(s: Segments, at: Places) -> None:
    call(s, at.one, b"some.name")
    call(s, at.two, b"some.name")


@breaks("chunk_state", "A2", "arena.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.arenas[0].chunks[s.arenas[0].chunk_count - 1], "state", 9)


@breaks("chunk_messages", "A1", "arena.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.arenas[0].chunks[s.arenas[0].chunk_count - 1], "messages", CHUNK_MESSAGES + 1)


@breaks("chain_link", "A2", "arena.0")
def _(s: Segments, _at: Places) -> None:
    arena = s.arenas[0]
    s.set(arena.chunks[arena.chunks[chains(s)[0]].next - 1], "state", 0)


@breaks("chain_cycle", "A2", "arena.0")
def _(s: Segments, _at: Places) -> None:
    arena = s.arenas[0]
    link = arena.chunks[chains(s)[0]].next
    s.set(arena.chunks[link - 1], "next", link)


@breaks("chain_shared", "A2", "arena.0")
def _(s: Segments, _at: Places) -> None:
    arena, (one, two) = s.arenas[0], chains(s)[:2]
    s.set(arena.chunks[one], "next", arena.chunks[two].next)


@breaks("chain_orphan", "A3", "arena.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.arenas[0].chunks[s.arenas[0].chunk_count - 1], "state", 3)


@breaks("free_live", "A2", "arena.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.arenas[0].chunks[s.word(live_message(s))[1] // CHUNK_MESSAGES], "state", 0)


@breaks("word", "L1", "arena.0")
def _(s: Segments, _at: Places) -> None:
    words, entry = s.word(live_message(s))
    s.set(words, entry, words[entry] | 1 << 58 | 3)


@breaks("entry", "A1", "arena.0")
def _(s: Segments, _at: Places) -> None:
    s.set(s.entries(0)[s.word(live_message(s))[1]], "subject", 1 << 20)


@breaks("leak", "A1", "arena.0")
def _(s: Segments, _at: Places) -> None:
    leak(s)


@breaks("unknown", "A1", "arena")
def _(s: Segments, _at: Places) -> None:
    ring = s.journals[0].port.refs
    s.set(s.slot(ring, ring.sent), "seq", 0)
