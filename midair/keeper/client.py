"""A process's connection to the keeper: hold, drop, give.

Nothing here waits for the keeper except `give`, which only a starting process calls. The
keeper's listening socket belongs to the service manager, so while the keeper is away
connecting and sending still work, until the socket is full.

A keeper that was restarted holds nothing. `check` tells: it returns True once for each
time the connection had to be made anew, and the caller then holds its sockets again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Sequence

from midair.errors import MissingError, PermissionsError
from midair.process import trust, wire

# uids waiting to be dropped: as many as there can be connections in the table.
DROPS_MAX = 2**20
_BUSY = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)


class KeeperClient:
    """Reconnects by itself. `fileno()` is readable when the keeper went away."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._socket: socket.socket | None = None
        self._connects = 0
        self._seen = 1  # the first connect is no news
        self._version = 0  # spoken on this connection
        self._refused = ""  # why what came last was not understood
        self._drops: list[int] = []
        self.forgotten = 0  # drops given up because the keeper did not take them

    def fileno(self) -> int:
        """The descriptor to wait on, or -1; it changes with every new connection."""
        return -1 if self._socket is None else self._socket.fileno()

    def check(self) -> bool:
        """Notices a keeper that went away, reconnects, and sends what waits to be dropped.

        True: the keeper is new since the last call, hold everything again.
        """
        while self._socket is not None:  # the end may be behind an answer
            try:
                data, fds = wire.receive(self._socket)
                wire.close_all(fds)
                self._listen(data)
                if not data:
                    self._lost()
            except BlockingIOError:
                break
            except (OSError, wire.WireError):
                self._lost()
        self._connected()
        self.flush()
        new = self._connects > self._seen
        self._seen = max(self._seen, self._connects)
        return new

    def hold(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Gives (uid, descriptor) pairs to the keeper; how many of them it took.

        Fewer than all: it cannot take more now, try the rest later.
        """
        done = 0
        while done < len(pairs):
            part = pairs[done : done + wire.FDS_MAX]
            message = wire.pack_uids(wire.HOLD, [uid for uid, _ in part], self._version)
            if not self._send(message, [fd for _, fd in part]):
                break
            done += len(part)
        return done

    def drop(self, uids: Sequence[int]) -> None:
        """Has the keeper close its copies. What it cannot take now is sent by `check`."""
        self._drops.extend(uids)
        self.flush()
        if len(self._drops) > DROPS_MAX:
            self.forgotten += len(self._drops) - DROPS_MAX
            del self._drops[:-DROPS_MAX]

    def give(
        self, uids: Sequence[int] | None = None, timeout_s: float = 10.0
    ) -> list[tuple[int, int]]:
        """(uid, descriptor) of what the keeper holds of `uids` (None: of everything).

        Waits for the answer. MissingError: there was none in time. A keeper that dies
        meanwhile is asked again; what it gave before counts.
        """
        if uids is not None and not uids:
            return []
        deadline = time.monotonic() + timeout_s
        found: dict[int, int] = {}
        wanted = [[]] if uids is None else _parts(uids)
        try:
            while wanted:
                if self._ask(wanted[0], found, deadline):
                    wanted.pop(0)
        except BaseException:
            wire.close_all(found.values())
            raise
        return list(found.items())

    def ping(self, timeout_s: float = 10.0) -> None:
        """Returns when the keeper has read all that was sent before. MissingError: not."""
        deadline = time.monotonic() + timeout_s
        while not self._send(wire.pack_uids(wire.PING, (), self._version)) or not self._await_pong(
            deadline
        ):
            self._wait(deadline)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, uids: Sequence[int], found: dict[int, int], deadline: float) -> bool:
        """One GIVE and all its answers; False: the connection broke, ask again."""
        if not self._send(wire.pack_uids(wire.GIVE, uids, self._version)):
            self._wait(deadline)
            return False
        while True:
            received = self._receive(deadline)
            if received is None:
                return False
            (op, given), fds = received
            if op == wire.END:
                return True
            for uid, fd in zip(given, fds, strict=True):
                if uid in found:
                    wire.close_all([fd])
                else:
                    found[uid] = fd

    def _await_pong(self, deadline: float) -> bool:
        while (received := self._receive(deadline)) is not None:
            if received[0][0] == wire.PONG:
                return True
        return False

    def _receive(self, deadline: float) -> tuple[tuple[int, list[int]], list[int]] | None:
        """The next message, or None when the connection broke."""
        while self._socket is not None:
            try:
                data, fds = wire.receive(self._socket)
            except BlockingIOError:
                self._wait(deadline)
                continue
            except OSError:
                self._lost()
                break
            if not data:
                self._lost()
                break
            if self._listen(data):
                continue
            try:
                return wire.unpack_uids(data), fds
            except wire.WireError as error:
                wire.close_all(fds)
                self._refused = f": {error}"
                self._lost()
        return None

    def _listen(self, data: bytes) -> bool:
        """True if it was the answer to ASK."""
        version = wire.heard(data)
        self._version = self._version if version is None else version
        return version is not None

    def _wait(self, deadline: float) -> None:
        """Until there is something to read, or a moment has passed, or it is too late."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise MissingError(f"the keeper does not answer ({self._path}){self._refused}")
        fds = [] if self._socket is None else [self._socket]
        select.select(fds, [], [], min(left_s, 0.5 if fds else 0.02))

    def flush(self) -> None:
        """Sends what waits to be dropped, as far as the keeper takes it now."""
        while self._drops:
            part = self._drops[: wire.UIDS_MAX]
            if not self._send(wire.pack_uids(wire.DROP, part, self._version)):
                return
            del self._drops[: len(part)]

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        for _attempt in range(2):  # the second for a connection found broken by the first
            if not self._connected():
                return False
            assert self._socket is not None
            try:
                wire.send(self._socket, message, fds)
                return True
            except OSError as error:
                if error.errno in _BUSY:
                    return False
                if error.errno == errno.EBADF and fds:
                    raise  # one of the descriptors given is not open: the caller's mistake
                self._lost()
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
        self._connects += 1
        self._version = 0
        with contextlib.suppress(OSError):  # not answered: version 0 is understood by everyone
            wire.send(made, wire.ASK)
        return True

    def _lost(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
        self._drops.clear()  # a new keeper holds nothing that could be dropped


def _parts(uids: Sequence[int]) -> list[Sequence[int]]:
    return [uids[at : at + wire.UIDS_MAX] for at in range(0, len(uids), wire.UIDS_MAX)]
