"""latency_report against the same figures computed plainly, from all records at once.

Method: a synthetic run of 150,000 records, whose upgrades stop messages for a known time, goes
through Spark; numpy sorts the same records and counts.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midair.errors import LayoutError, MissingError
from midair.trace import schema
from midair.trace.schema import NS_PER_S, STAGE_NAMES
from spark_jobs import dashboard, event_phases, histogram, latency_report
from spark_jobs.generate import generate, replacements
from tests.support.instance import ROOT
from tests.support.spark import (
    SMALL,
    check_figures,
    durations,
    read,
    records_of,
    report_of,
    run_of,
    spark,
)

# py4j leaves the closing of its sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

OUT, FACTS = Path(), dict[str, Any]()


@pytest.fixture(scope="module", autouse=True)
def _report() -> None:
    global OUT, FACTS
    OUT, FACTS = report_of(SMALL)


# ---- the tables --------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [schema.RECORDS, schema.EVENTS], ids=lambda table: table.name)
def test_the_page_has_every_column(table: schema.Table) -> None:
    title = {"records": "Record", "events": "Event"}[table.name]
    text = (ROOT / "docs" / "traces.md").read_text()
    part = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \| (\w+) \|", part, re.M)
    assert shown == [(column.name, column.kind) for column in table.columns]


def test_the_page_has_every_kind_of_event() -> None:
    text = (ROOT / "docs" / "traces.md").read_text().split("\n## Event\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| `([\w-]+)` \|", text.split("| kind |")[1], re.M)
    assert shown == list(schema.EVENT_KINDS)
    assert set(schema.DISTURBANCES) <= set(schema.EVENT_KINDS)


@pytest.mark.parametrize("table", schema.TABLES, ids=lambda table: table.name)
def test_arrow_and_spark_mean_the_same(table: schema.Table) -> None:
    there = spark().read.parquet(str(run_of(SMALL) / table.glob))
    assert there.schema == schema.spark_schema(table)


def test_synthetic_runs_keep_the_rules_of_the_page(tmp_path: Path) -> None:
    records = records_of(SMALL)
    times = ["received_ns", "queued_ns", "routed_ns", "instructed_ns", "written_ns"]
    for earlier, later in zip(["start_ns", *times], times, strict=False):
        assert (records[earlier] <= records[later]).all()
    for connmgr in range(SMALL.connmgrs):
        mine = records["sequence"][records["destination_connmgr"] == connmgr]
        assert sorted(mine) == list(range(len(mine)))
    parts = list(run_of(SMALL).rglob("part-*.parquet"))
    for part in run_of(SMALL).glob("minute=*/*.parquet"):
        written = pq.ParquetFile(part).read(["written_ns"])["written_ns"].to_numpy()
        assert (np.diff(written) >= 0).all()
        assert set(written // schema.MINUTE_NS) == {int(part.parent.name.split("=")[1])}
        assert pq.ParquetFile(part).metadata.row_group(0).column(0).compression == "ZSTD"
    assert not list(run_of(SMALL).rglob(".*"))

    generate(tmp_path / "again", SMALL, processes=2)
    again = {path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("part-*")}
    assert again == {path.relative_to(run_of(SMALL)) for path in parts}
    for path in again:
        assert (
            pq.ParquetFile(tmp_path / "again" / path)
            .read()
            .equals(pq.ParquetFile(run_of(SMALL) / path).read())
        )


# ---- histograms --------------------------------------------------------------------------------


@given(st.integers(0, 2**62))
def test_a_bucket_holds_its_durations_within_one_percent(ns: int) -> None:
    low, end = histogram.bounds(histogram.bucket(ns))
    assert low <= ns < end
    assert abs(histogram.middle(histogram.bucket(ns)) - ns) <= histogram.RELATIVE_ERROR * ns
    assert histogram.RELATIVE_ERROR < 0.01


def test_spark_and_python_agree_on_buckets() -> None:
    edges = {0, *(base + step for base in (2**p for p in range(7, 62)) for step in (-1, 0, 1))}
    rng = np.random.default_rng(3)
    edges |= {int(x) for x in np.exp(rng.uniform(0, 42, 2000))}
    values = ", ".join(f"{ns}L" for ns in sorted(edges))
    rows = (
        spark()
        .sql(f"select explode(array({values})) as ns")
        .selectExpr("ns", f"{histogram.bucket_sql('ns')} as bucket")
        .selectExpr("*", f"{histogram.middle_sql('bucket')} as middle")
        .collect()
    )
    assert len(rows) == len(edges)
    for row in rows:
        assert row["bucket"] == histogram.bucket(row["ns"])
        assert row["middle"] == histogram.middle(row["bucket"])


# ---- figures -----------------------------------------------------------------------------------


def test_stages_against_exact_percentiles() -> None:
    rows = {row["stage"]: row for row in read(OUT, "summary")}
    assert set(rows) == set(STAGE_NAMES)
    for name, row in rows.items():
        check_figures(row, durations(records_of(SMALL), name))
        assert row["clock_errors"] == 0
    assert rows["client"]["count"] < rows["total"]["count"] == SMALL.records


def test_seconds_against_exact_percentiles() -> None:
    records = records_of(SMALL)
    rows = read(OUT, "per_second")
    seconds = records["written_ns"] // NS_PER_S
    assert len(rows) == len(set(seconds)) * len(STAGE_NAMES)
    for row in rows:
        mine = {name: values[seconds == row["second"]] for name, values in records.items()}
        check_figures(row, durations(mine, row["stage"]))


def test_connmgrs_against_exact_percentiles() -> None:
    records = records_of(SMALL)
    rows = read(OUT, "connmgrs")
    assert len(rows) == 2 * SMALL.connmgrs * len(STAGE_NAMES)
    for row in rows:
        chosen = records[f"{row['side']}_connmgr"] == row["connmgr"]
        mine = {name: values[chosen] for name, values in records.items()}
        check_figures(row, durations(mine, row["stage"]))


def test_connections_shares_and_jains_index() -> None:
    records = records_of(SMALL)
    rows = read(OUT, "connections")
    for side in ("source", "destination"):
        mine = {row["uid"]: row for row in rows if row["side"] == side}
        uids, counts = np.unique(records[f"{side}_uid"], return_counts=True)
        assert set(mine) == set(uids.tolist())
        for uid, count in zip(uids.tolist(), counts.tolist(), strict=True):
            chosen = records[f"{side}_uid"] == uid
            row = mine[uid]
            check_figures(row, durations({k: v[chosen] for k, v in records.items()}, "total"))
            assert row["bytes"] == records["body_size"][chosen].sum()
            assert row["share"] == pytest.approx(count / SMALL.records)
            assert (row["name"], row["connmgr"]) == (f"client-{uid}", (uid - 1) % SMALL.connmgrs)
        (fair,) = [row for row in read(OUT, "fairness") if row["side"] == side]
        assert fair["connections"] == len(uids)
        assert fair["jain"] == pytest.approx(counts.sum() ** 2 / (len(uids) * (counts**2).sum()))
        assert fair["largest_share"] == pytest.approx(counts.max() / SMALL.records)


def test_slowest_messages_are_the_slowest() -> None:
    records = records_of(SMALL)
    total = np.sort(durations(records, "total"))[::-1]
    rows = read(OUT, "slowest")
    assert [row["total_ns"] for row in rows] == total[: len(rows)].tolist()
    assert len(rows) == latency_report.SLOWEST
    for row in rows:
        parts = [row[f"{name}_ns"] for name in ("client", "refer", "queue", "route", "deliver")]
        assert sum(parts) == row["total_ns"]
        assert re.fullmatch(r"orders\.region\d+\.new", row["subject"])


# ---- events ------------------------------------------------------------------------------------


def concerned(event: Any, records: dict[str, Any]) -> Any:
    """Which records pass the component of an event."""
    if event.component == "router":
        return np.ones(SMALL.records, bool)
    connmgr = int(event.component.split("/")[1])
    return (records["source_connmgr"] == connmgr) | (records["destination_connmgr"] == connmgr)


def test_pauses_are_those_that_were_made() -> None:
    rows = read(OUT, "events")
    made = replacements(SMALL)
    assert [(row["time_ns"], row["component"]) for row in rows] == [
        (event.at_ns, event.component) for event in made
    ]
    for row, event in zip(rows, made, strict=True):
        # The first message after it may have been a fraction of a millisecond away.
        assert abs(row["pause_ns"] - event.pause_ns) < 1_000_000
        assert row["usual_ns"] < 1_500_000
    assert FACTS["longest_pause_ns"] == max(row["pause_ns"] for row in rows)


def test_pauses_against_a_plain_search() -> None:
    """The longest time without a write while a message waits, over single messages."""
    records = records_of(SMALL)
    for row, event in zip(read(OUT, "events"), replacements(SMALL), strict=True):
        end = event.at_ns + event.pause_ns
        near = concerned(event, records) & (records["written_ns"] >= event.at_ns - NS_PER_S)
        near &= records["written_ns"] < end + NS_PER_S
        written, start = records["written_ns"][near], records["start_ns"][near]
        earliest = np.minimum.accumulate(start[::-1])[::-1][1:]
        gaps = written[1:] - np.maximum(written[:-1], earliest)
        touching = (written[1:] >= event.at_ns) & (written[:-1] <= end)
        assert row["pause_ns"] == gaps[touching].max()


def test_phases_and_crossing_messages() -> None:
    records = records_of(SMALL)
    phases = {(row["event"], row["phase"], row["stage"]): row for row in read(OUT, "phases")}
    crossing = read(OUT, "crossing")
    events = read(OUT, "events")
    for number, event in enumerate(replacements(SMALL), 1):
        end = event.at_ns + event.pause_ns
        written, start = records["written_ns"], records["start_ns"]
        mine = concerned(event, records)
        before = mine & (written < event.at_ns) & (written >= event.at_ns - NS_PER_S)
        during = mine & (written >= event.at_ns) & (start <= end)
        after = mine & (start > end) & (written < end + NS_PER_S)
        for phase, chosen in (("before", before), ("during", during), ("after", after)):
            chosen_records = {name: values[chosen] for name, values in records.items()}
            for stage in STAGE_NAMES:
                check_figures(phases[number, phase, stage], durations(chosen_records, stage))
        across = mine & (start < event.at_ns) & (written >= event.at_ns)
        assert events[number - 1]["crossed"] == across.sum()
        listed = [row["total_ns"] for row in crossing if row["event"] == number]
        exact = np.sort((written - start)[across])[::-1]
        assert listed == exact[: latency_report.CROSSING].tolist()


def test_a_message_that_outlives_the_margin_still_crosses() -> None:
    """With a margin shorter than the pause, by way of the second join."""
    from spark_jobs.run_reader import open_run

    run = open_run(spark(), str(run_of(SMALL)))
    events = event_phases.numbered(run.table(schema.EVENTS))
    matched = event_phases.around(run.records(), events, 1_000_000, FACTS["longest_pause_ns"] * 2)
    found = {
        row["event"]: row["n"]
        for row in matched.where("phase = 'during'")
        .groupBy("event")
        .agg({"*": "count"})
        .toDF("event", "n")
        .collect()
    }
    phases = read(OUT, "phases")
    exact = {
        row["event"]: row["count"]
        for row in phases
        if row["phase"] == "during" and row["stage"] == "total"
    }
    assert found == exact


def test_headline() -> None:
    pause = max(event.pause_ns for event in replacements(SMALL)) / 1e6
    assert FACTS["headline"] == (
        f"{len(replacements(SMALL))} upgrades, 0 messages lost, "
        f"longest pause {dashboard.duration(FACTS['longest_pause_ns'])}"
    )
    assert abs(FACTS["longest_pause_ns"] / 1e6 - pause) < 1
    counts: dict[str, Any] = {"events": {"upgrade": 1, "death": 2}, "longest_pause_ns": 950}
    counts["manifest"] = {"checks": {"lost": 1, "doubled": 0, "reordered": 3}}
    assert latency_report.headline(counts) == (
        "1 upgrade, 2 deaths, 1 message lost, 3 messages reordered, longest pause 950 ns"
    )
    counts["manifest"] = {}
    assert "lost messages not counted" in latency_report.headline(counts)


# ---- other runs --------------------------------------------------------------------------------


def test_a_skewed_run_without_events_or_dictionaries(tmp_path: Path) -> None:
    """Nine records in ten of one sender; a record missing; a clock that went back; no manifest."""
    load = replace(SMALL, run="skewed", skew=0.9, event_every_s=0, records=30_000, stamped=1.0)
    folder = tmp_path / "skewed"
    generate(folder, load)
    for name in ("events", "subjects", "connections"):
        shutil.rmtree(folder / name)
    (folder / schema.MANIFEST).unlink()
    part = sorted(folder.glob("minute=*/*.parquet"))[0]
    rows = pq.ParquetFile(part).read()
    rows = rows.filter(pc.not_equal(rows["message"], 17))
    late = pc.if_else(pc.equal(rows["message"], 18), rows["received_ns"], rows["queued_ns"])
    wrong = pc.if_else(pc.equal(rows["message"], 18), pc.subtract(late, 1000), late)
    place = rows.column_names.index("queued_ns")
    pq.write_table(rows.set_column(place, "queued_ns", wrong), part)

    facts = latency_report.make_report(spark(), str(folder), quiet=True)
    out = folder / "_report"
    assert facts["records"] == load.records - 1
    assert facts["missing"] == 1
    assert not facts["complete"]
    assert facts["headline"] == "0 upgrades, lost messages not counted"
    rows_of = {row["stage"]: row for row in read(out, "summary")}
    assert rows_of["refer"]["clock_errors"] == 1
    assert rows_of["server"]["clock_errors"] == 0
    top = max(read(out, "connections"), key=lambda row: row["share"])
    assert (top["side"], top["uid"]) == ("source", 1)
    assert 0.89 < top["share"] < 0.92
    assert read(out, "slowest")[0]["subject"].startswith("#")


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such run folder"):
        latency_report.make_report(spark(), str(tmp_path / "nothing"), quiet=True)
    with pytest.raises(MissingError, match="no records"):
        latency_report.make_report(spark(), str(tmp_path), quiet=True)
    (tmp_path / schema.MANIFEST).write_text(
        json.dumps({"format": schema.FORMAT, "schema_version": 2})
    )
    with pytest.raises(LayoutError, match="schema version 2"):
        latency_report.make_report(spark(), str(tmp_path), quiet=True)


def test_records_of_a_later_version_are_refused(tmp_path: Path) -> None:
    generate(tmp_path / "later", replace(SMALL, records=3000))
    (tmp_path / "later" / schema.MANIFEST).unlink()
    (part,) = (tmp_path / "later").glob("minute=*/*.parquet")
    rows = pq.ParquetFile(part).read()
    version = pc.add(rows["schema_version"], 1).cast("int16")
    pq.write_table(rows.set_column(0, "schema_version", version), part)
    with pytest.raises(LayoutError, match="schema version 2"):
        latency_report.make_report(spark(), str(tmp_path / "later"), quiet=True)


def test_a_full_folder_is_not_generated_into() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spark_jobs.generate", str(run_of(SMALL)), "--records", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == f"generate: {run_of(SMALL)} is not empty\n"
