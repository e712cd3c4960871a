"""`latency_report RUN`: what the records of one run say, as Parquet tables and one page.

Tables in OUT (default RUN/_report); durations in ns, stages as in schema.STAGES:

  histogram          slice, stage, bucket -> count; slices of 1 s, or 0.1 s in runs up to a minute
  connmgr_histogram  source_connmgr, destination_connmgr, stage, bucket -> count
  summary            stage -> figures (count, mean, percentiles, max)
  per_second         second, stage -> figures; seconds of the monotonic clock
  connmgrs           side, connmgr, stage -> figures
  connections        side, uid -> messages, bytes, share, figures of `total`
  fairness           side -> number of connections, Jain's index, largest and smallest share
  events             the events, each with the pause it caused and the messages that crossed it
  phases             event, phase, stage -> figures before, during and after
  crossing           the slowest messages on their way when an event began
  slowest            the slowest messages of all, with the time of each stage
  coverage           source_connmgr, destination_connmgr -> records, bytes, first and last
  report.json        headline, counts, manifest, seconds each step took
  report.html        the dashboard

Cost: a fixed number of passes over the records, each a hash aggregation whose result is small. No
Python runs per record and nothing that grows with the records is collected.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # spark-submit runs the file itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from midair.trace import schema
from midair.trace.schema import NS_PER_S
from midair.version import __version__
from spark_jobs import dashboard, event_phases, histogram, storage
from spark_jobs.run_reader import START, Run, check_version, durations, open_run, stage_name
from spark_jobs.session import Steps, run_main, start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOB = "latency_report"
SLOWEST = 50  # messages listed
CROSSING = 10  # messages listed for each event


def default_out(run: str) -> str:
    return storage.join(run, "_report")


class Report:
    """The report of one run: each method makes one table, or several from one pass."""

    def __init__(self, run: Run, out: str, margin_ns: int = event_phases.MARGIN_NS) -> None:
        self.run = run
        self.out = out
        self.margin_ns = margin_ns
        self.records = run.records()
        self.longest_ns = 0  # of all messages; known after write_coverage
        self.total = 0  # records; known after write_coverage
        self.slice_ns = NS_PER_S  # known after write_coverage

    def write(self, name: str, rows: DataFrame, files: int = 1) -> None:
        rows.coalesce(files).write.mode("overwrite").parquet(storage.join(self.out, name))

    def read(self, name: str) -> DataFrame:
        return self.run.spark.read.parquet(storage.join(self.out, name))

    # ---- passes over the records ----

    def write_coverage(self) -> None:
        """Counts of each pair of connmgrs, and how many records their numbers say are missing."""
        from pyspark.sql import functions as F

        found = (
            self.records.select("*", F.expr(f"{START} as start_ns"))
            .groupBy("source_connmgr", "destination_connmgr")
            .agg(
                F.count(F.lit(1)).alias("records"),
                F.sum("body_size").alias("bytes"),
                F.min("sequence").alias("first_sequence"),
                F.max("sequence").alias("last_sequence"),
                F.min("start_ns").alias("start_ns"),
                F.min("written_ns").alias("first_ns"),
                F.max("written_ns").alias("last_ns"),
                F.max(F.expr("written_ns - start_ns")).alias("longest_ns"),
                F.max("schema_version").alias("schema_version"),
            )
        )
        self.write("coverage", found.orderBy("source_connmgr", "destination_connmgr"))
        row = (
            self.read("coverage")
            .agg(
                F.max("schema_version"),
                F.max("longest_ns"),
                F.expr("max(last_ns) - min(first_ns)"),
                F.sum("records"),
            )
            .first()
        )
        assert row is not None
        check_version(self.run.path, int(row[0]))
        self.longest_ns = int(row[1])
        self.total = int(row[3])
        self.slice_ns = NS_PER_S if int(row[2]) > schema.MINUTE_NS else NS_PER_S // 10

    def write_connmgr_histogram(self) -> None:
        from pyspark.sql import functions as F

        keys = ["source_connmgr", "destination_connmgr"]
        found = (
            durations(self.records, *keys)
            .select("*", F.expr(histogram.bucket_sql("ns")).alias("bucket"))
            .groupBy(*keys, "stage", "bucket")
            .agg(*histogram.aggregates())
        )
        self.write("connmgr_histogram", found)

    def write_histogram(self) -> None:
        from pyspark.sql import functions as F

        found = (
            durations(self.records, F.expr(f"written_ns div {self.slice_ns}").alias("slice"))
            .select("*", F.expr(histogram.bucket_sql("ns")).alias("bucket"))
            .groupBy("slice", "stage", "bucket")
            .agg(*histogram.aggregates())
        )
        self.write("histogram", found.sortWithinPartitions("slice", "stage", "bucket"), files=8)

    def write_connections(self) -> None:
        """Per connection, once as a sender and once as a receiver."""
        from pyspark.sql import functions as F

        ends = (
            "explode(array(struct('source' as side, source_uid as uid), "
            "struct('destination' as side, destination_uid as uid))) as it"
        )
        counts = (
            self.records.selectExpr(ends, "body_size", f"written_ns - {START} as raw")
            .selectExpr(
                "it.side",
                "it.uid",
                "body_size",
                "greatest(raw, 0L) as ns",
                "if(raw < 0, 1, 0) as wrong",
            )
            .select("*", F.expr(histogram.bucket_sql("ns")).alias("bucket"))
            .groupBy("side", "uid", "bucket")
            .agg(*histogram.aggregates(), F.sum("body_size").alias("bytes"))
        )
        figures = histogram.percentiles(counts, ["side", "uid"], unique=True, sums=["bytes"])
        known = (
            self.run.table(schema.CONNECTIONS)
            .groupBy("uid")
            .agg(F.last("name").alias("name"), F.last("connmgr").alias("connmgr"))
        )
        found = figures.join(known, "uid", "left").selectExpr(
            "side",
            "uid",
            "coalesce(name, '') as name",
            "coalesce(connmgr, -1) as connmgr",
            "bytes",
            f"count / {self.total} as share",
            *histogram.FIGURES,
        )
        self.write("connections", found)
        fairness = (
            self.read("connections")
            .groupBy("side")
            .agg(
                F.count(F.lit(1)).alias("connections"),
                F.expr("power(sum(count), 2) / (count(1) * sum(power(count, 2)))").alias("jain"),
                F.max("share").alias("largest_share"),
                F.min("share").alias("smallest_share"),
            )
        )
        self.write("fairness", fairness)

    def write_slowest(self) -> None:
        from pyspark.sql import functions as F

        order = [F.desc("total_ns"), "written_ns", "destination_connmgr", "sequence"]
        top = (
            self.records.select(
                "*", F.expr(f"{START} as start_ns"), F.expr(f"written_ns - {START} as total_ns")
            )
            .orderBy(*order)
            .limit(SLOWEST)
        )
        self.write("slowest", self.named(top).orderBy(*order))

    def write_events(self) -> None:
        from pyspark import StorageLevel

        events = event_phases.numbered(self.run.table(schema.EVENTS)).persist()
        matched = event_phases.around(self.records, events, self.margin_ns, self.longest_ns)
        # Three tables are made of these rows, which may be many.
        matched = matched.persist(StorageLevel.DISK_ONLY)
        self.write("events", event_phases.pauses(matched, events).orderBy("event"))
        self.write("phases", event_phases.phases(matched))
        crossing = self.named(event_phases.crossing(matched, CROSSING))
        self.write("crossing", crossing.orderBy("event", "rank"))
        matched.unpersist()
        events.unpersist()

    def named(self, rows: DataFrame) -> DataFrame:
        """Messages with the text of their subject and the time of each stage."""
        from pyspark.sql import functions as F

        subjects = (
            self.run.table(schema.SUBJECTS)
            .groupBy("subject_hash")
            .agg(F.last("subject").alias("subject"))
        )
        stages = []
        for stage in schema.STAGES[:-1]:
            value = f"greatest({stage.end} - {stage.start}, 0L)"
            if stage.start == "intended_ns":
                value = f"if(intended_ns > 0, {value}, 0L)"
            stages.append(f"{value} as {stage.name}_ns")
        return rows.join(subjects, "subject_hash", "left").selectExpr(
            *rows.columns,
            "coalesce(subject, concat('#', lower(hex(subject_hash)))) as subject",
            *stages,
        )

    # ---- sums of what the passes left ----

    def write_figures(self) -> None:
        from pyspark.sql import functions as F

        slices = self.read("histogram")
        seconds = slices.select("*", F.expr(f"slice div {NS_PER_S // self.slice_ns} as second"))
        for name, keys in (("summary", []), ("per_second", ["second"])):
            found = histogram.percentiles(seconds, [*keys, "stage"])
            rest = [column for column in found.columns if column not in (*keys, "stage")]
            self.write(name, found.orderBy(*keys, "stage").selectExpr(*keys, stage_name(), *rest))

        pairs = self.read("connmgr_histogram")
        sides = pairs.select(
            "*",
            F.expr(
                "explode(array(struct('source' as side, source_connmgr as connmgr), "
                "struct('destination' as side, destination_connmgr as connmgr))) as it"
            ),
        ).select("*", "it.side", "it.connmgr")
        found = histogram.percentiles(sides, ["side", "connmgr", "stage"])
        self.write(
            "connmgrs",
            found.orderBy("side", "connmgr", "stage").selectExpr(
                "side", "connmgr", stage_name(), *histogram.FIGURES
            ),
        )

    # ---- the end ----

    def facts(self) -> dict[str, Any]:
        """What report.json says."""
        from pyspark.sql import functions as F

        total = (
            self.read("coverage")
            .agg(
                F.sum("records").alias("records"),
                F.sum("bytes").alias("bytes"),
                F.min("start_ns").alias("start_ns"),
                F.min("first_ns").alias("first_ns"),
                F.max("last_ns").alias("last_ns"),
            )
            .first()
        )
        assert total is not None
        # Records are numbered by the connmgr that delivered them, over all sources.
        missing = (
            self.read("coverage")
            .groupBy("destination_connmgr")
            .agg(F.expr("max(last_sequence) - min(first_sequence) + 1 - sum(records)").alias("n"))
            .agg(F.sum("n"))
            .first()
        )
        assert missing is not None
        events = self.read("events")
        kinds = {
            row["kind"]: row["n"]
            for row in _bounded(events.groupBy("kind").agg(F.count(F.lit(1)).alias("n")), 1000)
        }
        worst = events.orderBy(F.desc("pause_ns"), "event").first()
        fair = {row["side"]: row["jain"] for row in _bounded(self.read("fairness"), 2)}
        facts: dict[str, Any] = {
            "run": self.run.name,
            "complete": self.run.complete,
            "records": total["records"],
            "bytes": total["bytes"],
            "start_ns": total["start_ns"],
            "first_ns": total["first_ns"],
            "last_ns": total["last_ns"],
            "missing": missing[0],
            "events": kinds,
            "longest_pause_ns": worst["pause_ns"] if worst else 0,
            "longest_pause_event": worst["event"] if worst else None,
            "jain": fair,
            "margin_ns": self.margin_ns,
            "slice_ns": self.slice_ns,
            "manifest": self.run.manifest,
            "version": __version__,
        }
        facts["headline"] = headline(facts)
        return facts


def _bounded(rows: DataFrame, most: int) -> list[Any]:
    """Rows of a table that cannot be long."""
    return list(rows.limit(most).collect())


PLURALS = {
    "upgrade": ("upgrade", "upgrades"),
    "death": ("death", "deaths"),
    "slow-consumer": ("slow consumer", "slow consumers"),
}


def headline(facts: dict[str, Any]) -> str:
    """The one sentence: what happened, what was lost, how long it stood still."""
    parts = []
    for kind, (one, many) in PLURALS.items():
        count = facts["events"].get(kind, 0)
        if count or kind == "upgrade":
            parts.append(f"{count} {one if count == 1 else many}")
    checks = facts["manifest"].get("checks")
    if checks is None:
        parts.append("lost messages not counted")
    else:
        for what in ("lost", "doubled", "reordered"):
            count = checks.get(what, 0)
            if count or what == "lost":
                parts.append(f"{count:,} message{'' if count == 1 else 's'} {what}")
    if any(facts["events"].values()):
        parts.append(f"longest pause {dashboard.duration(facts['longest_pause_ns'])}")
    return ", ".join(parts)


def make_report(
    spark: SparkSession,
    path: str,
    out: str | None = None,
    margin_ns: int = event_phases.MARGIN_NS,
    quiet: bool = False,
) -> dict[str, Any]:
    """Makes all tables and the page; what report.json says."""
    began = time.monotonic()
    run = open_run(spark, path)
    report = Report(run, out or default_out(path), margin_ns)
    steps = Steps(spark, JOB, 8, quiet)
    with steps.step("coverage"):
        report.write_coverage()
    with steps.step("connection managers"):
        report.write_connmgr_histogram()
    with steps.step("seconds"):
        report.write_histogram()
    with steps.step("connections"):
        report.write_connections()
    with steps.step("slowest messages"):
        report.write_slowest()
    with steps.step("events"):
        report.write_events()
    with steps.step("percentiles"):
        report.write_figures()
    with steps.step("page"):
        facts = report.facts()
        page = dashboard.report_page(spark, report.out, facts)
        storage.write_text(spark, storage.join(report.out, "report.html"), page)
    facts["seconds"] = steps.seconds
    facts["cpu_seconds"] = steps.cpu_seconds
    facts["records_per_second"] = round(facts["records"] / (time.monotonic() - began))
    storage.write_text(
        spark, storage.join(report.out, "report.json"), json.dumps(facts, indent=2) + "\n"
    )
    return facts


def parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(prog=JOB, description="Reports on the latencies of one trace run.")
    it.add_argument("run", metavar="RUN", help="run folder: any path Spark can read")
    it.add_argument("--out", metavar="DIR", help="where the tables go (default: RUN/_report)")
    it.add_argument(
        "--margin",
        metavar="S",
        type=float,
        default=event_phases.MARGIN_NS / NS_PER_S,
        help="seconds before and after an event to compare it with (default: %(default)g)",
    )
    it.add_argument("--master", help="Spark master (default: this machine, all cores)")
    it.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return it


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    spark = start(JOB, args.master, [args.run])
    facts = make_report(spark, args.run, args.out, round(args.margin * NS_PER_S), args.quiet)
    print(f"{facts['run']}: {facts['headline']}")
    print(
        f"{facts['records']:,} records at {facts['records_per_second']:,} a second; "
        f"see {storage.join(args.out or default_out(args.run), 'report.html')}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(JOB, main))
