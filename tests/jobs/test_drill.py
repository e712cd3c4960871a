"""The drill: a short one from the start to the page, and what it says when a promise is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midair.drill.clients import Stream
from midair.drill.command import verdict
from midair.trace import schema
from tests.support.instance import ROOT, cli

pytestmark = pytest.mark.slow

PATIENCE_S = 1200  # Spark takes minutes on a machine that has something else to do
KEPT = {"sent": 10, "delivered": 20, "lost": 0, "doubled": 0, "reordered": 0}
KEPT |= {"connections": 5, "connections_ended": 0}


def test_a_short_drill_from_the_start_to_the_page(tmp_path: Path) -> None:
    words = ["--minutes", "0.2", "--rate", "300", "--connections", "4", "--out", str(tmp_path)]
    done = cli("drill", *words, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all promises kept" in done.stdout
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    manifest = json.loads((run / schema.MANIFEST).read_text())
    checks = manifest["checks"]
    assert checks["sent"] > 0
    assert checks["delivered"] == 2 * checks["sent"]
    assert manifest["counts"]["records"] > checks["sent"]
    for what in ("upgraded router", "upgraded dispatcher", "upgraded connmgr", "upgraded keeper"):
        assert what in done.stdout
    assert "killed router" in done.stdout
    (page,) = run.glob("**/report.html")
    assert f"see {page}" in done.stdout
    facts = json.loads((page.parent / "report.json").read_text())
    assert facts["complete"]


def test_a_broken_promise_is_counted_and_said() -> None:
    assert verdict(KEPT)[0]
    for name in ("lost", "doubled", "reordered", "connections_ended"):
        kept, text = verdict({**KEPT, name: 3})
        assert not kept
        assert f"3 {name.replace('_', ' ')}" in text


def test_the_checks_of_the_clients() -> None:
    stream = Stream()
    for number in (0, 1, 3, 2, 3, 6):
        stream.add(number)
    assert (stream.reordered, stream.doubled) == (1, 1)
    assert stream.lost(8) == 3  # 4, 5 and 7


def test_bench_trace_small(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.trace", "--small", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["records"] > 0
    for row in ("not compiled in", "off", "every message"):
        assert f"| {row} | " in done.stdout
