"""Load and clients that must not notice that parts of the server are being replaced.

Each of them is started, left alone while something happens to the server, and ended with
`finish()`, which fails if anything was lost, doubled, reordered, refused or dropped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

from bench import loadgen
from midair import names
from midair.client import wire_nats
from midair.client.wire_nats import EndedError, Message
from midair.process.runtime import ACTIVE, Runtime
from tests.support.instance import PATIENCE_S, Instance

# One after the other: order and number of small ones, every byte of larger ones, fan-out.
RUNS: tuple[dict[str, Any], ...] = (
    {"messages": 200_000, "publishers": 2, "subscribers": 2, "subject_mode": "pairs"},
    {"messages": 20_000, "size": 4096, "verify": True},
    {"messages": 40_000, "publishers": 2, "subscribers": 3},
)
STALL_S = 20.0  # a server that moves nothing for so long has lost what is missing
RUN_S_MAX = 120.0
OPEN_EVERY_S = 0.01


class Watcher(threading.Thread):
    """A thread that does one thing until it is told to finish, or until that fails."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.turns = 0
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def turn(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self.turn()
                self.turns += 1
        except BaseException as failure:
            self._failure = failure

    def finish(self) -> None:
        """Lets it come to an end, and raises what went wrong."""
        self._over.set()
        self.join(RUN_S_MAX + PATIENCE_S)
        assert not self.is_alive(), f"{type(self).__name__} hangs"
        if self._failure is not None:
            raise self._failure
        assert self.turns, f"{type(self).__name__} came to nothing"

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        else:  # the test has failed already: only end
            self._over.set()
            self.join(RUN_S_MAX + PATIENCE_S)


class Traffic(Watcher):
    """loadgen at full speed, one run after the other; it checks what arrives."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        self._port = instance.port
        self.deliveries = 0

    def turn(self) -> None:
        options = RUNS[self.turns % len(RUNS)]
        done = loadgen.run("throughput", self._port, timeout=RUN_S_MAX, stall=STALL_S, **options)
        assert done.code == loadgen.EXIT_OK, done.report
        self.deliveries += done.report["deliveries"]


class Opener(Watcher):
    """New clients all the time: each has to be accepted, greeted and answered."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        self._instance = instance

    def turn(self) -> None:
        with Client(self._instance) as client:
            client.ping()
        time.sleep(OPEN_EVERY_S)


class OneActive(Watcher):
    """Looks at the components all the time: no role is ever acted in by two processes."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        self._runtime = Runtime.open(instance.name)

    def turn(self) -> None:
        active: dict[str, list[int]] = {}
        for state in self._runtime.states():
            if state.state == ACTIVE and _has_memory(state.pid):
                called = names.component(state.role, state.index)
                active.setdefault(called, []).append(state.pid)
        assert all(len(pids) == 1 for pids in active.values()), active
        time.sleep(0.001)


def _has_memory(pid: int) -> bool:
    """False for a process that is dying: it has let go of its mappings, then of its lease."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return not file.read().startswith("0 ")
    return False


class Client(wire_nats.Connection):
    """One connection with a subscription of its own; nothing comes but what is to come."""

    def __init__(self, instance: Instance, subject: str = "") -> None:
        self.subject = subject.encode()
        hello = b'CONNECT {"verbose":false}\r\n'
        hello += wire_nats.sub(self.subject, b"1") if subject else b""
        super().__init__(instance.host, instance.port, hello, timeout_s=PATIENCE_S)

    def ping(self) -> None:
        self.send(wire_nats.PING)
        answer = self.frame()
        assert answer == b"PONG", answer

    def ping_behind_messages(self, count: int) -> None:
        """Reads that many messages, and then the answer to a PING."""
        for _ in range(count):
            frame = self.frame()
            assert isinstance(frame, Message), frame
        self.ping()

    def read_error(self, closes: bool) -> bytes:
        """An -ERR, perhaps behind a PONG or so, and then the end if it closes."""
        line = self.frame()
        while line in (b"PONG", b"PING"):
            line = self.frame()
        assert isinstance(line, bytes), line
        assert line.startswith(b"-ERR"), line
        if closes:
            with pytest.raises(EndedError):
                self.frame()
        return line

    def echo(self, text: bytes) -> None:
        """Publishes to itself; exactly that arrives, and nothing else."""
        self.send(wire_nats.pub(self.subject, text))
        assert self.frame() == Message(self.subject, b"1", b"", b"", text)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        super().close()


@contextlib.contextmanager
def held(instance: Instance, count: int) -> Iterator[list[Client]]:
    """Connections that are open all the time, and must work at the end as at the beginning."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(instance, f"held.{at}")) for at in range(count)]
        for client in clients:
            client.echo(b"before")
        yield clients
        for client in clients:
            client.echo(b"after")
            client.ping()


@contextlib.contextmanager
def nobody_notices(instance: Instance, connections: int = 40) -> Iterator[None]:
    """Load, connections held open and connections being opened, around what happens inside."""
    with held(instance, connections), Traffic(instance) as traffic, Opener(instance) as opener:
        yield
    assert isinstance(traffic, Traffic)
    print(f"{traffic.deliveries} deliveries checked, {opener.turns} connections opened meanwhile")
