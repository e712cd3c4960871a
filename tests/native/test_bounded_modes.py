"""Whatever is gone through for a message, a name, a deadline or an end is counted, and ends a turn.

Everything is real but the processes (bench/rig.py). Costs are counted, not timed.
"""

from __future__ import annotations

import itertools
import re
import socket
import struct

import pytest

from bench import rig as rigs
from bench.rig import Rig
from midair.process.runtime import Runtime
from native import lib
from native.router import Router, open_routing
from tests.crash.modes import hpub
from tests.native.test_bounded import LARGE, MANY, subscribe
from tests.native.test_bounded_lists import crowd, fill, flood
from tests.support.instance import eventually
from tests.support.queue import Queue

# From modes.h, aside.h and records.h.
STILL_OVER = 22  # the order that ports need not be waited for
TOPICS = 16  # of a message, beside its subject
CHOICE, COMPARED = 1024, 4  # responders compared to choose one, and of those for a unit of work
SETTLED, AT_ONCE = 16, 256  # work of a record that is settled, and how many are before others
DEAR, ALLOWANCE = 1000, 100_000  # work between two charges, and what a connection may do
CONFIG = LARGE.with_("router", subjects=2**17)
NO_ECHO = b'CONNECT {"verbose":false,"headers":true,"echo":false,"no_responders":true}\r\n'
TURN = lib.ROUTER_WORK_A_VISIT + 2 * lib.ROUTER_WORK_A_SLICE  # and what it was at then


def spent(rig: Rig, client: socket.socket, said: bytes) -> tuple[int, int]:
    """Work of the longest turn of the router, and of all, until the client has its PONG."""
    rig.send(client, said + b"PING\r\n")
    began, most, data = rig.router.stats()["work"], 0, b""
    while not data.endswith(b"PONG\r\n"):
        rig.turn_connmgr()
        before = rig.router.stats()["work"]
        rig.turn_router()
        most = max(most, rig.router.stats()["work"] - before)
        data += rig.peek(client)
    return most, rig.router.stats()["work"] - began


# ---- who gets it ----


def test_the_least_busy_of_very_many_is_one_of_some() -> None:
    """A request to one of 100,000 members does not compare them all, and others every time."""
    with Rig(config=CONFIG) as rig:
        members = crowd(rig, MANY, b"all work")
        client, count = rig.open(), 200
        spent(rig, client, b"PUB all 1\r\n1\r\n")  # the result is built
        rig.peek(members)
        _, work = spent(rig, client, hpub(b"all", b"", b"2", mode="semaphore") * count)
        each = CHOICE // COMPARED
        assert count * each <= work < 2 * count * each
        got = re.findall(rb"MSG all (\d+) ", rig.peek(members))
        assert len(got) == count


