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
from dispatcher.outbox import FORGOTTEN_S, Client, Outbox, Recovered, cookie_of
from midair import config, names
from midair.errors import MidairError
from midair.exits import Exit
from midair.keeper import listening
from midair.keeper.client import KeeperClient
from midair.process import crash, lame_duck, role
from midair.process.program import Program
from midair.process.tables import Tables
from native import migrate, protocol
from native.conntable import ConnTable
from native.guard import Guard
from native.protocol import Refusal
from native.stats import Own

ACCEPTS_MAX = 64  # from one listener in one turn, so that no listener starves another
BACKLOG_MAX = 1024  # clients waiting for a peer; beyond it nothing is accepted
RETRY_S = 0.02  # how often a backlog is tried again, and whether we may accept is looked at
KEEPER_S = 1.0  # how often a new keeper is looked for
PAUSE_S = 0.1  # how long accepting rests when descriptors ran out
# Descriptors a process needs beside those of clients: listeners, links, what Python has.
DESCRIPTORS_RESERVED = 256
RECOVER_S = 5.0
# accept(2): what happened to the client that would have been accepted, not to us.
LEFT = (
    *(errno.ECONNABORTED, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENONET),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EPERM),
)

# Of the congestion controls the one that every kernel has and lets everyone use. It asks for no
# pacing; of a socket that begun with bbr the kernel goes on to pace, at a rate nobody reaches.
UNPACED = b"reno"
MAPPED = "::ffff:"  # before an IPv4 address that a listener for both families has accepted
LOCAL = ("127.", "::1", f"{MAPPED}127.")


