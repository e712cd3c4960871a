"""The connection table: uids are never given twice, slots walk the ring of conntable.h."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midair import names
from midair.errors import LayoutError, MissingError
from midair.process import ipc
from midair.process.runtime import Runtime
from native import conntable, lib
from native.conntable import ACTIVE, ASSIGNED, CLOSED, FREE, ConnTable
from tests.support.instance import new_name

CAPACITY = 6


class Meanwhile:
    """The library, with something that another process does after a certain look at the table."""

    def __init__(self, does: Callable[[], None], after: int) -> None:
        self.does = does
        self.after = after
        self.looks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(lib, name)

    def conntable_list(self, *args: object) -> int:
        found = int(lib.conntable_list(*args))
        self.looks += 1
        if self.looks == self.after:
            self.does()
        return found


def test_a_slot_keeps_what_it_was_given(place: Runtime) -> None:
    table = ConnTable.open(place, 4, create=True)
    assert table.reap() == 4
    given = table.assign(3, 1, "fe80::1", 65535, 2**63)
    assert given is not None
    slot, uid = given
    found = table.slot(slot)
    assert (found.uid, found.connmgr, found.listener) == (uid, 3, 1)
    assert (found.ip, found.port, found.accepted_ns) == ("fe80::1", 65535, 2**63)
    assert found.state == ASSIGNED
    assert [it.uid for it in table.used()] == [uid]
    table.close()


def test_full_table_then_closed_slots_are_used_again(place: Runtime) -> None:
    table = ConnTable.open(place, 3, create=True)
    table.reap()
    given = [table.assign(at, 0, "1.2.3.4", 1, 0) for at in range(3)]
    assert table.assign(0, 0, "1.2.3.4", 1, 0) is None
    assert given[1] is not None
    table.set_state(given[1][0], CLOSED)
    again = table.assign(0, 0, "1.2.3.4", 1, 0)
    assert again is not None
    assert again[0] == given[1][0]
    assert again[1] == 4
    table.close()


def test_a_second_mapping_sees_the_same_and_goes_on_with_the_uids(place: Runtime) -> None:
    first = ConnTable.open(place, 3, create=True)
    first.reap()
    assert first.assign(0, 0, "::1", 1, 0) == (0, 1)
    first.close()  # as a dispatcher that died
    second = ConnTable.open(place, 3, create=True)
    assert second.reap() == 2
    assert second.counts()[:2] == [1, 0]
    assert second.assign(1, 0, "::1", 1, 0) == (1, 2)
    looking = ConnTable.attach(Runtime.open(place.instance))
    assert looking.capacity == 3
    assert looking.counts()[:2] == [1, 1]
    looking.close()
    second.close()


@pytest.mark.parametrize("meanwhile", [1, conntable.ASSIGNED_MEANWHILE + 1])
def test_who_is_in_use_is_listed_whatever_is_assigned_meanwhile(
    place: Runtime, monkeypatch: pytest.MonkeyPatch, meanwhile: int
) -> None:
    """A connmgr that starts ends whom it does not find, and a dispatcher does not wait for it."""
    table = ConnTable.open(place, 256, create=True)
    table.reap()
    given = [table.assign(0, 0, "1.2.3.4", 1, 0) for _ in range(200)]
    assert given[-1] is not None
    for low in given[:100]:
        assert low is not None
        table.set_state(low[0], CLOSED)
    table.reap()

    def assign() -> None:
        for _ in range(meanwhile):
            assert table.assign(0, 0, "1.2.3.4", 1, 0) is not None

    monkeypatch.setattr(conntable, "lib", Meanwhile(assign, 1))
    found = table.slots_by_uid(0)
    monkeypatch.undo()
    assert found[given[-1][1]] == given[-1][0]
    assert len(found) == 100 + meanwhile
    table.close()


def test_a_slot_that_is_given_to_another_connmgr_meanwhile_is_not_listed(
    place: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever starts ends what it is given and does not know: not another's client."""
    table = ConnTable.open(place, 1, create=True)
    table.reap()
    assert table.assign(0, 0, "1.2.3.4", 1, 0) == (0, 1)
    table.set_state(0, CLOSED)

    def assign() -> None:
        assert table.assign(1, 0, "1.2.3.4", 1, 0) == (0, 2)

    monkeypatch.setattr(conntable, "lib", Meanwhile(assign, 2))
    found = table.slots_by_uid(0)
    monkeypatch.undo()
    assert found == {}
    assert table.slots_by_uid(1) == {2: 0}
    table.close()


def test_an_assignment_taken_up_meanwhile_is_not_taken_back(place: Runtime) -> None:
    table = ConnTable.open(place, 2, create=True)
    table.reap()
    given = table.assign(0, 0, "::1", 1, 0)
    assert given is not None
    table.set_state(given[0], ACTIVE)
    table.unassign(given[0])
    assert table.state(given[0]) == ACTIVE
    table.close()


