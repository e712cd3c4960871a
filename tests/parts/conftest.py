"""Other releases to upgrade to (tests/support/releases.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.releases import Broken, make_broken, make_second


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second version, built in a copy of the tree."""
    return make_second(tmp_path_factory.mktemp("second"))


@pytest.fixture
def broken(second: Path, tmp_path: Path) -> Broken:
    """Makes a version with some code added to the end of one file."""

    def make(path: str, code: str) -> Path:
        return make_broken(second, tmp_path / "broken", path, code)

    return make
