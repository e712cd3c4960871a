"""Who works in an instance: the components `midair up` starts, and what each of them is given."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from midair import config, names
from midair.config import Config
from midair.keeper import listening
from midair.process import spawn
from midair.process.runtime import Runtime
from midair.up import listeners
from midair.up import release as releases
from midair.up.component import Component
from midair.up.listeners import Listening

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
    """Makes components."""

    def __init__(
        self, conf: Config, runtime: Runtime, config_path: Path, user: spawn.User | None
    ) -> None:
        self._conf = conf
        self._runtime = runtime
        self._config_path = config_path
        self._user = user
        self._release = releases.own()

    def make_all(self) -> list[Component]:
        """In the order in which they are started. Their sockets are not open yet."""
        connmgrs = range(self._conf.connmgrs)
        return [
            self.make(names.KEEPER),
            self.make(names.ROUTER),
            *(self.make(names.CONNMGR, index) for index in connmgrs),
            self.make(names.DISPATCHER),
            *([self.make(names.MONITOR)] if self._conf.monitor.listen else []),
        ]

    def make(self, role: str, index: int | None = None) -> Component:
        argv = ["--name", self._runtime.instance, "--config", str(self._config_path)]
        argv += [] if index is None else ["--index", str(index)]
        argv += [] if self._user is None else ["--ipc-group", str(self._user.gid)]
        user = self._user if role in OWN_USER else None
        listen = self._listening(role, index)
        return Component(role, index, MODULES[role], argv, listen, self._release, user)

    def _listening(self, role: str, index: int | None) -> Sequence[Listening]:
        """What the processes of a component are given."""

        def peer(fd_name: str, path: str) -> Listening:
            opener = functools.partial(listeners.open_peer, self._runtime, path)
            return Listening(fd_name, listening.uid(fd_name, index or 0), (role, index), opener)

        def tcp(fd_name: str, at: int, address: str, choose: str) -> Listening:
            others = listeners.by_ipv4([item.address for item in self._conf.server.listen])
            both = config.split_address(address)[1] not in others
            opener = functools.partial(listeners.open_client, address, choose, both)
            return Listening(fd_name, listening.uid(fd_name, at), (role, index), opener)

        if role == names.KEEPER:
            return [peer(names.FD_KEEPER, names.KEEPER_SOCKET)]
        if role == names.CONNMGR:
            return [peer(names.FD_HANDOFF, names.handoff_socket(index or 0))]
        if role == names.DISPATCHER:
            addresses = [item.address for item in self._conf.server.listen]
            return [
                tcp(names.FD_CLIENT, at, address, listeners.CHOOSE)
                for at, address in enumerate(addresses)
            ]
        if role == names.MONITOR:
            where = "--monitor, monitor.listen"
            return [tcp(names.FD_MONITOR, 0, self._conf.monitor.listen, where)]
        return []


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
