"""Where sockets come from: the dispatcher's hand-offs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from midair.process import crash, wire


class Arrivals:
    """The listening socket the dispatcher connects to, and its connections."""

    def __init__(
        self, fd: int, watch: Callable[[int], None], unwatch: Callable[[int], None]
    ) -> None:
        self._listener = socket.socket(fileno=fd)
        self._listener.setblocking(False)
        self._peers: dict[int, socket.socket] = {}
        self._watch = watch
        self._unwatch = unwatch
        watch(self._listener.fileno())

    def receive(self, fd: int, adopt: Callable[[int, int, int], None], log: logging.Logger) -> bool:
        """Handles readability of `fd`; False if it is none of ours.

        `adopt(slot, uid, fd)` is called for each socket that arrived.
        """
        if fd == self._listener.fileno():
            self._accept()
            return True
        peer = self._peers.get(fd)
        if peer is None:
            return False
        while True:
            try:
                data, fds = wire.receive(peer)
            except BlockingIOError:
                return True
            except (wire.WireError, OSError) as error:
                log.warning("hand-off connection closed: %s", error)
                data, fds = b"", []
            if not data:
                self._unwatch(fd)
                self._peers.pop(fd).close()
                return True
            entries = wire.unpack_handoff(data)
            crash.here("connmgr.received")
            for (uid, slot, _listener), client in zip(entries, fds, strict=True):
                adopt(slot, uid, client)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            peer.setblocking(False)
            self._peers[peer.fileno()] = peer
            self._watch(peer.fileno())
