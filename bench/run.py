"""The table of marks: Midair beside nats-server, the same load, the same run.

    python -m bench.run                                   everything, Midair beside nats-server
    python -m bench.run --small                           every scenario, tiny: does it still work?
    python -m bench.run --scenarios 1to1-128,pingpong --repeat 5 --json bench/results/today.json

The servers take turns, and the first of them alternates from repetition to repetition, so that a
slow minute of the machine meets both. Figures are medians. Every ratio is ours divided by theirs,
printed with the mark that is aimed at. nats-server runs twice, with its defaults and with
GOMAXPROCS=1; in each row the better counts. Beside them, where they can take the load: a relay that
only copies bytes (the limit), mosquitto and redis.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import loadgen
from bench.peers import ROOT, Midair, Mosquitto, NatsServer, PeerError, Redis, Relay, Server
from bench.scenarios import OTHERS, RELAY, SCENARIOS, TINY, Sample, Scenario
from bench.table import make_rows, marks_table, others_table, placement_table

# ---- servers -------------------------------------------------------------------------------------


def make_server(variant: str) -> Server:
    if variant == "midair":
        return Midair()
    if variant == "nats-server":
        return NatsServer()
    if variant == "nats-server GOMAXPROCS=1":
        return NatsServer(gomaxprocs=1)
    return {"mosquitto": Mosquitto, "redis": Redis, "relay": Relay}[variant]()


def variants_of(name: str) -> list[str]:
    if name == "nats-server":
        return ["nats-server", "nats-server GOMAXPROCS=1"]
    return [name]


class Fleet:
    """Lends servers: a fresh one each time, or (small runs) one of each kind kept running."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[str, Server] = {}
        self._stack = ExitStack()

    @contextmanager
    def lend(self, variant: str) -> Iterator[Server]:
        if not self._keep:
            with make_server(variant) as server:
                yield server
            return
        if variant not in self._kept:
            self._kept[variant] = self._stack.enter_context(make_server(variant))
        yield self._kept[variant]

    def close(self) -> None:
        self._stack.close()


# ---- the run -------------------------------------------------------------------------------------


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    scenario: Scenario, label: str, variant: str, repetition: int, fleet: Fleet, small: bool
) -> Sample:
    """`label` is the place in the table (a, b, or the name), `variant` what runs there."""
    sample = Sample(scenario.key, f"{label}:{variant}", repetition)
    try:
        scenario.measure(sample, lambda: fleet.lend(variant), TINY if small else 1.0)
    except (loadgen.LoadgenError, PeerError, OSError, subprocess.SubprocessError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    said = sample.error or ", ".join(
        f"{name} {value:,.6g}" for name, value in sample.figures.items()
    )
    progress(f"  {scenario.key} #{repetition + 1} {variant}: {said}")
    return sample


def turns_of(
    scenario: Scenario, servers: Sequence[str], beside: Sequence[str]
) -> list[tuple[str, str]]:
    """(label, variant) of everything that runs in one repetition."""
    turns = [
        (label, variant)
        for label, name in zip("ab", servers, strict=True)
        for variant in variants_of(name)
    ]
    return turns + [(name, name) for name in scenario.beside if name in beside]


def collect(
    scenarios: Sequence[Scenario],
    servers: Sequence[str],
    beside: Sequence[str],
    repeat: int,
    small: bool,
) -> list[Sample]:
    samples: list[Sample] = []
    fleet = Fleet(keep=small)
    try:
        for scenario in scenarios:
            turns = turns_of(scenario, servers, beside)
            for repetition in range(repeat):
                for label, variant in turns if repetition % 2 == 0 else reversed(turns):
                    samples.append(measure(scenario, label, variant, repetition, fleet, small))
    finally:
        fleet.close()
    return samples


# ---- what the figures were measured on -----------------------------------------------------------


def machine() -> dict[str, Any]:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "kernel": platform.release(),
        "memory_mib": memory // (1 << 20),
    }


def commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        name = git("rev-parse", "--short=12", "HEAD") or "unknown"
        return f"{name} with changes" if git("status", "--porcelain") else name
    except FileNotFoundError:
        return "unknown"


def versions(servers: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in servers:
        found[name] = make_server(name).version()
    return found


# ---- command line --------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run",
        description="Midair beside nats-server: a table of ratios and marks.",
    )
    keys = [scenario.key for scenario in SCENARIOS]
    parser.add_argument("--small", action="store_true", help="tiny loads: figures mean nothing")
    parser.add_argument("--scenarios", default=",".join(keys), help="of: " + ", ".join(keys))
    parser.add_argument("--repeat", type=int, help="default 5, with --small 1")
    parser.add_argument("--servers", default="midair,nats-server", help="ours,theirs")
    parser.add_argument(
        "--beside",
        default=",".join((RELAY, *OTHERS)),
        help="what else runs, where it can; or none (default: %(default)s)",
    )
    parser.add_argument(
        "--require-marks", action="store_true", help="end with code 1 if a mark is missed"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    options.servers = options.servers.split(",")
    chosen = options.scenarios.split(",")
    for name in chosen:
        if name not in keys:
            parser.error(f"unknown scenario {name!r}; there are {', '.join(keys)}")
    if len(options.servers) != 2 or not set(options.servers) <= {"midair", "nats-server"}:
        parser.error("--servers: two of midair, nats-server (the same twice is allowed)")
    options.beside = [] if options.beside == "none" else options.beside.split(",")
    if not set(options.beside) <= {RELAY, *OTHERS}:
        parser.error(f"--beside: of {', '.join((RELAY, *OTHERS))}, or none")
    if options.repeat is None:
        options.repeat = 1 if options.small else 5
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    options.scenarios = [scenario for scenario in SCENARIOS if scenario.key in chosen]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        loadgen.build()
        about: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "load_before": os.getloadavg()[0],
            "versions": versions([*options.servers, *options.beside]),
            "servers": options.servers,
            "beside": options.beside,
            "small": options.small,
            "repeat": options.repeat,
        }
    except (loadgen.LoadgenError, PeerError) as error:
        print(error, file=sys.stderr)
        return 2
    samples = collect(
        options.scenarios, options.servers, options.beside, options.repeat, options.small
    )
    rows = make_rows(samples, options.scenarios)
    host = about["machine"]
    print(
        f"{about['date']}  {about['commit']}  {host['cores']} cores {host['cpu']}  {host['kernel']}"
    )
    print("  ".join(f"{name} {version}" for name, version in about["versions"].items()))
    print(marks_table(rows, options.scenarios, options.servers))
    print("Medians. Ratio: ours divided by theirs. CPU: of the server, per delivery. Limit: a")
    print("relay that only copies bytes; of limit: ours divided by the relay's.")
    for text in (others_table(rows, options.servers), placement_table(rows)):
        if text:
            print(f"\n{text}")
    print(
        "Spread: (highest - lowest) / median. Cores: where a tenth of the time or more was spent."
    )
    marks = [met for row in rows for met in (row.met, row.cpu_met) if met is not None]
    print(f"Marks: {sum(marks)} of {len(marks)} met.")
    busy = about["load_before"] > 0.25 * host["cores"]
    if busy:
        print(f"The machine was not idle at the start: load average {about['load_before']:.2f}.")
    if options.json is not None:
        about["rows"] = [asdict(row) for row in rows]
        about["samples"] = [asdict(sample) for sample in samples]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    if options.require_marks and not all(marks):
        return 1
    sides = [it for row in rows for it in (row.ours, row.theirs, *row.others.values())]
    return 1 if any(it.failed for it in sides) else 0


if __name__ == "__main__":
    sys.exit(main())
