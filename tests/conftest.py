"""Fixtures of all tests: instances of Midair, each with a name of its own, and a leak check.

`MIDAIR_TEST_SERVER=host:port` puts a server that is already running in the place of the
instances. Whatever the tests start is ended and removed at the end of the session, and
the session fails if there was anything left to remove.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from midair import config
from midair.process import ipc

ROOT = Path(__file__).resolve().parent.parent
# Nothing waits this long on a working machine; it turns a hang into a failure.
PATIENCE_S = 30.0

# Everything of the tests is below one directory, so that it can be seen, and removed.
_BASE = Path(tempfile.mkdtemp(prefix="mdt-"))
atexit.register(shutil.rmtree, _BASE, ignore_errors=True)
os.environ["MIDAIR_RUNTIME_DIR"] = str(_BASE)
os.environ.pop("RUNTIME_DIRECTORY", None)
os.environ.pop("NOTIFY_SOCKET", None)

_numbers = itertools.count()
_names: dict[str, str] = {}  # instance name -> the test that made it


def new_name(owner: str = "?") -> str:
    """An instance name that nobody else has; the leak check looks for it at the end."""
    name = f"t{os.getpid()}-{next(_numbers)}"
    _names[name] = owner
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

    @property
    def address(self) -> str:
        return config.join_address(self.host, self.port)

    @property
    def runtime_path(self) -> Path:
        return _BASE / self.name

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
        return code


def cli(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `midair ...` to its end."""
    options.setdefault("timeout", PATIENCE_S)
    return subprocess.run(
        [sys.executable, "-m", "midair", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def start(owner: str, text: str = "", *options: str, name: str = "") -> Instance:
    """Starts `midair up` on a free port and waits until it says that it is ready."""
    name = name or new_name(owner)
    path = _BASE / f"{name}.toml"
    path.write_text(text)
    stderr_path = _BASE / f"{name}.stderr"
    with stderr_path.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "midair", "up", "--name", name, "--config", str(path)]
            + (["--port", "0"] if "--port" not in options else [])
            + list(options),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    line = process.stdout.readline().decode() if ready else ""
    if "listening on " not in line:
        process.kill()
        process.wait()
        process.stdout.close()
        pytest.fail(f"midair up did not start: {line!r} {stderr_path.read_text()}")
    address = line.split("listening on ")[1].split(";")[0].split(", ")[0]
    host, port = config.split_address(address)
    return Instance(host, port, name, process, line, stderr_path)


def _elsewhere() -> Instance | None:
    address = os.environ.get("MIDAIR_TEST_SERVER")
    return Instance(*config.split_address(address)) if address else None


@pytest.fixture(scope="module")
def midair(request: pytest.FixtureRequest) -> Iterator[Instance]:
    """An instance for the tests of one module."""
    if given := _elsewhere():
        yield given
        return
    instance = start(request.node.nodeid)
    yield instance
    instance.stop()


@pytest.fixture
def make_midair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Instance]]:
    """Makes instances: `make_midair(config="...toml...", connmgrs=2)`; ended after the test."""
    made: list[Instance] = []

    def make(
        config: str = "", connmgrs: int | None = None, name: str = "", options: tuple[str, ...] = ()
    ) -> Instance:
        if given := _elsewhere():
            return given
        if connmgrs is not None:
            options = (*options, "--connmgrs", str(connmgrs))
        made.append(start(request.node.nodeid, config, *options, name=name))
        return made[-1]

    yield make
    for instance in made:
        instance.stop()


@pytest.fixture
def instance_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a test that makes segments, queues or leases itself; removed afterwards."""
    name = new_name(request.node.nodeid)
    yield name
    ipc.remove_all(name)
    shutil.rmtree(_BASE / name, ignore_errors=True)


def processes_of(name: str) -> list[int]:
    """Processes with `--name <name>` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"--name" in words and name.encode() in words:
                found.append(int(path.parent.name))
    return found


def leaks_of(name: str) -> list[str]:
    """All there is of an instance."""
    found = [f"process {pid}" for pid in processes_of(name)] + ipc.leftovers(name)
    if (_BASE / name).exists():
        found.append(f"directory {_BASE / name}")
    return found


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the session if an instance has left anything, after removing it."""
    yield
    leaks = []
    for name, owner in _names.items():
        found = leaks_of(name)
        for pid in processes_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ipc.remove_all(name)
        leaks += [f"{owner}: instance {name} left {what}" for what in found]
    assert not leaks, "\n".join(leaks)


def pytest_report_header() -> str:
    try:
        import native
    except ImportError as error:
        return f"native: not built ({error})"
    return f"native: {native.path}"
