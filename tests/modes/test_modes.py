"""The messaging modes of docs/modes.md, between clients of nats-py and of `midair.client`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

from midair.client.api import (
    Client,
    ExpiredError,
    Gone,
    GoneError,
    NameTakenError,
    NoRespondersError,
    Request,
    SessionEndedError,
    address,
    connect,
)
from midair.process.runtime import Runtime
from native.conntable import ACTIVE, ConnTable
from tests.modes.clients import clients
from tests.support.handlers import Held, named
from tests.support.instance import Instance, eventually
from tests.support.server import run

REQUESTS_EACH = 16384


# ---- semaphore -----------------------------------------------------------------------------------


def test_the_longest_idle_of_the_least_busy_is_asked(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 4) as (client, *workers):
            handlers = [Held(str(at)) for at in range(3)]
            for worker, handler in zip(workers, handlers, strict=True):
                await worker.serve("work", handler, queue="group")
                await worker.flush()

            async def asked() -> tuple[int, asyncio.Task[bytes]]:
                """Asks once more: who gets it, and what will come of it."""
                answer = asyncio.create_task(client.ask("work", b"x"))
                while True:
                    for at, handler in enumerate(handlers):
                        if not handler.requests.empty():
                            return at, answer
                    await asyncio.sleep(0)

            order = []
            for _ in range(6):  # nobody is busy: in turn
                at, answer = await asked()
                order.append(at)
                await handlers[at].answer()
                assert await answer == str(at).encode()
            assert sorted(order[:3]) == [0, 1, 2]
            assert order[3:] == order[:3]
            busy, first = await asked()
            waiting = await handlers[busy].requests.get()
            for _ in range(6):  # one is busy: the two others in turn
                at, answer = await asked()
                assert at != busy
                await handlers[at].answer()
                assert await answer == str(at).encode()
            await waiting.reply(b"at last")
            assert await first == b"at last"

    run(test())


def test_replies_come_in_order_and_then_their_end(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):

            async def count(request: Request) -> bytes:
                for number in range(500):
                    await request.more(b"%d" % number)
                return b"500"

            await worker.serve("count", count, queue="group")
            await worker.flush()
            got = [int(reply) async for reply in client.replies("count", b"")]
            assert got == list(range(501))

    run(test())


def test_large_bodies_both_ways(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):

            async def echo(request: Request) -> bytes:
                return request.body

            await worker.serve("large", echo, queue="group")
            await worker.flush()
            for size in (0, 4096, 4097, 100_000, 700_000):
                body = os.urandom(size)
                assert await client.ask("large", body) == body

    run(test())


def test_a_requester_is_told_when_nobody_is_there_or_goes(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,):
            with pytest.raises(NoRespondersError):
                await client.ask("empty", b"x")
            worker = await connect(server.address, type="some", instance="worker")
            number = worker.nats.client_id
            handler = Held()
            await worker.serve("empty", handler, queue="group")
            await worker.flush()
            answer = asyncio.create_task(client.ask("empty", b"x"))
            await handler.requests.get()
            await worker.close()
            with pytest.raises(GoneError) as gone:
                await answer
            assert (gone.value.client, gone.value.name) == (number, "some.worker")

    run(test())


def test_requests_of_any_library_work_and_ignore_the_end(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            await worker.serve("plain", named("worker"), queue="group")
            await worker.flush()
            headers = {"Midair-Mode": "semaphore"}
            for _ in range(3):
                reply = await client.nats.request("plain", b"x", headers=headers)
                assert reply.data == b"worker"
                reply = await client.nats.request("plain", b"x", headers=headers, old_style=True)
                assert reply.data == b"worker"

    run(test())


def test_who_listens_to_everything_gets_answers_where_it_asked(server: Instance) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            # nats-py makes its inbox with the first request: here, after these.
            client, worker = [await connect(server.address) for _ in range(2)]
            await stack.enter_async_context(client)
            await stack.enter_async_context(worker)
            for pattern in (">", "_INBOX.>", "*.>"):
                await client.nats.subscribe(pattern)
            await worker.serve("usual", named("worker"), queue="group")
            await worker.flush()
            assert await client.ask("usual", b"x") == b"worker"
            headers = {"Midair-Mode": "semaphore"}
            reply = await client.nats.request("usual", b"x", headers=headers)
            assert reply.data == b"worker"

    run(test())


@pytest.mark.parametrize(
    ("headers", "reply", "status"),
    [
        ({"Midair-Mode": "nonsense"}, 20, "400"),
        ({"Midair-Mode": "more"}, 20, "400"),
        ({"Midair-Deadline": "soon", "Midair-Mode": "semaphore"}, 20, "400"),
        ({"Midair-Deadline": "0"}, 20, "400"),
        ({"Midair-Deadline": "86400001"}, 20, "400"),
        ({"Midair-Mode": "session"}, 20, "410"),
        ({"Midair-Mode": "semaphore"}, 129, "413"),
        ({"Midair-Mode": "fanout"}, 129, "413"),
        ({"Midair-Mode": "session-open"}, 129, "413"),
        ({"Midair-Mode": "semaphore"}, 128, ""),
    ],
)
def test_what_cannot_be_is_refused(
    server: Instance, headers: dict[str, str], reply: int, status: str
) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            await worker.serve("refusing", named("worker"))
            await worker.flush()
            inbox = "i" * reply
            subscription = await client.nats.subscribe(inbox)
            await client.nats.publish("refusing", b"x", reply=inbox, headers=headers)
            message = await subscription.next_msg()
            assert (message.headers or {}).get("Status", "") == status

    run(test())


def test_a_group_member_that_has_had_its_maximum_is_left_out(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            few = await worker.serve("few", named("few"), queue="group")
            await few.unsubscribe(limit=2)
            await worker.flush()
            assert [await client.ask("few", b"x") for _ in range(2)] == [b"few"] * 2
            with pytest.raises(NoRespondersError):
                await client.ask("few", b"x")

    run(test())


# ---- session -------------------------------------------------------------------------------------


def test_a_session_stays_with_its_responder_in_order(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 4) as (client, *workers):
            for at, worker in enumerate(workers):
                seen: dict[str, int] = {}

                async def count(request: Request, at: int = at, seen: Any = seen) -> bytes:
                    seen[request.session] = seen.get(request.session, -1) + 1
                    assert request.body == b"%d" % seen[request.session]
                    return b"%d %s" % (at, request.body)

                await worker.serve("talk", count, queue="group")
                await worker.flush()
            sessions = [client.session("talk") for _ in range(6)]
            for number in range(100):
                for session in sessions:
                    await session.send(b"%d" % number)
            found = []
            for session in sessions:
                got = [await session.receive() for _ in range(100)]
                who = got[0].split()[0]
                assert got == [b"%s %d" % (who, number) for number in range(100)]
                found.append(who)
                await session.end()
            assert sorted(found) == [b"0", b"0", b"1", b"1", b"2", b"2"]  # by load

    run(test())


def test_either_side_ends_a_session_and_the_other_is_told(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            handler = Held()
            await worker.serve("ends", handler, queue="group")
            await worker.flush()
            async with client.session("ends") as session:
                await session.send(b"first")
                first = await handler.requests.get()
            last = await handler.requests.get()  # the requester ended it
            assert last.last
            assert last.session == first.session
            async with client.session("ends") as session:
                await session.send(b"first")
                await (await handler.requests.get()).end_session(b"bye")
                with pytest.raises(SessionEndedError) as ended:
                    await session.receive()
                assert ended.value.body == b"bye"
            another = await connect(server.address)
            await another.session("ends").send(b"first")
            first = await handler.requests.get()
            await another.close()
            gone = await handler.requests.get()
            assert gone.gone
            assert gone.last
            assert gone.session == first.session

    run(test())


@pytest.mark.parametrize("how", ["unsubscribes", "closes"])
def test_the_requester_is_told_at_once_when_the_responder_goes(server: Instance, how: str) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,):
            worker = await connect(server.address)
            handler = Held()
            subscription = await worker.serve("goes", handler, queue="group")
            await worker.flush()
            sessions = [client.session("goes") for _ in range(50)]
            for session in sessions:
                await session.send(b"x")
                await handler.requests.get()
            await (subscription.unsubscribe() if how == "unsubscribes" else worker.close())
            for session in sessions:
                with pytest.raises(GoneError):
                    await session.receive()
                await session.send(b"y")
                with pytest.raises(GoneError):
                    await session.receive()
            await worker.close()

    run(test())


def test_a_session_is_opened_once(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            await worker.serve("once", named("worker"), queue="group")
            await worker.flush()
            inbox = client.nats.new_inbox()
            subscription = await client.nats.subscribe(inbox)
            got = []
            for mode in ("session-open", "session-open", "session", "session-end", "session"):
                headers = {"Midair-Mode": mode}
                await client.nats.publish("once", b"x", reply=inbox, headers=headers)
                if mode != "session-end":
                    message = await subscription.next_msg()
                    got.append((message.headers or {}).get("Status") or message.data.decode())
            assert got == ["worker", "409", "worker", "410"]

    run(test())


# ---- fanout --------------------------------------------------------------------------------------


def test_fanout_asks_all_and_says_how_many(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 6) as (client, *others):
            for at, other in enumerate(others):
                queue = "group" if at > 2 else ""  # of the last two, one
                await other.serve("all", named("pair" if at > 2 else str(at)), queue=queue)
                await other.flush()
            for _ in range(5):
                replies = await client.fanout("all", b"x")
                assert replies.expected == 4
                got = {it async for it in replies}
                assert got == {b"0", b"1", b"2", b"pair"}
            with pytest.raises(NoRespondersError):
                await client.fanout("nobody", b"x")

    run(test())


def test_fanout_says_who_went_away(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, other):
            await other.serve("leave", named("stays"))
            await other.flush()
            leaver = await connect(server.address, type="a", instance="leaver")
            handler = Held()
            await leaver.serve("leave", handler)
            await leaver.serve("leave", handler)  # listens twice
            await leaver.flush()
            replies = await client.fanout("leave", b"x")
            assert replies.expected == 3
            for _ in range(2):
                await handler.requests.get()
            number = leaver.nats.client_id
            await leaver.close()
            got = [it async for it in replies]
            assert sorted(map(str, got)) == sorted(
                [str(b"stays")] + [str(Gone(number, "a.leaver"))] * 2
            )

    run(test())


# ---- ipc -----------------------------------------------------------------------------------------


def test_a_name_is_one_clients_and_what_is_sent_there_is_its_alone(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, spy):
            overheard = await spy.nats.subscribe("_midair.ipc.>")
            imposter = await spy.nats.subscribe(address("tool", "one"))
            await spy.flush()
            with pytest.raises(NoRespondersError):
                await client.ask(address("tool", "one"), b"x")
            async with await connect(server.address, type="tool", instance="one") as tool:
                with pytest.raises(NoRespondersError):  # it is there, but does not listen
                    await client.ask(address("tool", "one"), b"x")
                await tool.listen(named("tool"))
                await tool.flush()
                assert await client.ask(address("tool", "one"), b"x") == b"tool"
                reply = await client.nats.request(address("tool", "one"), b"x")
                assert reply.data == b"tool"
                async with client.session(address("tool", "one")) as session:
                    assert await session.request(b"x") == b"tool"
                replies = await client.fanout(address("tool", "one"), b"x")
                assert [it async for it in replies] == [b"tool"]
                with pytest.raises(NameTakenError):
                    await connect(server.address, type="tool", instance="one")
                assert await client.ask(address("tool", "one"), b"x") == b"tool"
            await spy.flush()
            assert overheard.pending_msgs == imposter.pending_msgs == 0

    run(test())


def test_presence_is_asked_and_watched(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,):
            watched = await client.watch("crowd.*")
            count = 120  # more than one message can list
            async with AsyncExitStack() as stack:
                made = {}
                for at in range(count):
                    it = await connect(server.address, type="crowd", instance=f"member-{at:030}")
                    await stack.enter_async_context(it)
                    made[it.name] = it.nats.client_id
                found = {f"{it.type}.{it.instance}": it.client for it in await client.clients()}
                assert found == made
                one = await client.clients("crowd", f"member-{7:030}")
                assert [it.client for it in one] == [made[f"crowd.member-{7:030}"]]
                assert await client.clients("crowd", "nobody") == []
            events = [await anext(watched) for _ in range(2 * count)]
            for event in ("up", "down"):
                got = {f"{it.type}.{it.instance}": it.client for it in events if it.event == event}
                assert got == made

            async def names() -> bool:
                return bool(await client.clients())

            assert not await names()

    run(test())


# ---- deadlines -----------------------------------------------------------------------------------


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def connmgr_of(server: Instance, client: Client) -> int:
    table = ConnTable.attach(Runtime.open(server.name))
    try:
        return next(it.connmgr for it in table.used() if it.uid == client.nats.client_id)
    finally:
        table.close()


def test_the_requester_is_told_and_late_replies_are_dropped(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            handler = Held()
            await worker.serve("late", handler)
            await worker.flush()
            with pytest.raises(ExpiredError):
                await client.ask("late", b"x", deadline_s=0.05)
            with pytest.raises(ExpiredError):
                assert not [it async for it in await client.fanout("late", b"x", deadline_s=0.05)]
            everything = await client.nats.subscribe(">")
            await client.flush()
            for _ in range(2):
                await handler.answer()
            await worker.flush()
            await client.flush()
            assert everything.pending_msgs == 0

    run(test())


@pytest.mark.parametrize("mode", ["semaphore", "fanout", "session-open", None])
def test_a_request_that_was_not_routed_in_time_is_not_delivered(
    server: Instance, mode: str | None
) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            handler = Held()
            await worker.serve("waits", handler)
            await worker.flush()
            headers = {"Midair-Deadline": "1"} | ({"Midair-Mode": mode} if mode else {})
            inbox = client.nats.new_inbox()
            subscription = await client.nats.subscribe(inbox)
            await client.flush()
            router = server.pid("router")
            with stopped([router]):
                await client.nats.publish("waits", b"x", reply=inbox, headers=headers)
                await asyncio.sleep(0.05)  # until it is sure to be past its deadline
            message = await subscription.next_msg()
            assert (message.headers or {})["Status"] == "408"
            await worker.flush()
            assert handler.requests.empty()

    run(test())


@pytest.mark.parametrize("connmgrs", [2], indirect=True)
def test_a_request_that_was_not_written_in_time_is_not_delivered(
    server: Instance, connmgrs: int
) -> None:
    """That of the responder is stopped meanwhile, so there has to be another one."""

    async def test() -> None:
        async with AsyncExitStack() as stack:
            by_connmgr: dict[int, Client] = {}
            while len(by_connmgr) < connmgrs:
                it = await stack.enter_async_context(await connect(server.address))
                by_connmgr[connmgr_of(server, it)] = it
            client, worker = by_connmgr[0], by_connmgr[1]
            handler = Held()
            await worker.serve("unwritten", handler)
            await worker.flush()
            with (
                stopped([server.pid("connmgr/1")]),
                pytest.raises(ExpiredError),
            ):
                await client.ask("unwritten", b"x", deadline_s=0.05)
            await worker.flush()
            assert handler.requests.empty()

    run(test())


# ---- limits --------------------------------------------------------------------------------------


def test_one_connection_cannot_have_more_than_its_share_open(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 3) as (client, worker, other):

            async def ignore(message: Any) -> None:
                if message.data == b"other":
                    await message.respond(b"served")

            await worker.nats.subscribe("hoard", "group", cb=ignore)
            await worker.flush()
            inbox = client.nats.new_inbox()
            subscription = await client.nats.subscribe(inbox)
            headers = {"Midair-Mode": "semaphore"}
            for _ in range(REQUESTS_EACH + 3):
                await client.nats.publish("hoard", b"x", reply=inbox, headers=headers)
            await client.flush()
            assert subscription.pending_msgs == 3
            for _ in range(3):
                message = await subscription.next_msg()
                assert (message.headers or {})["Status"] == "429"
            assert await other.ask("hoard", b"other") == b"served"
            await worker.close()  # the responder of all of them: each is told
            for _ in range(REQUESTS_EACH):
                message = await subscription.next_msg(10)
                assert (message.headers or {})["Status"] == "410"

    run(test(), patience_s=90)


def test_nothing_is_left_of_it(server: Instance, connmgrs: int) -> None:
    """All clients of this module are gone: no request, no leg, no name is left."""
    from tests.support.segments import Segments

    table = ConnTable.attach(Runtime.open(server.name))
    eventually(lambda: not [it for it in table.used() if it.state == ACTIVE], "all are gone")
    table.close()
    used = 1 << 63
    with Segments(server.name, connmgrs) as it:
        routing = it.routing
        assert min(routing.requests_high, routing.legs_high, routing.names_high) > 0

        def left() -> list[str]:
            tables = {
                "request": (it.requests(), routing.requests_high),
                "leg": (it.legs(), routing.legs_high),
                "name": (it.names(), routing.names_high),
            }
            return [
                f"{what} {at}"
                for what, (records, high) in tables.items()
                for at in range(high)
                if records[at].word & used
            ]

        eventually(lambda: not left(), f"nothing is left: {left()[:5]}")
