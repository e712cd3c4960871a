"""Where clients come in: the listening sockets, each in a place of its own.

A connection keeps the number of the place it came by as long as it lives (conntable_slot.listener),
and that number says how it is treated. So a listener that is taken away leaves its place closed,
and one that is added gets a place that nobody has had, as long as there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Container, Sequence
from dataclasses import dataclass

from midair import config, names
from midair.config import LISTENERS_MAX, Listener
from midair.errors import MidairError
from midair.keeper import listening
from midair.up import listeners
from midair.up.listeners import Listening


@dataclass(frozen=True)
class Place:
    """A listener as it is configured, and its socket; None: closed."""

    listener: Listener
    address: str  # where it really is
    socket: Listening | None


class Doors:
    """The places, in the order of their numbers."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)

    @property
    def listening(self) -> list[Listening]:
        """The sockets of those that are open."""
        return [place.socket for place in self._places if place.socket is not None]

    @property
    def addresses(self) -> list[str]:
        """Where clients can connect."""
        return [place.address for place in self._places if place.socket is not None]

    @property
    def for_parts(self) -> tuple[Listener, ...]:
        """As the parts have to know it: with the addresses there really are."""
        return tuple(
            dataclasses.replace(place.listener, closed=True)
            if place.socket is None
            else dataclasses.replace(place.listener, address=place.address, closed=None)
            for place in self._places
        )

    def changed(self, wanted: Sequence[Listener]) -> Doors:
        """Those that are wanted, with the sockets there are. What is new is opened now.

        MidairError: one of them cannot be opened. Then nothing has changed.
        """
        places = [dataclasses.replace(place, socket=None) for place in self._places]
        taken: set[int] = set()
        new = []
        for item in wanted:
            at = self._find(item, taken)
            if at is None:
                new.append(item)
            else:
                taken.add(at)
                places[at] = dataclasses.replace(self._places[at], listener=item)
        opened: list[socket.socket] = []
        ipv4 = listeners.by_ipv4([item.address for item in wanted if not item.closed])
        try:
            for item in new:
                sock = None if item.closed else self._left(item, places)
                if sock is None and not item.closed:
                    sock = listeners.open_client(item.address, both=_both(item.address, ipv4))
                    opened.append(sock)
                at = len(places)
                if at == LISTENERS_MAX:
                    at = next(at for at in range(LISTENERS_MAX) if at not in taken)
                taken.add(at)
                places[at : at + 1] = [_place(at, item, sock, ipv4)]
        except MidairError:
            for sock in opened:
                sock.close()
            raise
        return Doors(places)

    def all_but(self, kept: Doors) -> list[Listening]:
        """Those whose sockets the others do not have."""
        still = [it.sock for it in kept.listening]
        return [it for it in self.listening if it.sock not in still]

    def _find(self, item: Listener, taken: set[int]) -> int | None:
        """The place of the same listener; what happens to slow consumers may be different."""
        for at, place in enumerate(self._places):
            it = place.listener
            if (
                at not in taken
                and (place.socket is None) == bool(item.closed)
                and (it.address, it.protocol, it.transport)
                == (item.address, item.protocol, item.transport)
            ):
                return at
        return None

    def _left(self, item: Listener, places: Sequence[Place]) -> socket.socket | None:
        """The socket of a listener at the same address that is not wanted any more."""
        used = [place.socket.sock for place in places if place.socket is not None]
        for place in self._places:
            sock = None if place.socket is None else place.socket.sock
            if sock is not None and sock not in used and place.listener.address == item.address:
                return sock
        return None


def open_doors(wanted: Sequence[Listener]) -> Doors:
    """For an instance that begins."""
    return Doors(()).changed(wanted)


def known_doors(wanted: Sequence[Listener], parts: Sequence[Listener]) -> Doors:
    """Of an instance that is there: as its parts know them, their sockets still to be got.

    `wanted`: as they were asked for; a free port has a number by now.
    """
    left = list(wanted)
    places = []
    ipv4 = listeners.by_ipv4([item.address for item in parts if not item.closed])
    for at, item in enumerate(parts):
        asked = item if item.closed else _asked(item, left)
        places.append(_place(at, asked, None, ipv4, "" if item.closed else item.address))
    return Doors(places)


def _asked(item: Listener, left: list[Listener]) -> Listener:
    """Which of those that were asked for this is, in the order of both."""
    host = item.address.rpartition(":")[0]
    for it in left:
        if it.address in (item.address, f"{host}:0"):
            left.remove(it)
            return it
    return item


def _both(address: str, ipv4: Container[int]) -> bool:
    return config.split_address(address)[1] not in ipv4


def _place(
    at: int,
    item: Listener,
    sock: socket.socket | None,
    ipv4: Container[int],
    address: str = "",
) -> Place:
    if sock is not None:
        address = listeners.address_of(sock)
    if not address:
        return Place(item, item.address, None)
    both = _both(address, ipv4)
    opener = functools.partial(listeners.open_client, address, listeners.CHOOSE, both)
    uid = listening.uid(names.FD_CLIENT, at)
    return Place(
        item, address, Listening(names.FD_CLIENT, uid, (names.DISPATCHER, None), opener, sock)
    )
