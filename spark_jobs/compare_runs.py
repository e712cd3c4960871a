"""`compare_runs BASE RUN...`: is a run slower than the first one, and how sure is that?

Each run is cut into BLOCKS blocks of time, each with its histogram. A resample draws as many
blocks, with replacement, and adds up their histograms; RESAMPLES of them give the spread of each
percentile, and of its relative difference to the base, under the unsteadiness that the run itself
showed. Whole blocks are drawn because neighbouring messages are alike: drawing messages would
promise far too much.

Verdict for a percentile: `slower` if the whole 95 % interval of the difference lies above the
threshold, `faster` if below its negative, `same` if between the two, `unclear` otherwise.

Exit codes: 0 nothing judged is slower, 1 something is, 2 wrong usage. Tables in OUT: `differences`
(run, stage, figure), and compare.html.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # spark-submit runs the file itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from midair.errors import MidairError
from midair.exits import Exit
from midair.trace import schema
from midair.trace.schema import NS_PER_S
from midair.version import __version__
from spark_jobs import dashboard, histogram, storage
from spark_jobs.run_reader import Run, check_version, durations, open_run, rows_of, stage_name
from spark_jobs.session import Steps, run_main, start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOB = "compare_runs"
BLOCKS = 40
BLOCKS_MIN = 10
RESAMPLES = 200
LEVEL = 0.95
THRESHOLD = 0.05  # relative difference that does not matter
SEED = 20
# Too few messages lie above the last percentiles of a block for them to be judged; they are shown.
JUDGED = ("p50_ns", "p99_ns")
JUDGED_STAGE = "server"


def blocks_of(run: Run, skip_s: float, steps: Steps) -> DataFrame:
    """The histogram of a run by `block`, `stage`, `bucket`: one pass over its records."""
    from pyspark.sql import functions as F

    records = run.records()
    with steps.step(f"{run.name}: length"):
        row = records.agg(F.min("written_ns"), F.max("written_ns"), F.max("schema_version")).first()
        assert row is not None
        if row[0] is None:
            raise MidairError(f"{run.path}: no records")
        check_version(run.path, int(row[2]))
    first = int(row[0]) + round(skip_s * NS_PER_S)
    length = int(row[1]) - first
    if length <= 0:
        raise MidairError(f"{run.path}: nothing left after skipping {skip_s:g} s")
    width = length // BLOCKS + 1
    return (
        durations(
            records.where(f"written_ns >= {first}"),
            F.expr(f"cast((written_ns - {first}) div {width} as int)").alias("block"),
        )
        .select("*", F.expr(histogram.bucket_sql("ns")).alias("bucket"))
        .groupBy("block", "stage", "bucket")
        .agg(*histogram.aggregates())
    )


def weights(spark: SparkSession, runs: int, resamples: int) -> DataFrame:
    """How often each resample draws each block of each run; resample 0 is the run as it was."""
    dice = random.Random(SEED)
    rows = []
    for run in range(runs):
        rows += [(run, 0, block, 1) for block in range(BLOCKS)]
        for resample in range(1, resamples + 1):
            drawn = [0] * BLOCKS
            for _ in range(BLOCKS):
                drawn[dice.randrange(BLOCKS)] += 1
            rows += [(run, resample, block, times) for block, times in enumerate(drawn) if times]
    names = ("run", "resample", "block", "times")
    return rows_of(
        spark,
        [dict(zip(names, row, strict=True)) for row in rows],
        "run int, resample int, block int, times int",
    )


def differences(blocks: DataFrame, drawn: DataFrame, threshold: float) -> DataFrame:
    """A row for each run but the first, stage and figure: values, difference, interval, verdict."""
    from pyspark.sql import functions as F

    resampled = blocks.join(F.broadcast(drawn), ["run", "block"]).selectExpr(
        "run",
        "resample",
        "stage",
        "bucket",
        "count * times as count",
        "sum_ns * times as sum_ns",
        "max_ns",
        "0L as clock_errors",
    )
    figures = histogram.percentiles(resampled, ["run", "resample", "stage"], between=True)
    names = ["mean_ns", *histogram.PERCENTILES, "max_ns"]
    pairs = ", ".join(f"'{name.removesuffix('_ns').replace('_', '.')}', {name}" for name in names)
    long = figures.selectExpr(
        "run", "resample", "stage", f"stack({len(names)}, {pairs}) as (figure, ns)"
    )
    base = long.where("run = 0").selectExpr("resample", "stage", "figure", "ns as base_ns")
    # The resamples of two runs are independent of each other, so any pairing of them will do.
    changes = (
        long.where("run > 0")
        .join(base, ["resample", "stage", "figure"])
        .select("*", F.expr("(ns - base_ns) / greatest(base_ns, 1)").alias("change"))
    )
    tail = (1 - LEVEL) / 2
    found = changes.groupBy("run", "stage", "figure").agg(
        F.max(F.expr("if(resample = 0, base_ns, null)")).alias("base_ns"),
        F.max(F.expr("if(resample = 0, ns, null)")).alias("run_ns"),
        F.max(F.expr("if(resample = 0, change, null)")).alias("change"),
        F.expr(f"percentile(if(resample > 0, change, null), {tail})").alias("low"),
        F.expr(f"percentile(if(resample > 0, change, null), {1 - tail})").alias("high"),
    )
    verdict = (
        f"case when low > {threshold} then 'slower' when high < -{threshold} then 'faster' "
        f"when low >= -{threshold} and high <= {threshold} then 'same' else 'unclear' end"
    )
    return found.selectExpr(
        "run",
        stage_name(),
        "figure",
        "base_ns",
        "run_ns",
        "change",
        "low",
        "high",
        f"{verdict} as verdict",
    )


def compare(
    spark: SparkSession,
    paths: Sequence[str],
    out: str,
    threshold: float,
    skip_s: float = 0.0,
    resamples: int = RESAMPLES,
    quiet: bool = False,
) -> dict[str, Any]:
    """Makes the table and the page; rows, verdict line and whether something is slower."""
    from pyspark.sql import functions as F

    runs = [open_run(spark, path) for path in paths]
    names = labels(runs)
    steps = Steps(spark, JOB, 2 * len(runs) + 2, quiet)
    for number, run in enumerate(runs):
        counts = blocks_of(run, skip_s, steps)
        with steps.step(f"{names[number]}: histograms"):
            counts.select("*", F.lit(number).alias("run")).coalesce(1).write.mode(
                "overwrite"
            ).parquet(storage.join(out, f"blocks/number={number}"))
    blocks = spark.read.parquet(
        *(storage.join(out, f"blocks/number={number}") for number in range(len(runs)))
    )
    with steps.step("resamples"):
        filled = {
            row["run"]: row["n"]
            for row in blocks.groupBy("run").agg(F.countDistinct("block").alias("n")).collect()
        }
        for number, name in enumerate(names):
            if filled.get(number, 0) < BLOCKS_MIN:
                raise MidairError(
                    f"{paths[number]}: {filled.get(number, 0)} of {BLOCKS} blocks of time of run "
                    f"{name} have records, at least {BLOCKS_MIN} are needed"
                )
        drawn = weights(spark, len(runs), resamples)
        found = differences(blocks, drawn, threshold)
        labelled = rows_of(
            spark,
            [{"run": number, "name": name} for number, name in enumerate(names)],
            "run int, name string",
        )
        found = found.join(F.broadcast(labelled), "run").selectExpr(
            "name as run", *(name for name in found.columns if name != "run")
        )
        found.coalesce(1).write.mode("overwrite").parquet(storage.join(out, "differences"))
    with steps.step("page"):
        rows = dashboard.rows(
            spark.read.parquet(storage.join(out, "differences")),
            len(runs) * len(schema.STAGES) * (len(histogram.PERCENTILES) + 2),
        )
        order = [
            "mean",
            *(name.removesuffix("_ns").replace("_", ".") for name in histogram.PERCENTILES),
            "max",
        ]
        rows.sort(
            key=lambda row: (names.index(row["run"]), row["stage"], order.index(row["figure"]))
        )
        judged = [
            row
            for row in rows
            if row["stage"] == JUDGED_STAGE and f"{row['figure'].replace('.', '_')}_ns" in JUDGED
        ]
        slower = [row for row in judged if row["verdict"] == "slower"]
        line = verdict_line(names, judged)
        curves = [dashboard.curves(blocks.where(f"run = {number}")) for number in range(len(runs))]
        facts = {
            "run": " · ".join(names),
            "headline": line,
            "version": __version__,
            "manifest": {},
        }
        data = {
            "kind": "compare",
            "facts": facts,
            "base": names[0],
            "threshold": threshold,
            "stages": [{"name": stage.name, "meaning": stage.meaning} for stage in schema.STAGES],
            "differences": rows,
            "runs": [
                {
                    "run": names[number],
                    "curves": curves[number],
                    "versions": run.manifest.get("versions", {}),
                    "settings": run.manifest.get("settings", {}),
                }
                for number, run in enumerate(runs)
            ],
        }
        page = dashboard.page(data, f"Midair comparison: {facts['run']}")
        storage.write_text(spark, storage.join(out, "compare.html"), page)
    result = {"verdict": line, "slower": bool(slower), "judged": judged, "seconds": steps.seconds}
    storage.write_text(
        spark, storage.join(out, "compare.json"), json.dumps(result, indent=2) + "\n"
    )
    return {**result, "rows": rows}


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run; the folder's name, and if need be a number, where ids are the same."""
    found: list[str] = []
    for run in runs:
        name = run.name
        if sum(other.name == name for other in runs) > 1:
            name = run.path.rstrip("/").rsplit("/", 1)[-1]
        while name in found:
            name += "'"
        found.append(name)
    return found


