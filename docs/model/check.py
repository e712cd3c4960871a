"""Checks midair.pml: the correct model in every scenario, and that every seeded bug is found.

    python docs/model/check.py [NAME ...]

prints a table and exits 1 unless every scenario was searched to the end without an error and
every bug led to one. NAME is a scenario ("relay") or a bug ("bug-8"); all of them if none is
given. Needs `spin` and `gcc`. README.md says what the scenarios and bugs are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "midair.pml"
NEEDED = {"spin": "spin", "gcc": "gcc libc6-dev"}
MEMORY_MB = 2000
DEPTH = 20000  # of the search: a run is some 400 steps long, a longer one is an error

# What is not said here is the default at the top of midair.pml.
SCENARIOS: dict[str, dict[str, str | int]] = {
    "both": {"MSGS0": 2, "MSGS1": 1, "CRASHES": 2},
    "stream": {"MSGS0": 3, "MSGS1": 0, "CRASHES": 3},
    "relay": {
        "MSGS0": 0,
        "MSGS1": 3,
        "CRASHES": 3,
        "M2": "BIG+TO_A+TO_C",
        "M2_OR": "TO_A+TO_C",
        "M3": "TO_A+TO_C",
    },
    "shapes": {
        "MSGS0": 2,
        "MSGS1": 1,
        "CRASHES": 2,
        "M1": "BIG+TO_C",
        "M1_OR": "TO_A",
        "M2": "BIG+TO_A+TO_B",
        "M2_OR": 0,
        "M3": "TO_A",
        "M3_OR": "BIG+TO_C",
    },
    "copies": {
        "MSGS0": 1,
        "MSGS1": 2,
        "CRASHES": 2,
        "M1": "BIG+TO_A+TO_B+TO_C",
        "M2": "BIG+TO_A+TO_B",
        "M3": "TO_A+TO_B",
    },
    "batches": {"MSGS0": 3, "MSGS1": 0, "CRASHES": 2, "BATCH": 2, "QUEUE": 2, "PER_CHUNK": 2},
    "long": {
        "MSGS0": 1,
        "MSGS1": 1,
        "CRASHES": 2,
        "M1": "BIG+LONG+TO_A+TO_B+TO_C",
        "M2": "TO_A",
    },
    "lists": {
        "MSGS0": 1,
        "MSGS1": 1,
        "CRASHES": 1,
        "M1": "BIG+LONG+TO_A+TO_B+TO_C",
        "M2": "BIG+LONG+TO_A+TO_B+TO_C",
    },
    "leaves": {
        "MSGS0": 2,
        "MSGS1": 1,
        "CRASHES": 2,
        "LEAVES": 1,
        "M1": "BIG+TO_C",
        "M2": "BIG+TO_A+TO_C",
        "M3": "TO_C",
    },
}

# Number, scenario in which it shows, what was changed.
BUGS: list[tuple[int, str, str]] = [
    (1, "both", "orders are redone without comparing generations"),
    (2, "both", "pop before relinquish"),
    (3, "both", "`done` stored before relinquishing"),
    (4, "both", "batches that come twice are not dropped"),
    (5, "both", "a counter in the place of the bits"),
    (6, "both", "a live bit beside the word, cleared by who completed it"),
    (7, "stream", "the same, and the owner takes complete words for free"),
    (8, "relay", "restart lets go of written bodies without comparing generations"),
    (9, "both", "restart pops what was written only after it took new orders"),
    (10, "leaves", "restart forgets the output of a connection that had ended"),
    (11, "long", "one `open_handle` for lists of all sources"),
    (12, "both", "`applied` is not committed together with the output"),
    (13, "both", "`sent` stored before mq_send"),
    (14, "both", "position in the stream committed before the reference"),
    (15, "both", "restart writes from the journal's position, not the kernel's"),
    (16, "both", "restart does not finish a committed redo log"),
    (17, "both", "`messages` is not committed together with the reference"),
    (18, "both", "restart does not look for a batch in the inbox"),
    (19, "both", "big bodies are let go of when ordered, like small ones"),
    (20, "both", "the router stores `done` after the orders"),
]

# The assertion that failed, by what only its text contains.
PROPERTIES = [
    (r"w_gen\[h_entry", "freed while needed"),
    (r"in_pos==", "not read: no entry was freed"),
    (r"messages\[k\]", "leaked"),
    (r"\(got\[\w+\]&\(1<<k\)\)!=0", "not delivered"),
    (r"\(got\[\w+\]&\(1<<i\)\)==0", "delivered twice"),
    (r"got\[\w+\]&\(\(2<<", "out of order"),
    (r"inbox.*==\((done|last)", "gap in the sequence"),
]


@dataclass(frozen=True)
class Variant:
    name: str
    scenario: str
    bug: int
    about: str

    def defines(self) -> list[str]:
        values = {**SCENARIOS[self.scenario], "BUG": self.bug}
        if self.bug:
            values["CRASHES"] = 1  # is enough for every one of them, and quicker
        return [f"-D{key}={value}" for key, value in values.items()]


@dataclass(frozen=True)
class Result:
    variant: Variant
    states: int
    seconds: float  # CPU time of the search
    verdict: str
    as_expected: bool


VARIANTS = [Variant(name, name, 0, "") for name in SCENARIOS] + [
    Variant(f"bug-{number}", scenario, number, about) for number, scenario, about in BUGS
]


class ModelError(Exception):
    """The model could not be checked at all."""


def missing() -> str | None:
    """What to say when a program is not there, or None."""
    lacking = [package for program, package in NEEDED.items() if not shutil.which(program)]
    if not lacking:
        return None
    return f"the model needs: sudo apt-get install -y {' '.join(lacking)}"


def _run(*command: str, cwd: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _verdict(variant: Variant, output: str) -> tuple[str, bool]:
    errors = re.search(r"errors: (\d+)", output)
    if not errors:
        raise ModelError(f"{variant.name}: no verdict\n{output}")
    failed = re.search(r"pan:1: assertion violated (.*) \(at depth", output)
    if failed:
        text = failed.group(1)
        return next((name for key, name in PROPERTIES if re.search(key, text)), text), (
            variant.bug != 0
        )
    # Anything else pan complains about (depth, memory, a bad end state) is no result of ours.
    complaint = re.search(r"^(?:pan:\s?\d|error|Warning|pan: reached).*", output, re.MULTILINE)
    if complaint or errors.group(1) != "0" or "Search not completed" in output:
        return complaint.group(0) if complaint else "search not completed", False
    return ("not found" if variant.bug else "verified"), variant.bug == 0


def _search(where: str) -> tuple[str, float]:
    """Runs the search; what it said, and the CPU time it took."""
    output = Path(where, "output")
    with output.open("w") as to:
        pan = subprocess.Popen(["./pan", f"-m{DEPTH}", "-w23"], cwd=where, stdout=to, stderr=to)
        _, status, usage = os.wait4(pan.pid, 0)
        pan.returncode = os.waitstatus_to_exitcode(status)
    if pan.returncode != 0:
        raise ModelError(f"pan ended with {pan.returncode}\n{output.read_text()}")
    return output.read_text(), usage.ru_utime + usage.ru_stime


def check(variant: Variant) -> Result:
    """Generates, compiles and runs the search of one variant."""
    # A bug is found within seconds: compiling fast matters more than running fast.
    optimise = "-O0" if variant.bug else "-O2"
    with tempfile.TemporaryDirectory(prefix="midair-model-") as where:
        _run("spin", "-a", *variant.defines(), str(MODEL), cwd=where)
        _run(
            *("gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}"),
            *("-o", "pan", "pan.c"),
            cwd=where,
        )
        output, seconds = _search(where)
    stored = re.search(r"([\d.e+]+) states, stored", output)
    if not stored:
        raise ModelError(f"{variant.name}: no count of states\n{output}")
    verdict, as_expected = _verdict(variant, output)
    return Result(variant, int(float(stored.group(1))), seconds, verdict, as_expected)


def main(names: list[str]) -> int:
    known = {variant.name: variant for variant in VARIANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no such variant: {' '.join(unknown)} (there are: {' '.join(known)})")
        return 2
    lacking = missing()
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    chosen = [known[name] for name in names] or VARIANTS
    unexpected = 0
    print(f"{'variant':<8} {'scenario':<8} {'states':>9} {'seconds':>7}  verdict")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(check, chosen):
            variant = result.variant
            about = f" ({variant.about})" if variant.about else ""
            mark = "" if result.as_expected else "UNEXPECTED: "
            unexpected += not result.as_expected
            print(
                f"{variant.name:<8} {variant.scenario:<8} {result.states:>9}"
                f" {result.seconds:>7.1f}  {mark}{result.verdict}{about}",
                flush=True,
            )
    print(f"{len(chosen)} variants, {unexpected} not as expected")
    return 1 if unexpected else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ModelError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
