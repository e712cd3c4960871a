"""A process that feeds inputs, and what it leaves."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from midair.process import ipc
from tests.fuzz.parser_build import ROOT


def name_of(pid: int) -> str:
    """What its instance is called."""
    return f"fuzz-{pid}"


def run(command: Sequence[str], log: Path, environ: Mapping[str, str] = os.environ) -> int:
    """Its exit code. What it leaves is removed: libFuzzer ends without a chance to do so."""
    with log.open("wb") as out, tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        here = {**environ, "TMPDIR": place}
        process = subprocess.Popen(command, cwd=ROOT, env=here, stdout=out, stderr=out)
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()
            ipc.remove_all(name_of(process.pid))
