"""Flows: what the router decided is repeated while it holds, and never any longer.

Everything is real but the processes (bench/rig.py): connmgr and router take their turns when the
test says so, so that a change, an answer and a message can meet in every order. What each
subscription must get follows from what was said, in the order in which it was said. Shows rules F1
to F4 of native/README.md.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rig import Rig
from tests.support.frames import messages

SUBJECTS = (b"a",) * 9 + (b"b",)
PATTERNS = (b"a", b"a", b"b", b"*", b">")
SIZES = (12,) * 7 + (100, 5000, 5000)  # the last is not copied but kept
CLIENTS = 3


@dataclass(frozen=True)
class Said:
    """What a client says, and how many turns connmgr and router get before the next one."""

    client: int
    what: str
    which: int
    size: int
    count: int
    turns: int


SAID = st.builds(
    Said,
    st.sampled_from((0, 0, 0, 1, 2)),
    st.sampled_from(("publish",) * 40 + ("subscribe", "join", "unsubscribe", "limit", "ping")),
    st.integers(0, 100),
    st.sampled_from(SIZES),
    st.sampled_from((1, 1, 1, 2, 30)),
    st.integers(0, 3),
)
By = dict[int, list[int]]  # publisher -> numbers of its messages


@dataclass
class Sub:
    """A subscription, and what it must get; of a group, what its members must get together."""

    client: int
    pattern: bytes
    group: bool = False
    due: By = field(default_factory=dict)
    left: int | None = None  # messages until its maximum

    def matches(self, subject: bytes) -> bool:
        return self.pattern in (subject, b"*", b">")


def parse(data: bytes) -> dict[int, By]:
    """sid -> publisher -> numbers, in the order they came."""
    found: dict[int, By] = {}
    for message in messages(data):
        assert not message.headers
        publisher, number = message.body.split(b".")
        by = found.setdefault(int(message.sid), {})
        by.setdefault(int(publisher), []).append(int(number[-9:]))
    return found


class Talk:
    """What the clients of one example say, and what must come of it."""

    def __init__(self, rig: Rig, clients: list[socket.socket], root: bytes) -> None:
        self.rig, self.clients, self.root = rig, clients, root
        self.subs: dict[int, Sub] = {}  # by sid, which nobody has twice
        self.over: dict[int, Sub] = {}
        self.in_groups: By = {}
        self.number = 0

    def say(self, it: Said) -> None:
        data = getattr(self, it.what)(it)
        if not data:
            return
        self.rig.send(self.clients[it.client], data)
        self.rig.turn_connmgr()  # so that what was said before is heard before
        for turn in range(it.turns):
            self.rig.turn_router()
            if turn:
                self.rig.turn_connmgr()

    def publish(self, it: Said) -> bytes:
        subject, data = SUBJECTS[it.which % len(SUBJECTS)], b""
        for _ in range(min(it.count, 20_000 // it.size)):  # one read takes it all
            body = b"%d.%0*d" % (it.client, it.size, self.number)
            data += b"PUB %s%s %d\r\n%s\r\n" % (self.root, subject, len(body), body)
            matching = [sub for sub in self.subs.values() if sub.matches(subject)]
            for sub in matching:
                if not sub.group and sub.left != 0:
                    sub.due.setdefault(it.client, []).append(self.number)
                    sub.left = None if sub.left is None else sub.left - 1
            if any(sub.group for sub in matching):
                self.in_groups.setdefault(it.client, []).append(self.number)
            self.number += 1
        return data

    def subscribe(self, it: Said, group: bytes = b"") -> bytes:
        sid = len(self.subs) + len(self.over) + 1
        pattern = b"a" if group else PATTERNS[it.which % len(PATTERNS)]
        self.subs[sid] = Sub(it.client, pattern, bool(group))
        return b"SUB %s%s %s%d\r\n" % (self.root, pattern, group, sid)

    def join(self, it: Said) -> bytes:
        return self.subscribe(it, b"workers ")

    def _one_of(self, it: Said) -> int | None:
        mine = [sid for sid, sub in self.subs.items() if sub.client == it.client]
        return mine[it.which % len(mine)] if mine else None

    def unsubscribe(self, it: Said) -> bytes:
        sid = self._one_of(it)
        if sid is None:
            return b""
        self.over[sid] = self.subs.pop(sid)
        return b"UNSUB %d\r\n" % sid

    def limit(self, it: Said) -> bytes:
        """So many more; how many it has had is certain once everything is out."""
        sid = self._one_of(it)
        if sid is None or self.subs[sid].group or self.subs[sid].left is not None:
            return b""
        self.rig.drain()
        self.subs[sid].left = it.count
        return b"UNSUB %d %d\r\n" % (sid, sum(map(len, self.subs[sid].due.values())) + it.count)

    def ping(self, _it: Said) -> bytes:
        return b"PING\r\n"

    def check(self) -> None:
        """Ends every subscription, and compares what came with what had to."""
        in_groups: By = {}
        for at, client in enumerate(self.clients):
            ends = [b"UNSUB %d\r\n" % sid for sid, sub in self.subs.items() if sub.client == at]
            self.rig.send(client, b"".join(ends) + b"PUB nobody.listens 1\r\n.\r\n")
            self.rig.turn_connmgr()
        self.rig.drain()
        for at, client in enumerate(self.clients):
            client.sendall(b"PING\r\n")
            got = parse(self.rig.settle(client, b"PONG\r\n"))
            for sid, sub in {**self.subs, **self.over}.items():
                have = got.pop(sid, {}) if sub.client == at else {}
                if sub.group:
                    for publisher, numbers in have.items():
                        assert numbers == sorted(numbers)
                        in_groups.setdefault(publisher, []).extend(numbers)
                elif sub.client == at:
                    assert have == sub.due, f"sid {sid} on {sub.pattern!r}"
            assert got == {}
        together = {publisher: sorted(numbers) for publisher, numbers in in_groups.items()}
        assert together == self.in_groups
        assert self.rig.live() == 0


class Table:
    """The same connections for every example."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clients = [rig.open() for _ in range(CLIENTS)]
        self.examples = 0

    def talk(self) -> Talk:
        self.examples += 1
        return Talk(self.rig, self.clients, b"f%d." % self.examples)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    with Rig(flow_leases=True) as rig:
        yield Table(rig)