def test_members_that_are_passed_over_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender without echo whose own members are the group: a long walk for each message."""
    monkeypatch.setattr(rigs, "CONNECT", NO_ECHO)
    with Rig(config=CONFIG) as rig:
        client, quiet = rig.open(), rig.open()
        subscribe(rig, client, MANY, b"all work")
        count = 400
        spent(rig, quiet, b"PUB all 1\r\n1\r\n")
        assert rig.peek(client).count(b"MSG") == 1
        most, work = spent(rig, client, b"PUB all 1\r\n1\r\n" * count)
        assert work >= count * (MANY // 32)
        assert most <= TURN + MANY
        rig.send(client, b"PUB all 1\r\n1\r\n" * count + b"PING\r\n")
        rig.turn_connmgr()
        spent(rig, quiet, b"")
        assert b"PONG" not in rig.peek(client), "it waits for its own messages, alone"
        rig.settle(client, b"PONG\r\n")


def test_topics_with_the_same_recipients_are_matched_one_at_a_time() -> None:
    """003-35: every topic of a message is for the same 50,000 subscriptions."""
    with Rig(config=CONFIG) as rig:
        count = 50_000
        members, client = crowd(rig, count, b"t.>"), rig.open()
        topics = " ".join(f"t.{n}" for n in range(1, TOPICS + 1))
        most, _ = spent(rig, client, hpub(b"t.0", b"", b"1", topics=topics))
        # The last step matches each once more, for queue groups.
        assert most <= TURN + (TOPICS + 4) * count
        assert rig.settle(members, b"1\r\n").count(b"HMSG t.0 ") == count


def test_too_many_listeners_are_counted() -> None:
    with Rig(config=CONFIG) as rig:
        crowd(rig, MANY, b"all")
        client, count = rig.open(b"SUB in 1"), 200
        spent(rig, client, hpub(b"all", b"in", b"1", mode="fanout"))
        most, work = spent(rig, client, hpub(b"all", b"in", b"1", mode="fanout") * count)
        assert work >= count * MANY // COMPARED
        assert most <= TURN + MANY


# ---- own subscriptions ----


@pytest.mark.parametrize("own", [0, 40, MANY])
def test_a_connection_s_own_subscription_among_very_many(
    monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    """A 503 goes to the inbox of who asked, which everybody listens to: whichever are fewer, its
    own or all, are gone through."""
    monkeypatch.setattr(rigs, "CONNECT", NO_ECHO)
    with Rig(config=CONFIG) as rig:
        others = crowd(rig, MANY, b"in.*")
        client, count = rig.open(b"SUB in.box in", b"SUB in.* any", b"SUB > all"), 100
        if own:
            subscribe(rig, client, max(own, 1000), b"else")
        spent(rig, client, b"PUB nobody.1 in.box 1\r\n1\r\n")
        asked = b"PUB nobody.1 in.box 1\r\n1\r\n" * count
        rig.send(client, asked + b"PUB x.y in.z 0\r\n\r\nPING\r\n")
        before, data = rig.router.stats()["work"], b""
        while not data.endswith(b"PONG\r\n"):
            rig.turn_connmgr()
            rig.turn_router()
            data += rig.peek(client)
        work = rig.router.stats()["work"] - before
        assert data.count(b"HMSG in.box in ") == count
        assert data.count(b"HMSG in.z any ") == 1
        assert rig.peek(others) == b""
        assert (work > 10 * count) == (own > 0), work
        assert work < count * (MANY // 2)


def test_an_own_subscription_is_found_by_each_kind_of_pattern(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several the one with the longest subject, of these the oldest; long ones lie in cells."""
    monkeypatch.setattr(rigs, "CONNECT", NO_ECHO)
    deep = b".".join([b"token"] * 40)
    cases: list[tuple[list[bytes], bytes, bytes | None]] = [
        ([b"a.b"], b"a.b", b"a.b"),
        ([b"a.b"], b"a.b.c", None),
        ([b"a.b.c"], b"a.b", None),
        ([b"a.bc"], b"a.b", None),
        ([b"a.b"], b"a.bc", None),
        ([b"*"], b"a", b"*"),
        ([b"*"], b"a.b", None),
        ([b"a.*"], b"a.b", b"a.*"),
        ([b"a.*"], b"a", None),
        ([b"*.b"], b"a.c", None),
        ([b">"], b"a.b.c", b">"),
        ([b"a.>"], b"a", None),
        ([b"a.>"], b"a.b.c", b"a.>"),
        ([b"a.>", b">", b"a.b.c"], b"a.b.c", b"a.b.c"),
        ([deep], deep, deep),
        ([deep + b".*"], deep, None),
        ([deep + b".>"], deep + b".x", deep + b".>"),
    ]
    with Rig(config=rigs.CONFIG) as rig:
        for n, (patterns, subject, wanted) in enumerate(cases):
            client = rig.open(*(b"SUB %s %d" % (it, at) for at, it in enumerate(patterns, 1)))
            rig.send(client, b"PUB none.%d %s 0\r\n\r\nPING\r\n" % (n, subject))
            data = rig.settle(client, b"PONG\r\n")
            sids = re.findall(rb"HMSG \S+ (\d+) ", data)
            assert sids == ([b"%d" % (patterns.index(wanted) + 1)] if wanted else []), n
            rig.leave(client)


# ---- ends ----


