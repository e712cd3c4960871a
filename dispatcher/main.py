"""The dispatcher: accepts clients, gives each a uid, a slot and a connmgr, and lets go.

It never reads from a client, so there is nothing a client could send it. What it knows is
in the connection table; a restarted dispatcher goes on where the last one was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import selectors
import socket
import sys
import time
from collections.abc import Sequence

from dispatcher.balance import Balance
from dispatcher.handoff import FORGOTTEN_S, Client, Handoffs, Recovered, cookie_of
from midair import config, names
from midair.errors import MidairError, MissingError
from midair.exits import Exit
from midair.keeper.client import KeeperClient
from midair.process import crash, events
from midair.process.program import Program, run
from midair.process.standstill import Standstill
from native import migrate
from native.conntable import ConnTable
from native.guard import Guard
from native.stats import Own

ACCEPTS_MAX = 64  # from one listener in one turn, so that no listener starves another
BACKLOG_MAX = 1024  # clients waiting for a peer; beyond it nothing is accepted
RETRY_S = 0.02  # how often a backlog is tried again
PAUSE_S = 0.1  # how long accepting rests when descriptors ran out
# Descriptors a process needs beside those of clients: listeners, links, what Python has.
DESCRIPTORS_RESERVED = 256
RECOVER_S = 5.0
SHOW_S = 0.2  # how often counters are published

# Of the congestion controls the one that every kernel has and lets everyone use. It asks for no
# pacing; of a socket that begun with bbr the kernel goes on to pace, at a rate nobody reaches.
UNPACED = b"reno"
LOCAL = ("127.", "::1", "::ffff:127.")

REFUSAL = b"-ERR 'maximum connections exceeded'\r\n"


class Dispatcher:
    """The listening sockets and what becomes of what they accept."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        table: ConnTable,
        balance: Balance,
        handoffs: Handoffs,
        connections_max: int,
        pace_local: bool,
    ) -> None:
        self.accepted = 0
        self.refused = 0
        self.descriptors_out = 0
        self._listeners = listeners
        self._table = table
        self._balance = balance
        self._handoffs = handoffs
        self._connections_max = connections_max
        self._pace_local = pace_local
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._paused_until = 0.0
        for listener in listeners:
            listener.setblocking(False)

    def watch(self, fd: int) -> None:
        """Ends the waiting of `turn` when `fd` is readable (the program's signals)."""
        self._selector.register(fd, selectors.EVENT_READ)

    def turn(self, timeout_s: float) -> None:
        """Waits for clients, accepts them, and moves all that wait a step on."""
        backlog = self._handoffs.backlog
        pause_s = self._paused_until - time.monotonic()
        self._set_accepting(backlog < BACKLOG_MAX and pause_s <= 0)
        if backlog:
            timeout_s = min(timeout_s, RETRY_S)
        if pause_s > 0:
            timeout_s = min(timeout_s, pause_s)
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                self._accept(key.data)
        if self._handoffs.backlog:
            self._handoffs.flush()

    def show(self, stats: Own, before: dict[str, int]) -> None:
        """Publishes what was counted, in the lives before this one too."""
        stats.publish(
            {name: count + getattr(self, name) for name, count in before.items()},
            {"backlog": self._handoffs.backlog, "connections_max": self._connections_max},
        )

    def _set_accepting(self, wanted: bool) -> None:
        if wanted == self._accepting:
            return
        self._accepting = wanted
        for at, listener in enumerate(self._listeners):
            if wanted:
                self._selector.register(listener, selectors.EVENT_READ, at)
            else:
                self._selector.unregister(listener)

    def _accept(self, listener: int) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, address = self._listeners[listener].accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._paused_until = time.monotonic() + PAUSE_S
                    self.descriptors_out += 1
                    return
                raise
            self.accepted += 1
            crash.here("dispatcher.accepted")
            self._give(sock, listener, address)

    def _give(self, sock: socket.socket, listener: int, address: tuple[str, int]) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # the peer may have gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._pace_local and address[0].startswith(LOCAL):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
        connmgr = self._balance.choose()
        given = None
        if self._balance.total <= self._connections_max:
            ip, port = address[0].partition("%")[0], address[1]
            given = self._table.assign(connmgr, listener, ip, port, time.time_ns(), cookie_of(sock))
        if given is None:
            self._balance.take_back(connmgr)
            return self._refuse(sock)
        crash.here("dispatcher.assigned")
        slot, uid = given
        self._handoffs.add(Client(uid, slot, listener, connmgr, sock.detach()))

    def adopt(self, sock: socket.socket) -> None:
        """A client the last dispatcher had accepted and nobody knows of."""
        ours = [listener.getsockname()[:2] for listener in self._listeners]
        local = sock.getsockname()
        ports = [at for at, address in enumerate(ours) if address[1] == local[1]]
        exact = [at for at in ports if ours[at][0] == local[0]]
        try:
            peer = sock.getpeername()
        except OSError:  # it has gone meanwhile
            return sock.close()
        self._give(sock, (exact or ports or [0])[0], peer)

    def _refuse(self, sock: socket.socket) -> None:
        self.refused += 1
        with contextlib.suppress(OSError):
            sock.send(REFUSAL)
            # Unread input would turn the close into a reset, which takes the refusal with it.
            sock.shutdown(socket.SHUT_WR)
            sock.recv(4096)
        sock.close()


