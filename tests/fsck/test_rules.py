"""`midair fsck`, rule by rule: every check finds what breaks its rule, and names the rule.

Method: an instance is stopped in the middle of everything (output pending, references and orders in
queues and rings), killed whole, and found to be right. Then, for each check, a word is changed so
that the rule does not hold; fsck has to say so. The word is put back after, and all is right again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from midair.client.wire_nats import pub
from midair.fsck import command as fsck
from midair.process.runtime import Runtime
from native import lib
from native.conntable import ACTIVE, CLOSED, FREE, ConnTable
from native.fsck import CODES
from tests.fsck.breaks import BREAKS, Break
from tests.support.instance import Instance, cli, eventually, leaks_of, start
from tests.support.segments import (
    CONFIG,
    Segments,
    ffi,
    kill_all,
    leak,
)
from tests.support.stream import Stream

CONNMGRS = 2
LONG = b"long." + b"x" * 150  # a subject that needs cells


# ---- an instance stopped in the middle of everything --------------------------------------------


def connmgr_of(table: ConnTable, stream: Stream) -> tuple[int, int]:
    """(connmgr, slot) of a connection."""
    return next(
        (slot.connmgr, slot.slot)
        for slot in table.used()
        if slot.port == stream.port and slot.state == ACTIVE
    )


def remove(name: str) -> None:
    fsck.repair(name, remove=True)
    assert leaks_of(name) == []


def singles(body: bytes, count: int) -> bytes:
    """Messages of which none goes with the one before: each has a reference of its own."""
    return (pub(b"small", body) + pub(b"small", 2 * body)) * (count // 2)


class Dead:
    """What a killed instance has left: a publisher on connmgr 0, two readers on connmgr 1."""

    def __init__(self, owner: str) -> None:
        instance = start(owner, CONFIG, "--connmgrs", str(CONNMGRS))
        self.name = instance.name
        self.streams: list[Stream] = []
        try:
            self.prepare(instance)
        finally:
            kill_all(instance)
            for stream in self.streams:
                stream.close()

    def prepare(self, instance: Instance) -> None:
        table = ConnTable.attach(Runtime.open(self.name))
        by_connmgr: dict[int, list[tuple[Stream, int]]] = {0: [], 1: []}
        while len(by_connmgr[0]) < 1 or len(by_connmgr[1]) < 2:
            stream = Stream(instance.host, instance.port, receive_buffer=4096)
            self.streams.append(stream)
            connmgr, slot = connmgr_of(table, stream)
            by_connmgr[connmgr].append((stream, slot))
        (publisher, self.publisher), *_ = by_connmgr[0]
        readers, (self.one, self.two) = zip(*by_connmgr[1][:2], strict=True)
        table.close()
        for sid, subject in ((b"1", LONG + b"1"), (b"2", LONG + b"2"), (b"3", b"mine")):
            publisher.sub(subject, sid)
        publisher.sub(b"shared", b"4", b"group")
        publisher.sub(b"called", b"5" * 300)  # a sid that needs cells
        for reader in readers:
            for sid, subject in ((b"1", b"feed"), (b"2", b"big"), (b"3", b"small")):
                reader.sub(subject, sid)
            reader.sync()
        for _ in range(64):  # as many batches as a ring has
            publisher.sync()
        # More than the kernel takes for a client that does not read, and among it what nobody
        # wanted; the last lie along chains.
        feed = pub(b"feed", b"f" * 5000) * 10 + pub(b"nobody", b"x")
        publisher.send(feed * 200 + pub(b"big", b"b" * 300_000) * 2)
        publisher.sync()
        with Segments(self.name, CONNMGRS) as it:
            orders, journal = it.lane(1).orders, it.journals[1]
            eventually(
                lambda: journal.port.done == orders.sent and orders.sent + 1 == orders.tail >> 16,
                "connmgr 1 has processed its orders",
            )
            os.kill(instance.pid("connmgr/1"), signal.SIGSTOP)
            for _ in range(30):
                publisher.send(pub(b"small", b"s"))
                publisher.sync()
            publisher.send(pub(b"small", b"s") * 100 + singles(b"s", 2000))
            publisher.sync()
            eventually(lambda: (orders.tail >> 16) > orders.sent + 3, "orders wait in the ring")
            os.kill(instance.pid("router"), signal.SIGSTOP)
            refs = it.journals[0].port.refs
            for _ in range(30):  # each read alone, so that the queue fills
                tail = refs.tail
                publisher.send(pub(b"small", b"t"))
                eventually(lambda tail=tail: refs.tail != tail, "it is read")
            publisher.send(pub(b"small", b"u") * 100 + singles(b"u", 2000))
            eventually(lambda: (refs.tail >> 16) > refs.sent + 3, "references wait in the ring")


@pytest.fixture(scope="module")
def dead(request: pytest.FixtureRequest) -> Iterator[Dead]:
    it = Dead(request.node.nodeid)
    yield it
    remove(it.name)


def noticed(name: str) -> list[fsck.Finding]:
    """Everything but notes."""
    return [it for it in fsck.examine(name).findings if it.severity != fsck.NOTE]


@pytest.fixture
def bent(dead: Dead) -> Iterator[Segments]:
    """The segments of the dead instance, to be changed; put back and right again afterwards."""
    with Segments(dead.name, CONNMGRS) as it:
        try:
            yield it
        finally:
            it.restore()
    assert noticed(dead.name) == []


def test_everything_under_way_is_accounted_for(dead: Dead) -> None:
    report = fsck.examine(dead.name)
    assert not report.alive
    assert noticed(dead.name) == []
    counts = report.counts
    assert counts["pending_bytes"] > 1_000_000
    assert counts["in_flight"] >= 12
    assert counts["unsent"] > 3
    assert counts["messages"] > 100
    assert counts["connections"] == counts["sessions"] == len(dead.streams)
    assert counts["subscriptions"] == 11


# ---- one rule broken at a time ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "rule", "segment", "how"),
    BREAKS,
    ids=[f"{check}-{number}" for number, (check, *_) in enumerate(BREAKS)],
)
def test_what_breaks_a_rule_is_found(
    bent: Segments, dead: Dead, check: str, rule: str, segment: str, how: Break
) -> None:
    how(bent, dead)
    findings = fsck.examine(dead.name).findings
    same = [it for it in findings if it.check == check]
    assert same, [str(it) for it in findings]
    assert {it.rule for it in same} == {rule}
    assert any(it.segment.startswith(segment) for it in same), [str(it) for it in same]
    assert {it.severity for it in same} == {fsck.CHECKS[check].dead}
    assert all("{" not in it.text for it in same)


def test_every_check_is_shown_to_find_something() -> None:
    assert {check for check, *_ in BREAKS} == set(fsck.CHECKS) == set(CODES.values())


# ---- the command --------------------------------------------------------------------------------


def test_a_broken_rule_ends_the_command_with_1(bent: Segments, dead: Dead) -> None:
    bent.set(bent.journals[1].port.header, "layout", 99)
    done = cli("fsck", "--name", dead.name)
    assert done.returncode == 1
    rule = fsck.CHECKS["header"].rule
    assert (
        f"error: journal.1: layout in the header is 0x63, expected {lib.JOURNAL_LAYOUT:#x} ({rule})"
        in done.stdout
    )
    assert "(not running): 1 errors" in done.stdout
    report = json.loads(cli("fsck", "--json", "--name", dead.name).stdout)
    assert report["alive"] is False
    errors = [it for it in report["findings"] if it["severity"] == "error"]
    assert [(it["check"], it["rule"]) for it in errors] == [("header", rule)]


def test_remove_goes_with_repair(dead: Dead) -> None:
    assert cli("fsck", "--remove", "--name", dead.name).returncode == 2


def test_repair(bent: Segments, dead: Dead) -> None:
    leak(bent)
    journal, slot = bent.journals[0], bent.table.slots[40]
    bent.set(slot, "uid", bent.table.next_uid)
    bent.set(bent.table, "next_uid", slot.uid + 1)
    bent.set(slot, "state", CLOSED)
    bent.set(bent.table, "high", 41)
    bent.set(journal.port.redo.pairs[0], "offset", ffi.offsetof("struct port_log", "applied"))
    bent.set(journal.port.redo.pairs[0], "value", journal.port.applied)
    bent.set(journal.port.redo, "count", 1)
    assert [it.check for it in noticed(dead.name)] == ["leak"]
    done = cli("fsck", "--repair", "--name", dead.name)
    assert done.returncode == 0, done.stdout
    assert "repaired: finished committed steps: 1 words stored" in done.stdout
    assert "repaired: freed 1 leaked messages" in done.stdout
    assert "repaired: freed 1 slots of ended connections" in done.stdout
    assert journal.port.redo.count == 0
    assert slot.state == FREE
    assert fsck.examine(dead.name).findings == []


def test_what_is_broken_is_not_made_worse_by_repair(bent: Segments, dead: Dead) -> None:
    leak(bent)
    out = bent.output(1, dead.one)
    bent.set(bent.segs(1)[out[10]], "next", 0)
    live = fsck.examine(dead.name).counts["messages"]
    done = cli("fsck", "--repair", "--name", dead.name)
    assert done.returncode == 1
    assert "freed nothing" in done.stdout
    assert fsck.examine(dead.name).counts["messages"] == live
