"""Midair with nats-py, the client most Python programs use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import MaxPayloadError, NoRespondersError

from tests.support.server import PATIENCE_S, Server, proxied, run


@asynccontextmanager
async def client(server: Server, **options: Any) -> AsyncIterator[Client]:
    options.setdefault("allow_reconnect", False)
    connection = await nats.connect(server.url, **options)
    try:
        yield connection
    finally:
        await connection.close()


async def flush(connection: Client) -> None:
    """Everything sent so far has been processed by the server.

    nats-py writes the PING of flush() to the socket ahead of commands that still wait for its
    flusher task. By the time the first PONG is here they are out, so the second PING is behind
    them.
    """
    await connection.flush(PATIENCE_S)
    await connection.flush(PATIENCE_S)


async def take(subscription: Subscription, count: int) -> list[Msg]:
    return [await subscription.next_msg(timeout=PATIENCE_S) for _ in range(count)]


async def nothing_more(connection: Client, subscription: Subscription) -> None:
    """A message published now arrives next: nothing was waiting before it."""
    inbox = connection.new_inbox()
    end = await connection.subscribe(inbox)
    await connection.publish(inbox, b"end")
    assert (await end.next_msg(timeout=PATIENCE_S)).data == b"end"
    assert subscription.pending_msgs == 0
    await end.unsubscribe()


def test_publish_and_subscribe(server: Server) -> None:
    async def test() -> None:
        async with client(server) as publisher, client(server) as subscriber:
            greetings = await subscriber.subscribe("py.greet")
            again = await subscriber.subscribe("py.greet")
            await flush(subscriber)
            for i in range(100):
                await publisher.publish("py.greet", b"hello %d" % i)
            for subscription in (greetings, again):
                messages = await take(subscription, 100)
                assert [m.data for m in messages] == [b"hello %d" % i for i in range(100)]
                assert {m.subject for m in messages} == {"py.greet"}
                assert {m.reply for m in messages} == {""}
                await nothing_more(subscriber, subscription)

    run(test())


def test_bodies_arrive_as_they_were(server: Server) -> None:
    async def test() -> None:
        async with client(server) as nc:
            subscription = await nc.subscribe("py.bodies")
            bodies = [b"", b"\r\n", b"\x00", bytes(range(256)), "grüße".encode(), b"PING\r\n" * 9]
            bodies += [b"x" * size for size in (1, 127, 128, 4095, 4096, 4097, 65535, 65536)]
            for body in bodies:
                await nc.publish("py.bodies", body)
            assert [m.data for m in await take(subscription, len(bodies))] == bodies

    run(test())


def test_wildcards(server: Server) -> None:
    subjects = ["w", "w.a", "w.b", "w.a.x", "w.a.y", "w.b.x", "w.a.x.1", "v.a.x"]
    patterns = {
        "w.*": ["w.a", "w.b"],
        "w.>": ["w.a", "w.b", "w.a.x", "w.a.y", "w.b.x", "w.a.x.1"],
        "w.*.x": ["w.a.x", "w.b.x"],
        "*.a.*": ["w.a.x", "w.a.y", "v.a.x"],
        "w.a.x": ["w.a.x"],
        "w.*.>": ["w.a.x", "w.a.y", "w.b.x", "w.a.x.1"],
        "*": ["w"],
    }

    async def test() -> None:
        async with client(server) as publisher, client(server) as subscriber:
            subscriptions = {p: await subscriber.subscribe(p) for p in patterns}
            await flush(subscriber)
            for subject in subjects:
                await publisher.publish(subject, subject.encode())
            for pattern, expected in patterns.items():
                messages = await take(subscriptions[pattern], len(expected))
                assert [m.subject for m in messages] == expected, pattern
            await flush(publisher)
            for subscription in subscriptions.values():
                assert subscription.pending_msgs == 0

    run(test())


def test_queue_group_gives_each_message_to_one_member_evenly(server: Server) -> None:
    members, total = 3, 3000

    async def test() -> None:
        got: list[list[int]] = [[] for _ in range(members)]
        everyone: list[int] = []
        done = asyncio.Event()

        def note(into: list[int]) -> Any:
            async def on_message(message: Msg) -> None:
                into.append(int(message.data))
                if sum(map(len, got)) == total and len(everyone) == total:
                    done.set()

            return on_message

        async with client(server) as nc, client(server) as a, client(server) as b:
            for connection, into in ((a, got[0]), (b, got[1]), (b, got[2])):
                await connection.subscribe("py.work.*", queue="workers", cb=note(into))
            await b.subscribe("py.work.*", cb=note(everyone))
            await flush(a)
            await flush(b)
            for i in range(total):
                await nc.publish(f"py.work.{i % 7}", b"%d" % i)
            await done.wait()
            await flush(a)
            await flush(b)
        assert sorted(i for member in got for i in member) == list(range(total))
        assert everyone == list(range(total))
        for member in got:
            assert member == sorted(member)
            assert 0.8 * total / members < len(member) < 1.2 * total / members

    run(test())


def test_two_queue_groups_each_get_everything(server: Server) -> None:
    async def test() -> None:
        async with client(server) as nc:
            red = await nc.subscribe("py.groups", queue="red")
            blue = await nc.subscribe("py.groups", queue="blue")
            for i in range(50):
                await nc.publish("py.groups", b"%d" % i)
            for subscription in (red, blue):
                data = [m.data for m in await take(subscription, 50)]
                assert data == [b"%d" % i for i in range(50)]

    run(test())


def test_request_and_reply(server: Server) -> None:
    async def test() -> None:
        async def double(message: Msg) -> None:
            await message.respond(message.data * 2)

        async with client(server) as responder, client(server) as requester:
            await responder.subscribe("py.double", cb=double)
            await flush(responder)
            for i in range(50):
                reply = await requester.request("py.double", b"%d" % i, timeout=PATIENCE_S)
                assert reply.data == b"%d%d" % (i, i)
            replies = await asyncio.gather(
                *(requester.request("py.double", b"%d," % i, timeout=PATIENCE_S) for i in range(50))
            )
            assert [r.data for r in replies] == [b"%d,%d," % (i, i) for i in range(50)]

    run(test())


def test_request_without_responders_fails_at_once(server: Server) -> None:
    async def test() -> None:
        async with client(server) as nc:
            with pytest.raises(NoRespondersError):
                await nc.request("py.nobody", b"?", timeout=PATIENCE_S)
            subscription = await nc.subscribe("py.somebody")
            await subscription.unsubscribe()
            with pytest.raises(NoRespondersError):
                await nc.request("py.somebody", b"?", timeout=PATIENCE_S)

    run(test())


def test_headers(server: Server) -> None:
    async def test() -> None:
        async def echo(message: Msg) -> None:
            await nc.publish(message.reply, message.data, headers=message.headers)

        async with client(server) as nc, client(server) as other:
            subscription = await other.subscribe("py.headers")
            await nc.subscribe("py.headers.echo", cb=echo)
            await flush(other)
            await flush(nc)
            for headers in ({"A": "1"}, {"Trace-Id": "x" * 2000, "Name": "a: b"}):
                await nc.publish("py.headers", b"body", headers=headers)
                message = (await take(subscription, 1))[0]
                assert message.headers == headers
                assert message.data == b"body"
            await nc.publish("py.headers", b"", headers={"Only": "headers"})
            message = (await take(subscription, 1))[0]
            assert (message.headers, message.data) == ({"Only": "headers"}, b"")
            reply = await other.request("py.headers.echo", b"x", PATIENCE_S, headers={"K": "v"})
            assert (reply.headers, reply.data) == ({"K": "v"}, b"x")

    run(test())


def test_drain_delivers_what_was_sent_before(server: Server) -> None:
    async def test() -> None:
        got: list[bytes] = []

        async def on_message(message: Msg) -> None:
            got.append(message.data)

        async with client(server) as publisher:
            subscriber = await nats.connect(server.url, allow_reconnect=False)
            await subscriber.subscribe("py.drain", cb=on_message)
            await flush(subscriber)
            for i in range(500):
                await publisher.publish("py.drain", b"%d" % i)
            await flush(publisher)
            await subscriber.drain()
            assert subscriber.is_closed
            assert got == [b"%d" % i for i in range(500)]
            with pytest.raises(NoRespondersError):
                await publisher.request("py.drain", b"", timeout=PATIENCE_S)

    run(test())


def test_largest_payload(server: Server) -> None:
    async def test() -> None:
        async with client(server) as nc, client(server) as other:
            size = nc.max_payload
            assert size == 1048576
            subscription = await other.subscribe("py.large")
            await flush(other)
            body = bytes(i * 7 % 251 for i in range(4096)) * (size // 4096)
            for _ in range(3):
                await nc.publish("py.large", body)
            for message in await take(subscription, 3):
                assert message.data == body
            with pytest.raises(MaxPayloadError):
                await nc.publish("py.large", body + b"x")

    run(test())


def test_no_echo(server: Server) -> None:
    async def test() -> None:
        async with client(server, no_echo=True) as quiet, client(server) as other:
            own = await quiet.subscribe("py.echo")
            others = await other.subscribe("py.echo")
            await flush(other)
            await quiet.publish("py.echo", b"from quiet")
            await flush(quiet)
            await other.publish("py.echo", b"from other")
            assert [m.data for m in await take(others, 2)] == [b"from quiet", b"from other"]
            assert [m.data for m in await take(own, 1)] == [b"from other"]

    run(test())


def test_unsubscribe_after_a_number_of_messages(server: Server) -> None:
    async def test() -> None:
        async with client(server) as publisher, client(server) as subscriber:
            limited = await subscriber.subscribe("py.limited")
            await limited.unsubscribe(limit=5)
            everything = await subscriber.subscribe("py.limited")
            await flush(subscriber)
            for i in range(20):
                await publisher.publish("py.limited", b"%d" % i)
            assert len(await take(everything, 20)) == 20
            assert [m.data for m in await take(limited, 5)] == [b"%d" % i for i in range(5)]
            assert limited.pending_msgs == 0

    run(test())


def test_unsubscribed_is_unsubscribed(server: Server) -> None:
    async def test() -> None:
        async with client(server) as publisher, client(server) as subscriber:
            first = await subscriber.subscribe("py.gone")
            second = await subscriber.subscribe("py.gone")
            await first.unsubscribe()
            await flush(subscriber)
            await publisher.publish("py.gone", b"x")
            await take(second, 1)
            assert first.pending_msgs == 0

    run(test())


def test_many_subscriptions_of_one_client(server: Server) -> None:
    count = 2000

    async def test() -> None:
        async with client(server) as publisher, client(server) as subscriber:
            got: list[tuple[int, str]] = []
            done = asyncio.Event()

            def on_message(i: int) -> Any:
                async def note(message: Msg) -> None:
                    got.append((i, message.subject))
                    if len(got) == count:
                        done.set()

                return note

            subscriptions = [
                await subscriber.subscribe(f"py.many.{i}", cb=on_message(i)) for i in range(count)
            ]
            await flush(subscriber)
            for i in range(count):
                await publisher.publish(f"py.many.{i}", b"")
            await done.wait()
            assert sorted(got) == [(i, f"py.many.{i}") for i in range(count)]
            for subscription in subscriptions[1:]:
                await subscription.unsubscribe()
            await flush(subscriber)
            await publisher.publish("py.many.0", b"")
            with pytest.raises(NoRespondersError):
                await publisher.request("py.many.1", b"", timeout=PATIENCE_S)

    run(test())


def test_flush_makes_a_subscription_visible_to_others(server: Server) -> None:
    async def test() -> None:
        async with client(server) as publisher, client(server) as subscriber:
            for i in range(200):
                subscription = await subscriber.subscribe(f"py.flush.{i}")
                await flush(subscriber)
                await publisher.publish(f"py.flush.{i}", b"x")
                await take(subscription, 1)

    run(test())


def test_many_clients_come_and_go(server: Server) -> None:
    async def test() -> None:
        async with client(server) as publisher:
            for turn in range(5):
                clients = [await nats.connect(server.url) for _ in range(20)]
                subscriptions = [await c.subscribe("py.coming") for c in clients]
                for c in clients:
                    await flush(c)
                await publisher.publish("py.coming", b"%d" % turn)
                for subscription in subscriptions:
                    assert [m.data for m in await take(subscription, 1)] == [b"%d" % turn]
                for c in clients:
                    await c.close()

    run(test())


def test_keepalive_is_answered(server: Server) -> None:
    async def test() -> None:
        async with proxied(server) as proxy:
            nc = await nats.connect(
                f"nats://127.0.0.1:{proxy.port}", ping_interval=0.02, allow_reconnect=False
            )
            await proxy.wait_for_pongs(10)
            assert nc.is_connected
            await nc.close()

    run(test())


def test_a_client_that_was_cut_off_comes_back(server: Server) -> None:
    async def test() -> None:
        back = asyncio.Event()

        async def on_reconnect() -> None:
            back.set()

        async def on_error(_: Exception) -> None:
            """The cut is meant; nats-py would print it."""

        async with proxied(server) as proxy, client(server) as publisher:
            nc = await nats.connect(
                f"nats://127.0.0.1:{proxy.port}",
                reconnect_time_wait=0.01,
                reconnected_cb=on_reconnect,
                error_cb=on_error,
            )
            plain = await nc.subscribe("py.back.*")
            grouped = await nc.subscribe("py.back.*", queue="q")
            await flush(nc)
            for turn in range(3):
                back.clear()
                proxy.cut()
                await back.wait()
                await flush(nc)
                await publisher.publish(f"py.back.{turn}", b"%d" % turn)
                for subscription in (plain, grouped):
                    assert [m.data for m in await take(subscription, 1)] == [b"%d" % turn]
                    assert subscription.pending_msgs == 0
            await nc.close()

    run(test())
