"""Upgrades that are asked for: whether they may begin, and the one that is under way.

An upgrade goes on even if the one who asked goes away. That of `all` takes the parts first, one
after the other (upgrade.py), and then the manager itself (succession.py).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from midair import names
from midair.process.runtime import Runtime
from midair.up import control, succession, upgrade
from midair.up import release as releases
from midair.up.component import Component
from midair.up.history import History
from midair.up.process import Process
from midair.up.release import Release
from midair.up.succession import Handed, Succession
from midair.up.told import ENDS, Event, Told
from midair.up.upgrade import Start, Tell, Upgrade
from midair.version import __version__

READY_S_MAX = 86400.0  # the longest that an upgrade may be told to wait


class Upgrades:
    """At most one at a time."""

    def __init__(
        self,
        runtime: Runtime,
        log: logging.Logger,
        history: History,
        start: Start,
        watch: Callable[[Process], None],
        unwatch: Callable[[Sequence[int]], None],
        unheard: Callable[[], Sequence[int]],
        all_known: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._log = log
        self._history = history
        self._start = start
        self._watch = watch
        self._unwatch = unwatch
        self._unheard = unheard
        self._all_known = all_known
        self._now: Upgrade | Succession | None = None

    def begin(
        self,
        sock: socket.socket,
        request: dict[str, Any],
        components: Sequence[Component],
        refusal: str = "",
    ) -> None:
        """Starts it, or says why not; `refusal`: why not, if that is known already."""
        tell = self._teller(sock)
        target = str(request.get("target"))
        chosen = upgrade.choose(target, components)
        ourselves = target in (names.MANAGER, upgrade.ALL)
        if not refusal and not chosen and not ourselves:
            all_of_them = ", ".join(component.called for component in components)
            refusal = f"{target}: there is no such component here; there are {all_of_them}"
        try:
            to = msgspec.convert(request["release"], Release)
            ready_s = min(float(request["ready_s"]), READY_S_MAX)
            if not ready_s > 0:
                raise ValueError(ready_s)
            refusal = refusal or releases.no_way_back(self._runtime, to)
        except (KeyError, TypeError, ValueError, OverflowError):
            refusal = f"this manager ({__version__}) does not understand what is asked for"

        def succeed() -> None:
            self._now = Succession(
                self._runtime,
                to,
                ready_s,
                sock,
                tell,
                self._watch,
                self._unwatch,
                self._unheard,
                self._all_known,
            )

        def then(told: Told) -> None:
            """The manager follows when all parts have been upgraded."""
            if told.event is Event.DONE and ourselves:
                succeed()
            else:
                tell(told)

        if refusal:
            tell(Told(Event.FAILED, why=refusal))
        elif chosen:
            self._now = Upgrade(chosen, to, ready_s, self._start, then)
        else:
            succeed()

    @property
    def under_way(self) -> str:
        """Why nothing else can be begun, if there is one."""
        if self._now is None:
            return ""
        to = f"{self._now.called} to {self._now.to.version}"
        return f"another upgrade is under way ({to}); try again when it is over"

    def resume(self, handed: Handed) -> None:
        """In the process after exec(): tells how the upgrade of the manager went."""
        to, old = handed.to.version, handed.old.version
        self._history.upgrade(Told(Event.STARTING, names.MANAGER, version=to, old=old))
        succession.tell_after(handed, self._teller(socket.socket(fileno=handed.control_fd)))

    def turn(self) -> None:
        """Looks how far it is."""
        if self._now is not None:
            try:
                self._now.turn()
            except OSError as error:  # of the runtime directory
                self._now.abort(f"cannot go on: {error}")
            if self._now.over:
                self._now = None

    def wait_s(self) -> float:
        """How long the manager may sleep."""
        return 3600.0 if self._now is None else self._now.wait_s()

    def abort(self, why: str) -> None:
        if self._now is not None:
            self._now.abort(why)

    def _teller(self, sock: socket.socket) -> Tell:
        def tell(told: Told) -> None:
            if told.event is Event.FAILED:
                self._log.error("upgrade: %s", told.why)
            elif told.event is not Event.DONE:
                self._log.info("upgrade: %s: %s", told.component, told.text)
            self._history.upgrade(told)
            control.answer(sock, told.to_json())
            if told.event in ENDS:
                sock.close()

        return tell