class Dispatcher(role.Role):
    """The listening sockets and what becomes of what they accept."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        fds = program.listen_fds(names.FD_CLIENT)
        self._lame_duck = lame_duck.Look(program.runtime)
        if not fds and self._lame_duck() is None:
            raise MidairError(
                f"needs listening sockets called {names.FD_CLIENT!r} (LISTEN_FDNAMES); "
                "it is started by `midair up` or systemd",
                Exit.USAGE,
            )
        self.memory = migrate.for_dispatcher(program.runtime)
        self._tables = Tables(self.log, program.event)
        self.accepted = 0
        self.refused = 0
        self.descriptors_out = 0
        self._listeners = [socket.socket(fileno=fd) for fd in fds]
        for listener in self._listeners:
            listener.setblocking(False)
        # The place of each in server.listen: some there may be closed.
        places = [at for at, item in enumerate(self.config.server.listen) if not item.closed]
        self._places = [*places, *range(len(places), len(fds))]
        self._pace_local = self.config.latency.pace_local
        self._selector = selectors.DefaultSelector()
        self._selector.register(program.wake_fd, selectors.EVENT_READ)
        self._listening = False  # what we accept on: not before all parts are ready
        self._accepting = False
        self._check_keeper_after = 0.0
        self._paused_until = 0.0
        self._found = Recovered()
        self._doubtful_until = 0.0
        self._refused_before = 0

    def open(self, create: bool) -> None:
        most = self.config.limits.max_connections
        self._table = ConnTable.open(self.program.runtime, most, create=create)

    def recover(self) -> dict[str, int]:
        program, runtime = self.program, self.program.runtime
        self._table.reap()
        conf = self.config
        self._balance = Balance(conf.connmgrs, self._table.counts, runtime, conf.serving)
        keeper_path = runtime.socket(names.KEEPER_SOCKET)
        indexes = range(conf.connmgrs)
        self._outbox = Outbox(
            KeeperClient(keeper_path),
            [runtime.socket(names.handoff_socket(index)) for index in indexes],
            [
                (listening.uid(names.FD_CLIENT, self._places[at]), listener.fileno())
                for at, listener in enumerate(self._listeners)
            ],
        )
        if program.generation > 1:
            self._found = self._outbox.recover(self._table, RECOVER_S)
        self._doubtful_until = time.monotonic() + FORGOTTEN_S
        self._connections_max = _connections_max(program)
        for sock in self._found.unknown:
            self._adopt(sock)
        self._outbox.forget(self._found.nameless)
        self._guard = Guard(keeper_path, program.generation)
        self._stats = Own(program.runtime, names.DISPATCHER, None, 0, program.ipc_gid)
        self._before = self._stats.resume()
        addresses = [config.join_address(*sock.getsockname()[:2]) for sock in self._listeners]
        runtime.write("listen.json", json.dumps(addresses))
        self.status = "accepting on " + ", ".join(addresses)
        found = {
            "sent_again": self._found.sent_again,
            "saved_by_the_guard": len(self._found.unknown),
            "given_up": self._found.given_up,
        }
        return found if any(found.values()) else {}

    def turn(self, timeout_s: float) -> None:
        """Waits for clients, accepts them, and moves all that wait a step on."""
        if self._listeners and self._lame_duck() is not None:
            self._stop_listening()
        backlog = self._outbox.backlog
        pause_s = self._paused_until - time.monotonic()
        self._listening = self._listening or all(map(_is_listening, self._listeners))
        self._set_accepting(self._listening and backlog < BACKLOG_MAX and pause_s <= 0)
        if backlog or self._found.doubtful or not self._listening:
            timeout_s = min(timeout_s, RETRY_S)
        if pause_s > 0:
            timeout_s = min(timeout_s, pause_s)
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                self._accept(key.data)
        if self._outbox.backlog:
            self._outbox.flush()
        if self._found.doubtful:
            self._settle_doubtful()
        if self.refused and not self._refused_before:
            self.log.warning("maximum of connections reached: refusing clients")
        self._refused_before = self.refused
        self._guard.check()
        if time.monotonic() >= self._check_keeper_after:
            self._check_keeper_after = time.monotonic() + KEEPER_S
            self._outbox.check_keeper()

    def _settle_doubtful(self) -> None:
        """Slots that nobody has a socket for, as far as the keeper knows.

        A connmgr of the release before does not say that nothing is on its way to it.
        """
        if time.monotonic() > self._doubtful_until:
            self._outbox.give_up(self._table, self._found.doubtful)
            self._found.doubtful = []
        else:
            self._found.doubtful = self._outbox.settle(self._table, self._found.doubtful)

    def show(self) -> None:
        """Publishes what was counted, in the lives before this one too."""
        self._stats.publish(
            {name: count + getattr(self, name) for name, count in self._before.items()},
            {"backlog": self._outbox.backlog, "connections_max": self._connections_max},
        )
        most = self._connections_max
        self._tables.look(
            "connections", self._balance.total, most, "limits.max_connections", self.refused
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

    def _stop_listening(self) -> None:
        """Nobody is accepted any more; those who were go their way."""
        self._set_accepting(False)
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._outbox.let_go_of_listeners()

    def _accept(self, at: int) -> None:
        listener = self._places[at]
        for _ in range(ACCEPTS_MAX):
            try:
                sock, address = self._listeners[at].accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in LEFT:
                    continue
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
            ip, port = _shown(address[0]), address[1]
            given = self._table.assign(connmgr, listener, ip, port, time.time_ns(), cookie_of(sock))
        if given is None:
            self._balance.take_back(connmgr)
            return self._refuse(sock, listener)
        crash.here("dispatcher.assigned")
        slot, uid = given
        self._outbox.add(Client(uid, slot, listener, connmgr, sock.detach()))

    def _adopt(self, sock: socket.socket) -> None:
        """A client the last dispatcher had accepted and nobody knows of."""
        ours = [listener.getsockname()[:2] for listener in self._listeners]
        local = sock.getsockname()
        ports = [at for at, address in enumerate(ours) if address[1] == local[1]]
        exact = [at for at in ports if ours[at][0] == local[0]]
        try:
            peer = sock.getpeername()
        except OSError:  # it has gone meanwhile
            return sock.close()
        self._give(sock, self._places[(exact or ports or [0])[0]] if ours else 0, peer)

    def _refuse(self, sock: socket.socket, listener: int) -> None:
        self.refused += 1
        listen = self.config.server.listen
        at = listen[listener] if listener < len(listen) else listen[0]
        with contextlib.suppress(OSError):
            if not protocol.transport(at.transport):  # nobody here can seal an envelope
                sock.send(protocol.error(Refusal.CONNECTIONS, protocol.number(at.protocol)))
            # Unread input would turn the close into a reset, which takes the refusal with it.
            sock.shutdown(socket.SHUT_WR)
            sock.recv(4096)
        sock.close()


def _is_listening(sock: socket.socket) -> bool:
    """`midair up` opens it early, and lets clients connect when they can be served."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shown(ip: str) -> str:
    """Without its zone; an IPv4 client of a listener for both families as such."""
    ip = ip.partition("%")[0]
    mapped = ip.startswith(MAPPED) and "." in ip and ip.count(":") == MAPPED.count(":")
    return ip.removeprefix(MAPPED) if mapped else ip


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
    return role.run(
        names.DISPATCHER,
        Dispatcher,
        argv,
        description="Accepts clients and hands them to the connection managers.",
    )


if __name__ == "__main__":
    sys.exit(main())
