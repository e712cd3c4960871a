"""Instances of Midair for tests: each has a name of its own, by which what it leaves is found.

`MIDAIR_TEST_SERVER=host:port` puts a server that is already running in the place of the
instances.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from midair import config
from midair.exits import Exit
from midair.process import ipc
from midair.process.runtime import Runtime

ROOT = Path(__file__).resolve().parents[2]
# Nothing waits this long on a working machine; it turns a hang into a failure.
PATIENCE_S = 30.0

# Everything of the tests is below one directory, so that it can be seen, and removed.
BASE = Path(tempfile.mkdtemp(prefix="mdt-"))
atexit.register(shutil.rmtree, BASE, ignore_errors=True)
os.environ["MIDAIR_RUNTIME_DIR"] = str(BASE)
os.environ.pop("RUNTIME_DIRECTORY", None)
os.environ.pop("NOTIFY_SOCKET", None)

_numbers = itertools.count()
told_of_names: list[Callable[..., None]] = []  # who hears of each new one (janitor.py)
names_given: dict[str, str] = {}  # instance name -> the test that made it


def new_name(owner: str = "?") -> str:
    """An instance name that nobody else has; the leak check looks for it at the end."""
    name = f"t{os.getpid()}-{next(_numbers)}"
    names_given[name] = owner
    for tell in told_of_names:
        tell("name", name)
    return name


def environ() -> dict[str, str]:
    """The environment for a component started by hand, wherever Midair is imported from."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]
    return {**os.environ, "PYTHONPATH": ":".join(path for path in paths if path)}


def eventually(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Waits until `condition()` is true, and returns it."""
    deadline = time.monotonic() + patience_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {patience_s:g} s: {what}")
        time.sleep(0.01)
    return result


@dataclass
class Instance:
    """A running `midair up`, or a server somebody else runs."""

    host: str
    port: int
    name: str = ""
    process: subprocess.Popen[bytes] | None = None
    line: str = ""  # what it printed when it was ready
    stderr_path: Path = field(default_factory=Path)
    words: tuple[str, ...] = ()  # the command line it was started with, without "midair"
    place: Path = ROOT  # the tree whose code it runs

    @property
    def address(self) -> str:
        return config.join_address(self.host, self.port)

    @property
    def runtime_path(self) -> Path:
        return BASE / self.name

    @property
    def runtime(self) -> Runtime:
        return Runtime.open(self.name)

    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def cli(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs `midair ...` to its end."""
        return cli(*args, **options)

    def status(self) -> dict[str, Any]:
        done = cli("status", "--json", "--name", self.name)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def components(self) -> dict[str, dict[str, Any]]:
        """The rows of the status by name: `router`, `connmgr/0`, ..."""
        return {
            row["role"] if row["index"] is None else f"{row['role']}/{row['index']}": row
            for row in self.status()["components"]
        }

    def pid(self, component: str) -> int:
        pid = self.components()[component]["pid"]
        assert isinstance(pid, int)
        return pid

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), PATIENCE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends it and returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        if code < 0:  # its manager was killed, and the parts go on
            self.cli("down", "--name", self.name)
        return code

    def kill_manager(self) -> int:
        """`kill -9` of the manager alone; its pid."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.pid

    def up_again(self, *more: str) -> str:
        """Another `midair up` with the same command line; the line it says, when it is ready."""
        self.process, self.line = launch((*self.words, *more), self.stderr_path, self.place)
        return self.line


def cli(*args: str, place: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `midair ...` to its end, of the tree at `place`."""
    options.setdefault("timeout", PATIENCE_S)
    return subprocess.run(
        [sys.executable, "-m", "midair", *args],
        cwd=place,
        capture_output=True,
        text=True,
        **options,
    )


def start(
    owner: str, text: str = "", *options: str, name: str = "", place: Path = ROOT
) -> Instance:
    """Starts `midair up` and waits until it says that it is ready.

    On a free port, if the configuration does not list where to listen. `place`: the tree whose
    code it runs.
    """
    anywhere = "--port" not in options and "listen = [" not in text
    name = name or new_name(owner)
    path = BASE / f"{name}.toml"
    path.write_text(text)
    stderr_path = BASE / f"{name}.stderr"
    words = ("up", "--name", name, "--config", str(path))
    words += (*(("--port", "0") if anywhere else ()), *options)
    process, line = launch(words, stderr_path, place)
    address = line.split("listening on ")[1].split(";")[0].split(", ")[0]
    host, port = config.split_address(address)
    return Instance(host, port, name, process, line, stderr_path, words, place)


def launch(
    words: Sequence[str], stderr_path: Path, place: Path = ROOT
) -> tuple[subprocess.Popen[bytes], str]:
    """Runs `midair up ...` until it says that it is ready; what it says.

    Tests that run beside this one may have all of the user's queue bytes: then it is tried again.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        said_before = stderr_path.stat().st_size if stderr_path.exists() else 0
        with stderr_path.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "midair", *words],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline().decode() if ready else ""
        if "listening on " in line:
            return process, line
        if ready:  # it ends by itself
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()
        process.stdout.close()
        if process.returncode != Exit.NO_RESOURCES or time.monotonic() > deadline:
            pytest.fail(f"midair up did not start: {line!r} {stderr_path.read_text()}")
        os.truncate(stderr_path, said_before)


def elsewhere() -> Instance | None:
    address = os.environ.get("MIDAIR_TEST_SERVER")
    return Instance(*config.split_address(address)) if address else None


def processes_of(name: str) -> list[int]:
    """Processes with `--name <name>` in their command line."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--name" in words and name.encode() in words:
                found.append(pid)
    return found


def leaks_of(name: str) -> list[str]:
    """All there is of an instance."""
    found = [f"process {pid}" for pid in processes_of(name)] + ipc.leftovers(name)
    if (BASE / name).exists():
        found.append(f"directory {BASE / name}")
    return found
