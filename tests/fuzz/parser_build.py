"""Compiles parser.c with the NATS protocol, under ASan and UBSan, and replays inputs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATS = ROOT / "native" / "src" / "protocol" / "nats"


def build(compiler: str, out: Path, parse: Path = NATS / "parse.c") -> Path:
    """The program, made by `compiler`: one that replays files, or with afl-clang-fast a target."""
    made = out / f"parser-{compiler}"
    native = ROOT / "native" / "src"
    files = [str(ROOT / "tests" / "fuzz" / "parser.c"), str(parse)]
    files += [str(path) for path in sorted(NATS.glob("*.c")) if path.name != "parse.c"]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fno-strict-aliasing", "-fwrapv", "-Wno-format", f"-I{native}"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, *flags, *files, "-o", str(made)], check=True, capture_output=True)
    return made


def replay(inputs: Path, out: Path, parse: Path = NATS / "parse.c") -> str:
    """Feeds every file of a folder to the parser: what it said if it broke."""
    program = build("gcc", out, parse)
    files = sorted(str(path) for path in inputs.iterdir())
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program), *files], env=environ, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr[-3000:]
