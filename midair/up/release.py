"""Which Midair a process runs: an interpreter, and the directory its packages are in.

Several can be at work in one instance at the same time: during an upgrade, and after the
upgrade of one component only. They meet in shared memory, whose headers say what layout it
has, and in the queues and sockets.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import midair
from midair.errors import MidairError
from midair.exits import Exit
from midair.process import ipc
from midair.process.runtime import Runtime
from midair.version import LAYOUTS_SINCE, __version__

FIND_S = 30.0  # how long an interpreter may take to say which version it has
# Where the package is, without importing more of it than its version.
_FIND = "import midair.version as v, pathlib; print(pathlib.Path(v.__file__).parent.parent)"
_FIND += "; print(v.__version__)"


@dataclass(frozen=True)
class Release:
    """An installed version. `root` is searched for packages before anything else."""

    python: str
    root: str
    version: str

    def command(self, module: str) -> list[str]:
        """How to run one of its modules.

        With -P the current directory is not searched: a user's own directory called
        `router` must not be taken for ours.
        """
        return [self.python, "-P", "-m", module]

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment its processes need."""
        environ = dict(base)
        older = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{self.root}:{older}" if older else self.root
        if self.root != own().root:
            environ.pop("MIDAIR_NATIVE", None)  # a build of our C part, not of theirs
        return environ


def own() -> Release:
    """The one this process runs."""
    return Release(sys.executable, str(Path(midair.__file__).resolve().parent.parent), __version__)


def no_way_back(runtime: Runtime, to: Release) -> str:
    """Why an instance cannot be brought to that release, or nothing.

    Segments of a release have its name in their header, except those before 0.2.
    """
    made = max((_number(text) for text in ipc.releases(runtime) if text), default=(0,))
    since = _number(LAYOUTS_SINCE)
    if made < since or _number(to.version) >= since:
        return ""
    return (
        f"{to.version} cannot read the shared memory of instance {runtime.instance!r}, which is of "
        f"{LAYOUTS_SINCE} or later: there is no way back but midair down; nothing was changed"
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version))


def find(place: str | None) -> Release:
    """The release at a path: a virtual environment, or a directory with the packages.

    None: our own. The code there is asked for its version, so what cannot even be imported
    is found here.
    """
    if place is None:
        return own()
    path = Path(place).absolute()
    environ = dict(os.environ)
    python = path / "bin" / "python"
    if python.is_file():
        environ.pop("PYTHONPATH", None)  # it would be found before what is installed there
    elif (path / "midair" / "version.py").is_file():
        python = Path(sys.executable)
        environ["PYTHONPATH"] = str(path)
    else:
        raise MidairError(
            f"{place}: neither a virtual environment (no bin/python) nor a directory with "
            "Midair's packages (no midair/version.py)",
            Exit.USAGE,
        )
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _FIND],
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FIND_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MidairError(f"{place}: cannot run {python}: {error}") from None
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}"
        raise MidairError(f"{place}: Midair cannot be imported there: {said}")
    *_, root, version = done.stdout.splitlines()
    return Release(str(python), root, version)
