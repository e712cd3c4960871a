"""`python -m tests.fuzz [SECONDS]`: replays what is known, then fuzzes each target for its share.

Exits with 1 if there was a finding. README.md says what to do with one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import seeds
from tests.fuzz.child import run
from tests.fuzz.parser_build import ROOT, build, replay

HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "fuzz"
# The parser has half of the time, what reads the control socket most of the rest.
SHARES = {
    "parser": 0.5,
    "control": 0.2,
    "connect": 0.1,
    "keeper": 0.1,
    "notify": 0.05,
    "handoff": 0.05,
}
INPUT_BYTES_MAX = 16384
HANG_S = 10  # an input that takes longer is a finding

# AFL++ wants a machine of its own: here it shares one.
AFL = {
    "AFL_SKIP_CPUFREQ": "1",
    "AFL_NO_AFFINITY": "1",
    "AFL_NO_UI": "1",
    "AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES": "1",
    "AFL_BENCH_UNTIL_CRASH": "",
}


@dataclass
class Result:
    """What came of one target."""

    target: str
    executions: int = 0
    seconds: int = 0
    findings: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        found = f"{len(self.findings)} findings" if self.findings else "no findings"
        return f"{self.target}: {self.executions} executions in {self.seconds} s, {found}"


def fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write_inputs(target: str, to: Path) -> Path:
    """All known inputs of a target as files."""
    fresh(to)
    for name, data in seeds.inputs(target).items():
        (to / name).write_bytes(data)
    return to


def fuzz_parser(seconds: int) -> Result:
    """AFL++ on parser.c."""
    out = OUT / "parser"
    binary = build("afl-clang-fast", OUT)
    inputs = write_inputs("parser", OUT / "parser-inputs")
    environ = {key: value for key, value in {**os.environ, **AFL}.items() if value}
    shutil.rmtree(out, ignore_errors=True)
    words = ["afl-fuzz", "-i", str(inputs), "-o", str(out), "-V", str(seconds)]
    words += ["-x", str(HERE / "dictionaries" / "parser.dict"), "-G", str(INPUT_BYTES_MAX)]
    log = OUT / "parser.log"
    code = run([*words, "--", str(binary)], log, environ)
    stats = out / "default" / "fuzzer_stats"
    if not stats.exists():
        sys.exit(f"afl-fuzz ended with {code}:\n{log.read_text(errors='replace')[-3000:]}")
    said = dict(re.findall(r"^(\w+)\s*: (.*)$", stats.read_text(), re.MULTILINE))
    found = [*out.glob("default/crashes/id*"), *out.glob("default/hangs/id*")]
    return Result("parser", int(said["execs_done"]), int(said["run_time"]), sorted(found))


def fuzz_python(target: str, seconds: int) -> Result:
    """Atheris (libFuzzer) on one of targets.py."""
    inputs = write_inputs(target, OUT / f"{target}-inputs")
    grown = fresh(OUT / target / "corpus")
    findings = fresh(OUT / target / "findings")
    words = [sys.executable, "-m", "tests.fuzz.atheris_run", target]
    words += [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", f"-timeout={HANG_S}"]
    words += ["-print_final_stats=1", "-rss_limit_mb=2048", f"-artifact_prefix={findings}/"]
    dictionary = HERE / "dictionaries" / f"{target}.dict"
    if dictionary.exists():
        words.append(f"-dict={dictionary}")
    log = OUT / f"{target}.log"
    code = run([*words, str(grown), str(inputs)], log)
    text = log.read_text(errors="replace")
    executed = re.findall(r"stat::number_of_executed_units:\s*(\d+)", text)
    found = sorted(findings.glob("*"))
    if not executed and not found:
        sys.exit(f"{target}: the fuzzer ended with {code}:\n{text[-3000:]}")
    return Result(target, int(executed[-1]) if executed else 0, seconds, found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seconds", type=int, nargs="?", default=60, help="in all (default 60)")
    parser.add_argument("--targets", default=",".join(SHARES), help="some of " + ",".join(SHARES))
    args = parser.parse_args()
    targets = [name for name in SHARES if name in args.targets.split(",")]
    OUT.mkdir(parents=True, exist_ok=True)
    known = len(seeds.inputs("parser"))
    if failed := replay(write_inputs("parser", OUT / "parser-inputs"), OUT):
        print(f"fuzz: a known input of the parser breaks it:\n{failed}", file=sys.stderr)
        return 1
    print(f"fuzz: {known} known inputs of the parser replayed", flush=True)
    whole = sum(SHARES[name] for name in targets)
    results = []
    for name in targets:
        seconds = max(2, round(args.seconds * SHARES[name] / whole))
        results.append(fuzz_parser(seconds) if name == "parser" else fuzz_python(name, seconds))
        print(f"fuzz: {results[-1]}", flush=True)
        for path in results[-1].findings:
            print(f"fuzz:   {path}", flush=True)
    executions = sum(result.executions for result in results)
    findings = sum(len(result.findings) for result in results)
    print(f"fuzz: {executions} executions, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
