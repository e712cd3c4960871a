"""Roles of tests/crash/load.py that ask, or publish to, very many at once, and check all of it.

Whatever happens to the server: the number told first is the number that was asked, each of them is
asked once, each reply comes once; a message to several topics, or to a kind, comes once to each, in
order.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from midair.client import wire_nats
from tests.crash.client import Client
from tests.crash.modes import END, EXPIRED, GONE, arrival, expect, hpub, said, serving
from tests.support.promise import BrokenPromise

if TYPE_CHECKING:
    from tests.crash.load import Load

LISTENERS = 3000  # more than the router asks in one step
TOPICS = 17
EACH = 70  # listeners of each of them: more than it orders in one step, together


async def crowd(load: Load, connections: int = 3) -> None:
    """Fanout requests to thousands: answered, expired, or left by who asked or was asked."""
    topic, inbox, rounds = b"crowd.%d" % load.seed, b"in.%d" % load.seed, 0
    listeners = [await load.open() for _ in range(connections)]
    for number, listener in enumerate(listeners):
        mine = range(number, LISTENERS, connections)
        await listener.send(b"".join(b"SUB %b %d\r\n" % (topic, sid) for sid in mine))
        await listener.sync()
    async with serving(*(reply_to_all(it) for it in listeners)):
        client = await load.open()
        await client.send(b"SUB %b.* 1\r\n" % inbox)
        while not load.stopping.is_set():
            kind, rounds = load.random.choice("aaedl"), rounds + 1
            subject, where = b"%b.%d" % (inbox, rounds), topic
            if kind == "l":  # most of those who are asked leave without an answer
                await leavers(load, client, b"%b.%d" % (topic, rounds), subject)
            elif kind == "d":  # who asked leaves
                other = await load.open()
                await other.send(b"SUB %b 1\r\n" % subject)
                await other.send(hpub(where, subject, b"silent", mode="fanout"))
                expect("told", said(await arrival(other, "told")), b"202 Accepted")
                await other.close()
            else:
                body = b"%d" % rounds if kind == "a" else b"silent"
                deadline = {"deadline": "60"} if kind == "e" else {}
                await client.send(hpub(where, subject, body, mode="fanout", **deadline))
                await gather(client, subject, body, kind)
            load.count({"a": "answered", "e": "expired", "d": "deserted", "l": "left"}[kind])
        expect("crowd: after everything", await client.sync(), [])


async def reply_to_all(listener: Client) -> None:
    """Each subscription is asked once for a request."""
    seen: set[tuple[bytes, bytes]] = set()
    while True:
        message = await listener.next()
        if message.body == b"silent":
            continue
        if (message.sid, message.body) in seen:
            raise BrokenPromise(f"crowd: {message!r} was asked twice")
        seen.add((message.sid, message.body))
        await listener.send(wire_nats.pub(message.reply, message.sid + b":" + message.body))


async def gather(client: Client, subject: bytes, body: bytes, kind: str) -> None:
    """All that comes of one request."""
    first = await arrival(client, "crowd")
    if kind == "e" and said(first) == EXPIRED:  # before it was routed
        return
    expect("crowd", (first.subject, said(first)), (subject, b"202 Accepted"))
    if b"Midair-Expect: %d\r\n" % LISTENERS not in first.headers:
        raise BrokenPromise(f"crowd: {first!r}")
    if kind == "e":
        expect("a deadline", said(await arrival(client, "a deadline")), EXPIRED)
        return
    replies = []
    while (text := said(await arrival(client, f"crowd, had {len(replies)}"))) != END:
        replies.append(text)
    wanted = sorted(b"%d:%b" % (sid, body) for sid in range(LISTENERS))
    if sorted(replies) != wanted:
        raise BrokenPromise(f"crowd: {len(replies)} replies, {len(set(replies))} distinct")


async def leavers(load: Load, client: Client, topic: bytes, subject: bytes) -> None:
    count = 1500
    leaver = await load.open()
    await leaver.send(b"".join(b"SUB %b %d\r\n" % (topic, sid) for sid in range(count)))
    await leaver.sync()
    await client.send(hpub(topic, subject, b"x", mode="fanout"))
    expect("told", said(await arrival(client, "told")), b"202 Accepted")
    answered = load.random.randint(0, 5)
    for _ in range(answered):
        message = await arrival(leaver, "asked")
        leaver.put(wire_nats.pub(message.reply, b"here"))
    await leaver.send(b"")
    if load.random.random() < 0.5:  # some are not read, and perhaps not even ordered
        await leaver.sync()
    await leaver.close()
    got = []
    while not got or got[-1] != END:
        got.append(said(await arrival(client, f"leavers, had {len(got)}")))
    # What was sent just before an end may not have been read.
    here = got.count(b"here")
    expect("left", (here <= answered, here + got.count(GONE), len(got)), (True, count, count + 1))


# ---- one message to many -------------------------------------------------------------------------


async def topics(load: Load, readers: int = 3) -> None:
    """One message to all topics, among others to one; each reader listens in its own way.

    One of them is a crowd: to all of it the router orders in pieces.
    """
    names = [b"top.%d.%d" % (load.seed, at) for at in range(TOPICS)]
    stop = b"top.%d.stop" % load.seed
    patterns: list[list[bytes]] = [
        names * EACH,
        [b"top.%d.*" % load.seed],
        names[1::2] + names[2::3],
    ]
    clients = []
    for mine in patterns[:readers]:
        client = await load.open()
        await client.send(b"".join(b"SUB %b %d\r\n" % (it, sid) for sid, it in enumerate(mine)))
        await client.send(b"SUB %b stop\r\n" % stop)
        await client.sync()
        clients.append(client)
    publisher = await load.open()
    sent: list[tuple[int, bool]] = []  # the topic, and whether to all
    done = [0] * len(clients)

    async def receive(at: int) -> None:
        client, mine = clients[at], patterns[at]
        while True:
            wanted = _wanted(mine, names, *sent[done[at]]) if done[at] < len(sent) else None
            message = await client.next()
            if message.sid == b"stop" or message.subject == stop:
                return
            if wanted is None:
                wanted = _wanted(mine, names, *sent[done[at]])
            got = {(int(message.sid), message.subject)}
            while len(got) < len(wanted):
                message = await client.next()
                got.add((int(message.sid), message.subject))
                expect("topics", int(message.body.split(b":")[0]), done[at])
            expect(f"topics {at}", (got, int(message.body.split(b":")[0])), (wanted, done[at]))
            done[at] += 1
            load.count("received")

    async def publish() -> None:
        while not load.stopping.is_set():
            for _ in range(load.random.randint(1, 10)):
                first, to_all = load.random.choice((1, 2, 3)) * 2 - 1, load.random.random() < 0.6
                size = load.random.choice((10, 10, 10, 10, 5000))
                body = (b"%d:" % len(sent)).ljust(size, b"x")
                sent.append((first, to_all))
                if to_all:
                    rest = b", ".join(names[:first] + names[first + 1 :]).decode()
                    publisher.put(hpub(names[first], b"", body, topics=rest))
                else:
                    publisher.put(wire_nats.pub(names[first], body))
            await publisher.send(b"")
            while len(sent) - min(done) > 20:
                await asyncio.sleep(0.001)
        while min(done) < len(sent):
            await asyncio.sleep(0.01)
        await publisher.send(wire_nats.pub(stop, b""))

    async with asyncio.TaskGroup() as group:
        group.create_task(publish())
        for at in range(len(clients)):
            group.create_task(receive(at))


def _wanted(
    mine: list[bytes], names: list[bytes], first: int, to_all: bool
) -> set[tuple[int, bytes]]:
    """Which subscriptions get a message, and under which subject."""
    if mine[0].endswith(b"*"):
        return {(0, names[first])}
    topics = names if to_all else [names[first]]
    return {(sid, name) for sid, name in enumerate(mine) if name in topics}


async def kinds(load: Load, members: int = 8) -> None:
    """What is sent to a type, an organisation or both comes to those who are of it, in order."""
    clients: list[Client] = []
    for at in range(members):
        type, of = f"kind{at % 2}x{load.seed}", f"org{at // 2 % 2}x{load.seed}"
        it = await load.open(wire_nats.connect(name=f"ipc:{type}.m{at}@{of}"))
        await it.send(b"SUB _midair.kind.> 1\r\nSUB _midair.org.> 2\r\n")
        await it.sync()
        clients.append(it)
    publisher = await load.open()
    while not load.stopping.is_set():
        wanted: list[list[tuple[bytes, bytes]]] = [[] for _ in clients]
        for number in range(load.random.randint(1, 30)):
            type, of = load.random.randint(0, 1), load.random.randint(0, 1)
            form = load.random.choice(
                ("kind.kind{0}x{2}", "org.org{1}x{2}", "kind.kind{0}x{2}.org.org{1}x{2}")
            )
            subject = ("_midair." + form.format(type, of, load.seed)).encode()
            body = b"%d" % number
            publisher.put(wire_nats.pub(subject, body))
            for at, mine in enumerate(wanted):
                if ("{0}" not in form or at % 2 == type) and (
                    "{1}" not in form or at // 2 % 2 == of
                ):
                    mine.append((subject, body))
        expect("kinds: the publisher", await publisher.sync(), [])
        for at, client in enumerate(clients):
            got = [(it.subject, it.body) for it in await client.sync()]
            expect(f"kinds {at}", got, wanted[at])
        load.count("rounds")
