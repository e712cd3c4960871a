"""latency_live: every record once, whatever order files arrive in and wherever it is stopped.

Method: the files of a finished run are moved into a new folder piece by piece, as a tracer would,
and the job takes in what is there. In the end its sums must be those of latency_report.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from midair.trace import schema
from midair.trace.schema import NS_PER_S
from spark_jobs.latency_live import Live, write_page
from tests.support.spark import SMALL, read, records_of, report_of, run_of, spark

# py4j leaves the closing of its sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


class Crash(Exception):
    """The job dies."""


class Folder:
    """A run that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.parts = sorted(
            run_of(SMALL).glob("minute=*/part-*.parquet"), key=lambda part: part.name
        )

    def give(self, *numbers: int) -> None:
        for number in numbers:
            part = self.parts[number]
            place = self.path / part.parent.name
            place.mkdir(exist_ok=True)
            shutil.copy(part, place / f".{part.name}")
            (place / f".{part.name}").rename(place / part.name)

    def complete(self) -> None:
        shutil.copy(run_of(SMALL) / schema.MANIFEST, self.path)


def take(live: Live) -> None:
    """Takes in what is there, and ends."""
    live.begin(every=None).awaitTermination()


def figures(rows: list[Any]) -> list[dict[str, Any]]:
    return sorted((row.asDict() for row in rows), key=lambda row: str(row["stage"]))


def test_files_in_any_order_stops_and_a_crash(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    assert len(folder.parts) == 4
    second_ns = 2 * NS_PER_S

    folder.give(0)
    first = Live(spark(), str(folder.path), delay_ns=second_ns)
    take(first)
    seen = first.last()
    assert seen is not None
    records = records_of(SMALL)
    assert seen["records"] == SMALL.whole
    assert seen["late"] == 0

    # The third part before the second. The job dies when the tables of the batch are written,
    # but Spark does not know it yet.
    folder.give(2, 3)

    def crash(live: Live) -> None:
        raise Crash

    with pytest.raises(Exception, match="Crash"):
        take(Live(spark(), str(folder.path), delay_ns=second_ns, on_batch=crash))
    half = Live(spark(), str(folder.path), delay_ns=second_ns)
    attempted = half.last()
    assert attempted is not None
    assert attempted["batch"] == 1
    assert attempted["records"] == SMALL.records - SMALL.whole

    # Started again, it does the same batch once more, and then the part that came late.
    take(half)
    assert half.last() == attempted
    folder.give(1)
    folder.complete()
    take(half)
    last = half.last()
    assert last is not None
    assert last["records"] == SMALL.records
    assert last["batch"] == 2

    closed = (int(records["written_ns"].max()) - second_ns) // NS_PER_S
    part = records["message"] // SMALL.whole == 1
    late = part & (records["written_ns"] // NS_PER_S < closed)
    assert 0 < late.sum() < part.sum() + 1
    assert last["late"] == late.sum()
    assert last["watermark_ns"] == records["written_ns"].max() - second_ns

    out, _ = report_of(SMALL)
    assert figures(half.totals().collect()) == sorted(
        read(out, "summary"), key=lambda row: str(row["stage"])
    )
    rows = {(row["window"], row["stage"]): row.asDict() for row in half.figures().collect()}
    for row in read(out, "per_second"):
        mine = rows.pop((row["second"], row["stage"]))
        assert mine["closed"] == (row["second"] < closed)
        if row["stage"] == "server":
            assert (
                mine["late"] == (late & (records["written_ns"] // NS_PER_S == row["second"])).sum()
            )
        assert {key: mine[key] for key in row if key != "second"} == {
            key: row[key] for key in row if key != "second"
        }
    assert not rows

    place = write_page(half)
    assert place is not None
    assert f'"records":{SMALL.records}' in Path(place).read_text()
