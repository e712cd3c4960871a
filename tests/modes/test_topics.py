"""003-35: one message to several topics, `Midair-Topics`."""

from __future__ import annotations

import os

import pytest

from midair.client import wire_nats
from tests.crash.modes import hpub
from tests.modes.clients import clients
from tests.support.instance import Instance, eventually
from tests.support.server import run
from tests.support.stream import Inside, Stream

TOPICS_MAX, BYTES_MAX = 16, 1024
ARENA_BYTES = 256 << 20  # as usual


def opened(server: Instance, *subjects: bytes, echo: bool = True) -> Stream:
    """A connection with these subscriptions, called 0, 1, ...; a queue group after a blank."""
    stream = Stream(server.host, server.port, echo=echo)
    for at, subject in enumerate(subjects):
        name, _, queue = subject.partition(b" ")
        stream.sub(name, b"%d" % at, queue)
    assert stream.sync() == []
    return stream


def got(stream: Stream) -> list[tuple[bytes, bytes, bytes]]:
    return [(it.sid, it.subject, it.body) for it in stream.sync()]


def test_each_subscription_gets_it_once_under_the_topic_it_listens_to(server: Instance) -> None:
    streams = {
        "first": opened(server, b"t.a"),
        "second": opened(server, b"t.b"),
        "both": opened(server, b"t.a", b"t.b"),
        "pattern": opened(server, b"t.*"),
        "rest": opened(server, b"t.b.>", b"t.c.>"),
        "other": opened(server, b"t.d", b"other"),
    }
    with Stream(server.host, server.port) as client:
        client.send(hpub(b"t.a", b"", b"x", topics="t.b, t.c.d"))
        client.send(hpub(b"t.c", b"", b"y", topics="t.b,t.a,,t.a t.c"))
        assert client.sync() == []
    found = {name: got(stream) for name, stream in streams.items()}
    assert found == {
        "first": [(b"0", b"t.a", b"x"), (b"0", b"t.a", b"y")],
        "second": [(b"0", b"t.b", b"x"), (b"0", b"t.b", b"y")],
        "both": [
            (b"0", b"t.a", b"x"), (b"1", b"t.b", b"x"),
            (b"1", b"t.b", b"y"), (b"0", b"t.a", b"y"),
        ],
        "pattern": [(b"0", b"t.a", b"x"), (b"0", b"t.c", b"y")],
        "rest": [(b"1", b"t.c.d", b"x")],
        "other": [],
    }  # fmt: skip
    for stream in streams.values():
        stream.close()


def test_of_a_queue_group_one_member_gets_it(server: Instance) -> None:
    members = [opened(server, subject + b" g") for subject in (b"g.a", b"g.a", b"g.b", b"g.b")]
    others = [opened(server, b"g.b h"), opened(server, b"g.* g"), opened(server, b"g.c g")]
    with Stream(server.host, server.port) as client:
        for number in range(40):
            client.send(hpub(b"g.a", b"", b"%d" % number, topics="g.b"))
        assert client.sync() == []
    taken = [got(stream) for stream in members]
    wild, second = got(others[1]), got(others[0])
    of_group = [it for each in (*taken, wild) for it in each]
    assert sorted(int(body) for _, _, body in of_group) == list(range(40))
    assert taken[2:] == [[], []], "those of the first topic the group listens to"
    assert all([*taken[:2], wild]), "in turn"
    assert {subject for _, subject, _ in of_group} == {b"g.a"}
    assert second == [(b"0", b"g.b", b"%d" % number) for number in range(40)], "a group of its own"
    assert got(others[2]) == []
    for stream in (*members, *others):
        stream.close()


def test_the_sender_does_not_hear_it_if_it_wants_no_echo(server: Instance) -> None:
    client = opened(server, b"e.a", b"e.b", b"e.a g", b"e.>", echo=False)
    other = opened(server, b"e.b", b"e.b g")
    client.send(hpub(b"e.a", b"", b"x", topics="e.b"))
    assert got(client) == []
    assert sorted(got(other)) == [(b"0", b"e.b", b"x"), (b"1", b"e.b", b"x")]
    client.close()
    other.close()


def test_it_keeps_its_place_among_others(server: Instance) -> None:
    """Before and after it go messages to one of its topics, in runs and alone.

    With one connmgr those are flows, which repeat what was decided for the message before. It is
    not repeated, and nothing repeats what was decided for it.
    """
    first, second = opened(server, b"o.a"), opened(server, b"o.b")
    with Stream(server.host, server.port) as client:
        assert client.sync() == []
        wanted: tuple[list[bytes], list[bytes]] = ([], [])
        for at in range(300):
            body = b"%d" % at
            if at % 3 == 1:
                client.send(hpub(b"o.a", b"", body, topics="o.b"))
            elif at % 3 == 2:
                client.send(wire_nats.pub(b"o.b", body))
            else:
                client.send(wire_nats.pub(b"o.a", body) * 7)
            wanted[0].extend([body] * (7 if at % 3 == 0 else at % 3 == 1))
            wanted[1].extend([body] * (at % 3 > 0))
            if at % 10 == 0:
                assert client.sync() == []
        assert client.sync() == []
    assert [body for _, _, body in got(first)] == wanted[0]
    assert [body for _, _, body in got(second)] == wanted[1]
    first.close()
    second.close()