def ask(rig: Rig, responder: socket.socket, asker: socket.socket, count: int, **how: str) -> None:
    """So many requests that nobody answers, and whose asker does not listen."""
    for _ in range(count // 200):
        rig.send(asker, hpub(b"svc", b"nowhere", b"1", mode="semaphore", **how) * 200 + b"PING\r\n")
        rig.settle(asker, b"PONG\r\n")
        rig.peek(responder)
    assert rig.router.stats()["mode_requests"] == count


def test_deadlines_that_pass_together_take_several_turns() -> None:
    with Rig(config=CONFIG) as rig:
        responder, asker, count = rig.open(b"SUB svc 1"), rig.open(), 4000
        ask(rig, responder, asker, count, deadline="1500")
        each: list[int] = []

        def expired() -> bool:
            before = rig.router.stats()["mode_expired"]
            rig.turn_router()
            each.append(rig.router.stats()["mode_expired"] - before)
            return sum(each) == count

        eventually(expired, "all of them pass")
        assert max(each) <= lib.ROUTER_WORK_A_SLICE // SETTLED


@pytest.mark.parametrize("who", ["responder", "asker", "unsubscribed"])
def test_an_end_that_concerns_many_takes_several_turns(who: str) -> None:
    """Of a connection that was asked, or that asks, or of a subscription: beside the others."""
    with Rig(config=CONFIG) as rig:
        responder, quiet, count = rig.open(b"SUB svc 1"), rig.open(), 4000
        asker = rig.open()
        if who == "unsubscribed":
            opens = (
                hpub(b"svc", b"nowhere.%d" % n, b"1", mode="session-open") for n in range(count)
            )
            for said in iter(lambda: b"".join(itertools.islice(opens, 200)), b""):
                rig.send(asker, said + b"PING\r\n")
                rig.settle(asker, b"PONG\r\n")
                rig.peek(responder)
        else:
            ask(rig, responder, asker, count)
        if who == "unsubscribed":
            rig.send(responder, b"UNSUB 1\r\nPING\r\n")
        else:
            gone = responder if who == "responder" else asker
            rig.reset(gone)
        rig.turn_connmgr()
        rig.send(quiet, b"PING\r\n")
        rig.turn_connmgr()
        before = rig.router.stats()
        rig.turn_router()
        after = rig.router.stats()
        settled = AT_ONCE + lib.ROUTER_WORK_A_SLICE // SETTLED
        assert after["set_aside"] > before["set_aside"]
        assert 0 < after["work"] - before["work"] <= TURN
        assert after["mode_gone"] - before["mode_gone"] <= settled
        rig.settle(quiet, b"PONG\r\n")
        eventually(lambda: rig.turn_connmgr() or rig.turn_router() or free(rig), "all is settled")
        spent(rig, quiet, b"")


def free(rig: Rig) -> bool:
    """Whether nothing that was asked is open."""
    stats = rig.router.stats()
    return stats["mode_gone"] == 4000 or stats["sessions_closed"] == 1


# ---- names ----

WATCHED = b"_midair.clients.x.*"


def named(monkeypatch: pytest.MonkeyPatch, rig: Rig, name: bytes, index: int = 0) -> socket.socket:
    with monkeypatch.context() as patch:
        patch.setattr(rigs, "CONNECT", b'CONNECT {"headers":true,"name":"ipc:%s"}\r\n' % name)
        return rig.open(index=index)


def test_watchers_in_many_groups_need_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring is not empty, and a client with a name leaves: a thousand are told of it at once."""
    with Rig(config=CONFIG) as rig:
        client, watcher = named(monkeypatch, rig, b"x.1"), rig.open()
        count = 1000
        lines = b"".join(b"SUB %s g%d %d\r\n" % (WATCHED, n, n) for n in range(count))
        rig.send(watcher, lines + b"PING\r\n")
        rig.settle(watcher, b"PONG\r\n")
        crowd(rig, 1000, b"q")
        busy = rig.open()
        closed = rig.router.stats()["sessions_closed"]
        fill(rig, busy, watcher, b"PING\r\n")
        rig.reset(client)
        for _ in range(2):  # it is noticed, and the router is told
            rig.turn_connmgr()
            rig.turn_router()
        assert rig.router.stats()["sessions_closed"] == closed + 1
        told = rig.settle(watcher, b"PONG\r\n")
        while told.count(b'"event":"down"') < count:
            rig.turn_connmgr()
            rig.turn_router()
            told += rig.peek(watcher)
        assert sorted(int(it) for it in re.findall(rb"MSG \S+ (\d+) ", told)) == list(range(count))


def test_a_name_waits_for_a_full_ring_of_its_watchers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who listens to names is at a connmgr that takes nothing. The names of others wait
    for it, and no message does; a group has a member elsewhere."""
    with Rig(config=CONFIG, connmgrs=2) as rig:
        away = rig.open(b"SUB _midair.clients.y.* group g", index=1)
        here = rig.open(b"SUB _midair.clients.y.* group g", b"SUB quiet 3")
        watchers = 16_000  # to tell them takes more of a ring than one message does
        subscribe(rig, away, watchers, WATCHED)
        subscribe(rig, rig.open(index=1), 1000, b"q")
        client, other = named(monkeypatch, rig, b"x.1"), named(monkeypatch, rig, b"y.1")
        busy = rig.open()
        rig.settle(here, b"")
        rig.settle(away, b"")
        before = rig.router.stats()["messages"]
        count = 124  # of the ring a few batches are left
        rig.send(busy, flood(count))

        def routed() -> bool:
            rig.turn_connmgr(0)
            rig.turn_router()
            return rig.router.stats()["messages"] == before + count

        eventually(routed, "it stands still, and the rest of its ring is used")
        for gone in (client, other):
            rig.reset(gone)
        rig.turn_connmgr(0)
        rig.send(here, b"PUB quiet 1\r\n1\r\nPING\r\n")
        data = b""
        while not data.endswith(b"PONG\r\n"):
            rig.turn_connmgr(0)
            rig.turn_router()
            data += rig.peek(here)
        assert b"MSG quiet 3 1\r\n1\r\n" in data
        assert data.count(b'"event":"down"') == 1  # y.1
        assert rig.router.stats()["sessions_closed"] == 1
        told = b""

        def all_told() -> bool:
            nonlocal told
            rig.turn_connmgr()
            rig.turn_router()
            told += rig.peek(away)
            return told.count(b'"event":"down"') == watchers

        eventually(all_told, "they are told when their connmgr takes something")
        assert rig.router.stats()["sessions_closed"] == 2


# ---- ports that stand still ----


def test_who_waits_for_a_port_goes_on_though_others_keep_it_busy() -> None:
    """It takes orders again, and its own clients keep its ring fuller than half."""
    with Rig(config=CONFIG, connmgrs=2) as rig:
        away, local = rig.open(b"SUB far far", index=1), rig.open(index=1)
        subscribe(rig, away, 1000, b"q")
        client = rig.open()

        def held() -> bool:
            rig.send(client, flood(60))
            rig.turn_connmgr(0)
            rig.turn_router()
            return rig.connmgrs[0].stats()["held"] > 0

        eventually(held, "the port stands still, and its publisher waits")
        got = b""

        def came() -> bool:
            nonlocal got
            local.sendall(flood(120))
            for _ in range(4):  # less of the ring is taken than local has brought
                rig.turn_connmgr()
                rig.turn_router()
            got = got[-100:] + rig.peek(away)
            return b"MSG far far " in got

        client.sendall(b"PUB far 1\r\n1\r\n")
        eventually(came, "it is read again")


def test_a_router_says_that_nobody_waits_for_a_retired_port(place: Runtime) -> None:
    """Its predecessor may have told somebody to wait for a port that there is no more."""
    refs, orders = Queue(), Queue()
    try:
        router = Router(
            open_routing(place, 2, 16, 1024),
            1,
            1024,
            0,
            False,
            refs=[refs.fd],
            orders=[orders.fd],
        )
        router.start()
        router.turn(1)
        batch, _ = orders.queue.receive()
        kind, _, _, _, ports = struct.unpack_from("<BBHIQ", batch, lib.BATCH_HEAD)
        assert (kind, ports) == (STILL_OVER, 2**lib.PORTS_MAX - 1)
    finally:
        for queue in (refs, orders):
            queue.queue.close()
