"""Whether the keeper has a copy of every client's socket.

One that replaces a keeper that was killed gets them from the connmgrs again. Until then the
death of a connmgr ends its connections: two deaths at once, one of them the keeper's, is more
than is promised, and no test may cause it.
"""

from __future__ import annotations

from midair import names
from midair.errors import MissingError
from midair.keeper.client import KeeperClient
from midair.process import wire
from midair.process.runtime import Runtime
from native.conntable import ACTIVE, ConnTable


class Copies:
    """Compares the connection table with what the keeper gives."""

    def __init__(self, runtime: Runtime) -> None:
        self._table = ConnTable.attach(runtime)
        self._keeper = KeeperClient(runtime.socket(names.KEEPER_SOCKET))

    def complete(self) -> bool:
        """The keeper answers, and has all that were served before it was asked and still are."""
        served = self._served()
        try:
            held = dict(self._keeper.give(None))
        except MissingError:
            return False
        wire.close_all(held.values())
        return not (served & self._served()) - held.keys()

    def _served(self) -> set[int]:
        return {slot.uid for slot in self._table.used() if slot.state == ACTIVE}

    def close(self) -> None:
        self._keeper.close()
        self._table.close()
