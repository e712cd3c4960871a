"""`python -m tests.fuzz.atheris_run TARGET [libFuzzer's options] CORPUS...`: one target, fuzzed."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["midair", "connmgr", "json"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    target = TARGETS[name]()
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
