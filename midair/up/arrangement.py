"""How an instance is arranged: its configuration, its sockets, and the file its parts read.

`midair reload` makes a new arrangement beside the one in use, moves the parts to it one after the
other, and puts it in the place of the old one, or goes back. Each arrangement has two files of its
own in the runtime directory: `config-N.toml`, which a part that dies is started with again, and
`asked-N.toml`, what was asked for. The link `config.toml` names the one in use: setting it is what
makes an arrangement the one that counts, for the next manager, too.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

from midair import config, config_uses, names
from midair.config import Config
from midair.errors import MidairError
from midair.keeper import listening
from midair.process.runtime import Runtime
from midair.up import listeners
from midair.up.doors import Doors, known_doors, open_doors
from midair.up.listeners import Listening
from midair.version import __version__

IN_USE = "config.toml"
MONITOR_CHOICE = "--monitor, monitor.listen"
_FILE = re.compile(r"config-(\d+)\.toml")


@dataclass(frozen=True)
class Arrangement:
    """What is configured, and what follows from it."""

    conf: Config  # as it was asked for
    parts: Config  # as the parts read it
    doors: Doors
    monitor: Listening | None
    file: Path  # with `parts`

    @property
    def roles(self) -> list[tuple[str, int | None]]:
        """Who takes part, in the order in which they are started."""
        return [
            (names.KEEPER, None),
            (names.ROUTER, None),
            *((names.CONNMGR, index) for index in range(self.parts.connmgrs)),
            (names.DISPATCHER, None),
            *([] if self.monitor is None else [(names.MONITOR, None)]),
        ]

    def put_in_use(self, runtime: Runtime) -> None:
        """From here on this one counts, for whoever comes later, too."""
        runtime.link(IN_USE, self.file.name)

    def with_connmgrs(self, runtime: Runtime, count: int) -> Arrangement:
        """The same with that many connection managers; those that nobody asked for are retiring."""
        parts = self.parts.with_("connmgr", **_connmgrs(self.conf, count))
        return replace(self, parts=parts, file=_write(self.conf, parts, runtime))

    def sockets_but(self, kept: Arrangement) -> list[Listening]:
        """Those that the other one does not have."""
        found = self.doors.all_but(kept.doors)
        if self.monitor is not None and self.monitor is not kept.monitor:
            found.append(self.monitor)
        return found

    def remove(self) -> None:
        """It never came into use."""
        self.file.unlink(missing_ok=True)
        _asked(self.file).unlink(missing_ok=True)


def tidy(runtime: Runtime, needed: Container[Path]) -> None:
    """Removes the files of arrangements that nobody was started with."""
    for path in runtime.path.iterdir():
        if _FILE.fullmatch(path.name) and path not in needed:
            path.unlink(missing_ok=True)
            _asked(path).unlink(missing_ok=True)


def first(conf: Config, runtime: Runtime) -> Arrangement:
    """Of an instance that starts. MidairError: it cannot listen there."""
    conf = config_uses.settled(conf)
    doors = open_doors(conf.server.listen)
    monitor = _open_monitor(conf.monitor.listen)
    made = _arranged(conf, runtime, doors, monitor, conf.connmgrs)
    made.put_in_use(runtime)
    return made


def following(before: Arrangement, conf: Config, runtime: Runtime) -> Arrangement:
    """For another configuration, with the sockets there are.

    MidairError: one that is new cannot be opened, and nothing has changed. There are as many
    connection managers as before, if that is more than are wanted now.
    """
    doors = before.doors.changed(conf.server.listen)
    monitor = before.monitor
    if conf.monitor.listen != before.conf.monitor.listen:
        try:
            monitor = _open_monitor(conf.monitor.listen)
        except MidairError:
            for it in doors.all_but(before.doors):
                if it.sock is not None:
                    it.sock.close()
            raise
    count = max(conf.connmgrs, before.parts.connmgrs)
    return _arranged(conf, runtime, doors, monitor, count)


def found(runtime: Runtime) -> Arrangement:
    """That of an instance which another manager began. Its sockets are still to be got."""
    file = runtime.path / IN_USE
    if file.is_symlink():
        file = runtime.path / os.readlink(file)
    parts = config.load_part(file)
    conf = config_uses.settled(parts)
    if _asked(file).exists():
        conf = config_uses.settled(config.load_part(_asked(file)))
    monitor = _monitor_at(parts.monitor.listen) if parts.monitor.listen else None
    doors = known_doors(conf.server.listen, parts.server.listen)
    return Arrangement(conf, parts, doors, monitor, file)


def _open_monitor(wanted: str) -> Listening | None:
    """It listens at once: who looks at an instance that starts waits for the monitor."""
    if not wanted:
        return None
    sock = listeners.open_client(wanted, MONITOR_CHOICE)
    listeners.listen(sock)
    made = _monitor_at(listeners.address_of(sock))
    made.sock = sock
    return made


def _monitor_at(address: str) -> Listening:
    opener = functools.partial(listeners.open_client, address, MONITOR_CHOICE)
    uid = listening.uid(names.FD_MONITOR)
    return Listening(names.FD_MONITOR, uid, (names.MONITOR, None), opener)


def _arranged(
    conf: Config, runtime: Runtime, doors: Doors, monitor: Listening | None, count: int
) -> Arrangement:
    # INFO tells clients where they are: a port that was left open is known by now.
    parts = conf.with_("server", listen=doors.for_parts)
    parts = parts.with_("connmgr", **_connmgrs(conf, count))
    address = ""
    if monitor is not None and monitor.sock is not None:
        address = listeners.address_of(monitor.sock)
    parts = parts.with_("monitor", listen=address)
    return Arrangement(conf, parts, doors, monitor, _write(conf, parts, runtime))


def _connmgrs(conf: Config, count: int) -> dict[str, int]:
    return {"count": count, "retiring": max(0, count - conf.connmgrs)}


def _write(conf: Config, parts: Config, runtime: Runtime) -> Path:
    """Under a number that no file has had."""
    there = (_FILE.fullmatch(path.name) for path in runtime.path.iterdir())
    last = max((int(it.group(1)) for it in there if it), default=0)
    runtime.write(f"asked-{last + 1}.toml", conf.for_parts(__version__))
    return runtime.write(f"config-{last + 1}.toml", parts.for_parts(__version__))


def _asked(file: Path) -> Path:
    return file.with_name(file.name.replace("config-", "asked-"))
