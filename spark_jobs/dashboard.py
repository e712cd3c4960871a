"""The dashboard: tables of a report, bounded, as one HTML file that needs nothing else.

The page holds its data as JSON, the plotting library, and page/page.js, which draws. However long
the run was, a page has at most TIME_BINS columns of time and the fixed numbers of rows below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midair.trace import schema
from spark_jobs import histogram, storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIME_BINS = 240
COARSE = 8  # buckets of the histogram in one row of the heatmap: 8 rows an octave
EVENTS = 200  # those with the longest pauses
CONNECTIONS = 40  # the largest and the smallest shares
PAGE = Path(__file__).with_name("page")


def duration(ns: float) -> str:
    """Three digits and a unit, as page.js writes it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size * 0.9995:
            value = ns / size
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            text = f"{value:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
    return f"{round(ns)} ns"


def rows(table: DataFrame, most: int) -> list[dict[str, Any]]:
    """The first rows of a table that is short, or was cut short by its order."""
    return [row.asDict() for row in table.limit(most).collect()]


def time_axis(first_ns: int, last_ns: int, slice_ns: int) -> dict[str, int]:
    """How many slices make a column of time, so that there are at most TIME_BINS columns."""
    first, last = first_ns // slice_ns, last_ns // slice_ns
    step = max(-(-(last - first + 1) // TIME_BINS), 1)
    return {"first": first, "step": step, "bins": (last - first) // step + 1, "slice_ns": slice_ns}


def over_time(slices: DataFrame, axis: dict[str, int]) -> dict[str, Any]:
    """Heatmap cells and percentile lines of a histogram by `slice`, `stage` (number), `bucket`."""
    from pyspark.sql import functions as F

    bins = slices.select(
        "*", F.expr(f"cast((slice - {axis['first']}) div {axis['step']} as int) as bin")
    )
    cells = bins.groupBy("stage", "bin", F.expr(f"bucket div {COARSE}").alias("row")).agg(
        F.sum("count").alias("count")
    )
    heat: dict[str, list[list[int]]] = {name: [] for name in schema.STAGE_NAMES}
    for cell in cells.orderBy("stage", "bin", "row").collect():
        heat[schema.STAGE_NAMES[cell["stage"]]].append([cell["bin"], cell["row"], cell["count"]])
    lines: dict[str, list[list[int]]] = {name: [] for name in schema.STAGE_NAMES}
    figures = histogram.percentiles(bins, ["stage", "bin"]).orderBy("stage", "bin")
    for row in figures.collect():
        lines[schema.STAGE_NAMES[row["stage"]]].append(
            [row["bin"], row["count"], row["p50_ns"], row["p99_ns"], row["p99_9_ns"], row["max_ns"]]
        )
    return {"axis": axis, "heat": heat, "lines": lines}


def curves(slices: DataFrame) -> dict[str, list[list[int]]]:
    """Per stage the whole histogram: [middle of the bucket, count], in order."""
    found: dict[str, list[list[int]]] = {name: [] for name in schema.STAGE_NAMES}
    for row in histogram.merged(slices, ["stage"]).orderBy("stage", "bucket").collect():
        middle = min(histogram.middle(row["bucket"]), row["max_ns"])
        found[schema.STAGE_NAMES[row["stage"]]].append([middle, row["count"]])
    return found


def report_data(spark: SparkSession, out: str, facts: dict[str, Any]) -> dict[str, Any]:
    """All that the page of a report shows."""
    from pyspark.sql import functions as F

    def read(name: str) -> DataFrame:
        return spark.read.parquet(storage.join(out, name))

    slices = read("histogram").persist()
    axis = time_axis(facts["first_ns"], facts["last_ns"], facts["slice_ns"])
    events = rows(read("events").orderBy(F.desc("pause_ns"), "event"), EVENTS)
    events.sort(key=lambda event: int(event["event"]))
    shown = [event["event"] for event in events] or [-1]
    phases = read("phases").where(F.col("event").isin(shown)).where("stage in ('server', 'total')")
    connections = {
        side: rows(
            read("connections").where(f"side = '{side}'").orderBy(F.desc("share"), "uid"),
            CONNECTIONS,
        )
        + rows(
            read("connections").where(f"side = '{side}'").orderBy("share", F.desc("uid")),
            CONNECTIONS,
        )[::-1]
        for side in ("source", "destination")
    }
    for side, found in connections.items():  # few connections are in both halves
        once = {item["uid"]: item for item in found}
        connections[side] = list(once.values())
    data = {
        "kind": "report",
        "facts": facts,
        "stages": [
            {"name": stage.name, "meaning": stage.meaning, "from": stage.start, "to": stage.end}
            for stage in schema.STAGES
        ],
        "summary": rows(read("summary"), len(schema.STAGES)),
        "time": over_time(slices, axis),
        "curves": curves(slices),
        "events": events,
        "phases": rows(phases, EVENTS * 6),
        "connmgrs": rows(read("connmgrs").where("stage = 'server'"), 64),
        "fairness": rows(read("fairness"), 2),
        "connections": connections,
        "slowest": rows(read("slowest").orderBy(F.desc("total_ns"), "written_ns"), 50),
        "crossing": rows(read("crossing").orderBy(F.desc("total_ns"), "event"), 50),
    }
    slices.unpersist()
    return data


def report_page(spark: SparkSession, out: str, facts: dict[str, Any]) -> str:
    return page(report_data(spark, out, facts), f"Midair latency: {facts['run']}")


def page(data: dict[str, Any], title: str) -> str:
    """One HTML file with everything in it."""
    from plotly.offline import get_plotlyjs

    # A script element ends at the first "</", whatever it is part of.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "TITLE": title.replace("&", "&amp;").replace("<", "&lt;"),
        "STYLE": (PAGE / "page.css").read_text(encoding="utf-8"),
        "DATA": text,
        "LIBRARY": get_plotlyjs().replace("</script", "<\\/script"),
        "SCRIPT": (PAGE / "page.js").read_text(encoding="utf-8"),
    }
    pieces = (PAGE / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))
