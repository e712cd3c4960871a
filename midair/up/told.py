"""What an upgrade tells, in the order in which it happens.

Upgrade (upgrade.py) makes it, the manager logs it and adds it to the event log, and sends it to the
command, which shows it. What goes over the control socket is what release 0.1 reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from midair.exits import Exit


class Event(Enum):
    """For one component all but the last two, which end the upgrade."""

    STARTING = "starting"  # the candidate has been started
    STANDBY = "standby"  # it waits for the role
    SWITCHING = "switching"  # the old process is killed
    ACTIVE = "active"  # the candidate, or after BACK the old release, is at work
    DIED = "died"  # the candidate, after the switch
    BACK = "back"  # the old release is started again
    UPGRADED = "upgraded"  # the candidate has lived long enough
    OTHER = "other"  # something that a newer manager tells
    DONE = "done"
    FAILED = "error"


ENDS = (Event.DONE, Event.FAILED)


@dataclass(frozen=True)
class Told:
    """One thing that happened."""

    event: Event
    component: str = ""
    version: str = ""  # STARTING, BACK: of the release that is started
    old: str = ""  # STARTING: of the release at work
    ms: float = 0.0  # ACTIVE: since the old process was ended
    pid: int = 0  # UPGRADED
    why: str = ""  # FAILED; OTHER: what the manager called it
    code: int = Exit.FAILED  # FAILED: what the command ends with

    @property
    def text(self) -> str:
        """In words, without the component."""
        if self.event is Event.STARTING:
            return f"starting {self.version}"
        if self.event is Event.BACK:
            return f"back to {self.version}"
        if self.event is Event.ACTIVE:
            return f"active in {self.ms:.1f} ms"
        if self.event is Event.UPGRADED:
            return f"upgraded, pid {self.pid}"
        return self.why or self.event.value

    def to_json(self) -> dict[str, Any]:
        if self.event is Event.DONE:
            return {"done": True}
        if self.event is Event.FAILED:
            return {"error": self.why, "code": int(self.code)}
        said = {"version": self.version, "old": self.old, "pid": self.pid}
        if self.event is Event.ACTIVE:
            said["ms"] = self.ms
        more = {key: value for key, value in said.items() if value or key == "ms"}
        return {"component": self.component, "event": self.event.value, **more}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Told:
        if "done" in said:
            return cls(Event.DONE)
        if "error" in said:
            return cls(Event.FAILED, why=said["error"], code=said["code"])
        known = {key: said[key] for key in ("version", "old", "ms", "pid") if key in said}
        try:
            return cls(Event(said["event"]), said["component"], **known)
        except ValueError:
            return cls(Event.OTHER, said["component"], why=said["event"])
