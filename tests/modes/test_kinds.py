"""Who a client says it is, and what is sent to all of a kind or organisation (003-21, 003-30)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from midair.client import wire_nats
from midair.client.api import Client, NoRespondersError, Presence, address, connect, everyone
from tests.modes.clients import clients
from tests.support.handlers import Held, named
from tests.support.instance import Instance, cli, eventually
from tests.support.server import run
from tests.support.stream import Stream

# type, instance, organisation
CAST = [
    ("pump", "a", "north"),
    ("pump", "b", "north"),
    ("pump", "c", "south"),
    ("valve", "a", "north"),
    ("valve", "b", ""),
    ("pumpkin", "a", "northern"),
]
KINDS = [
    (("pump", ""), {"pump.a", "pump.b", "pump.c"}),
    (("", "north"), {"pump.a", "pump.b", "valve.a"}),
    (("pump", "north"), {"pump.a", "pump.b"}),
    (("pump", "south"), {"pump.c"}),
    (("valve", ""), {"valve.a", "valve.b"}),
    (("pumpkin", "northern"), {"pumpkin.a"}),
]


@asynccontextmanager
async def cast(server: Instance) -> AsyncIterator[dict[str, Client]]:
    async with AsyncExitStack() as stack:
        made = {}
        for type, instance, organisation in CAST:
            it = await connect(
                server.address, type=type, instance=instance, organisation=organisation
            )
            made[it.name] = await stack.enter_async_context(it)
        yield made


# ---- saying it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ipc:", "ipc:one", "ipc:a.b.c", "ipc:a.", "ipc:.b", "ipc:a b.c", "ipc:*.>", "ipc:a.b@",
        "ipc:a.b@c@d", "ipc:a.b@c.d", "ipc:@org", "ipc:a@org", "ipc:a.b\n", "ipc:\u00e9.b",
        "IPC:a.b", " ipc:a.b", "a.b", "", "ipc:" + "t" * 40 + "." + "i" * 23, "ipc:t.i@" + "o" * 60,
    ],
)  # fmt: skip
def test_other_names_are_just_names(server: Instance, name: str) -> None:
    """Two clients may have the same; neither is addressed by it, and nobody is told."""
    host, port = server.host, server.port
    hello = wire_nats.connect(name=name)
    with Stream(host, port) as watcher:
        watcher.sub(b"_midair.clients.>", b"1")
        watcher.sub(b"in", b"2")
        assert watcher.sync() == []
        with (
            wire_nats.Connection(host, port, hello) as one,
            wire_nats.Connection(host, port, hello) as two,
        ):
            assert one.sync() == two.sync() == []
            watcher.send(wire_nats.pub(b"_midair.clients", b"", b"in"))
            (message,) = watcher.take(1)
            assert b"204 End" in message.headers
            for stream in (one, two):
                stream.send(wire_nats.sub(b"_midair.ipc.>", b"1"))
                stream.send(wire_nats.sub(b"_midair.kind.>", b"2"))
                assert stream.sync() == []
            for subject in (b"_midair.ipc.a.b", b"_midair.kind.a", b"_midair.org.org"):
                watcher.send(wire_nats.pub(subject, b"x", b"in"))
                (message,) = watcher.take(1)
                assert b"503" in message.headers
            assert one.sync() == two.sync() == []
        assert watcher.sync() == []


def test_the_longest_name_is_told_whole(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,):
            type, instance, organisation = "t" * 20, "i" * 20, "o" * 21
            watched = await client.watch()
            it = await connect(
                server.address, type=type, instance=instance, organisation=organisation
            )
            wanted = Presence(type, instance, it.nats.client_id, "", organisation)
            assert await client.clients() == [wanted]
            assert await client.clients(type, instance) == [wanted]
            number = it.nats.client_id
            await it.close()
            for event in ("up", "down"):
                told = Presence(type, instance, number, event, organisation)
                assert await anext(watched) == told

    run(test())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"type": "a"}, "type and instance"),
        ({"organisation": "a"}, "goes with"),
        ({"type": "a.b", "instance": "c"}, "letters"),
        ({"type": "a", "instance": "b" * 62}, "64 bytes"),
    ],
)
def test_the_library_says_what_cannot_be(said: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(connect("127.0.0.1:1", **said))


def test_a_name_is_one_clients_whatever_its_organisation(server: Instance) -> None:
    host, port = server.host, server.port
    first = wire_nats.connect(name="ipc:only.one@north")
    with wire_nats.Connection(host, port, first) as holder:
        assert holder.sync() == []
        second = wire_nats.Connection(host, port, wire_nats.connect(name="ipc:only.one@south"))
        second.send(wire_nats.PING)
        assert holder.frame() == b"PING"
        holder.send(wire_nats.PONG)
        assert second.frame() == b"-ERR 'Client Name Taken'"
        second.close()


def test_it_is_shown_and_survives_the_router(
    make_midair: Callable[..., Instance], connmgrs: int
) -> None:
    server = make_midair(connmgrs=connmgrs)

    async def test() -> None:
        async with cast(server):
            shown = await asyncio.to_thread(cli, "clients", "--server", server.address)
            before = shown.stdout.splitlines()
            names = [line.split()[0] for line in before]
            assert names == [
                "pump.a@north", "pump.b@north", "pump.c@south",
                "pumpkin.a@northern", "valve.a@north", "valve.b",
            ]  # fmt: skip
            old = server.pid("router")
            os.kill(old, signal.SIGKILL)
            eventually(lambda: server.pid("router") != old, "there is another one")
            shown = await asyncio.to_thread(cli, "clients", "--server", server.address)
            assert shown.stdout.splitlines() == before
            checked = await asyncio.to_thread(cli, "fsck", "--name", server.name)
            assert checked.returncode == 0, checked.stdout

    run(test(), patience_s=60)


# ---- to all of them ------------------------------------------------------------------------------


def test_addresses() -> None:
    assert everyone("pump") == "_midair.kind.pump"
    assert everyone("", "north") == "_midair.org.north"
    assert everyone("pump", "north") == "_midair.kind.pump.org.north"
    with pytest.raises(ValueError, match="or both"):
        everyone()


@pytest.mark.parametrize(("kind", "wanted"), KINDS, ids=["-".join(it) for it, _ in KINDS])
def test_all_of_a_kind_are_asked_and_nobody_else(
    server: Instance, kind: tuple[str, str], wanted: set[str]
) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, spy), cast(server) as players:
            overheard = await spy.nats.subscribe("_midair.>")
            await spy.flush()
            for name, player in players.items():
                await player.join(named(name))
                await player.flush()
            for _ in range(3):
                replies = await client.fanout(everyone(*kind), b"x")
                assert replies.expected == len(wanted)
                got = [it async for it in replies]
                assert sorted(map(str, got)) == sorted(str(it.encode()) for it in wanted)
                assert (await client.ask(everyone(*kind), b"x")).decode() in wanted
            async with client.session(everyone(*kind)) as session:
                first = await session.request(b"x")
                assert first.decode() in wanted
                assert await session.request(b"x") == first
            reply = await client.nats.request(everyone(*kind), b"x")
            assert reply.data.decode() in wanted
            await spy.flush()
            assert overheard.pending_msgs == 0

    run(test())


def test_a_broadcast_to_a_kind_comes_once_to_each(server: Instance) -> None:
    """Whatever subscriptions a client has: one that shares a queue group, several that match."""

    async def test() -> None:
        async with clients(server, 1) as (client,), cast(server) as players:
            got: dict[str, list[tuple[str, bytes]]] = {name: [] for name in players}

            def keep(name: str, where: str) -> Callable[..., object]:
                async def on_message(message: object) -> None:
                    got[name].append((where, message.data))  # type: ignore[attr-defined]

                return on_message

            for name, player in players.items():
                subjects = [">", "_midair.kind.>", "_midair.kind.pump"]
                for subject in subjects if name != "pump.b" else []:
                    await player.nats.subscribe(subject, cb=keep(name, subject))
                if name in ("pump.b", "pump.c"):
                    queue = keep(name, "group")
                    await player.nats.subscribe("_midair.kind.pump", "group", cb=queue)
                await player.flush()
            for number in range(20):
                await client.publish(everyone("pump"), b"%d" % number)
            await client.flush()
            wanted = [b"%d" % number for number in range(20)]
            for name, player in players.items():
                await player.flush()
                if not name.startswith("pump."):
                    assert got[name] == []
                    continue
                where = "group" if name == "pump.b" else "_midair.kind.pump"
                assert got[name] == [(where, body) for body in wanted]

    run(test())


def test_a_client_that_wants_no_echo_is_not_among_them(server: Instance) -> None:
    host, port = server.host, server.port
    with (
        wire_nats.Connection(host, port, wire_nats.connect(name="ipc:e.a", echo=False)) as one,
        wire_nats.Connection(host, port, wire_nats.connect(name="ipc:e.b", echo=False)) as two,
    ):
        for stream in (one, two):
            stream.send(wire_nats.sub(b"_midair.kind.e", b"1"))
            assert stream.sync() == []
        one.send(wire_nats.pub(b"_midair.kind.e", b"x"))
        assert one.sync() == []
        assert [it.body for it in two.sync()] == [b"x"]


@pytest.mark.parametrize(
    "subject",
    ["_midair.kind.none", "_midair.org.none", "_midair.kind.pump.org.none", "_midair.kind.a.b",
     "_midair.kind.pump.org", "_midair.kind.pump.org.north.x", "_midair.org.north.x"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["ask", "fanout", "plain"])
def test_nobody_of_that_kind_is_there(server: Instance, subject: str, mode: str) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,), cast(server) as players:
            for player in players.values():
                await player.nats.subscribe("_midair.>")
                await player.flush()
            if mode == "ask":
                with pytest.raises(NoRespondersError):
                    await client.ask(subject, b"x")
            elif mode == "fanout":
                with pytest.raises(NoRespondersError):
                    await client.fanout(subject, b"x")
            else:
                inbox = client.nats.new_inbox()
                subscription = await client.nats.subscribe(inbox)
                await client.nats.publish(subject, b"x", reply=inbox)
                message = await subscription.next_msg()
                assert (message.headers or {})["Status"] == "503"

    run(test())


def test_the_least_busy_of_a_kind_is_asked(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,), cast(server) as players:
            pumps = {name: Held(name) for name in players if name.startswith("pump.")}
            for name, handler in pumps.items():
                await players[name].join(handler)
                await players[name].flush()
            answers = [asyncio.create_task(client.ask(everyone("pump"), b"x")) for _ in pumps]
            for handler in pumps.values():  # each is asked once: the others are busy
                await handler.answer()
            assert {(await it).decode() for it in answers} == set(pumps)

    run(test())


def test_the_own_name_is_as_before(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 1) as (client,), cast(server) as players:
            await players["pump.a"].listen(named("a"))
            await players["pump.a"].flush()
            assert await client.ask(address("pump", "a"), b"x") == b"a"
            found = {(it.type, it.instance, it.organisation) for it in await client.clients()}
            assert found == set(CAST)
            listed = await client.nats.subscribe("list")
            await client.nats.publish("_midair.clients.valve.b", b"", reply="list")
            (one,) = json.loads((await listed.next_msg()).data)
            assert set(one) == {"type", "instance", "client"}, "no organisation was said"

    run(test())
