"""`midair bench`: the loads of Midair's own measurements, against servers that are running.

The same load generator and the same checks as in `make bench`; here the servers are whatever
answers at the addresses given, Midair or anything else that speaks the NATS client protocol.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from midair import config
from midair.arguments import checked, number, positive
from midair.client.commands import DEFAULT_SERVER
from midair.errors import MidairError, NotRunningError
from midair.exits import Exit
from midair.shown import columns

if TYPE_CHECKING:  # `midair status` does without them
    from bench.peers import Address, Server
    from bench.scenarios import Sample, Scenario
    from bench.table import Side

ANSWER_S = 5.0
REPEAT = 3
DESCRIPTION = """\
Puts load on a running server and checks every delivery: nothing lost, doubled,
reordered or sent to the wrong subscriber. With --against, other addresses get
the same load in turn, and the table says how they compare.
"""
EXAMPLES = """\
examples:
  midair bench                                       Midair at 127.0.0.1:4222
  midair bench --against 127.0.0.1:4333              beside another server
  midair bench --scenario pingpong --scenario paced  latency only
  midair bench --scale 0.1 --repeat 1                a first impression
  midair bench --json > today.json                   for programs

The load generator runs on this machine: for servers elsewhere the network is
measured, too. It is compiled when it is first used, which needs gcc. While a
scenario runs, use the machine for nothing else.

