"""bench.slow, small: every server has a row, and the sleeper is noticed to be one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.slow import Result
from tests.support.instance import ROOT

pytestmark = pytest.mark.slow


def test_every_server_once(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.slow", "--small", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    names = ["Midair, disconnect", "Midair, drop-newest", "nats-server"]
    assert [row["server"] for row in found] == names
    for row in found:
        assert f"| {row['server']} | " in done.stdout
        assert len(row["without"]) == len(row["with_one"]) == 1


def test_the_cost_is_the_median_of_the_pairs() -> None:
    assert Result("x", [100, 200, 100], [90, 100, 95]).cost == 1 - 0.9
