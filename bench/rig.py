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
import struct
import termios
import time
from types import TracebackType
from typing import Any, Self

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
    `connmgrs`: how many; `connmgr` is the first of them.
    """

    def __init__(
        self, flow_leases: bool = False, config: Config = CONFIG, connmgrs: int = 1
    ) -> None:
        self.count = connmgrs
        self.flow_leases = flow_leases
        self.config = config
        self.instance = f"rig-{os.getpid()}"
        self._queues: list[tuple[ipc.Queue, ...]] = []  # of each connmgr: references, orders
        self._journals: list[Any] = []
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
        self._queues = [
            tuple(ipc.open_queue(runtime.queue(noun, n)) for noun in names.QUEUES)
            for n in range(self.count)
        ]
        self._table = ConnTable.open(runtime, limits.max_connections, create=True)
        self._table.reap()
        subscriptions = config.connmgr.subscriptions
        self._routing = open_routing(runtime, self.count, limits.max_connections, subscriptions)
        self.router = self.successor()
        self.router.start()
        self.connmgrs = [self._make_connmgr(n) for n in range(self.count)]
        self.connmgr = self.connmgrs[0]
        chunks = native.arena_chunks(config.connmgr.arena_bytes)
        self._arenas = [native.open_arena(runtime, n, chunks) for n in range(self.count)]
        for connmgr in self.connmgrs:
            for n, arena in enumerate(self._arenas):
                connmgr.add_arena(n, arena)
            connmgr.load()
            connmgr.start()

    def _make_connmgr(self, index: int) -> native.Connmgr:
        config = self.config
        limits, subscriptions = config.limits, config.connmgr.subscriptions
        refs, orders = (queue.fd for queue in self._queues[index])
        journal = native.open_journal(
            self.runtime, index, limits.max_connections, subscriptions, config.connmgr.output_bytes
        )
        self._journals.append(journal)
        return native.Connmgr(
            journal,
            self._table.pointer,
            refs,
            orders,
            index=index,
            ports=self.count,
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

    def successor(self) -> Router:
        """Another router over the same segment and queues: the present one is not used again."""
        return Router(
            self._routing,
            self.count,
            self.config.router.subjects,
            0,
            False,
            refs=[refs.fd for refs, _ in self._queues],
            orders=[orders.fd for _, orders in self._queues],
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
        for queues in self._queues:
            for queue in queues:
                queue.close()
        ipc.remove_all(self.instance)
        self.runtime.remove()

    # ---- steps -----------------------------------------------------------------------------------

    def turn_connmgr(self, index: int | None = None) -> None:
        """Reads what clients sent and does what the router ordered, as far as there is any.

        `index`: whose turn it is, of several; else one after the other.
        """
        for connmgr in self.connmgrs if index is None else [self.connmgrs[index]]:
            self._turn(connmgr)

    def _turn(self, connmgr: native.Connmgr) -> None:
        events = connmgr.turn(0)
        for event in events:  # an answer may bring more of them
            if event.type == native.CONNECT:
                client = nats.connect(event.data, event.code)
                events += connmgr.connected(event.slot, event.uid, client.options, client.ipc_name)
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
        """What has arrived, which may be nothing. ConnectionError: the connection has ended."""
        got = b""
        while select.select([client], [], [], 0)[0]:
            part = client.recv(1 << 20)
            if not part:
                if not got:
                    raise ConnectionError("it was closed")
                break
            got += part
        return got

    def drain(self) -> None:
        """Turns until every message that came in has been routed and written."""
        for _ in range(TURNS_MAX):
            ours, theirs = [it.stats() for it in self.connmgrs], self.router.stats()
            asked = sum(it["messages_in"] - it["repeated"] for it in ours)
            if asked == theirs["messages"] and self.live() == 0:
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
        count = self.connections
        self._left.add(self._uids.pop(client))
        del self._clients[client]
        client.close()
        while self.connections == count:  # what it is owed may be with the router
            self.turn_connmgr()
            self.turn_router()
        self.turn_connmgr()
        self.turn_router()

    def reset(self, client: socket.socket) -> None:
        """Ends the connection without a word: what it is owed is not waited for."""
        self._left.add(self._uids.pop(client))
        del self._clients[client]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    @property
    def connections(self) -> int:
        return sum(it.connections for it in self.connmgrs)

    def live(self) -> int:
        """Messages that are still in memory."""
        return sum(native.arena_census(arena)[0] for arena in self._arenas)

    def open(self, *lines: bytes, index: int = 0) -> socket.socket:
        """A client that has connected and sent these lines, each without CR LF."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, address = listener.accept()
        self._clients[client] = server.fileno()
        server.setblocking(False)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assigned = self._table.assign(index, 0, address[0], address[1], time.time_ns())
        if assigned is None:
            raise RigError("the connection table is full")
        self._uids[client] = assigned[1]
        self.connmgrs[index].adopt(*assigned, server.detach())
        self.send(client, CONNECT + b"".join(line + b"\r\n" for line in (*lines, b"PING")))
        self.settle(client, b"PONG\r\n")
        return client
