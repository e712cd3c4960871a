"""From samples to a table: medians, the better setting of a peer, ratios, marks.

Every ratio is our figure divided by theirs. A mark is met when the ratio is at least the mark (a
rate) or at most the mark (a time, memory, CPU time). Nothing here runs a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.placement import summary
from bench.scenarios import CHECKS, OTHERS, RELAY, Metric, Sample, Scenario
from midair.shown import columns

MET, MISSED = "met", "missed"


@dataclass
class Side:
    """One server's part of a row: the better of its settings."""

    variant: str
    figure: float | None
    spread: float | None  # (highest - lowest) / median over the repetitions
    cpu_ns: float | None
    checks: str
    failed: bool
    generator_cores: str = "?"
    server_cores: str = "?"


@dataclass
class Row:
    scenario: str
    title: str
    unit: str
    ours: Side
    theirs: Side
    ratio: float | None  # ours divided by theirs
    mark: float | None
    met: bool | None
    cpu_ratio: float | None
    cpu_mark: float | None
    cpu_met: bool | None
    by_limit: float | None  # ours divided by the relay's
    others: dict[str, Side] = field(default_factory=dict)


# ---- figures -------------------------------------------------------------------------------------


def checks_text(samples: Sequence[Sample]) -> str:
    """lost/duplicated/reordered, and the rarer troubles only if there are any."""
    sums = {name: sum(sample.checks.get(name, 0) for sample in samples) for name in CHECKS}
    text = f"{sums['lost']}/{sums['duplicated']}/{sums['reordered']}"
    others = sums["misrouted"] + sums["corrupt"]
    return f"{text} +{others} wrong" if others else text


def better(figure: float, than: float, metric: Metric) -> bool:
    return figure > than if metric.higher_is_better else figure < than


def side(samples: Sequence[Sample], label: str, scenario: Scenario, metric: Metric) -> Side:
    mine = [s for s in samples if s.scenario == scenario.key and s.server.startswith(f"{label}:")]
    troubled = any(s.error is not None or any(s.checks.values()) for s in mine)
    best: Side | None = None
    for server in dict.fromkeys(s.server for s in mine):
        good = [s for s in mine if s.server == server and metric.key in s.figures]
        if not good:
            continue
        figures = [s.figures[metric.key] for s in good]
        figure = median(figures)
        spread = (max(figures) - min(figures)) / figure if figure > 0 else None
        spent = [s.cpu_ns for s in good if s.cpu_ns is not None and metric.shows_cpu]
        placements = [placement for s in good for placement in s.placements]
        if best is None or best.figure is None or better(figure, best.figure, metric):
            best = Side(
                server.partition(":")[2],
                figure,
                spread,
                median(spent) if spent else None,
                checks_text(mine),
                troubled,
                summary(placements, "generator"),
                summary(placements, "server"),
            )
    if best is None:
        variant = mine[0].server.partition(":")[2] if mine else "?"
        return Side(variant, None, None, None, "error", True)
    return best


def by(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def is_met(ratio: float | None, mark: float | None, higher: bool) -> bool | None:
    """None where there is no mark; a figure that is missing misses its mark."""
    if mark is None:
        return None
    if ratio is None:
        return False
    return ratio >= mark if higher else ratio <= mark


def make_rows(samples: Sequence[Sample], scenarios: Sequence[Scenario]) -> list[Row]:
    rows = []
    for scenario in scenarios:
        labels = dict.fromkeys(
            s.server.partition(":")[0] for s in samples if s.scenario == scenario.key
        )
        for metric in scenario.metrics:
            ours = side(samples, "a", scenario, metric)
            theirs = side(samples, "b", scenario, metric)
            others = {
                label: side(samples, label, scenario, metric)
                for label in labels
                if label not in ("a", "b")
            }
            ratio = by(ours.figure, theirs.figure)
            cpu = by(ours.cpu_ns, theirs.cpu_ns)
            limit = others[RELAY].figure if RELAY in others else None
            rows.append(
                Row(
                    scenario.key,
                    metric.title,
                    metric.unit,
                    ours,
                    theirs,
                    ratio,
                    metric.mark,
                    is_met(ratio, metric.mark, metric.higher_is_better),
                    cpu,
                    metric.cpu_mark,
                    is_met(cpu, metric.cpu_mark, False),
                    by(ours.figure, limit),
                    others,
                )
            )
    return rows


# ---- text ----------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def mark_text(mark: float | None, higher: bool) -> str:
    return "" if mark is None else f"{'>=' if higher else '<='} {mark:g}"


def verdict(met: bool | None) -> str:
    return "" if met is None else MET if met else MISSED


def setting(variant: str) -> str:
    return variant.removeprefix("nats-server").strip() or "default"


def marks_table(rows: Sequence[Row], scenarios: Sequence[Scenario], servers: Sequence[str]) -> str:
    """The rows with their ratios and marks, and how far each is from the relay."""
    metrics = [metric for scenario in scenarios for metric in scenario.metrics]
    head = ["scenario", "unit", servers[0], servers[1], "ratio", "mark", ""]
    head += ["CPU ns", "CPU ns", "ratio", "mark", "", "limit", "of limit", "lost/dup/order"]
    lines = [[*head, "peer setting"]]
    for row, metric in zip(rows, metrics, strict=True):
        checks = row.ours.checks
        if row.theirs.checks != checks:
            checks += f" | {row.theirs.checks}"
        limit = row.others[RELAY].figure if RELAY in row.others else None
        lines.append(
            [
                row.title,
                row.unit,
                number(row.ours.figure),
                number(row.theirs.figure),
                times(row.ratio),
                mark_text(row.mark, metric.higher_is_better),
                verdict(row.met),
                number(row.ours.cpu_ns),
                number(row.theirs.cpu_ns),
                times(row.cpu_ratio),
                mark_text(row.cpu_mark, False),
                verdict(row.cpu_met),
                number(limit),
                times(row.by_limit),
                checks,
                setting(row.theirs.variant),
            ]
        )
    return "\n".join(columns(lines, left=(0, 1, 6, 11, 14, 15)))


def others_table(rows: Sequence[Row], servers: Sequence[str]) -> str:
    """Other brokers on the same loads, each in its own protocol; empty if there are none."""
    names = [name for name in OTHERS if any(name in row.others for row in rows)]
    if not names:
        return ""
    head = ["scenario", "unit", *servers, *names]
    lines = [[*head, *(f"CPU ns {name}" for name in (*servers, *names)), "lost/dup/order"]]
    for row in rows:
        if not set(names) & set(row.others):
            continue
        sides = [row.ours, row.theirs, *(row.others[name] for name in names if name in row.others)]
        lines.append(
            [
                row.title,
                row.unit,
                *(number(it.figure) for it in sides),
                *(number(it.cpu_ns) for it in sides),
                " | ".join(it.checks for it in sides[2:]),
            ]
        )
    return "\n".join(columns(lines, left=(0, 1, len(lines[0]) - 1)))


def placement_table(rows: Sequence[Row]) -> str:
    """On which cores the load generator and the server's processes ran, and the spread."""
    lines = [["scenario", "server", "generator on", "server on", "spread"]]
    seen = set()
    for row in rows:
        for it in (row.ours, row.theirs, *row.others.values()):
            unknown = it.server_cores == "?" and it.generator_cores == "?"
            if unknown or (row.scenario, it.variant) in seen:
                continue
            seen.add((row.scenario, it.variant))
            lines.append(
                [row.title, it.variant, it.generator_cores, it.server_cores, percent(it.spread)]
            )
    return "\n".join(columns(lines, left=(0, 1, 2, 3))) if len(lines) > 1 else ""
