"""Builds `native._midair` with meson and ninja: only what changed is compiled again.

`python native/build.py [--out DIR] [--sanitize] [--crash-points] [--define MACRO]
[--test-protocol FILE]
[--test-transport FILE]` compiles in build/ and puts the module into place (or below DIR). Warnings
are errors in every build.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SANITIZERS = "address,undefined"


def _options(
    sanitize: bool,
    crash_points: bool,
    define: Sequence[str],
    test_protocol: str,
    test_transport: str,
) -> list[str]:
    return [
        f"-Dpython={sys.executable}",
        f"-Db_sanitize={SANITIZERS if sanitize else 'none'}",
        f"-Doptimization={1 if sanitize else 2}",
        f"-Dcrash_points={'true' if crash_points else 'false'}",
        f"-Ddefine={','.join(define)}",
        f"-Dtest_protocol={Path(test_protocol).resolve() if test_protocol else ''}",
        f"-Dtest_transport={Path(test_transport).resolve() if test_transport else ''}",
    ]


def _folder(root: Path, options: Sequence[str]) -> Path:
    """One for each set of options, so that none of them is compiled anew for another's sake."""
    told = hashlib.sha256("\0".join([*options, os.environ.get("CC", "")]).encode()).hexdigest()[:12]
    return root / f"native-{told}"


def _command(name: str) -> list[str]:
    """meson and ninja of the interpreter that runs this, or else of the machine."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: pip install {name}")
    return [found]


def build(
    out: Path,
    sanitize: bool,
    crash_points: bool,
    define: Sequence[str],
    root: Path | None = None,
    test_protocol: str = "",
    test_transport: str = "",
) -> Path:
    """Compiles what changed; out/native/_midair appears whole. `root`: where objects go."""
    options = _options(sanitize, crash_points, define, test_protocol, test_transport)
    folder = _folder(root or HERE.parent / "build", options)
    environ = {**os.environ, "NINJA": _command("ninja")[0]}
    if not (folder / "build.ninja").exists():
        setup = [*_command("meson"), "setup", str(folder), str(HERE), *options]
        done = subprocess.run(setup, env=environ, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
    subprocess.run([*_command("ninja"), "-C", str(folder), "--quiet"], check=True)
    name = f"_midair{sysconfig.get_config_var('EXT_SUFFIX')}"
    finished = out / "native" / name
    finished.parent.mkdir(parents=True, exist_ok=True)
    # Renamed, not overwritten: running processes have the old file mapped.
    unfinished = finished.with_suffix(".unfinished")
    shutil.copy2(folder / name, unfinished)
    unfinished.replace(finished)
    special = sanitize or crash_points or define or test_protocol or test_transport
    if not special and root is None:
        _show_editors(folder)
    return finished


def _show_editors(folder: Path) -> None:
    """Editors look for compile_commands.json at the root of a project."""
    link = HERE.parent / "compile_commands.json"
    if link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(folder / link.name, link.parent))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(HERE.parent), help="where native/_midair goes")
    parser.add_argument("--sanitize", action="store_true", help="build with ASan and UBSan")
    parser.add_argument("--crash-points", action="store_true", help="for the crash tests")
    parser.add_argument("--define", action="append", default=[], help="a macro for measurements")
    parser.add_argument("--test-protocol", default="", help="C file of one protocol more")
    parser.add_argument("--test-transport", default="", help="C file of one transport more")
    args = parser.parse_args()
    try:
        made = build(
            Path(args.out),
            args.sanitize,
            args.crash_points,
            args.define,
            test_protocol=args.test_protocol,
            test_transport=args.test_transport,
        )
        print(made)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
