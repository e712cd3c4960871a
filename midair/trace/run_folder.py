"""Writing a run folder (docs/traces.md): files appear whole, under their final name, or not at all.

Any number of processes may write into one folder as long as their part names differ. A writer
that is killed leaves at most files whose names begin with '.', which nobody reads.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import IO, Any

from midair.errors import MidairError
from midair.exits import Exit
from midair.trace import schema

ROW_GROUP = 1 << 20
# Times lie close together and grow: their differences take few bits. Spark and Arrow read this
# encoding; a dictionary of a million different times would only be in the way.
_DELTA = {column.name for column in schema.RECORDS.columns if column.name.endswith("_ns")} | {
    "sequence",
    "time_ns",
}


def check_run_id(run: str) -> str:
    """The id itself, or an error that says what an id may look like."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", run):
        raise MidairError(f"run id {run!r}: 1 to 64 of letters, digits, '.', '_', '-'", Exit.USAGE)
    return run


def records_dir(run: Path, minute: int) -> Path:
    return run / f"minute={minute}"


def write_part(directory: Path, name: str, rows: Any) -> Path:
    """Writes `rows` (a pyarrow table of one of schema.TABLES, sorted) as part-<name>.parquet."""
    import pyarrow.parquet as pq

    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"part-{name}.parquet"
    hidden = directory / f".part-{name}.tmp"
    delta = [column for column in rows.column_names if column in _DELTA]
    plain = [column for column in rows.column_names if column not in _DELTA]
    with _new(hidden, "xb") as file:
        pq.write_table(
            rows,
            file,
            compression="zstd",
            row_group_size=ROW_GROUP,
            use_dictionary=plain,
            column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
        )
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(final)
    _sync_directory(directory)
    return final


def write_rows(run: Path, table: schema.Table, name: str, rows: list[dict[str, Any]]) -> Path:
    """Writes rows of a small table: events, subjects or connections."""
    import pyarrow as pa

    rows = sorted(rows, key=lambda row: row[table.sort])
    return write_part(
        run / table.glob, name, pa.Table.from_pylist(rows, schema=schema.arrow_schema(table))
    )


def write_manifest(run: Path, manifest: dict[str, Any]) -> None:
    """The last step of a run."""
    hidden = run / f".{schema.MANIFEST}.tmp"
    with _new(hidden, "x") as file:
        json.dump(manifest, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(run / schema.MANIFEST)
    _sync_directory(run)


def _new(path: Path, mode: str) -> IO[Any]:
    """A file that was not there: what somebody has left, or put there, is not written through."""
    path.unlink(missing_ok=True)
    return path.open(mode, encoding=None if "b" in mode else "utf-8")


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