@settings(max_examples=300, deadline=None)
@given(said=st.lists(SAID, min_size=10, max_size=80))
def test_everyone_gets_what_was_said_to_them(table: Table, said: list[Said]) -> None:
    talk = table.talk()
    for client in range(CLIENTS):  # somebody listens, whatever the example is about
        talk.say(Said(client, "subscribe", client, 0, 1, 3))
    for it in said:
        talk.say(it)
    talk.check()


def repeated(rig: Rig) -> int:
    count: int = rig.connmgr.stats()["repeated"]
    return count


def test_that_was_about_flows(table: Table) -> None:
    stats = table.rig.connmgr.stats()
    assert stats["messages_in"] / 20 < stats["repeated"] < stats["messages_in"]


# One after the other


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(flow_leases=True) as rig:
        yield rig


def say(rig: Rig, client: socket.socket, data: bytes) -> None:
    """Said, and everything it leads to is done."""
    rig.send(client, data)
    rig.turn_connmgr()
    rig.drain()


def msg(sid: int, body: bytes, subject: bytes = b"s") -> bytes:
    return b"MSG %s %d %d\r\n%s\r\n" % (subject, sid, len(body), body)


def pub(body: bytes, subject: bytes = b"s") -> bytes:
    return b"PUB %s %d\r\n%s\r\n" % (subject, len(body), body)


def test_the_first_message_is_asked_about_and_the_second_is_not(rig: Rig) -> None:
    reader, writer = rig.open(b"SUB s 1"), rig.open()
    for n in range(5):
        routed = rig.router.stats()["messages"]
        rig.send(writer, pub(b"%d" % n))
        rig.turn_connmgr()
        assert repeated(rig) == n
        if n == 0:
            rig.drain()
            assert rig.router.stats()["messages"] == routed + 1
        assert rig.receive(reader, len(msg(1, b"0"))) == msg(1, b"%d" % n)


def test_a_message_does_not_overtake_one_that_is_with_the_router(rig: Rig) -> None:
    """F3: a read of two kinds of bodies is not repeated, and nobody has answered yet."""
    reader, writer = rig.open(b"SUB s 1"), rig.open()
    say(rig, writer, pub(b"first"))
    large = b"x" * 5000
    for data in (pub(large) + pub(b"third"), pub(b"fourth"), pub(large)):
        rig.send(writer, data)
        rig.turn_connmgr()
    assert repeated(rig) == 0
    rig.drain()
    say(rig, writer, pub(b"sixth"))
    assert repeated(rig) == 1
    bodies = (b"first", large, b"third", b"fourth", large, b"sixth")
    want = b"".join(msg(1, body) for body in bodies)
    assert rig.receive(reader, len(want)) == want


@pytest.mark.parametrize(("size", "again"), [(5000, 19), (40_000, 19), (200_000, 0)])
def test_large_bodies_are_kept_until_all_have_them(rig: Rig, size: int, again: int) -> None:
    """One chunk for several, one for each, several for each: the last are not repeated."""
    readers, writer = [rig.open(b"SUB s 1") for _ in range(2)], rig.open()
    wants = []
    for n in range(20):
        body = b"%0*d" % (size, n)
        wants.append(msg(1, body))
        writer.sendall(pub(body))
        for reader in readers:
            got = b""
            while len(got) < len(wants[-1]):
                rig.turn_connmgr()
                rig.turn_router()
                got += rig.peek(reader)
            assert got == wants[-1]
    assert repeated(rig) == again
    assert rig.live() == 0


