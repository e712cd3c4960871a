"""003-30: fanout requests with more listeners than fit a step of the router, and their limits."""

from __future__ import annotations

import pytest

from midair.client import wire_nats
from midair.client.wire_nats import Message
from tests.crash.modes import END, EXPIRED, GONE, hpub, said
from tests.support.instance import Instance, eventually
from tests.support.segments import Segments
from tests.support.stream import Stream

STEP, LISTENERS = 1024, 65536  # of one step; of one request at most
USED = 1 << 63


def listen(server: Instance, subject: bytes, count: int, connections: int = 1) -> list[Stream]:
    """Connections that listen so many times together."""
    streams = [Stream(server.host, server.port, timeout_s=120) for _ in range(connections)]
    for number, stream in enumerate(streams):
        mine = range(number, count, connections)
        stream.send(b"".join(b"SUB %b %d\r\n" % (subject, sid) for sid in mine))
        assert stream.sync() == []
    return streams


def requester(server: Instance) -> Stream:
    stream = Stream(server.host, server.port, timeout_s=120)
    stream.sub(b"in.*", b"1")
    assert stream.sync() == []
    return stream


def ask(stream: Stream, subject: bytes, number: int, **headers: str) -> None:
    stream.send(hpub(subject, b"in.%d" % number, b"x", mode="fanout", **headers))


def expected(message: Message) -> int:
    assert said(message) == b"202 Accepted"
    (line,) = [it for it in message.headers.split(b"\r\n") if it.startswith(b"Midair-Expect:")]
    return int(line.partition(b":")[2])


def answer(asked: list[Message], count: int) -> bytes:
    """The last replies of the first `count`, each of which names its subscription."""
    return b"".join(wire_nats.pub(it.reply, it.sid) for it in asked[:count])


def left(server: Instance, connmgrs: int) -> tuple[int, int]:
    """Requests and legs that are in use."""
    with Segments(server.name, connmgrs) as it:
        requests, legs = it.requests(), it.legs()
        return (
            sum(bool(requests[at].word & USED) for at in range(it.routing.requests_high)),
            sum(bool(legs[at].word & USED) for at in range(it.routing.legs_high)),
        )


@pytest.mark.parametrize("count", [STEP, STEP + 1, 5 * STEP, 20_000])
def test_each_of_many_answers_once(server: Instance, connmgrs: int, count: int) -> None:
    streams, client = listen(server, b"many", count, 3), requester(server)
    for number in range(2):
        ask(client, b"many", number)
        client.send(wire_nats.pub(b"in.after", b"%d" % number))
    found = {0: [], 1: []}
    for stream in streams:
        asked = [it for _ in range(2) for it in stream.take(len(range(0, count, 3)) - 1)]
        asked += stream.sync()
        assert len({it.reply for it in asked}) == len(asked)
        stream.send(answer(asked, len(asked)))
    for number in found:
        while not found[number] or said(found[number][-1]) != END:
            (message,) = client.take(1)
            if message.subject == b"in.after":
                assert found[int(message.body)], "what was published after the request comes after"
                continue
            found[int(message.subject[3:])].append(message)
    for messages in found.values():
        assert expected(messages[0]) == count
        assert sorted(int(it.body) for it in messages[1:-1]) == list(range(count))
    assert client.sync() == []
    for stream in (*streams, client):
        stream.close()
    eventually(lambda: left(server, connmgrs) == (0, 0), "nothing is left")


def test_who_goes_away_is_told(server: Instance, connmgrs: int) -> None:
    count = 3 * STEP
    (stays, goes), client = listen(server, b"leave", count, 2), requester(server)
    ask(client, b"leave", 0)
    stays.send(answer(stays.take(count // 2), count // 2))
    asked = goes.take(count // 2)
    goes.send(answer(asked, 10))
    assert goes.sync() == []
    goes.close()
    found = client.take(1 + count + 1)
    assert expected(found[0]) == count
    words = [said(it) for it in found[1:]]
    assert words[-1] == END
    assert words.count(GONE) == count // 2 - 10
    assert len({it for it in words if it.isdigit()}) == count // 2 + 10
    stays.close()
    client.close()
    eventually(lambda: left(server, connmgrs) == (0, 0), "nothing is left")


def test_a_deadline_ends_it_once(server: Instance, connmgrs: int) -> None:
    count = 5 * STEP
    (stream,), client = listen(server, b"late", count), requester(server)
    ask(client, b"late", 0, deadline="700")
    asked = stream.take(count)
    stream.send(answer(asked, 100))
    found = [said(it) for it in client.take(102)]
    assert (found[0], found[-1]) == (b"202 Accepted", EXPIRED)
    stream.send(answer(asked, count))
    assert stream.sync() == []
    assert client.sync() == [], "late replies are dropped"
    assert left(server, connmgrs) == (0, 0)
    stream.close()
    client.close()


def test_a_requester_that_goes_leaves_nothing(server: Instance, connmgrs: int) -> None:
    count = 5 * STEP
    (stream,), client = listen(server, b"void", count), requester(server)
    for number in range(3):
        ask(client, b"void", number)
    asked = stream.take(3 * count)
    client.close()
    eventually(lambda: left(server, connmgrs) == (0, 0), "nothing is left")
    stream.send(answer(asked, len(asked)))
    assert stream.sync() == []
    stream.close()


def test_as_many_as_the_limit_says(server: Instance, connmgrs: int) -> None:
    (stream,), client = listen(server, b"most", LISTENERS), requester(server)
    ask(client, b"most", 0)
    asked = stream.take(LISTENERS)
    stream.send(answer(asked, LISTENERS))
    found = client.take(LISTENERS + 2)
    assert expected(found[0]) == LISTENERS
    assert {int(it.body) for it in found[1:-1]} == set(range(LISTENERS))
    assert said(found[-1]) == END
    stream.sub(b"most", b"more")
    assert stream.sync() == []
    ask(client, b"most", 0)
    assert [said(it) for it in client.take(1)] == [b"429 Too Many Listeners"]
    assert client.sync() == []
    stream.close()
    client.close()
    eventually(lambda: left(server, connmgrs) == (0, 0), "nothing is left")


def test_one_that_does_not_read_holds_nobody_up(server: Instance) -> None:
    """Its listeners are asked when it reads; those of others are, and answer, meanwhile."""
    count = 30_000
    (slow,), (quick,) = listen(server, b"slow", count), listen(server, b"quick", 10)
    client, other = requester(server), requester(server)
    ask(client, b"slow", 0)
    ask(other, b"quick", 0)
    quick.send(answer(quick.take(10), 10))
    assert [said(it) for it in other.take(12)][-1] == END
    asked = slow.take(count)
    slow.send(answer(asked, count))
    assert said(client.take(count + 2)[-1]) == END
    for stream in (slow, quick, client, other):
        stream.close()
