"""Tables that clients share: what one connection may take of each, in the units the table has.

Everything is real but the processes (bench/rig.py).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from bench.rig import CONFIG, Rig, RigError

TABLE = 1024
KEPT = TABLE // 4  # subtable_may_add()
INLINE, CELL = 64, 96  # bytes of a sid: in its record, and in each cell behind it
REFUSED = b"-ERR 'maximum subscriptions exceeded'\r\n"
PONG = b"PONG\r\n"
CONF = CONFIG.with_("connmgr", subscriptions=TABLE)
FEW = CONF.subscriptions_few


@pytest.fixture(name="rig")
def make_rig() -> Iterator[Rig]:
    with Rig(config=CONF) as rig:
        yield rig


def say(rig: Rig, client: socket.socket, *lines: bytes) -> bytes:
    """What the client is told, up to the answer to a PING or the reason why it is closed."""
    rig.send(client, b"".join(line + b"\r\n" for line in (*lines, b"PING")))
    client.setblocking(False)
    got = b""
    for _ in range(1000):
        with contextlib.suppress(RigError):  # raised when it is closed
            rig.turn_connmgr()
        rig.turn_router()
        with contextlib.suppress(BlockingIOError):
            got += client.recv(65536)
        if got.endswith((PONG, REFUSED)):
            client.setblocking(True)
            return got
    raise AssertionError(f"no answer, but {got[-200:]!r}")


def sid(number: int, slots: int) -> bytes:
    """One that takes so many slots of the table, with its subscription."""
    return b"%0*d" % (INLINE + CELL * (slots - 1) if slots > 1 else 4, number)


def fill(rig: Rig, count: int) -> socket.socket:
    """A client that has so many slots of the table of subscriptions, most of them of sids."""
    client = rig.open()
    each = 32
    whole, rest = divmod(count, each)
    for n in range(whole):
        assert say(rig, client, b"SUB s %s" % sid(n, each)) == PONG
    assert say(rig, client, *(b"SUB s %s" % sid(n, 1) for n in range(rest))) == PONG
    return client


# ---- subscriptions of a connmgr ----


def test_a_long_sid_counts_for_the_slots_it_takes(rig: Rig) -> None:
    """What is kept for clients with few cannot be taken by few subscriptions with long sids."""
    fill(rig, TABLE - KEPT)
    for n in range(8):
        assert say(rig, rig.open(), b"SUB s %s" % sid(n, FEW + 1)) == REFUSED
    modest = [rig.open() for _ in range(KEPT // FEW)]
    for client in modest:
        assert say(rig, client, b"SUB s %s" % sid(0, FEW - 1), b"SUB s 1") == PONG
    assert say(rig, modest[0], b"SUB s 2") == REFUSED


def test_what_a_long_sid_took_comes_back_with_it(rig: Rig) -> None:
    fill(rig, TABLE - KEPT)
    client = rig.open()
    for n in range(20):
        long = sid(n, FEW)
        assert say(rig, client, b"SUB s %s" % long) == PONG
        assert say(rig, client, b"UNSUB %s" % long) == PONG
    assert say(rig, client, *(b"SUB s %d" % n for n in range(FEW))) == PONG
    assert say(rig, client, b"SUB s last") == REFUSED


def test_nobody_can_tell_which_sids_share_a_bucket() -> None:
    """Each connmgr draws a key of its own: sids chosen for one mean nothing to another."""
    sids = [b"%d" % n for n in range(64)]
    seen = []
    for _ in range(3):
        with Rig(config=CONF) as rig:
            seen.append([rig.connmgr.bucket(0, sid) for sid in sids])
            assert seen[-1] == [rig.connmgr.bucket(0, sid) for sid in sids]
            assert seen[-1] != [rig.connmgr.bucket(1, sid) for sid in sids]
            assert len(set(seen[-1])) > len(sids) // 2
    assert seen[0] != seen[1] != seen[2] != seen[0]


# ---- text of subscriptions, in the router ----


@pytest.mark.parametrize("again", [False, True], ids=["same router", "successor"])
def test_a_client_has_its_share_of_the_text_and_no_more(again: bool) -> None:
    """A quarter of 65,536 cells of 124 bytes; the first 72 bytes of a subject take none."""
    conf = CONFIG.with_("router", subjects=2**15)
    most, each = 65536 // 4, 30
    subject = b"%0*d"
    with Rig(config=conf) as rig:
        client, count = rig.open(), most // each
        for at in range(0, count, 10):
            lines = range(at, min(at + 10, count))
            told = say(
                rig, client, *(b"SUB %s %d" % (subject % (72 + 124 * each, n), n) for n in lines)
            )
            assert told == PONG
        if again:
            rig.router = rig.successor()
            rig.router.start()
        assert say(rig, client, b"UNSUB 0", b"SUB %s 0" % (subject % (72 + 124 * each, 0))) == PONG
        assert say(rig, rig.open(), b"SUB %s 1" % (b"v" * 1000)) == PONG
        assert say(rig, client, b"SUB %s last" % (subject % (72 + 124 * each, count))) == REFUSED
