"""bench.fair, small: connections are where they should be, and every table has its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fair import jain
from tests.support.instance import ROOT

pytestmark = pytest.mark.slow


def test_every_table_once(tmp_path: Path) -> None:
    path = tmp_path / "fair.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.fair", "--small", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [row["spread"] for row in found["shares"]] == ["1+2", "2", "1+1"]
    assert all(row["each_s"] > 0 and row["lowest"] > 0 for row in found["shares"])
    assert [row["server"] for row in found["flood"]] == ["midair", "nats-server"]
    assert "| 1+2 | messages | " in done.stdout
    assert "| nats-server | " in done.stdout


def test_the_index_tells_equal_from_unequal() -> None:
    assert jain([5, 5, 5]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 0
