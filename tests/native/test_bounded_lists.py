"""Lists of recipients that were made and came to nothing: the next message has one of its own.

Everything is real but the processes (bench/rig.py). The ring of the connection manager is full as
long as it has no turn, and then a list has no room for its first piece.
"""

from __future__ import annotations

import socket

from bench.rig import Rig
from tests.crash.modes import hpub
from tests.native.test_bounded import LARGE, subscribe
from tests.support.instance import eventually

CONFIG = LARGE.with_("router", subjects=2**17)
LONG = 50_000  # recipients: more than half a ring can name


def crowd(rig: Rig, count: int, subject: bytes) -> socket.socket:
    client = rig.open()
    subscribe(rig, client, count, subject)
    return client


def flood(count: int) -> bytes:
    """Messages to `q`, each of another size than the one before it: no runs."""
    bodies = (b"x" * (n % 7 + 1) for n in range(count))
    return b"".join(b"PUB q %d\r\n%s\r\n" % (len(it), it) for it in bodies)


def fill(rig: Rig, busy: socket.socket, last: socket.socket, said: bytes) -> None:
    """Orders for which the connection manager has no turn; behind them what `last` says."""
    rig.send(busy, flood(100))
    rig.send(last, said)
    rig.turn_connmgr()
    for _ in range(20):
        rig.turn_router()


def take_all(rig: Rig, publisher: socket.socket, *clients: socket.socket) -> list[bytes]:
    """What each has got when the publisher has its PONG."""
    data = [b""] * len(clients)
    said = b""
    while not said.endswith(b"PONG\r\n"):
        rig.turn_connmgr()
        rig.turn_router()
        said += rig.peek(publisher)
        data = [had + rig.peek(client) for had, client in zip(data, clients, strict=True)]
    return data


def test_the_list_of_a_message_that_expired_is_not_that_of_the_next() -> None:
    """It was made, nobody had got anything when the deadline passed, and it was refused."""
    with Rig(config=CONFIG) as rig:
        secret, other = crowd(rig, LONG, b"secret"), crowd(rig, LONG, b"other")
        crowd(rig, 1000, b"q")
        busy, publisher = rig.open(), rig.open()
        lists = rig.router.stats()["lists"]
        fill(rig, busy, publisher, hpub(b"secret", b"", b"1", deadline="500"))
        assert rig.router.stats()["lists"] == lists + 1

        def expired() -> bool:
            rig.turn_router()
            return rig.router.stats()["mode_expired"] == 1

        eventually(expired, "the deadline passes")
        rig.send(publisher, b"PUB other 1\r\n2\r\nPING\r\n")
        to_secret, to_other = take_all(rig, publisher, secret, other)
        assert to_secret == b""
        assert to_other.count(b"MSG other ") == to_other.count(b" 1\r\n2\r\n") == LONG
        assert rig.router.stats()["lists"] == lists + 2


def test_the_list_of_a_message_whose_recipients_left_is_not_that_of_the_next() -> None:
    """A message to several topics: before its first piece everybody who listened has gone."""
    with Rig(config=CONFIG) as rig:
        gone, other = crowd(rig, 2000, b"gone.*"), crowd(rig, LONG, b"other")
        crowd(rig, 1000, b"q")
        busy, publisher = rig.open(), rig.open()
        lists = rig.router.stats()["lists"]
        fill(rig, busy, publisher, hpub(b"gone.1", b"", b"1", topics="gone.2"))
        assert rig.router.stats()["lists"] == lists + 1
        rig.leave(gone)
        rig.send(publisher, b"PUB other 1\r\n2\r\nPING\r\n")
        (to_other,) = take_all(rig, publisher, other)
        assert to_other.count(b"MSG other ") == to_other.count(b" 1\r\n2\r\n") == LONG
        assert rig.live() == 0
