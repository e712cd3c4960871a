"""How figures change as something grows: Midair beside nats-server.

    python -m bench.growth                       every table
    python -m bench.growth --only body --repeat 5 --json bench/results/growth.json
    python -m bench.growth --small               every table, tiny: does it still work?

Tables: subscriptions (of one subscriber, each message to one of them), connections (idle ones, with
a subscription each, while one publisher feeds one subscriber), managers (connection managers of
Midair, threads at work in nats-server), body (bytes of a message), fan (subscribers to a subject).
Servers are started anew for every point and take turns; who goes first alternates. Figures are
medians, and every delivery is checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import loadgen
from bench.peers import Midair, NatsServer, PeerError, Server
from bench.scenarios import CHECKS, load
from bench.table import by, number, times
from midair.shown import columns

SERVERS = ("midair", "nats-server")
PAYLOAD_MIB = 16
BYTES = 512 << 20  # of bodies at one point of the body table, at most
DELIVERIES = 2_000_000
MIDAIR_CONFIG = f"""
[limits]
max_payload = "{PAYLOAD_MIB}MiB"
max_pending = "256MiB"
[connmgr]
subscriptions = 2097152
"""
NATS_CONFIG = f"max_payload: {PAYLOAD_MIB << 20}\nmax_pending: {256 << 20}\n"


@dataclass
class Figures:
    """What one server gave at one point: medians."""

    rate: float | None = None
    cpu_ns: float | None = None
    kib_each: float | None = None  # memory of an idle connection, where there are any
    errors: list[str] = field(default_factory=list)
    wrong: int = 0  # deliveries lost, doubled, reordered, misrouted or corrupt


@dataclass
class Point:
    x: int
    figures: dict[str, Figures]


@dataclass
class Shot:
    """One run on one server."""

    report: loadgen.Report
    kib_each: float | None = None


@dataclass(frozen=True)
class Table:
    """`start` makes a server for x, `shoot` puts the load of x on it; the last is `small`."""

    key: str
    title: str
    xs: tuple[int, ...]
    small_xs: tuple[int, ...]
    shoot: Callable[[Server, int, bool], Shot]
    start: Callable[[str, int], Server]


# ---- servers and loads ---------------------------------------------------------------------------


def start(name: str, _x: int) -> Server:
    return Midair(MIDAIR_CONFIG, connmgrs=1) if name == "midair" else NatsServer(config=NATS_CONFIG)


def start_managers(name: str, x: int) -> Server:
    if name == "midair":
        return Midair(MIDAIR_CONFIG, connmgrs=x)
    return NatsServer(gomaxprocs=x, config=NATS_CONFIG)


def throughput(server: Server, **options: object) -> Shot:
    return Shot(load(server, "throughput", timeout=300.0, **options).report)


def subscriptions(server: Server, x: int, small: bool) -> Shot:
    count = 2000 if small else 1_000_000
    return throughput(
        server, subject_mode="many", subjects=x, messages=count, warmup=count // 10, size=128
    )


def connections(server: Server, x: int, small: bool) -> Shot:
    count = 2000 if small else 1_000_000
    before = server.pss_bytes()
    with loadgen.idle(server.port, timeout=300.0, connections=x) as crowd:
        after = server.pss_bytes()
        shot = throughput(server, messages=count, warmup=count // 20, size=128)
        reached = crowd.finish().report
    for name in CHECKS:
        shot.report[name] += reached[name]
    shot.kib_each = max(after - before, 0) / x / 1024
    return shot


def managers(server: Server, _x: int, small: bool) -> Shot:
    count = 200 if small else 200_000
    return throughput(
        server,
        subject_mode="pairs",
        publishers=10,
        subscribers=10,
        messages=count,
        warmup=count // 20,
        size=128,
    )


def body(server: Server, x: int, small: bool) -> Shot:
    most = 200 if small else 1_500_000
    count = max(4, min(most, (BYTES >> 6 if small else BYTES) // max(x, 1)))
    return throughput(server, messages=count, warmup=max(1, count // 20), size=x)


def fan(server: Server, x: int, small: bool) -> Shot:
    count = max(10, (2000 if small else DELIVERIES) // x)
    return throughput(server, subscribers=x, messages=count, warmup=max(1, count // 20), size=128)


TABLES = (
    Table(
        "subscriptions",
        "subscriptions",
        (1000, 10_000, 100_000, 1_000_000),
        (100, 1000),
        subscriptions,
        start,
    ),
    Table(
        "connections",
        "idle connections",
        (10, 100, 1000, 10_000),
        (10, 100),
        connections,
        start,
    ),
    Table("managers", "managers or threads", (1, 2, 3, 4), (1, 2), managers, start_managers),
    Table(
        "body",
        "bytes of a body",
        (0, 16, 128, 1024, 16_384, 131_072, 1 << 20, 4 << 20, 16 << 20),
        (0, 1 << 20),
        body,
        start,
    ),
    Table("fan", "subscribers to a subject", (1, 10, 100, 1000), (1, 20), fan, start),
)


# ---- the run -------------------------------------------------------------------------------------


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shoot(table: Table, name: str, x: int, small: bool, figures: Figures) -> Shot | None:
    try:
        with ExitStack() as stack:
            server = stack.enter_context(table.start(name, x))
            shot = table.shoot(server, x, small)
    except (loadgen.LoadgenError, PeerError, OSError, subprocess.SubprocessError) as error:
        figures.errors.append(f"{type(error).__name__}: {error}")
        progress(f"  {table.key} {x:,} {name}: {figures.errors[-1]}")
        return None
    figures.wrong += sum(int(shot.report.get(check, 0)) for check in CHECKS)
    progress(f"  {table.key} {x:,} {name}: {shot.report['deliveries_per_s']:,.0f} deliveries/s")
    return shot


def middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def measure(table: Table, x: int, repeat: int, small: bool) -> Point:
    point = Point(x, {name: Figures() for name in SERVERS})
    shots: dict[str, list[Shot]] = {name: [] for name in SERVERS}
    for repetition in range(repeat):
        for name in SERVERS if repetition % 2 == 0 else reversed(SERVERS):
            shot = shoot(table, name, x, small, point.figures[name])
            if shot is not None:
                shots[name].append(shot)
    for name, figures in point.figures.items():
        reports = [shot.report for shot in shots[name]]
        figures.rate = middle([report["deliveries_per_s"] for report in reports])
        figures.cpu_ns = middle([report["server_cpu_ns_per_delivery"] for report in reports])
        figures.kib_each = middle([shot.kib_each for shot in shots[name]])
    return point


def text(table: Table, points: Sequence[Point]) -> str:
    head = [table.title, *(f"{name}/s" for name in SERVERS), "ratio"]
    head += [*(f"CPU ns {name}" for name in SERVERS), "ratio"]
    has_memory = any(it.kib_each is not None for p in points for it in p.figures.values())
    if has_memory:
        head += [*(f"KiB each {name}" for name in SERVERS), "ratio"]
    lines = [[*head, "wrong"]]
    for point in points:
        ours, theirs = (point.figures[name] for name in SERVERS)
        line = [f"{point.x:,}", number(ours.rate), number(theirs.rate)]
        line += [times(by(ours.rate, theirs.rate)), number(ours.cpu_ns), number(theirs.cpu_ns)]
        line.append(times(by(ours.cpu_ns, theirs.cpu_ns)))
        if has_memory:
            line += [number(ours.kib_each), number(theirs.kib_each)]
            line.append(times(by(ours.kib_each, theirs.kib_each)))
        failed = len(ours.errors) + len(theirs.errors)
        wrong = str(ours.wrong + theirs.wrong) + (f" ({failed} failed)" if failed else "")
        lines.append([*line, wrong])
    return "\n".join(columns(lines, left=()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth", description="How figures change as something grows."
    )
    keys = [table.key for table in TABLES]
    parser.add_argument("--small", action="store_true", help="tiny loads: figures mean nothing")
    parser.add_argument("--only", action="append", choices=keys, help="repeatable")
    parser.add_argument("--repeat", type=int, help="default 3, with --small 1")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    if options.repeat is None:
        options.repeat = 1 if options.small else 3
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        loadgen.build()
        NatsServer.program()
    except (loadgen.LoadgenError, PeerError) as error:
        print(error, file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    good = True
    for table in TABLES:
        if options.only and table.key not in options.only:
            continue
        xs = table.small_xs if options.small else table.xs
        points = [measure(table, x, options.repeat, options.small) for x in xs]
        found[table.key] = [asdict(point) for point in points]
        everything = [figures for point in points for figures in point.figures.values()]
        good = good and not any(it.wrong or it.errors for it in everything)
        print(f"{text(table, points)}\n")
        for why in dict.fromkeys(why for it in everything for why in it.errors):
            print(f"failed: {why}")
    print("Medians. Rates are deliveries per second; CPU is of the server, per delivery.")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
