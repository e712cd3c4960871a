"""midair-tracer: writes what is traced to a run folder (docs/traces.md), and is needed by nobody.

It maps the trace rings read-only. Killed, it is started again and goes on where it was: at most
the records that found a full ring meanwhile are missing, and they are counted. It runs with a low
priority: records are dropped before messages wait.
"""

from __future__ import annotations

import os
import platform
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midair import names
from midair.errors import LayoutError, MidairError, MissingError, PermissionsError
from midair.exits import Exit
from midair.process import role
from midair.process.program import Program
from midair.trace import request as requests
from midair.trace import schema
from midair.trace.drain import RECORDS_A_PART, Drain, clean
from midair.trace.happened import Happened
from midair.trace.request import DONE, FAILED, OFF, ON, Request, Status
from midair.trace.run_folder import write_manifest, write_rows
from midair.version import __version__
from native.stats import Reader
from native.trace import Control, Ring, ring_count, rings

TURN_S = 0.05
PART_S = 1.0  # records wait so long for a part to be worth its file
LOOK_S = 0.5  # event log, counters, connections
# If most records are dropped whatever it does, it rests so long after each part, by the time that
# took, and leaves caches and cores to the messages. Now and then it tries whether it can keep up.
REST = 10.0
TRY_EVERY_S = 4.0
TRY_S = 0.2
FLIGHT_S = 2.0  # how long the end of a run waits for deliveries that were begun


