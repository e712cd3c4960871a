"""The tables of a trace run, column by column: the contract between the tracer and the jobs.

docs/traces.md says the same in words. Nothing is imported here, so that a tracer needs
pyarrow only and a job Spark only. A column is never renamed, removed, or given another meaning;
a new one is appended, with a default that stands in for it in older files, and SCHEMA_VERSION
grows by one. A job refuses a file of a version it does not know.

Integers are signed: Spark reads unsigned 64-bit columns as decimals, ten times slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 1
FORMAT = "midair-trace"  # `format` in the manifest

NS_PER_S = 1_000_000_000
MINUTE_NS = 60 * NS_PER_S  # records are filed by written_ns // MINUTE_NS

Kind = Literal["int16", "int32", "int64", "string"]


@dataclass(frozen=True)
class Column:
    """One column; none is ever null."""

    name: str
    kind: Kind
    meaning: str
    default: int | str = 0  # what a file written before the column existed is taken to say
    since: int = 1  # SCHEMA_VERSION that brought it


@dataclass(frozen=True)
class Table:
    """One table of a run folder and where its files are."""

    name: str
    glob: str  # of the directories that hold its files, below the run folder
    sort: str  # files are sorted by this column
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


_RUN = (
    Column("schema_version", "int16", "version of this table when the row was written"),
    Column("run", "string", "id of the run; the same in every row of a run folder", ""),
)

RECORDS = Table(
    "records",
    "minute=*",
    "written_ns",
    (
        *_RUN,
        Column("sequence", "int64", "number of the record in its ring: per destination connmgr"),
        Column("message", "int64", "handle of the message in its source connmgr"),
        Column("source_connmgr", "int32", "connmgr that received the message"),
        Column("source_uid", "int64", "connection that sent it"),
        Column("destination_connmgr", "int32", "connmgr that delivered it"),
        Column("destination_uid", "int64", "connection that got it"),
        Column("subject_hash", "int64", "64-bit hash of the subject, as a signed number"),
        Column("body_size", "int32", "bytes of the body, with headers"),
        Column("round_messages", "int32", "messages in the round it was taken in; 0: not known"),
        Column("ref_batch_bytes", "int32", "bytes of the batch of references it was in"),
        Column("order_batch_bytes", "int32", "bytes of the batch of orders it was in"),
        Column("source_generation", "int32", "generation of the source connmgr"),
        Column("router_generation", "int32", "generation of the router"),
        Column("destination_generation", "int32", "generation of the destination connmgr"),
        Column("intended_ns", "int64", "when the client meant to send it; 0: not stamped"),
        Column("received_ns", "int64", "recv returned its last byte"),
        Column("queued_ns", "int64", "its batch of references was closed"),
        Column("routed_ns", "int64", "the router took it up"),
        Column("instructed_ns", "int64", "its batch of orders was closed"),
        Column("written_ns", "int64", "the kernel accepted its last byte"),
    ),
)

EVENTS = Table(
    "events",
    "events",
    "time_ns",
    (
        *_RUN,
        Column("time_ns", "int64", "when it began"),
        Column("kind", "string", "one of EVENT_KINDS", ""),
        Column("component", "string", "as in `midair status`: router, connmgr/0", ""),
        Column("pid", "int32", "process the event is about; 0: none"),
        Column("generation", "int32", "its generation; 0: none"),
        Column("duration_ns", "int64", "how long it took; 0: an instant, or not known"),
        Column("details", "string", "JSON object", "{}"),
    ),
)

SUBJECTS = Table(
    "subjects",
    "subjects",
    "subject_hash",
    (
        *_RUN,
        Column("subject_hash", "int64", "as in the records"),
        Column("subject", "string", "its text", ""),
    ),
)

CONNECTIONS = Table(
    "connections",
    "connections",
    "uid",
    (
        *_RUN,
        Column("uid", "int64", "as in the records"),
        Column("connmgr", "int32", "connmgr that serves it"),
        Column("name", "string", "what the client calls itself", ""),
        Column("address", "string", "host:port of the client", ""),
        Column("opened_ns", "int64", "when it was accepted"),
    ),
)

TABLES = (RECORDS, EVENTS, SUBJECTS, CONNECTIONS)
MANIFEST = "manifest.json"

EVENT_KINDS = {
    "upgrade": "a component was replaced on purpose; from the end of the old to the new at work",
    "death": "a process ended; from its end to its successor at work, if that is known",
    "recovery": "a start found and repaired the work of its predecessor",
    "lease": "a role changed hands; from released to taken",
    "limit": "a bound was met: queue, arena, connections; for as long as it held",
    "slow-consumer": "a client was told and closed because it did not read",
    "trace-drop": "trace records were dropped; details.dropped says how many",
}
# Those that may stop messages for a moment: the report gives the pause each one caused.
DISTURBANCES = ("upgrade", "death", "recovery", "lease", "limit")


@dataclass(frozen=True)
class Stage:
    """A part of the way of a message: from one time column to another."""

    name: str
    start: str
    end: str
    meaning: str


# The first five follow one another. `server` is what Midair is answerable for; `total` begins
# where the client meant to send, if it said so, and is then free of coordinated omission.
STAGES = (
    Stage("client", "intended_ns", "received_ns", "client and kernel, before recv"),
    Stage("refer", "received_ns", "queued_ns", "until its batch of references was closed"),
    Stage("queue", "queued_ns", "routed_ns", "until the router took it up"),
    Stage("route", "routed_ns", "instructed_ns", "until its batch of orders was closed"),
    Stage("deliver", "instructed_ns", "written_ns", "until the kernel had taken it"),
    Stage("server", "received_ns", "written_ns", "received to written"),
    Stage("total", "intended_ns", "written_ns", "intended, or else received, to written"),
)
STAGE_NAMES = tuple(stage.name for stage in STAGES)


def arrow_schema(table: Table) -> Any:
    """The table as a pyarrow schema."""
    import pyarrow as pa

    kinds = {"int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "string": pa.string()}
    return pa.schema(
        [pa.field(column.name, kinds[column.kind], nullable=False) for column in table.columns]
    )


def spark_schema(table: Table) -> Any:
    """The table as a Spark schema."""
    from pyspark.sql import types

    kinds = {
        "int16": types.ShortType(),
        "int32": types.IntegerType(),
        "int64": types.LongType(),
        "string": types.StringType(),
    }
    # Columns are nullable for Spark: those a file of an older version lacks are read as null.
    return types.StructType(
        [types.StructField(column.name, kinds[column.kind]) for column in table.columns]
    )
