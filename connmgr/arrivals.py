"""Where sockets come from: the dispatcher's hand-offs."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Protocol

from midair.process import crash, wire


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
        return True

    def close(self) -> None:
        """Only tests need it: a process takes its descriptors with it when it dies."""
        for sock in (self._listener, *self._peers.values()):
            sock.close()

    def _take(self, peer: socket.socket) -> None:
        """One message, if there is one."""
        fds: list[int] = []
        try:
            data, fds = wire.receive(peer)
            if not data:
                self._close(peer)
                return
            if wire.is_ask(data):
                with contextlib.suppress(OSError):
                    wire.send(peer, wire.hello())
                return
            entries = wire.unpack_handoff(data)
            if len(fds) != len(entries):
                raise wire.WireError(f"hand-off: {len(entries)} entries, {len(fds)} descriptors")
        except BlockingIOError:
            return
        except (wire.WireError, OSError) as error:
            self._log.warning("hand-off refused: %s", error)
            wire.close_all(fds)
            self._close(peer)
            self._to.missed()
            return
        crash.here("connmgr.received")
        for (uid, slot, _listener), client in zip(entries, fds, strict=True):
            self._to.adopt(slot, uid, client)

    def _close(self, peer: socket.socket) -> None:
        self._watcher.unwatch(peer.fileno())
        del self._peers[peer.fileno()]
        peer.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            peer.setblocking(False)
            self._peers[peer.fileno()] = peer
            self._watcher.watch(peer.fileno(), peer.fileno())
