"""Who works in an instance: the components `midair up` starts, and what each of them is given."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from midair import names
from midair.config import Config
from midair.process import spawn
from midair.process.runtime import Runtime
from midair.up import listeners
from midair.up import release as releases
from midair.up.component import Component

# Older and newer managers start the same modules: they are where releases meet.
MODULES = {
    names.KEEPER: "midair.keeper",
    names.ROUTER: "router.main",
    names.CONNMGR: "connmgr.main",
    names.DISPATCHER: "dispatcher.main",
    names.MONITOR: "midair.monitor.main",
    names.TRACER: "midair.trace.tracer",
}
OWN_USER = (names.ROUTER, names.MONITOR)  # run as `router.user`


class Roster:
    """Makes components, and owns the sockets they hand connections to each other by."""

    def __init__(
        self, conf: Config, runtime: Runtime, config_path: Path, user: spawn.User | None
    ) -> None:
        self._conf = conf
        self._runtime = runtime
        self._config_path = config_path
        self._user = user
        self._release = releases.own()
        self._peers: list[socket.socket] = []

    def make_all(
        self, clients: Sequence[socket.socket], monitor: socket.socket | None
    ) -> list[Component]:
        """In the order in which they are started."""
        accepted = [(names.FD_CLIENT, sock.fileno()) for sock in clients]
        watched = [] if monitor is None else [(names.FD_MONITOR, monitor.fileno())]
        return [
            self.make(names.KEEPER, listen=[self._peer(names.FD_KEEPER, names.KEEPER_SOCKET)]),
            self.make(names.ROUTER),
            *(
                self.make(
                    names.CONNMGR,
                    index,
                    [self._peer(names.FD_HANDOFF, names.handoff_socket(index))],
                )
                for index in range(self._conf.connmgrs)
            ),
            self.make(names.DISPATCHER, listen=accepted),
            *(self.make(names.MONITOR, listen=[it]) for it in watched),
        ]

    def make(
        self, role: str, index: int | None = None, listen: Sequence[tuple[str, int]] = ()
    ) -> Component:
        argv = ["--name", self._runtime.instance, "--config", str(self._config_path)]
        argv += [] if index is None else ["--index", str(index)]
        argv += [] if self._user is None else ["--ipc-group", str(self._user.gid)]
        user = self._user if role in OWN_USER else None
        return Component(role, index, MODULES[role], argv, listen, self._release, user)

    def _peer(self, fd_name: str, path: str) -> tuple[str, int]:
        self._peers.append(listeners.open_peer(self._runtime, path))
        return fd_name, self._peers[-1].fileno()


def environ_for(runtime: Runtime, watchdog_s: float) -> Mapping[str, str]:
    """Our environment, without what was meant for us alone, with what a service is told."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LISTEN_", "WATCHDOG_", "NOTIFY_"))
    }
    environ["NOTIFY_SOCKET"] = runtime.socket(names.NOTIFY_SOCKET)
    environ["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
    environ["MIDAIR_RUNTIME_DIR"] = str(runtime.path.parent)
    return environ
