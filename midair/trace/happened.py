"""From the event log and the counters of an instance to the events of a run (docs/traces.md).

The event log says what happened to components. Bounds that were met are seen in the counters: an
event lasts from the last look before they grew to the first at which they did not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midair import names
from midair.errors import LayoutError, MissingError, PermissionsError
from midair.process import events
from midair.process.runtime import Runtime
from midair.trace import schema
from native.stats import Reader
from native.trace import Ring, ring_count

MS = 1e6

# Counter -> the bound that is met when it grows.
LIMITS = {
    names.CONNMGR: {
        "stalls": "arena",
        "throttled": "rate",
        "held": "consumer",
        "dropped": "max_pending",
    },
    names.ROUTER: {"blocked": "queue", "refused": "subjects"},
    names.DISPATCHER: {"refused": "max_connections", "descriptors_out": "descriptors"},
}


def row(
    run: str, time_ns: int, kind: str, component: str, duration_ns: float = 0, **more: Any
) -> dict[str, Any]:
    """One row of schema.EVENTS."""
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "run": run,
        "time_ns": int(time_ns),
        "kind": kind,
        "component": component,
        "pid": int(more.pop("pid", None) or 0),
        "generation": int(more.pop("generation", None) or 0),
        "duration_ns": max(0, int(duration_ns)),
        "details": json.dumps(more, separators=(",", ":")),
    }


def written(run: Path) -> set[tuple[int, str, str]]:
    """(time, kind, component) of the events that are in a run folder already."""
    import pyarrow.parquet as pq

    found: set[tuple[int, str, str]] = set()
    for path in sorted(run.glob(f"{schema.EVENTS.glob}/part-*.parquet")):
        table = pq.read_table(path, columns=["time_ns", "kind", "component"])
        found.update((it["time_ns"], it["kind"], it["component"]) for it in table.to_pylist())
    return found


class Happened:
    """The events of a run, each once."""

    def __init__(self, runtime: Runtime, run: str, folder: Path, since_ns: int) -> None:
        self._runtime = runtime
        self._run = run
        self._since_ns = since_ns
        self._seen = written(folder)
        self._log_seen: tuple[Any, ...] = ()
        self.rows: list[dict[str, Any]] = []  # not written yet
        self.count = len(self._seen)
        self._deaths: dict[str, dict[str, Any]] = {}  # component -> its death, not back yet
        self._readers: dict[str, Reader] = {}
        self._counted: dict[tuple[str, str], tuple[int, int]] = {}  # -> (value, when)
        self._met: dict[tuple[str, str], tuple[int, int]] = {}  # -> (since, counted then)

    def look(self, now_ns: int, last: bool = False) -> None:
        """Adds what has happened since the last look. `last`: what goes on ends now."""
        self._look_at_log(last)
        self._look_at_counters(now_ns, last)

    def dropped(self, ring: Ring, since_ns: int, now_ns: int, count: int) -> None:
        """Records were left out of a trace ring."""
        called = names.component(names.CONNMGR, ring.index)
        self._add(row(self._run, since_ns, "trace-drop", called, now_ns - since_ns, dropped=count))

    def take(self) -> list[dict[str, Any]]:
        """The rows that are to be written now."""
        rows, self.rows = self.rows, []
        self.count += len(rows)
        return rows

    def _add(self, it: dict[str, Any]) -> None:
        key = (it["time_ns"], it["kind"], it["component"])
        if key not in self._seen and it["time_ns"] >= self._since_ns:
            self._seen.add(key)
            self.rows.append(it)

    def _look_at_log(self, last: bool) -> None:
        stamp = tuple(_stamp(self._runtime.path / name) for name in (events.OLDER, events.NAME))
        if stamp == self._log_seen and not last:
            return
        self._log_seen = stamp
        self._deaths = {}
        for event in sorted(events.read(self._runtime), key=lambda it: it.get("monotonic_ns", 0)):
            if event.get("monotonic_ns", 0) >= self._since_ns:
                for it in self._rows_of(event):
                    self._add(it)
        if last:
            for it in self._deaths.values():  # nobody came back
                self._add(it)

    def _rows_of(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind, called, said = event["kind"], str(event["component"]), event["details"]
        at, who = int(event["monotonic_ns"]), {k: event[k] for k in ("pid", "generation")}
        if kind == events.UPGRADED:
            pause = float(said.get("pause_ms") or 0) * MS
            began = int(said.get("began_ns") or at - pause)
            versions = {key: said.get(key) for key in ("from", "to")}
            yield row(self._run, began, "upgrade", called, pause, **who, **versions)
        elif kind == events.DIED:
            code = said.get("code")
            how = {} if code is None else {"signal": -code} if code < 0 else {"exit": code}
            self._deaths[called] = row(self._run, at, "death", called, 0, **who, **how)
        elif kind == events.BACK:
            death = self._deaths.pop(called, None)
            if death is not None:
                death["duration_ns"] = int(float(said.get("away_ms") or 0) * MS)
                yield death
        elif kind == events.RECOVERED:
            took = float(said.get("took_ms") or 0) * MS
            found = {
                "words": said.get("words", 0),
                "input": said.get("bytes_read", 0),
                "output": said.get("bytes_written", 0),
                "batches": said.get("batches", 0),
            }
            yield row(self._run, at - int(took), "recovery", called, took, **who, **found)
        elif kind == events.ACTIVE and said.get("taken_over_ns"):
            yield row(self._run, said["taken_over_ns"], "lease", called, 0, **who, role=called)
        elif kind == events.SLOW_CONSUMER:
            yield row(self._run, at, "slow-consumer", called, 0, **who, **said)

    def _look_at_counters(self, now_ns: int, last: bool) -> None:
        connmgrs = ((names.CONNMGR, index) for index in range(ring_count(self._runtime)))
        for role, index in (*connmgrs, (names.ROUTER, None), (names.DISPATCHER, None)):
            called = names.component(role, index)
            try:
                reader = self._readers.get(called)
                if reader is None or not reader.current:
                    reader = self._readers[called] = Reader(self._runtime, role, index)
            except (MissingError, LayoutError, PermissionsError):
                continue
            totals = reader.counts().totals
            for counter, limit in LIMITS[role].items():
                self._count(called, limit, int(totals[counter]), now_ns, last)

    def _count(self, called: str, limit: str, value: int, now_ns: int, last: bool) -> None:
        key = (called, limit)
        before, when = self._counted.get(key, (value, now_ns))
        self._counted[key] = (value, now_ns)
        if value > before and key not in self._met:
            self._met[key] = (when, before)
        if key in self._met and (value == before or last):
            since, counted = self._met.pop(key)
            times = value - counted
            self._add(
                row(self._run, since, "limit", called, when - since, limit=limit, times=times)
            )


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0, 0)
    return (about.st_ino, about.st_size, about.st_mtime_ns)
