"""What storms have found, each as the smallest sequence that shows it every time.

Method: processes are stopped (SIGSTOP) so that the unlucky moment lasts, then killed in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from connmgr.arrivals import Arrivals
from dispatcher.outbox import GUARDED, Client, Link, Outbox, cookie_of
from midair import names
from midair.client.wire_nats import pub
from midair.keeper.client import KeeperClient
from midair.keeper.main import Keeper
from midair.process import wire
from midair.process.runtime import ACTIVE as STATE_ACTIVE
from midair.process.runtime import Runtime
from midair.up import listeners
from native.conntable import ACTIVE, ASSIGNED, ConnTable
from tests.support.instance import PATIENCE_S, Instance, eventually
from tests.support.stream import Stream

Make = Callable[..., Instance]
CONNMGR = "connmgr/0"
TCP_CLOSE_WAIT = 8  # of the kernel's tcp_states.h


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def keeper_at(path: str) -> Iterator[Keeper]:
    """A keeper in this process, which runs when its turn() is called."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        yield Keeper(listener)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def restarted(instance: Instance, component: str, old: int) -> bool:
    return any(
        state.pid != old and state.state == STATE_ACTIVE
        for state in Runtime.create(instance.name).states()
        if names.component(state.role, state.index) == component
    )


def waiting(name: str) -> int:
    """Messages in a queue."""
    queue = posix_ipc.MessageQueue(name)
    try:
        return int(queue.current_messages)
    finally:
        queue.close()


def test_an_end_that_was_confirmed_while_the_connmgr_was_dead(make_midair: Make) -> None:
    """The successor asks for the end again and finds the answer to the first question waiting.

    It used to take the connection out of memory but not out of the list of those it had to ask
    about, and then asked about slot 0 for ever.
    """
    instance = make_midair(connmgrs=1)
    stays, goes = (Stream(instance.host, instance.port) for _ in range(2))
    stays.sub(b"here", b"1")
    stays.sync()
    goes.sync()
    connmgr, router = instance.pid(CONNMGR), instance.pid("router")
    with stopped(router):
        before = descriptors(connmgr)
        # A reset: after a FIN the socket stays open for what the client is still owed.
        goes.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        goes.close()
        eventually(lambda: descriptors(connmgr) < before, "the connection is closed")
        refs = instance.runtime.queue(names.REFS, 0)
        eventually(lambda: waiting(refs), "the router is to be told of its end")
        os.kill(connmgr, signal.SIGSTOP)
    orders = instance.runtime.queue(names.ORDERS, 0)
    eventually(lambda: waiting(orders), "the router has confirmed it")
    os.kill(connmgr, signal.SIGKILL)
    eventually(lambda: restarted(instance, CONNMGR, connmgr), "the connmgr is up again")
    for n in range(10):
        stays.send(pub(b"here", b"%d" % n))
    assert [message.body for message in stays.take(10)] == [b"%d" % n for n in range(10)]
    late = Stream(instance.host, instance.port)
    late.sync()
    late.close()
    stays.close()


def test_a_verbose_client_gets_its_answers_in_order_from_a_successor(make_midair: Make) -> None:
    """PING is answered by way of the router, so what follows it must wait, also after a crash.

    That something waits used to be known to the process alone.
    """
    instance = make_midair(connmgrs=1)
    with socket.create_connection((instance.host, instance.port), 30) as client:
        stream = client.makefile("rb")
        assert stream.readline().startswith(b"INFO ")
        client.sendall(b'CONNECT {"verbose":true}\r\n')
        assert stream.readline() == b"+OK\r\n"
        connmgr, router = instance.pid(CONNMGR), instance.pid("router")
        with stopped(router):
            client.sendall(b"PING\r\nPUB nobody 2\r\nhi\r\nPING\r\n")
            refs = instance.runtime.queue(names.REFS, 0)
            eventually(lambda: waiting(refs), "the router is asked")
            os.kill(connmgr, signal.SIGKILL)
            eventually(lambda: restarted(instance, CONNMGR, connmgr), "the connmgr is up again")
        answers = [stream.readline() for _ in range(3)]
        assert answers == [b"PONG\r\n", b"+OK\r\n", b"PONG\r\n"]
        stream.close()


