"""The loads of the table: what each one runs, which rows it fills, and the mark of each row.

A mark is the ratio that is aimed at, our figure divided by theirs: at least that much where more is
better, at most that much where less is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from bench import loadgen
from bench.peers import Server

Lend = Callable[[], AbstractContextManager[Server]]
TINY = 0.0  # the scale at which every load is as little as it can be
CHECKS = ("lost", "duplicated", "reordered", "misrouted", "corrupt")
RELAY = "relay"
OTHERS = ("mosquitto", "redis")
OTHER_PROTOCOLS = ("mqtt", "redis")  # a thirtieth of the messages: mosquitto would take minutes


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    key: str
    title: str
    unit: str
    higher_is_better: bool
    mark: float | None = None
    cpu_mark: float | None = None
    shows_cpu: bool = True


@dataclass
class Sample:
    """What one server gave in one run of one scenario."""

    scenario: str
    server: str
    repetition: int
    figures: dict[str, float] = field(default_factory=dict)
    cpu_ns: float | None = None
    checks: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    reports: list[loadgen.Report] = field(default_factory=list)

    def take(self, outcome: loadgen.Outcome) -> loadgen.Report:
        """Keeps the raw report, adds up its checks, and remembers the CPU time per delivery."""
        report = outcome.report
        self.reports.append(report)
        for name in CHECKS:
            self.checks[name] = self.checks.get(name, 0) + int(report.get(name, 0))
        self.cpu_ns = report.get("server_cpu_ns_per_delivery")
        return report

    @property
    def placements(self) -> list[dict[str, Any]]:
        return [report["placement"] for report in self.reports if "placement" in report]


@dataclass(frozen=True)
class Scenario:
    """A load, and the rows it fills. `beside`: which other servers can take it."""

    key: str
    metrics: tuple[Metric, ...]
    measure: Callable[[Sample, Lend, float], None]  # the last is the scale, usually 1
    beside: tuple[str, ...] = (RELAY,)
    needs_memory: bool = False  # only for servers whose processes can be looked at


def load(server: Server, mode: str, **options: object) -> loadgen.Outcome:
    """Runs the generator against a server, in the server's protocol."""
    return loadgen.run(
        mode,
        server.port,
        host=server.host,
        protocol=server.protocol,
        server_pids=server.pids() or None,
        **{"timeout": 120.0, **options},  # type: ignore[arg-type]
    )


