"""The event log of an instance: what happened to its components, one JSON object a line.

`events.jsonl` in the runtime directory. Whoever has something to say appends one line, with one
write to a descriptor opened for appending: lines of different processes do not mix, and one of a
process that was killed is there whole or not at all. Past EVENTS_BYTES_MAX the file becomes
`events.1.jsonl`, in the place of the one before, and a new one is begun: there are at most two.

Every line has "kind", "component", "pid", "generation" (null where the writer does not know it),
"wall_ns" and "monotonic_ns" (clocks of the machine), "by" (who wrote it), and "details".

    kind         by          details
    up           manager     version, listen
    down         manager     why
    taken_over   manager     version, parts: how many were alive, missing: those that were not
    died         manager     end, code (of the exit; below 0: the signal; null: not known), deaths
    hung         manager     silent_s
    active       component   version, start_ms: from the start of the process until it is ready;
                             taken_over_ns: when it got the lease, if it had to wait for it
    migrated     component   version, segments: how many it converted, stood_ms, took_ms
    recovered    component   what it found and repaired, took_ms: since it had the lease
    back         manager     away_ms: from the death to the successor at work
    upgraded     manager     from, to, pause_ms, took_ms, began_ns: the old one was told to end
    upgrade_failed manager   error
    reloaded     manager     changes: a line for each key, took_ms
    reload_failed manager    error
    retired      manager     why: it ended, but not everybody could do without it
    lame_duck    manager     duration_s, grace_s
    gave_up      manager     why
    slow_consumer connmgr    uid, reason, pending_bytes
    table        component   table, full (false: nearly), used, most: said once (tables.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from midair.errors import MidairError
from midair.process.runtime import Runtime

NAME = "events.jsonl"
OLDER = "events.1.jsonl"
EVENTS_BYTES_MAX = 256 * 1024  # of one file
EVENTS_BYTES_STOP = 4 * EVENTS_BYTES_MAX  # nobody who may rename it writes: no more lines
LINE_BYTES_MAX = 4096

UP = "up"
DOWN = "down"
TAKEN_OVER = "taken_over"
DIED = "died"
HUNG = "hung"
ACTIVE = "active"
RECOVERED = "recovered"
MIGRATED = "migrated"
BACK = "back"
UPGRADED = "upgraded"
UPGRADE_FAILED = "upgrade_failed"
RELOADED = "reloaded"
RELOAD_FAILED = "reload_failed"
RETIRED = "retired"
LAME_DUCK = "lame_duck"
GAVE_UP = "gave_up"
SLOW_CONSUMER = "slow_consumer"
TABLE = "table"
KINDS = (
    UP,
    DOWN,
    TAKEN_OVER,
    DIED,
    HUNG,
    ACTIVE,
    RECOVERED,
    MIGRATED,
    BACK,
    UPGRADED,
    UPGRADE_FAILED,
    RELOADED,
    RELOAD_FAILED,
    RETIRED,
    LAME_DUCK,
    GAVE_UP,
    SLOW_CONSUMER,
    TABLE,
)


def append(
    runtime: Runtime,
    by: str,
    kind: str,
    component: str,
    pid: int | None,
    generation: int | None,
    **details: Any,
) -> None:
    """Adds one event. A log that cannot be written is no reason to stop working."""
    event = {
        "wall_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "kind": kind,
        "component": component,
        "pid": pid,
        "generation": generation,
        "by": by,
        "details": details,
    }
    line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
    if len(line) > LINE_BYTES_MAX:
        event["details"] = {"cut": json.dumps(details)[: LINE_BYTES_MAX // 4]}
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
    with contextlib.suppress(OSError, MidairError):
        for _ in range(2):
            fd = runtime.open_shared(NAME, os.O_APPEND)
            try:
                size = os.fstat(fd).st_size
                if size + len(line) > EVENTS_BYTES_MAX and _put_aside(runtime, fd):
                    continue
                if size + len(line) <= EVENTS_BYTES_STOP:
                    os.write(fd, line)
                return
            finally:
                os.close(fd)


def _put_aside(runtime: Runtime, fd: int) -> bool:
    """Begins a new file, if it is still this one's turn and we may rename it.

    Nobody waits for the lock: its holder may be stopped, and the log is not worth a pause.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(runtime.path / NAME).st_ino == os.fstat(fd).st_ino:
            os.rename(runtime.path / NAME, runtime.path / OLDER)
    except FileNotFoundError:
        pass
    except (PermissionError, BlockingIOError):
        return False
    return True


def read(runtime: Runtime) -> Iterator[dict[str, Any]]:
    """Every event there is, the oldest first."""
    for name in (OLDER, NAME):
        try:
            text = runtime.read(name).decode(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("details"), dict):
                    yield event


def generation_of(runtime: Runtime, stem: str, pid: int) -> int | None:
    """Of a process that may be dead: what it had said about itself."""
    for suffix in ("state", "next"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(runtime.read(f"{stem}.{pid}.{suffix}"))
            return int(said["generation"])
    return None


def tell(event: dict[str, Any]) -> str:
    """One event in words, without its time."""
    kind, who, said = event.get("kind"), event.get("component"), event["details"]
    if kind == UP:
        return f"instance up, version {said.get('version')}"
    if kind == DOWN:
        return f"instance ends: {said.get('why')}"
    if kind == TAKEN_OVER:
        missing = said.get("missing")
        lost = f", without {', '.join(missing)}" if isinstance(missing, list) and missing else ""
        return f"manager took over {said.get('parts')} parts{lost}"
    if kind == DIED:
        return f"{who} died: {said.get('end')}"
    if kind == HUNG:
        return f"{who} silent for {said.get('silent_s')} s: killed"
    if kind == ACTIVE:
        return f"{who} active, started in {_ms(said.get('start_ms'))}"
    if kind == RECOVERED:
        found = ", ".join(
            f"{value} {name.replace('_', ' ')}"
            for name, value in said.items()
            if name != "took_ms" and value
        )
        return f"{who} recovered in {_ms(said.get('took_ms'))}" + (f": {found}" if found else "")
    if kind == MIGRATED:
        return (
            f"{who} converted {said.get('segments')} segments in {_ms(said.get('took_ms'))}, "
            f"{_ms(said.get('stood_ms'))} after everything began to stand still"
        )
    if kind == BACK:
        return f"{who} back, away for {_ms(said.get('away_ms'))}"
    if kind == UPGRADED:
        return (
            f"{who} upgraded from {said.get('from')} to {said.get('to')}, "
            f"pause {_ms(said.get('pause_ms'))}"
        )
    if kind == UPGRADE_FAILED:
        return f"upgrade failed: {said.get('error')}"
    if kind == RELOADED:
        return "reloaded: " + "; ".join(map(str, said.get("changes", [])))
    if kind == RELOAD_FAILED:
        return f"reload failed: {said.get('error')}"
    if kind == RETIRED:
        why = said.get("why")
        return f"{who} has retired" + (f"; {why}" if why else "")
    if kind == LAME_DUCK:
        return f"lame duck: clients leave within {said.get('duration_s', 0):g} s"
    if kind == GAVE_UP:
        return f"{who} is not started again: {said.get('why')}"
    if kind == SLOW_CONSUMER:
        return f"{who} closed connection {said.get('uid')}: {said.get('reason')}"
    if kind == TABLE:
        how = "full" if said.get("full") else "nearly full"
        return f"{who} {said.get('table')} {how}: {said.get('used')} of {said.get('most')} in use"
    return f"{who} {kind}"


def _ms(value: Any) -> str:
    return f"{value:.1f} ms" if isinstance(value, int | float) else "? ms"
