"""Instructions per delivery of every hot function, counted by valgrind's callgrind.

    python -m bench.instructions              count, and compare with bench/instructions.json
    python -m bench.instructions --update     count, and write that file
    python -m bench.instructions --show       what the file says

The work is fixed (bench/instructions_load.py), so unlike times the counts are the same on a busy
machine: a change of more than TOLERANCE is a change of the code. Counted is what the functions of
native/ execute themselves; what the C library executes for them is shown but not compared, since
it depends on the processor. Counts of another compiler are not compared either.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.instructions_load import MESSAGES, ROUNDS, UNMEASURED, WORKLOADS
from midair.shown import columns

HERE = Path(__file__).resolve().parent
FILE = HERE / "instructions.json"
TOLERANCE = 0.05
SMALL = 2.0  # instructions a delivery: a function with fewer gets no line
SLACK = 1.0  # a change by fewer than this is noise
TURNS = ("connmgr_turn", "router_turn")
OURS = "_midair"  # in the name of the shared object
LIMIT_S = 300.0  # it takes about ten on an idle machine
Counts = dict[str, dict[str, dict[str, float]]]  # workload, stage, function


class CountError(Exception):
    """The counts cannot be made."""


@dataclass
class Profile:
    """What one part of callgrind's output says: self cost by (object, function)."""

    cost: dict[tuple[str, str], int] = field(default_factory=dict)


def parse(text: str) -> Profile:
    """Reads callgrind's format: costs of lines that follow `calls=` belong to the callee."""
    profile = Profile()
    names: dict[str, str] = {}
    objects: dict[str, str] = {}
    here, function = "", ""
    skip = False

    def name(table: dict[str, str], said: str) -> str:
        found = re.match(r"\((\d+)\)(?: (.*))?$", said)
        if found is None:
            return said
        if found.group(2) is not None:
            table[found.group(1)] = found.group(2)
        return table[found.group(1)]

    for line in text.splitlines():
        if line.startswith("ob="):
            here = name(objects, line[3:])
        elif line.startswith("cob="):
            name(objects, line[4:])
        elif line.startswith("fn="):
            function = name(names, line[3:])
        elif line.startswith("cfn="):
            name(names, line[4:])
        elif line.startswith("calls="):
            skip = True
        elif re.match(r"[-+*\d]", line):
            if not skip:
                fields = line.split()
                key = (here, function)
                profile.cost[key] = profile.cost.get(key, 0) + int(fields[1])
            skip = False
    return profile


