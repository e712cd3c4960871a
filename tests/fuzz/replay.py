"""`python -m tests.fuzz.replay TARGET [FILE...]`: known inputs, or those files, once each."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fuzz import seeds
from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *files = sys.argv[1:]
    feed = TARGETS[name]()
    inputs = {file: Path(file).read_bytes() for file in files} or seeds.inputs(name)
    for called, data in inputs.items():
        try:
            feed(data)
        except Exception:
            print(f"{name}, {called}: {data[:200]!r}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
