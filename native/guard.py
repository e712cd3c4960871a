"""The dispatcher's guard (native/guard.c): saves accepted sockets when the dispatcher dies."""

from __future__ import annotations

import os

from native import ffi, lib
from native.segment import check

SOCKETS_MAX: int = lib.GUARD_SOCKETS_MAX
UIDS = range(lib.GUARD_UID, lib.GUARD_UID + lib.GUARD_GENERATIONS * lib.GUARD_SOCKETS_MAX)


class Guard:
    """A child that shares this process's descriptors and outlives it by a moment."""

    def __init__(self, keeper_path: str, generation: int) -> None:
        self._path = ffi.new("char[]", keeper_path.encode())  # the child reads it when we died
        self._generation = generation
        self.pid = self._start()

    def _start(self) -> int:
        return check(lib.guard_start(self._path, self._generation), "starting the guard")

    def check(self) -> None:
        """Makes another when it was killed."""
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = self._start()
