"""Roles of tests/crash/load.py that use the messaging modes and check every answer.

Whatever happens to the server: each request is asked once, each reply comes once and in order, and
each end is told once, to whoever waits for it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from midair.client import wire_nats
from midair.client.wire_nats import Message
from tests.crash.client import Client
from tests.support.promise import BrokenPromise

if TYPE_CHECKING:
    from tests.crash.load import Load

PATIENCE_S = 20.0  # a server that is killed again and again takes less
END, EXPIRED, NOBODY = b"204 End", b"408 Expired", b"503"
GONE, REQUESTER_GONE = b"410 Responder Gone", b"410 Requester Gone"
NO_SESSION, TAKEN = b"410 No Session", b"-ERR 'Client Name Taken'"
REPLACED = b"-ERR 'Connection Replaced'"


def hpub(subject: bytes, reply: bytes, body: bytes, **headers: str) -> bytes:
    """A message with headers: `mode` is Midair-Mode, and so on."""
    lines = [f"Midair-{name.title()}: {value}" for name, value in headers.items()]
    head = "\r\n".join(["NATS/1.0", *lines, "", ""]).encode()
    return wire_nats.hpub(subject, head, body, reply)


def said(message: Message) -> bytes:
    """The status line of a status, or the body."""
    first = message.headers.split(b"\r\n")[0].removeprefix(b"NATS/1.0").strip()
    return first or message.body


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise BrokenPromise(f"{what}: got {got!r}, expected {wanted!r}")


async def arrival(client: Client, what: str) -> Message:
    """The next message, which has to come: what never comes is lost."""
    try:
        return await asyncio.wait_for(client.next(), PATIENCE_S)
    except TimeoutError:
        raise BrokenPromise(f"{what}: nothing came in {PATIENCE_S:g} s") from None


async def take(client: Client, count: int, what: str = "an answer") -> list[bytes]:
    got: list[bytes] = []
    while len(got) < count:
        got.append(said(await arrival(client, f"{what}, {count} wanted, had {got}")))
    return got


@asynccontextmanager
async def serving(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Responders at work meanwhile; what they find wrong ends everything."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(it) for it in work]
        yield
        for task in tasks:
            task.cancel()


# ---- semaphore, fanout, deadlines ----------------------------------------------------------------


async def respond(client: Client, number: int, seen: set[bytes]) -> None:
    """Answers twice: once with "more", once at last. A request that comes again is an error."""
    while True:
        message = await client.next()
        body = said(message)
        if body in seen:
            raise BrokenPromise(f"{body!r} was asked twice")
        seen.add(body)
        if body.startswith(b"silent"):
            continue
        client.put(hpub(message.reply, b"", b"%s more %d" % (body, number), mode="more"))
        await client.send(
            b"PUB %s %d\r\n%s last %d\r\n"
            % (message.reply, len(body) + 6 + len(str(number)), body, number)
        )


async def requests(load: Load, responders: int = 3, window: int = 20) -> None:
    """Requests to one of a group and to all, with one inbox each, many at a time."""
    topic, inbox = b"ask.%d" % load.seed, b"in.%d" % load.seed
    workers, everyone = [], []
    for number in range(responders):
        worker, listener = await load.open(), await load.open()
        await worker.send(b"SUB %s.one group 1\r\n" % topic)
        await listener.send(b"SUB %s.all 1\r\n" % topic)
        await worker.sync()
        await listener.sync()
        workers.append(respond(worker, number, load_seen := set()))
        everyone.append(respond(listener, number, load_seen))
    client = await load.open()
    await client.send(b"SUB %s.* 1\r\n" % inbox)
    await client.sync()
    async with serving(*workers, *everyone):
        at = 0
        while not load.stopping.is_set():
            await load.pause()
            kinds = [load.random.choice("ooooonsa") for _ in range(window)]
            answers: dict[bytes, list[bytes]] = {}
            for kind in kinds:
                reply, body = b"%s.%d" % (inbox, at), b"%d" % at
                answers[reply] = []
                at += 1
                if kind == "o":
                    client.put(hpub(topic + b".one", reply, body, mode="semaphore"))
                elif kind == "n":
                    client.put(hpub(topic + b".none", reply, body, mode="semaphore"))
                elif kind == "a":
                    client.put(hpub(topic + b".all", reply, body, mode="fanout"))
                else:
                    body = b"silent" + body
                    client.put(hpub(topic + b".one", reply, body, mode="semaphore", deadline="30"))
            await client.send(b"")
            while not all(map(finished, answers.values())):
                message = await arrival(client, f"requests: {answers}")
                answers[message.subject].append(said(message))
            for (reply, got), kind in zip(answers.items(), kinds, strict=True):
                check_answers(kind, reply.rsplit(b".", 1)[1], got, responders)
                load.count("answered")
        expect("requests: after everything", await client.sync(), [])


def finished(answers: list[bytes]) -> bool:
    return bool(answers) and answers[-1] in (END, EXPIRED, NOBODY)


def check_answers(kind: str, body: bytes, got: list[bytes], responders: int) -> None:
    if kind == "n":
        expect("nobody", got, [NOBODY])
    elif kind == "s":
        expect("a deadline", got, [EXPIRED])
    elif kind == "o":
        number = got[0].rsplit(b" ", 1)[-1]
        wanted = [b"%s more %s" % (body, number), b"%s last %s" % (body, number), END]
        expect("semaphore", got, wanted)
    else:
        expect("fanout", (got[0], got[-1], len(got)), (b"202 Accepted", END, 2 * responders + 2))
        for number in range(responders):
            parts = [it for it in got if it.endswith(b" %d" % number)]
            expect("fanout", parts, [b"%s %s %d" % (body, w, number) for w in (b"more", b"last")])


# ---- sessions ------------------------------------------------------------------------------------


async def serve_sessions(client: Client, number: int) -> None:
    """Counts the messages of each session; "over" makes it end one itself."""
    counts: dict[bytes, int] = {}
    while True:
        message = await client.next()
        at, what = counts.get(message.reply, 0), said(message)
        expect(f"session {message.reply!r}", what.split(b" ")[0], b"%d" % at)
        counts[message.reply] = at + 1
        over = what.endswith(b"over")
        answer = b"%d %d" % (number, at)
        headers = {"mode": "session-end"} if over else {}
        if b"session-end" in message.headers:
            del counts[message.reply]
            continue
        await client.send(hpub(message.reply, b"", answer, **headers))
        if over:
            del counts[message.reply]


async def sessions(load: Load, responders: int = 3) -> None:
    """Sessions of many messages, two at a time; each stays with the responder it began with."""
    topic = b"sess.%d" % load.seed
    workers = []
    for number in range(responders):
        worker = await load.open()
        await worker.send(b"SUB %s group 1\r\n" % topic)
        await worker.sync()
        workers.append(serve_sessions(worker, number))
    client = await load.open()
    inboxes = [b"in.%d.a" % load.seed, b"in.%d.b" % load.seed]
    await client.send(b"SUB in.%d.* 1\r\n" % load.seed)
    await client.sync()
    async with serving(*workers):
        while not load.stopping.is_set():
            await load.pause()
            count = load.random.randint(3, 60)
            ends = [load.random.choice((b"mine", b"over")) for _ in inboxes]
            for at in range(count):
                mode = "session" if at else "session-open"
                for inbox in inboxes:
                    client.put(hpub(topic, inbox, b"%d go" % at, mode=mode))
                if load.random.random() < 0.2:
                    await client.send(b"")
            for inbox, end in zip(inboxes, ends, strict=True):
                if end == b"over":
                    client.put(hpub(topic, inbox, b"%d over" % count, mode="session"))
            await client.send(b"")
            answers: dict[bytes, list[bytes]] = {inbox: [] for inbox in inboxes}
            for _ in range(2 * count + ends.count(b"over")):
                message = await arrival(client, f"session: {count} {ends} {answers}")
                answers[message.subject].append(said(message))
            for inbox, end in zip(inboxes, ends, strict=True):
                who = answers[inbox][0].split(b" ")[0]
                wanted = [b"%s %d" % (who, at) for at in range(count + (end == b"over"))]
                expect("session", answers[inbox], wanted)
                if end == b"mine":
                    last = hpub(topic, inbox, b"%d mine" % count, mode="session-end")
                    client.put(last)
                client.put(hpub(topic, inbox, b"0 late", mode="session"))
            for _ in inboxes:
                expect("after the end", said(await arrival(client, "late")), NO_SESSION)
            load.count("sessions", 2)


async def comings(load: Load) -> None:
    """Responders and requesters that go in the middle: whoever waits is told, once."""
    inbox, rounds = b"in.%d" % load.seed, 0
    client = await load.open()
    await client.send(b"SUB %s.* 1\r\n" % inbox)
    await client.sync()
    while not load.stopping.is_set():
        await load.pause()
        # The last responder may be gone for us and not yet for the router: it had another topic.
        topic, rounds = b"go.%d.%d" % (load.seed, rounds), rounds + 1
        responder = await load.open()
        await responder.send(b"SUB %s group 1\r\nSUB %s.all 2\r\n" % (topic, topic))
        await responder.sync()
        pinned = load.random.randint(1, 5)
        for at in range(pinned):
            client.put(hpub(topic, b"%s.%d" % (inbox, at), b"x", mode="session-open"))
        expect("not told", await client.sync(), [])
        expect("asked", await take(responder, pinned, "asked"), [b"x"] * pinned)
        if load.random.random() < 0.5:
            await responder.send(b"UNSUB 1\r\n")
        else:
            for at in range(pinned):
                client.put(hpub(topic + b".all", b"%s.f%d" % (inbox, at), b"y", mode="fanout"))
            expect("told", await take(client, pinned, "told"), [b"202 Accepted"] * pinned)
            await responder.close()
            ends = sorted(await take(client, pinned * 3, "gone"))
            expect("gone", ends, [END] * pinned + [GONE] * (2 * pinned))
            load.count("gone")
            continue
        expect("unsubscribed", await take(client, pinned, "unsubscribed"), [GONE] * pinned)
        await responder.send(b"SUB %s group 3\r\n" % topic)
        await responder.sync()
        asker = await load.open()
        await asker.send(hpub(topic, b"%s.z" % inbox, b"z", mode="session-open"))
        expect("asked", await take(responder, 1, "asked"), [b"z"])
        await asker.close()
        expect("told", await take(responder, 1, "told"), [REQUESTER_GONE])
        await responder.close()
        load.count("unsubscribed")
    expect("comings: after everything", await client.sync(), [])


# ---- names ---------------------------------------------------------------------------------------


async def names(load: Load) -> None:
    """A name is one client's at a time; who watches sees it come and go, once each."""
    name = b"crash.%d" % load.seed
    hello = wire_nats.connect(name=f"ipc:{name.decode()}")
    watcher = await load.open()
    await watcher.send(b"SUB _midair.clients.%s 1\r\nSUB in.%d 2\r\n" % (name, load.seed))
    await watcher.sync()
    while not load.stopping.is_set():
        await load.pause()
        client = await load.open(hello)
        await client.send(b"SUB _midair.ipc.%s 1\r\n" % name)
        await client.sync()
        expect("comes", event(await arrival(watcher, "presence")), "up")
        second = await load.open(hello)
        async with serving(answer(client)):
            try:
                await second.sync()
                raise BrokenPromise("two clients have the same name")
            except BrokenPromise:
                expect("the second", second.errors, [TAKEN])
        await second.close()
        reply = b"in.%d" % load.seed
        await watcher.send(b"PUB _midair.clients %s 0\r\n\r\n" % reply)
        listed = []
        while (text := said(await arrival(watcher, "list"))) != END:
            listed += [f"{it['type']}.{it['instance']}" for it in json.loads(text)]
        expect("listed", listed.count(name.decode()), 1)
        await watcher.send(hpub(b"_midair.ipc." + name, reply, b"hello", mode="semaphore"))
        message = await arrival(client, "called")
        expect("called", said(message), b"hello")
        await client.send(b"PUB %s 2\r\nhi\r\n" % message.reply)
        expect("answered", await take(watcher, 2), [b"hi", END])
        await client.close()
        expect("goes", event(await arrival(watcher, "presence")), "down")
        await watcher.send(b"PUB _midair.ipc.%s %s 1\r\nx\r\n" % (name, reply))
        expect("gone", await take(watcher, 1), [NOBODY])
        load.count("names")


async def answer(client: Client) -> None:
    """Answers the PINGs of somebody who asks for its name."""
    while True:
        expect("nobody calls it", await client.message(), None)


async def silent(load: Load) -> None:
    """A client that says nothing loses its name to the next one that asks for it, once."""
    hello = wire_nats.connect(name=f"ipc:silent.{load.seed}")
    old = await load.open(hello)
    await old.sync()
    while not load.stopping.is_set():
        new = await load.open(hello)
        expect("the new one", (await new.sync(), new.errors), ([], []))
        try:
            while True:
                await old.message()
        except BrokenPromise:
            expect("the old one", old.errors, [REPLACED])
        await old.close()
        old = new
        load.count("replaced")


def event(message: Message) -> str:
    if message.headers or not re.fullmatch(rb"\{.*\}", message.body):
        raise BrokenPromise(f"presence: {message!r}")
    return str(json.loads(message.body)["event"])
