"""What the events of a run did to the messages around them.

A record belongs to an event if it was on its way at some moment of the event, or was written
within `margin_ns` before or after it. To an event of a connmgr belong only records that it received
or delivered. Phases:

  during   on its way at some moment between the begin and the end of the event
  before   written before it began
  after    set out after it ended

The pause of an event is the longest time in which no message was written although one was
waiting. It is found from the first and the last write, and the earliest departure, in slots of
SLOT_NS; pauses shorter than a slot are not seen. `usual_ns` is the same before the event.

Records meet events through cells of time, so the cost is one look into a small hash table for each
record, however many events there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from midair.trace.schema import DISTURBANCES, NS_PER_S
from spark_jobs.histogram import aggregates, bucket_sql, percentiles
from spark_jobs.run_reader import START, durations, stage_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CELL_NS = NS_PER_S // 4
SLOT_NS = 100_000
MARGIN_NS = NS_PER_S
# What is looked at, or shown of a message that crossed an event.
COLUMNS = (
    "sequence",
    "message",
    "source_connmgr",
    "source_uid",
    "destination_connmgr",
    "destination_uid",
    "subject_hash",
    "body_size",
    "intended_ns",
    "received_ns",
    "queued_ns",
    "routed_ns",
    "instructed_ns",
    "written_ns",
)


def numbered(events: DataFrame) -> DataFrame:
    """Events with a number in the order of time, an end, and the connmgr they are about."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = Window.orderBy("time_ns", "component", "kind", "pid")
    return events.select(
        F.row_number().over(order).alias("event"),
        "time_ns",
        F.expr("time_ns + greatest(duration_ns, 0L)").alias("end_ns"),
        "kind",
        "component",
        "pid",
        "generation",
        "duration_ns",
        "details",
        F.expr("cast(nullif(regexp_extract(component, '^connmgr/(\\\\d+)$', 1), '') as int)").alias(
            "connmgr"
        ),
    )


def around(records: DataFrame, events: DataFrame, margin_ns: int, longest_ns: int) -> DataFrame:
    """Every (record, event) that belong together, with `event`, `phase`, `across`, `start_ns`.

    `longest_ns` is the longest any record was on its way.
    """
    from pyspark.sql import functions as F

    marks = events.select("event", "time_ns", "end_ns", "connmgr")
    cells = marks.select(
        "*",
        F.expr(
            f"explode(sequence((time_ns - {margin_ns}) div {CELL_NS}, "
            f"(end_ns + {margin_ns}) div {CELL_NS})) as cell"
        ),
    )
    rows = records.select(*COLUMNS, F.expr(f"{START} as start_ns"))
    found = (
        rows.withColumn("cell", F.expr(f"written_ns div {CELL_NS}"))
        .join(F.broadcast(cells), "cell")
        .where(f"written_ns >= time_ns - {margin_ns} and written_ns < end_ns + {margin_ns}")
        .drop("cell")
    )
    if longest_ns > margin_ns:
        # Written later than that, and yet on its way during the event.
        slow = rows.where(f"written_ns - start_ns > {margin_ns}").join(
            F.broadcast(marks),
            F.expr(f"start_ns <= end_ns and written_ns >= end_ns + {margin_ns}"),
        )
        found = found.unionByName(slow)
    passed = "connmgr is null or connmgr = source_connmgr or connmgr = destination_connmgr"
    phase = "case when written_ns < time_ns then 'before' when start_ns <= end_ns then 'during' "
    return found.where(passed).select(
        "*",
        F.expr(f"{phase} else 'after' end as phase"),
        F.expr("start_ns < time_ns and written_ns >= time_ns as across"),
    )


def phases(matched: DataFrame) -> DataFrame:
    """Figures for each event, phase and stage."""
    from pyspark.sql import functions as F

    counts = (
        durations(matched, "event", "phase")
        .select("*", F.expr(bucket_sql("ns")).alias("bucket"))
        .groupBy("event", "phase", "stage", "bucket")
        .agg(*aggregates())
    )
    found = percentiles(counts, ["event", "phase", "stage"], unique=True)
    rest = [name for name in found.columns if name not in ("event", "phase", "stage")]
    return found.selectExpr("event", "phase", stage_name(), *rest)


def pauses(matched: DataFrame, events: DataFrame) -> DataFrame:
    """The events, with the pause of each and the messages that were on their way across it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    slots = (
        matched.select("event", "time_ns", "end_ns", "start_ns", "written_ns")
        .groupBy("event", F.expr(f"written_ns div {SLOT_NS}").alias("slot"))
        .agg(
            F.first("time_ns").alias("time_ns"),
            F.first("end_ns").alias("end_ns"),
            F.min("written_ns").alias("first_ns"),
            F.max("written_ns").alias("last_ns"),
            F.min("start_ns").alias("start_ns"),
        )
    )
    order = Window.partitionBy("event").orderBy("slot")
    # Backwards: a frame that grows is computed in one go, one that shrinks anew for each row.
    later = Window.partitionBy("event").orderBy(F.desc("slot"))
    gaps = (
        slots.select(
            "event",
            "time_ns",
            "end_ns",
            F.col("first_ns").alias("until_ns"),
            F.lag("last_ns").over(order).alias("since_ns"),
            F.min("start_ns")
            .over(later.rowsBetween(Window.unboundedPreceding, Window.currentRow))
            .alias("waiting_ns"),
        )
        .where("since_ns is not null")
        .select("*", F.expr("greatest(until_ns - greatest(since_ns, waiting_ns), 0L) as gap_ns"))
    )
    longest = gaps.groupBy("event").agg(
        F.max(F.expr("if(until_ns >= time_ns and since_ns <= end_ns, gap_ns, 0L)")).alias("pause"),
        F.max(F.expr("if(until_ns < time_ns, gap_ns, 0L)")).alias("usual"),
    )
    crossed = (
        matched.where("across")
        .groupBy("event")
        .agg(
            F.count(F.lit(1)).alias("crossed"),
            F.max(F.expr("written_ns - start_ns")).alias("crossed_max_ns"),
        )
    )
    kinds = ", ".join(f"'{kind}'" for kind in DISTURBANCES)
    return (
        events.drop("connmgr")
        .join(longest, "event", "left")
        .join(crossed, "event", "left")
        .selectExpr(
            *(name for name in events.columns if name != "connmgr"),
            f"if(kind in ({kinds}), coalesce(pause, 0L), 0L) as pause_ns",
            "coalesce(usual, 0L) as usual_ns",
            "coalesce(crossed, 0L) as crossed",
            "coalesce(crossed_max_ns, 0L) as crossed_max_ns",
        )
    )


def crossing(matched: DataFrame, most: int) -> DataFrame:
    """The slowest messages that were on their way when an event began, `most` of each event."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = Window.partitionBy("event").orderBy(
        F.desc("total_ns"), "written_ns", "destination_connmgr", "sequence"
    )
    return (
        matched.where("across")
        .select("*", F.expr("written_ns - start_ns as total_ns"))
        .select("*", F.row_number().over(order).alias("rank"))
        .where(f"rank <= {most}")
        .drop("time_ns", "end_ns", "connmgr", "phase", "across")
    )
