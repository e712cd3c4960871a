"""The keeper: what it is given outlives the giver, and its own death is noticed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midair import names
from midair.errors import MissingError
from midair.keeper import main as keeper_module
from midair.keeper.client import KeeperClient
from midair.process import wire
from midair.process.runtime import STANDBY, Runtime
from midair.up import listeners
from tests.support.instance import PATIENCE_S, ROOT, eventually
from tests.support.processes import KeeperProcess as Keeper


@pytest.fixture
def keeper(instance_name: str) -> Iterator[Keeper]:
    made = Keeper(Runtime.create(instance_name))
    yield made
    made.kill()
    made.listener.close()


@pytest.fixture
def client(keeper: Keeper) -> Iterator[KeeperClient]:
    made = KeeperClient(keeper.path)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes connected sockets; all are closed after the test."""
    made: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        both = socket.socketpair()
        made.extend(both)
        for sock in both:
            sock.settimeout(PATIENCE_S)
        return both

    yield make
    for sock in made:
        sock.close()


Pair = Callable[[], tuple[socket.socket, socket.socket]]


def test_a_socket_outlives_its_process(keeper: Keeper, client: KeeperClient, pair: Pair) -> None:
    ours, theirs = pair()
    assert client.hold([(7, ours.fileno())]) == 1
    client.ping()
    client.close()
    ours.close()  # as if this process had died
    newcomer = KeeperClient(keeper.path)
    [(uid, fd)] = newcomer.give([7])
    assert uid == 7
    with socket.socket(fileno=fd) as again:
        again.sendall(b"still here")
        assert theirs.recv(100) == b"still here"
    newcomer.close()


def test_hold_sent_before_its_sender_was_killed_is_in_the_answer(
    keeper: Keeper, pair: Pair
) -> None:
    """Held over one connection, asked for over another: the answer knows of the first."""
    for uid in range(1, 30):
        ours, _ = pair()
        first = KeeperClient(keeper.path)
        assert first.hold([(uid, ours.fileno())]) == 1
        first.close()
        second = KeeperClient(keeper.path)
        given = second.give([uid])
        assert [one for one, _ in given] == [uid]
        wire.close_all(fd for _, fd in given)
        second.close()


def test_drop_closes_the_copy(client: KeeperClient, pair: Pair) -> None:
    ours, theirs = pair()
    client.hold([(1, ours.fileno())])
    client.drop([1, 99])
    client.ping()
    ours.close()
    assert theirs.recv(1) == b"", "somebody still has the socket open"
    assert client.give() == []


def test_holding_a_uid_again_replaces_the_older(client: KeeperClient, pair: Pair) -> None:
    old, old_peer = pair()
    new, new_peer = pair()
    client.hold([(1, old.fileno())])
    client.hold([(1, new.fileno())])
    client.ping()
    old.close()
    assert old_peer.recv(1) == b""
    [(_, fd)] = client.give([1])
    with socket.socket(fileno=fd) as again:
        again.sendall(b"new")
    assert new_peer.recv(10) == b"new"


def test_many_are_given_back_in_several_messages(client: KeeperClient, pair: Pair) -> None:
    ours, _ = pair()
    count = 3 * wire.FDS_MAX + 5
    assert client.hold([(uid, ours.fileno()) for uid in range(1, count + 1)]) == count
    given = client.give()
    assert sorted(uid for uid, _ in given) == list(range(1, count + 1))
    wire.close_all(fd for _, fd in given)
    some = client.give([5, 700, 10**9])
    assert sorted(uid for uid, _ in some) == [5, 700]
    wire.close_all(fd for _, fd in some)
    assert client.give([]) == []


def test_a_killed_keeper_is_noticed_and_filled_again(
    keeper: Keeper, client: KeeperClient, pair: Pair
) -> None:
    ours, theirs = pair()
    client.hold([(1, ours.fileno())])
    client.ping()
    assert not client.check()
    keeper.kill()
    keeper.start()
    eventually(client.check, "the client notices")
    assert not client.check(), "and says so once"
    assert client.give() == []
    client.hold([(1, ours.fileno())])
    [(uid, fd)] = client.give()
    assert uid == 1
    os.close(fd)
    theirs.sendall(b"x")
    assert ours.recv(1) == b"x", "the connection itself never noticed"


def test_holding_works_while_the_keeper_is_away(
    keeper: Keeper, client: KeeperClient, pair: Pair
) -> None:
    keeper.kill()
    ours, _ = pair()
    assert client.hold([(1, ours.fileno())]) == 1
    with pytest.raises(MissingError, match="does not answer"):
        client.give([1], timeout_s=0.05)
    keeper.start()
    [(uid, fd)] = client.give([1])
    assert uid == 1
    os.close(fd)


