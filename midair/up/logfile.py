"""The log of `midair up` in a file: `--log FILE`, `log.file`.

Everything that would go to standard error goes there, that of the parts too, which passes the
manager. Whoever has moved the file away (logrotate) sends SIGUSR1, and a new one is begun.
"""

from __future__ import annotations

import os
import sys

from midair.errors import MidairError, PermissionsError


class LogFile:
    """What standard error is: a file, or what it was at the start."""

    def __init__(self) -> None:
        self._terminal = os.dup(2)
        self._path = ""

    def use(self, path: str) -> None:
        """Writes to that file from now on; empty: to where it wrote at first.

        MidairError: it cannot be opened, and everything stays as it was.
        """
        path = os.path.abspath(path) if path else ""
        fd = _opened(path) if path else os.dup(self._terminal)
        sys.stderr.flush()
        os.dup2(fd, 2)
        os.close(fd)
        self._path = path

    def reopen(self) -> None:
        """The file may have been moved away. MidairError: as `use`."""
        if self._path:
            self.use(self._path)

    def end(self) -> None:
        """The last words are for who started it."""
        self.use("")


def check(path: str) -> None:
    """MidairError: that file cannot be written."""
    if path:
        os.close(_opened(os.path.abspath(path)))


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except PermissionError as error:
        raise PermissionsError(f"log.file: {path}: {error.strerror}") from None
    except OSError as error:
        raise MidairError(f"log.file: {path}: {error.strerror}") from None
