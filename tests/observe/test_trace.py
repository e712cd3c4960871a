"""Tracing: each delivery leaves one record, whatever happens to the tracer; nobody waits for it.

Method: real instances and clients; the run folder is read with pyarrow and compared with what the
clients sent and got. Nothing is compared with how long something took: times are compared with each
other only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from midair import names
from midair.client.wire_nats import hpub, pub
from midair.config import MIB
from midair.process.runtime import Runtime
from midair.trace import schema
from midair.trace.drain import Drain
from native import ffi, lib
from native.trace import Control, Ring, open_ring
from tests.support.instance import Instance, cli, eventually
from tests.support.reload import reloaded
from tests.support.stream import Inside, Stream

Make = Callable[..., Instance]
STAGES = ("received_ns", "queued_ns", "routed_ns", "instructed_ns", "written_ns")
SMALL_RING = '[trace]\nring_bytes = "128KiB"\n'  # 1024 records
SMALL_RING_RECORDS = 1024


def read(run: Path, table: schema.Table) -> list[dict[str, Any]]:
    """Every row of a table of a run folder."""
    parts = [pq.ParquetFile(path).read() for path in sorted(run.glob(f"{table.glob}/part-*"))]
    for part in parts:
        assert part.schema.equals(schema.arrow_schema(table))
    return [] if not parts else pa.concat_tables(parts).to_pylist()


def trace(instance: Instance, *words: str) -> str:
    done = cli("trace", *words, "--name", instance.name)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifest(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / schema.MANIFEST).read_text())
    return found


@contextlib.contextmanager
def streams(instance: Instance, count: int) -> Iterator[list[Stream]]:
    made = [Stream(instance.host, instance.port) for _ in range(count)]
    try:
        yield made
    finally:
        for stream in made:
            stream.close()


def take(stream: Stream, count: int) -> None:
    """Waits for that many messages."""
    got = 0
    while got < count:
        got += stream.message() is not None


@pytest.mark.parametrize("connmgrs", [1, pytest.param(2, marks=pytest.mark.alone)])
def test_a_connmgr_that_is_added_is_traced(
    make_midair: Make, tmp_path: Path, connmgrs: int
) -> None:
    midair = make_midair(f"[connmgr]\ncount = {connmgrs}\n")
    trace(midair, "on", "--sample", "1/1", "--run", "grown", "--out", str(tmp_path))
    reloaded(midair, f"[connmgr]\ncount = {connmgrs + 1}\n")
    inside = Inside(midair.name, connmgrs + 1, 256 * MIB)
    with streams(midair, 4) as (sender, *readers):
        for reader in readers:
            reader.sub(b"grown", b"1")
            reader.sync()
        on_new = [it for it in readers if inside.connmgr_of(it) == connmgrs]
        assert on_new, "one has come to the new one"
        sender.send(pub(b"grown", b"all"))
        for reader in readers:
            take(reader, 1)
        uids = {reader.info["client_id"] for reader in on_new}
        trace(midair, "off")
    inside.table.close()
    records = read(tmp_path / "grown", schema.RECORDS)
    assert uids <= {it["destination_uid"] for it in records}


def test_each_delivery_leaves_a_record(make_midair: Make, tmp_path: Path) -> None:
    midair = make_midair(connmgrs=2)
    before = time.monotonic_ns()
    trace(midair, "on", "--sample", "1/1", "--run", "whole", "--out", str(tmp_path))
    with streams(midair, 4) as (sender, *readers):
        for reader in readers:
            reader.sub(b"work.>", b"7")
            reader.sync()
        stamped = b"NATS/1.0\r\nMidair-Intended: 12345\r\n\r\n"
        for number in range(50):
            sender.send(hpub(b"work.%d" % (number % 5), stamped, b"x" * number))
            sender.send(pub(b"work.large", b"y" * 200_000) if number == 7 else pub(b"nobody"))
        for reader in readers:
            take(reader, 51)
        uids = {reader.info["client_id"] for reader in readers}
        sender_uid = sender.info["client_id"]
        said = trace(midair, "off")  # they are connected: all of them are in the dictionary
        after = time.monotonic_ns()  # a reader may have a message before its write is stamped
    run = tmp_path / "whole"
    records = read(run, schema.RECORDS)
    assert said.startswith("153 records")
    assert len(records) == 3 * 51
    assert {it["destination_uid"] for it in records} == uids
    assert {it["source_uid"] for it in records} == {sender_uid}
    assert {it["run"] for it in records} == {"whole"}
    for it in records:
        times = [it[name] for name in STAGES]
        assert times == sorted(times)
        assert before < times[0]
        assert times[-1] < after
        assert it["intended_ns"] == (0 if it["body_size"] == 200_000 else 12345)
        assert 32 < it["ref_batch_bytes"] <= 8192
        assert 32 < it["order_batch_bytes"] <= 8192
        generations = ("source_generation", "router_generation", "destination_generation")
        assert [it[name] for name in generations] == [1, 1, 1]
    sizes = Counter(it["body_size"] for it in records)
    assert sizes == {200_000: 3} | {len(stamped) + n: 3 for n in range(50)}
    # A message is one message, to however many it went.
    messages = Counter((it["source_connmgr"], it["message"]) for it in records)
    assert set(messages.values()) == {3}
    for connmgr in {it["destination_connmgr"] for it in records}:
        numbers = [it["sequence"] for it in records if it["destination_connmgr"] == connmgr]
        assert sorted(numbers) == list(range(len(numbers)))
    subjects = {it["subject_hash"]: it["subject"] for it in read(run, schema.SUBJECTS)}
    counted = Counter(subjects[it["subject_hash"]] for it in records)
    assert counted == {f"work.{n}": 30 for n in range(5)} | {"work.large": 3}
    connections = {it["uid"]: it for it in read(run, schema.CONNECTIONS)}
    assert uids | {sender_uid} <= connections.keys()
    found = manifest(run)
    assert found["counts"] == {"records": 153, "events": 0, "dropped": 0}
    assert found["settings"]["sample_every"] == 1


def test_sampling_takes_whole_messages_and_changes_at_run_time(
    make_midair: Make, tmp_path: Path
) -> None:
    midair = make_midair(connmgrs=2)
    restarts = {name: row["pid"] for name, row in midair.components().items()}
    out = ("--run", "some", "--out", str(tmp_path))
    trace(midair, "on", "--sample", "1/8", *out)
    with streams(midair, 3) as (sender, *readers):
        for reader in readers:
            reader.sub(b"s", b"1")
            reader.sync()

        def send(count: int) -> None:
            for _ in range(count):
                sender.send(pub(b"s", b"x"))
            for reader in readers:
                take(reader, count)

        send(2000)
        assert "one of 1 " not in trace(midair, "status")
        assert "now tracing every message" in trace(midair, "on", "--sample", "1/1")
        refused = cli("trace", "on", "--run", "other", "--name", midair.name)
        assert refused.returncode != 0
        assert "run some is going on" in refused.stderr
        send(100)
    trace(midair, "off")
    with streams(midair, 2) as (sender, reader):
        reader.sub(b"s", b"1")
        reader.sync()
        sender.send(pub(b"s", b"after the end"))
        take(reader, 1)
    records = read(tmp_path / "some", schema.RECORDS)
    messages = Counter((it["source_connmgr"], it["message"], it["received_ns"]) for it in records)
    assert set(messages.values()) == {2}  # both readers, or none
    # 100 of the last ones, and of 2000 one in eight: what the hash makes of that many handles.
    assert 100 + 150 <= len(messages) <= 100 + 350
    now = midair.components()
    assert {name: now[name]["pid"] for name in restarts} == restarts
    eventually(lambda: "tracer" not in midair.components(), "the tracer has ended")


def test_a_message_that_the_router_was_not_asked_about(make_midair: Make, tmp_path: Path) -> None:
    """Its record says so. Such messages have one handle, and are sampled all the same."""
    midair = make_midair(connmgrs=1)
    with streams(midair, 3) as (sender, *readers):
        for reader in readers:
            reader.sub(b"s", b"1")
            reader.sync()

        def send(count: int) -> None:
            for _ in range(count):
                sender.send(pub(b"s", b"x"))
                for reader in readers:
                    take(reader, 1)

        send(1)
        trace(midair, "on", "--sample", "1/1", "--run", "flow", "--out", str(tmp_path))
        send(100)
        trace(midair, "on", "--sample", "1/8")
        send(2000)
    trace(midair, "off")
    records = read(tmp_path / "flow", schema.RECORDS)
    for it in records:
        assert it["router_generation"] == it["ref_batch_bytes"] == it["order_batch_bytes"] == 0
        assert it["received_ns"] <= it["queued_ns"] == it["routed_ns"] == it["instructed_ns"]
        assert it["instructed_ns"] <= it["written_ns"]
    messages = Counter((it["message"], it["received_ns"]) for it in records)
    assert set(messages.values()) == {2}  # both readers, or none
    assert 100 + 150 <= len(messages) <= 100 + 350


def test_a_tracer_killed_again_and_again_writes_each_record_once(
    make_midair: Make, tmp_path: Path
) -> None:
    midair = make_midair("[manager]\nrestart_limit = 1000\n", connmgrs=2)
    trace(midair, "on", "--sample", "1/1", "--run", "killed", "--out", str(tmp_path))
    sent = 0
    with streams(midair, 2) as (sender, reader):
        reader.sub(b"s", b"1")
        reader.sync()
        for _ in range(6):
            pid = midair.pid("tracer")
            for _ in range(500):
                sender.send(pub(b"s", b"x"))
            take(reader, 500)
            sent += 500
            written = len(list((tmp_path / "killed").glob("minute=*/part-*")))
            # Killed while it writes: files of these records begin to be there.
            eventually(
                lambda seen=written: len(list((tmp_path / "killed").glob("minute=*/*"))) > seen,
                "the tracer writes",
            )
            os.kill(pid, signal.SIGKILL)
            eventually(
                lambda old=pid: (
                    midair.components().get("tracer", {}).get("state") == "active"
                    and midair.pid("tracer") != old
                ),
                "the tracer is back",
            )
    trace(midair, "off")
    records = read(tmp_path / "killed", schema.RECORDS)
    numbers = Counter((it["destination_connmgr"], it["sequence"]) for it in records)
    assert set(numbers.values()) == {1}
    assert len(records) == sent
    assert manifest(tmp_path / "killed")["counts"]["records"] == sent
    assert not list((tmp_path / "killed").glob("**/.*"))


def test_a_full_ring_drops_and_counts_and_delays_nobody(make_midair: Make, tmp_path: Path) -> None:
    midair = make_midair(SMALL_RING, connmgrs=1)
    trace(midair, "on", "--sample", "1/1", "--run", "full", "--out", str(tmp_path))
    tracer = midair.pid("tracer")
    count = 5 * SMALL_RING_RECORDS
    os.kill(tracer, signal.SIGSTOP)
    with streams(midair, 2) as (sender, reader):
        reader.sub(b"s", b"1")
        reader.sync()
        sender.send(pub(b"s", b"x") * count)
        take(reader, count)  # all of them, while nobody empties the ring
    os.kill(tracer, signal.SIGCONT)
    trace(midair, "off")
    run = tmp_path / "full"
    counts = manifest(run)["counts"]
    assert counts["records"] == SMALL_RING_RECORDS == len(read(run, schema.RECORDS))
    assert counts["dropped"] == count - SMALL_RING_RECORDS
    drops = [it for it in read(run, schema.EVENTS) if it["kind"] == "trace-drop"]
    assert sum(json.loads(it["details"])["dropped"] for it in drops) == counts["dropped"]


def test_what_happens_to_components_is_in_the_run(make_midair: Make, tmp_path: Path) -> None:
    midair = make_midair(connmgrs=1)
    trace(midair, "on", "--run", "events", "--out", str(tmp_path))
    with streams(midair, 1):
        old = midair.pid("connmgr/0")
        os.kill(old, signal.SIGKILL)
        eventually(lambda: midair.components()["connmgr/0"]["restarts"] == 1, "connmgr/0 is back")
        eventually(lambda: midair.components()["connmgr/0"]["state"] == "active", "and at work")
        assert cli("upgrade", "router", "--name", midair.name).returncode == 0
    trace(midair, "off")
    events = read(tmp_path / "events", schema.EVENTS)
    by_kind = {it["kind"]: it for it in events}
    death = by_kind["death"]
    assert (death["component"], death["pid"]) == ("connmgr/0", old)
    assert json.loads(death["details"]) == {"signal": 9}
    assert death["duration_ns"] > 0
    recovered = {it["component"] for it in events if it["kind"] == "recovery"}
    assert recovered == {"connmgr/0", "router"}
    upgrade = by_kind["upgrade"]
    assert upgrade["component"] == "router"
    assert upgrade["generation"] == 2
    assert set(json.loads(upgrade["details"])) == {"from", "to"}
    assert by_kind["lease"]["component"] == "router"
    assert len({(it["time_ns"], it["kind"], it["component"]) for it in events}) == len(events)


def test_a_slow_consumer_is_in_the_run(make_midair: Make, tmp_path: Path) -> None:
    midair = make_midair('[limits]\nmax_pending = "64KiB"\n', connmgrs=1)
    trace(midair, "on", "--run", "slow", "--out", str(tmp_path))
    with streams(midair, 1) as (sender,):
        lazy = Stream(midair.host, midair.port, receive_buffer=4096)
        lazy.sub(b"s", b"1")
        lazy.sync()
        for _ in range(200):
            sender.send(pub(b"s", b"x" * 60_000))
        sender.sync()
        lazy.close()
    trace(midair, "off")
    slow = [it for it in read(tmp_path / "slow", schema.EVENTS) if it["kind"] == "slow-consumer"]
    assert [json.loads(it["details"])["uid"] for it in slow] == [lazy.info["client_id"]]


def write_ring(ring: Any, records: list[tuple[int, int]]) -> None:
    """(sequence, written_ns) of recording 1, as a connmgr would leave them."""
    head = ffi.cast("uint64_t *", ring) + 16  # trace_ring.head
    at = lib.trace_records(ring)
    for sequence, written_ns in records:
        it = at[head[0]]
        it.sequence, it.written_ns, it.recording = sequence, written_ns, 1
        head[0] += 1


def test_a_tracer_killed_between_two_parts_of_a_range_finishes_it(
    place: Runtime, tmp_path: Path
) -> None:
    """Some of a range is written, the tail is where it was: only the rest is written again."""
    owned = open_ring(place, 0, 1 << 20)
    control, ring = Control(place), Ring(place, 0)
    minute = schema.MINUTE_NS
    write_ring(owned, [(0, minute), (1, 2 * minute), (2, 2 * minute + 1)])
    first = Drain(control, tmp_path, "r", 1)
    assert first.take(ring) == 3
    assert first.take(ring) == 0
    *_, second_minute = sorted(tmp_path.glob("minute=*/part-*"))
    second_minute.unlink()
    control.set_tail(ring, 0, 0)
    write_ring(owned, [(3, 2 * minute + 2)])
    successor = Drain(control, tmp_path, "r", 1)
    assert successor.rows == 1
    assert successor.take(ring) == 3
    assert successor.take(ring) == 1
    assert sorted(it["sequence"] for it in read(tmp_path, schema.RECORDS)) == [0, 1, 2, 3]
    assert successor.rows == 4


def test_a_ring_of_another_size_is_made_anew(place: Runtime) -> None:
    open_ring(place, 0, 1 << 20)
    ring = Ring(place, 0)
    assert ring.current
    open_ring(place, 0, 1 << 21)
    assert not ring.current
    assert Ring(place, 0).epoch != ring.epoch
    assert names.TRACE in names.STATISTICS  # fsck does not look at them


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("off",), "nothing is traced"),
        (("on", "--sample", "1/0"), "argument --sample"),
        (("on", "--run", "a/b"), "run id"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    midair: Instance, words: tuple[str, ...], message: str
) -> None:
    done = cli("trace", *words, "--name", midair.name)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


def test_a_run_is_not_written_over(midair: Instance, tmp_path: Path) -> None:
    words = ("--run", "once", "--out", str(tmp_path))
    trace(midair, "on", *words)
    trace(midair, "off")
    again = cli("trace", "on", *words, "--name", midair.name)
    assert again.returncode != 0
    assert "there is a run already" in again.stderr
    assert "nothing is traced" in trace(midair, "status")