def test_bad_arguments_change_nothing(place: Runtime) -> None:
    table = ConnTable.open(place, 2, create=True)
    table.reap()
    for connmgr, ip in ((32, "::1"), (0, "x" * 46)):
        with pytest.raises(ValueError, match="assign"):
            table.assign(connmgr, 0, ip, 1, 0)
    assert list(table.used()) == []
    assert table.assign(31, 0, "x" * 45, 1, 0) == (0, 1)
    assert table.slot(0).ip == "x" * 45
    with pytest.raises(IndexError):
        table.state(2)
    table.close()


def test_what_is_not_ours_is_refused(place: Runtime) -> None:
    with pytest.raises(MissingError):
        ConnTable.open(place, 4, create=False)
    ConnTable.open(place, 4, create=True).close()
    with pytest.raises(LayoutError, match="bytes"):
        ConnTable.open(place, 5, create=True)


KIND, LAYOUT, FINGERPRINT, BYTES, RELEASE = 8, 12, 16, 24, 32  # offsets in struct segment_header


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        ({LAYOUT: b"\x63", RELEASE: b"0.9.1\0"}, r"another version of Midair \(0\.9\.1\)"),
        ({FINGERPRINT: b"\x63", RELEASE: b"1.0rc1\0"}, r"another version of Midair \(1\.0rc1\)"),
        ({LAYOUT: b"\x01", RELEASE: b"\0"}, "another version of Midair:"),
        ({LAYOUT: b"\x63"}, "names this version .* damaged"),
        ({0: b"\x63"}, "header of segment .* is damaged"),
        ({KIND: b"\x63"}, "header of segment .* is damaged"),
        ({BYTES: b"\x63", LAYOUT: b"\x63"}, "header of segment .* is damaged"),
        ({RELEASE: b"\xff\x01\x02", LAYOUT: b"\x63"}, "header of segment .* is damaged"),
    ],
)
def test_a_damaged_header_is_told_from_that_of_another_version(
    place: Runtime, writes: dict[int, bytes], said: str
) -> None:
    ConnTable.open(place, 4, create=True).close()
    fd = ipc.open_segment(place.segment(names.CONNTABLE), 128 + 4 * 128, create=False)
    for offset, data in writes.items():
        os.pwrite(fd, data, offset)
    os.close(fd)
    for create in (False, True):
        with pytest.raises(LayoutError, match=said):
            ConnTable.open(place, 4, create=create)


def test_a_creator_that_died_before_formatting_is_repaired(place: Runtime) -> None:
    os.close(ipc.open_segment(place.segment(names.CONNTABLE), 128 + 4 * 128, create=True))
    with pytest.raises(MissingError):
        ConnTable.open(place, 4, create=False)
    table = ConnTable.open(place, 4, create=True)
    assert table.reap() == 4
    table.close()


class TableMachine(RuleBasedStateMachine):
    """Dispatcher, connmgrs and dispatcher crashes, against a dict."""

    @initialize()
    def make(self) -> None:
        self.name = new_name("TableMachine")
        self.table = ConnTable.open(Runtime.create(self.name), CAPACITY, create=True)
        self.table.reap()
        self.model: dict[int, tuple[int, int, int]] = {}  # slot -> (uid, connmgr, state)
        self.given: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
            ipc.remove_all(self.name)
            Runtime.open(self.name).remove()

    @rule(connmgr=st.integers(0, 3))
    def assign(self, connmgr: int) -> None:
        result = self.table.assign(connmgr, 0, "10.0.0.1", 9, 1)
        full = sum(state != CLOSED for _, _, state in self.model.values()) == CAPACITY
        assert (result is None) == full
        if result is None:
            return
        slot, uid = result
        assert uid not in self.given
        assert uid > max(self.given, default=0)
        assert slot not in self.model or self.model[slot][2] == CLOSED
        if slot in self.model:  # it was reaped, with all others that were closed
            self.model = {at: it for at, it in self.model.items() if it[2] != CLOSED}
        self.given.add(uid)
        self.model[slot] = (uid, connmgr, ASSIGNED)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), state=st.sampled_from([ACTIVE, CLOSED]))
    def connmgr_moves(self, data: st.DataObject, state: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        uid, connmgr, before = self.model[slot]
        if before in (ASSIGNED, ACTIVE):
            self.table.set_state(slot, state)
            self.model[slot] = (uid, connmgr, state)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.table.unassign(slot)
        if self.model[slot][2] == ASSIGNED:
            del self.model[slot]

    @rule()
    def dispatcher_restarts(self) -> None:
        self.table.close()
        self.table = ConnTable.open(Runtime.create(self.name), CAPACITY, create=True)
        self.model = {at: it for at, it in self.model.items() if it[2] != CLOSED}
        assert self.table.reap() == CAPACITY - len(self.model)

    @invariant()
    def table_agrees_with_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        seen = {it.slot: (it.uid, it.connmgr, it.state) for it in self.table.used()}
        assert seen == self.model
        counts = self.table.counts()
        for connmgr in range(4):
            assert counts[connmgr] == sum(
                1 for _, c, state in self.model.values() if c == connmgr and state != CLOSED
            )
        assert all(self.table.state(at) == FREE for at in range(CAPACITY) if at not in seen)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
