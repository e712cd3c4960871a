"""midair-connmgr: owns client connections, receives messages and delivers them.

C moves the bytes (native/connmgr.c); this decides: who may connect, what a client is told
when it breaks a rule, when a connection has been silent for too long.
"""

from __future__ import annotations

import contextlib
import sys
import time

from connmgr import protocols
from connmgr.arrivals import Arrivals
from connmgr.leaving import Leaving
from connmgr.sockets import Kept, Sockets
from midair import names
from midair.errors import MidairError, MissingError
from midair.exits import Exit
from midair.keeper.client import KeeperClient
from midair.process import events, role
from midair.process.program import Program
from midair.process.tables import Tables
from midair.version import __version__
from native import connmgr as native
from native import migrate
from native.conntable import ConnTable
from native.protocol import NAMES, number, transport
from native.stats import Own, connmgr_gauges
from native.trace import open_ring, view_control

TICK_S = 1.0
TELL_SUBSCRIPTIONS_S = 60.0  # between two lines about clients with too many
TELL_SLOW_S = 0.05  # between two slow consumers in the event log
WAKE_TAG = 0  # of the descriptor that signals make readable; no other has the number 0


class Connmgr(role.Role):
    """One connection manager at work."""

    turn_s_max = 0.25  # the longest C keeps the processor from Python: signals, watchdog

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        assert program.index is not None
        self.index = program.index
        listeners = program.listen_fds(names.FD_HANDOFF)
        if len(listeners) != 1:
            raise MidairError(
                f"{len(listeners)} sockets named {names.FD_HANDOFF} were passed, 1 is needed: "
                "start it with midair up or the systemd units",
                Exit.USAGE,
            )
        self.listener = listeners[0]
        self.memory = migrate.for_connmgr(program.runtime, self.index, self.config.connmgrs)
        self.keeper = KeeperClient(program.runtime.socket(names.KEEPER_SOCKET))
        self.kept = Kept(self.keeper)
        self.queues = [program.open_queue(noun, self.index).fd for noun in names.QUEUES]
        self.protocols = [number(item.protocol) for item in self.config.server.listen]
        self.spoken = [protocols.find(name) for name in NAMES]
        self.tell_slow_after = 0.0
        self.tell_subs_after = 0.0
        self.tables = Tables(self.log, program.event)
        self.handlers = {
            native.FD: self.on_fd,
            native.CONNECT: self.on_connect,
            native.CLOSED: self.on_closed,
            native.ENDED: self.on_ended,
        }

    def open(self, create: bool) -> None:
        """Maps the segments and reads their heads; nothing in them changes before recover()."""
        config, runtime = self.config, self.program.runtime
        limits = config.limits
        self.table = ConnTable.open(runtime, limits.max_connections, create=create)
        journal = native.open_journal(
            runtime,
            self.index,
            limits.max_connections,
            config.connmgr.subscriptions,
            config.connmgr.output_bytes,
            create,
        )
        self.engine = native.Connmgr(
            journal,
            self.table.pointer,
            *self.queues,
            index=self.index,
            ports=config.ports,
            max_payload=limits.max_payload,
            max_control_line=limits.max_control_line,
            max_subscriptions=config.subscriptions_each,
            few_subscriptions=config.subscriptions_few,
            max_pending=limits.max_pending,
            write_deadline_ns=int(limits.write_deadline_s * 1e9),
            ping_interval_ns=int(limits.ping_interval_s * 1e9),
            ping_max=limits.ping_max,
            name_answer_ns=int(limits.name_answer_s * 1e9),
            spin_ns=config.latency.spin_ns,
            spin_adaptive=config.latency.spin_adaptive,
            flow_leases=config.latency.flow_leases,
            max_messages_s=limits.max_messages_per_s,
            max_bytes_s=limits.max_bytes_per_s,
            rate_closes=limits.rate_action == "close",
            slow=[native.SLOW.index(policy) for policy in config.slow_consumers],
            protocol=self.protocols,
            transport=[transport(item.transport) for item in self.config.server.listen],
            greeting=self.greetings(),
        )
        # Whoever comes first makes an arena: what is written into it then is the same.
        chunks = native.arena_chunks(config.connmgr.arena_bytes)
        for index in range(config.connmgrs):
            self.engine.add_arena(index, native.open_arena(runtime, index, chunks, create))

    def greetings(self, lame_duck: bool = False) -> list[bytes]:
        """What clients get first, for each listener."""
        config = self.config
        server = protocols.Server(
            self.program.instance,
            config.server.name,
            __version__,
            config.listen,
            config.limits.max_payload,
            lame_duck,
        )
        return [self.spoken[at].greeting(server) for at in self.protocols]

    def greet_as(self, lame_duck: bool) -> None:
        for at, text in enumerate(self.greetings(lame_duck)):
            self.engine.set_greeting(at, text)

    def add_old_arenas(self) -> None:
        """Maps those of connmgrs that ended: the batch that a predecessor did not finish may name
        messages that it has let go of already."""
        chunks = native.arena_chunks(self.config.connmgr.arena_bytes)
        for index in range(self.config.ports, names.CONNMGRS_MAX):
            with contextlib.suppress(MissingError):
                arena = native.open_arena(self.program.runtime, index, chunks, create=False)
                self.engine.add_arena(index, arena)

    def stand_still(self) -> None:
        self.kept.turn()

    def recover(self) -> dict[str, int]:
        """Takes up what a predecessor left, then whatever the dispatcher sends.

        The order is that of the engine: it reads its journal, gets its counters and its
        sockets, and only then starts.
        """
        program, config = self.program, self.config
        program.pin()
        if self.engine.found_batch:
            self.add_old_arenas()
        found = self.engine.load()
        self.stats = Own(
            program.runtime,
            names.CONNMGR,
            self.index,
            config.limits.max_connections,
            program.ipc_gid,
        ).pointer
        self.engine.resume(self.stats)
        self.ring = open_ring(program.runtime, self.index, config.trace.ring_bytes)
        self.control = view_control(program.runtime)
        self.engine.trace(self.ring, self.control.pointer, program.generation)
        self.sockets = Sockets(
            self.index,
            self.engine,
            self.table,
            self.keeper,
            self.log,
            self.kept.take(),
            self.listener,
        )
        back = self.sockets.readopt() if program.generation > 1 else 0
        self.handle(self.engine.start())
        self.sockets.check_keeper()
        self.engine.watch(program.wake_fd, WAKE_TAG)
        self.sockets.adopt_waiting()
        self.arrivals = Arrivals(self.listener, self.engine, self.sockets, self.log)
        self.leaving = Leaving(program, self.engine, self.table, self.greet_as)
        self.next_tick = time.monotonic() + TICK_S
        if not found and not back:
            return {}
        stats = self.engine.stats()
        return {
            "connections": found,
            "sockets": back,
            "words": stats["found_words"],
            "bytes_read": stats["found_input"],
            "bytes_written": stats["found_output"],
            "batches": stats["found_batches"],
        }

    def turn(self, timeout_s: float) -> None:
        self.handle(self.engine.turn(int(timeout_s * 1000)))
        if time.monotonic() >= self.next_tick:
            self.next_tick = time.monotonic() + TICK_S
            self.handle(self.engine.tick())
            self.sockets.check_keeper()
            self.sockets.fetch_overdue()
            self.leaving.tick(TICK_S)

    def show(self) -> None:
        self.engine.show(self.stats)
        now = connmgr_gauges(self.stats)
        subs, blocks = now.subscriptions, now.output_blocks - now.output_free
        self.tables.look("subscriptions", subs, now.subscriptions_max, "connmgr.subscriptions")
        most = now.output_blocks - native.BLOCKS_KEPT
        self.tables.look("output blocks", blocks, most, "connmgr.output_bytes")

    def handle(self, events: list[native.Event]) -> None:
        """Each event to its handler."""
        for event in events:
            self.handlers[event.type](event)

    def on_fd(self, event: native.Event) -> None:
        if event.code == WAKE_TAG:
            self.program.drain_wake()
        elif event.code == self.sockets.keeper_fd:
            self.sockets.check_keeper()
        else:
            self.arrivals.receive(event.code)

    def protocol_of(self, slot: int) -> protocols.Protocol:
        """What the client in that slot speaks."""
        listener = self.table.slot(slot).listener
        return self.spoken[self.protocols[listener] if listener < len(self.protocols) else 0]

    def on_connect(self, event: native.Event) -> None:
        try:
            client = self.protocol_of(event.slot).connect(event.data, event.code)
        except protocols.RefusedError as refused:
            self.engine.end(event.slot, event.uid, native.PROTOCOL, str(refused))
            return
        self.log.debug("client %d: %r", event.uid, client)
        about = (client.name, client.lang, client.version)
        self.engine.describe(self.stats, event.slot, event.uid, *about)
        self.handle(self.engine.connected(event.slot, event.uid, client.options, client.ipc_name))

    def on_closed(self, event: native.Event) -> None:
        if event.code in native.SLOW_REASONS and time.monotonic() >= self.tell_slow_after:
            self.tell_slow_after = time.monotonic() + TELL_SLOW_S
            pending = native.pending(self.stats, event.slot, event.uid)
            reason = native.REASONS[event.code]
            said = {"uid": event.uid, "reason": reason, "pending_bytes": pending}
            self.program.event(events.SLOW_CONSUMER, **said)
        if event.code == native.SUBSCRIPTIONS and time.monotonic() >= self.tell_subs_after:
            self.tell_subs_after = time.monotonic() + TELL_SUBSCRIPTIONS_S
            self.log.warning(
                "client %d closed: too many subscriptions (limits.max_subscriptions), or no room "
                "for one more (connmgr.subscriptions, router.subjects), or its share of the "
                "router's wildcards or long subjects is used up",
                event.uid,
            )
        self.log.debug("client %d closed: %s", event.uid, native.REASONS[event.code])
        self.sockets.closed(event.uid)

    def on_ended(self, event: native.Event) -> None:
        self.log.debug("client %d: session ended", event.uid)


def main() -> int:
    return role.run(
        names.CONNMGR, Connmgr, indexed=True, description="Midair's connection manager."
    )


if __name__ == "__main__":
    sys.exit(main())
