"""Load on the container's Midair, and what it saw: bench/loadgen in the container's network.

Three kinds at a time: streams as fast as they go, a paced stream, and new connections. loadgen
counts what is lost, doubled, reordered, misrouted or corrupt, and fails when a connection is
refused or ended.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import loadgen
from tests.systemd.container import PATIENCE_S, Container, eventually

PORT = 4222
PAIRS = 4
STALL_S = 20.0  # longer than any pause that is not a loss
SEGMENTS_FLOWING = 1000  # TCP segments that prove that messages are moving
LIFE_S = 900.0  # of a load at most


class Load:
    """One running loadgen."""

    def __init__(self, container: Container, mode: str, **options: object) -> None:
        words = loadgen.arguments(mode, PORT, timeout=LIFE_S, stall=STALL_S, warmup=0, **options)
        self.mode = mode
        self.process = subprocess.Popen(
            container.enter_network(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def await_ready(self) -> None:
        """Of `idle`: all its connections are open."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if '"ready"' not in line:
            self.finish()

    def finish(self) -> dict[str, Any]:
        """Its report, if everything was right."""
        output, errors = self.process.communicate("go\n", timeout=3 * PATIENCE_S)
        assert self.process.returncode == loadgen.EXIT_OK, f"{self.mode}: {errors or output}"
        report: dict[str, Any] = json.loads(output.splitlines()[-1])
        return report

    def end(self) -> None:
        """For when nobody wants its report any more."""
        if self.running:
            self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def ended(*loads: Load) -> Iterator[None]:
    """Whatever happens, they do not outlive the body."""
    try:
        yield
    finally:
        for load in loads:
            load.end()


def segments(container: Container) -> int:
    """TCP segments received in the container so far."""
    rows = Path(f"/proc/{container.leader}/net/snmp").read_text().splitlines()
    head, values = (row.split() for row in rows if row.startswith("Tcp:"))
    return int(values[head.index("InSegs")])


class Repeating:
    """The same load over and over until it is stopped: at any moment one is under way."""

    def __init__(self, container: Container, mode: str, **options: object) -> None:
        self.runs = 0
        self._container = container
        self._mode = mode
        self._options = options
        self._current: Load | None = None
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Under way, or never again."""
        return self._failure is not None or (self._current is not None and self._current.running)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._current = Load(self._container, self._mode, **self._options)
                with ended(self._current):
                    self._current.finish()
                self.runs += 1
        except BaseException as failure:
            self._failure = failure

    def stop(self) -> None:
        """Lets the one under way end; raises what went wrong with any."""
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self.runs > 0


class Workload:
    """The three kinds of load together."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def during(self, action: Callable[[], None]) -> None:
        """Does `action` while messages flow; nothing may be lost, doubled or refused."""
        pairs = {"subject_mode": "pairs", "publishers": PAIRS, "subscribers": PAIRS}
        kinds = [
            Repeating(self._container, "throughput", messages=50_000, verify=True, **pairs),
            Repeating(self._container, "paced", rate=2000, messages=4000, subscribers=2),
            Repeating(self._container, "connect", connections=40, concurrency=8),
        ]
        try:
            self._await_flow(kinds)
            action()
            self._await_flow(kinds)
        finally:
            with contextlib.ExitStack() as each:
                for kind in kinds:
                    each.callback(kind.stop)

    def _await_flow(self, kinds: Sequence[Repeating]) -> None:
        """Until messages are moving, and each kind of load is under way."""
        wanted = segments(self._container) + SEGMENTS_FLOWING
        eventually(lambda: segments(self._container) >= wanted, "messages are moving")
        eventually(lambda: all(kind.busy for kind in kinds), "every load is under way")
