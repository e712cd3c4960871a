"""Load that checks itself: `python -m tests.crash.load ROLE HOST PORT SEED`.

Runs until SIGTERM, then stops sending, waits until everything sent has arrived, prints one
JSON line and exits with 0. A line before that says when something was counted for the first time.
A broken promise is printed and ends it with 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable

from midair.client.wire_nats import CONNECT
from tests.crash import crowds, modes
from tests.crash.client import Client
from tests.support.promise import BrokenPromise

DRAIN_S = 60.0


class Load:
    """What every role shares: where the server is, when to stop, what was counted."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.host = host
        self.port = port
        self.seed = seed
        self.random = random.Random(seed)
        self.stopping = asyncio.Event()
        self.counts: dict[str, int] = {}

    async def open(self, hello: bytes = CONNECT) -> Client:
        return await Client.open(self.host, self.port, hello)

    async def pause(self) -> None:
        """Between two rounds of a role."""

    def count(self, what: str, n: int = 1) -> None:
        if not self.counts:
            print("at work", flush=True)
        self.counts[what] = self.counts.get(what, 0) + n


def body_of(seed: int, seq: int, size: int) -> bytes:
    """A body that says which it is and can be checked as a whole."""
    head = b"%d:%d:" % (seq, size)
    fill = hashlib.blake2b(b"%d.%d" % (seed, seq), digest_size=32).digest()
    return (head + fill * (size // 32 + 1))[: max(size, len(head))]


async def check_counts(
    publisher: Client, had: dict[Client, int], sid: bytes, subject: bytes, sent: int = 4
) -> None:
    """The server knows how many messages each has had, whatever died meanwhile."""
    for client, count in had.items():
        await client.send(b"UNSUB %s %d\r\n" % (sid, count + 2))
        await client.sync()
    await publisher.send(b"PUB %s 1\r\nx\r\n" % subject * sent)
    await publisher.sync()
    for client, count in had.items():
        got = [message for message in await client.sync() if message.sid == sid]
        if len(got) != 2:
            raise BrokenPromise(f"{subject!r}: {len(got)} after {count}, of 2 that were asked for")


async def stream(load: Load, sizes: Callable[[random.Random], int], window: int) -> None:
    """A publisher and a subscriber on connections of their own; order, loss, doubles, content."""
    subject = b"stream.%d" % load.seed
    subscriber, publisher = await load.open(), await load.open()
    await subscriber.send(b"SUB %s.* 7\r\n" % subject)
    await subscriber.sync()
    sent = received = 0
    room = asyncio.Event()
    plan: dict[int, int] = {}

    async def receive() -> None:
        nonlocal received
        while not (load.stopping.is_set() and received == sent):
            message = await subscriber.plain()
            seq = int(message.body.split(b":", 1)[0])
            if seq == -1:
                return
            if seq != received:
                raise BrokenPromise(f"{subject!r}: got {seq}, expected {received}")
            if message.body != body_of(load.seed, seq, plan.pop(seq)):
                raise BrokenPromise(f"{subject!r}: content of {seq} differs")
            received += 1
            load.count("received")
            room.set()

    async def publish() -> None:
        nonlocal sent
        while not load.stopping.is_set():
            for _ in range(load.random.randint(1, max(1, window // 4))):
                size = plan[sent] = sizes(load.random)
                body = body_of(load.seed, sent, size)
                publisher.put(b"PUB %s.x %d\r\n%s\r\n" % (subject, len(body), body))
                sent += 1
            await publisher.send(b"")
            while sent - received > window:
                room.clear()
                await room.wait()
            await asyncio.sleep(load.random.choice((0, 0, 0.001)))
        await publisher.send(b"PUB %s.x 3\r\n-1:\r\n" % subject)

    await together(receive(), publish())
    if sent != received:
        raise BrokenPromise(f"{subject!r}: {sent} sent, {received} received")
    await publisher.sync()
    await check_counts(publisher, {subscriber: sent + 1}, b"7", subject + b".x")


async def fan(load: Load, subscribers: int = 10) -> None:
    """One publisher, several subscribers: each gets everything in order."""
    subject = b"fan.%d" % load.seed
    clients = [await load.open() for _ in range(subscribers)]
    for client in clients:
        await client.send(b"SUB %s 1\r\n" % subject)
        await client.sync()
    publisher = await load.open()
    seen = [0] * subscribers
    sent = 0

    async def receive(at: int) -> None:
        while True:
            seq = int((await clients[at].plain()).body)
            if seq == -1:
                return
            if seq != seen[at]:
                raise BrokenPromise(f"fan {at}: got {seq}, expected {seen[at]}")
            seen[at] += 1
            load.count("received")

    async def publish() -> None:
        nonlocal sent
        while not load.stopping.is_set():
            for _ in range(load.random.randint(1, 50)):
                text = b"%d" % sent
                publisher.put(b"PUB %s %d\r\n%s\r\n" % (subject, len(text), text))
                sent += 1
            await publisher.send(b"")
            while sent - min(seen) > 2000:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        await publisher.send(b"PUB %s 2\r\n-1\r\n" % subject)

    await together(publish(), *(receive(at) for at in range(subscribers)))
    if seen != [sent] * subscribers:
        raise BrokenPromise(f"fan: {sent} sent, {seen} received")
    await check_counts(publisher, dict.fromkeys(clients, sent + 1), b"1", subject)


async def queue(load: Load, members: int = 4) -> None:
    """A queue group: every message to exactly one member, in order at each."""
    subject = b"queue.%d" % load.seed
    clients = [await load.open() for _ in range(members)]
    for client in clients:
        await client.send(b"SUB %s.* work 1\r\nSUB stop.%d 2\r\n" % (subject, load.seed))
        await client.sync()
    publisher = await load.open()
    seen: set[int] = set()
    counts = dict.fromkeys(clients, 0)
    sent = 0

    async def receive(client: Client) -> None:
        last = -1
        while True:
            message = await client.plain()
            if message.sid == b"2":
                return
            seq = int(message.body)
            if seq in seen or seq <= last:
                raise BrokenPromise(f"queue: {seq} came twice, or after {last}")
            seen.add(seq)
            counts[client] += 1
            last = seq
            load.count("received")

    async def publish() -> None:
        nonlocal sent
        while not load.stopping.is_set():
            for _ in range(load.random.randint(1, 50)):
                text = b"%d" % sent
                publisher.put(b"PUB %s.a %d\r\n%s\r\n" % (subject, len(text), text))
                sent += 1
            await publisher.send(b"")
            while sent - len(seen) > 2000:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        while len(seen) < sent:
            await asyncio.sleep(0.01)
        await publisher.send(b"PUB stop.%d 0\r\n\r\n" % load.seed)

    await together(publish(), *(receive(client) for client in clients))
    if seen != set(range(sent)):
        raise BrokenPromise(f"queue: {sent} sent, {len(seen)} received")
    await check_counts(publisher, counts, b"1", subject + b".a", 10 * members)


async def churn(load: Load) -> None:
    """Clients that come, subscribe, ask, unsubscribe, misbehave and go."""
    refused: list[Client] = []  # and still there: the server waits for them to go
    while not load.stopping.is_set():
        client = await load.open()
        me = b"%d.%d" % (load.seed, load.random.getrandbits(40))
        await client.send(b"SUB c.%s.> 1\r\nSUB c.%s.q g 2\r\nSUB d.%s 3\r\n" % (me, me, me))
        await client.send(b"UNSUB 3 2\r\n" + b"PUB d.%s 1\r\nx\r\n" % me * 4)
        await client.send(b"PUB c.%s.a 3\r\nabc\r\nPUB c.%s.q 0\r\n\r\n" % (me, me))
        await client.send(b"PUB nobody.%s c.%s.r 0\r\n\r\n" % (me, me))
        got = await client.sync()
        have = sorted((message.sid, (message.headers + message.body)[:12]) for message in got)
        want = [(b"1", b""), (b"1", b"NATS/1.0 503"), (b"1", b"abc"), (b"2", b"")]
        want += [(b"3", b"x")] * 2
        if have != want:
            raise BrokenPromise(f"churn: got {have}, expected {want}")
        await client.send(b"UNSUB 1\r\nUNSUB 2\r\n" + b"PUB c.%s.q 0\r\n\r\n" % me)
        if await client.sync():
            raise BrokenPromise("churn: a message after UNSUB")
        if load.random.random() < 0.3:
            await misbehave(client)
            refused.append(client)
            if len(refused) <= 8:
                continue
            client = refused.pop(0)
        elif load.random.random() < 0.5:  # goes without reading what it has asked for
            body = b"PUB e.%s 100000\r\n%s\r\n" % (me, b"e" * 100_000)
            await client.send(b"SUB e.%s 4\r\n" % me + body * 60)
        await client.close()
        load.count("clients")
    for client in refused:
        await client.close()


async def misbehave(client: Client) -> None:
    await client.send(b"NONSENSE\r\n")
    try:
        while True:
            await client.message()
    except BrokenPromise:
        if client.errors != [b"-ERR 'Unknown Protocol Operation'"]:
            raise


async def halves(load: Load) -> None:
    """Clients that end their side: each gets all that it is owed, once, then the end.

    They call their subscription by names of all lengths, and use the name again after its maximum.
    """
    while not load.stopping.is_set():
        client = await load.open()
        count, length = load.random.randint(1, 60), load.random.choice((1, 36, 64, 65, 161, 700))
        subject, sid = b"half.%d" % load.seed, b"s" * length
        bodies = [body_of(load.seed, n, load.random.choice((0, 30, 5000))) for n in range(count)]
        subscribe = b"SUB %s %s\r\nUNSUB %s %d\r\n" % (subject, sid, sid, count)
        said = b"".join(b"PUB %s %d\r\n%s\r\n" % (subject, len(it), it) for it in bodies)
        await client.send((subscribe + said) * 2 + b"PING\r\nPUB %s 9000\r\nrest" % subject)
        client.writer.write_eof()
        got = []
        try:
            while True:
                if (found := await client.message()) is not None:
                    got.append((found.sid, found.body))
        except BrokenPromise:
            if client.reader.waiting or client.errors:
                raise
        if got != [(sid, body) for body in bodies * 2] or client.pongs != 1:
            raise BrokenPromise(f"half: {len(got)} of {2 * count} messages, {client.pongs} PONGs")
        await client.close()
        load.count("ends")


async def huge(load: Load, subscriptions: int = 60_000) -> None:
    """A list of recipients longer than a ring of batches, for two messages of a run."""
    subject = b"huge.%d" % load.seed
    client = await load.open()
    for at in range(0, subscriptions, 1000):
        await client.send(b"".join(b"SUB %s %d\r\n" % (subject, at + i) for i in range(1000)))
    await client.sync()
    while not load.stopping.is_set():
        await client.send(b"PUB %s 1\r\n1\r\nPUB %s 1\r\n2\r\n" % (subject, subject))
        got = await client.sync()
        for body in (b"1", b"2"):
            sids = [message.sid for message in got if message.body == body]
            if len(sids) != subscriptions or len(set(sids)) != subscriptions:
                raise BrokenPromise(f"huge: {len(sids)} deliveries, {len(set(sids))} distinct")
        if [message.body for message in got] != sorted(message.body for message in got):
            raise BrokenPromise("huge: the second message came before all of the first")
        load.count("lists")


async def idle(load: Load, connections: int = 30) -> None:
    """Connections that say nothing and must be there at the end."""
    clients = [await load.open() for _ in range(connections)]
    for client in clients:
        await client.send(b"SUB idle.%d 1\r\n" % load.seed)
        await client.sync()
    await load.stopping.wait()
    for client in clients:
        await client.sync()
        load.count("alive")


async def together(*parts: Awaitable[None]) -> None:
    """All of them; the first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)  # type: ignore[arg-type]


def small(rng: random.Random) -> int:
    return rng.choice((0, 16, 100, 100, 300, 4090, 4096, 4100, 20_000))


def large(rng: random.Random) -> int:
    return rng.choice((100_000, 131_000, 140_000, 700_000, 3_000_000))


ROLES: dict[str, Callable[[Load], Awaitable[None]]] = {
    "small": lambda load: stream(load, small, 500),
    "large": lambda load: stream(load, large, 3),
    "fan": fan,
    "queue": queue,
    "churn": churn,
    "halves": halves,
    "huge": huge,
    "idle": idle,
    "requests": lambda load: modes.requests(load),
    "sessions": lambda load: modes.sessions(load),
    "comings": lambda load: modes.comings(load),
    "names": lambda load: modes.names(load),
    "silent": lambda load: modes.silent(load),
    "crowd": lambda load: crowds.crowd(load),
    "topics": lambda load: crowds.topics(load),
    "kinds": lambda load: crowds.kinds(load),
}


async def run(role: str, load: Load) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.stopping.set)
    work = asyncio.ensure_future(ROLES[role](load))
    stop = asyncio.ensure_future(load.stopping.wait())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    try:
        await asyncio.wait_for(work, DRAIN_S)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print(json.dumps({"role": role, "error": repr(error), **load.counts}), flush=True)
        return 1
    except (Exception, asyncio.CancelledError) as error:
        print(json.dumps({"role": role, "error": repr(error), **load.counts}), flush=True)
        return 1
    print(json.dumps({"role": role, **load.counts}), flush=True)
    return 0


def main() -> int:
    role, host, port, seed = sys.argv[1:]

    async def start() -> int:
        return await run(role, Load(host, int(port), int(seed)))

    return asyncio.run(start())


if __name__ == "__main__":
    sys.exit(main())