def test_a_keeper_that_takes_nothing_costs_a_return_value(
    keeper: Keeper, client: KeeperClient, pair: Pair
) -> None:
    keeper.kill()
    ours, _ = pair()
    offered = taken = 0
    while taken == offered and offered < 10**6:
        offered += 200
        taken += client.hold([(offered + at, ours.fileno()) for at in range(200)])
    assert 0 < taken < offered
    client.drop(range(1, 10**5))  # kept for later: nothing blocks, nothing is lost
    keeper.start()
    client.ping()
    eventually(lambda: client.check() or client.give([1]) == [], "the drops arrive")
    assert client.forgotten == 0


def test_without_a_socket_nothing_works_and_nothing_breaks(tmp_path: Path, pair: Pair) -> None:
    client = KeeperClient(tmp_path / "none.sock")
    assert client.hold([(1, pair()[0].fileno())]) == 0
    client.drop([1])
    assert not client.check()
    with pytest.raises(MissingError):
        client.give(timeout_s=0.01)
    assert client.fileno() == -1


def test_a_second_keeper_waits_with_copies_of_everything(
    keeper: Keeper, client: KeeperClient, pair: Pair
) -> None:
    """It takes no connection from the first, and has all the first had when that is killed."""
    pairs = [pair() for _ in range(300)]
    assert client.hold([(uid, ours.fileno()) for uid, (ours, _) in enumerate(pairs, 1)]) == 300
    client.ping()
    first = keeper.pid
    keeper.start()
    second, keeper.pid = keeper.pid, first
    try:
        eventually(
            lambda: [s.pid for s in keeper.runtime.states() if s.state == STANDBY] == [second],
            "the second keeper waits",
        )
        ours, _ = pair()
        for uid in range(1000, 1020):
            another = KeeperClient(keeper.path)
            assert another.hold([(uid, ours.fileno())]) == 1
            another.ping()
            another.close()
        given = client.give([*range(1000, 1020)])
        assert len(given) == 20, "the first has them all"
        wire.close_all(fd for _, fd in given)
        for ours, _ in pairs:
            ours.close()
        client.close()
    finally:
        keeper.kill()
        keeper.pid = second
    newcomer = KeeperClient(keeper.path)
    found = dict(newcomer.give())
    assert sorted(found) == list(range(1, 301))
    for uid, (_, theirs) in enumerate(pairs, 1):
        with socket.socket(fileno=found[uid]) as again:
            again.sendall(b"%d" % uid)
            assert theirs.recv(100) == b"%d" % uid
    newcomer.close()


def test_inherited_copies_that_nobody_speaks_of_are_closed(instance_name: str, pair: Pair) -> None:
    """They were dropped between the asking and the taking over."""
    runtime = Runtime.create(instance_name)
    listener = listeners.open_peer(runtime, names.KEEPER_SOCKET)
    pairs = {uid: pair() for uid in (1, 2, 3)}
    inherited = {uid: ours.detach() for uid, (ours, _) in pairs.items()}
    client, asked = KeeperClient(runtime.socket(names.KEEPER_SOCKET)), pair()[0]
    assert client.hold([(1, asked.fileno())]) == 1
    asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asker.connect(runtime.socket(names.KEEPER_SOCKET))
    wire.send(asker, wire.pack_uids(wire.GIVE, [2]))
    it = keeper_module.Keeper(listener, inherited, inherited_s=2.0)
    while 3 in it.held:
        it.turn(0.01)
    assert sorted(it.held) == [1, 2]
    assert pairs[3][1].recv(1) == b"", "it is closed"
    it.close()
    asker.close()
    client.close()


@pytest.mark.parametrize(
    "message",
    [
        b"x",
        wire.pack_uids(99),
        wire.HEAD.pack(wire.HOLD, 0, 5),
        wire.pack_uids(wire.HOLD, [1]),
    ],
)
def test_nonsense_ends_that_connection_only(
    message: bytes, keeper: Keeper, client: KeeperClient, pair: Pair
) -> None:
    ours, theirs = pair()
    client.hold([(1, ours.fileno())])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bad:
        bad.settimeout(PATIENCE_S)
        bad.connect(keeper.path)
        wire.send(bad, message, [theirs.fileno()] if message[0] == wire.DROP else [])
        assert bad.recv(100) == b""
    [(uid, fd)] = client.give()
    assert uid == 1
    os.close(fd)


def test_started_by_hand_it_says_what_it_needs(instance_name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "midair.keeper", "--name", instance_name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "LISTEN_FDNAMES" in done.stderr
