"""Single parts as real processes, behind sockets that the test owns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from midair import names
from midair.process.runtime import Runtime
from midair.process.spawn import spawn
from midair.up import listeners
from tests.support.instance import environ


class KeeperProcess:
    """A real keeper; `place`: of another release, from a directory with its packages."""

    def __init__(self, runtime: Runtime, stderr_fd: int = 2, place: Path | None = None) -> None:
        self.runtime = runtime
        self.listener = listeners.open_peer(runtime, names.KEEPER_SOCKET)
        self.path = runtime.socket(names.KEEPER_SOCKET)
        self.pid: int | None = None
        self._stderr_fd = stderr_fd
        self._environ = environ()
        if place is not None:
            self._environ["PYTHONPATH"] = str(place)
        self.start()

    def start(self) -> None:
        self.pid = spawn(
            [sys.executable, "-P", "-m", "midair.keeper", "--name", self.runtime.instance],
            self._environ,
            [(names.FD_KEEPER, self.listener.fileno())],
            self._stderr_fd,
        )

    @property
    def number(self) -> int:
        assert self.pid is not None
        return self.pid

    def kill(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            self.pid = None
