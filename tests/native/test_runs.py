"""Runs: messages of one sender to one subject, one behind the other, travel as one.

Everything is real but the processes (bench/rig.py). What each subscription must get follows from
what was sent; runs begin, end and are broken by everything that can be in between.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rig import Rig
from native import lib
from tests.support.frames import messages


@dataclass
class Frame:
    """A message as it is published; the last eight digits of its body are its number."""

    subject: bytes
    size: int
    kind: str = "plain"

    def bytes(self, number: int) -> bytes:
        body = b"%0*d" % (self.size, number)
        match self.kind:
            case "reply":
                return b"PUB %s back %d\r\n%s\r\n" % (self.subject, len(body), body)
            case "header":
                head = b"NATS/1.0\r\nA: 1\r\n\r\n"
                sizes = (self.subject, len(head), len(head) + len(body))
                return b"HPUB %s %d %d\r\n" % sizes + head + body + b"\r\n"
            case "spaced":
                return b"PUB  %s\t%d \r\n%s\r\n" % (self.subject, len(body), body)
            case _:
                return b"PUB %s %d\r\n%s\r\n" % (self.subject, len(body), body)


@dataclass
class Got:
    """What a client received: numbers in their order, of each subscription and of all."""

    by_sid: dict[bytes, list[int]] = field(default_factory=dict)
    order: list[tuple[int, bytes]] = field(default_factory=list)


def parse(data: bytes) -> Got:
    got = Got()
    for message in messages(data):
        number = int(message.body[-8:])
        got.by_sid.setdefault(message.sid, []).append(number)
        got.order.append((number, message.sid))
    return got


FRAMES = st.builds(
    Frame,
    st.sampled_from((b".a", b".a", b".bb", b".nobody.listens")),
    st.sampled_from((8, 8, 9, 120, 5000)),
    st.sampled_from(("plain", "plain", "plain", "reply", "header", "spaced")),
)
BURSTS = st.lists(st.tuples(FRAMES, st.integers(1, 40)), min_size=1, max_size=12)
LOOSE = settings(max_examples=200, deadline=None)


def exchange(rig: Rig, sender: socket.socket, *others: socket.socket, said: bytes) -> list[Got]:
    """Says it, and gives back what the sender and the others had until their next PONG."""
    every = []
    for client in (sender, *others):
        client.sendall((said if client is sender else b"") + b"PING\r\n")
        every.append(parse(rig.settle(client, b"PONG\r\n")))
    return every


class Clients:
    """The same connections for every example, with subjects and subscriptions of its own."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.examples = 0
        self.sender, self.one, self.twice, self.ends = (rig.open() for _ in range(4))
        self.members = [rig.open() for _ in range(2)]

    def exchange(self, frames: list[Frame]) -> list[Got]:
        self.examples += 1
        root = b"r%d" % self.examples
        asked = {
            self.sender: b"SUB %s.* 1",
            self.one: b"SUB %s.bb 1",
            self.twice: b"SUB %s.a 1\r\nSUB %s.* 22",
            self.ends: b"SUB %s.a 7\r\nUNSUB 7 5",
            **dict.fromkeys(self.members, b"SUB %s.* work 1"),
        }
        for client, lines in asked.items():
            exchange(self.rig, client, said=lines.replace(b"%s", root) + b"\r\n")
        data = b"".join(
            replace(frame, subject=root + frame.subject).bytes(n) for n, frame in enumerate(frames)
        )
        got = exchange(self.rig, *asked, said=data)
        for client in asked:
            exchange(self.rig, client, said=b"UNSUB 1\r\nUNSUB 22\r\nUNSUB 7\r\n")
        return got


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with Rig() as rig:
        yield Clients(rig)


