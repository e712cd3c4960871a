"""The protocol model as its page tells it. Spin itself runs in `make check` (`make model`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
