"""From a trace ring to Parquet: every record once, whatever kills the tracer.

A part is named after the ring and the positions in it that it was made of. The tail of the ring is
moved after the last part of a range has its name. So a tracer that finds parts of a range that
begins at the tail was killed in between: it takes the same range again, and writes only
what is missing of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from midair.trace import schema
from midair.trace.run_folder import records_dir, write_part
from native.trace import Control, Ring

RECORDS_A_PART = 1 << 15  # the rest of the loop goes on between two parts
_PART = re.compile(r"part-(\d+)-([0-9a-f]{16})-(\d+)-(\d+)\.parquet")
_CONNMGR_SHIFT = 58  # handle: the connmgr of a message is in its top bits (native/ledger.h)


def clean(run: Path) -> None:
    """Removes what a tracer that was killed had not finished."""
    for path in run.glob("**/.part-*.tmp"):
        path.unlink(missing_ok=True)


def counted(run: Path, table: schema.Table) -> tuple[int, int]:
    """(rows, bytes) of a table as far as it is written."""
    import pyarrow.parquet as pq

    rows = size = 0
    for path in run.glob(f"{table.glob}/part-*.parquet"):
        rows += pq.read_metadata(path).num_rows
        size += path.stat().st_size
    return rows, size


class Drain:
    """Writes the records of one run."""

    def __init__(self, control: Control, run: Path, name: str, number: int) -> None:
        self._control = control
        self._run = run
        self._name = name
        self._number = number
        self._begun = {}  # (connmgr, epoch, start) -> end, of ranges some parts of which are there
        for path in run.glob("minute=*/part-*.parquet"):
            if found := _PART.fullmatch(path.name):
                index, epoch, start, end = found.groups()
                self._begun[int(index), int(epoch, 16), int(start)] = int(end)
        self.rows, self.bytes = counted(run, schema.RECORDS)
        self.subjects: dict[int, str] = {}  # not written yet
        self._known: set[int] = set()

    def waiting(self, ring: Ring) -> int:
        return ring.head - self._control.tail(ring)[0]

    def take(self, ring: Ring) -> int:
        """Writes at most RECORDS_A_PART records; how many were taken from the ring."""
        start, subjects = self._control.tail(ring)
        end = self._begun.get((ring.index, ring.epoch, start))
        if end is None:
            end = min(ring.head, start + RECORDS_A_PART)
        subjects_end = ring.subjects_head
        for key, text in ring.subjects(subjects, subjects_end).items():
            if key not in self._known:
                self.subjects[key] = text
        if end > start:
            self._write(ring, start, end)
        if end > start or subjects_end > subjects:
            self._control.set_tail(ring, end, subjects_end)
        return end - start

    def subjects_written(self) -> None:
        self._known.update(self.subjects)
        self.subjects = {}

    def _write(self, ring: Ring, start: int, end: int) -> None:
        import numpy as np

        rows = ring.records(start, end)
        rows = rows[rows["recording"] == self._number]
        rows = rows[np.argsort(rows["written_ns"], kind="stable")]
        minutes = rows["written_ns"] // schema.MINUTE_NS
        part = f"{ring.index}-{ring.epoch:016x}-{start}-{end}"
        for minute in np.unique(minutes):
            folder = records_dir(self._run, int(minute))
            if (folder / f"part-{part}.parquet").exists():
                continue
            table = self._table(ring.index, rows[minutes == minute])
            written = write_part(folder, part, table)
            self.rows += table.num_rows
            self.bytes += written.stat().st_size

    def _table(self, connmgr: int, rows: Any) -> Any:
        """The columns of schema.RECORDS, in their order."""
        import numpy as np
        import pyarrow as pa

        count = len(rows)
        said: dict[str, Any] = {
            "schema_version": pa.repeat(pa.scalar(schema.SCHEMA_VERSION, pa.int16()), count),
            "run": pa.repeat(pa.scalar(self._name), count),
            "source_connmgr": (rows["message"] >> np.uint64(_CONNMGR_SHIFT)).astype(np.int32),
            "destination_connmgr": pa.repeat(pa.scalar(connmgr, pa.int32()), count),
        }
        kinds = {"int16": np.int16, "int32": np.int32, "int64": np.int64}
        columns = []
        for column in schema.RECORDS.columns:
            values = said.get(column.name)
            if values is None:
                values = rows[column.name].astype(kinds[column.kind])
            columns.append(values if isinstance(values, pa.Array) else pa.array(values))
        return pa.Table.from_arrays(columns, schema=schema.arrow_schema(schema.RECORDS))
