"""Builds `native._midair`: every native/*.c behind the declarations in native/cdef/*.h.

`python native/build.py [--out DIR] [--sanitize] [--crash-points] [--define MACRO]` compiles in
place (or below DIR); setuptools uses `ffibuilder` when a wheel is built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
WARNINGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"]
# cffi's generated glue, not ours, trips these two.
GLUE = ["-Wno-unused-function", "-Wno-unused-parameter"]
FAST = ["-O2", "-g"]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def make(
    sanitize: bool = False,
    sources_in: str = os.path.relpath(HERE),
    crash_points: bool = False,
    define: Sequence[str] = (),
) -> FFI:
    """An FFI ready to compile: declarations from cdef/, sources from native/.

    setuptools wants paths relative to the project, cffi's own compile() absolute ones.
    """
    ffi = FFI()
    order = sorted((HERE / "cdef").glob("*.h"), key=lambda p: (p.stem != "segment", p.stem))
    for path in order:
        ffi.cdef(path.read_text())
    headers = "\n".join(f'#include "{p.stem}.h"' for p in order)
    ffi.set_source(
        "native._midair",
        headers,
        sources=sorted(
            os.path.join(sources_in, p.name) for p in HERE.glob("*.c") if p.stem[0] != "_"
        ),
        include_dirs=[str(HERE)],
        depends=[str(p) for p in HERE.glob("*.h")],
        libraries=["rt"],
        define_macros=[
            (name, "1") for name in ([*define, "MIDAIR_CRASH_POINTS"] if crash_points else define)
        ],
        extra_compile_args=WARNINGS + GLUE + (SANITIZE if sanitize else FAST),
        extra_link_args=["-fsanitize=address,undefined"] if sanitize else [],
    )
    return ffi


ffibuilder = make()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(HERE.parent), help="where native/_midair goes")
    parser.add_argument("--sanitize", action="store_true", help="build with ASan and UBSan")
    parser.add_argument("--crash-points", action="store_true", help="for the crash tests")
    parser.add_argument("--define", action="append", default=[], help="a macro for measurements")
    args = parser.parse_args()
    ffi = make(args.sanitize, str(HERE), args.crash_points, args.define)
    with tempfile.TemporaryDirectory() as objects:  # cffi mirrors the sources' folders in it
        built = Path(ffi.compile(tmpdir=objects))
        finished = Path(args.out) / "native" / built.name
        finished.parent.mkdir(parents=True, exist_ok=True)
        # Not overwritten: running processes have the old file mapped.
        unfinished = finished.with_suffix(".unfinished")
        shutil.copyfile(built, unfinished)
        unfinished.replace(finished)
    print(finished)