@pytest.mark.parametrize("change", [b"SUB s 9", b"SUB other 9", b"UNSUB 1", b"UNSUB 1 99"])
def test_after_a_change_the_router_is_asked(rig: Rig, change: bytes) -> None:
    """F1, F4: before it has heard of the change."""
    changer, writer = rig.open(b"SUB s 1"), rig.open(b"SUB s 2")
    for n in range(2):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 1
    rig.send(changer, change + b"\r\n")
    rig.turn_connmgr()
    say(rig, writer, pub(b"2"))
    assert repeated(rig) == 1


def test_a_message_before_a_change_in_the_same_read_teaches_nothing(rig: Rig) -> None:
    writer = rig.open(b"SUB s 1")
    say(rig, writer, pub(b"0") + b"SUB s 2\r\n")
    say(rig, writer, pub(b"1"))
    assert repeated(rig) == 0
    say(rig, writer, pub(b"2"))
    assert repeated(rig) == 1
    want = msg(1, b"0") + b"".join(msg(sid, b"%d" % n) for n in (1, 2) for sid in (1, 2))
    got = rig.receive(writer, len(want))
    assert sorted(got.splitlines()) == sorted(want.splitlines())


def test_who_comes_and_subscribes_to_nothing_changes_nothing(rig: Rig) -> None:
    _reader, writer = rig.open(b"SUB s 1"), rig.open()
    say(rig, writer, pub(b"0"))
    rig.leave(rig.open())
    say(rig, writer, pub(b"1"))
    assert repeated(rig) == 1


def test_a_subscriber_that_leaves_is_not_written_to(rig: Rig) -> None:
    stays, leaves, writer = rig.open(b"SUB s 1"), rig.open(b"SUB s 2"), rig.open()
    for n in range(2):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 1
    rig.receive(leaves, 2 * len(msg(2, b"0")))
    rig.leave(leaves)
    for n in range(2, 5):
        say(rig, writer, pub(b"%d" % n))
    want = b"".join(msg(1, b"%d" % n) for n in range(5))
    assert rig.receive(stays, len(want)) == want
    assert repeated(rig) == 3  # 2 found it gone, and asked


def test_members_of_a_group_take_turns(rig: Rig) -> None:
    """F2."""
    members = [rig.open(b"SUB s workers 1") for _ in range(2)]
    writer = rig.open(b"SUB s 1")
    for n in range(10):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 0
    for member in members:
        assert rig.receive(member, 5 * len(msg(1, b"0")))


def test_no_echo_is_the_publishers_own(rig: Rig) -> None:
    """What one publisher's messages get is not what another's get."""
    quiet = rig.open(b'CONNECT {"verbose":false,"echo":false}', b"SUB s 1")
    other = rig.open(b"SUB s 2")
    for n in range(4):
        say(rig, quiet, pub(b"q%d" % n))
        say(rig, other, pub(b"o%d" % n))
    assert repeated(rig) == 6
    want = b"".join(msg(1, b"o%d" % n) for n in range(4))
    assert rig.receive(quiet, len(want)) == want
    want = b"".join(msg(2, b"%s%d" % (who, n)) for n in range(4) for who in (b"q", b"o"))
    assert rig.receive(other, len(want)) == want


def test_a_maximum_is_kept(rig: Rig) -> None:
    """F4, and what was repeated is counted."""
    reader, writer = rig.open(b"SUB s 1"), rig.open()
    for n in range(4):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 3
    say(rig, reader, b"UNSUB 1 6\r\n")
    for n in range(4, 9):
        say(rig, writer, pub(b"%d" % n))
    reader.sendall(b"PING\r\n")
    want = b"".join(msg(1, b"%d" % n) for n in range(6))
    assert rig.settle(reader, b"PONG\r\n") == want + b"PONG\r\n"


def test_what_others_end_is_not_asked_about(rig: Rig) -> None:
    """Who unsubscribes or leaves is nothing to a flow that it gets nothing of."""
    reader, writer, other = rig.open(b"SUB s 1"), rig.open(), rig.open(b"SUB x 1", b"SUB y 2")
    say(rig, writer, pub(b"0"))
    say(rig, other, b"UNSUB 1\r\n")
    say(rig, writer, pub(b"1"))
    rig.leave(other)
    say(rig, writer, pub(b"2"))
    assert repeated(rig) == 2
    want = b"".join(msg(1, b"%d" % n) for n in range(3))
    assert rig.receive(reader, len(want)) == want