@pytest.mark.parametrize("size", [0, 4096, 4097, 100_000, 900_000])
def test_there_is_one_body_and_nothing_is_left_of_it(
    server: Instance, connmgrs: int, size: int
) -> None:
    body = os.urandom(size)
    topics = [b"b.%d" % at for at in range(5)]
    streams = [opened(server, *topics) for _ in range(4)]
    inside = Inside(server.name, connmgrs, ARENA_BYTES)
    eventually(lambda: not any(live for live, _ in inside.census()), "no message is left")
    with Stream(server.host, server.port) as client:
        for _ in range(3):
            client.send(hpub(topics[0], b"", body, topics=b" ".join(topics[1:]).decode()))
        assert client.sync() == []
    for stream in streams:
        found = [(it.subject, it.body) for it in stream.take(15)]
        assert found == [(topic, body) for _ in range(3) for topic in topics]
        stream.close()
    eventually(lambda: not any(live for live, _ in inside.census()), "no message is left")


def test_a_request_to_several_topics(server: Instance) -> None:
    responder = opened(server, b"r.b")
    with opened(server, b"in") as client:
        client.send(hpub(b"r.a", b"in", b"x", topics="r.b"))
        (asked,) = responder.take(1)
        assert (asked.subject, asked.reply) == (b"r.b", b"in")
        responder.send(wire_nats.pub(asked.reply, b"answer"))
        assert [it.body for it in client.take(1)] == [b"answer"]
        responder.send(wire_nats.unsub(b"0"))
        assert responder.sync() == []
        client.send(hpub(b"r.a", b"in", b"x", topics="r.b"))
        assert b"503" in client.take(1)[0].headers
        client.send(hpub(b"r.a", b"", b"x", topics="r.b"))
        assert client.sync() == []
    responder.close()


LONG = [f"{'l' * 61}.{at:02}" for at in range(TOPICS_MAX)]  # with a blank each: 16 * 64 + 15
BAD = {
    "none": {"topics": " , "},
    "a wildcard": {"topics": "a.*"},
    "the rest": {"topics": "a, >"},
    "an empty token": {"topics": "a..b"},
    "ours": {"topics": "a, _midair.ipc.a.b"},
    "too many": {"topics": " ".join(f"m.{at}" for at in range(TOPICS_MAX + 1))},
    "too long": {"topics": " ".join(LONG) + "lots"},
    "semaphore": {"topics": "a", "mode": "semaphore"},
    "fanout": {"topics": "a", "mode": "fanout"},
}


@pytest.mark.parametrize("headers", BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused(server: Instance, headers: dict[str, str]) -> None:
    with opened(server, b"in", b"bad", b"a", b"m.*") as client:
        client.send(hpub(b"bad", b"in", b"x", **headers))
        (told,) = client.take(1)
        assert (told.sid, b"400 Bad Mode" in told.headers) == (b"0", True)
        assert client.sync() == []


def test_as_many_and_as_long_as_the_limit_says(server: Instance) -> None:
    longest = [f"{'l' * 60}{at:02}" for at in range(TOPICS_MAX)]
    longest[0] += "l" * (BYTES_MAX - len(" ".join(longest)))
    assert len(" ".join(longest)) == BYTES_MAX
    with opened(server, b"most", *(it.encode() for it in longest)) as client:
        client.send(hpub(b"most", b"", b"x", topics=", ".join(longest)))
        found = [(int(sid), subject.decode()) for sid, subject, _ in got(client)]
        assert found == list(enumerate(["most", *longest]))


def test_more_recipients_than_a_ring_holds(server: Instance) -> None:
    """They are ordered in pieces, each a step of its own, of three topics and a queue group."""
    each, topics = 25_000, [b"h.a", b"h.b", b"h.c"]
    readers = [Stream(server.host, server.port) for _ in range(2)]
    for number, stream in enumerate(readers):
        for first in range(0, each, 1000):
            stream.send(
                b"".join(
                    b"SUB %b %d\r\n" % (topics[(at + number) % 3], at)
                    for at in range(first, first + 1000)
                )
            )
        stream.send(b"SUB h.> g g\r\nSUB h.c h %d\r\n" % (each + number))
        assert stream.sync() == []
    with Stream(server.host, server.port) as client:
        for number in range(2):
            client.send(hpub(topics[0], b"", b"%d" % number, topics="h.b h.c"))
        client.send(wire_nats.pub(b"h.c", b"after"))
        assert client.sync() == []
    groups: list[bytes] = []
    for number, stream in enumerate(readers):
        found = stream.sync()
        groups += [it.sid for it in found if not it.sid.isdigit() or int(it.sid) >= each]
        plain = [it for it in found if it.sid.isdigit() and int(it.sid) < each]
        for body in (b"0", b"1"):
            mine = [it for it in plain if it.body == body]
            assert sorted(int(it.sid) for it in mine) == list(range(each))
            assert all(it.subject == topics[(int(it.sid) + number) % 3] for it in mine)
        assert [it.body for it in plain if it.subject == b"h.c"][-1] == b"after"
        stream.close()
    assert len([it for it in groups if it == b"g"]) == 3
    assert len(groups) == 6


def test_the_library_says_them(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, other):
            subscription = await other.nats.subscribe("lib.*")
            again = await other.nats.subscribe("lib.b")
            await other.flush()
            await client.publish("lib.a", b"x", topics=["lib.b", "lib.c"])
            assert (await subscription.next_msg()).subject == "lib.a"
            assert (await again.next_msg()).subject == "lib.b"
            await client.flush()
            await other.flush()
            assert subscription.pending_msgs == again.pending_msgs == 0

    run(test())
