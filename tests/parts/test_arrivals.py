"""Hand-offs that a connmgr takes: a few at a time, so that its clients come in between."""

from __future__ import annotations

import logging
import os
import socket

from connmgr.arrivals import Arrivals
from midair import names
from midair.process import wire
from midair.process.runtime import Runtime
from midair.up import listeners


class World:
    """What stands around it: notes what it is told."""

    def __init__(self) -> None:
        self.adopted: list[int] = []

    def watch(self, fd: int, tag: int) -> None:
        pass

    def unwatch(self, fd: int) -> None:
        pass

    def adopt(self, slot: int, uid: int, fd: int) -> None:
        self.adopted.append(uid)
        os.close(fd)

    def missed(self) -> None:
        raise AssertionError("nothing was missed")


def test_a_flood_of_hand_offs_is_taken_a_message_at_a_time(instance_name: str) -> None:
    """003-69: what is left is taken in later turns, and clients are read in between."""
    runtime = Runtime.create(instance_name)
    listener = listeners.open_peer(runtime, names.handoff_socket(0))
    world = World()
    fd = listener.detach()
    here = Arrivals(fd, world, world, logging.getLogger("test"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(runtime.socket(names.handoff_socket(0)))
        here.receive(fd)
        (at,) = here._peers
        uids = iter(range(1, 1000))
        for count in (wire.HANDOFFS_MAX, wire.HANDOFFS_MAX, 1):
            entries = [(next(uids), 0, 0) for _ in range(count)]
            wire.send(peer, wire.pack_handoff(entries), [peer.fileno()] * count)
        taken = []
        for _ in range(4):
            before = len(world.adopted)
            assert here.receive(at)
            taken.append(len(world.adopted) - before)
        assert taken == [wire.HANDOFFS_MAX, wire.HANDOFFS_MAX, 1, 0]
        assert world.adopted == sorted(world.adopted)
    here.close()
