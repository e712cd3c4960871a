"""The way of an accepted socket: keeper first, then the connmgr, then our copy is closed.

The order makes every crash harmless once the keeper has its copy: the slot in the
connection table says whose the connection is, the keeper has the socket, so the connmgr
(or a restarted dispatcher, see `Outbox.recover`) finds both.

A peer that is away is no reason to wait: its listening socket belongs to the service
manager, so connecting and sending succeed, and what was sent lies in the socket until the
peer is back. When that is full too, hand-offs stay here, and `backlog` grows; the
dispatcher stops accepting before it grows too long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from midair.errors import MissingError, PermissionsError
from midair.keeper.client import KeeperClient
from midair.process import crash, trust, wire
from native import guard
from native.conntable import ASSIGNED, ConnTable, Slot

_BUSY = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)


# A slot assigned this long ago that nobody has a socket for will not be served any more.
FORGOTTEN_S = 30
_SO_COOKIE = 57  # socket(7); not in the socket module
GUARDED = guard.UIDS


def cookie_of(sock: socket.socket) -> int:
    """The kernel's number of a socket: the same for every copy, never given twice."""
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), sys.byteorder)


@dataclass
class Recovered:
    """What was found of the last dispatcher's work."""

    sent_again: int = 0
    given_up: int = 0
    unknown: list[socket.socket] = field(default_factory=list)  # accepted, without a slot
    doubtful: list[Slot] = field(default_factory=list)  # assigned, and nobody has the socket yet
    nameless: list[int] = field(default_factory=list)  # uids of the guard, for `forget`


@dataclass(frozen=True)
class Client:
    """An accepted connection on its way. `fd` is ours to close when it has arrived."""

    uid: int
    slot: int
    listener: int
    connmgr: int
    fd: int


class Link:
    """The connection to one connmgr and the clients waiting to be sent over it."""

    def __init__(self, path: str) -> None:
        self.waiting: deque[Client] = deque()
        self._path = path
        self._socket: socket.socket | None = None
        self._version = 0  # spoken on this connection
        self._asked = False  # and not answered yet

    def flush(self) -> None:
        """Sends what it can. What remains waiting is for a later turn."""
        while self.waiting:
            part = [self.waiting[at] for at in range(min(len(self.waiting), wire.HANDOFFS_MAX))]
            if not self._send(part):
                return
            crash.here("dispatcher.sent")
            for client in part:
                self.waiting.popleft()
                os.close(client.fd)

    def answered(self) -> bool:
        """Whether the connmgr has read all that a dispatcher before this one had sent to it."""
        if not self._connected():
            return False
        self._listen()
        return not self._asked

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, part: Sequence[Client]) -> bool:
        entries = [(c.uid, c.slot, c.listener) for c in part]
        for _attempt in range(2):  # the second for a connection found broken by the first
            if not self._connected():
                return False
            self._listen()
            if self._socket is None:
                continue
            message = wire.pack_handoff(entries, self._version)
            try:
                wire.send(self._socket, message, [c.fd for c in part])
                return True
            except OSError as error:
                if error.errno in _BUSY:
                    return False
                self.close()
        return False

    def _connected(self) -> bool:
        if self._socket is not None:
            return True
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.connect(self._path)
            trust.check_peer(made, self._path)
        except OSError:
            made.close()
            return False
        except PermissionsError:
            made.close()
            raise
        self._socket = made
        self._version = 0
        self._asked = True
        with contextlib.suppress(OSError):  # not answered: version 0 is understood by everyone
            wire.send(made, wire.ASK)
        return True

    def _listen(self) -> None:
        """Which version the connmgr understands, if it has said so."""
        if not self._asked:
            return
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, wire.WireError):
            try:
                data, fds = wire.receive(self._socket)
            except BlockingIOError:
                raise
            except OSError:
                data, fds = b"", []
            wire.close_all(fds)
            if not data:  # it died before it answered
                return self.close()
            version = wire.heard(data)
            self._version = self._version if version is None else version
            self._asked = version is None