Exit codes: 0 good, 1 a delivery was wrong or a scenario failed, 2 bad
arguments, 3 nobody answers.
"""


def add_command(commands: Any) -> None:
    """Adds it to a parser's subcommands."""
    it = commands.add_parser(
        "bench",
        help="measure a running server, alone or beside others",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    it.add_argument(
        "--server", default=DEFAULT_SERVER, metavar="HOST:PORT", type=checked(_address),
        help=f"default: {DEFAULT_SERVER}",
    )  # fmt: skip
    it.add_argument(
        "--against", nargs="+", action="extend", default=[], metavar="HOST:PORT",
        type=checked(_address), help="servers to compare with",
    )  # fmt: skip
    it.add_argument(
        "--scenario", nargs="+", action="extend", metavar="NAME",
        help="what to run (default: all); --list names them",
    )  # fmt: skip
    it.add_argument("--list", action="store_true", help="name the scenarios and end")
    it.add_argument(
        "--repeat", type=positive, default=REPEAT, metavar="N",
        help="runs of each; figures are medians (default: %(default)s)",
    )  # fmt: skip
    it.add_argument(
        "--scale", type=number(0, 100), default=1.0, metavar="X",
        help="N times the usual number of messages (default: %(default)g)",
    )  # fmt: skip
    it.add_argument("--json", action="store_true", help="for programs")
    it.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from bench.scenarios import SCENARIOS

    # Without its processes nobody knows how much memory a server uses.
    possible = {it.key: it for it in SCENARIOS if not it.needs_memory}
    if args.list:
        for scenario in possible.values():
            titles = ", ".join(metric.title for metric in scenario.metrics)
            print(f"{scenario.key:<12}{titles}")
        return Exit.OK
    chosen = args.scenario or list(possible)
    for key in chosen:
        if key not in possible:
            raise MidairError(f"--scenario {key}: there are {', '.join(possible)}", code=Exit.USAGE)
    addresses = list(dict.fromkeys([args.server, *args.against]))
    scenarios = [scenario for key, scenario in possible.items() if key in chosen]
    _build()
    servers = {address: _reach(address) for address in addresses}
    samples = _run(scenarios, servers, args.repeat, args.scale)
    versions = {address: _version(samples, address) for address in addresses}
    if args.json:
        print(json.dumps(_report(scenarios, samples, versions), indent=1))
    else:
        print("  ".join(f"{address}: {version}" for address, version in versions.items()))
        print(_table(scenarios, samples, addresses))
    wrong = any(sample.error or any(sample.checks.values()) for sample in samples)
    return Exit.FAILED if wrong else Exit.OK


def _build() -> None:
    from bench import loadgen

    try:
        loadgen.build()
    except loadgen.LoadgenError as error:
        raise MidairError(str(error).strip(), code=Exit.FAILED) from None


def _reach(address: str) -> Address:
    """A server that answers there."""
    from bench.peers import Address, read_info

    host, port = config.split_address(address)
    try:
        said = read_info(port, ANSWER_S, host)
    except OSError as error:
        why = error.strerror or str(error) or "no answer"
        raise NotRunningError(
            f"nobody answers at {address} ({why}); is it running? (midair up)"
        ) from None
    if not said.startswith(b"INFO "):
        raise MidairError(f"{address} does not speak the NATS client protocol")
    return Address(host, port)


# ---- the run -------------------------------------------------------------------------------------


class _Progress:
    """One line that is written over on a terminal; elsewhere a line for each step."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._is_live = sys.stderr.isatty()

    def step(self, text: str) -> None:
        self._done += 1
        line = f"[{self._done}/{self._total}] {text}"
        if self._is_live:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _lend(server: Server) -> AbstractContextManager[Server]:
    return nullcontext(server)


def _run(
    scenarios: Sequence[Scenario], servers: dict[str, Address], repeat: int, scale: float
) -> list[Sample]:
    """Every scenario on every server in turn; who goes first alternates."""
    from bench.loadgen import LoadgenError
    from bench.scenarios import Sample

    samples: list[Sample] = []
    progress = _Progress(len(scenarios) * len(servers) * repeat)
    try:
        for scenario in scenarios:
            for repetition in range(repeat):
                turns = list(enumerate(servers.items()))
                for at, (address, server) in turns if repetition % 2 == 0 else reversed(turns):
                    progress.step(f"{scenario.key} {address} (run {repetition + 1})")
                    sample = Sample(scenario.key, f"{at}:{address}", repetition)
                    samples.append(sample)
                    try:
                        scenario.measure(sample, partial(_lend, server), scale)
                    except LoadgenError as error:
                        sample.error = str(error).removeprefix("loadgen: ")
    finally:
        progress.end()
    return samples


def _version(samples: Sequence[Sample], address: str) -> str:
    for sample in samples:
        for report in sample.reports:
            if sample.server.partition(":")[2] == address:
                return f"{report.get('server_name', '?')} {report.get('server_version', '?')}"
    return "?"


# ---- what is said --------------------------------------------------------------------------------


def _sides(scenario: Scenario, samples: Sequence[Sample], addresses: Sequence[str]) -> Any:
    from bench.table import side

    for metric in scenario.metrics:
        yield metric, [side(samples, str(at), scenario, metric) for at in range(len(addresses))]


def _table(
    scenarios: Sequence[Scenario], samples: Sequence[Sample], addresses: Sequence[str]
) -> str:
    from bench.table import by, number, percent, times

    head = ["scenario", "unit", addresses[0], "spread"]
    for address in addresses[1:]:
        head += [address, "spread", "ratio"]
    lines = [[*head, "lost/dup/order"]]
    for scenario in scenarios:
        for metric, sides in _sides(scenario, samples, addresses):
            first: Side = sides[0]
            cells = [metric.title, metric.unit, number(first.figure), percent(first.spread)]
            for other in sides[1:]:
                cells += [number(other.figure), percent(other.spread)]
                cells.append(times(by(first.figure, other.figure)))
            checks = dict.fromkeys(it.checks for it in sides)
            lines.append([*cells, " | ".join(checks)])
    text = "\n".join(columns(lines, left=(0, 1, len(lines[0]) - 1)))
    text += "\nMedians; spread is (highest - lowest) / median."
    if len(addresses) > 1:
        text += f" Ratio: {addresses[0]} by the other."
    for error in dict.fromkeys(sample.error for sample in samples if sample.error):
        text += f"\nfailed: {error}"
    return text


def _report(
    scenarios: Sequence[Scenario], samples: Sequence[Sample], versions: dict[str, str]
) -> dict[str, Any]:
    from dataclasses import asdict

    addresses = list(versions)
    rows = [
        {
            "scenario": scenario.key,
            "title": metric.title,
            "unit": metric.unit,
            "higher_is_better": metric.higher_is_better,
            "servers": {address: asdict(it) for address, it in zip(addresses, sides, strict=True)},
        }
        for scenario in scenarios
        for metric, sides in _sides(scenario, samples, addresses)
    ]
    return {
        "servers": versions,
        "rows": rows,
        "samples": [asdict(sample) for sample in samples],
    }


# ---- arguments -----------------------------------------------------------------------------------


def _address(text: str) -> str:
    address = text.removeprefix("nats://").rstrip("/")
    if config.split_address(address)[1] == 0:
        raise ValueError(f"{text}: port 0 is nobody's")
    return address
