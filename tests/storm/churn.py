"""Clients that come and go all the time: none may be refused, or dropped before it goes.

Several threads, each with one connection after the other. The ways to go differ: at leave,
in the middle of a message, with a reset, without having read what was sent to it.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
from collections import Counter

from midair.client.wire_nats import pub
from tests.storm.clients import Orders, say
from tests.storm.wire import Connection, Loop, NotGreetedError
from tests.support.promise import BrokenPromise

THREADS = 3
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() resets the connection


class Visitor(threading.Thread):
    """One connection after the other."""

    def __init__(self, name: str, port: int, seed: int, echo: bytes) -> None:
        super().__init__(name=name, daemon=True)
        self.port = port
        self.echo = echo
        self.chance = random.Random(seed)
        self.visits = 0
        self.kinds: Counter[str] = Counter()
        self.sent = 0
        self.received = 0
        self.stopping = threading.Event()
        self.broken: BrokenPromise | None = None
        self.turned_away: list[str] = []  # the driver decides what it thinks of these

    def run(self) -> None:
        ways = (self.polite, self.partner, self.limited, self.rude, self.half, self.glance)
        weights = (5, 4, 3, 2, 2, 1)
        try:
            while not self.stopping.is_set():
                way = self.chance.choices(ways, weights)[0]
                self.visits += 1
                self.kinds[way.__name__] += 1
                try:
                    way(b"%b.%d" % (self.name.encode(), self.visits))
                except NotGreetedError as away:
                    self.turned_away.append(str(away))
                self.stopping.wait(self.chance.expovariate(20.0))
        except BrokenPromise as broken:
            self.broken = broken
        except Exception as error:  # a mistake of this file must not pass for success
            self.broken = BrokenPromise(f"{type(error).__name__}: {error}")

    def visit(self, subject: bytes, sid: bytes = b"1") -> tuple[Loop, Connection, list[bytes]]:
        """Connected, subscribed, and answered."""
        got: list[bytes] = []

        def on_message(
            to: Connection, heard: bytes, at: bytes, reply: bytes, header: bytes, body: bytes
        ) -> None:
            if heard != subject or at != sid or header:
                raise to.broken(f"{heard!r} {at!r} {header!r}")
            got.append(body)

        name = f"{self.name}-{self.visits}"
        loop = Loop()
        connection = loop.add(Connection(self.port, on_message, name=name))
        connection.subscribe(subject, sid)
        return loop, connection, got

    def publish(self, to: Connection, subject: bytes, bodies: list[bytes]) -> None:
        to.send(b"".join(pub(subject, body) for body in bodies))

    def bodies(self, count: int, most: int) -> list[bytes]:
        return [b"%d " % n + bytes(self.chance.randrange(most)) for n in range(count)]

    def expect(self, loop: Loop, it: Connection, got: list[bytes], wanted: list[bytes]) -> None:
        loop.until(lambda: len(got) >= len(wanted), f"{it.name}: {len(wanted)} messages")
        loop.sync()
        if got != wanted:
            raise it.broken(f"{len(got)} messages, {len(wanted)} wanted, or not the same ones")
        self.sent += len(wanted)
        self.received += len(wanted)

    # Ways to come and go

    def polite(self, subject: bytes) -> None:
        """Talks to itself, says that it goes, goes."""
        loop, it, got = self.visit(subject)
        wanted = self.bodies(self.chance.randint(1, 60), self.chance.choice((10, 300, 9000)))
        self.publish(it, subject, wanted)
        self.expect(loop, it, got, wanted)
        if self.chance.random() < 0.5:
            it.send(b"UNSUB 1\r\n")
            loop.sync()
        it.close()

    def partner(self, subject: bytes) -> None:
        """Talks to one who stays, and goes without a word."""
        loop, it, got = self.visit(subject)
        wanted = self.bodies(self.chance.randint(1, 40), 200)
        it.send(b"".join(pub(self.echo, body, subject) for body in wanted))
        self.expect(loop, it, got, wanted)
        it.close()

    def limited(self, subject: bytes) -> None:
        """Asks for so many messages and no more."""
        loop, it, got = self.visit(subject)
        most = self.chance.randint(1, 30)
        it.send(b"UNSUB 1 %d\r\n" % most)
        wanted = self.bodies(most, 100)
        self.publish(it, subject, [*wanted, b"too", b"many"])
        self.expect(loop, it, got, wanted)
        it.close()

    def rude(self, subject: bytes) -> None:
        """Has much sent to itself, reads none of it, and goes, perhaps with a reset."""
        loop, it, _ = self.visit(subject)
        loop.sync()
        it.paused = True
        it.silent = False
        self.publish(it, subject, [bytes(self.chance.randrange(200_000)) for _ in range(12)])
        for _ in range(self.chance.randint(1, 20)):
            loop.turn(0.01)
        if self.chance.random() < 0.5:
            it.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        it.close()

    def half(self, subject: bytes) -> None:
        """Goes in the middle of a message."""
        loop, it, _ = self.visit(subject)
        loop.sync()
        size = self.chance.choice((10, 5000, 300_000))
        it.send(b"PUB %b %d\r\n%b" % (subject, size, bytes(self.chance.randrange(size))))
        loop.turn(0.0)
        it.close()

    def glance(self, subject: bytes) -> None:
        """Goes before it was greeted."""
        with socket.create_connection(("127.0.0.1", self.port), 60.0) as it:
            if self.chance.random() < 0.5:
                it.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def run(name: str, port: int, seed: int) -> None:
    """The visitors, and the one who stays and answers them."""
    orders = Orders()
    loop = Loop()
    loop.selector.register(0, selectors.EVENT_READ, orders.read)
    echo = b"%b.echo" % name.encode()

    def answer(
        to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        to.send(pub(reply, body))

    stays = loop.add(Connection(port, answer, name=f"{name}-echo"))
    stays.subscribe(echo, b"e")
    loop.sync()
    visitors = [Visitor(f"{name}v{at}", port, seed * 101 + at, echo) for at in range(THREADS)]
    for visitor in visitors:
        visitor.start()
    say("ready", connections=1)
    while any(visitor.is_alive() for visitor in visitors):
        loop.turn(0.05)
        for visitor in visitors:
            while visitor.turned_away:
                say("turned away", why=visitor.turned_away.pop())
            if visitor.broken is not None:
                raise visitor.broken
            if orders.stop:
                visitor.stopping.set()
    for visitor in visitors:
        if visitor.broken is not None:
            raise visitor.broken
    loop.sync()
    kinds = sum((visitor.kinds for visitor in visitors), Counter[str]())
    say(
        "drained",
        sent=sum(visitor.sent for visitor in visitors),
        received=sum(visitor.received for visitor in visitors),
        visits=sum(visitor.visits for visitor in visitors),
        kinds=dict(kinds),
        ports=[stays.port],
        subs=1,
    )
    while not orders.close:
        loop.turn(0.2)
    loop.sync()
    stays.close()
    say("closed")
