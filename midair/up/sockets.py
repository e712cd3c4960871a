"""The listening sockets of an instance in the hands of its manager: opened, held, got back.

A manager that starts an instance opens them all, and gives copies to the keeper. One that takes an
instance over asks the keeper for them. What the keeper does not have yet, a part that is alive has:
it gives its own to a new keeper within a second or so. What neither has is gone with its last copy,
and is opened anew. A component is started when its sockets are there (`Component.can_start`).

A part that is alive and whose socket does not come is ended: its successor gets a new one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence

from midair import names
from midair.errors import MidairError, MissingError
from midair.keeper.client import KeeperClient
from midair.process.runtime import Runtime
from midair.up import listeners
from midair.up.component import Component
from midair.up.listeners import Listening

ASK_EVERY_S = 0.1
GIVE_S = 0.5  # how long a keeper that is at work may take to answer
PATIENCE_S = 10.0  # how long a part that is alive may keep a socket to itself
SAY_EVERY_S = 10.0


class Sockets:
    """All listening sockets that components are given."""

    def __init__(self, runtime: Runtime, log: logging.Logger) -> None:
        self._log = log
        self._keeper = KeeperClient(runtime.socket(names.KEEPER_SOCKET))
        self._held: set[int] = set()  # uids that the keeper has been given
        self._ask_after = 0.0
        self._say_after = 0.0
        self._since = time.monotonic()

    def open_all(self, components: Sequence[Component]) -> None:
        """For an instance that begins: what is not open yet. MidairError: what cannot be."""
        for it in _all(components):
            if it.sock is None:
                it.sock = it.open()

    def complete(self, components: Sequence[Component]) -> bool:
        return all(it.sock is not None for it in _all(components))

    def listen(self, components: Sequence[Component]) -> None:
        """Clients may connect from now on."""
        for it in _all(components):
            if it.fd_name == names.FD_CLIENT and it.sock is not None:
                listeners.listen(it.sock)

    def turn(self, components: Sequence[Component]) -> None:
        """Gets what is missing as far as it can be had now; gives the keeper what it lacks."""
        missing = [it for it in _all(components) if it.sock is None]
        if missing and time.monotonic() >= self._ask_after:
            self._ask_after = time.monotonic() + ASK_EVERY_S
            self._collect(missing, components)
        self._hold(components)

    def wait_s(self, components: Sequence[Component]) -> float:
        """How long the manager may sleep."""
        return 3600.0 if {it.uid for it in _all(components)} <= self._held else ASK_EVERY_S

    def close(self, listening: Sequence[Listening]) -> None:
        """Those that are not needed any more, here and in the keeper."""
        for it in listening:
            if it.sock is not None:
                it.sock.close()
                it.sock = None
            self._held.discard(it.uid)
        self._keeper.drop([it.uid for it in listening])

    def _collect(self, missing: list[Listening], components: Sequence[Component]) -> None:
        by_owner = {(c.role, c.index): c for c in components}
        keeper = by_owner[names.KEEPER, None]
        if not keeper.processes:  # what it had is gone, its own socket too
            for it in missing:
                if it.owner == (names.KEEPER, None):
                    self._open(it)
        if keeper.active is None:
            return
        try:
            given = dict(self._keeper.give([it.uid for it in missing], GIVE_S))
        except MissingError:
            return
        for it in missing:
            owner = by_owner[it.owner]
            if it.uid in given:
                it.sock = socket.socket(fileno=given[it.uid])
            elif not owner.processes:
                self._open(it)
            elif time.monotonic() > self._since + PATIENCE_S:
                self._log.warning("%s does not give its listening socket: ended", owner.called)
                for process in owner.processes:
                    process.retire()

    def _open(self, it: Listening) -> None:
        """Nobody has it any more. If it cannot be opened now, it is tried again."""
        try:
            it.sock = it.open()
        except (MidairError, OSError) as error:
            if time.monotonic() >= self._say_after:
                self._say_after = time.monotonic() + SAY_EVERY_S
                self._log.error("%s; those that are connected are served; trying again", error)
            return
        self._held.discard(it.uid)

    def _hold(self, components: Sequence[Component]) -> None:
        """Gives the keeper what it has not got; a new one has nothing."""
        if self._keeper.check():
            self._held.clear()
        lacking = [it for it in _all(components) if it.uid not in self._held]
        pairs = [(it.uid, it.sock.fileno()) for it in lacking if it.sock is not None]
        if pairs:
            taken = self._keeper.hold(pairs)
            self._held.update(uid for uid, _ in pairs[:taken])


def _all(components: Sequence[Component]) -> list[Listening]:
    return [it for component in components for it in component.listen]
