"""What `midair status` shows: a row for each process, from what it says and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midair.process.runtime import State
from midair.up.component import Component
from midair.up.process import Life, Process


def rows(states: Sequence[State], components: Sequence[Component]) -> list[dict[str, Any]]:
    """Every process of an instance; a component without one has a row too."""
    counts = {c.active.pid: c.restarts for c in components if c.active is not None}
    found = [row(state, counts.get(state.pid, 0)) for state in states]
    seen = {item["pid"] for item in found}
    for component in components:
        for process in component.processes:
            if process.pid not in seen:
                found.append(_bare_row(component, process))
        if not component.processes:
            found.append(_bare_row(component, None))
    return found


def row(state: State, restarts: int) -> dict[str, Any]:
    """A process that says what it is doing."""
    return {
        "role": state.role,
        "index": state.index,
        "pid": state.pid,
        "version": state.version,
        "state": state.state,
        "doing": state.doing,
        "generation": state.generation,
        "uptime_s": round(state.uptime_s, 3),
        "restarts": restarts,
    }


def _bare_row(component: Component, process: Process | None) -> dict[str, Any]:
    """A component, or one of its processes, that has not said anything about itself (yet)."""
    return {
        "role": component.role,
        "index": component.index,
        "pid": None if process is None else process.pid,
        "version": None,
        "state": Life.DOWN.value if process is None else process.life.value,
        "doing": "",
        "generation": None,
        "uptime_s": None,
        "restarts": component.restarts,
    }