class Run:
    """One run, from wherever it is to its end."""

    def __init__(self, program: Program, control: Control, request: Request) -> None:
        self._program = program
        self._control = control
        self.request = request
        self._folder = Path(request.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        clean(self._folder)
        self._drain = Drain(control, self._folder, request.run, request.number)
        self._happened = Happened(
            program.runtime,
            request.run,
            self._folder,
            request.started_ns,
        )
        self._rings: dict[int, Ring] = {}
        self._connmgrs = ring_count(program.runtime)
        before = requests.read_status(program.runtime)
        resumed = before is not None and before.number == request.number
        self._dropped_seen = dict(before.dropped_seen) if resumed and before else {}
        self._connections: set[int] = set()
        self._part = f"{os.getpid()}-{time.monotonic_ns()}"
        self._parts = 0
        self._last_part: dict[int, float] = {}
        self._dropped_before: dict[int, int] = {}
        self._rests_until: dict[int, float] = {}
        self._next_look = 0.0
        self._looked_ns = time.monotonic_ns()
        self.dropped = before.dropped if resumed and before else 0
        self._control.set(request.number, request.every)

    def change(self, request: Request) -> None:
        """The same run, with another sampling."""
        self.request = request
        self._control.set(request.number, request.every)

    def turn(self) -> bool:
        """One look at everything. True: there is more to do at once."""
        self._rings = rings(self._program.runtime, self._connmgrs, self._rings)
        more = False
        for ring in self._rings.values():
            more |= self._take(ring)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._connmgrs = ring_count(self._program.runtime)  # some may have been added
            self._look()
        return more

    def _take(self, ring: Ring) -> bool:
        waiting, now = self._drain.waiting(ring), time.monotonic()
        due = self._last_part.setdefault(ring.index, now) + PART_S
        if waiting < min(RECORDS_A_PART, ring.capacity // 4) and (not waiting or now < due):
            return False
        if now < self._rests_until.get(ring.index, 0.0):
            return False
        taken, dropped = self._drain.take(ring), ring.counts()["dropped"]
        done = self._last_part[ring.index] = time.monotonic()
        lost = dropped - self._dropped_before.get(ring.index, dropped)
        self._dropped_before[ring.index] = dropped
        if lost > taken and done % TRY_EVERY_S > TRY_S:
            self._rests_until[ring.index] = done + REST * (done - now)
            return False
        return waiting > RECORDS_A_PART

    def _look(self, last: bool = False) -> None:
        now_ns = time.monotonic_ns()
        for ring in self._rings.values():
            dropped = ring.counts()["dropped"]
            key = f"{ring.index}-{ring.epoch}"
            before = self._dropped_seen.setdefault(key, dropped)
            if dropped > before:
                self._happened.dropped(ring, self._looked_ns, now_ns, dropped - before)
                self._dropped_seen[key] = dropped
                self.dropped += dropped - before
        self._looked_ns = now_ns
        self._happened.look(now_ns, last)
        self._write(schema.EVENTS, self._happened.take())
        self._write(schema.CONNECTIONS, self._new_connections())
        subjects = [self._row(subject_hash=k, subject=t) for k, t in self._drain.subjects.items()]
        self._write(schema.SUBJECTS, subjects)
        self._drain.subjects_written()

    def _new_connections(self) -> list[dict[str, Any]]:
        offset_ns = clock_offset_ns()
        rows = []
        for index in self._rings:
            try:
                found = list(Reader(self._program.runtime, names.CONNMGR, index).conns())
            except (MissingError, LayoutError, PermissionsError):
                continue
            for conn in found:
                if conn.uid in self._connections:
                    continue
                self._connections.add(conn.uid)
                rows.append(
                    self._row(
                        uid=conn.uid,
                        connmgr=index,
                        name=conn.name,
                        address=f"{conn.ip}:{conn.port}",
                        opened_ns=conn.since_ns - offset_ns,
                    )
                )
        return rows

    def _row(self, **values: Any) -> dict[str, Any]:
        return {"schema_version": schema.SCHEMA_VERSION, "run": self.request.run, **values}

    def _write(self, table: schema.Table, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._parts += 1
            write_rows(self._folder, table, f"{self._part}-{self._parts}", rows)

    def finish(self) -> None:
        """Nothing more is traced: writes what there is, then the manifest."""
        self._control.set(self.request.number, 0)
        until = time.monotonic() + FLIGHT_S
        while time.monotonic() < until and not self._landed():
            self.turn()
            self._program.watchdog()
            time.sleep(TURN_S)
        for ring in self._rings.values():
            while self._drain.take(ring):
                self._program.watchdog()
        self._look(last=True)
        request = self.request
        manifest: dict[str, Any] = {
            "format": schema.FORMAT,
            "schema_version": schema.SCHEMA_VERSION,
            "run": request.run,
            "versions": {
                "midair": __version__,
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "settings": {
                "configuration": asdict(self._program.config),
                "sample_every": request.every,
                **request.settings,
            },
            "started_ns": request.started_ns,
            "ended_ns": time.monotonic_ns(),
            "clock_offset_ns": clock_offset_ns(),
            "counts": {
                "records": self._drain.rows,
                "events": self._happened.count,
                "dropped": self.dropped,
            },
        }
        if request.checks:
            manifest["checks"] = request.checks
        write_manifest(self._folder, manifest)

    def _landed(self) -> bool:
        """Every connmgr knows that the run is over and has nothing of it on the way."""
        return all(
            ring.word & 0xFFFFFFFF == 0 and ring.counts()["flights"] == 0
            for ring in self._rings.values()
        )

    def status(self, state: str) -> Status:
        return Status(
            self.request.number,
            self.request.change,
            state,
            os.getpid(),
            self._drain.rows,
            self._happened.count,
            self.dropped,
            self._drain.bytes,
            dropped_seen=dict(self._dropped_seen),
        )


def clock_offset_ns() -> int:
    """Wall clock minus monotonic clock."""
    return time.time_ns() - time.monotonic_ns()


class Tracer:
    """Does what the request in the runtime directory says."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._control = Control(program.runtime)
        self._run: Run | None = None
        self._said: Status | None = None
        self._next_said = 0.0

    def turn(self) -> bool:
        """True: there is more to do at once."""
        runtime = self._program.runtime
        request = requests.read_request(runtime)
        status = requests.read_status(runtime) if self._run is None else None
        over = status is not None and request is not None and status.number == request.number
        if request is None or (over and status is not None and status.state in (DONE, FAILED)):
            if self._control.word & 0xFFFFFFFF:
                self._control.set(self._control.word >> 32, 0)
            return False
        try:
            return self._go_on(request)
        except (OSError, MidairError) as error:
            self._control.set(request.number, 0)
            self._run = None
            text = f"{request.folder}: {error}"
            self._program.log.error("run %s: %s", request.run, text)
            self._say(Status(request.number, request.change, FAILED, os.getpid(), error=text))
            return False

    def _go_on(self, request: Request) -> bool:
        if self._run is None or self._run.request.number != request.number:
            if (Path(request.folder) / schema.MANIFEST).exists():
                raise MidairError("the run is complete already", Exit.USAGE)
            self._run = Run(self._program, self._control, request)
        elif self._run.request.change != request.change:
            self._run.change(request)
        run = self._run
        if request.state == OFF:
            run.finish()
            self._run = None
            self._say(run.status(DONE))
            return False
        more = run.turn()
        status = run.status(ON)
        changed = self._said is None or self._said.change != status.change
        if changed or time.monotonic() >= self._next_said:
            self._say(status)
        return more

    def _say(self, status: Status) -> None:
        self._next_said = time.monotonic() + LOOK_S
        if status != self._said:
            requests.write_status(self._program.runtime, status)
            self._said = status


class TracerRole(role.Role):
    """The tracer in its role. What it works on are the rings that connmgrs make."""

    turn_s_max = TURN_S

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        missing = missing_packages()
        if missing:
            raise MidairError(missing, Exit.NO_RESOURCES)
        import pyarrow as pa

        pa.set_cpu_count(1)
        # The tracer must not slow down what it looks at: only cores that nobody else wants.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def open(self, create: bool) -> None:
        """Nothing that a waiting process could open."""

    def recover(self) -> dict[str, int]:
        self._tracer = Tracer(self.program)
        return {}

    def turn(self, timeout_s: float) -> None:
        more = self._tracer.turn()
        if select.select([self.program.wake_fd], [], [], 0 if more else timeout_s)[0]:
            self.program.drain_wake()

    def show(self) -> None:
        """Its figures are in the status of the run."""


def missing_packages() -> str:
    """Why nothing can be traced here; empty: it can."""
    import importlib.util

    missing = [name for name in ("numpy", "pyarrow") if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"tracing needs {' and '.join(missing)}: pip install 'midair[spark]'"


def main(argv: Sequence[str] | None = None) -> int:
    return role.run(names.TRACER, TracerRole, argv, description="Writes traces to Parquet files.")


if __name__ == "__main__":
    sys.exit(main())
