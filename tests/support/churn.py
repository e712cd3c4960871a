"""`python -m tests.support.churn HOST PORT SEED COUNT`: connections come and go in every way.

Up to 20 are open at a time. Each goes as far as chance takes it: connected, greeted, subscribed
(also to what the steady pair of the test exchanges, unread), publishing, half a frame sent; then
it is closed, or reset, or half closed and read to its end. Prints how many it has ended.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys

OPEN_MAX = 20
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


def begin(address: tuple[str, int], chance: random.Random, number: int) -> socket.socket:
    """A connection that has gone as far as chance takes it."""
    client = socket.create_connection(address, timeout=60)
    stage = chance.randrange(6)
    with contextlib.suppress(ConnectionError):
        if stage >= 1:
            client.recv(4096)  # INFO
        if stage >= 2:
            client.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        if stage >= 3:
            client.sendall(b"SUB churn.> 1\r\nSUB steady.* 2\r\nSUB churn.q group 3\r\n")
        if stage >= 4:
            body = chance.randbytes(chance.choice((0, 100, 5000, 50_000, 150_000)))
            frame = b"PUB churn.%d %d\r\n%b\r\n" % (number, len(body), body)
            client.sendall(
                frame * 2 if stage == 4 else frame + frame[: chance.randrange(len(frame))]
            )
    return client


def end(client: socket.socket, chance: random.Random) -> None:
    with contextlib.suppress(ConnectionError), client:
        how = chance.randrange(3)
        if how == 0:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif how == 1:
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass


def main() -> None:
    host, port, seed, count = sys.argv[1], *map(int, sys.argv[2:5])
    chance = random.Random(seed)
    opened: list[socket.socket] = []
    ended = 0
    for number in range(count):
        opened.append(begin((host, port), chance, number))
        while len(opened) > chance.randrange(OPEN_MAX):
            end(opened.pop(chance.randrange(len(opened))), chance)
            ended += 1
    for client in opened:
        end(client, chance)
        ended += 1
    print(ended)


if __name__ == "__main__":
    main()
