"""The clients of bench.pauses, one process each: `python -m bench.pauses_clients KIND ...`.

    publisher  one connection, numbered messages at a steady pace
    subscriber one connection, notes when each of them arrives
    crowd      many connections with many subscriptions, on which nothing happens
    knocker    connects, says PING, leaves, again and again

All of them reconnect at once and by themselves when their connection ends, and count it. What
the publisher has not written yet is written after that, as client libraries do. Questions
come as lines of JSON on stdin, answers go to stdout. Times are CLOCK_MONOTONIC in seconds,
which all processes of a machine share.
"""

from __future__ import annotations

import bisect
import itertools
import select
import selectors
import socket
import sys
import time
from collections import deque
from typing import Any

from midair.client.wire_nats import PONG, Message, Polled, RefusedError, connect, pub, sub
from midair.drill.clients import Stream
from midair.process.questions import Questions, say

SUBJECT = b"pauses.stream"
BODY = b"%016d"
CONNECT = connect(no_responders=False, name="pauses")
RETRY_S = 0.01
PATIENCE_S = 60.0


class Line:
    """A connection that is made again when it ends."""

    def __init__(self, port: int, hello: bytes) -> None:
        self.port = port
        self.hello = CONNECT + hello  # what is said every time
        self.drops = -1
        self.refusals = 0
        self.wire = self.connect()

    @property
    def socket(self) -> socket.socket:
        return self.wire.socket

    @property
    def fd(self) -> int:
        return self.wire.socket.fileno()

    def connect(self) -> Polled:
        """Tries until it is connected and greeted, and its hello is answered."""
        self.drops += 1
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.wire = Polled(
                    "127.0.0.1", self.port, self.hello, synced=True, timeout_s=PATIENCE_S
                )
                return self.wire
            except RefusedError as error:
                raise ValueError(f"not a greeting: {error}") from error
            except OSError:
                self.refusals += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def read(self) -> bool:
        """Takes what has come; False: the connection ended, and was made again."""
        try:
            self.wire.receive()
        except OSError:
            self.wire.close()
            self.connect()
            return False
        return True

    def messages(self) -> list[Message]:
        """Those that have come whole. PINGs are answered."""
        found = []
        for frame in self.wire.reader:
            if isinstance(frame, Message):
                found.append(frame)
            elif frame == b"PING":
                self.wire.send(PONG)
            else:
                raise ValueError(f"not what was to come: {frame!r}")
        return found

    def answer_pings(self) -> None:
        """When nothing else can come."""
        if found := self.messages():
            raise ValueError(f"nothing was to come: {found[0]!r}")


def publisher(port: int, rate: float) -> None:
    """Message n is due at start + n / rate, whatever happens."""
    line, questions = Line(port, b""), Questions()
    waiting: deque[bytes] = deque()
    taken = 0  # bytes of the first that the kernel has taken
    start, number = time.monotonic(), 0
    say(ready=True)
    while True:
        now = time.monotonic()
        while start + number / rate <= now:
            waiting.append(pub(SUBJECT, BODY % number))
            number += 1
        while waiting:
            try:
                taken += line.socket.send(waiting[0][taken:])
            except BlockingIOError:
                break
            except OSError:
                line.socket.close()
                line.connect()
                taken = 0
                continue
            if taken == len(waiting[0]):
                waiting.popleft()
                taken = 0
        wait_s = start + number / rate - time.monotonic()
        ready, _, _ = select.select([0, line.fd], [], [], max(0.0, wait_s))
        if 0 in ready:
            for _ in questions.read():
                say(number=number - len(waiting), drops=line.drops)
        if line.fd in ready:
            if line.read():
                line.answer_pings()
            else:
                taken = 0


class Arrivals(Stream):
    """When messages arrived, and which did not."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []  # of each read that brought something

    def read(self, now: float, numbers: list[int]) -> None:
        self.times.append(now)
        for number in numbers:
            self.add(number)

    def gap_s(self, since: float, until: float) -> float:
        """The longest time without a delivery that overlaps with these moments."""
        first = max(0, bisect.bisect_left(self.times, since) - 1)
        last = bisect.bisect_right(self.times, until) + 1
        times = self.times[first:last]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def take(line: Line) -> list[int]:
    """The numbers of the messages that have come whole."""
    numbers = []
    for message in line.messages():
        numbers.append(int(message.body))
        if message != Message(SUBJECT, b"1", b"", b"", BODY % numbers[-1]):
            raise ValueError(f"not the message that was to come: {message!r}")
    return numbers


def subscriber(port: int) -> None:
    line, questions, arrivals = Line(port, sub(SUBJECT, b"1")), Questions(), Arrivals()
    say(ready=True)
    while True:
        ready, _, _ = select.select([0, line.fd], [], [], 1.0)
        if line.fd in ready:
            line.read()
            if numbers := take(line):
                arrivals.read(time.monotonic(), numbers)
        if 0 in ready:
            for asked in questions.read():
                say(
                    next=arrivals.next,
                    gap_s=arrivals.gap_s(asked["since"], asked["until"]),
                    lost=len(arrivals.missing),
                    duplicated=arrivals.doubled,
                    reordered=arrivals.reordered,
                    drops=line.drops,
                )


def crowd(port: int, connections: int, subscriptions: int) -> None:
    each = subscriptions // connections
    lines = [
        Line(port, b"".join(sub(b"crowd.%d.%d" % (at, n), b"%d" % n) for n in range(each)))
        for at in range(connections)
    ]
    questions = Questions()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    for line in lines:
        selector.register(line.socket, selectors.EVENT_READ, line)
    say(ready=True)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                for _asked in questions.read():
                    say(drops=sum(line.drops for line in lines))
                continue
            old = key.data.socket
            selector.unregister(old)
            if key.data.read():
                key.data.answer_pings()
            selector.register(key.data.socket, selectors.EVENT_READ, key.data)


def knocker(port: int, pause_s: float) -> None:
    """Visits one after the other: (began, greeted)."""
    questions = Questions()
    visits: list[tuple[float, float]] = []
    refusals = 0
    say(ready=True)
    while True:
        began = time.monotonic()
        line = Line(port, b"")
        visits.append((began, time.monotonic()))
        refusals += line.refusals
        line.socket.close()
        ready, _, _ = select.select([0], [], [], pause_s)
        if ready:
            for asked in questions.read():
                took = [
                    end - start
                    for start, end in visits
                    if end >= asked["since"] and start <= asked["until"]
                ]
                say(connect_s=max(took, default=0.0), refusals=refusals)


KINDS: dict[str, Any] = {
    "publisher": publisher,
    "subscriber": subscriber,
    "crowd": crowd,
    "knocker": knocker,
}


def main() -> None:
    kind, port, *more = sys.argv[1:]
    KINDS[kind](int(port), *(float(word) if "." in word else int(word) for word in more))


if __name__ == "__main__":
    main()
