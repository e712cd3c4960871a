"""How connections end: which phase may follow which, and what a client is told."""

from __future__ import annotations

from contextlib import closing

import pytest

from native import lib
from tests.support.instance import start
from tests.support.stream import Stream

# From docs/architecture.md: a connection's phases, and those that may follow.
FOLLOWS = {
    lib.PHASE_NONE: {lib.PHASE_OPENING},
    lib.PHASE_OPENING: {lib.PHASE_GREETED, lib.PHASE_CLOSING},
    lib.PHASE_GREETED: {lib.PHASE_OPEN, lib.PHASE_LINGER, lib.PHASE_CLOSING},
    lib.PHASE_OPEN: {lib.PHASE_GREETED, lib.PHASE_LINGER, lib.PHASE_CLOSING},
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
