"""What is to be traced, and how far that is: two files in the runtime directory.

`trace.json` is written by `midair trace` (and the drill), `trace-status.json` by the tracer; both
are replaced as a whole. A tracer that starts goes by the first, so it does not matter when it
was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import msgspec

from midair.process.runtime import Runtime

T = TypeVar("T")

REQUEST = "trace.json"
STATUS = "trace-status.json"

ON = "on"
OFF = "off"  # asked for: what there is is written, then the manifest
DONE = "done"
FAILED = "failed"


@dataclass(frozen=True)
class Request:
    """A run somebody asked for."""

    number: int  # grows with every run of the instance
    change: int  # grows with every change of a request
    run: str
    folder: str  # the run folder, absolute
    every: int  # 1 in `every` messages
    state: str  # ON or OFF
    started_ns: int  # monotonic clock
    settings: dict[str, Any] = field(default_factory=dict)  # for the manifest
    checks: dict[str, Any] = field(default_factory=dict)  # for the manifest


@dataclass(frozen=True)
class Status:
    """What the tracer has made of it."""

    number: int
    change: int
    state: str  # ON, DONE or FAILED
    pid: int
    records: int = 0
    events: int = 0
    dropped: int = 0
    bytes: int = 0
    error: str = ""
    # Counters of the rings as they were seen last: "connmgr-epoch" -> dropped.
    dropped_seen: dict[str, int] = field(default_factory=dict)


def _decode(read: Callable[[str], bytes], name: str, kind: type[T]) -> T | None:
    """Nothing if it is not there; keys of another version are left out."""
    try:
        return msgspec.json.decode(read(name), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


def read_request(runtime: Runtime) -> Request | None:
    """It says where the tracer writes: one of another user does not count."""
    return _decode(runtime.read_own, REQUEST, Request)


def read_status(runtime: Runtime) -> Status | None:
    return _decode(runtime.read, STATUS, Status)


def write_request(runtime: Runtime, request: Request) -> None:
    runtime.write(REQUEST, json.dumps(asdict(request)))


def write_status(runtime: Runtime, status: Status) -> None:
    runtime.write(STATUS, json.dumps(asdict(status)))
