"""The clients of a storm: `python -m tests.storm.clients ROLE PORT SEED` is one process of them.

A process has both ends of everything it checks: it knows what it sent, and compares what
arrives with it, byte by byte and in order. It says on stdout, one JSON object a line, when
it is ready, when it has drained, and what broke. On stdin it is told `stop` (publish no
more, then get everything that was published) and `close`.

Every choice comes from the seed. When it is made depends on the machine.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from midair.client.wire_nats import hpub, pub
from tests.storm.wire import PATIENCE_S, Connection, Loop, bytes_of
from tests.support.promise import BrokenPromise

PATTERN_BYTES = 1 << 16


class Flow:
    """Messages of one publisher on one subject: message n has one possible content."""

    def __init__(
        self,
        publisher: Connection,
        subject: bytes,
        size: Callable[[int], int],
        pattern: bytes,
        headers: bool = False,
    ) -> None:
        self.publisher = publisher
        self.subject = subject
        self.size = size
        self.pattern = pattern
        self.headers = headers
        self.sent = 0
        self.receivers: dict[Connection, int] = {}  # receiver -> next number

    def body(self, n: int) -> bytes:
        size = self.size(n)
        at = n * 131 % (len(self.pattern) - size + 1)
        return b"%d " % n + self.pattern[at : at + size]

    def header(self, n: int) -> bytes:
        return b"NATS/1.0\r\nn: %d\r\n\r\n" % n if self.headers and n % 3 == 0 else b""

    def publish(self) -> None:
        body, header = self.body(self.sent), self.header(self.sent)
        self.sent += 1
        frame = hpub(self.subject, header, body) if header else pub(self.subject, body)
        self.publisher.send(frame)

    def check(self, receiver: Connection, header: bytes, body: bytes) -> None:
        n = self.receivers[receiver]
        if body != self.body(n) or header != self.header(n):
            found = body[:12].split(b" ")[0]
            raise receiver.broken(
                f"on {self.subject.decode()}: message {found!r} ({len(body)} bytes), {n} "
                f"({len(self.body(n))} bytes) was to come; {self.sent} were sent"
            )
        self.receivers[receiver] = n + 1

    @property
    def behind(self) -> int:
        """Messages the slowest receiver has yet to get."""
        return self.sent - min(self.receivers.values())


class Role:
    """What one process does. `step` publishes what is due and says when to be called again."""

    def __init__(self, name: str, port: int, seed: int) -> None:
        self.name = name
        self.port = port
        self.seed = seed
        self.chance = random.Random(seed)
        self.loop = Loop()
        self.received = 0

    def connect(self, on_message: Any = None, **options: Any) -> Connection:
        name = f"{self.name}-{len(self.loop.connections)}"
        return self.loop.add(Connection(self.port, on_message, name=name, **options))

    def open(self) -> None:
        raise NotImplementedError

    def step(self, now: float) -> float:
        raise NotImplementedError

    def finish(self) -> None:
        """No more is published from now on."""

    def missing(self) -> int:
        """What was sent and has not arrived."""
        raise NotImplementedError

    @property
    def sent(self) -> int:
        raise NotImplementedError

    def opened(self) -> int:
        return len(self.loop.connections)


class Flows(Role):
    """Flows of all kinds; the subclasses differ in sizes and pace."""

    publishers = 1
    fan = 1
    rate = 100.0  # bursts a second, of each flow
    burst = (1, 1)
    outstanding = 1000
    headers = False
    both_ways = False
    wildcard = False
    pattern_bytes = PATTERN_BYTES
    receive_buffer = 0
    gulp_s: tuple[float, float] | None = None  # a slow reader sleeps that long between reads

    def size(self, n: int) -> int:
        return n * 7919 % 400

    def open(self) -> None:
        pattern = bytes_of(self.seed, self.pattern_bytes)
        self.flows: list[Flow] = []
        self.by_subject: dict[bytes, Flow] = {}
        for at in range(self.publishers):
            publisher = self.connect(self.on_message)
            self.add(publisher, b"%d.a" % at, pattern)
            if self.both_ways:
                receiver = next(iter(self.flows[-1].receivers))
                self.add(receiver, b"%d.b" % at, pattern, publisher)
        now = time.monotonic()
        self.due = [now + self.chance.random() / self.rate for _ in self.flows]
        self.gulp = {
            receiver: now
            for flow in self.flows
            for receiver in flow.receivers
            if self.gulp_s is not None
        }

    def add(
        self, publisher: Connection, tail: bytes, pattern: bytes, receiver: Connection | None = None
    ) -> None:
        subject = b"%b.%b" % (self.name.encode(), tail)
        flow = Flow(publisher, subject, self.size, pattern, self.headers)
        for n in range(1 if receiver else self.fan):
            to = receiver or self.connect(self.on_message, receive_buffer=self.receive_buffer)
            wanted = subject[:-1] + (b"*", b">")[n % 2] if self.wildcard and n % 3 else subject
            to.subscribe(wanted, tail)
            flow.receivers[to] = 0
        self.flows.append(flow)
        self.by_subject[subject] = flow

    def on_message(
        self, to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        flow = self.by_subject.get(subject)
        if flow is None or to not in flow.receivers or reply or not subject.endswith(sid):
            raise to.broken(f"a message nobody sent: {subject!r} {sid!r} {reply!r}")
        self.received += 1
        flow.check(to, header, body)

    def step(self, now: float) -> float:
        for at, flow in enumerate(self.flows):
            while self.due[at] <= now:
                self.due[at] += self.chance.expovariate(self.rate)
                if self.due[at] < now - 0.5:
                    self.due[at] = now  # was held up: do not catch up for ever
                if flow.behind < self.outstanding:
                    for _ in range(self.chance.randint(*self.burst)):
                        flow.publish()
        return min([*self.due, self.turn_gulps(now)])

    def turn_gulps(self, now: float) -> float:
        """Slow readers read once, then not for a while."""
        for receiver, until in self.gulp.items():
            receiver.paused = True
            if until <= now:
                assert self.gulp_s is not None
                receiver.read(self.chance.randint(1000, 200_000))
                self.gulp[receiver] = now + self.chance.uniform(*self.gulp_s)
        return min(self.gulp.values(), default=now + 1.0)

    def finish(self) -> None:
        for receiver in self.gulp:
            receiver.paused = False

    def missing(self) -> int:
        return sum(flow.sent - n for flow in self.flows for n in flow.receivers.values())

    @property
    def sent(self) -> int:
        return sum(flow.sent for flow in self.flows)


class Steady(Flows):
    """Pairs that talk to each other all the time, a little."""

    publishers, both_ways, rate = 6, True, 60.0


class Bursty(Flows):
    """Silence, then many at once; sizes on both sides of where bodies stop being copied."""

    publishers, rate, burst, outstanding, headers = 3, 2.0, (1, 800), 3000, True

    def size(self, n: int) -> int:
        return (n * 7919 % 9000) if n % 5 == 0 else n * 31 % 300


class Fanout(Flows):
    """One to ten, some of them by wildcard; every seventh message is large enough to be shared."""

    fan, rate, burst, outstanding, wildcard = 10, 40.0, (1, 5), 500, True

    def size(self, n: int) -> int:
        return n * 7919 % 30_000 if n % 7 == 0 else n % 200


class Large(Flows):
    """100 KB to 16 MB, to one and to three."""

    publishers, fan, rate, outstanding = 2, 2, 1.5, 3
    pattern_bytes = 16_000_000

    def size(self, n: int) -> int:
        return 100_000 + n * 104_729 % 900_000 if n % 10 else 1_000_000 + n * 7_919_331 % 14_900_000


class Slow(Flows):
    """Readers that read a little now and then, through a small window."""

    publishers, rate, burst, outstanding, receive_buffer = 3, 5.0, (1, 30), 400, 8192
    gulp_s = (0.05, 0.4)

    def size(self, n: int) -> int:
        return n * 7919 % 12_000


class Groups(Role):
    """Queue groups: each message to one member, each publisher's in order at each member."""

    def open(self) -> None:
        self.members = [self.connect(self.on_message) for _ in range(5)]
        self.publishers = [self.connect() for _ in range(3)]
        self.subject = self.name.encode() + b".q"
        for member in self.members:
            member.subscribe(self.subject, b"q", b"workers")
        self.pattern = bytes_of(self.seed, PATTERN_BYTES)
        self.numbers = [0] * len(self.publishers)
        self.open_numbers: list[set[int]] = [set() for _ in self.publishers]
        self.last = {member: [-1] * len(self.publishers) for member in self.members}
        self.due = time.monotonic()

    def body(self, publisher: int, n: int) -> bytes:
        size = n * 7919 % 6000 if n % 11 == 0 else n % 100
        return b"%d %d " % (publisher, n) + self.pattern[n % 1000 : n % 1000 + size]

    def step(self, now: float) -> float:
        while self.due <= now:
            self.due = max(self.due + self.chance.expovariate(60.0), now - 0.5)
            at = self.chance.randrange(len(self.publishers))
            for _ in range(self.chance.randint(1, 12)):
                if len(self.open_numbers[at]) >= 1000:
                    break
                n = self.numbers[at]
                self.numbers[at] += 1
                self.open_numbers[at].add(n)
                body = self.body(at, n)
                self.publishers[at].send(pub(self.subject, body))
        return self.due

    def on_message(
        self, to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        at, n = (int(word) for word in body.split(b" ", 2)[:2])
        if body != self.body(at, n) or subject != self.subject or header or reply:
            raise to.broken(f"message {at} {n} came as {subject!r} {body[:60]!r}")
        if n not in self.open_numbers[at]:
            raise to.broken(f"message {n} of publisher {at} came twice")
        if n <= self.last[to][at]:
            raise to.broken(f"message {n} of publisher {at} came after {self.last[to][at]}")
        self.last[to][at] = n
        self.open_numbers[at].remove(n)
        self.received += 1

    def missing(self) -> int:
        return sum(map(len, self.open_numbers))

    @property
    def sent(self) -> int:
        return sum(self.numbers)


class Requests(Role):
    """Requests to two responders, and requests nobody answers: one answer each."""

    def open(self) -> None:
        self.prefix = self.name.encode()
        self.requester = self.connect(self.on_answer)
        self.requester.subscribe(self.prefix + b".in.*", b"in")
        for _ in range(2):
            self.connect(self.on_request).subscribe(self.prefix + b".do", b"do", b"g")
        self.loop.sync()  # the responders are there before the first request
        self.waiting: dict[int, bytes] = {}  # number -> body, or nothing when nobody listens
        self.number = 0
        self.due = time.monotonic()

    def step(self, now: float) -> float:
        while self.due <= now:
            self.due = max(self.due + self.chance.expovariate(80.0), now - 0.5)
            if len(self.waiting) >= 200:
                continue
            n = self.number
            self.number += 1
            body = b"" if n % 5 == 0 else b"request %d" % n
            self.waiting[n] = body
            subject = b"do" if body else b"nobody"
            to = b"%b.%b" % (self.prefix, subject)
            self.requester.send(pub(to, body, b"%b.in.%d" % (self.prefix, n)))
        return self.due

    def on_request(
        self, to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        if subject != self.prefix + b".do" or not reply.startswith(self.prefix) or header:
            raise to.broken(f"not a request: {subject!r} {reply!r}")
        to.send(pub(reply, body[::-1]))

    def on_answer(
        self, to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        n = int(subject.rsplit(b".", 1)[1])
        asked = self.waiting.pop(n, None)
        if asked is None:
            raise to.broken(f"a second answer to request {n}")
        wanted = b"" if asked else b"NATS/1.0 503\r\n\r\n"
        if body != asked[::-1] or header != wanted or reply:
            raise to.broken(f"request {n} was answered {header!r} {body[:60]!r}")
        self.received += 1

    def missing(self) -> int:
        return len(self.waiting)

    @property
    def sent(self) -> int:
        return self.number


class Verbose(Role):
    """Verbose clients: each command has its +OK or PONG, in order; messages come between."""

    def open(self) -> None:
        self.prefix = self.name.encode()
        self.clients = [self.connect(self.on_message, verbose=True) for _ in range(3)]
        self.numbers = dict.fromkeys(self.clients, 0)
        self.next = dict.fromkeys(self.clients, 0)
        self.extra = dict.fromkeys(self.clients, 0)
        for at, client in enumerate(self.clients):
            client.subscribe(b"%b.%d" % (self.prefix, at), b"own")
        self.due = time.monotonic()

    def step(self, now: float) -> float:
        while self.due <= now:
            self.due = max(self.due + self.chance.expovariate(60.0), now - 0.5)
            at = self.chance.randrange(len(self.clients))
            client = self.clients[at]
            if len(client.expected) < 300:
                for _ in range(self.chance.randint(1, 6)):
                    self.command(at, client)
        return self.due

    def command(self, at: int, client: Connection) -> None:
        kind = self.chance.random()
        if kind < 0.6:
            n = self.numbers[client]
            self.numbers[client] += 1
            body = b"%d" % n
            client.send(pub(b"%b.%d" % (self.prefix, at), body))
            client.expected.append(b"+OK")
        elif kind < 0.8:
            client.ping()
        elif kind < 0.9 or not self.extra[client]:
            self.extra[client] += 1
            client.subscribe(self.prefix + b".none", b"x%d" % self.extra[client])
        else:
            client.send(b"UNSUB x%d\r\n" % self.extra[client])
            client.expected.append(b"+OK")
            self.extra[client] -= 1
            client.subs -= 1

    def on_message(
        self, to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        if sid != b"own" or body != b"%d" % self.next[to]:
            raise to.broken(f"{subject!r} {sid!r} {body[:40]!r}; {self.next[to]} was to come")
        self.next[to] += 1
        self.received += 1

    def missing(self) -> int:
        answers = sum(len(client.expected) for client in self.clients)
        return answers + self.sent - sum(self.next.values())

    @property
    def sent(self) -> int:
        return sum(self.numbers.values())


class Idle(Role):
    """Connections on which nothing happens; at the end each gets its one message."""

    count = 100

    def open(self) -> None:
        self.prefix = self.name.encode()
        self.publisher = self.connect()
        self.waiting: set[bytes] = set()
        for at in range(self.count):
            self.connect(self.on_message).subscribe(b"%b.%d" % (self.prefix, at), b"%d" % at)
        self.numbers = 0

    def step(self, now: float) -> float:
        return now + 1.0

    def finish(self) -> None:
        self.numbers = self.count
        self.waiting = {b"%d" % at for at in range(self.count)}
        for at in range(self.count):
            self.publisher.send(pub(b"%b.%d" % (self.prefix, at), b"here"))

    def on_message(
        self, to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        if sid not in self.waiting or body != b"here":
            raise to.broken(f"{subject!r} {sid!r} {body[:40]!r}")
        self.waiting.remove(sid)
        self.received += 1

    def missing(self) -> int:
        return len(self.waiting)

    @property
    def sent(self) -> int:
        return self.numbers


ROLES: dict[str, type[Role]] = {
    "steady": Steady,
    "bursty": Bursty,
    "fanout": Fanout,
    "large": Large,
    "slow": Slow,
    "groups": Groups,
    "requests": Requests,
    "verbose": Verbose,
    "idle": Idle,
}


def say(state: str, **more: Any) -> None:
    print(json.dumps({"state": state, "at": time.monotonic(), **more}), flush=True)


class Orders:
    """What the driver says on stdin. The end of it means that the driver died."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self._text = b""
        self.stop = False
        self.close = False

    def read(self) -> None:
        got = os.read(0, 4096)
        if not got:
            raise SystemExit(3)
        self._text += got
        self.stop = self.stop or b"stop\n" in self._text
        self.close = self.close or b"close\n" in self._text


def run(role: Role) -> None:
    """The life of a role, from connecting to closing."""
    import selectors

    orders = Orders()
    loop = role.loop
    loop.selector.register(0, selectors.EVENT_READ, orders.read)
    role.open()
    loop.sync()
    say("ready", connections=role.opened())
    next_step = 0.0
    while not orders.stop:
        now = time.monotonic()
        if now >= next_step:
            next_step = role.step(now)
        loop.turn(min(next_step - time.monotonic(), 0.2))
    role.finish()
    deadline = time.monotonic() + PATIENCE_S
    while role.missing():
        if time.monotonic() > deadline:
            raise BrokenPromise(f"{role.missing()} of {role.sent} messages or answers are missing")
        loop.turn(0.1)
    loop.sync()
    for connection in loop.connections:
        connection.silent = True
    say(
        "drained",
        sent=role.sent,
        received=role.received,
        ports=[connection.port for connection in loop.connections],
        subs=sum(connection.subs for connection in loop.connections),
    )
    while not orders.close:
        loop.turn(0.2)
    loop.sync()
    for connection in loop.connections:
        connection.close()
    say("closed")


def main() -> int:
    name, port, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    kind = name.rstrip("0123456789")
    try:
        if kind == "churn":
            from tests.storm import churn

            churn.run(name, port, seed)
        elif kind == "library":
            from tests.storm import library

            library.run(name, port, seed)
        elif kind not in ROLES:
            from tests.storm import modes

            modes.run(kind, port, seed)
        else:
            run(ROLES[kind](name, port, seed))
    except BrokenPromise as broken:
        say("broken", why=f"{name}: {broken}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
