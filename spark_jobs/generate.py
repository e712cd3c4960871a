"""Makes a run folder of synthetic records: `python -m spark_jobs.generate RUN --records 1000000`.

For tests and for measuring the jobs. The same arguments give the same records, whatever the number
of processes. A record is made from a chunk's own random numbers; chunks are made side by side.

The load is a steady rate over many connections. Every `--event-every` seconds the router or a
connmgr is replaced, in turn, and messages that would have passed it wait until it is back: the
pause of each event is known, and a report can be compared with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from midair.errors import MidairError
from midair.exits import Exit
from midair.trace import schema
from midair.trace.run_folder import (
    check_run_id,
    records_dir,
    write_manifest,
    write_part,
    write_rows,
)
from midair.trace.schema import MINUTE_NS, NS_PER_S
from midair.version import __version__

BOOT_NS = 1_000 * NS_PER_S  # the monotonic clock when a run begins
WALL_OFFSET_NS = 1_700_000_000 * NS_PER_S
# Median of each stage in microseconds, and the spread of its logarithm.
STAGE_US = {"client": (20, 0.5), "refer": (6, 0.6), "queue": (18, 0.7), "route": (7, 0.5)}
DELIVER_US = (12, 0.8)


@dataclass(frozen=True)
class Load:
    """What a run consists of."""

    run: str = "synthetic"
    records: int = 1_000_000
    rate: int = 200_000  # records a second
    connections: int = 200
    connmgrs: int = 4
    subjects: int = 100
    skew: float = 0.0  # share of the records on one subject, sent by one connection
    event_every_s: float = 10.0  # 0: none
    pause_ms: float = 6.0  # of the longest event; the others take less
    stamped: float = 1.0  # share of the records with an intended time
    slowdown: float = 1.0  # stretches every stage
    seed: int = 1
    chunk: int = 1_000_000  # records made at a time

    @property
    def seconds(self) -> float:
        return self.records / self.rate

    @property
    def whole(self) -> int:
        """Records of a chunk: a whole number of turns of the connmgrs, so that how many records
        each one has before a chunk is known without making them."""
        return max(self.chunk // self.connmgrs, 1) * self.connmgrs

    @property
    def chunks(self) -> int:
        return -(-self.records // self.whole)


@dataclass(frozen=True)
class Replaced:
    """A component that was away for a moment."""

    at_ns: int
    pause_ns: int
    component: str
    generation: int


def replacements(load: Load) -> list[Replaced]:
    """The events of a run: the router and each connmgr in turn, pauses from a half to the whole."""
    if load.event_every_s <= 0:
        return []
    names = ["router", *(f"connmgr/{index}" for index in range(load.connmgrs))]
    every = round(load.event_every_s * NS_PER_S)
    count = int((load.seconds - 0.5 * load.event_every_s) / load.event_every_s) + 1
    result = []
    for number in range(max(count, 0)):
        pause = load.pause_ms * (0.5 + 0.5 * ((number * 7) % 11) / 10)
        result.append(
            Replaced(
                BOOT_NS + every // 2 + number * every,
                round(pause * 1e6),
                names[number % len(names)],
                2 + number // len(names),
            )
        )
    return result


def make_chunk(load: Load, number: int) -> Any:
    """Records [number * chunk, ...) as a pyarrow table sorted by written_ns."""
    import numpy as np
    import pyarrow as pa

    first = number * load.whole
    n = min(load.whole, load.records - first)
    rng = np.random.Generator(np.random.SFC64([load.seed, number]))

    # One record in each tick of the load, somewhere inside it: a steady rate that is not regular.
    tick = NS_PER_S / load.rate
    intended = BOOT_NS + ((first + np.arange(n) + rng.random(n)) * tick).astype(np.int64)

    def delay(name_us: tuple[float, float]) -> Any:
        median, spread = name_us
        normal = rng.standard_normal(n, dtype=np.float32)
        scale = median * 1000.0 * load.slowdown
        return (np.exp(normal * np.float32(spread)) * np.float32(scale)).astype(np.int64)

    destination_connmgr: Any = (first + np.arange(n)) % load.connmgrs
    each = max(load.connections // load.connmgrs, 1)
    destination_uid = 1 + destination_connmgr + load.connmgrs * rng.integers(0, each, n)
    source_uid = 1 + rng.integers(0, each * load.connmgrs, n)
    subject = rng.integers(0, load.subjects, n)
    if load.skew > 0:
        hot = rng.random(n) < load.skew
        subject[hot] = 0
        source_uid[hot] = 1
    source_connmgr = (source_uid - 1) % load.connmgrs

    received = intended + delay(STAGE_US["client"])
    events = replacements(load)
    received = _wait(received, source_connmgr, events, "connmgr/")
    queued = received + delay(STAGE_US["refer"])
    routed = _wait(queued + delay(STAGE_US["queue"]), None, events, "router")
    instructed = routed + delay(STAGE_US["route"])
    written = instructed + delay(DELIVER_US)
    written = _wait(written, destination_connmgr, events, "connmgr/")
    intended[rng.random(n) >= load.stamped] = 0

    order = np.argsort(written, kind="stable")
    turn: Any = np.empty(n, np.int64)
    for index in range(load.connmgrs):
        mine = order[destination_connmgr[order] == index]
        before = (first + load.connmgrs - 1 - index) // load.connmgrs
        turn[mine] = before + np.arange(len(mine))

    columns = {
        "schema_version": np.full(n, schema.SCHEMA_VERSION, np.int16),
        "sequence": turn,
        "message": (first + np.arange(n)).astype(np.int64),
        "source_connmgr": source_connmgr,
        "source_uid": source_uid,
        "destination_connmgr": destination_connmgr,
        "destination_uid": destination_uid,
        "subject_hash": _hash(subject),
        "body_size": 16 << rng.integers(0, 7, n),
        "round_messages": rng.integers(1, 64, n),
        "ref_batch_bytes": rng.integers(64, 8192, n),
        "order_batch_bytes": rng.integers(64, 8192, n),
        "source_generation": _generation(received, source_connmgr, events, "connmgr/"),
        "router_generation": _generation(routed, None, events, "router"),
        "destination_generation": _generation(written, destination_connmgr, events, "connmgr/"),
        "intended_ns": intended,
        "received_ns": received,
        "queued_ns": queued,
        "routed_ns": routed,
        "instructed_ns": instructed,
        "written_ns": written,
    }
    arrow = schema.arrow_schema(schema.RECORDS)
    arrays = []
    for field in arrow:
        if field.name == "run":
            arrays.append(pa.DictionaryArray.from_arrays(np.zeros(n, np.int32), [load.run]))
        else:
            values = columns[field.name][order].astype(field.type.to_pandas_dtype(), copy=False)
            arrays.append(pa.array(values))
    return pa.table(arrays, names=arrow.names)


def _wait(times: Any, connmgr: Any, events: list[Replaced], who: str) -> Any:
    """Moves what would happen while its component is away to the moment it is back."""
    import numpy as np

    low, high = int(times.min()), int(times.max())
    for event in events:
        end = event.at_ns + event.pause_ns
        if not event.component.startswith(who) or end < low or event.at_ns > high:
            continue
        away = (times >= event.at_ns) & (times < end)
        if connmgr is not None:
            away &= connmgr == int(event.component.removeprefix(who))
        times = np.where(away, end + (times - event.at_ns) // 50, times)
    return times


def _generation(times: Any, connmgr: Any, events: list[Replaced], who: str) -> Any:
    import numpy as np

    result: Any = np.ones(len(times), np.int32)
    for event in events:
        if event.component.startswith(who):
            later = times >= event.at_ns
            if connmgr is not None:
                later &= connmgr == int(event.component.removeprefix(who))
            result[later] = event.generation
    return result


def _hash(subject: Any) -> Any:
    """Spreads subject numbers over 64 bits."""
    import numpy as np

    return ((subject.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)).view(
        np.int64
    )


def write_chunk(job: tuple[str, Load, int]) -> int:
    """Makes and files one chunk; the number of records. (One argument: it is a pool's task.)"""
    import numpy as np

    folder, load, number = job
    rows = make_chunk(load, number)
    minutes = rows["written_ns"].to_numpy() // MINUTE_NS
    cuts = [0, *(np.flatnonzero(np.diff(minutes)) + 1).tolist(), len(minutes)]
    for start, end in itertools.pairwise(cuts):
        directory = records_dir(Path(folder), int(minutes[start]))
        write_part(directory, f"{number:06}", rows.slice(start, end - start))
    return int(rows.num_rows)


def write_rest(folder: Path, load: Load) -> None:
    """Events, dictionaries and the manifest."""
    import numpy as np

    common = {"schema_version": schema.SCHEMA_VERSION, "run": load.run}
    found = replacements(load)
    write_rows(
        folder,
        schema.EVENTS,
        "0",
        [
            {
                **common,
                "time_ns": event.at_ns,
                "kind": "upgrade",
                "component": event.component,
                "pid": 1000 + number,
                "generation": event.generation,
                "duration_ns": event.pause_ns,
                "details": json.dumps({"from": __version__, "to": __version__}),
            }
            for number, event in enumerate(found)
        ],
    )
    hashes = _hash(np.arange(load.subjects)).tolist()
    write_rows(
        folder,
        schema.SUBJECTS,
        "0",
        [
            {**common, "subject_hash": value, "subject": f"orders.region{number}.new"}
            for number, value in enumerate(hashes)
        ],
    )
    each = max(load.connections // load.connmgrs, 1)
    write_rows(
        folder,
        schema.CONNECTIONS,
        "0",
        [
            {
                **common,
                "uid": uid,
                "connmgr": (uid - 1) % load.connmgrs,
                "name": f"client-{uid}",
                "address": f"127.0.0.1:{20000 + uid % 40000}",
                "opened_ns": BOOT_NS - NS_PER_S,
            }
            for uid in range(1, each * load.connmgrs + 1)
        ],
    )
    write_manifest(
        folder,
        {
            "format": schema.FORMAT,
            "schema_version": schema.SCHEMA_VERSION,
            "run": load.run,
            "versions": {"midair": __version__},
            "settings": {"sample_every": 1, "load": asdict(load)},
            "started_ns": BOOT_NS,
            "ended_ns": BOOT_NS + round(load.seconds * NS_PER_S),
            "clock_offset_ns": WALL_OFFSET_NS,
            "counts": {"records": load.records, "events": len(found), "dropped": 0},
            "checks": {
                "sent": load.records,
                "delivered": load.records,
                "lost": 0,
                "doubled": 0,
                "reordered": 0,
            },
        },
    )


def generate(folder: Path, load: Load, processes: int = 1, progress: bool = False) -> None:
    """Writes the whole run."""
    check_run_id(load.run)
    if folder.exists() and any(folder.iterdir()):
        raise MidairError(f"{folder} is not empty", Exit.USAGE)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(str(folder), load, number) for number in range(load.chunks)]
    began = time.monotonic()
    done = 0
    if processes == 1:
        for job in jobs:
            done += write_chunk(job)
            _show(progress, done, load.records, began)
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for count in pool.imap_unordered(write_chunk, jobs):
                done += count
                _show(progress, done, load.records, began)
    write_rest(folder, load)


def _show(progress: bool, done: int, of: int, began: float) -> None:
    if progress:
        rate = done / max(time.monotonic() - began, 1e-9)
        end = "\n" if done == of else ""
        print(f"\r{done:,} of {of:,} records, {rate:,.0f}/s", end=end, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    usual = Load()
    it = argparse.ArgumentParser(
        prog="python -m spark_jobs.generate",
        description="Makes a run folder of synthetic trace records.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    it.add_argument("folder", metavar="RUN", type=Path, help="new or empty directory")
    it.add_argument("--run", default=usual.run, help="id of the run")
    it.add_argument("--records", type=lambda text: int(float(text)), default=usual.records)
    it.add_argument("--rate", type=int, default=usual.rate, help="records a second")
    it.add_argument("--connections", type=int, default=usual.connections, help="clients")
    it.add_argument("--connmgrs", type=int, default=usual.connmgrs, help="connection managers")
    it.add_argument("--subjects", type=int, default=usual.subjects, help="different subjects")
    it.add_argument("--skew", type=float, default=usual.skew, help="share of the first subject")
    it.add_argument(
        "--event-every",
        dest="event_every_s",
        type=float,
        default=usual.event_every_s,
        metavar="S",
        help="seconds between upgrades; 0: none",
    )
    it.add_argument(
        "--pause", dest="pause_ms", type=float, default=usual.pause_ms, metavar="MS", help="longest"
    )
    it.add_argument("--stamped", type=float, default=usual.stamped, help="share with intended time")
    it.add_argument("--slowdown", type=float, default=usual.slowdown, help="stretches every stage")
    it.add_argument("--seed", type=int, default=usual.seed, help="of the random numbers")
    it.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at work")
    return it


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    given = {key: value for key, value in vars(args).items() if key not in ("folder", "processes")}
    try:
        generate(args.folder, Load(**given), args.processes, progress=sys.stderr.isatty())
    except MidairError as error:
        print(f"generate: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