def throughput(
    key: str,
    title: str,
    messages: int,
    tiny: int,
    mark: float,
    cpu_mark: float,
    beside: tuple[str, ...] = (RELAY,),
    as_relay: dict[str, object] | None = None,
    **options: object,
) -> Scenario:
    """`as_relay`: options a relay takes instead, where it cannot do the same."""

    def measure(sample: Sample, lend: Lend, scale: float) -> None:
        count = max(tiny, round(messages * scale))
        with lend() as server:
            if server.protocol in OTHER_PROTOCOLS:
                count = max(tiny, count // 30)
            chosen = {**options, **(as_relay or {})} if server.protocol == RELAY else options
            warmup = max(1, count // 20)
            report = sample.take(
                load(server, "throughput", messages=count, warmup=warmup, **chosen)
            )
        sample.figures[key] = report["deliveries_per_s"]

    metric = Metric(key, title, "deliveries/s", True, mark, cpu_mark)
    return Scenario(key, (metric,), measure, beside)


def latency(
    key: str,
    title: str,
    mode: str,
    messages: int,
    tiny: int,
    marks: dict[str, float],
    runs: int = 1,
    **options: object,
) -> Scenario:
    """`runs`: how often on each server; a figure is the median.

    A virtual machine stops for milliseconds, longer than anything a server does, a few times a
    second: one run says more about the machine than about the server.
    """

    def measure(sample: Sample, lend: Lend, scale: float) -> None:
        count = max(tiny, round(messages * scale))
        with lend() as server:
            reports = [
                sample.take(load(server, mode, messages=count, warmup=count // 10, **options))
                for _ in range(runs)
            ]
        for quantile in marks:
            figures = [report[f"{quantile}_us"] for report in reports]
            sample.figures[f"{key}-{quantile}"] = statistics.median(figures)

    names = {"p50": "median", "p99": "99%", "p999": "99.9%"}
    metrics = tuple(
        Metric(
            f"{key}-{quantile}",
            f"{title}, {names[quantile]}",
            "us",
            False,
            mark,
            shows_cpu=quantile == "p50",
        )
        for quantile, mark in marks.items()
    )
    return Scenario(key, metrics, measure)


def measure_connect(sample: Sample, lend: Lend, scale: float) -> None:
    with lend() as server:
        report = sample.take(load(server, "connect", connections=max(200, round(5000 * scale))))
    sample.figures["connect"] = report["connections_per_s"]


def measure_idle(sample: Sample, lend: Lend, scale: float) -> None:
    connections = max(100, round(10_000 * scale))
    with lend() as server:
        before = server.pss_bytes()
        with loadgen.idle(
            server.port,
            timeout=180.0,
            host=server.host,
            protocol=server.protocol,
            connections=connections,
        ) as crowd:
            after = server.pss_bytes()
            report = sample.take(crowd.finish())
    # The difference misses what a server sets aside when it starts; the total does not.
    sample.figures["idle-memory"] = max(after - before, 0) / connections / 1024
    sample.figures["idle-total"] = after / (1 << 20)
    sample.figures["idle-reached"] = report["reached"] / connections


def measure_growth(sample: Sample, lend: Lend, scale: float) -> None:
    """The same random traffic over few and over many subjects, each on a server of its own."""
    few, many = max(100, round(1000 * scale)), max(1000, round(1_000_000 * scale))
    for key, subjects in (("subjects-few", few), ("subjects-many", many)):
        with lend() as server:
            report = sample.take(
                load(
                    server,
                    "throughput",
                    timeout=300.0,
                    subject_mode="many",
                    subjects=subjects,
                    messages=max(2000, round(1_000_000 * scale)),
                    warmup=max(200, round(100_000 * scale)),
                )
            )
        sample.figures[key] = report["deliveries_per_s"]
    sample.figures["growth"] = sample.figures["subjects-many"] / sample.figures["subjects-few"]


THREE = (RELAY, *OTHERS)
SCENARIOS = (
    throughput("1to1-16", "1 to 1, 16 B", 8_000_000, 3000, 2.5, 0.40, THREE, size=16),
    throughput("1to1-128", "1 to 1, 128 B", 6_000_000, 3000, 2.2, 0.45, THREE, size=128),
    throughput("1to1-1024", "1 to 1, 1024 B", 2_000_000, 1000, 1.6, 0.55, THREE, size=1024),
    throughput("1to1-16384", "1 to 1, 16384 B", 200_000, 200, 1.6, 0.55, size=16384),
    throughput("fan-10", "1 to 10, 128 B", 1_000_000, 500, 3.0, 0.33, size=128, subscribers=10),
    throughput("fan-100", "1 to 100, 128 B", 160_000, 50, 3.0, 0.33, size=128, subscribers=100),
    throughput(
        "pairs-10",
        "10 pairs, 128 B",
        300_000,
        300,
        1.6,
        0.55,
        size=128,
        publishers=10,
        subscribers=10,
        subject_mode="pairs",
    ),
    throughput(
        "mixed",
        "100 to 100, 1000 subjects, 128 B",
        15_000,
        30,
        2.0,
        0.50,
        # A relay knows no subjects: as many copies of each message, to fixed subscribers.
        as_relay={"subject_mode": "pairs", "spread": 5, "subjects": None},
        size=128,
        publishers=100,
        subscribers=100,
        subject_mode="mixed",
        subjects=1000,
    ),
    latency(
        "pingpong",
        "round trip, 128 B",
        "pingpong",
        20_000,
        200,
        {"p50": 0.4, "p99": 0.6},
        size=128,
    ),
    latency(
        "paced",
        "10,000 a second, 128 B",
        "paced",
        30_000,
        500,
        {"p50": 0.5, "p99": 0.7, "p999": 1.0},
        runs=3,
        size=128,
        rate=10_000,
    ),
    Scenario(
        "idle",
        (
            Metric(
                "idle-memory", "10,000 idle connections", "KiB each", False, 0.5, shows_cpu=False
            ),
            Metric("idle-total", "the server with them", "MiB", False, shows_cpu=False),
            Metric("idle-reached", "reached by one message", "share", True, shows_cpu=False),
        ),
        measure_idle,
        needs_memory=True,
    ),
    Scenario(
        "growth",
        (
            Metric("subjects-few", "1,000 subjects", "deliveries/s", True, shows_cpu=False),
            Metric("subjects-many", "1,000,000 subjects", "deliveries/s", True),
            Metric("growth", "speed kept, many by few", "share", True, shows_cpu=False),
        ),
        measure_growth,
        beside=(),  # a relay knows no subjects
    ),
    Scenario(
        "connect", (Metric("connect", "connect", "connections/s", True, 1.0),), measure_connect
    ),
)
