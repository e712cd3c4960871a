"""Servers that speak just enough NATS and break their promise on one chosen message."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

Fault = Callable[[int, bytes, list[bytes]], list[bytes]]


def obey(_number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    return [frame]


def drop(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    return [] if number == 40 else [frame]


def duplicate(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    return [frame, frame] if number == 40 else [frame]


def duplicate_last(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    return [frame, frame] if number == 99 else [frame]


def swap(number: int, frame: bytes, held: list[bytes]) -> list[bytes]:
    if number == 40:
        held.append(frame)
        return []
    return [frame, held.pop()] if held else [frame]


def replay_much_later(number: int, frame: bytes, held: list[bytes]) -> list[bytes]:
    if number == 40:
        held.append(frame)
    return [frame, held.pop()] if number == 90 else [frame]


def flip_last_byte(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    return [frame[:-3] + b"!\r\n"] if number == 40 else [frame]


def flip_publisher(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    at = frame.index(b"\r\n") + 2
    return [frame[: at + 4] + b"\xff" + frame[at + 5 :]] if number == 40 else [frame]


def truncate(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
    if number != 40:
        return [frame]
    line, body = frame.split(b"\r\n", 1)
    return [line.replace(b" 64", b" 63") + b"\r\n" + body[:-3] + b"\r\n"]


@dataclass
class Client:
    """One connection of the server below."""

    sock: socket.socket
    buffer: bytes = b""
    subjects: dict[bytes, bytes] = field(default_factory=dict)


class Faulty:
    """INFO, CONNECT, SUB, PING and PUB on one port, in one thread; `fault` edits each delivery."""

    def __init__(
        self, fault: Fault, silent: bool = False, deaf_after: int | None = None, fuss: str = ""
    ) -> None:
        self.fault = fault
        self.silent = silent
        self.deaf_after = deaf_after
        self.fuss = fuss
        self.published = 0
        self.held: list[bytes] = []
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.stopping, self.stopper = socket.socketpair()
        self.clients: list[Client] = []
        self.thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.selector.register(self.stopping, selectors.EVENT_READ, None)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopper.send(b"x")
        self.thread.join()
        for client in self.clients:
            client.sock.close()
        for sock in (self.listener, self.stopping, self.stopper):
            sock.close()
        self.selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.stopping:
                    return
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        client = Client(self.listener.accept()[0])
        self.clients.append(client)
        if not self.silent:
            client.sock.sendall(b'INFO {"server_name":"faulty","version":"0"}\r\n')
        self.selector.register(client.sock, selectors.EVENT_READ, client)

    def _read(self, client: Client) -> None:
        try:
            data = client.sock.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.selector.unregister(client.sock)
            client.subjects.clear()
            return
        client.buffer += data
        while self._frame(client):
            pass

    def _frame(self, client: Client) -> bool:
        """Handles one frame; returns False when there is no whole one."""
        line, end, rest = client.buffer.partition(b"\r\n")
        if not end:
            return False
        words = line.split()
        if words[0] == b"PUB":
            size = int(words[-1])
            if len(rest) < size + 2:
                return False
            self._publish(words[1], words[2] if len(words) == 4 else b"", rest[:size])
            rest = rest[size + 2 :]
        elif words[0] == b"SUB":
            client.subjects[words[1]] = words[-1]
        elif words[0] == b"PING" and not self._deaf():
            client.sock.sendall(b"PONG\r\n")
        client.buffer = rest
        return True

    def _deaf(self) -> bool:
        return self.deaf_after is not None and self.published >= self.deaf_after

    def _publish(self, subject: bytes, reply: bytes, body: bytes) -> None:
        number = self.published
        self.published += 1
        if self._deaf():
            return
        for client in [c for c in self.clients if subject in c.subjects]:
            if self.fuss and number == 40:
                client.sock.sendall(self.fuss.encode())
                client.sock.shutdown(socket.SHUT_RDWR)
                return
            words = [b"MSG", subject, client.subjects[subject], reply, b"%d" % len(body)]
            frame = b" ".join(word for word in words if word) + b"\r\n" + body + b"\r\n"
            pieces = self.fault(number, frame, self.held)
            try:
                client.sock.sendall(b"".join(pieces))
            except OSError:
                client.subjects.clear()


# ---- wildcards and queue groups --------------------------------------------------------------


@dataclass
class Subscription:
    client: Client
    pattern: list[bytes]
    queue: bytes
    sid: bytes


def matches(pattern: list[bytes], subject: list[bytes]) -> bool:
    if pattern[-1] == b">":
        return pattern[:-1] == subject[: len(pattern) - 1] and len(subject) >= len(pattern)
    return len(pattern) == len(subject) and all(
        wanted in (b"*", word) for wanted, word in zip(pattern, subject, strict=True)
    )


Route = list[tuple[Subscription, bytes, bytes]]  # to whom, on which subject, what
MixedFault = Callable[[int, Route, list[Subscription]], Route]


class Mixed(Faulty):
    """Wildcards and queue groups; `fault` edits the deliveries of a message."""

    def __init__(self, fault: MixedFault) -> None:
        super().__init__(obey)
        self.mixed_fault = fault
        self.subscriptions: list[Subscription] = []

    def _frame(self, client: Client) -> bool:
        line, end, rest = client.buffer.partition(b"\r\n")
        words = line.split()
        if not end or words[0] != b"SUB":
            return super()._frame(client)
        queue = words[2] if len(words) == 4 else b""
        self.subscriptions.append(Subscription(client, words[1].split(b"."), queue, words[-1]))
        client.buffer = rest
        return True

    def _publish(self, subject: bytes, reply: bytes, body: bytes) -> None:
        number = self.published
        self.published += 1
        words = subject.split(b".")
        found = [it for it in self.subscriptions if matches(it.pattern, words)]
        route = [(it, subject, body) for it in found if not it.queue]
        for queue in sorted({it.queue for it in found} - {b""}):
            members = [it for it in found if it.queue == queue]
            route.append((members[number % len(members)], subject, body))
        for it, on, what in self.mixed_fault(number, route, self.subscriptions):
            head = b"MSG %s %s %d\r\n" % (on, it.sid, len(what))
            it.client.sock.sendall(head + what + b"\r\n")
