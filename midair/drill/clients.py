"""The clients of the drill, one process each: `python -m midair.drill.clients KIND HOST PORT ...`.

    publishers   connections that send numbered messages at a steady pace, each with the time at
                 which it was meant to be sent
    subscribers  one connection for each publisher's subject, and one for all of them, that check
                 every number

Nobody connects again: a connection that ends is a broken promise, and is counted. Questions come as
lines of JSON on stdin, answers go to stdout.
"""

from __future__ import annotations

import selectors
import sys
import time

from midair.client import wire_nats
from midair.client.wire_nats import Message, Polled, hpub, sub
from midair.process.questions import Questions, say

SUBJECT = b"drill.%d"
HELLO_S = 60.0
TURN_S = 0.05


class Connection(Polled):
    """One connection; `ended` once it is gone."""

    def __init__(self, host: str, port: int, name: str, subscription: bytes = b"") -> None:
        self.ended = False
        hello = wire_nats.connect(name=name) + subscription
        super().__init__(host, port, hello, synced=True, timeout_s=HELLO_S)

    def poll(self) -> list[Message]:
        """What has come; PINGs are answered."""
        try:
            self.receive()
        except OSError:
            self.ended = True
        found = []
        for frame in self.reader:
            if isinstance(frame, Message):
                found.append(frame)
            elif frame == b"PING":
                self.send(wire_nats.PONG)
            else:
                raise ValueError(f"not what was to come: {frame!r}")
        return found

    def write(self) -> None:
        if not self.ended:
            try:
                super().write()
            except OSError:
                self.ended = True


def publishers(host: str, port: int, count: int, rate: float, size: int) -> None:
    """Message n of all is due at start + n / rate, whatever happens."""
    lines = [Connection(host, port, f"drill-publisher-{at}") for at in range(count)]
    questions, selector = Questions(), selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    for line in lines:
        selector.register(line.socket, selectors.EVENT_READ, line)
    say(ready=True)
    sent, start_ns, stopped = 0, time.monotonic_ns(), False
    body = b"x" * max(0, size - 17)
    while True:
        now_ns, due = time.monotonic_ns(), [b""] * count
        while not stopped and (due_ns := start_ns + int(sent / rate * 1e9)) <= now_ns:
            at, number = sent % count, sent // count
            head = b"NATS/1.0\r\nMidair-Intended: %d\r\n\r\n" % due_ns
            text = b"%016d " % number + body
            due[at] += hpub(SUBJECT % at, head, text)
            sent += 1
        for line, data in zip(lines, due, strict=True):
            if data:
                line.send(data)
            elif line.out:
                line.write()
        next_s = (start_ns + sent / rate * 1e9 - time.monotonic_ns()) / 1e9
        for key, _ in selector.select(TURN_S if stopped else max(0.0, min(TURN_S, next_s))):
            if key.data is None:
                for asked in questions.read():
                    stopped = stopped or bool(asked.get("stop"))
                    waiting = sum(line.out_bytes for line in lines)
                    ended = sum(line.ended for line in lines)
                    numbers = [sent // count + (at < sent % count) for at in range(count)]
                    say(sent=sent, numbers=numbers, waiting=waiting, ended=ended)
                continue
            line = key.data
            if got := line.poll():
                raise ValueError(f"nothing was to come: {got[0]!r}")
            if line.ended:
                selector.unregister(line.socket)


class Stream:
    """What one subscriber has got of one publisher."""

    def __init__(self) -> None:
        self.next = 0
        self.missing: set[int] = set()
        self.got = self.doubled = self.reordered = 0

    def add(self, number: int) -> None:
        self.got += 1
        if number == self.next:
            self.next += 1
        elif number > self.next:
            self.missing.update(range(self.next, number))
            self.next = number + 1
        elif number in self.missing:
            self.missing.remove(number)
            self.reordered += 1
        else:
            self.doubled += 1

    def lost(self, sent: int) -> int:
        return len(self.missing) + max(0, sent - self.next)


def take(line: Connection, streams: list[Stream]) -> None:
    """Counts the messages that have come whole."""
    for message in line.poll():
        if not message.headers:
            raise ValueError(f"not what was to come: {message!r}")
        publisher = int(message.subject.rpartition(b".")[2])
        streams[publisher].add(int(message.body[:16]))


def subscribers(host: str, port: int, count: int) -> None:
    subjects = [*(SUBJECT % at for at in range(count)), b"drill.*"]
    lines = [
        Connection(host, port, f"drill-subscriber-{at}", sub(subject, b"1"))
        for at, subject in enumerate(subjects)
    ]
    streams = [[Stream() for _ in range(count)] for _ in lines]
    questions, selector = Questions(), selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    for at, line in enumerate(lines):
        selector.register(line.socket, selectors.EVENT_READ, (line, streams[at]))
    say(ready=True)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                for asked in questions.read():
                    say(**_found(lines, streams, asked.get("numbers")))
                continue
            line, got = key.data
            take(line, got)
            if line.ended:
                selector.unregister(line.socket)


def _found(
    lines: list[Connection], streams: list[list[Stream]], numbers: list[int] | None
) -> dict[str, int]:
    every = [stream for each in streams for stream in each]
    found = {
        "delivered": sum(stream.got for stream in every),
        "doubled": sum(stream.doubled for stream in every),
        "reordered": sum(stream.reordered for stream in every),
        "ended": sum(line.ended for line in lines),
    }
    if numbers is not None:
        *own, everything = streams
        found["lost"] = sum(
            own[at][at].lost(sent) + everything[at].lost(sent) for at, sent in enumerate(numbers)
        )
        found["strays"] = sum(
            own[at][other].got for at in range(len(own)) for other in range(len(own)) if other != at
        )
    return found


def main() -> None:
    kind, host, port, *more = sys.argv[1:]
    if kind == "publishers":
        publishers(host, int(port), int(more[0]), float(more[1]), int(more[2]))
    else:
        subscribers(host, int(port), int(more[0]))


if __name__ == "__main__":
    main()
