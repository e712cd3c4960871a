"""Where sockets come from: the dispatcher's hand-offs."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Protocol

from midair.process import crash, trust, wire

# Connections of dispatchers: one at work, its successor, and some. More push out one that never
# spoke.
PEERS_MAX = 64


class Watcher(Protocol):
    """Tells when a descriptor is readable (native.connmgr.Connmgr)."""

    def watch(self, fd: int, tag: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...


class Receiver(Protocol):
    """Takes what arrives (sockets.Sockets)."""

    def adopt(self, slot: int, uid: int, fd: int) -> None: ...
    def missed(self) -> None: ...


class Arrivals:
    """The listening socket the dispatcher connects to, and its connections."""

    def __init__(self, fd: int, watcher: Watcher, to: Receiver, log: logging.Logger) -> None:
        self._listener = socket.socket(fileno=fd)
        self._listener.setblocking(False)
        self._peers: dict[int, socket.socket] = {}
        self._asked: list[socket.socket] = []  # for our version, and not answered yet
        self._silent: dict[int, None] = {}  # of these, those that never spoke; the oldest first
        self._watcher = watcher
        self._to = to
        self._log = log
        watcher.watch(self._listener.fileno(), self._listener.fileno())

    def receive(self, fd: int) -> bool:
        """Handles readability of `fd`; False if it is none of ours.

        One message at a time, of wire.HANDOFFS_MAX clients at most: however many come, those that
        are here are read and written in between. What is left makes `fd` readable again.
        """
        if fd == self._listener.fileno():
            self._accept()
            return True
        if fd not in self._peers:
            return False
        self._take(self._peers[fd])
        self._answer()
        return True

    def _answer(self) -> None:
        """Answers who has asked, after all that anybody had sent before is taken in.

        So a dispatcher that is answered knows that nothing of its predecessor, which was dead
        before it asked, is on its way any more: what is assigned and not taken up never will be.
        """
        while self._asked:
            asked, self._asked = self._asked, []
            self._accept()
            for peer in list(self._peers.values()):
                while peer.fileno() in self._peers and self._take(peer):
                    pass
            for peer in asked:
                with contextlib.suppress(OSError):
                    wire.send(peer, wire.hello())

    def close(self) -> None:
        """Only tests need it: a process takes its descriptors with it when it dies."""
        for sock in (self._listener, *self._peers.values()):
            sock.close()

    def _take(self, peer: socket.socket) -> bool:
        """One message; False: there is none, or there will be none."""
        fds: list[int] = []
        try:
            data, fds = wire.receive(peer)
            self._silent.pop(peer.fileno(), None)
            if not data:
                self._close(peer)
                return False
            if wire.is_ask(data):
                wire.close_all(fds)  # there are none, unless somebody else speaks
                self._asked.append(peer)
                return True
            entries = wire.unpack_handoff(data)
            if len(fds) != len(entries):
                raise wire.WireError(f"hand-off: {len(entries)} entries, {len(fds)} descriptors")
        except BlockingIOError:
            return False
        except (wire.WireError, OSError) as error:
            self._log.warning("hand-off refused: %s", error)
            wire.close_all(fds)
            self._close(peer)
            self._to.missed()
            return False
        crash.here("connmgr.received")
        for (uid, slot, _listener), client in zip(entries, fds, strict=True):
            self._to.adopt(slot, uid, client)
        return True

    def _close(self, peer: socket.socket) -> None:
        self._watcher.unwatch(peer.fileno())
        self._silent.pop(peer.fileno(), None)
        del self._peers[peer.fileno()]
        peer.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # nobody, or no descriptors for anybody
                return
            if not trust.is_welcome(peer, self._listener):
                continue
            peer.setblocking(False)
            if len(self._peers) >= PEERS_MAX:
                if not self._silent:
                    peer.close()
                    continue
                self._close(self._peers[next(iter(self._silent))])
            self._peers[peer.fileno()] = peer
            self._silent[peer.fileno()] = None
            self._watcher.watch(peer.fileno(), peer.fileno())
