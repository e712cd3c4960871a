"""The manager's side of a lame duck: nobody is accepted; it ends when the last client has left."""

from __future__ import annotations

from typing import Protocol

from midair import names
from midair.process import lame_duck
from midair.process.lame_duck import LameDuck
from midair.up.history import History
from midair.up.reload import Instance

OVERTIME_S = 5.0  # what a client that does not read may keep its connmgr waiting for, and a little


class Host(Instance, Protocol):
    """The manager."""

    @property
    def history(self) -> History: ...


class Ending:
    """Begun once, goes on until nobody is left, or its time is over."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._duck: LameDuck | None = lame_duck.read(host.runtime)
        if self._duck is not None:
            self._close()

    @property
    def begun(self) -> bool:
        return self._duck is not None

    def begin(self) -> None:
        host = self._host
        if self._duck is not None:
            return
        self._duck = lame_duck.begin(host.runtime, host.arranged.conf)
        host.log.info(
            "lame duck: nobody is accepted any more, clients leave within %g s",
            self._duck.duration_s,
        )
        host.history.lame_duck(self._duck.duration_s, self._duck.grace_s)
        self._close()

    def _close(self) -> None:
        """The dispatcher closes its own copies; one that is started from here on has none."""
        for component in self._host.components:
            if component.role == names.DISPATCHER:
                component.setup = component.setup.without_sockets()
        self._host.sockets.close(self._host.arranged.doors.listening)

    def over(self) -> bool:
        """Whether the instance can end now."""
        if self._duck is None:
            return False
        if self._duck.left_s < -OVERTIME_S:
            return True
        connmgrs = [c for c in self._host.components if c.role == names.CONNMGR]
        return all(c.active is not None and c.active.clients_left == 0 for c in connmgrs)
