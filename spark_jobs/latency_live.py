"""`latency_live RUN`: the figures of a run while it is being written (Structured Streaming).

Each micro-batch of new files is turned into its own histogram by window, stage and bucket, and
written as OUT/windows/batch=N. Histograms are sums: the figures of a window are those of all
batches that have records of it, and nothing has to be kept in memory between batches. Tables in
OUT (default RUN/_live):

  windows/batch=N   window, stage, bucket, late -> count
  totals/batch=N    stage, bucket -> count, of all batches up to N
  batches/batch=N   records, late records, first and last time seen so far, watermark: written last

Watermark: the last `written_ns` seen in earlier batches, less `--delay`. A window that ends before
it is closed. Records that arrive for a closed window are late: they are counted as such, per window
and in all, and still added, so that the sums equal those of latency_report.

Exactly once: a batch's tables are written under its number, replacing what an earlier attempt left,
and count only when its row in `batches` is there. Spark's checkpoint (OUT/_checkpoint) gives the
same files the same number after a restart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # spark-submit runs the file itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from midair.trace import schema
from midair.trace.schema import NS_PER_S
from midair.version import __version__
from spark_jobs import dashboard, histogram, storage
from spark_jobs.run_reader import (
    check_version,
    durations,
    open_run,
    rows_of,
    stage_name,
    with_defaults,
)
from spark_jobs.session import run_main, start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

JOB = "latency_live"
WINDOW_NS = NS_PER_S
DELAY_NS = 10 * NS_PER_S
SHOWN_S = 600  # of the run's end on the page
FILES_A_BATCH = 64  # bounds the memory of a batch when a long run is caught up with


def default_out(run: str) -> str:
    return storage.join(run, "_live")


class Live:
    """The tables of a run being followed."""

    def __init__(
        self,
        spark: SparkSession,
        run: str,
        out: str | None = None,
        delay_ns: int = DELAY_NS,
        window_ns: int = WINDOW_NS,
        on_batch: Callable[[Live], None] | None = None,
    ) -> None:
        self.spark = spark
        self.run = run
        self.out = out or default_out(run)
        self.delay_ns = delay_ns
        self.window_ns = window_ns
        self.on_batch = on_batch

    # ---- writing ----

    def begin(self, files: int = FILES_A_BATCH, every: str | None = "2 seconds") -> StreamingQuery:
        """Starts following; with `every` None it takes what is there and ends."""
        open_run(self.spark, self.run)  # refuses what is not a run, or of another version
        rows = (
            self.spark.readStream.schema(schema.spark_schema(schema.RECORDS))
            .option("maxFilesPerTrigger", files)
            .parquet(storage.join(self.run, schema.RECORDS.glob))
        )
        rows = with_defaults(rows, schema.RECORDS)
        writer = (
            rows.writeStream.queryName(JOB)
            .option("checkpointLocation", storage.join(self.out, "_checkpoint"))
            .foreachBatch(self.add)
        )
        trigger: Any = {"availableNow": True} if every is None else {"processingTime": every}
        return writer.trigger(**trigger).start()

    def add(self, rows: DataFrame, batch: int) -> None:
        """One micro-batch. Doing it twice leaves the same as doing it once."""
        from pyspark.sql import functions as F

        before = self._before(batch)
        watermark = before["last_ns"] - self.delay_ns if before["records"] else 0
        closed = watermark // self.window_ns  # windows below this one are closed
        counts = (
            durations(
                rows,
                F.expr(f"written_ns div {self.window_ns}").alias("window"),
                "schema_version",
                "written_ns",
            )
            .select("*", F.expr(histogram.bucket_sql("ns")).alias("bucket"))
            .groupBy("window", "stage", "bucket")
            .agg(
                *histogram.aggregates(),
                F.min("written_ns").alias("first_ns"),
                F.max("written_ns").alias("last_ns"),
                F.max("schema_version").alias("schema_version"),
            )
            .select("*", F.expr(f"window < {closed} as late"))
            .persist()
        )
        server = schema.STAGE_NAMES.index("server")
        seen = (
            counts.where(f"stage = {server}")
            .agg(
                F.expr("coalesce(sum(count), 0L)").alias("records"),
                F.expr("coalesce(sum(if(late, count, 0L)), 0L)").alias("late"),
                F.min("first_ns").alias("first_ns"),
                F.max("last_ns").alias("last_ns"),
                F.expr("coalesce(max(schema_version), 0)").alias("version"),
            )
            .first()
        )
        assert seen is not None
        check_version(self.run, int(seen["version"]))
        columns = ["stage", "bucket", "count", "sum_ns", "max_ns", "clock_errors"]
        self._write("windows", batch, counts.select("window", "late", *columns))
        totals = counts.select(*columns)
        if before["batch"] >= 0:
            earlier = self.spark.read.parquet(self._path("totals", before["batch"]))
            totals = totals.unionByName(earlier.select(*columns))
        self._write("totals", batch, histogram.merged(totals, ["stage"]).select(*columns))
        times = [seen["first_ns"], before["first_ns"], seen["last_ns"], before["last_ns"]]
        row = {
            "batch": batch,
            "records": before["records"] + seen["records"],
            "late": before["late"] + seen["late"],
            "first_ns": min((time for time in times[:2] if time), default=0),
            "last_ns": max((time for time in times[2:] if time), default=0),
            "watermark_ns": watermark,
        }
        kinds = ", ".join(f"{name} long" for name in row)
        self._write("batches", batch, rows_of(self.spark, [row], kinds))
        counts.unpersist()
        if self.on_batch is not None:
            self.on_batch(self)

    def _path(self, table: str, batch: int) -> str:
        return storage.join(self.out, f"{table}/batch={batch}")

    def _write(self, table: str, batch: int, rows: DataFrame) -> None:
        rows.coalesce(1).write.mode("overwrite").parquet(self._path(table, batch))

    def _before(self, batch: int) -> dict[str, int]:
        """The row of the last batch before this one."""
        for number in range(batch - 1, -1, -1):
            place = self._path("batches", number)
            if storage.exists(self.spark, storage.join(place, "_SUCCESS")):
                (row,) = self.spark.read.parquet(place).collect()
                return {**row.asDict(), "batch": number}
        return {"batch": -1, "records": 0, "late": 0, "first_ns": 0, "last_ns": 0}

    # ---- reading ----

    def last(self) -> dict[str, int] | None:
        """The row of the last complete batch."""
        done = storage.matches(self.spark, storage.join(self.out, "batches/batch=*/_SUCCESS"))
        if not done:
            return None
        return self._before(1 + max(int(path.split("batch=")[1].split("/")[0]) for path in done))

    def windows(self) -> DataFrame:
        """Histograms of complete batches, as written: `window`, `late`, `stage`, `bucket`..."""
        last = self.last()
        upto = -1 if last is None else last["batch"]
        rows = self.spark.read.option("basePath", storage.join(self.out, "windows")).parquet(
            storage.join(self.out, "windows/batch=*")
        )
        return rows.where(f"batch <= {upto}")

    def figures(self) -> DataFrame:
        """For each window and stage the figures, whether it is closed, and late records in it."""
        from pyspark.sql import functions as F

        last = self.last()
        assert last is not None, "no batch is complete"
        closed = (last["last_ns"] - self.delay_ns) // self.window_ns
        rows = self.windows()
        late = rows.groupBy("window", "stage").agg(F.expr("sum(if(late, count, 0L))").alias("late"))
        found = histogram.percentiles(rows, ["window", "stage"]).join(late, ["window", "stage"])
        rest = [name for name in found.columns if name not in ("window", "stage")]
        return found.selectExpr("window", stage_name(), *rest, f"window < {closed} as closed")

    def totals(self) -> DataFrame:
        """Figures of each stage over everything so far."""
        last = self.last()
        assert last is not None, "no batch is complete"
        found = histogram.percentiles(
            self.spark.read.parquet(self._path("totals", last["batch"])), ["stage"]
        )
        rest = [name for name in found.columns if name != "stage"]
        return found.selectExpr(stage_name(), *rest)

    def data(self) -> dict[str, Any] | None:
        """What the live page shows; None before the first batch."""
        from pyspark.sql import functions as F

        last = self.last()
        if last is None or not last["records"]:
            return None
        run = open_run(self.spark, self.run)
        first_ns = max(last["first_ns"], last["last_ns"] - SHOWN_S * NS_PER_S)
        axis = dashboard.time_axis(first_ns, last["last_ns"], self.window_ns)
        rows = self.windows().where(f"window >= {axis['first']}")
        totals = self.spark.read.parquet(self._path("totals", last["batch"]))
        events = dashboard.rows(
            run.table(schema.EVENTS).orderBy(F.desc("time_ns")).where(f"time_ns >= {first_ns}"),
            dashboard.EVENTS,
        )
        marks = [
            {**event, "end_ns": event["time_ns"] + event["duration_ns"], "pause_ns": 0}
            for event in events
        ]
        state = "complete" if run.complete else "being written"
        return {
            "kind": "live",
            "live": not run.complete,
            "facts": {
                "run": run.name,
                "headline": f"{last['records']:,} records so far, {last['late']:,} of them late; "
                f"the run is {state}",
                "records": last["records"],
                "late": last["late"],
                "first_ns": last["first_ns"],
                "last_ns": last["last_ns"],
                "complete": run.complete,
                "manifest": run.manifest,
                "version": __version__,
            },
            "stages": [{"name": stage.name, "meaning": stage.meaning} for stage in schema.STAGES],
            "summary": dashboard.rows(self.totals(), len(schema.STAGES)),
            "time": {
                **dashboard.over_time(rows.withColumnRenamed("window", "slice"), axis),
                "marks": marks,
            },
            "curves": dashboard.curves(totals),
        }


def follow(live: Live, every: str = "2 seconds") -> None:
    """Follows a run until it is complete and all of it has been taken in."""
    query = live.begin(every=every)
    place = storage.join(live.run, schema.MANIFEST)
    try:
        # The manifest is written last: what is there when it is seen, is all.
        while not storage.exists(live.spark, place):
            if query.awaitTermination(1):
                return
        query.processAllAvailable()
    finally:
        query.stop()


def told(live: Live) -> None:
    """One line on standard error about the batch that was just done."""
    last = live.last()
    if last is not None:
        late = f", {last['late']:,} late" if last["late"] else ""
        print(
            f"{JOB}: {time.strftime('%H:%M:%S')} batch {last['batch']}: "
            f"{last['records']:,} records{late}",
            file=sys.stderr,
            flush=True,
        )


def write_page(live: Live) -> str | None:
    data = live.data()
    if data is None:
        return None
    place = storage.join(live.out, "live.html")
    page = dashboard.page(data, f"Midair live: {data['facts']['run']}")
    storage.write_text(live.spark, place, page)
    return place


def parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(
        prog=JOB, description="Follows a trace run that is being written, until it is complete."
    )
    it.add_argument("run", metavar="RUN", help="run folder: any path Spark can read")
    it.add_argument("--out", metavar="DIR", help="tables and checkpoint (default: RUN/_live)")
    it.add_argument(
        "--delay",
        metavar="S",
        type=float,
        default=DELAY_NS / NS_PER_S,
        help="how late a record may be (default: %(default)g)",
    )
    it.add_argument(
        "--every", metavar="S", type=float, default=2.0, help="seconds between looks for new files"
    )
    it.add_argument("--once", action="store_true", help="take what is there and end")
    it.add_argument("--master", help="Spark master (default: this machine, all cores)")
    it.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return it


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    spark = start(JOB, args.master)

    def on_batch(live: Live) -> None:
        if not args.quiet:
            told(live)
        write_page(live)

    live = Live(spark, args.run, args.out, round(args.delay * NS_PER_S), on_batch=on_batch)
    if args.once:
        live.begin(every=None).awaitTermination()
    else:
        follow(live, f"{args.every:g} seconds")
    place = write_page(live)
    print(f"see {place}" if place else "no records")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(JOB, main))
