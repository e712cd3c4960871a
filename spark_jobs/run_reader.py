"""Reading a run folder (docs/traces.md) with Spark."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from midair.errors import LayoutError, MidairError, MissingError
from midair.trace import schema
from midair.trace.schema import STAGES
from spark_jobs import storage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# When a message set out: where the client says it meant to send, or else where it was received.
START = "if(intended_ns > 0, intended_ns, received_ns)"


@dataclass
class Run:
    """One run folder."""

    spark: SparkSession
    path: str
    manifest: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    @property
    def name(self) -> str:
        return str(self.manifest.get("run") or self.path.rstrip("/").rsplit("/", 1)[-1])

    def records(self) -> DataFrame:
        found = self._table(schema.RECORDS)
        if found is None:
            raise MissingError(f"{self.path}: no records (minute=*/part-*.parquet)")
        return found

    def table(self, table: schema.Table) -> DataFrame:
        """Events or a dictionary; empty if there is none."""
        found = self._table(table)
        if found is None:
            return rows_of(self.spark, [], schema.spark_schema(table))
        return found

    def _table(self, table: schema.Table) -> DataFrame | None:
        pattern = storage.join(self.path, table.glob)
        if not storage.matches(self.spark, storage.join(pattern, "*.parquet")):
            return None
        rows = self.spark.read.schema(schema.spark_schema(table)).parquet(pattern)
        return with_defaults(rows, table)


def rows_of(spark: SparkSession, rows: list[dict[str, Any]], kind: Any) -> DataFrame:
    """A small table from Python. (createDataFrame would need Python on the executors.)"""
    from pyspark.sql import functions as F

    if not isinstance(kind, str):
        kind = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in kind.fields)
    it = F.from_json(F.lit(json.dumps(rows)), f"array<struct<{kind}>>", {})
    return spark.range(1).select(F.explode(it).alias("it")).select("it.*")


def with_defaults(rows: DataFrame, table: schema.Table) -> DataFrame:
    """Fills in the columns that older files do not have."""
    newer = {column.name: column.default for column in table.columns if column.since > 1}
    return rows.fillna(newer) if newer else rows


def open_run(spark: SparkSession, path: str) -> Run:
    """The run at a path, with its manifest if it is complete."""
    place = storage.join(path, schema.MANIFEST)
    if not storage.exists(spark, path):
        raise MissingError(f"{path}: no such run folder")
    if not storage.exists(spark, place):
        return Run(spark, path)
    try:
        manifest = json.loads(storage.read_text(spark, place))
    except ValueError as error:
        raise MidairError(f"{place}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != schema.FORMAT:
        raise MidairError(f"{place}: not the manifest of a trace run")
    check_version(path, manifest.get("schema_version", 0))
    return Run(spark, path, manifest, complete=True)


def check_version(path: str, version: int) -> None:
    if version > schema.SCHEMA_VERSION:
        raise LayoutError(
            f"{path}: written with schema version {version}, this is {schema.SCHEMA_VERSION}; "
            "use the jobs of the version that wrote it"
        )


def durations(records: DataFrame, *keep: Column | str) -> DataFrame:
    """One row for each record and stage: `stage` (its number), `ns`, `wrong`, and what to keep.

    `wrong` is 1 where a stage ends before it begins; such a duration counts as 0. A record without
    an intended time has no `client` stage.
    """
    from pyspark.sql import functions as F

    values = []
    for number, stage in enumerate(STAGES):
        if stage.name == "total":
            value = f"{stage.end} - {START}"
        elif stage.start == "intended_ns":
            value = f"if(intended_ns > 0, {stage.end} - intended_ns, null)"
        else:
            value = f"{stage.end} - {stage.start}"
        values.append(f"struct({number} as stage, {value} as ns)")
    spread = records.select(*keep, F.expr(f"explode(array({', '.join(values)}))").alias("it"))
    names = [name for name in spread.columns if name != "it"]
    return (
        spread.select(*names, "it.stage", F.col("it.ns").alias("raw"))
        .where("raw is not null")
        .selectExpr(*names, "stage", "greatest(raw, 0L) as ns", "if(raw < 0, 1, 0) as wrong")
    )


def stage_name(number: str = "stage") -> str:
    """SQL that turns the number of a stage into its name."""
    names = ", ".join(f"'{name}'" for name in schema.STAGE_NAMES)
    return f"element_at(array({names}), {number} + 1) as stage"
