"""What the tests of the trace jobs share: one Spark session, and synthetic runs with their report.

Everything is made once, on first use, for all modules.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from midair.trace.schema import STAGES
from spark_jobs import session
from spark_jobs.generate import Load, generate
from spark_jobs.histogram import PARTS, PERCENTILES, RELATIVE_ERROR
from tests.support.instance import cli

PATIENCE_S = 600  # a cold Spark takes a minute, and more on a busy machine
BASE = Path(tempfile.mkdtemp(prefix="mdt-spark-"))
atexit.register(shutil.rmtree, BASE, ignore_errors=True)

# Ten seconds, five upgrades, nine records in ten with an intended time.
SMALL = Load(
    run="small",
    records=150_000,
    rate=15_000,
    connections=24,
    connmgrs=3,
    subjects=20,
    event_every_s=2.0,
    pause_ms=20.0,
    stamped=0.9,
    chunk=40_000,
)


@functools.cache
def spark() -> Any:
    found = session.start("tests", "local[2]", [str(run_of(SMALL))])
    atexit.register(found.stop)
    return found


@functools.cache
def run_of(load: Load) -> Path:
    """A complete run folder."""
    folder = BASE / f"run-{load.run}"
    generate(folder, load)
    return folder


@functools.cache
def dashboard_of(load: Load) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """`midair dashboard RUN` as a user runs it, with a Spark of its own, on a copy of the run."""
    run = BASE / f"shown-{load.run}"
    shutil.copytree(run_of(load), run)
    return run, cli("dashboard", str(run), timeout=PATIENCE_S)


@functools.cache
def report_of(load: Load) -> tuple[Path, dict[str, Any]]:
    """The folder of a report, and what report.json says."""
    run, done = dashboard_of(load)
    assert done.returncode == 0, done.stderr
    out = run / "_report"
    return out, json.loads((out / "report.json").read_text(encoding="utf-8"))


def read(*path: Any) -> list[dict[str, Any]]:
    """The rows of a table."""
    rows: list[dict[str, Any]] = pq.read_table(Path(*path)).to_pylist()
    return rows


@functools.cache
def records_of(load: Load) -> dict[str, Any]:
    """All records as numpy columns, in the order they were written, with `start_ns`."""
    parts = sorted(run_of(load).glob("minute=*/part-*.parquet"))
    table = pa.concat_tables(pq.ParquetFile(part).read() for part in parts).sort_by("written_ns")
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "run"}
    stamped = columns["intended_ns"] > 0
    columns["start_ns"] = np.where(stamped, columns["intended_ns"], columns["received_ns"])
    return columns


def durations(columns: dict[str, Any], stage_name: str) -> Any:
    """The durations of a stage, computed the plain way."""
    (stage,) = [stage for stage in STAGES if stage.name == stage_name]
    if stage_name == "total":
        return columns["written_ns"] - columns["start_ns"]
    values = columns[stage.end] - columns[stage.start]
    return values[columns["intended_ns"] > 0] if stage.start == "intended_ns" else values


def check_figures(row: dict[str, Any], values: Any) -> None:
    """A row of figures against the exact ones of the same durations."""
    assert row["count"] == len(values)
    assert row["max_ns"] == values.max()
    assert row["mean_ns"] == round(values.sum() / len(values))
    ordered = np.sort(values)
    for name, part in PERCENTILES.items():
        exact = int(ordered[-(-len(values) * part // PARTS) - 1])
        assert abs(row[name] - exact) <= RELATIVE_ERROR * exact, (name, row[name], exact)
