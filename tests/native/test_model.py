"""The protocol model: correct in every scenario, and every seeded bug is found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECK = Path(__file__).resolve().parents[2] / "docs" / "model" / "check.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_check", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_check"] = module
    spec.loader.exec_module(module)
    return module


model = _load()


# All of them are in `make check`; here one that holds and three that must not.
SOME = [v for v in model.VARIANTS if v.name in ("relay", "bug-1", "bug-8", "bug-11")]
assert len(SOME) == 4


@pytest.mark.parametrize("variant", SOME, ids=lambda variant: variant.name)
def test_variant(variant: object) -> None:
    lacking = model.missing()
    if lacking:
        pytest.fail(lacking)
    result = model.check(variant)
    assert result.as_expected, f"{result.verdict} after {result.states} states"


def test_every_bug_of_the_model_is_checked() -> None:
    text = model.MODEL.read_text()
    numbers = [number for number, _, _ in model.BUGS]
    assert numbers == list(range(1, len(numbers) + 1))
    for number in numbers:
        assert f"BUG == {number}" in text or f"BUG != {number}" in text
    assert f"BUG == {len(numbers) + 1}" not in text


def test_missing_spin_names_the_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK)],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "sudo apt-get install -y spin" in done.stderr
