"""Other releases, for upgrades: a second one that is built for real, in a copy of the tree, and
copies of that one that are broken on purpose in one place. The fixtures are in tests/parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.instance import ROOT

NEXT = "0.9.1"
BROKEN = "0.9.2"
PACKAGES = ("midair", "router", "dispatcher", "connmgr", "native")
BUILD_S_MAX = 300

Broken = Callable[[str, str], Path]


def patch(place: Path, path: str, pattern: str, new: str) -> None:
    file = place / path
    text, count = re.subn(pattern, lambda _match: new, file.read_text(), count=1)
    assert count == 1, f"{path}: no {pattern}"
    file.write_text(text)


def build(place: Path) -> None:
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


def make_second(place: Path) -> Path:
    """A second version, built in a copy of the tree."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            place / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o", "_midair.c"),
        )
    patch(place, "midair/version.py", r'"\d[^"]*"', f'"{NEXT}"')
    build(place)
    return place


def make_broken(second: Path, place: Path, path: str, code: str) -> Path:
    """One with some code added to the end of one file."""
    shutil.copytree(second, place, ignore=shutil.ignore_patterns("__pycache__"))
    patch(place, "midair/version.py", re.escape(NEXT), BROKEN)
    with (place / path).open("a") as file:
        file.write(code)
    return place
