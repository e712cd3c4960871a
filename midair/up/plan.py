"""What a reload changes, and whom it restarts: worked out, and refused, before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midair import config_uses, names
from midair.config import Config
from midair.config_uses import RESTART_ORDER, Change
from midair.errors import ConfigError
from midair.up.component import Component

COUNT = "connmgr.count"
RETIRING = "connmgr.retiring"


@dataclass(frozen=True)
class Effect:
    """One changed key, and what it takes."""

    change: Change
    restarted: tuple[str, ...]  # components
    more: tuple[str, ...]  # what else happens, in words

    def text(self, done: bool) -> str:
        """A line for people; not `done`: of what would happen."""
        said = []
        if self.restarted:
            verb = "restarted" if done else "would be restarted"
            said.append(f"{', '.join(self.restarted)} {verb}")
        said += self.more
        return f"{self.change.text} ({'; '.join(said) if said else 'in place'})"

    def to_json(self, done: bool) -> dict[str, Any]:
        return {
            "key": self.change.key,
            "old": _json(self.change.old),
            "new": _json(self.change.new),
            "restarted": list(self.restarted),
            "more": list(self.more),
            "text": self.text(done),
        }


def compare(old: Config, new: Config) -> list[Change]:
    """What is to change. ConfigError: that cannot be done while the instance runs."""
    found = config_uses.changes(old, new)
    if fixed := [change for change in found if change.use.down]:
        whys = ", ".join(f"{change.key} ({change.use.down})" for change in fixed)
        raise ConfigError(
            f"cannot change while the instance runs: {whys}; midair down, then midair up; "
            "nothing was changed"
        )
    if old.router.other_ports and any(change.key == COUNT for change in found):
        raise ConfigError(
            "connmgr.count cannot change while router.other_ports is not 0: the other ports have "
            "their numbers by it; nothing was changed"
        )
    return found


def needs_restart(component: Component, old: Config, new: Config) -> bool:
    """Whether a component that runs with `old` has to be started anew to run with `new`.

    Both as the parts read them.
    """
    return any(concerns(change, component, old, new) for change in config_uses.changes(old, new))


def concerns(change: Change, component: Component, old: Config, new: Config) -> bool:
    """Whether the component uses that key."""
    if component.role not in change.use.parts:
        return False
    if change.key == RETIRING and component.role == names.CONNMGR:
        assert component.index is not None
        return (component.index >= old.serving) != (component.index >= new.serving)
    if change.key == RETIRING:
        return component.role == names.DISPATCHER
    return True


def in_order(components: Sequence[Component]) -> list[Component]:
    """As they are restarted, but for what reload.py leaves for the end."""
    known = [c for c in components if c.role in RESTART_ORDER]
    return sorted(known, key=lambda c: (RESTART_ORDER.index(c.role), c.index or 0))


def effects(
    found: Sequence[Change], components: Sequence[Component], old: Config, new: Config
) -> list[Effect]:
    """Each of the changes, with the components that are restarted because of it.

    `found` is about what people wrote; `old` and `new` are what the parts read.
    """
    inner = {change.key: change for change in config_uses.changes(old, new)}
    result = []
    for change in found:
        about = [inner[key] for key in _behind(change) if key in inner]
        who = tuple(
            component.called
            for component in in_order(components)
            if component.index is None or component.index < min(old.connmgrs, new.connmgrs)
            if any(concerns(it, component, old, new) for it in about)
            if not (change.key == "monitor.listen" and not (change.old and change.new))
        )
        result.append(Effect(change, who, _more(change, old, new)))
    return result


def _json(value: Any) -> Any:
    return [item.to_json() for item in value] if isinstance(value, tuple) else value


def _behind(change: Change) -> tuple[str, ...]:
    return (COUNT, RETIRING) if change.key == COUNT else (change.key,)


def _more(change: Change, old: Config, new: Config) -> tuple[str, ...]:
    if change.key == COUNT:
        added = [names.component(names.CONNMGR, n) for n in range(old.connmgrs, new.connmgrs)]
        leaving = [names.component(names.CONNMGR, n) for n in range(new.serving, new.connmgrs)]
        stays = range(old.serving, min(old.connmgrs, new.serving))
        staying = [names.component(names.CONNMGR, n) for n in stays]
        return (
            *([f"{', '.join(added)} added"] if added else []),
            *([f"{', '.join(leaving)} retiring"] if leaving else []),
            *([f"{', '.join(staying)} not retiring any more"] if staying else []),
        )
    if change.key == "monitor.listen" and not change.old:
        return ("monitor started",)
    if change.key == "monitor.listen" and not change.new:
        return ("monitor ended",)
    return ()
