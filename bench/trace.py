"""What tracing costs: deliveries a second without it, with it off, and with every message traced.

    python -m bench.trace                 the table; ends with 1 if a cost is too high
    python -m bench.trace --small         tiny: does it still work?
    python -m bench.trace --repeat 9 --json trace.json

One publisher and one subscriber, 128 bytes, as fast as it goes (`bench/loadgen throughput`), on
two instances that are up at the same time: one of a build without the hooks (MIDAIR_NO_TRACE), one
as it is. The three kinds of run follow each other, and who begins changes. Figures are medians. The
cost of "off" is 1 minus the median of its ratios to a build without hooks, that of "every message"
to "off". On a busy machine the tracer cannot write as much as there is, and rests when that is
hopeless: the rest is dropped and counted. Runs are long enough for that state to be most of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench import loadgen
from bench.peers import ROOT, Midair, PeerError, Server
from midair.errors import MidairError
from midair.trace import commands as trace
from midair.up import status

SIZE = 128
COST_ON_MAX = 0.10
COST_OFF_MAX = 0.03  # less than runs differ by themselves
BUILD = ROOT / "build" / "no-trace"


@dataclass
class Result:
    """Deliveries a second, one figure for each repetition."""

    without: list[float] = field(default_factory=list)  # the hooks
    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    records: int = 0
    dropped: int = 0

    @property
    def cost_off(self) -> float:
        return 1 - median(a / b for a, b in zip(self.off, self.without, strict=True))

    @property
    def cost_on(self) -> float:
        return 1 - median(a / b for a, b in zip(self.on, self.off, strict=True))


class Unhooked(Midair):
    """Midair of a build without the hooks."""

    def environment(self) -> dict[str, str]:
        return {**os.environ, "MIDAIR_NATIVE": str(BUILD)}


def build() -> None:
    """Compiles the build without hooks, as far as it is not there."""
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "native/build.py", "--out", str(BUILD)]
    command += ["--define", "MIDAIR_NO_TRACE"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise PeerError(f"the build without hooks failed: {done.stderr.strip()}")


def throughput(server: Server, messages: int) -> float:
    done = loadgen.run(
        "throughput",
        server.port,
        timeout=120.0,
        messages=messages,
        warmup=max(1, messages // 20),
        size=SIZE,
        subscribers=1,
    )
    if done.code != loadgen.EXIT_OK:
        raise PeerError(f"{server.name} lost, doubled or reordered messages: {done.report}")
    return float(done.report["deliveries_per_s"])


def measure(repeat: int, messages: int, out: Path) -> Result:
    result = Result()
    unhooked, hooked = Unhooked(connmgrs=1), Midair(connmgrs=1)

    def without() -> None:
        result.without.append(throughput(unhooked, messages))

    def off() -> None:
        result.off.append(throughput(hooked, messages))

    def on() -> None:
        found = status.find(hooked.instance)
        trace.begin(found, f"run-{len(result.on)}", out, 1)
        try:
            result.on.append(throughput(hooked, messages))
        finally:
            _, done = trace.end(found)
        result.records += done.records
        result.dropped += done.dropped

    runs: list[Callable[[], None]] = [without, off, on]
    with unhooked, hooked:
        for repetition in range(repeat):
            for at in range(len(runs)):
                runs[(at + repetition) % len(runs)]()
            print(
                f"  #{repetition + 1}: {result.without[-1]:,.0f} without, "
                f"{result.off[-1]:,.0f} off, {result.on[-1]:,.0f} on",
                file=sys.stderr,
                flush=True,
            )
    return result


def table(it: Result) -> str:
    share = it.dropped / (it.records + it.dropped) if it.records + it.dropped else 0
    return "\n".join(
        [
            "| tracing | deliveries/s | cost |",
            "| --- | --- | --- |",
            f"| not compiled in | {median(it.without):,.0f} | |",
            f"| off | {median(it.off):,.0f} | {it.cost_off * 100:.1f} % |",
            f"| every message | {median(it.on):,.0f} | {it.cost_on * 100:.1f} % |",
            "",
            f"{it.records:,} records written, {it.dropped:,} dropped ({share:.0%})",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.trace",
        description="Deliveries a second without tracing, with it off, and with every message "
        f"traced. Ends with 1 if off costs more than {COST_OFF_MAX:.0%} or on more than "
        f"{COST_ON_MAX:.0%}.",
    )
    parser.add_argument("--repeat", type=int, default=5, help="default: 5")
    parser.add_argument("--messages", type=int, default=16_000_000, help="default: 16,000,000")
    parser.add_argument("--small", action="store_true", help="one tiny run of each")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    repeat, messages = (1, 2000) if args.small else (args.repeat, args.messages)
    if repeat < 1 or messages < 1:
        parser.error("--repeat and --messages must be 1 at least")
    try:
        build()
        with tempfile.TemporaryDirectory() as out:
            result = measure(repeat, messages, Path(out))
    except (PeerError, loadgen.LoadgenError, MidairError) as error:
        print(f"bench.trace: {error}", file=sys.stderr)
        return 3
    print(table(result))
    if args.json:
        costs = {"cost_off": result.cost_off, "cost_on": result.cost_on}
        args.json.write_text(json.dumps({**asdict(result), **costs}))
    too_much = result.cost_off > COST_OFF_MAX or result.cost_on > COST_ON_MAX
    return 1 if not args.small and too_much else 0


if __name__ == "__main__":
    sys.exit(main())
