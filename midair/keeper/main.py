"""The keeper: holds a second copy of every client socket, and nothing else.

A connection lives as long as one process has its descriptor open. The connmgr that uses
it has one, the keeper the other: whichever dies, the survivor gives the newcomer its
copies. The keeper maps nothing, parses nothing and never touches a socket it keeps, so
there is next to nothing in it that could fail or need an upgrade.

Beside those it holds the listening sockets of the instance (listening.py). Its whole state is a
dict from uid to descriptor. A keeper that replaces one that
was killed starts empty: its clients see their connections to it end and HOLD everything
again. One that is to replace a keeper at work (an upgrade) first asks that one for all it
has, so that there is no moment without copies; what its clients do not HOLD again was
dropped meanwhile, and is closed after a while. See wire.py.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence

from midair import names
from midair.errors import MidairError, MissingError
from midair.exits import Exit
from midair.keeper import listening
from midair.keeper.client import KeeperClient
from midair.process import crash, role, trust, wire
from midair.process.program import Program
from midair.process.standstill import Presence

# Descriptors in flight count against RLIMIT_NOFILE of an ordinary user (ETOOMANYREFS):
# that clears as soon as the receiver takes some, so it is tried again after this long.
RETRY_S = 0.01
# The HOLD and the DROP of a uid come over different connections, so a DROP may be read first
# (after the keeper was away, say): the uids dropped last are remembered, and not held again.
DROPPED_MAX = 65536
# Clients hold their sockets again as soon as they see a new keeper, or ask for them as soon
# as they are started again: what has not been spoken of by then belongs to nobody.
INHERITED_S = 60.0
# Connections: of each part, of its successor, and some. More push out one that never spoke.
PEERS_MAX = 256
ANSWERS_MAX = 65536  # that wait for one peer: it asks and does not read
log = logging.getLogger("midair")  # of this process, see program.py
INHERIT_S_MAX = 20.0  # how long a keeper at work may take to give what it has


class Peer:
    """A process that has its sockets kept."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.version = 0  # of its last message: what it is answered in
        self.spoke = False
        self.asked: list[int] | None = None  # a GIVE of this turn; empty: everything
        self.answers: deque[tuple[int, list[int]]] = deque()  # (op, uids) still to be sent