def test_a_socket_that_was_dropped_before_it_was_held(tmp_path: Path) -> None:
    """HOLD comes from the dispatcher and DROP from a connmgr: a new keeper may read DROP first.

    It used to hold the socket for ever.
    """
    path = str(tmp_path / "k")
    with keeper_at(path) as keeper:
        connmgr, dispatcher = KeeperClient(path), KeeperClient(path)
        ours, theirs = socket.socketpair()
        try:
            connmgr.drop([7])
            assert dispatcher.hold([(7, ours.fileno()), (8, ours.fileno())]) == 2
            eventually(lambda: keeper.turn(0.0) or 8 in keeper.held, "both are read")
            assert list(keeper.held) == [8]
            connmgr.drop([8])
            eventually(lambda: keeper.turn(0.0) or not keeper.held, "it is dropped")
            assert dispatcher.hold([(8, ours.fileno()), (9, ours.fileno())]) == 2
            eventually(lambda: keeper.turn(0.0) or keeper.held, "it is read")
            assert list(keeper.held) == [9]
            ours.close()
            wire.close_all([keeper.held.pop(9)])
            theirs.settimeout(30)
            assert theirs.recv(1) == b""  # no copy is left
        finally:
            connmgr.close()
            dispatcher.close()
            theirs.close()
            ours.close()
            keeper.close()


class Recovery:
    """What a dispatcher finds when it starts: a table and a keeper, which runs in a thread."""

    def __init__(self, instance: str, stack: contextlib.ExitStack) -> None:
        runtime = Runtime.create(instance)
        path = runtime.socket(names.KEEPER_SOCKET)
        listener = stack.enter_context(listeners.open_peer(runtime, names.KEEPER_SOCKET))
        stack.enter_context(listeners.open_peer(runtime, names.handoff_socket(0)))
        keeper, over = Keeper(listener), threading.Event()

        def keep() -> None:
            while not over.is_set():
                keeper.turn(0.01)

        thread = threading.Thread(target=keep)
        thread.start()
        stack.callback(lambda: (over.set(), thread.join(), keeper.close()))
        self.table = ConnTable.open(Runtime.create(instance), 16, create=True)
        stack.callback(self.table.close)
        self.table.reap()
        self.client = KeeperClient(path)
        stack.callback(self.client.close)
        self.handoffs = Outbox(KeeperClient(path), [runtime.socket(names.handoff_socket(0))])
        stack.callback(self.handoffs.close)

    def assign(self, cookie: int) -> tuple[int, int]:
        given = self.table.assign(0, 0, "127.0.0.1", 1, time.time_ns(), cookie)
        assert given is not None
        return given

    def kept(self, uid: int) -> bool:
        found = self.client.give([uid])
        wire.close_all(fd for _, fd in found)
        return bool(found)


def test_a_client_saved_by_the_guard_is_kept_until_it_has_a_name(instance_name: str) -> None:
    """A dispatcher that dies while it takes up what the guard saved loses none of it.

    The keeper used to be told to drop the nameless copy before there was another.
    """
    with contextlib.ExitStack() as stack:
        it = Recovery(instance_name, stack)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(socket.create_connection(server.getsockname()))
        with server.accept()[0] as accepted:
            assert it.client.hold([(GUARDED[0], accepted.fileno())]) == 1
        found = it.handoffs.recover(it.table, 10.0)
        (saved,) = found.unknown
        assert it.kept(GUARDED[0])  # were it killed now
        slot, uid = it.assign(cookie_of(saved))
        it.handoffs.add(Client(uid, slot, 0, 0, saved.detach()))
        assert it.kept(GUARDED[0])  # or now
        it.handoffs.forget(found.nameless)
        assert it.kept(uid)
        assert not it.kept(GUARDED[0])


def test_a_slot_whose_client_left_during_the_hand_off_is_freed(instance_name: str) -> None:
    """The guard saves no socket whose peer has gone, so nobody will ever have it.

    The slot used to stay assigned until a dispatcher was started half a minute later.
    """
    with contextlib.ExitStack() as stack:
        it = Recovery(instance_name, stack)
        left, served = it.assign(1), it.assign(2)
        found = it.handoffs.recover(it.table, 10.0)
        assert [slot.uid for slot in found.doubtful] == [left[1], served[1]]
        it.table.set_state(served[0], ACTIVE)  # its hand-off was on the way after all
        it.handoffs.give_up(it.table, found.doubtful)
        assert [slot.uid for slot in it.table.used()] == [served[1]]


