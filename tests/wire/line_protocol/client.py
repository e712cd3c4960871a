"""A client of the line protocol (line.c)."""

from __future__ import annotations

import socket
from typing import Self

PATIENCE_S = 20.0


class Line:
    """One connection; what it gets is a list of lines without their ends."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *lines: bytes) -> None:
        self.sock.sendall(b"".join(line + b"\n" for line in lines))

    def line(self) -> bytes:
        """The next one; b"" at the end of the stream."""
        while b"\n" not in self._rest:
            got = self.sock.recv(1 << 16)
            if not got:
                return b""
            self._rest += got
        found, _, self._rest = self._rest.partition(b"\n")
        return found

    def lines(self, count: int) -> list[bytes]:
        return [self.line() for _ in range(count)]

    def sync(self) -> list[bytes]:
        """What comes before the answer to a Q."""
        self.send(b"Q")
        got = []
        while (line := self.line()) != b"A":
            assert line, "the connection is closed"
            got.append(line)
        return got
