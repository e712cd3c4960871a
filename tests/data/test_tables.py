"""Tables of fixed size: no client takes what others need, and that one gets full is said, once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from midair import config
from midair.client.wire_nats import msg, pub
from midair.process import events
from midair.process.tables import Tables
from native.connmgr import BLOCKS_KEPT
from tests.support.instance import Instance, eventually
from tests.support.stream import Stream

Make = Callable[..., Instance]
TABLE = 1024
SMALL = f"[connmgr]\nsubscriptions = {TABLE}\n"
REFUSED = b"-ERR 'maximum subscriptions exceeded'\r\n"


def subs(first: int, count: int) -> bytes:
    return b"".join(b"SUB s.%d %d\r\n" % (n, n) for n in range(first, first + count))


def said(instance: Instance, table: str) -> list[tuple[str, bool]]:
    """(component, whether it was full) of each event about it."""
    return [
        (row["component"], row["details"]["full"])
        for row in events.read(instance.runtime)
        if row["kind"] == events.TABLE and row["details"]["table"] == table
    ]


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_one_client_cannot_take_all_subscriptions(make_midair: Make, connmgrs: int) -> None:
    instance = make_midair(SMALL, connmgrs=connmgrs)
    with closing(Stream(instance.host, instance.port)) as greedy:
        greedy.send(subs(0, TABLE // 2))
        assert greedy.sync() == []
        with ExitStack() as stack:
            for n in range(4):
                other = stack.enter_context(closing(Stream(instance.host, instance.port)))
                other.sub(b"other.%d" % n, b"1")
                assert other.sync() == []
        greedy.send(subs(TABLE // 2, 1) + b"PING\r\n")
        assert greedy.to_end() == REFUSED
    eventually(lambda: "too many subscriptions" in instance.stderr(), "the log says so")
    with closing(Stream(instance.host, instance.port)) as again:  # what it had is free
        again.send(subs(0, TABLE // 2))
        assert again.sync() == []


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_the_last_quarter_is_for_clients_with_few(make_midair: Make, connmgrs: int) -> None:
    """However many greedy ones there are; and it is said once for each connmgr."""
    instance = make_midair(SMALL, connmgrs=connmgrs)
    few = config.parse(SMALL).subscriptions_few
    with ExitStack() as stack:

        def client() -> Stream:
            return stack.enter_context(closing(Stream(instance.host, instance.port)))

        stayed = []
        for _ in range(6 * connmgrs):
            greedy = client()
            greedy.send(subs(0, TABLE // 4) + b"PING\r\n")
            if greedy.line() == b"PONG":
                stayed.append(greedy)
        assert len(stayed) == 3 * connmgrs
        modest = [client() for _ in range(8 * connmgrs)]
        for other in modest:
            other.send(subs(0, few))
            assert other.sync() == []
        with closing(Stream(instance.host, instance.port)) as there:
            there.send(pub(b"s.0", b"to all"))
            for other in (*stayed, *modest):
                other.expect(msg(b"s.0", b"0", b"to all"))
        parts = {f"connmgr/{n}" for n in range(connmgrs)}
        eventually(
            lambda: {who for who, _ in said(instance, "subscriptions")} == parts, "it is said"
        )
        assert sorted(said(instance, "subscriptions")) == [(who, False) for who in sorted(parts)]
    assert instance.stderr().count("subscriptions: nearly full") == connmgrs


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_what_long_sids_take_is_known_after_a_crash(make_midair: Make, connmgrs: int) -> None:
    """A client has as much of what is kept for those with few as before its connmgr was killed."""
    instance = make_midair(SMALL, connmgrs=connmgrs)
    few = config.parse(SMALL).subscriptions_few
    with ExitStack() as stack:

        def client() -> Stream:
            return stack.enter_context(closing(Stream(instance.host, instance.port)))

        for _ in range(3 * connmgrs):
            greedy = client()
            greedy.send(subs(0, TABLE // 4))
            assert greedy.sync() == []
        modest = [client() for _ in range(connmgrs)]
        for other in modest:
            other.send(b"SUB s %s\r\n" % (b"x" * (64 + 96 * (few - 2))))  # a slot less than few
            assert other.sync() == []
        for n in range(connmgrs):
            os.kill(instance.pid(f"connmgr/{n}"), signal.SIGKILL)
        for other in modest:
            other.send(subs(0, 1))
            assert other.sync() == []
            other.send(subs(1, 1) + b"PING\r\n")
            assert other.to_end() == REFUSED


def test_without_a_limit_one_client_may_have_all(make_midair: Make) -> None:
    text = f"[limits]\nmax_subscriptions = 0\n{SMALL}"
    instance = make_midair(text, connmgrs=1)
    with closing(Stream(instance.host, instance.port)) as greedy:
        greedy.send(subs(0, TABLE))
        assert greedy.sync() == []
        eventually(lambda: said(instance, "subscriptions")[-1:] == [("connmgr/0", True)], "full")
        with closing(Stream(instance.host, instance.port)) as other:
            other.send(b"SUB one 1\r\nPING\r\n")
            assert other.to_end() == REFUSED
    assert "subscriptions: full (1024 of 1024 in use; connmgr.subscriptions)" in instance.stderr()


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_that_there_are_too_many_connections_is_said_once(make_midair: Make, connmgrs: int) -> None:
    most = 8
    instance = make_midair(f"[limits]\nmax_connections = {most}\n", connmgrs=connmgrs)
    with ExitStack() as stack:
        for _ in range(most):
            client = stack.enter_context(closing(Stream(instance.host, instance.port)))
            assert client.sync() == []
        eventually(lambda: ("dispatcher", True) in said(instance, "connections"), "it is said")
        for _ in range(20):
            with pytest.raises(Exception, match="maximum connections"):
                Stream(instance.host, instance.port)
    full = [row for row in said(instance, "connections") if row[1]]
    assert full == [("dispatcher", True)]
    assert instance.stderr().count("connections: full") == 1
    done = instance.cli("status", "--name", instance.name)
    assert f"dispatcher connections full: {most} of {most} in use" in done.stdout


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_that_the_index_is_full_is_said_once(make_midair: Make, connmgrs: int) -> None:
    instance = make_midair("[router]\nsubjects = 1024\n", connmgrs=connmgrs)
    for _ in range(3):
        with closing(Stream(instance.host, instance.port)) as greedy:
            greedy.send(subs(0, 5000) + b"PING\r\n")
            assert greedy.to_end() == REFUSED
    eventually(lambda: ("router", True) in said(instance, "index of subjects"), "it is said")
    full = [row for row in said(instance, "index of subjects") if row[1]]
    assert len(full) <= 3  # there may have been room between two of them
    assert "router.subjects" in instance.stderr()


def test_a_table_is_spoken_of_once_until_there_was_room() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    tables = Tables(logging.getLogger("midair"), lambda kind, **said: told.append((kind, said)))

    def look(*filled: int, refused: int = 0) -> list[tuple[bool, int]]:
        told.clear()
        for used in filled:
            tables.look("t", used, 100, "key", refused)
        assert {kind for kind, _ in told} <= {events.TABLE}
        return [(said["full"], said["used"]) for _, said in told]

    assert look(0, 10, 74) == []
    assert look(75, 90, 75, 60, 99) == [(False, 75)]
    assert look(100, 100, 99, 100, 50, 100) == [(True, 100)]
    assert look(49) == []
    assert look(80, 100) == [(False, 80), (True, 100)]
    assert look(0) == []
    assert look(10, refused=1) == [(True, 10)]  # no room for what was asked, however little is used
    assert look(60, 70, refused=1) == []


def test_what_is_kept_of_the_output_is_not_counted() -> None:
    assert BLOCKS_KEPT == 4096  # docs/pressure.md


def test_shares_follow_from_the_configuration() -> None:
    for text, each, few in (
        ("", 2**20, 2048),
        (SMALL, 512, 16),
        ("[limits]\nmax_subscriptions = 7\n", 7, 2048),
        ("[limits]\nmax_subscriptions = 0\n", 0, 0),
        ("[limits]\nmax_subscriptions = 'auto'\n[connmgr]\nsubscriptions = 65536\n", 32768, 64),
    ):
        conf = config.parse(text)
        assert (conf.subscriptions_each, conf.subscriptions_few) == (each, few)
