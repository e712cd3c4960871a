"""Who works in an instance: the components `midair up` starts, and what each of them is given."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping

from midair import names
from midair.keeper import listening
from midair.process import spawn
from midair.process.runtime import Runtime
from midair.up import listeners
from midair.up import release as releases
from midair.up.arrangement import Arrangement
from midair.up.component import Component
from midair.up.listeners import Listening
from midair.up.process import Setup

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
    """Makes components, and knows the sockets they hand connections to each other by."""

    def __init__(self, runtime: Runtime, user: spawn.User | None) -> None:
        self._runtime = runtime
        self._user = user
        self._release = releases.own()
        self._peers: dict[str, Listening] = {}  # by file name

    @property
    def gid(self) -> int | None:
        """The group that the queues are shared with."""
        return None if self._user is None else self._user.gid

    def make_all(self, instance: Arrangement) -> list[Component]:
        """In the order in which they are started. Their sockets need not be open yet."""
        return [self.make(role, index, instance) for role, index in instance.roles]

    def make(self, role: str, index: int | None, instance: Arrangement) -> Component:
        argv = ["--name", self._runtime.instance]
        argv += [] if index is None else ["--index", str(index)]
        argv += [] if self._user is None else ["--ipc-group", str(self._user.gid)]
        user = self._user if role in OWN_USER else None
        setup = self.setup(role, index, instance)
        return Component(role, index, MODULES[role], argv, setup, self._release, user)

    def setup(self, role: str, index: int | None, instance: Arrangement) -> Setup:
        """What a component of that arrangement is started with."""
        listen: tuple[Listening, ...] = ()
        if role == names.KEEPER:
            listen = (self._peer(names.FD_KEEPER, names.KEEPER_SOCKET, role, None),)
        elif role == names.CONNMGR and index is not None:
            listen = (self._peer(names.FD_HANDOFF, names.handoff_socket(index), role, index),)
        elif role == names.DISPATCHER:
            listen = tuple(instance.doors.listening)
        elif role == names.MONITOR and instance.monitor is not None:
            listen = (instance.monitor,)
        return Setup(instance.file, listen, instance.parts.manager.watchdog_s)

    def forget(self, index: int) -> None:
        """A connection manager has ended for good: nobody hands it anything."""
        name = names.handoff_socket(index)
        self._peers.pop(name, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._runtime.socket(name))

    def _peer(self, fd_name: str, name: str, role: str, index: int | None) -> Listening:
        if name not in self._peers:
            opener = functools.partial(listeners.open_peer, self._runtime, name)
            uid = listening.uid(fd_name, index or 0)
            self._peers[name] = Listening(fd_name, uid, (role, index), opener)
        return self._peers[name]


def environ_for(runtime: Runtime) -> Mapping[str, str]:
    """Our environment, without what was meant for us alone, with what a service is told."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LISTEN_", "WATCHDOG_", "NOTIFY_"))
    }
    environ["NOTIFY_SOCKET"] = runtime.socket(names.NOTIFY_SOCKET)
    environ["MIDAIR_RUNTIME_DIR"] = str(runtime.path.parent)
    return environ
