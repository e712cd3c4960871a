"""The sockets of a connmgr's clients: where they come from, and who holds the second copies.

A socket comes from the dispatcher, or after a crash from the keeper, perhaps from both. The
connection table says whether it is still to be served; the keeper has a copy of each until its
connection ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Set

from midair import names
from midair.errors import MissingError
from midair.keeper import listening
from midair.keeper.client import KeeperClient
from midair.process import crash, wire
from native import connmgr as native
from native.conntable import ASSIGNED, CLOSED, ConnTable

OVERDUE_S = 0.5  # a hand-off takes less, or never comes
LOOK_S = 30.0  # after a start
GIVE_S = 2.0
HOLD_NEW_S = 10.0  # a hand-off is on its way for less than this


class Kept:
    """Copies of all client sockets, for a connmgr that stands still (standstill.py).

    It serves nobody yet, so the keeper would have the only ones. A new keeper gets them from here.
    """

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._copies: dict[int, int] | None = None
        self._unheld: list[tuple[int, int]] = []

    def turn(self) -> None:
        """Asks for them once; gives them to each keeper that is new since."""
        if self._copies is None:
            with contextlib.suppress(MissingError):
                self._copies = dict(self._keeper.give(None, GIVE_S))
        elif self._keeper.check():
            self._unheld = list(self._copies.items())
        if self._unheld:
            del self._unheld[: self._keeper.hold(self._unheld)]

    def take(self) -> dict[int, int]:
        """(uid, descriptor) of all of them: the caller's from here on."""
        copies, self._copies = self._copies or {}, None
        return copies


class Sockets:
    """Gives sockets to the engine, and copies of them to the keeper."""

    def __init__(
        self,
        index: int,
        engine: native.Connmgr,
        table: ConnTable,
        keeper: KeeperClient,
        log: logging.Logger,
        kept: dict[int, int],
        listener: int,
    ) -> None:
        """`kept`: copies it has already, for those that the keeper does not have.

        `listener`: the socket the dispatcher connects to, which the keeper has a copy of, too.
        """
        self.keeper_fd = -1  # being watched
        self._index = index
        self._engine = engine
        self._table = table
        self._keeper = keeper
        self._log = log
        self._kept = kept
        self._own = (listening.uid(names.FD_HANDOFF, index), listener)
        self._unheld = [self._own]  # (uid, fd) the keeper has yet to take
        self._waiting: list[tuple[int, int, int]] = []  # (slot, uid, fd) to adopt when started
        self._hold_new_until = 0.0
        self._look_until = 0.0  # until then, hand-offs may have gone to a predecessor

    def readopt(self) -> int:
        """Gives connections of a predecessor the sockets the keeper has kept; how many came back.

        Those it was assigned but never saw are adopted later; those whose end had begun are let go.
        """
        self.missed()
        slots = self._table.slots_by_uid(self._index)
        given = self._keeper.give(list(slots))
        given += self._not_given(slots.keys() - dict(given).keys())
        back = 0
        for uid, fd in given:
            slot = slots[uid]
            try:
                if self._engine.needs_socket(slot) == uid:
                    self._engine.readopt(slot, uid, fd)
                    back += 1
                elif self._table.is_assigned(slot, uid, self._index):
                    self._waiting.append((slot, uid, fd))
                    back += 1
                else:
                    self._let_go(uid, fd)
            except ConnectionResetError:  # its client has left: the engine ends it
                self._let_go(uid, fd)
            except OSError as error:
                self._log.warning("connection %d: %s", uid, error)
                self._let_go(uid, fd)
        missing = slots.keys() - dict(given).keys()
        lost = sorted(uid for uid in missing if self._engine.needs_socket(slots[uid]) == uid)
        if lost:
            some = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
            self._log.warning("%d connections lost, the keeper has no copy: %s", len(lost), some)
        return back

    def _not_given(self, missing: Set[int]) -> list[tuple[int, int]]:
        """Copies that we kept and the keeper has yet to get. The others are closed."""
        if not self._kept:
            return []
        mine = [(uid, fd) for uid, fd in self._kept.items() if uid in missing]
        self._unheld += mine
        # What has ended meanwhile was perhaps given to a new keeper, and nobody else would drop it.
        known = {slot.uid for slot in self._table.used()}
        ended = [uid for uid in self._kept if uid < listening.REUSED_UIDS and uid not in known]
        wire.close_all(fd for uid, fd in self._kept.items() if uid not in missing)
        self._kept = {}
        self._keeper.drop(ended)
        return mine

    def adopt_waiting(self) -> None:
        """Adopts what `readopt` found and the engine could not take before it was started."""
        for slot, uid, fd in self._waiting:
            self.adopt(slot, uid, fd)
        self._waiting.clear()

    def adopt(self, slot: int, uid: int, fd: int) -> None:
        """A socket from the dispatcher, or from the keeper after a crash: perhaps both.

        If the table says that it is not to be served any more, only this copy is closed: the
        connection may be alive in another.
        """
        known = slot < self._table.capacity  # or it is no dispatcher who sends that
        if not known or not self._table.is_assigned(slot, uid, self._index):
            os.close(fd)
            return
        try:
            self._engine.adopt(slot, uid, fd)
        except OSError as error:
            self._log.warning("connection %d refused: %s", uid, error)
            self._table.set_state(slot, CLOSED)
            self._let_go(uid, fd)
            return
        if time.monotonic() < self._hold_new_until:
            self._unheld.append((uid, fd))
            self.check_keeper()

    def closed(self, uid: int) -> None:
        """A connection has ended: its copy is not needed any more."""
        self._unheld = [held for held in self._unheld if held[0] != uid]
        crash.here("connmgr.closed")
        self._keeper.drop([uid])

    def check_keeper(self) -> None:
        """A new keeper has nothing: it is given a copy of every socket again."""
        if self._keeper.check():
            self._unheld = [self._own, *self._engine.sockets()]
            # What the dispatcher gave to the old one and we have yet to receive is new, too.
            self._hold_new_until = time.monotonic() + HOLD_NEW_S
        self.keeper_fd = self._keeper.fileno()
        if self.keeper_fd >= 0:  # a new connection may have the number of the old one
            self._engine.watch(self.keeper_fd, self.keeper_fd)
        if not self._unheld:
            return
        try:
            held = self._keeper.hold(self._unheld)
        except OSError:  # one was closed in C, and its event is still to be handled
            served = {self._own, *self._engine.sockets()}
            self._unheld = [item for item in self._unheld if item in served]
            held = self._keeper.hold(self._unheld)
        del self._unheld[:held]

    def missed(self) -> None:
        """Something may have been handed over that did not arrive: the keeper has it."""
        self._look_until = time.monotonic() + LOOK_S

    def fetch_overdue(self) -> None:
        """Takes from the keeper what was handed to our predecessor while it was dying.

        The kernel passes the lease on before it closes a dead process's sockets, so the
        dispatcher may still have sent something there after our start looked.
        """
        if time.monotonic() >= self._look_until:
            return
        overdue = time.time_ns() - int(OVERDUE_S * 1e9)
        slots = {
            slot.uid: slot.slot
            for slot in self._table.used(self._index, ASSIGNED)
            if slot.accepted_ns < overdue
        }
        if not slots:
            return
        with contextlib.suppress(MissingError):
            for uid, fd in self._keeper.give(list(slots), GIVE_S):
                self.adopt(slots[uid], uid, fd)

    def _let_go(self, uid: int, fd: int) -> None:
        """Ends a client connection that nobody serves, in every process that has a copy of it."""
        with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        self._keeper.drop([uid])
