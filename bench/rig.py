"""A router and a connection manager in one process: the data path under a microscope.

The engines are the real ones (native/connmgr.py, native/router.py), over real queues, segments and
TCP connections; only the processes are missing. Whoever holds the rig decides whose turn it is, so
a step can be measured alone, and the same calls give the same work every time.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import termios
import time
from types import TracebackType
from typing import Self

from connmgr.protocols import nats
from midair import names
from midair.config import MIB, Config
from midair.process import ipc
from midair.process.runtime import Runtime
from native import connmgr as native
from native.conntable import ConnTable
from native.router import Router, open_routing

TURNS_MAX = 1000  # a message that has not arrived by then never will
PATIENCE_S = 20.0
CONFIG = (
    Config()
    .with_("limits", max_connections=256)
    .with_("connmgr", count=1, subscriptions=4096, arena_bytes=64 * MIB, output_bytes=64 * MIB)
    .with_("router", subjects=4096)
)
CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n'


class RigError(Exception):
    """The engines did not do what was asked of them."""


class Rig:
    """Turns of the connection manager and of the router, one at a time.

    `flow_leases`: whether decisions of the router are repeated; else it is asked about everything.
    """

    def __init__(self, flow_leases: bool = False, config: Config = CONFIG) -> None:
        self.flow_leases = flow_leases
        self.config = config
        self.instance = f"rig-{os.getpid()}"
        self._queues: list[ipc.Queue] = []
        self._clients: dict[socket.socket, int] = {}  # and the descriptor of the other end
        self._uids: dict[socket.socket, int] = {}
        self._left: set[int] = set()  # uids of those that may go
        self.runtime = Runtime.create(self.instance)
        try:
            self._open()
        except BaseException:
            self._remove()
            raise

    def _open(self) -> None:
        config = self.config
        limits, runtime = config.limits, self.runtime
        self._queues = [ipc.open_queue(runtime.queue(noun, 0)) for noun in names.QUEUES]
        self._table = ConnTable.open(runtime, limits.max_connections, create=True)
        self._table.reap()
        subscriptions = config.connmgr.subscriptions
        refs, orders = (queue.fd for queue in self._queues)
        self._routing = open_routing(runtime, 1, limits.max_connections, subscriptions)
        self.router = self.successor()
        self.router.start()
        self._journal = native.open_journal(
            runtime, 0, limits.max_connections, subscriptions, config.connmgr.output_bytes
        )
        self.connmgr = native.Connmgr(
            self._journal,
            self._table.pointer,
            refs,
            orders,
            index=0,
            ports=1,
            max_payload=limits.max_payload,
            max_control_line=limits.max_control_line,
            max_subscriptions=config.subscriptions_each,
            few_subscriptions=config.subscriptions_few,
            max_pending=limits.max_pending,
            write_deadline_ns=int(limits.write_deadline_s * 1e9),
            ping_interval_ns=int(limits.ping_interval_s * 1e9),
            ping_max=limits.ping_max,
            name_answer_ns=int(limits.name_answer_s * 1e9),
            max_messages_s=limits.max_messages_per_s,
            max_bytes_s=limits.max_bytes_per_s,
            rate_closes=limits.rate_action == "close",
            flow_leases=self.flow_leases,
            slow=[native.SLOW.index(policy) for policy in config.slow_consumers],
        )
        chunks = native.arena_chunks(config.connmgr.arena_bytes)
        self._arena = native.open_arena(runtime, 0, chunks)
        self.connmgr.add_arena(0, self._arena)
        self.connmgr.load()
        self.connmgr.start()

    def successor(self) -> Router:
        """Another router over the same segment and queues: the present one is not used again."""
        refs, orders = (queue.fd for queue in self._queues)
        return Router(
            self._routing,
            1,
            self.config.router.subjects,
            0,
            False,
            refs=[refs],
            orders=[orders],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for client in self._clients:
            client.close()
        for queue in self._queues:
            queue.close()
        ipc.remove_all(self.instance)
        self.runtime.remove()

    # ---- steps -----------------------------------------------------------------------------------

    def turn_connmgr(self) -> None:
        """Reads what clients sent and does what the router ordered, as far as there is any."""
        events = self.connmgr.turn(0)
        for event in events:  # an answer may bring more of them
            if event.type == native.CONNECT:
                client = nats.connect(event.data, event.code)
                events += self.connmgr.connected(event.slot, event.uid, client.options, client.name)
            elif event.type == native.CLOSED and event.uid not in self._left:
                raise RigError(f"a client was refused: {event}")

    def turn_router(self) -> None:
        self.router.turn(0)

    def send(self, client: socket.socket, data: bytes) -> None:
        """Returns when all of it can be read at the other end, so that one read gets it.

        The kernel may hold some back until an acknowledgement comes; nothing announces the end
        of that, so the number of readable bytes is asked for until it is right.
        """
        client.sendall(data)
        waiting = array.array("i", [0])
        deadline = time.monotonic() + PATIENCE_S
        while waiting[0] < len(data):
            fcntl.ioctl(self._clients[client], termios.FIONREAD, waiting)
            if time.monotonic() > deadline:
                raise RigError(f"{waiting[0]} of {len(data)} bytes arrived")
            time.sleep(0)

    def receive(self, client: socket.socket, length: int) -> bytes:
        """That many bytes, which the connection manager has written."""
        got = b""
        while len(got) < length:
            if not select.select([client], [], [], PATIENCE_S)[0]:
                raise RigError(f"{len(got)} of {length} bytes arrived")
            got += client.recv(length - len(got))
        return got

    def peek(self, client: socket.socket) -> bytes:
        """What has arrived, which may be nothing."""
        got = b""
        while select.select([client], [], [], 0)[0]:
            got += client.recv(1 << 20)
        return got

    def drain(self) -> None:
        """Turns until every message that came in has been routed and written."""
        for _ in range(TURNS_MAX):
            ours, theirs = self.connmgr.stats(), self.router.stats()
            routed = ours["messages_in"] == theirs["messages"] + ours["repeated"]
            if routed and self.live() == 0:
                return
            self.turn_router()
            self.turn_connmgr()
        raise RigError(f"after {TURNS_MAX} turns not every message is out")

    def settle(self, client: socket.socket, end: bytes) -> bytes:
        """Turns until what the client got ends so; returns all of it."""
        got = b""
        for _ in range(TURNS_MAX):
            self.turn_connmgr()
            self.turn_router()
            got += self.peek(client)
            if got.endswith(end):
                return got
        raise RigError(f"after {TURNS_MAX} turns a client has only {got[-200:]!r}")

    def leave(self, client: socket.socket) -> None:
        """Closes the connection; returns when connmgr and router have heard of it."""
        count = self.connmgr.connections
        self._left.add(self._uids.pop(client))
        del self._clients[client]
        client.close()
        while self.connmgr.connections == count:  # what it is owed may be with the router
            self.turn_connmgr()
            self.turn_router()
        self.turn_connmgr()
        self.turn_router()

    def live(self) -> int:
        """Messages that are still in memory."""
        return native.arena_census(self._arena)[0]

    def open(self, *lines: bytes) -> socket.socket:
        """A client that has connected and sent these lines, each without CR LF."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, address = listener.accept()
        self._clients[client] = server.fileno()
        server.setblocking(False)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assigned = self._table.assign(0, 0, address[0], address[1], time.time_ns())
        if assigned is None:
            raise RigError("the connection table is full")
        self._uids[client] = assigned[1]
        self.connmgr.adopt(*assigned, server.detach())
        self.send(client, CONNECT + b"".join(line + b"\r\n" for line in (*lines, b"PING")))
        self.settle(client, b"PONG\r\n")
        return client
