"""The release before this one, taken from the history of the repository and built for real.

Tests of migrations start instances with it. It is made once, whatever the number of sessions that
run side by side, and thrown away with the first of them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.instance import ROOT

COMMIT = "9ea3aaf1b5801fe49a0f47c572f35d6cb29f00b3"  # the last one of 0.1.0
VERSION = "0.1.0"
PACKAGES = ("midair", "router", "dispatcher", "connmgr", "native", "spark_jobs")
BUILD_S_MAX = 170


def previous_release(factory: pytest.TempPathFactory) -> Path:
    """The directory with its packages."""
    base = factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    place = shared / "release-0.1"
    with (shared / "release-0.1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "built").exists():
            _export(place)
            _build(place)
            (place / "built").touch()
    return place


def _export(place: Path) -> None:
    done = subprocess.run(
        ["git", "archive", COMMIT, *PACKAGES],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == 0, (
        f"the history of this repository lacks {COMMIT[:7]}, the last commit of {VERSION}, which "
        f"these tests upgrade from; fetch it whole (git fetch --unshallow): {done.stderr.decode()}"
    )
    place.mkdir()
    subprocess.run(["tar", "-x", "-C", str(place)], input=done.stdout, check=True)


def _build(place: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("MIDAIR_NATIVE", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "native/build.py"],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
    )
    assert done.returncode == 0, done.stderr
