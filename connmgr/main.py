"""midair-connmgr: owns client connections, receives messages and delivers them.

C moves the bytes (native/connmgr.c); this decides: who may connect, what a client is told
when it breaks a rule, when a connection has been silent for too long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from connmgr import connect
from connmgr.handoff import Handoffs
from midair import names
from midair.errors import MidairError, MissingError
from midair.exits import Exit
from midair.keeper.client import KeeperClient
from midair.process import crash, events, program
from midair.process.program import Program
from midair.process.standstill import Standstill
from native import connmgr as native
from native import migrate
from native.conntable import ASSIGNED, CLOSED, ConnTable
from native.stats import Own
from native.trace import open_ring, view_control

TURN_MS = 250  # the longest C keeps the processor from Python: signals, watchdog
TICK_S = 1.0
SHOW_S = 0.2  # how often counters are published
OVERDUE_S = 0.5  # a hand-off takes less, or never comes
LOOK_S = 30.0  # after a start
GIVE_S = 2.0
TELL_SLOW_S = 0.05  # between two slow consumers in the event log
HOLD_NEW_S = 10.0  # a hand-off is on its way for less than this
WAKE_TAG = 0  # of the descriptor that signals make readable; no other has the number 0


class Connmgr:
    """One connection manager at work."""

    def __init__(self, program: Program) -> None:
        assert program.index is not None
        self.program = program
        self.index = program.index
        self.log = program.log
        crash.arm(program.called)
        program.pin()
        self.queues = [program.open_queue(noun, self.index).fd for noun in names.QUEUES]
        self.is_open = False
        memory = migrate.for_connmgr(program.instance, self.index, program.config.connmgrs)
        self.standstill = Standstill(program, memory)
        program.acquire_lease(self.warm)
        self.standstill.end()
        if not self.is_open:
            self.open(create=True)
        self.keeper = KeeperClient(str(program.runtime.path / names.KEEPER_SOCKET))
        self.unheld: list[tuple[int, int]] = []  # (uid, fd) the keeper has yet to take
        self.waiting: list[tuple[int, int, int]] = []  # (slot, uid, fd) to adopt when started
        self.hold_new_until = 0.0
        self.tell_slow_after = 0.0
        self.look_until = 0.0  # until then, hand-offs may have gone to a predecessor
        self.keeper_fd = -1  # being watched
        self.recovered: dict[str, float] = {}  # what start() found, for the event log
        self.handlers = {
            native.FD: self.on_fd,
            native.CONNECT: self.on_connect,
            native.CLOSED: self.on_closed,
            native.ENDED: self.on_ended,
        }

    def warm(self) -> bool:
        """Opens what there is while another process is at work; False: nothing yet."""
        if self.standstill.ahead:
            self.standstill.join()
            return False
        with contextlib.suppress(MissingError):
            self.open(create=False)
        return self.is_open

    def open(self, create: bool) -> None:
        """Maps the segments and reads their heads; nothing in them changes before start()."""
        config, instance = self.program.config, self.program.instance
        limits = config.limits
        self.table = ConnTable.open(instance, limits.max_connections, create=create)
        journal = native.open_journal(
            instance,
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
            connmgrs=config.connmgrs,
            max_payload=limits.max_payload,
            max_control_line=limits.max_control_line,
            max_subscriptions=limits.max_subscriptions,
            max_pending=limits.max_pending,
            write_deadline_ns=int(limits.write_deadline_s * 1e9),
            ping_interval_ns=int(limits.ping_interval_s * 1e9),
            ping_max=limits.ping_max,
            spin_ns=config.latency.spin_ns,
            spin_adaptive=config.latency.spin_adaptive,
            flow_leases=config.latency.flow_leases,
            max_messages_s=limits.max_messages_per_s,
            max_bytes_s=limits.max_bytes_per_s,
            rate_closes=limits.rate_action == "close",
            slow=[native.SLOW.index(policy) for policy in config.slow_consumers],
        )
        # Whoever comes first makes an arena: what is written into it then is the same.
        chunks = native.arena_chunks(config.connmgr.arena_bytes)
        for index in range(config.connmgrs):
            self.engine.add_arena(index, native.open_arena(instance, index, chunks, create))
        self.is_open = True

    def start(self) -> None:
        """Takes up what a predecessor left, then whatever the dispatcher sends."""
        started = time.monotonic()
        found = self.engine.load()
        self.stats = Own(
            self.program.instance,
            names.CONNMGR,
            self.index,
            self.program.config.limits.max_connections,
            self.program.ipc_gid,
        ).pointer
        self.engine.resume(self.stats)
        self.ring = open_ring(
            self.program.instance, self.index, self.program.config.trace.ring_bytes
        )
        self.control = view_control(self.program.instance)
        self.engine.trace(self.ring, self.control.pointer, self.program.generation)
        back = self.readopt() if self.program.generation > 1 else 0
        self.handle(self.engine.start())
        if found or back:
            stats = self.engine.stats()
            self.recovered = {
                "connections": found,
                "sockets": back,
                "words": stats["found_words"],
                "bytes_read": stats["found_input"],
                "bytes_written": stats["found_output"],
                "batches": stats["found_batches"],
                "took_ms": round((time.monotonic() - started) * 1e3, 1),
            }
            self.log.info(
                "recovered: %d connections found, %d sockets back; repaired: %d words of a step, "
                "%d bytes read, %d bytes written, %d batches; in %.1f ms",
                *self.recovered.values(),
            )
        self.check_keeper()
        listeners = self.program.listen_fds(names.FD_HANDOFF)
        if len(listeners) != 1:
            raise MidairError(
                f"{len(listeners)} sockets named {names.FD_HANDOFF} were passed, 1 is needed: "
                "start it with midair up or the systemd units",
                Exit.USAGE,
            )
        self.engine.watch(self.program.wake_fd, WAKE_TAG)
        for slot, uid, fd in self.waiting:
            self.adopt(slot, uid, fd)
        self.handoffs = Handoffs(
            listeners[0], lambda fd: self.engine.watch(fd, fd), self.engine.unwatch
        )

    def readopt(self) -> int:
        """Gives connections of a predecessor the sockets the keeper has kept.

        Those it was assigned but never saw are adopted; those whose end had begun are let go.
        """
        slots = self.table.slots_by_uid(self.index)
        given = self.keeper.give(list(slots))
        back = 0
        for uid, fd in given:
            slot = slots[uid]
            try:
                if self.engine.needs_socket(slot) == uid:
                    self.engine.readopt(slot, uid, fd)
                    back += 1
                elif self.table.is_assigned(slot, uid, self.index):
                    self.waiting.append((slot, uid, fd))
                    back += 1
                else:
                    self.let_go(uid, fd)
            except OSError as error:
                self.log.warning("connection %d: %s", uid, error)
                self.let_go(uid, fd)
        missing = slots.keys() - dict(given).keys()
        lost = sorted(uid for uid in missing if self.engine.needs_socket(slots[uid]) == uid)
        if lost:
            some = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
            self.log.warning("%d connections lost, the keeper has no copy: %s", len(lost), some)
        return back

    def fetch_overdue(self) -> None:
        """Takes from the keeper what was handed to our predecessor while it was dying.

        The kernel passes the lease on before it closes a dead process's sockets, so the
        dispatcher may still have sent something there after our start looked.
        """
        overdue = time.time_ns() - int(OVERDUE_S * 1e9)
        slots = {
            slot.uid: slot.slot
            for slot in self.table.used(self.index, ASSIGNED)
            if slot.accepted_ns < overdue
        }
        if not slots:
            return
        with contextlib.suppress(MissingError):
            for uid, fd in self.keeper.give(list(slots), GIVE_S):
                self.adopt(slots[uid], uid, fd)

    def let_go(self, uid: int, fd: int) -> None:
        """Ends a client connection that nobody serves, for whoever holds a copy of it."""
        with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        self.keeper.drop([uid])

    def serve(self) -> None:
        """The loop."""
        next_tick = time.monotonic() + TICK_S
        self.look_until = time.monotonic() + LOOK_S if self.program.generation > 1 else 0.0
        self.handle(self.engine.turn(0))
        self.program.ready()
        if self.recovered:
            self.program.event(events.RECOVERED, **self.recovered)
        turn_ms = min(TURN_MS, int(self.program.wait_s_max * 1000))
        self.engine.show(self.stats)
        next_show = time.monotonic() + SHOW_S
        while not self.program.stopping:
            self.handle(self.engine.turn(turn_ms))
            if time.monotonic() >= next_show:
                next_show = time.monotonic() + SHOW_S
                self.engine.show(self.stats)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self.handle(self.engine.tick())
                self.check_keeper()
                if time.monotonic() < self.look_until:
                    self.fetch_overdue()
            self.program.watchdog()

    def check_keeper(self) -> None:
        """A new keeper has nothing: it is given a copy of every socket again."""
        if self.keeper.check():
            self.unheld = list(self.engine.sockets())
            # What the dispatcher gave to the old one and we have yet to receive is new, too.
            self.hold_new_until = time.monotonic() + HOLD_NEW_S
        self.keeper_fd = self.keeper.fileno()
        if self.keeper_fd >= 0:  # a new connection may have the number of the old one
            self.engine.watch(self.keeper_fd, self.keeper_fd)
        if not self.unheld:
            return
        try:
            held = self.keeper.hold(self.unheld)
        except OSError:  # one was closed in C, and its event is still to be handled
            served = set(self.engine.sockets())
            self.unheld = [item for item in self.unheld if item in served]
            held = self.keeper.hold(self.unheld)
        del self.unheld[:held]

    def handle(self, events: list[native.Event]) -> None:
        """Each event to its handler."""
        for event in events:
            self.handlers[event.type](event)

    def on_fd(self, event: native.Event) -> None:
        if event.code == WAKE_TAG:
            self.program.drain_wake()
        elif event.code == self.keeper_fd:
            self.check_keeper()
        else:
            self.handoffs.receive(event.code, self.adopt, self.log)

    def adopt(self, slot: int, uid: int, fd: int) -> None:
        """A socket from the dispatcher, or from the keeper after a crash: perhaps both.

        The connection table says whether it is still to be served. If not, only this copy
        is closed: the connection may be alive in another.
        """
        if not self.table.is_assigned(slot, uid, self.index):
            os.close(fd)
            return
        try:
            self.engine.adopt(slot, uid, fd)
        except OSError as error:
            self.log.warning("connection %d refused: %s", uid, error)
            self.table.set_state(slot, CLOSED)
            self.let_go(uid, fd)
            return
        if time.monotonic() < self.hold_new_until:
            self.unheld.append((uid, fd))
            self.check_keeper()

    def on_connect(self, event: native.Event) -> None:
        try:
            client = connect.parse(event.data, event.code)
        except connect.RefusedError as refused:
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
        self.log.debug("client %d closed: %s", event.uid, native.REASONS[event.code])
        self.unheld = [held for held in self.unheld if held[0] != event.uid]
        crash.here("connmgr.closed")
        self.keeper.drop([event.uid])

    def on_ended(self, event: native.Event) -> None:
        self.log.debug("client %d: session ended", event.uid)


def serve(program: Program) -> None:
    connmgr = Connmgr(program)
    connmgr.start()
    connmgr.serve()


def main() -> int:
    return program.run(
        names.CONNMGR, serve, indexed=True, description="Midair's connection manager."
    )


if __name__ == "__main__":
    sys.exit(main())
