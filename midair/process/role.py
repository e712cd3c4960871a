"""The life of a program that has a role: open, take the lease, recover, take turns, show.

A program says in a class what it does in each of these; the order is here, once:

    __init__      what can be had without waiting: queues, listening sockets
    open(False)   only while another process has the lease: maps what there is and changes
                  nothing. It fails on a layout it does not know, so an upgrade to a version that
                  cannot work with what there is fails before the old process is ended
    the lease     from here on this process alone acts in the role
    standing      only if its `memory` has the layout of the release before: until all parts are of
    still         this one, and all of it is converted (standstill.py)
    open(True)    unless it is open: makes what there is not
    recover()     finds what the predecessor left, and finishes the step it was in. What takes long
                  calls program.watchdog() meanwhile
    ready         it has everything it needs, and says so: before it takes up the work that waits,
                  of which its predecessor may have died
    turn(t)       until it is told to stop, the first one without waiting; in between it shows its
                  figures, and the watchdog hears of it

There is no clean-up at the end: a stop is a death like any other (see program.py).
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from midair.errors import MissingError
from midair.process import crash, events, program
from midair.process.program import Program
from midair.process.standstill import Memory, Standstill

SHOW_S = 0.2  # how often figures are published


class Role(ABC):
    """What a program does in its role. Made before it has the lease."""

    turn_s_max = 1.0  # the longest that `turn` may be asked to wait
    memory: Memory | None = None  # the segments it needs, if it needs any
    status = ""  # what the service manager is told when it is ready; empty: that it is active

    def __init__(self, program: Program) -> None:
        self.program = program
        self.config = program.config
        self.log = program.log

    @abstractmethod
    def open(self, create: bool) -> None:
        """Opens what it works on; without `create` only what is there (MissingError: it is not)."""

    def stand_still(self) -> None:  # noqa: B027
        """Called again and again while it stands still: see standstill.py. Must not wait."""

    @abstractmethod
    def recover(self) -> Mapping[str, int]:
        """Takes up what a predecessor left. What it found, by name; nothing: no need to tell."""

    @abstractmethod
    def turn(self, timeout_s: float) -> None:
        """Waits for something to do, no longer than that, and does it."""

    @abstractmethod
    def show(self) -> None:
        """Publishes its figures."""


def run(
    name: str,
    kind: type[Role],
    argv: Sequence[str] | None = None,
    *,
    indexed: bool = False,
    description: str = "",
) -> int:
    """The whole of a program's main(): its exit code."""

    def serve(program: Program) -> None:
        crash.arm(program.called)
        _serve(program, kind(program))

    return program.run(name, serve, argv, indexed=indexed, description=description)


def _serve(program: Program, role: Role) -> None:
    is_open = False
    standstill = None
    if role.memory is not None:
        standstill = Standstill(program, role.memory, role.stand_still)

    def warm() -> bool:
        nonlocal is_open
        if standstill is not None and standstill.ahead:
            standstill.join()
            return False
        with contextlib.suppress(MissingError):
            role.open(create=False)
            is_open = True
        return is_open

    program.acquire_lease(warm)
    if standstill is not None:
        standstill.end()
    began = time.monotonic()
    if not is_open:
        role.open(create=True)
    found = role.recover()
    took_ms = round((time.monotonic() - began) * 1e3, 1)
    if found:
        said = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in found.items())
        program.log.info("recovered: %s; in %.1f ms", said, took_ms)
    program.ready(role.status)
    role.turn(0.0)  # before anything else is said: clients wait
    if found:  # not before: clients wait for a recovery
        program.event(events.RECOVERED, **found, took_ms=took_ms)
    timeout_s = min(role.turn_s_max, program.wait_s_max)
    next_show = 0.0
    while not program.stopping:
        if time.monotonic() >= next_show:
            role.show()
            next_show = time.monotonic() + SHOW_S
        role.turn(timeout_s)
        program.watchdog()
