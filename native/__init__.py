"""The C data plane. Only modules in this package touch `ffi` and `lib` (one door)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any


def _load() -> Any:
    """`native._midair`, or the build below $MIDAIR_NATIVE (sanitizer and test builds)."""
    elsewhere = os.environ.get("MIDAIR_NATIVE")
    if not elsewhere:
        return importlib.import_module("native._midair")
    import glob

    found = glob.glob(os.path.join(elsewhere, "native", "_midair*.so"))
    if not found:
        raise ImportError(f"MIDAIR_NATIVE={elsewhere}: no native/_midair*.so below it")
    spec = importlib.util.spec_from_file_location("native._midair", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["native._midair"] = module
    spec.loader.exec_module(module)
    return module


_module = _load()
ffi: Any = _module.ffi
lib: Any = _module.lib
path: str = _module.__file__
