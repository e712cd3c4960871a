"""The dispatcher, as a real process, with receivers shaped like connmgrs in this test."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from dispatcher.balance import Balance
from midair import config, names
from midair.keeper.client import KeeperClient
from midair.process import wire
from midair.process.runtime import ACTIVE as RUNNING
from midair.process.runtime import Runtime
from midair.process.spawn import spawn
from midair.up import listeners
from native.conntable import ACTIVE, ASSIGNED, CLOSED, ConnTable
from tests.support.instance import PATIENCE_S, environ, eventually

CONNECTIONS_MAX = 40


class Receiver:
    """What a connmgr does with hand-offs, and nothing more."""

    def __init__(self, runtime: Runtime, index: int) -> None:
        self.listener = listeners.open_peer(runtime, names.handoff_socket(index))
        self.listener.settimeout(PATIENCE_S)
        self.peer: socket.socket | None = None
        self.clients: dict[int, tuple[int, int, socket.socket]] = {}  # uid -> slot, listener

    def receive(self) -> list[int]:
        """The uids of the next hand-off."""
        while True:
            if self.peer is None:
                self.peer, _ = self.listener.accept()
                self.peer.settimeout(PATIENCE_S)
            data, fds = wire.receive(self.peer)
            if wire.is_ask(data):
                wire.send(self.peer, wire.hello())
            elif data:
                break
            else:
                self.lose()
        entries = wire.unpack_handoff(data)
        assert len(entries) == len(fds) <= wire.HANDOFFS_MAX
        for (uid, slot, listener), fd in zip(entries, fds, strict=True):
            if uid in self.clients:
                os.close(fd)
            else:
                self.clients[uid] = (slot, listener, socket.socket(fileno=fd))
        return [uid for uid, _, _ in entries]

    def lose(self) -> None:
        """As if the connmgr had died: its connection ends, its listening socket stays."""
        if self.peer is not None:
            self.peer.close()
            self.peer = None

    def close(self) -> None:
        self.lose()
        self.listener.close()
        for _, _, sock in self.clients.values():
            sock.close()


class World:
    """A dispatcher and a keeper, their sockets, and two receivers."""

    def __init__(self, name: str) -> None:
        self.runtime = Runtime.create(name)
        self.config = self.runtime.path / "config.toml"
        self.config.write_text(
            f"[limits]\nmax_connections = {CONNECTIONS_MAX}\n[connmgr]\ncount = 2\n"
        )
        self.tcp = [listeners.open_client("127.0.0.1:0") for _ in range(2)]
        for sock in self.tcp:
            listeners.listen(sock)
        self.keeper_listener = listeners.open_peer(self.runtime, names.KEEPER_SOCKET)
        self.receivers = [Receiver(self.runtime, index) for index in range(2)]
        self.pids: dict[str, int] = {}
        self.clients: list[socket.socket] = []
        self.start_keeper()
        self.start()
        self.table = ConnTable.attach(self.runtime)

    def start_keeper(self) -> None:
        self._spawn("keeper", "midair.keeper", [(names.FD_KEEPER, self.keeper_listener)])

    def start(self) -> None:
        self._spawn("dispatcher", "dispatcher.main", [(names.FD_CLIENT, s) for s in self.tcp])
        eventually(
            lambda: any(
                state.pid == self.pids["dispatcher"] and state.state == RUNNING
                for state in self.runtime.states()
            ),
            "the dispatcher runs",
        )

    def kill(self, what: str, number: int = 9) -> None:
        pid = self.pids.pop(what)
        os.kill(pid, number)
        os.waitpid(pid, 0)

    def connect(self, listener: int = 0) -> socket.socket:
        sock = socket.create_connection(self.tcp[listener].getsockname(), PATIENCE_S)
        self.clients.append(sock)
        return sock

    def close(self) -> None:
        for what in list(self.pids):
            self.kill(what)
        self.table.close()
        for receiver in self.receivers:
            receiver.close()
        for sock in (*self.clients, *self.tcp, self.keeper_listener):
            sock.close()

    def _spawn(self, what: str, module: str, listen: list[tuple[str, socket.socket]]) -> None:
        self.pids[what] = spawn(
            [
                *(sys.executable, "-m", module),
                *("--name", self.runtime.instance, "--config", str(self.config)),
            ],
            environ(),
            [(name, sock.fileno()) for name, sock in listen],
            2,
        )


@pytest.fixture
def world(instance_name: str) -> Iterator[World]:
    made = World(instance_name)
    yield made
    made.close()


def test_a_client_arrives_with_its_uid_slot_and_listener(world: World) -> None:
    client = world.connect(listener=1)
    [uid] = world.receivers[0].receive()
    slot, listener, sock = world.receivers[0].clients[uid]
    assert listener == 1
    found = world.table.slot(slot)
    assert (found.uid, found.state, found.connmgr) == (uid, ASSIGNED, 0)
    assert (found.ip, found.port) == client.getsockname()
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    sock.sendall(b"INFO")
    assert client.recv(10) == b"INFO"


def test_the_keeper_has_a_copy_and_the_dispatcher_none(world: World) -> None:
    client = world.connect()
    [uid] = world.receivers[0].receive()
    keeper = KeeperClient(world.runtime.socket(names.KEEPER_SOCKET))
    [(held, fd)] = keeper.give()
    assert held == uid
    os.close(fd)
    keeper.drop([uid])
    keeper.ping()
    keeper.close()
    world.receivers[0].clients.pop(uid)[2].close()
    assert client.recv(1) == b"", "the dispatcher still has it open"


def test_clients_are_spread_evenly(world: World) -> None:
    for _ in range(10):
        world.connect()
    for receiver in world.receivers:
        while len(receiver.clients) < 5:
            receiver.receive()
    uids = [uid for receiver in world.receivers for uid in receiver.clients]
    assert len(set(uids)) == 10
    assert world.table.counts()[:2] == [5, 5]


def test_those_that_left_are_counted_out(world: World) -> None:
    for _ in range(4):
        world.connect()
    for receiver in world.receivers:
        while len(receiver.clients) < 2:
            receiver.receive()
    for slot, _, _ in world.receivers[1].clients.values():
        world.table.set_state(slot, CLOSED)
    balance = Balance(2, world.table.counts, world.runtime)
    assert [balance.choose() for _ in range(3)] == [1, 1, 0]


def test_of_equals_the_idle_one_is_chosen(instance_name: str) -> None:
    balance = Balance(3, lambda: [1, 1, 1, 0], Runtime.create(instance_name))
    balance.refresh()
    balance.busy = [50.0, 10.0, 90.0]
    assert balance.choose() == 1
    assert balance.choose() == 0
    assert balance.choose() == 2
    balance.take_back(2)
    assert balance.choose() == 2
    assert balance.total == 6


def test_a_connmgr_without_a_socket_is_given_nobody(instance_name: str) -> None:
    runtime = Runtime.create(instance_name)
    path = runtime.socket(names.handoff_socket(1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(os.fspath(path))
        balance = Balance(3, lambda: [0, 5, 0], runtime)
        assert [balance.choose() for _ in range(3)] == [1, 1, 1]


def test_too_many_clients_are_told_so(world: World) -> None:
    for _ in range(CONNECTIONS_MAX):
        world.connect()
    while sum(world.table.counts()) < CONNECTIONS_MAX:
        for receiver in world.receivers:
            receiver.receive()
    refused = world.connect()
    assert refused.recv(100) == b"-ERR 'maximum connections exceeded'\r\n"
    assert refused.recv(1) == b""
    # One leaves: its slot is free for the next.
    world.table.set_state(world.table.slot(0).slot, CLOSED)

    def let_in() -> bool:
        sock = world.connect()
        sock.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            return not sock.recv(100).startswith(b"-ERR")
        return True

    eventually(let_in, "the free slot is used")


def test_a_connmgr_that_is_away_finds_its_clients_waiting(world: World) -> None:
    world.connect()
    world.receivers[0].receive()
    world.receivers[0].lose()
    world.table.set_state(0, ACTIVE)
    clients = [world.connect() for _ in range(6)]
    got: set[int] = set()
    while len(got) < 6:
        index = 0 if len(world.receivers[0].clients) < 4 else 1
        got |= set(world.receivers[index].receive())
    assert len(clients) == 6


def test_a_killed_dispatcher_leaves_clients_waiting_not_refused(world: World) -> None:
    world.connect()
    [first] = world.receivers[0].receive()
    world.table.set_state(world.receivers[0].clients[first][0], ACTIVE)
    world.kill("dispatcher")
    client = world.connect()  # the kernel takes it: the listening socket is still there
    world.start()
    [second] = world.receivers[1].receive()
    assert second > first, "uids go on"
    world.receivers[1].clients[second][2].sendall(b"late")
    assert client.recv(10) == b"late"


def test_a_hand_off_lost_with_the_connmgr_is_sent_again_by_a_new_dispatcher(world: World) -> None:
    client = world.connect()
    eventually(lambda: world.table.counts()[0] == 1, "it is assigned")
    keeper = KeeperClient(world.runtime.socket(names.KEEPER_SOCKET))

    def held() -> bool:
        given = keeper.give()
        wire.close_all(fd for _, fd in given)
        return len(given) == 1

    eventually(held, "the keeper has it")
    keeper.close()
    # The connmgr takes the connection but dies without looking into it.
    receiver = world.receivers[0]
    receiver.peer, _ = receiver.listener.accept()
    world.kill("dispatcher")
    receiver.lose()
    world.start()
    [uid] = receiver.receive()
    receiver.clients[uid][2].sendall(b"found")
    assert client.recv(10) == b"found"


def test_a_slot_whose_socket_died_with_the_dispatcher_is_freed(world: World) -> None:
    world.kill("dispatcher")
    table = ConnTable.open(world.runtime, CONNECTIONS_MAX, create=True)
    table.reap()
    assert table.assign(0, 0, "127.0.0.1", 1, 0) is not None  # killed right after this
    world.start()
    assert table.counts()[0] == 0
    table.close()


def test_a_new_keeper_does_not_stop_hand_offs(world: World) -> None:
    world.connect()
    [first] = world.receivers[0].receive()
    world.kill("keeper")
    world.start_keeper()
    world.connect()
    [uid] = world.receivers[1].receive()
    keeper = KeeperClient(world.runtime.socket(names.KEEPER_SOCKET))
    given = dict(keeper.give())
    keeper.close()
    for fd in given.values():
        os.close(fd)
    # The first is there again if the dispatcher did not know yet that the old keeper had it.
    assert {uid} <= set(given) <= {first, uid}


def test_a_standby_dispatcher_takes_over(world: World) -> None:
    older = world.pids.pop("dispatcher")
    world._spawn("dispatcher", "dispatcher.main", [(names.FD_CLIENT, s) for s in world.tcp])
    eventually(
        lambda: (
            [s.state for s in world.runtime.states() if s.role == names.DISPATCHER]
            == [RUNNING, "standby"]
        ),
        "the second waits",
    )
    os.kill(older, 9)
    os.waitpid(older, 0)
    world.connect()
    [uid] = world.receivers[0].receive()
    assert uid == 1
    [state] = [s for s in world.runtime.states() if s.role == names.DISPATCHER]
    assert (state.pid, state.generation) == (world.pids["dispatcher"], 2)


def test_it_says_where_it_listens(world: World) -> None:
    said = json.loads((world.runtime.path / "listen.json").read_text())
    assert said == [config.join_address(*sock.getsockname()) for sock in world.tcp]
