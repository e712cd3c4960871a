"""What the manager adds to the event log (events.py): deaths, absences, upgrades."""

from __future__ import annotations

import os
import time
from typing import Any

from midair import names
from midair.process import events
from midair.process.runtime import Runtime
from midair.up.component import Component
from midair.up.process import Process
from midair.up.told import Event, Told


class History:
    """The manager's side of the event log."""

    def __init__(self, runtime: Runtime, generation: int) -> None:
        self._runtime = runtime
        self._generation = generation
        self._upgrade: dict[str, Any] = {}  # what is known of the upgrade of one component
        self._began_at = 0.0

    def up(self, version: str, listen: list[str]) -> None:
        self._own(events.UP, version=version, listen=listen)

    def down(self, why: str) -> None:
        self._own(events.DOWN, why=why)

    def taken_over(self, version: str, parts: int, missing: list[str]) -> None:
        self._own(events.TAKEN_OVER, version=version, parts=parts, missing=missing)

    def died(self, component: Component, process: Process, deaths: int) -> None:
        """One that was at work, or on its way there, has died. Its successor may be there."""
        now = time.monotonic()
        said = {"end": process.last_end, "code": process.last_code, "deaths": deaths}
        self._add(events.DIED, component, process, **said)
        if not component.away_since and process.ready_at:
            component.away_since = now
        if component.active is not None:
            self.ready(component, component.active)

    def hung(self, component: Component, process: Process, silent_s: float) -> None:
        self._add(events.HUNG, component, process, silent_s=round(silent_s, 1))

    def gave_up(self, component: Component, process: Process, why: str) -> None:
        self._add(events.GAVE_UP, component, process, why=why)

    def ready(self, component: Component, process: Process) -> None:
        """A process is at work: how long nobody was."""
        if component.away_since:
            away_s = max(0.0, process.ready_at - component.away_since)
            component.away_since = 0.0
            self._add(events.BACK, component, process, away_ms=round(away_s * 1e3, 3))

    def upgrade(self, told: Told) -> None:
        """What an upgrade tells, in the order in which it does."""
        if told.event is Event.FAILED:
            who = self._upgrade.get("component", names.MANAGER)
            pid = os.getpid()
            self._append(events.UPGRADE_FAILED, who, pid, self._generation, error=told.why)
            self._upgrade = {}
        elif told.event is Event.STARTING:
            self._upgrade = {"component": told.component, "from": told.old, "to": told.version}
            self._began_at = time.monotonic()
        elif told.event is Event.ACTIVE:
            self._upgrade["pause_ms"] = told.ms
            self._upgrade["began_ns"] = time.monotonic_ns() - int(told.ms * 1e6)
        elif told.event is Event.UPGRADED:
            who = self._upgrade.pop("component", told.component)
            took_ms = round((time.monotonic() - self._began_at) * 1e3, 1)
            pid, stem = told.pid, who.replace("/", "-")
            generation = events.generation_of(self._runtime, stem, pid)
            self._append(events.UPGRADED, who, pid, generation, **self._upgrade, took_ms=took_ms)
            self._upgrade = {}

    def reloaded(self, changes: list[str], took_s: float) -> None:
        self._own(events.RELOADED, changes=changes, took_ms=round(took_s * 1e3, 1))

    def reload_failed(self, error: str) -> None:
        self._own(events.RELOAD_FAILED, error=error)

    def retired(self, component: Component, why: str) -> None:
        details = {"why": why} if why else {}
        self._append(events.RETIRED, component.called, None, None, **details)

    def lame_duck(self, duration_s: float, grace_s: float) -> None:
        self._own(events.LAME_DUCK, duration_s=duration_s, grace_s=grace_s)

    def _own(self, kind: str, **details: Any) -> None:
        self._append(kind, names.MANAGER, os.getpid(), self._generation, **details)

    def _add(self, kind: str, component: Component, process: Process, **details: Any) -> None:
        stem = component.called.replace("/", "-")
        generation = events.generation_of(self._runtime, stem, process.pid)
        self._append(kind, component.called, process.pid, generation, **details)

    def _append(
        self, kind: str, who: str, pid: int | None, generation: int | None, **details: Any
    ) -> None:
        events.append(self._runtime, names.MANAGER, kind, who, pid, generation, **details)
