"""What a message may cost the router, and what becomes of one that would hold up others.

Everything is real but the processes (bench/rig.py). Costs are counted, not timed: the index counts
the trie nodes it visits, the router the lists it makes and the work it does.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections import Counter

import pytest

from bench.rig import CONFIG, Rig
from native import lib
from tests.support.index import SubjectIndex, sub_id

LARGE = CONFIG.with_("connmgr", subscriptions=2**18, output_bytes=256 * 2**20).with_(
    "limits", max_pending=2**30, max_subscriptions=0
)
MANY = 100_000  # subscriptions: a list of so many is longer than a ring of batches


def forms(tokens: int) -> list[bytes]:
    """`(a|*)` so many tokens deep: patterns that differ in nothing but their wildcards."""
    return [b".".join(it) for it in itertools.product((b"a", b"*"), repeat=tokens)]


# ---- matching ----


def test_a_match_visits_no_more_nodes_than_there_are_forms() -> None:
    """2^14 patterns, and subjects that match none of them: of a walk of 2^15 a part is left."""
    with SubjectIndex(1, 2**15, 2**16, conns=16) as ix:
        refused = Counter[int]()
        for slot, pattern in enumerate(forms(14)):
            conn = slot % 8
            try:
                ix.add(sub_id(0, slot), conn, pattern + b".end")
            except OSError:
                refused[conn] += 1
        assert set(refused) == set(range(8))
        before = ix.stats().steps
        assert ix.match(b"a." * 14 + b"other").subs == ()
        steps = ix.stats().steps - before
        assert 1000 < steps <= lib.INDEX_STEPS_MAX


def test_a_connection_has_its_share_of_forms_and_no_more() -> None:
    """One that uses up its own leaves room for the others, and gets its share back."""
    with SubjectIndex(1, 2**15, 2**16, conns=4) as ix:
        added = []
        for slot, pattern in enumerate(forms(13)):
            try:
                ix.add(sub_id(0, slot), 1, pattern)
                added.append(slot)
            except OSError:
                break
        assert 1 < len(added) < 2**13
        assert ix.stats().forms <= lib.INDEX_FORMS_EACH
        new = b".".join((b"*", b"b") * 10)
        with pytest.raises(OSError, match=r"\[Errno 28\]"):
            ix.add(sub_id(0, 2**14), 1, new)
        ix.add(sub_id(0, 2**14), 2, new)
        for slot in added:
            ix.remove(sub_id(0, slot))
        ix.add(sub_id(0, 0), 1, b".".join((b"b", b"*") * 10))
        ix.remove(sub_id(0, 0))
        ix.remove(sub_id(0, 2**14))
        assert (ix.stats().forms, ix.stats().trie_nodes) == (0, 0)


def test_ordinary_patterns_are_never_refused() -> None:
    """Every form of eight tokens, and very many patterns of the same form, however long."""
    with SubjectIndex(1, 2**17, 2**18, conns=4) as ix:
        slots = itertools.count()
        for pattern in forms(8):
            ix.add(sub_id(0, next(slots)), 1, pattern)
            ix.add(sub_id(0, next(slots)), 1, pattern + b".>")
        for n in range(10_000):
            pattern = b"site.%d.floor.2.room.3.device.*.sensor.%d.*.value" % (n, n)
            ix.add(sub_id(0, next(slots)), 1, pattern)
        assert ix.stats().forms == 4  # the tokens behind the eighth, of one form
        before = ix.stats().steps
        found = ix.match(b"site.7.floor.2.room.3.device.x.sensor.7.y.value")
        assert len(found.subs) == 1 + 1  # and `*.*.*.*.*.*.*.*.>`
        assert ix.stats().steps - before < 30


def test_a_connection_has_its_share_of_trie_nodes_and_no_more() -> None:
    """Patterns of very many tokens leave room for those of others, also when one is kept by a
    second subscription to it."""
    with SubjectIndex(1, 2**12, 2**12, conns=4) as ix:
        most = (2 * 2**12 + 1) // lib.INDEX_TRIES_PART + 1
        tokens = b"a." * 500
        for n in range(3):
            ix.add(sub_id(0, n), 1, b"x%d.%s*" % (n, tokens))
            ix.add(sub_id(0, 100 + n), 1, b"x%d.%s*" % (n, tokens))
            ix.remove(sub_id(0, n))
        ix.add(sub_id(0, 3), 1, b"x3.%s*" % tokens)
        for n in range(4, 10):
            with pytest.raises(OSError, match=r"\[Errno 28\]"):
                ix.add(sub_id(0, n), 1, b"x%d.%s*" % (n, tokens))
        assert ix.stats().trie_nodes == 4 * 502 <= most
        ix.add(sub_id(0, 50), 2, b"foo.*")
        ix.add(sub_id(0, 51), 2, b"x0.%s*" % tokens)
        for slot in (3, 100, 101, 102):
            ix.remove(sub_id(0, slot))
        assert ix.stats().trie_nodes == 502 + 2  # 2 keeps them: they are not the next one's
        for n in range(4):
            ix.add(sub_id(0, n), 1, b"y%d.%s*" % (n, tokens))
        for slot in (0, 1, 2, 3, 50, 51):
            ix.remove(sub_id(0, slot))
        assert ix.stats().trie_nodes == 0
        ix.add(sub_id(0, 0), 2, b"z.%s*" % (b"a." * (most - 2)))


def test_what_a_table_holds_is_added_again() -> None:
    """In another order than it was accepted in, and by a version that has other bounds."""
    with SubjectIndex(1, 2**15, 2**16, conns=4) as ix:
        ix.restoring(True)
        for slot, pattern in enumerate(forms(13)):
            ix.add(sub_id(0, slot), 1, pattern)
        ix.restoring(False)
        assert len(ix.match(b".".join([b"a"] * 13)).subs) == 2**13
        for slot in range(2**13):
            ix.remove(sub_id(0, slot))
        assert ix.stats().forms == 0


# ---- lists of recipients that are longer than a ring ----


def subscribe(rig: Rig, client: socket.socket, count: int, subject: bytes) -> None:
    for at in range(0, count, 1000):
        rig.send(client, b"".join(b"SUB %s %d\r\n" % (subject, n) for n in range(at, at + 1000)))
        for _ in range(4):
            rig.turn_connmgr()
            rig.turn_router()
    rig.send(client, b"PING\r\n")
    rig.settle(client, b"PONG\r\n")


def got(data: bytes) -> Counter[tuple[bytes, bytes]]:
    """How often each subscription got each body, which is a digit."""
    return Counter(re.findall(rb"MSG all (\d+) 1\r\n(\d)\r\n", data))


def test_a_long_list_is_made_once() -> None:
    """However often its ring is full, and it is matched, sorted and copied no more than that."""
    with Rig(config=LARGE) as rig:
        client = rig.open()
        subscribe(rig, client, MANY, b"all")
        before = rig.router.stats()
        rig.send(client, b"PUB all 1\r\n1\r\nPUB all 1\r\n2\r\nPING\r\n")
        data = rig.settle(client, b"PONG\r\n")
        after = rig.router.stats()
    assert got(data) == {(b"%d" % n, body): 1 for n in range(MANY) for body in (b"1", b"2")}
    assert after["lists"] - before["lists"] == 2
    assert after["messages"] - before["messages"] == 2
    # For each message: the list is built, marked and written once; a part of that for the matches.
    assert after["work"] - before["work"] < 2 * 4 * MANY


def test_others_go_on_beside_a_long_list() -> None:
    """A newcomer is greeted, and a quiet flow goes on, while twenty long lists wait."""
    with Rig(config=LARGE) as rig:
        client, quiet = rig.open(), rig.open(b"SUB quiet 1")
        subscribe(rig, client, MANY, b"all")
        rig.send(client, b"PUB all 1\r\n1\r\n" * 20 + b"PING\r\n")
        rig.turn_connmgr()
        rig.turn_router()
        for _ in range(10):
            said = b"PUB quiet 1\r\n5\r\nPING\r\n"
            rig.send(quiet, said)
            assert rig.settle(quiet, b"PONG\r\n") == b"MSG quiet 1 1\r\n5\r\nPONG\r\n"
            rig.leave(rig.open())  # it was greeted, and got its PONG
        data = rig.peek(client)
        assert b"PONG" not in data, "the lists were there all the time"
        data += rig.settle(client, b"PONG\r\n")
    assert got(data) == {(b"%d" % n, b"1"): 20 for n in range(MANY)}


def test_who_makes_the_router_work_waits_for_it_alone() -> None:
    """Each message of one client has a large result built anew; it is set aside, and held back."""
    with Rig(config=LARGE) as rig:
        client, quiet = rig.open(), rig.open()
        subscribe(rig, client, 40_000, b"all work")  # a queue group: each message has one recipient
        rounds = 200
        said = b"".join(b"SUB *.%d 1\r\nPUB all 1\r\n1\r\nUNSUB 1\r\n" % n for n in range(rounds))
        rig.send(client, said + b"PING\r\n")
        before = rig.router.stats()["set_aside"]
        rig.turn_connmgr()
        rig.send(quiet, b"PING\r\n")
        rig.settle(quiet, b"PONG\r\n")
        data = rig.peek(client)
        assert b"PONG" not in data
        assert rig.router.stats()["set_aside"] - before > rounds
        data += rig.settle(client, b"PONG\r\n")
    assert data.count(b"MSG all ") == rounds


def test_a_visit_ends_when_it_was_enough() -> None:
    """Also within a batch: what one turn of C does is bounded, and it goes on where it stopped."""
    with Rig(config=LARGE) as rig:
        lines = [b"SUB %s.end %d\r\n" % (it, n) for n, it in enumerate(forms(10))]
        for at in range(0, len(lines), 128):  # each has its share of the index
            client = rig.open()
            rig.send(client, b"".join(lines[at : at + 128]) + b"PING\r\n")
            rig.settle(client, b"PONG\r\n")
        clients = [rig.open() for _ in range(8)]
        each, prefix = 50, b"a." * 10
        for at, client in enumerate(clients):
            numbers = range(at * each, (at + 1) * each)
            said = b"".join(b"PUB %s%d 1\r\n1\r\n" % (prefix, n) for n in numbers)
            rig.send(client, said + b"PING\r\n")
        rig.turn_connmgr()
        before = rig.router.stats()
        rig.turn_router()  # looks at its port once
        after = rig.router.stats()
        # A visit and a slice, and in each what it was at when that was enough.
        most = lib.ROUTER_WORK_A_VISIT + lib.ROUTER_WORK_A_SLICE + 2 * 2**11 * lib.INDEX_WORK_STEP
        assert most // 2 < after["work"] - before["work"] <= most
        assert 0 < after["messages"] - before["messages"] < len(clients) * each // 4
        for client in clients:
            rig.settle(client, b"PONG\r\n")
        assert rig.router.stats()["messages"] == before["messages"] + len(clients) * each
        assert rig.live() == 0


def test_a_successor_is_heard_while_it_rebuilds_its_index() -> None:
    with Rig(config=LARGE) as rig:
        client = rig.open()
        subscribe(rig, client, MANY, b"all")
        said: list[int] = []
        assert rig.successor().start(lambda: said.append(1)) == MANY
        assert len(said) == MANY // lib.ROUTER_STARTS_A_CALL


def test_a_successor_goes_on_within_a_list() -> None:
    """A router that dies at any moment: the next goes on with the lists as they stand (R4, R7)."""
    with Rig(config=LARGE) as rig:
        client = rig.open()
        subscribe(rig, client, MANY, b"all")
        rig.send(client, b"PUB all 1\r\n1\r\nPUB all 1\r\n2\r\nPUB all 1\r\n3\r\nPING\r\n")
        rig.turn_connmgr()
        data, deaths = b"", 0
        while not data.endswith(b"PONG\r\n"):
            rig.turn_router()
            rig.turn_connmgr()
            data += rig.peek(client)
            rig.router = rig.successor()
            rig.router.start()
            deaths += 1
    assert deaths > 5
    assert got(data) == {(b"%d" % n, body): 1 for n in range(MANY) for body in (b"1", b"2", b"3")}
    order = re.findall(rb" 1\r\n(\d)\r\n", data)
    assert order == sorted(order)
