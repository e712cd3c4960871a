"""Clients that are to leave: of a connection manager that is retiring, or of a lame duck.

A retiring one takes no new clients (the dispatcher sends it none) and waits for those it has. A
lame duck tells its clients, and ends them in time (midair/process/lame_duck.py). Both say how many
are left, and a retiring one when nobody needs it any more: then its service manager ends it for
good.
"""

from __future__ import annotations

from collections.abc import Callable

from midair.process import lame_duck
from midair.process.lame_duck import LameDuck
from midair.process.program import Program
from native import connmgr as native
from native.conntable import ASSIGNED, ConnTable


class Leaving:
    """Looked at once a second, and costs nothing while nobody is to leave."""

    def __init__(
        self,
        program: Program,
        engine: native.Connmgr,
        table: ConnTable,
        greet: Callable[[bool], None],
    ) -> None:
        """`greet`: sets what clients are greeted with; True: as those of a lame duck."""
        assert program.index is not None
        self._program = program
        self._index = program.index
        self._retiring = program.index >= program.config.serving
        self._engine = engine
        self._table = table
        self._greet = greet
        self._look = lame_duck.Look(program.runtime)
        self._is_duck = False

    def tick(self, every_s: float) -> None:
        duck = self._look()
        if duck is not None:
            self._leave(duck, every_s)
        if duck is None and not self._retiring:
            return
        waiting = sum(1 for _ in self._table.used(self._index, ASSIGNED))
        left = self._engine.connections + waiting
        who = "lame duck" if duck is not None else "retiring"
        clients = "client" if left == 1 else "clients"
        empty = not left and self._engine.idle
        self._program.tell(f"{who}, {left} {clients} left", CLIENTS_LEFT=left, EMPTY=int(empty))

    def _leave(self, duck: LameDuck, every_s: float) -> None:
        if not self._is_duck:  # a successor says it again: nobody is harmed by that
            self._is_duck = True
            self._greet(True)
            for slot, uid in self._engine.served():
                self._engine.greet_again(slot, uid)
        served = list(self._engine.served())
        for slot, uid in served[: duck.due(len(served), every_s)]:
            self._engine.end(slot, uid, native.LAME_DUCK)