class Outbox:
    """Everything that has been accepted and has not arrived."""

    def __init__(
        self, keeper: KeeperClient, paths: Sequence[str], own: Sequence[tuple[int, int]] = ()
    ) -> None:
        """`own`: (uid, descriptor) of the sockets it listens on, which the keeper has copies of."""
        self._keeper = keeper
        self._own = own
        self._own_unheld = list(own)
        self._unheld: deque[Client] = deque()
        self._links = [Link(path) for path in paths]

    @property
    def backlog(self) -> int:
        """How many clients are waiting here."""
        return len(self._unheld) + sum(len(link.waiting) for link in self._links)

    def add(self, client: Client) -> None:
        self._unheld.append(client)

    def flush(self) -> None:
        """Moves everything as far as it goes. To be called on every turn with a backlog."""
        self.check_keeper()
        held = self._keeper.hold([(client.uid, client.fd) for client in self._unheld])
        if held:
            crash.here("dispatcher.held")
        for _ in range(held):
            client = self._unheld.popleft()
            self._links[client.connmgr].waiting.append(client)
        for link in self._links:
            link.flush()

    def let_go_of_listeners(self) -> None:
        """They are closed: a new keeper is not given them."""
        self._own, self._own_unheld = [], []

    def check_keeper(self) -> None:
        """A new keeper knows neither what we listen on nor those that wait for their connmgr."""
        if self._keeper.check():
            self._own_unheld = list(self._own)
            for link in self._links:
                self._unheld.extend(link.waiting)
                link.waiting.clear()
        if self._own_unheld:
            del self._own_unheld[: self._keeper.hold(self._own_unheld)]

    def recover(self, table: ConnTable, timeout_s: float) -> Recovered:
        """Finishes what the last dispatcher left half done.

        A slot still ASSIGNED was either never handed off, or its connmgr has not looked
        yet: both are sent again, and a connmgr ignores what it knows. The socket is with
        the keeper under its uid, or the guard gave it to the keeper as a nameless one.
        """
        left = {slot.uid: slot for slot in table.used(state=ASSIGNED)}
        try:
            found = dict(self._keeper.give([*left, *GUARDED], timeout_s))
        except MissingError:
            return Recovered()  # the connmgrs look for their ASSIGNED slots themselves
        result = Recovered()
        nameless = [uid for uid in found if uid in GUARDED]
        known = {slot.cookie: slot for slot in table.used()} if nameless else {}
        for uid in nameless:
            sock = socket.socket(fileno=found.pop(uid))
            slot = known.get(cookie_of(sock))
            if slot is None:
                result.unknown.append(sock)
            elif slot.uid in left and slot.uid not in found:
                found[slot.uid] = sock.detach()
            else:  # it has arrived where it should: this is only another copy
                sock.close()
        for uid, slot in left.items():
            if uid in found and slot.connmgr < len(self._links):
                self.add(Client(uid, slot.slot, slot.listener, slot.connmgr, found[uid]))
                result.sent_again += 1
            elif uid in found:  # there are fewer connmgrs than there were
                table.unassign(slot.slot)
                self._keeper.drop([uid])
                os.close(found[uid])
            elif time.time_ns() - slot.accepted_ns > FORGOTTEN_S * 1e9:
                table.unassign(slot.slot)
                result.given_up += 1
            else:
                result.doubtful.append(slot)
        self.flush()
        result.nameless = nameless
        return result

    def settle(self, table: ConnTable, doubtful: Sequence[Slot]) -> list[Slot]:
        """Frees those that are still assigned and whose connmgr has said that no hand-off is on its
        way to it: their clients left, or their sockets are gone. Those that are left."""
        answered = {slot.connmgr: False for slot in doubtful}
        for index in answered:
            answered[index] = index >= len(self._links) or self._links[index].answered()
        self.give_up(table, [slot for slot in doubtful if answered[slot.connmgr]])
        return [slot for slot in doubtful if not answered[slot.connmgr]]

    def give_up(self, table: ConnTable, doubtful: Sequence[Slot]) -> None:
        """Frees those that are still assigned."""
        for slot in doubtful:
            if table.is_assigned(slot.slot, slot.uid, slot.connmgr):
                table.unassign(slot.slot)

    def forget(self, nameless: Sequence[int]) -> None:
        """Has the keeper drop what the guard gave it, once all of that is held under its uid.

        Not before: until then there is no other copy that would outlive this process. What is
        left is found again by the next dispatcher, which sees that it has arrived.
        """
        self.flush()
        if not self._unheld:
            self._keeper.drop(nameless)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._keeper.close()