def verdict_line(names: Sequence[str], judged: Sequence[dict[str, Any]]) -> str:
    """`b is slower than a: server p99 +12.3 % (10.1 to 14.0)`, for each run after the first."""
    parts = []
    for name in names[1:]:
        mine = [row for row in judged if row["run"] == name]
        for verdict in ("slower", "unclear", "faster", "same"):
            chosen = [row for row in mine if row["verdict"] == verdict]
            if chosen:
                break
        words = {
            "slower": "is slower than",
            "faster": "is faster than",
            "same": "is as fast as",
            "unclear": "cannot be told from",
        }
        figures = ", ".join(
            f"{row['stage']} {row['figure']} {row['change']:+.1%} "
            f"({row['low']:+.1%} to {row['high']:+.1%})"
            for row in chosen
        )
        parts.append(f"{name} {words[verdict]} {names[0]}: {figures}")
    return "; ".join(parts)


def parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(
        prog=JOB,
        description="Compares the latencies of trace runs with those of the first one.",
        epilog="exit codes: 0 nothing judged is slower, 1 something is, 2 wrong usage",
    )
    it.add_argument("base", metavar="BASE", help="run folder to compare with")
    it.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    it.add_argument("--out", metavar="DIR", help="default: _compare in the last RUN")
    it.add_argument(
        "--threshold",
        metavar="PERCENT",
        type=float,
        default=100 * THRESHOLD,
        help="difference that does not matter (default: %(default)g)",
    )
    it.add_argument(
        "--skip", metavar="S", type=float, default=0.0, help="leave out the first S seconds"
    )
    it.add_argument("--master", help="Spark master (default: this machine, all cores)")
    it.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return it


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    paths = [args.base, *args.runs]
    spark = start(JOB, args.master, paths)
    out = args.out or storage.join(args.runs[-1], "_compare")
    result = compare(spark, paths, out, args.threshold / 100, args.skip, quiet=args.quiet)
    print(result["verdict"])
    print(f"see {storage.join(out, 'compare.html')}")
    return Exit.FAILED if result["slower"] else Exit.OK


if __name__ == "__main__":
    sys.exit(run_main(JOB, main))
