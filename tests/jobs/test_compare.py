"""compare_runs: says slower when it is, and says nothing when it is only another day."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from midair.errors import MidairError
from spark_jobs import compare_runs
from spark_jobs.generate import generate
from tests.support.spark import SMALL, durations, read, records_of, run_of, spark

# py4j leaves the closing of its sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

BASE = replace(SMALL, run="base", event_every_s=0, records=60_000, rate=6_000)
OTHER = replace(BASE, run="other", seed=2)
SLOW = replace(BASE, run="slow", seed=3, slowdown=1.2)


def test_slower_same_and_faster(tmp_path: Path) -> None:
    loads = [BASE, OTHER, SLOW]
    out = tmp_path / "out"
    result = compare_runs.compare(
        spark(), [str(run_of(load)) for load in loads], str(out), 0.1, resamples=24, quiet=True
    )
    assert result["slower"]
    assert result["verdict"].startswith("other is as fast as base: server p50 ")
    assert "; slow is slower than base: server p50 +" in result["verdict"]

    rows = {(row["run"], row["stage"], row["figure"]): row for row in read(out, "differences")}
    for load in (OTHER, SLOW):
        for stage in ("server", "total", "queue"):
            for figure, share in (("p50", 50), ("p99", 99)):
                row = rows[load.run, stage, figure]
                exact = [
                    np.percentile(durations(records_of(which), stage), share)
                    for which in (BASE, load)
                ]
                assert row["base_ns"] == pytest.approx(exact[0], rel=0.01)
                assert row["run_ns"] == pytest.approx(exact[1], rel=0.01)
                assert row["change"] == pytest.approx(exact[1] / exact[0] - 1, abs=0.02)
                # An interval that holds the truth, give or take what a bucket hides.
                true = load.slowdown - 1
                assert row["low"] - 0.02 < true < row["high"] + 0.02
                assert 0 < row["high"] - row["low"] < 0.15
    assert (out / "compare.html").stat().st_size > 1_000_000

    back = compare_runs.compare(
        spark(),
        [str(run_of(SLOW)), str(run_of(BASE))],
        str(tmp_path / "back"),
        0.1,
        resamples=24,
        quiet=True,
    )
    assert not back["slower"]
    assert back["verdict"].startswith("base is faster than slow")


def test_a_run_too_short_to_judge_is_refused(tmp_path: Path) -> None:
    generate(tmp_path / "short", replace(BASE, run="short", records=6))
    with pytest.raises(MidairError, match="at least 10 are needed"):
        compare_runs.compare(
            spark(),
            [str(run_of(BASE)), str(tmp_path / "short")],
            str(tmp_path / "out"),
            0.05,
            quiet=True,
        )
