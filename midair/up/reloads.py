"""The manager's side of `midair reload`, of SIGHUP, and of connection managers that retire."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from midair import config, config_uses, names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.up import logfile, plan
from midair.up.component import Component
from midair.up.history import History
from midair.up.reload import Instance, Job, Reload, Removal, Settling, left_behind

Tell = Callable[[dict[str, Any]], None]


class Host(Instance, Protocol):
    """The manager."""

    @property
    def history(self) -> History: ...

    def busy(self) -> str:
        """Why nothing can be begun now, or nothing."""


class Reloads:
    """Begins reloads, and ends connection managers that have retired."""

    def __init__(self, host: Host, load: Callable[[], Config]) -> None:
        """`load` reads the configuration again. MidairError: it is wrong, or there is none."""
        self._host = host
        self._load = load
        self._looked = False  # at what a manager before us has left

    def begin(self, tell: Tell, dry_run: bool = False) -> Job | None:
        """A reload, or None: it was refused, which was told."""
        began = time.monotonic()

        def told(said: dict[str, Any]) -> None:
            history = self._host.history
            if dry_run:
                pass
            elif "error" in said:
                history.reload_failed(said["error"])
            elif said.get("done") and said["changes"]:
                texts = [str(change["text"]) for change in said["changes"]]
                history.reloaded(texts, time.monotonic() - began)
            tell(said)

        try:
            if why := self._host.busy():
                raise MidairError(why)
            conf = config_uses.settled(self._load())
            logfile.check(conf.log.file)
            return Reload(self._host, conf, dry_run, told)
        except (MidairError, OSError) as error:
            self._host.log.error("reload: %s", error)
            code = error.code if isinstance(error, MidairError) else Exit.FAILED
            told({"error": str(error), "code": int(code)})
            return None

    def due(self) -> Job | None:
        """What has to be done without being asked for. Only when nothing else is under way."""
        if not self._looked:
            self._looked = True
            if astray := [c for c in self._host.components if self._is_astray(c)]:
                return Settling(self._host, astray)
            if left_behind(self._host):
                return Settling(self._host, [])
        return self._retired()

    def _is_astray(self, component: Component) -> bool:
        """Whether it runs with a configuration that differs, for it, from the one in use."""
        active, to = component.active, self._host.arranged
        if active is None or active.setup.config == to.file or component.role == names.TRACER:
            return False
        try:
            was = config.load_part(active.setup.config)
        except MidairError:  # its file is gone: nobody knows what it runs with
            return active.setup.config.exists()
        return plan.needs_restart(component, was, to.parts)

    def _retired(self) -> Job | None:
        """Has the last connection manager end, if it is retiring and nobody needs it."""
        parts = self._host.arranged.parts
        if not parts.connmgr.retiring:
            return None
        last = parts.connmgrs - 1
        for component in self._host.components:
            if component.role == names.CONNMGR and component.index == last and _empty(component):
                return Removal(self._host, component, self._host.history.retired)
        return None


def _empty(component: Component) -> bool:
    active = component.active
    return active is not None and active.empty