class Keeper:
    """One listening socket, the peers that connected to it, and what they have given."""

    def __init__(
        self,
        listener: socket.socket,
        inherited: Mapping[int, int] | None = None,
        inherited_s: float = INHERITED_S,
    ) -> None:
        self.held: dict[int, int] = dict(inherited or {})
        self._unclaimed = set(self.held)  # inherited, and no client has spoken of it yet
        self._unclaimed_until = time.monotonic() + inherited_s
        self.dropped: dict[int, None] = {}  # a uid is never given twice; the oldest first
        self.lost = 0  # descriptors that could not be taken for want of room
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._peers: dict[int, Peer] = {}
        self._retry = False

    def keep_own(self) -> None:
        """Holds a copy of its listening socket, for a manager that did not open it."""
        uid = listening.uid(names.FD_KEEPER)
        if uid in self.held:
            os.close(self.held[uid])
        self._unclaimed.discard(uid)
        self.held[uid] = os.dup(self._listener.fileno())

    def watch(self, fd: int) -> None:
        """Ends the waiting of `turn` when `fd` is readable (the program's signals)."""
        self._selector.register(fd, selectors.EVENT_READ)

    def turn(self, timeout_s: float) -> None:
        """Waits for something to do, and does it."""
        if self._unclaimed and time.monotonic() > self._unclaimed_until:
            wire.close_all(self.held.pop(uid) for uid in self._unclaimed)
            self._unclaimed.clear()
        if self._retry:
            timeout_s = RETRY_S
        if any(peer.asked is not None for peer in self._peers.values()):
            timeout_s = 0.0  # who asked while another was about to be answered
        self._retry = False
        self._read_all(timeout_s)
        # Answered only after everything that had arrived is read: what a dead process sent
        # before its successor asked lies in another connection, and must be in the answer. It
        # may have come after we looked, and the question with it: so look again.
        asking = [peer for peer in self._peers.values() if peer.asked is not None]
        if asking:
            self._read_all(0.0)
        for peer in asking:
            if peer.asked is not None:
                self._answer(peer, peer.asked)
                peer.asked = None
        for peer in list(self._peers.values()):
            if peer.answers:
                self._write(peer)

    def _read_all(self, timeout_s: float) -> None:
        """Everything from everyone who has sent something, waiting for the first."""
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (peer := self._peers.get(key.fd)) and mask & selectors.EVENT_READ:
                self._read(peer)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody, or no descriptors for anybody
                return
            if not trust.is_welcome(sock, self._listener):
                continue
            sock.setblocking(False)
            if len(self._peers) >= PEERS_MAX:
                silent = (peer for peer in self._peers.values() if not peer.spoke)
                if (oldest := next(silent, None)) is None:
                    sock.close()
                    continue
                self._forget(oldest)
            self._peers[sock.fileno()] = Peer(sock)
            self._selector.register(sock, selectors.EVENT_READ)
            # It may have sent something already, and this turn's answers must know of it.
            self._read(self._peers[sock.fileno()])

    def _read(self, peer: Peer) -> None:
        """Reads until there is no more: see `turn`."""
        while True:
            try:
                data, fds = wire.receive(peer.sock)
                if not data:
                    return self._forget(peer)
                peer.spoke = True
                self._obey(peer, data, fds)
            except BlockingIOError:
                return
            except wire.CutShort as cut:
                self.lost += cut.entries
            except wire.NewerError as newer:
                log.error("refused: %s", newer)
                return self._forget(peer)
            except (wire.WireError, ConnectionError):
                return self._forget(peer)

    def _obey(self, peer: Peer, data: bytes, fds: list[int]) -> None:
        if wire.is_ask(data):
            wire.close_all(fds)  # there are none, unless somebody else speaks
            with contextlib.suppress(OSError):
                wire.send(peer.sock, wire.hello())
            return
        try:
            op, uids = wire.unpack_uids(data)
            peer.version = wire.version_of(data)
            if len(fds) != (len(uids) if op == wire.HOLD else 0):
                raise wire.WireError(f"op {op}: {len(uids)} uids, {len(fds)} descriptors")
        except wire.WireError:
            wire.close_all(fds)
            raise
        self._unclaimed.difference_update(uids)
        if op == wire.HOLD:
            crash.here("keeper.received")
            for uid, fd in zip(uids, fds, strict=True):
                if uid in self.dropped:
                    os.close(fd)
                    continue
                older = self.held.get(uid)
                self.held[uid] = fd
                if older is not None:
                    os.close(older)
        elif op == wire.DROP:
            wire.close_all(self.held.pop(uid) for uid in uids if uid in self.held)
            self.dropped.update(dict.fromkeys(uid for uid in uids if uid < listening.REUSED_UIDS))
            while len(self.dropped) > DROPPED_MAX:
                del self.dropped[next(iter(self.dropped))]
            crash.here("keeper.dropped")
        elif len(peer.answers) >= ANSWERS_MAX:
            raise wire.WireError("it does not read its answers")
        elif op == wire.GIVE:
            peer.asked = uids
        elif op == wire.PING:
            peer.answers.append((wire.PONG, []))
        else:
            raise wire.WireError(f"op {op}")

    def _answer(self, peer: Peer, asked: Sequence[int]) -> None:
        wanted = [uid for uid in asked or self.held if uid in self.held]
        if not asked:
            wanted = [uid for uid in wanted if uid not in listening.UIDS]
        for at in range(0, len(wanted), wire.FDS_MAX):
            peer.answers.append((wire.HELD, wanted[at : at + wire.FDS_MAX]))
        peer.answers.append((wire.END, []))

    def _write(self, peer: Peer) -> None:
        events = selectors.EVENT_READ
        while peer.answers:
            op, uids = peer.answers[0]
            still = [uid for uid in uids if uid in self.held]  # some may be dropped by now
            try:
                message = wire.pack_uids(op, still, peer.version)
                wire.send(peer.sock, message, (self.held[uid] for uid in still))
            except BlockingIOError:
                events |= selectors.EVENT_WRITE
                break
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    self._retry = True
                    break
                return self._forget(peer)
            peer.answers.popleft()
        self._selector.modify(peer.sock, events)

    def _forget(self, peer: Peer) -> None:
        """Its connection ended. What it gave stays: that is the point of the keeper."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.sock)
        self._peers.pop(peer.sock.fileno(), None)
        peer.sock.close()

    def close(self) -> None:
        """Only tests need it: a process takes its descriptors with it when it dies."""
        for peer in list(self._peers.values()):
            self._forget(peer)
        wire.close_all(self.held.values())
        self.held.clear()
        self._selector.close()
        self._listener.close()


def inherit(program: Program) -> dict[int, int]:
    """Copies of all that the keeper at work holds; nothing if it died, or does not answer."""
    client = KeeperClient(program.runtime.socket(names.KEEPER_SOCKET))
    patience_s = 1.0
    try:
        while not program.stopping and patience_s < INHERIT_S_MAX:
            try:
                given = client.give(None, patience_s)
                return dict(given + client.give(listening.UIDS, patience_s))
            except MissingError:
                # Connecting works without a keeper, too: see whether there is one.
                if program.lease.try_acquire():
                    return {}
                patience_s *= 2
    finally:
        client.close()
    program.log.warning("the keeper at work gave nothing: waiting for its clients to do so")
    return {}


class KeeperRole(role.Role):
    """The keeper in its role. What it works on are the copies of the keeper at work."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        fds = program.listen_fds(names.FD_KEEPER)
        if len(fds) != 1:
            raise MidairError(
                f"needs one listening socket called {names.FD_KEEPER!r} (LISTEN_FDNAMES), "
                f"got {len(fds)}; it is started by `midair up` or systemd",
                Exit.USAGE,
            )
        self._fd = fds[0]
        self._inherited: dict[int, int] = {}
        self._lost = 0

    def open(self, create: bool) -> None:
        if not create:
            self._inherited = inherit(self.program)

    def recover(self) -> dict[str, int]:
        self._presence = Presence(self.program)  # kept until it dies
        # Only now: a keeper that waits must not take connections from the one at work.
        listener = socket.socket(fileno=self._fd)
        listener.setblocking(False)
        self._keeper = Keeper(listener, self._inherited)
        self._keeper.keep_own()
        self._keeper.watch(self.program.wake_fd)
        return {}

    def turn(self, timeout_s: float) -> None:
        self._keeper.turn(timeout_s)

    def show(self) -> None:
        if self._keeper.lost != self._lost:
            self._lost = self._keeper.lost
            self.log.error("out of descriptors (LimitNOFILE=): %d sockets not kept", self._lost)


def main(argv: Sequence[str] | None = None) -> int:
    return role.run(
        names.KEEPER, KeeperRole, argv, description="Holds a copy of every client socket."
    )