def count(python: str = sys.executable) -> Counts:
    """Runs the work under callgrind: instructions per delivery by workload, stage, function."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise CountError("valgrind is needed to count instructions: apt install valgrind")
    with tempfile.TemporaryDirectory(prefix="midair-instructions-") as name:
        out, labels = Path(name) / "out", Path(name) / "turns"
        words = [valgrind, "--tool=callgrind", f"--callgrind-out-file={out}"]
        words += ["--log-file=" + str(Path(name) / "log")]
        for function in TURNS:
            words += [f"--toggle-collect={function}", f"--dump-before={function}"]
        words += [python, "-m", "bench.instructions_load", str(labels)]
        try:
            done = subprocess.run(
                words, cwd=HERE.parent, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise CountError(f"the work under valgrind took more than {LIMIT_S:g} s") from None
        if done.returncode != 0 or not labels.exists():
            raise CountError(f"the work under valgrind failed:\n{done.stderr[-2000:]}")
        turns = labels.read_text().splitlines()
        return _collect(out, turns)


def _collect(out: Path, turns: list[str]) -> Counts:
    """A part is written before each turn, so it has the costs of the turn before."""
    sums: dict[str, dict[str, dict[str, int]]] = {
        workload: {stage: {} for stage in load.stages} for workload, load in WORKLOADS.items()
    }
    for at, label in enumerate(turns):
        if label == UNMEASURED:
            continue
        workload, stage = label.split()
        part = out.with_name(f"{out.name}.{at + 2}") if at + 1 < len(turns) else out
        if not part.exists():
            raise CountError(f"callgrind wrote no part for turn {at + 1} of {len(turns)}")
        into = sums[workload][stage]
        for (where, function), cost in parse(part.read_text()).cost.items():
            key = re.sub(r"\.(constprop|isra|part|cold)\.\d+|'\d+", "", function)
            key = key if OURS in where else "(C library)"
            into[key] = into.get(key, 0) + cost
    return {
        workload: {
            stage: {
                function: round(cost / (ROUNDS * MESSAGES * WORKLOADS[workload].fan), 2)
                for function, cost in sorted(costs.items(), key=lambda item: -item[1])
            }
            for stage, costs in stages.items()
        }
        for workload, stages in sums.items()
    }


# ---- what is kept, and the comparison ------------------------------------------------------------


def total(functions: dict[str, float]) -> float:
    return sum(cost for name, cost in functions.items() if not name.startswith("("))


def compiler() -> str:
    """What the counts depend on besides the sources."""
    done = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True, check=False)
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=False)
    return f"gcc {done.stdout.strip()} {machine.stdout.strip()}"


def kept(counts: Counts) -> Counts:
    """Without what is too small to be looked at, and without what is not ours."""
    return {
        workload: {
            stage: {
                name: cost
                for name, cost in functions.items()
                if cost >= SMALL and not name.startswith("(")
            }
            | {"total": round(total(functions), 2)}
            for stage, functions in stages.items()
        }
        for workload, stages in counts.items()
    }


def differs(now: float, before: float) -> bool:
    return abs(now - before) > max(SLACK, TOLERANCE * before)


def compare(now: Counts, before: Counts) -> list[str]:
    """One line for everything that changed by more than the tolerance."""
    lines = []
    for workload, stages in now.items():
        for stage, functions in stages.items():
            known = before.get(workload, {}).get(stage, {})
            for name in dict.fromkeys((*known, *functions)):
                is_, was = functions.get(name, 0.0), known.get(name, 0.0)
                if differs(is_, was):
                    change = f"{is_ / was - 1:+.0%}" if was else "new"
                    lines.append(f"{workload} {stage} {name}: {was:g} -> {is_:g} ({change})")
    return lines


def show(counts: Counts) -> str:
    """The counts as a table: a block for each stage, the totals of a workload at its end."""
    lines = [["workload", "stage", "function", "instructions"]]
    for workload, stages in counts.items():
        for stage, functions in stages.items():
            for name, cost in functions.items():
                if cost >= SMALL and name != "total":
                    lines.append([workload, stage, name, f"{cost:.1f}"])
            lines.append([workload, stage, "total", f"{total_of(functions):.1f}"])
        everything = sum(total_of(functions) for functions in stages.values())
        lines.append([workload, "all", "total", f"{everything:.1f}"])
    return "\n".join(columns(lines, left=(0, 1, 2)))


def total_of(functions: dict[str, float]) -> float:
    return functions["total"] if "total" in functions else total(functions)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions",
        description="Instructions per delivery, compared with those on file.",
    )
    parser.add_argument("--update", action="store_true", help="write the file anew")
    parser.add_argument("--show", action="store_true", help="print the file, count nothing")
    parser.add_argument("--file", type=Path, default=FILE, help="default: %(default)s")
    options = parser.parse_args(argv)
    try:
        stored = json.loads(options.file.read_text()) if options.file.exists() else None
        if options.show:
            if stored is None:
                raise CountError(f"{options.file} is not there: make it with --update")
            print(f"{stored['compiler']}, instructions per delivery")
            print(show(stored["counts"]))
            return 0
        counts = count()
    except CountError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{compiler()}, instructions per delivery")
    print(show(counts))
    if options.update:
        about = {"compiler": compiler(), "counts": kept(counts)}
        options.file.write_text(json.dumps(about, indent=1) + "\n")
        print(f"written: {options.file}")
        return 0
    if stored is None:
        print(f"{options.file} is not there: make it with --update", file=sys.stderr)
        return 2
    if stored["compiler"] != compiler():
        print(f"not compared: the counts on file are of {stored['compiler']}")
        return 0
    changes = compare(kept(counts), stored["counts"])
    for line in changes:
        print(f"changed: {line}", file=sys.stderr)
    if changes:
        print(
            "if that is wanted, write the file anew: make instructions INSTRUCTIONS_ARGS=--update",
            file=sys.stderr,
        )
        return 1
    print(f"as on file, within {TOLERANCE:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