def test_a_read_with_more_references_than_a_batch_holds(rig: Rig) -> None:
    """Bodies of other sizes by turns, so that none joins the one before."""
    reader, writer = rig.open(b"SUB s 1"), rig.open()
    bodies = [b"%0*d" % (4 + n % 2, n) for n in range(1000)]
    say(rig, writer, pub(b"first"))
    say(rig, writer, b"".join(map(pub, bodies)))
    assert repeated(rig) == 1000
    say(rig, reader, b"SUB other 2\r\n")
    say(rig, writer, pub(b"last"))  # goes by way of the router, in the next batch
    assert repeated(rig) == 1000
    want = b"".join(msg(1, body) for body in (b"first", *bodies, b"last"))
    assert rig.receive(reader, len(want)) == want


def test_the_end_of_a_long_list_is_not_all_of_it(rig: Rig) -> None:
    """F2: the last recipients of a list that does not fit a batch come in one of their own."""
    many = 1532 + 8  # the first is what one order holds
    reader, writer = rig.open(), rig.open(b"SUB t 1")
    say(rig, reader, b"".join(b"SUB s %d\r\n" % sid for sid in range(many)))
    before = b"".join(pub(b"%0*d" % (4 + n % 2, n), b"t") for n in range(124))
    batches = rig.connmgr.stats()["order_batches"]
    say(rig, writer, before + pub(b"0"))
    assert rig.connmgr.stats()["order_batches"] == batches + 2
    say(rig, writer, pub(b"1"))
    assert repeated(rig) == 0
    for n in range(2):
        want = [msg(sid, b"%d" % n) for sid in range(many)]
        got = rig.receive(reader, len(b"".join(want)))
        assert sorted(got.splitlines()) == sorted(b"".join(want).splitlines())


def test_a_long_list_and_a_request_to_all_in_one_batch(rig: Rig) -> None:
    """F2: the legs of the request are a list too, and close behind the other one."""
    many = 1532 + 8
    reader, writer, asker = rig.open(), rig.open(b"SUB t 1"), rig.open(b"SUB back 1")
    _listeners = [rig.open(b"SUB ask 1") for _ in range(2)]
    say(rig, reader, b"".join(b"SUB s %d\r\n" % sid for sid in range(many)))
    before = b"".join(pub(b"%0*d" % (4 + n % 2, n), b"t") for n in range(124))
    rig.send(writer, before + pub(b"0"))
    rig.send(asker, moded(b"fanout", b"ask back"))
    rig.turn_connmgr()
    rig.drain()
    say(rig, writer, pub(b"1"))
    assert repeated(rig) == 0
    want = [msg(sid, b"%d" % n) for n in range(2) for sid in range(many)]
    got = rig.receive(reader, len(b"".join(want)))
    assert sorted(got.splitlines()) == sorted(b"".join(want).splitlines())


def moded(mode: bytes, to: bytes = b"s") -> bytes:
    head = b"NATS/1.0\r\nMidair-Mode: %s\r\n\r\n" % mode
    return b"HPUB %s %d %d\r\n%s\r\n" % (to, len(head), len(head), head)


def test_messages_of_a_mode_are_asked_about(rig: Rig) -> None:
    """F2: and what they get is not what others get, even if it is one plain subscriber."""
    readers, writer = [rig.open(b"SUB s 1") for _ in range(2)], rig.open()
    for _ in range(3):
        say(rig, writer, moded(b"semaphore"))
    say(rig, writer, pub(b"0") + moded(b"semaphore"))
    assert repeated(rig) == 0
    for n in range(1, 4):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 2
    for reader in readers:
        reader.sendall(b"PING\r\n")
        got = rig.settle(reader, b"PONG\r\n")
        assert b"".join(message.body for message in messages(got)) == b"0123"


@pytest.mark.parametrize("echo", [True, False])
def test_what_a_client_says_of_itself_later_counts(rig: Rig, echo: bool) -> None:
    """F2: a second CONNECT, which says the opposite of the first one."""
    said = (b'{"verbose":false,"echo":true}', b'{"verbose":false,"echo":false}')
    first, second = said if echo else reversed(said)
    writer = rig.open(b"CONNECT " + first, b"SUB s 1")
    other = rig.open(b"SUB s 2")
    for n in range(3):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 2
    writer.sendall(b"CONNECT " + second + b"\r\nPING\r\n")
    got = rig.settle(writer, b"PONG\r\n").removesuffix(b"PONG\r\n")
    for n in range(3, 6):
        say(rig, writer, pub(b"%d" % n))
    assert repeated(rig) == 4
    writer.sendall(b"PING\r\n")
    got += rig.settle(writer, b"PONG\r\n").removesuffix(b"PONG\r\n")
    numbers = range(3) if echo else range(3, 6)
    assert got == b"".join(msg(1, b"%d" % n) for n in numbers)
    want = b"".join(msg(2, b"%d" % n) for n in range(6))
    assert rig.receive(other, len(want)) == want
