"""Every test has a time limit; one that hangs is named, and nothing is left of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from midair import names
from tests.support.instance import PATIENCE_S, ROOT, eventually

HANGS = {
    "waiting": "    threading.Event().wait()\n",
    "inside C": "    sum(itertools.repeat(1))\n",  # looks at no signal
    "in a fixture": "",
}
TEST = """
import itertools, subprocess, sys, threading
from pathlib import Path
import pytest

@pytest.fixture
def slow_to_end():
    yield
    {teardown}

def test_hangs(make_midair, slow_to_end):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    instance = make_midair()
    Path({report!r}).write_text(f"{{instance.name}} {{child.pid}}")
{body}"""


@pytest.mark.parametrize("how", HANGS)
def test_a_test_that_hangs_is_named_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    """Also as a background job of a script, with SIGINT ignored."""
    report = tmp_path / "report"
    teardown = "threading.Event().wait()" if how == "in a fixture" else "pass"
    path = tmp_path / "test_hanging.py"
    path.write_text(TEST.format(body=HANGS[how], report=str(report), teardown=teardown))
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--timeout", "5", str(path)]
    options = ("-q", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"))
    quoted = " ".join([sys.executable, "-m", "pytest", *options, *words])
    done = subprocess.run(
        ["sh", "-c", f"{quoted} & wait $!"],
        cwd=ROOT,
        env={**os.environ, "MIDAIR_TEST_GRACE_S": "2"},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "test_hangs" in said
    assert re.search("Timeout|hangs beyond its time limit", said), said
    name, child = report.read_text().split()
    eventually(
        lambda: not [*names.SHM.glob(f"midair*.{name}.*"), *is_alive(int(child))],
        "nothing is left",
    )


def is_alive(pid: int) -> list[int]:
    """Of a process that sleeps: itself, unless it is gone or a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if state in "ZX" else [pid]
