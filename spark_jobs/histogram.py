"""Log-linear histograms: counts per bucket, whose sums are exact however records are divided.

A duration in ns falls into bucket (shift * 64 + (ns >> shift)), where shift makes ns >> shift less
than 128: below 128 ns a bucket is one nanosecond wide, above it an octave has 64 buckets. The
middle of a bucket is at most 1/128 (0.8 %) away from any duration in it. Merging is adding
counts, so a percentile does not depend on partitions, machines or the order of anything.

A percentile is the smallest duration such that at least that share of the durations is not longer
(nearest rank), given as the middle of its bucket, and the maximum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SUB_BITS = 6
SUB = 1 << SUB_BITS  # buckets an octave
RELATIVE_ERROR = 1 / (2 * SUB)

# Name of the column -> the share in parts of PARTS: integers, so that ranks are exact.
PARTS = 100_000
PERCENTILES = {
    "p50_ns": 50_000,
    "p75_ns": 75_000,
    "p90_ns": 90_000,
    "p95_ns": 95_000,
    "p99_ns": 99_000,
    "p99_9_ns": 99_900,
    "p99_99_ns": 99_990,
}
FIGURES = ("count", "mean_ns", *PERCENTILES, "max_ns", "clock_errors")


def bucket(ns: int) -> int:
    """The bucket of a duration; bucket_sql is the same for Spark."""
    shift = max(ns.bit_length() - SUB_BITS - 1, 0)
    return shift * SUB + (ns >> shift)


def bounds(number: int) -> tuple[int, int]:
    """The first duration of a bucket, and the first of the next one."""
    shift = max(number // SUB - 1, 0)
    low = (number - shift * SUB) << shift
    return low, low + (1 << shift)


def middle(number: int) -> int:
    """What stands for every duration of a bucket."""
    low, end = bounds(number)
    return low + (end - low - 1) // 2


def bucket_sql(ns: str) -> str:
    """SQL for the bucket of a column that is not negative.

    The number of bits comes from a logarithm, which may be one too high for ns = 2^k - 1, or one
    off by rounding next to a power of two. That does no harm: there both shifts lead to the same
    bucket, 64 * shift + 127 = 64 * (shift + 1) + 63.
    """
    shift = f"greatest(cast(ln({ns} + 1) * {1 / math.log(2)!r}D as int) - {SUB_BITS}, 0)"
    return f"cast({shift} * {SUB} + shiftright({ns}, {shift}) as int)"


def shift_sql(number: str) -> str:
    return f"cast(greatest({number} div {SUB} - 1, 0) as int)"


def low_sql(number: str) -> str:
    """SQL for the first duration of a bucket."""
    shift = shift_sql(number)
    return f"shiftleft(cast({number} as bigint) - {shift} * {SUB}, {shift})"


def middle_sql(number: str) -> str:
    """SQL for middle()."""
    return f"({low_sql(number)} + shiftright(shiftleft(1L, {shift_sql(number)}) - 1, 1))"


def aggregates() -> list[Column]:
    """What is kept of the durations (column `ns`) of a bucket."""
    from pyspark.sql import functions as F

    return [
        F.count(F.lit(1)).alias("count"),
        F.sum("ns").alias("sum_ns"),
        F.max("ns").alias("max_ns"),
        F.sum("wrong").alias("clock_errors"),
    ]


def merged(histogram: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The histogram with fewer keys."""
    from pyspark.sql import functions as F

    return histogram.groupBy(*keys, "bucket").agg(
        F.sum("count").alias("count"),
        F.sum("sum_ns").alias("sum_ns"),
        F.max("max_ns").alias("max_ns"),
        F.sum("clock_errors").alias("clock_errors"),
    )


def percentiles(
    histogram: DataFrame,
    keys: Sequence[str],
    between: bool = False,
    unique: bool = False,
    sums: Sequence[str] = (),
) -> DataFrame:
    """One row of FIGURES for each combination of keys, and the `sums` of other columns.

    `unique` says that the histogram has one row for each combination of keys and bucket.
    With `between` a percentile is not the middle of its bucket but its place in it, as if the
    durations there were evenly spread: without it a difference of two percentiles has steps.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    counts = histogram if unique else merged(histogram, keys)
    each = Window.partitionBy(*keys)
    upto = each.orderBy("bucket").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = counts.select(
        "*",
        F.sum("count").over(upto).alias("upto"),
        F.sum("count").over(each).alias("total"),
        F.expr(middle_sql("bucket")).alias("middle"),
        F.expr(low_sql("bucket")).alias("low"),
        F.expr(f"shiftleft(1L, {shift_sql('bucket')})").alias("width"),
    )

    def value(part: int) -> str:
        rank = f"((total * {part} + {PARTS - 1}) div {PARTS})"
        at = "middle"
        if between:
            at = f"low + cast(width * (({rank} - upto + count - 0.5D) / count) as bigint)"
        return f"case when upto >= {rank} and upto - count < {rank} then {at} end"

    found = [
        # The bucket that reaches the rank; no percentile is above the maximum.
        F.least(
            F.min(F.expr(value(part))),
            F.max("max_ns"),
        ).alias(name)
        for name, part in PERCENTILES.items()
    ]
    return ranked.groupBy(*keys).agg(
        F.sum("count").alias("count"),
        F.expr("cast(round(sum(sum_ns) / sum(count)) as bigint)").alias("mean_ns"),
        *found,
        F.max("max_ns").alias("max_ns"),
        F.sum("clock_errors").alias("clock_errors"),
        *(F.sum(name).alias(name) for name in sums),
    )