@pytest.mark.parametrize("connmgrs", [1, 2])
@pytest.mark.parametrize("both", [False, True], ids=["dispatcher", "dispatcher and connmgrs"])
def test_slots_of_clients_that_were_reset_are_free_again_when_the_dispatcher_is_back(
    make_midair: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connmgrs: int, both: bool
) -> None:
    """Clients are reset while they are assigned, and everybody who knew of them is killed.

    Nobody has their sockets: the keeper had none yet, and the guard saves none whose peer has gone.
    Their slots used to stay assigned for half a minute, and newcomers were refused meanwhile.
    """
    places = 8
    marker, armed = tmp_path / "marker", tmp_path / "armed"
    marker.touch()
    armed.write_text(f"dispatcher dispatcher.assigned {places} {marker}\n")
    monkeypatch.setenv("MIDAIR_CRASH", str(armed))
    instance = make_midair(f"[limits]\nmax_connections = {places}\n", connmgrs=connmgrs)
    rows = instance.components()
    dispatcher = rows["dispatcher"]["pid"]
    os.kill(dispatcher, signal.SIGSTOP)
    for _ in range(places):
        with socket.create_connection((instance.host, instance.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if both:
        for n in range(connmgrs):
            os.kill(rows[f"connmgr/{n}"]["pid"], signal.SIGSTOP)
    os.kill(dispatcher, signal.SIGCONT)
    eventually(lambda: not marker.exists(), "the dispatcher has assigned all places, and died")
    if both:
        for n in range(connmgrs):
            os.kill(rows[f"connmgr/{n}"]["pid"], signal.SIGKILL)

    def greeted() -> bool:
        with socket.create_connection((instance.host, instance.port), PATIENCE_S) as client:
            return client.recv(4096).startswith(b"INFO ")

    # Well below what a slot was assigned for without anybody asking (FORGOTTEN_S).
    eventually(greeted, "a newcomer is greeted", patience_s=15.0)
    table = ConnTable.attach(instance.runtime)
    eventually(lambda: not list(table.used(state=ASSIGNED)), "no slot is assigned", patience_s=15.0)
    table.close()
    clients = [Stream(instance.host, instance.port) for _ in range(places - 1)]
    for client in clients:
        assert client.sync() == []
    for client in clients:
        client.close()


def test_a_dispatcher_is_answered_after_all_that_its_predecessor_had_sent(
    instance_name: str, tmp_path: Path
) -> None:
    """Whatever the order in which a connmgr looks at their connections."""
    runtime = Runtime.create(instance_name)
    path = runtime.socket(names.handoff_socket(0))
    taken: list[int] = []

    class Takes:
        def adopt(self, slot: int, uid: int, fd: int) -> None:
            os.close(fd)
            taken.append(uid)

        def missed(self) -> None:
            raise AssertionError

    class Watches:
        def watch(self, fd: int, tag: int) -> None: ...
        def unwatch(self, fd: int) -> None: ...

    listener = listeners.open_peer(runtime, names.handoff_socket(0))
    fd = listener.detach()
    arrivals = Arrivals(fd, Watches(), Takes(), logging.getLogger("midair"))
    ours, theirs = socket.socketpair()
    before = Link(path)
    assert before._connected()
    for uid in range(1, 6):
        assert before._send([Client(uid, uid, 0, 0, ours.fileno())])
    before.close()
    after = Link(path)
    assert not after.answered()
    arrivals._accept()
    newest = max(arrivals._peers)
    assert arrivals.receive(newest)
    assert taken == [1, 2, 3, 4, 5]
    assert after.answered()
    after.close()
    arrivals.close()
    ours.close()
    theirs.close()


def test_a_question_that_came_after_the_keeper_had_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has what was sent before the question, however late the keeper looks.

    It used to accept a connection made after it had looked, and to answer it at once, while what
    another process had sent before lay unread.
    """
    path = str(tmp_path / "k")
    with keeper_at(path) as keeper:
        dispatcher, somebody, successor = (KeeperClient(path) for _ in range(3))
        ours, theirs = socket.socketpair()
        look = keeper._selector.select
        looks = 0

        def looking(timeout_s: float | None = None) -> Any:
            nonlocal looks
            found = look(timeout_s)
            looks += 1
            if looks == 1:  # what happens while the keeper does not run
                assert dispatcher.hold([(7, ours.fileno())]) == 1
                assert successor._send(wire.pack_uids(wire.GIVE, [7]))
            return found

        try:
            dispatcher.check()
            keeper.turn(0.0)
            somebody.check()
            monkeypatch.setattr(keeper._selector, "select", looking)
            keeper.turn(0.0)
            assert successor._socket is not None
            successor._socket.settimeout(PATIENCE_S)
            hello, _ = wire.receive(successor._socket)
            assert wire.heard(hello) == wire.VERSION
            data, fds = wire.receive(successor._socket)
            assert wire.unpack_uids(data) == (wire.HELD, [7])
            wire.close_all(fds)
        finally:
            for end in (ours, theirs, dispatcher, somebody, successor, keeper):
                end.close()


def test_a_refused_client_gets_its_error_from_a_successor(make_midair: Make) -> None:
    """The error is sent and so is our FIN, which the kernel counts: that is no byte too many.

    The successor used to end the connection, with a reset if the client still sent something.
    """
    instance = make_midair(connmgrs=1)
    client = Stream(instance.host, instance.port)
    client.sync()
    connmgr = instance.pid(CONNMGR)
    client.send(b"NONSENSE\r\n")
    table = ConnTable.attach(Runtime.create(instance.name))
    state = struct.Struct("B")

    def said_all() -> bool:
        info = client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state.unpack(info)[0] == TCP_CLOSE_WAIT

    eventually(said_all, "the error and the end are sent")
    os.kill(connmgr, signal.SIGKILL)
    eventually(lambda: restarted(instance, CONNMGR, connmgr), "the connmgr is up again")
    client.send(b"more" * 1000)
    assert [slot.state for slot in table.used()] == [ACTIVE]
    client.send(b"more" * 1000)
    assert client.line() == b"-ERR 'Unknown Protocol Operation'"
    assert client.line() == b""
    assert " warning: connection " not in instance.stderr()
    client.close()
    table.close()


def test_the_old_buffer_of_a_refused_client(make_midair: Make) -> None:
    """Bytes that were refused are never parsed, but the kernel counts them as taken.

    A successor used to look for them where they had been. By then that may be the middle of
    somebody's large message, which was cut off there: its subscriber's connmgr died of it, and
    so did every successor.
    """
    instance = make_midair(
        '[limits]\nmax_payload = "4MiB"\n[connmgr]\narena_bytes = "8MiB"\n', connmgrs=1
    )

    def client() -> Stream:
        return Stream(instance.host, instance.port)

    refused = [client() for _ in range(4)]
    others = [client() for _ in refused]
    publisher, subscriber = client(), Stream(instance.host, instance.port, receive_buffer=4096)
    subscriber.sub(b"large", b"1")
    subscriber.sync()
    for bad, other in zip(refused, others, strict=True):
        bad.send(b"NONSENSE\r\n")
        assert bad.line().startswith(b"-ERR ")
        other.sync()
        other.send(b"PUB nobody 3\r\n")  # its chunk stays in use, the next one gets another
        publisher.send(pub(b"nobody", bytes(100_000)))
        publisher.send(pub(b"nobody", bytes(100_000)))
        publisher.sync()
    for other in others:
        other.send(b"abc\r\n")
        other.sync()
    body = os.urandom((4 << 20) - 1)
    publisher.send(pub(b"large", body))
    publisher.sync()
    connmgr = instance.pid(CONNMGR)
    os.kill(connmgr, signal.SIGKILL)
    eventually(lambda: restarted(instance, CONNMGR, connmgr), "the connmgr is up again")
    publisher.send(pub(b"large", body[:1000]))
    assert [message.body for message in subscriber.take(2)] == [body, body[:1000]]
    for stream in (publisher, subscriber, *refused, *others):
        stream.close()
