"""How connections end: which phase may follow which, and what a client is told."""

from __future__ import annotations

import os
import signal
import socket
import struct
from contextlib import closing

import pytest

from midair import names
from midair.keeper.client import KeeperClient
from native import lib
from native.conntable import ConnTable
from native.stats import CLOSE_REASONS, Reader
from tests.support.instance import eventually, start
from tests.support.stream import Stream

TCP_CLOSE = 7  # linux/tcp_states.h
# From docs/architecture.md: a connection's phases, and those that may follow.
FOLLOWS = {
    lib.PHASE_NONE: {lib.PHASE_OPENING},
    lib.PHASE_OPENING: {lib.PHASE_GREETED, lib.PHASE_CLOSING},
    lib.PHASE_GREETED: {
        lib.PHASE_OPEN,
        lib.PHASE_FINISHING,
        lib.PHASE_LINGER,
        lib.PHASE_CLOSING,
    },
    lib.PHASE_OPEN: {
        lib.PHASE_GREETED,
        lib.PHASE_FINISHING,
        lib.PHASE_LINGER,
        lib.PHASE_CLOSING,
    },
    lib.PHASE_FINISHING: {lib.PHASE_LINGER, lib.PHASE_CLOSING},
    lib.PHASE_LINGER: {lib.PHASE_CLOSING},
    lib.PHASE_CLOSING: {lib.PHASE_NONE},
}


def test_a_phase_follows_only_those_it_may_follow() -> None:
    assert set(FOLLOWS) == set(range(lib.PHASES))
    for before in range(lib.PHASES + 1):
        may = {after for after in range(lib.PHASES + 1) if lib.conn_may_follow(before, after)}
        assert may == FOLLOWS.get(before, set())


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_a_subscription_that_the_router_has_no_room_for_is_told(
    request: pytest.FixtureRequest, connmgrs: int
) -> None:
    """The index of the router is full: the client is told, as for a limit of its connmgr.

    Its PING is behind the subscription, so no PONG may come before.
    """
    config = "[router]\nsubjects = 1024\n"
    instance = start(request.node.nodeid, config, "--connmgrs", str(connmgrs))
    try:
        with closing(Stream(instance.host, instance.port)) as full:
            full.send(b"".join(b"SUB full.%d %d\r\n" % (n, n) for n in range(5000)) + b"PING\r\n")
            said = full.to_end()
            assert said == b"-ERR 'maximum subscriptions exceeded'\r\n"
        with closing(Stream(instance.host, instance.port)) as other:  # what it had is gone
            other.sub(b"full.1", b"1")
            assert other.sync() == []
    finally:
        instance.stop()
    assert " died" not in instance.stderr()


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_a_client_that_left_while_its_connmgr_was_away_is_no_matter_for_the_log(
    request: pytest.FixtureRequest, connmgrs: int
) -> None:
    """FIN, then a reset, and somebody has read the error of the socket since: the kernel's counts
    are one off, and nobody is there for whom that would matter."""
    instance = start(request.node.nodeid, "", "--connmgrs", str(connmgrs))
    try:
        client = socket.create_connection((instance.host, instance.port))
        assert client.recv(4096).startswith(b"INFO ")
        table = ConnTable.attach(instance.runtime)
        [(uid, index)] = [(slot.uid, slot.connmgr) for slot in table.used()]
        table.close()
        pid = instance.pid(f"connmgr/{index}")
        os.kill(pid, signal.SIGSTOP)
        client.shutdown(socket.SHUT_WR)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with closing(KeeperClient(instance.runtime.socket(names.KEEPER_SOCKET))) as keeper:
            [(_, fd)] = keeper.give([uid])
        with socket.socket(fileno=fd) as copy:

            def is_reset() -> bool:
                return copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE

            eventually(is_reset, "the reset has arrived")
            copy.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        os.kill(pid, signal.SIGKILL)

        def ended() -> bool:
            counts = Reader(instance.runtime, names.CONNMGR, index).counts()
            return counts.totals["closed"][CLOSE_REASONS.index("client")] == 1

        eventually(ended, "it counts as one that left")
        with closing(Stream(instance.host, instance.port)) as other:
            assert other.sync() == []
    finally:
        instance.stop()
    assert "Bad message" not in instance.stderr()
    assert "connection " not in instance.stderr()
