"""The limits of docs/modes.md (003-79), and what the library makes of an end without a reply."""

from __future__ import annotations

import asyncio
import time

import pytest

from midair.client import wire_nats
from midair.client.api import (
    ExpiredError,
    GoneError,
    ReplyLostError,
    Request,
)
from tests.crash.modes import END, GONE, hpub, said
from tests.modes.clients import clients
from tests.modes.test_crowds import left
from tests.support.handlers import Held
from tests.support.instance import Instance, eventually
from tests.support.segments import Segments
from tests.support.server import run
from tests.support.stream import Stream

REQUESTS, REQUESTS_EACH = 65536, 16384
ANSWERS, ANSWERS_EACH = 262144, 131072
WATCHERS, HEADER_BYTES = 16384, 4096
TOO_MANY = b"429 Too Many Requests"


def opened(server: Instance, *subjects: bytes) -> Stream:
    stream = Stream(server.host, server.port, timeout_s=120)
    for at, subject in enumerate(subjects):
        stream.sub(subject, b"%d" % at)
    assert stream.sync() == []
    return stream


def test_all_clients_together_cannot_have_more_open(server: Instance, connmgrs: int) -> None:
    worker = opened(server, b"all")
    askers = [opened(server, b"in") for _ in range(REQUESTS // REQUESTS_EACH)]
    one = hpub(b"all", b"in", b"x", mode="semaphore")
    for asker in askers:
        asker.send(one * REQUESTS_EACH)
        assert asker.sync() == []
        asked = worker.take(REQUESTS_EACH)
    late = opened(server, b"in")
    for mode in ("semaphore", "session-open", "fanout"):
        late.send(hpub(b"all", b"in", b"y", mode=mode))
        assert [said(it) for it in late.take(1)] == [TOO_MANY]
    worker.send(wire_nats.pub(asked[0].reply, b"done"))
    assert [said(it) for it in askers[-1].take(2)] == [b"done", END]
    late.send(hpub(b"all", b"in", b"z", mode="semaphore"))
    (found,) = worker.take(1)
    worker.send(wire_nats.pub(found.reply, b"served"))
    assert [said(it) for it in late.take(2)] == [b"served", END]
    worker.close()
    for asker in askers:
        told = asker.take(REQUESTS_EACH - (asker is askers[-1]))
        assert {said(it) for it in told} == {GONE}
        asker.close()
    late.close()
    eventually(lambda: left(server, connmgrs) == (0, 0), "nothing is left")


def test_answers_outstanding_are_bounded_for_one_and_for_all(
    server: Instance, connmgrs: int
) -> None:
    """A request is refused whole: nobody was asked."""
    each = 4096
    listeners = Stream(server.host, server.port, timeout_s=120)
    listeners.send(b"".join(b"SUB crowd %d\r\n" % sid for sid in range(each)))
    assert listeners.sync() == []
    for number in range(ANSWERS // ANSWERS_EACH):
        asker = opened(server, b"in")
        for _ in range(ANSWERS_EACH // each):
            asker.send(hpub(b"crowd", b"in", b"x", mode="fanout"))
            assert [said(it) for it in asker.take(1)] == [b"202 Accepted"]
            assert len(listeners.take(each)) == each
        asker.send(hpub(b"crowd", b"in", b"x", mode="fanout"))
        assert [said(it) for it in asker.take(1)] == [TOO_MANY], f"client {number}"
        asker.send(hpub(b"crowd", b"in", b"x", mode="semaphore"))
        assert [said(it) for it in asker.take(1)] == [TOO_MANY]
        if number == 0:
            first = asker
    last = opened(server, b"in")
    last.send(hpub(b"crowd", b"in", b"x", mode="semaphore"))
    assert [said(it) for it in last.take(1)] == [TOO_MANY], "for all"
    assert listeners.sync() == []
    first.close()
    eventually(lambda: left(server, connmgrs)[1] == ANSWERS_EACH, "those of one are gone")
    last.send(hpub(b"crowd", b"in", b"x", mode="semaphore"))
    assert len(listeners.take(1)) == 1
    for stream in (asker, last, listeners):
        stream.close()
    eventually(lambda: left(server, connmgrs) == (0, 0), "nothing is left")


def test_as_many_watchers_are_told_as_the_limit_says(server: Instance) -> None:
    watchers = Stream(server.host, server.port, timeout_s=120)
    more = WATCHERS + 100
    watchers.send(b"".join(b"SUB _midair.clients.> %d\r\n" % sid for sid in range(more)))
    assert watchers.sync() == []
    hello = wire_nats.connect(name="ipc:watched.one")
    with wire_nats.Connection(server.host, server.port, hello) as named:
        assert named.sync() == []
        assert len({it.sid for it in watchers.sync()}) == WATCHERS
    told = watchers.take(WATCHERS)
    assert all(b'"event":"down"' in it.body for it in told)
    assert watchers.sync() == []
    watchers.close()


@pytest.mark.parametrize(("filler", "mode"), [(0, True), (-30, True), (0 + 1, False)])
def test_headers_are_looked_at_up_to_a_limit(server: Instance, filler: int, mode: bool) -> None:
    """A header that does not end before it is none of ours: it is a plain request."""
    line = b"Midair-Mode: semaphore\r\n"
    before = b"NATS/1.0\r\nX: "
    fill = b"x" * (HEADER_BYTES - len(before) - 2 - len(line) + filler)
    headers = before + fill + b"\r\n" + line + b"\r\n"
    worker, client = opened(server, b"far"), opened(server, b"in")
    client.send(wire_nats.hpub(b"far", headers, b"x", b"in"))
    (asked,) = worker.take(1)
    assert asked.reply.startswith(b"_midair.r.") == mode
    worker.close()
    client.close()


def test_a_request_without_a_deadline_has_ten_minutes(server: Instance, connmgrs: int) -> None:
    worker, client = opened(server, b"patient"), opened(server, b"in")
    before = time.monotonic_ns()
    client.send(hpub(b"patient", b"in", b"x", mode="semaphore"))
    assert len(worker.take(1)) == 1
    after = time.monotonic_ns()
    with Segments(server.name, connmgrs) as it:
        found = [it.requests()[at].deadline_ns for at in range(it.routing.requests_high)
                 if it.requests()[at].word >> 63]  # fmt: skip
    (deadline_ns,) = found
    a_minute = 60 * 10**9  # the router looks at its clock once in a while
    assert before - a_minute <= deadline_ns - 10 * a_minute <= after
    worker.close()
    client.close()


# ---- the library ---------------------------------------------------------------------------------


def test_an_end_without_a_reply_is_said(server: Instance) -> None:
    """As when the reply was left out because this client reads too slowly."""

    async def test() -> None:
        async with clients(server, 3) as (client, worker, other):
            handler = Held()
            await worker.serve("left-out", handler)
            await worker.flush()
            answer = asyncio.create_task(client.ask("left-out", b"x"))
            await handler.requests.get()
            (inbox,) = client._waiting
            await other.nats.publish(inbox, b"", headers={"Status": "204"})
            with pytest.raises(ReplyLostError):
                await answer

    run(test())


def test_a_session_does_not_wait_for_ever(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            handler = Held()
            await worker.serve("silent", handler)
            await worker.flush()
            async with client.session("silent") as session:
                with pytest.raises(ExpiredError, match=r"0\.05 s"):
                    await session.request(b"x", timeout_s=0.05)
                first = await handler.requests.get()
                last: Request = await handler.requests.get()
                assert last.last, "the responder is told that it is over"
                assert last.session == first.session
                with pytest.raises(GoneError, match="over"):
                    await session.request(b"y")
            async with client.session("silent") as session:
                await session.send(b"x")
                with pytest.raises(ExpiredError):
                    await session.receive(timeout_s=0.05)
                await (await handler.requests.get()).reply(b"late")
                assert await session.receive() == b"late"

    run(test())
