"""The load generator from Python: build it, run it, read its JSON.

python -m bench.loadgen --build                       compile bench/loadgen if a source is newer
python -m bench.loadgen throughput --port 4222 ...    build and run, arguments as for the program

The programs lie beside their sources, or below ~/.cache/midair where that is not allowed.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.placement import Placement

HERE = Path(__file__).resolve().parent
COMPILE = ("gcc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")

EXIT_OK = 0
EXIT_CHECKS = 1  # lost, duplicated, reordered, misrouted or corrupt messages
EXIT_USAGE = 2
EXIT_SERVER = 3

# The program ends itself after --timeout; this much longer and something is wrong with it.
GRACE_S = 15.0

# Whose cores are looked at this often while a load runs, the first time sooner. Looking takes a
# millisecond of a core: where latency is measured it is done before and after.
SAMPLE_S = 0.25
FIRST_SAMPLE_S = 0.05
NOT_LOOKED_AT = ("pingpong", "paced")

Report = dict[str, Any]


def _directory() -> Path:
    """Where programs are built: beside the sources, or in the user's cache, by what they say."""
    if os.access(HERE, os.W_OK):
        return HERE
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return Path(cache) / "midair" / f"bench-{digest.hexdigest()[:16]}"


DIRECTORY = _directory()
PROGRAM = DIRECTORY / "loadgen"


class LoadgenError(Exception):
    """The program could not be built, or ended without a report."""


@dataclass(frozen=True)
class Outcome:
    """What one run gave: its exit code and its report."""

    code: int
    report: Report


def build(name: str = "loadgen", force: bool = False) -> Path:
    """Compiles loadgen or relay when a source is newer; several processes may do so at once."""
    sources = sorted(HERE.glob(f"{name}*.c"))
    inputs = [*sources, *HERE.glob(f"{name}*.h")]
    program = DIRECTORY / name
    if not force and program.exists():
        built = program.stat().st_mtime_ns
        if all(path.stat().st_mtime_ns < built for path in inputs):
            return program
    unfinished = DIRECTORY / f"{name}.{os.getpid()}.o"
    command = [*COMPILE, "-o", str(unfinished), *map(str, sources), "-lm"]
    try:
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LoadgenError(f"{name} does not compile:\n{done.stderr}")
        unfinished.replace(program)
    except FileNotFoundError as error:
        raise LoadgenError(
            f"a C compiler is needed to build {name}, and there is no gcc (apt install gcc)"
        ) from error
    except OSError as error:
        raise LoadgenError(f"{program} cannot be built: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return program


def arguments(mode: str, port: int, **options: object) -> list[str]:
    """`arguments("paced", 4222, server_pids=[1, 2], rate=10)` as a command line with --json."""
    words = [str(PROGRAM), mode, "--json", "--port", str(port)]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return words


def _outcome(code: int, output: str, errors: str) -> Outcome:
    if code not in (EXIT_OK, EXIT_CHECKS) or not output.strip():
        raise LoadgenError(errors.strip() or f"loadgen ended with code {code} and said nothing")
    report: Report = json.loads(output.strip().splitlines()[-1])
    return Outcome(code, report)


def _await_end(pid: int, patience_s: float) -> None:
    """Until the child has ended; it is not reaped, so that it can still be looked at."""
    ended = os.pidfd_open(pid)
    try:
        select.select([ended], [], [], patience_s)
    finally:
        os.close(ended)


def run(mode: str, port: int, *, timeout: float = 60.0, **options: object) -> Outcome:
    """Runs one mode to its end. A server that does not answer raises LoadgenError.

    The report says in `placement` on which cores the generator and the server's processes ran.
    """
    build()
    pids = options.get("server_pids")
    words = arguments(mode, port, timeout=timeout, **options)
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    placement = Placement(
        generator=[process.pid], server=list(pids) if isinstance(pids, list | tuple) else []
    )
    patience = timeout + GRACE_S
    wait = FIRST_SAMPLE_S
    try:
        if mode in NOT_LOOKED_AT:
            _await_end(process.pid, patience)
            patience = 0.0
            placement.sample()
        while True:
            try:
                output, errors = process.communicate(timeout=wait)
                break
            except subprocess.TimeoutExpired:
                placement.sample()
                patience -= wait
                wait = SAMPLE_S
                if patience < 0:
                    raise LoadgenError(
                        f"loadgen {mode} did not keep its own timeout of {timeout} s"
                    ) from None
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    outcome = _outcome(process.returncode, output, errors)
    outcome.report["placement"] = placement.report()
    return outcome


class Idle:
    """A running `idle`: the connections are open until finish() is called."""

    def __init__(self, process: subprocess.Popen[str], patience_s: float) -> None:
        self._process = process
        self._patience_s = patience_s

    def finish(self) -> Outcome:
        """Lets it publish its one message, and returns what it saw."""
        output, errors = self._process.communicate("go\n", timeout=self._patience_s)
        return _outcome(self._process.returncode, output, errors)


@contextmanager
def idle(port: int, *, timeout: float = 120.0, **options: object) -> Iterator[Idle]:
    """Opens the connections; the body runs when all of them are ready."""
    build()
    process = subprocess.Popen(
        arguments("idle", port, timeout=timeout, **options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                _, errors = process.communicate(timeout=GRACE_S)
                raise LoadgenError(errors.strip() or "loadgen idle ended and said nothing")
            if json.loads(line).get("event") != "ready":
                raise LoadgenError(f"loadgen idle said {line.strip()!r} instead of being ready")
            yield Idle(process, timeout + GRACE_S)
        finally:
            if process.poll() is None:
                process.kill()


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        build(force="--force" in words)
    except LoadgenError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    if "--build" in words:
        print(PROGRAM)
        return EXIT_OK
    return subprocess.run([str(PROGRAM), *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
