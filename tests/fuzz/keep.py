"""`python -m tests.fuzz.keep`: what the last run found new goes into corpus/, and nothing else.

Inputs that reach nothing which smaller ones, or the seeds, do not reach are left out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import seeds
from tests.fuzz.__main__ import AFL, OUT, SHARES, write_inputs
from tests.fuzz.parser_build import build

INPUT_BYTES_MAX = 1024  # of one that is kept
CORPUS_BYTES_MAX = 50_000  # of one target


def few_of_parser(inputs: Path, few: Path) -> None:
    binary = build("afl-clang-fast", OUT)
    command = ["afl-cmin", "-i", str(inputs), "-o", str(few), "--", str(binary)]
    environ = {**os.environ, **{key: value for key, value in AFL.items() if value}}
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)


def few_of_python(target: str, few: Path) -> None:
    """libFuzzer keeps only what reaches something new."""
    shutil.copytree(OUT / target / "corpus", few)
    shutil.copytree(seeds.CORPUS / target, few, dirs_exist_ok=True)


def keep(target: str) -> int:
    """How many inputs the corpus of a target has now."""
    found = OUT / target / ("default/queue" if target == "parser" else "corpus")
    with tempfile.TemporaryDirectory(dir=OUT) as place:  # afl-cmin refuses /tmp
        inputs, few = write_inputs(target, Path(place) / "all"), Path(place) / "few"
        for at, path in enumerate(sorted(found.glob("*"))):
            if path.is_file() and path.stat().st_size <= INPUT_BYTES_MAX:
                shutil.copy(path, inputs / f"found-{at}")
        if target == "parser":
            few_of_parser(inputs, few)
        else:
            few_of_python(target, few)
        sizes = {path: path.stat().st_size for path in few.iterdir() if path.is_file()}
        chosen = {path.read_bytes() for path, size in sizes.items() if size <= INPUT_BYTES_MAX}
    chosen -= set(seeds.SEEDS[target]())
    corpus = seeds.CORPUS / target
    corpus.mkdir(parents=True, exist_ok=True)
    named = {path.read_bytes(): path for path in corpus.iterdir()}
    size = 0
    for data in sorted(chosen, key=lambda data: (len(data), data)):
        size += len(data)
        if data and data not in named and size <= CORPUS_BYTES_MAX:
            (corpus / hashlib.sha1(data).hexdigest()[:12]).write_bytes(data)
    # Names of twelve digits are ours; others were given by somebody, and stay.
    for data, path in named.items():
        if data not in chosen and len(path.name) == 12 and path.name.isalnum():
            path.unlink()
    return len(list(corpus.iterdir()))


def main() -> None:
    for target in sys.argv[1:] or SHARES:
        print(f"{target}: {keep(target)} inputs in its corpus", flush=True)


if __name__ == "__main__":
    main()