@LOOSE
@given(bursts=BURSTS)
def test_everyone_gets_everything_in_order(
    clients: Clients, bursts: list[tuple[Frame, int]]
) -> None:
    """Single, several, twice on one connection, in a group, with an end, and the sender itself."""
    frames = [frame for frame, count in bursts for _ in range(count)]
    of = {
        subject: [n for n, frame in enumerate(frames) if frame.subject == subject]
        for subject in (b".a", b".bb")
    }
    both = [n for n, frame in enumerate(frames) if frame.subject in of]
    sender, one, twice, ends, *members = clients.exchange(frames)

    assert sender.by_sid.get(b"1", []) == both
    assert one.by_sid.get(b"1", []) == of[b".bb"]
    assert twice.by_sid.get(b"1", []) == of[b".a"]
    assert twice.by_sid.get(b"22", []) == both
    assert [n for n, _ in twice.order] == sorted(n for n, _ in twice.order)
    assert ends.by_sid.get(b"7", []) == of[b".a"][:5]
    worked = [member.by_sid.get(b"1", []) for member in members]
    assert sorted(worked[0] + worked[1]) == both
    assert all(share == sorted(share) for share in worked)


@given(
    st.integers(4, 8192),
    st.integers(1, 2040),
    st.integers(0, 70_000),
    st.integers(1, 6000),
)
def test_a_run_is_split_where_its_load_ends(load: int, many: int, size: int, subject: int) -> None:
    """So a batch makes no more output than there are blocks for."""
    most = lib.batch_run_most(load, many, size, subject)
    assert most == 1 or lib.batch_run_load(many, most, size, subject) <= load
    copied = size if size <= 4096 else 0
    frame = copied + subject + 64  # a frame is never split
    blocks = -(-most // (16384 // frame)) + 1 if size <= 4096 else 2 * most
    assert most == 1 or many * blocks <= 2 * load // 4
    assert most > 1 or load // (4 * many) < 2 or lib.batch_run_load(many, 2, size, subject) > load


@pytest.mark.parametrize("recipients", [1, 2, 10, 500])
def test_a_run_that_is_split_arrives_whole(recipients: int) -> None:
    """With so many recipients that all of it would be more than the output is made for."""
    frame, count = Frame(b"split", 8), 3000 if recipients < 100 else 30
    data = b"".join(frame.bytes(n) for n in range(count))
    with Rig() as rig:
        clients = [rig.open(b"SUB split 1") for _ in range(min(recipients, 10))]
        lines = [b"SUB split %d\r\n" % n for n in range(2, 2 + recipients - len(clients))]
        exchange(rig, clients[0], said=b"".join(lines))
        _, *got = exchange(rig, rig.open(), *clients, said=data)
    for have in got:
        assert all(numbers == list(range(count)) for numbers in have.by_sid.values())
    assert sum(len(have.by_sid) for have in got) == recipients


def test_a_run_is_one_reference_and_one_order() -> None:
    """That is what it is for: the queues carry bytes for the run, not for each of its messages."""
    frame = Frame(b"one.run", 8)
    with Rig() as rig:
        receiver, sender = rig.open(b"SUB one.run 1"), rig.open()
        before = rig.connmgr.stats()["order_batches"]
        rig.send(sender, b"".join(frame.bytes(n) for n in range(1000)))
        rig.turn_connmgr()
        rig.turn_router()
        rig.turn_connmgr()
        assert rig.connmgr.stats()["order_batches"] == before + 1
        got = parse(rig.receive(receiver, len(b"MSG one.run 1 8\r\n00000000\r\n") * 1000))
    assert got.by_sid == {b"1": list(range(1000))}


def test_a_run_for_nobody_leaves_nothing_behind() -> None:
    """More bytes of them than there is memory for."""
    frame = Frame(b"nobody.at.all", 1000)
    data = b"".join(frame.bytes(n) for n in range(100))
    with Rig() as rig:
        sender = rig.open()
        for _ in range(1000):  # 100 MB through 64
            exchange(rig, sender, said=data)
        assert rig.live() == 0