def serve(program: Program) -> None:
    fds = program.listen_fds(names.FD_CLIENT)
    if not fds:
        raise MidairError(
            f"needs listening sockets called {names.FD_CLIENT!r} (LISTEN_FDNAMES); "
            "it is started by `midair up` or systemd",
            Exit.USAGE,
        )
    crash.arm(program.called)
    listeners = [socket.socket(fileno=fd) for fd in fds]
    conf, runtime = program.config, program.runtime
    table: ConnTable | None = None
    standstill = Standstill(program, migrate.for_dispatcher(program.instance))

    def warm() -> bool:
        nonlocal table
        if standstill.ahead:
            standstill.join()
            return False
        with contextlib.suppress(MissingError):
            table = ConnTable.open(program.instance, conf.limits.max_connections, create=False)
        return table is not None

    program.acquire_lease(warm)
    standstill.end()
    if table is None:
        table = ConnTable.open(program.instance, conf.limits.max_connections, create=True)
    table.reap()
    balance = Balance(conf.connmgrs, table.counts, runtime)
    handoffs = Handoffs(
        KeeperClient(runtime.socket(names.KEEPER_SOCKET)),
        [runtime.socket(names.handoff_socket(index)) for index in range(conf.connmgrs)],
    )
    started = time.monotonic()
    found = handoffs.recover(table, RECOVER_S) if program.generation > 1 else Recovered()
    recovered_s = time.monotonic() - started
    dispatcher = Dispatcher(
        listeners,
        table,
        balance,
        handoffs,
        _connections_max(program),
        conf.latency.pace_local,
    )
    for sock in found.unknown:
        dispatcher.adopt(sock)
    handoffs.forget(found.nameless)
    if found.sent_again or found.given_up or found.unknown:
        program.log.info(
            "recovered: %d hand-offs sent again, %d clients saved by the guard, %d given up",
            found.sent_again,
            len(found.unknown),
            found.given_up,
        )
    guard = Guard(runtime.socket(names.KEEPER_SOCKET), program.generation)
    dispatcher.watch(program.wake_fd)
    addresses = [config.join_address(*sock.getsockname()[:2]) for sock in listeners]
    runtime.write("listen.json", json.dumps(addresses))
    program.ready("accepting on " + ", ".join(addresses))
    if found.sent_again or found.given_up or found.unknown:
        program.event(
            events.RECOVERED,
            sent_again=found.sent_again,
            saved_by_the_guard=len(found.unknown),
            given_up=found.given_up,
            took_ms=round(recovered_s * 1e3, 1),
        )
    stats = Own(program.instance, names.DISPATCHER, None, 0, program.ipc_gid)
    before = stats.resume()
    next_show = 0.0
    refused = 0
    doubtful_until = time.monotonic() + FORGOTTEN_S
    while not program.stopping:
        dispatcher.turn(program.wait_s_max)
        if found.doubtful and time.monotonic() > doubtful_until:
            handoffs.give_up(table, found.doubtful)
            found.doubtful.clear()
        if dispatcher.refused and not refused:
            program.log.warning("maximum of connections reached: refusing clients")
        refused = dispatcher.refused
        if time.monotonic() >= next_show:
            next_show = time.monotonic() + SHOW_S
            dispatcher.show(stats, before)
        guard.check()
        program.watchdog()


def _connections_max(program: Program) -> int:
    """limits.max_connections, or what the descriptor limit leaves room for."""
    wanted = program.config.limits.max_connections
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(1, limit - DESCRIPTORS_RESERVED)
    if room < wanted:
        program.log.info(
            "at most %d connections: the descriptor limit is %d (LimitNOFILE=)", room, limit
        )
    return min(wanted, room)


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        names.DISPATCHER,
        serve,
        argv,
        description="Accepts clients and hands them to the connection managers.",
    )


if __name__ == "__main__":
    sys.exit(main())
