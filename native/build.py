"""Builds `native._midair`: every native/*.c behind the declarations in native/cdef/*.h.

`python native/build.py [--out DIR] [--sanitize] [--crash-points] [--define MACRO]` compiles in
place (or below DIR); setuptools uses `ffibuilder` when a wheel is built.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
WARNINGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"]
# cffi's generated glue, not ours, trips these two.
GLUE = ["-Wno-unused-function", "-Wno-unused-parameter"]
FAST = ["-O2", "-g"]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def _sources() -> list[Path]:
    return sorted(path for path in HERE.glob("*.c") if path.stem[0] != "_")


def _macros(crash_points: bool, define: Sequence[str]) -> list[str]:
    return [*define, "MIDAIR_CRASH_POINTS"] if crash_points else list(define)


def make() -> FFI:
    """An FFI ready to compile: declarations from cdef/, sources from native/.

    setuptools wants paths relative to the project.
    """
    ffi = FFI()
    order = sorted((HERE / "cdef").glob("*.h"), key=lambda p: (p.stem != "segment", p.stem))
    for path in order:
        ffi.cdef(path.read_text())
    ffi.set_source(
        "native._midair",
        "\n".join(f'#include "{p.stem}.h"' for p in order),
        sources=[os.path.relpath(path) for path in _sources()],
        include_dirs=[str(HERE)],
        depends=[str(p) for p in HERE.glob("*.h")],
        libraries=["rt"],
        extra_compile_args=WARNINGS + GLUE + FAST,
    )
    return ffi


ffibuilder = make()


def build(out: Path, sanitize: bool, crash_points: bool, define: Sequence[str]) -> Path:
    """Compiles on all cores; out/native/_midair appears whole. What setuptools does with
    `ffibuilder`, one file after the other, takes as many times longer as there are cores."""
    flags = WARNINGS + GLUE + (SANITIZE if sanitize else FAST)
    macros = [f"-D{name}=1" for name in _macros(crash_points, define)]
    folders = [f"-I{HERE}", f"-I{sysconfig.get_path('include')}"]
    command = [
        *shlex.split(os.environ.get("CC", "gcc")),
        "-fPIC",
        "-fwrapv",
        "-DNDEBUG",
        *flags,
        *macros,
        *folders,
    ]
    finished = out / "native" / f"_midair{sysconfig.get_config_var('EXT_SUFFIX')}"
    finished.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        glue = Path(scratch) / "_midair.c"
        make().emit_c_code(str(glue))

        def compile_one(source: Path) -> str:
            made = f"{scratch}/{source.stem}.o"
            subprocess.run([*command, "-c", str(source), "-o", made], check=True)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, [glue, *_sources()]))
        # Renamed, not overwritten: running processes have the old file mapped.
        unfinished = finished.with_suffix(".unfinished")
        link = [*command, "-shared", *objects, "-lrt", "-o", str(unfinished)]
        subprocess.run(link, check=True)
        unfinished.replace(finished)
    return finished


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(HERE.parent), help="where native/_midair goes")
    parser.add_argument("--sanitize", action="store_true", help="build with ASan and UBSan")
    parser.add_argument("--crash-points", action="store_true", help="for the crash tests")
    parser.add_argument("--define", action="append", default=[], help="a macro for measurements")
    args = parser.parse_args()
    try:
        print(build(Path(args.out), args.sanitize, args.crash_points, args.define))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
