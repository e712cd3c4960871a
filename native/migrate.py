"""Segments of the layout before (native/src/migrate): found, converted, put in their place.

The new segment is made beside the old one and gets its name by one rename: killed at any moment,
the owner of a segment leaves the old one whole or the new one whole. What it had made beside it is
made anew by its successor.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from midair import names
from midair.errors import LayoutError, ResourceError
from midair.process import crash, ipc
from midair.process.runtime import Runtime
from native import ffi, lib

BESIDE = ".new"  # the name of a segment that is being made has this at its end


class Age(Enum):
    """What the header of a segment says to this release."""

    MISSING = "missing"  # not there, or not finished by its creator
    CURRENT = "current"
    CONVERTIBLE = "convertible"  # of the layout before
    FOREIGN = "foreign"  # of another release


def age(name: str) -> Age:
    """Read off its header, without mapping it."""
    header = ipc.segment_header(name)
    if header is None:
        return Age.MISSING
    known = lib.segment_age(header.kind, header.layout, header.fingerprint)
    if known == lib.SEGMENT_CURRENT:
        return Age.CURRENT
    return Age.CONVERTIBLE if known == lib.SEGMENT_CONVERTIBLE else Age.FOREIGN


class Memory:
    """The segments a component needs, and those of them that it converts.

    `owned` is in the order of conversion. An arena comes before the journal whose redo log names
    it (rule M3).
    """

    def __init__(self, runtime: Runtime, needed: Sequence[str], owned: Sequence[str]) -> None:
        self._runtime = runtime
        self._needed = needed
        self._owned = owned

    def outdated(self) -> list[str]:
        """Those that have the layout before."""
        return [name for name in self._needed if age(name) is Age.CONVERTIBLE]

    def check_room(self) -> None:
        """ResourceError: /dev/shm could not hold a second copy of all that the parts convert."""
        what = f"converting instance {self._runtime.instance!r}"
        ipc.check_space(2 * ipc.used_bytes(self._runtime), what)

    def convert(self) -> int:
        """Converts what is owned and has the layout before; how many there were."""
        due = [name for name in self._owned if age(name) is Age.CONVERTIBLE]
        with contextlib.ExitStack() as stack:
            mapped = [stack.enter_context(_mapped(name)) for name in due]
            for old in mapped:
                old.finish([other for other in mapped if other is not old])
                crash.here("migrate.finished")
            for old in mapped:
                old.convert()
        return len(due)


def for_connmgr(runtime: Runtime, index: int, connmgrs: int) -> Memory:
    """All arenas and the connection table; its own arena and its journal are its to convert."""
    arenas = [runtime.segment(names.ARENA, n) for n in range(connmgrs)]
    journal = runtime.segment(names.JOURNAL, index)
    table = runtime.segment(names.CONNTABLE)
    return Memory(runtime, [table, journal, *arenas], [arenas[index], journal])


def for_router(runtime: Runtime) -> Memory:
    routing = runtime.segment(names.ROUTING)
    return Memory(runtime, [routing], [routing])


def for_dispatcher(runtime: Runtime) -> Memory:
    table = runtime.segment(names.CONNTABLE)
    return Memory(runtime, [table], [table])


class _Old:
    """A mapped segment of the layout before."""

    def __init__(self, name: str, fd: int, pointer: Any, size: int) -> None:
        self._name = name
        self._fd = fd
        self._pointer = pointer
        self._size = size

    def finish(self, others: Sequence[_Old]) -> None:
        """Stores what a committed step has left, by the rules of its own layout."""
        other, size = (others[0]._pointer, others[0]._size) if others else (ffi.NULL, 0)
        self._check(lib.segment_finish(self._pointer, self._size, other, size))

    def convert(self) -> None:
        """Makes the new one beside it, and gives it the name."""
        size = self._check(lib.segment_migrated_bytes(self._pointer, self._size))
        path, about = ipc.SHM / self._name[1:], os.fstat(self._fd)
        beside = path.with_name(path.name + BESIDE)
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        ipc.check_space(about.st_blocks * 512, self._name)
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            with contextlib.suppress(PermissionError):
                os.fchown(fd, -1, about.st_gid)
            os.fchmod(fd, about.st_mode & 0o7777)
            made = _map(self._name, fd, size)
        finally:
            os.close(fd)
        try:
            self._check(lib.segment_migrate(self._pointer, self._size, self._fd, made))
        finally:
            lib.segment_unmap(made, size)
        crash.here("migrate.built")
        os.rename(beside, path)  # "migrate.rename"
        crash.here("migrate.renamed")

    def _check(self, result: int) -> int:
        if result == -errno.EPROTO:
            raise LayoutError(
                f"segment {self._name} is not what its header says, and cannot be converted: "
                "see midair fsck of the release that made it"
            )
        return int(result)


@contextlib.contextmanager
def _mapped(name: str) -> Iterator[_Old]:
    fd = ipc.open_existing(name, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        pointer = _map(name, fd, size)
        try:
            yield _Old(name, fd, pointer, size)
        finally:
            lib.segment_unmap(pointer, size)
    finally:
        os.close(fd)


def _map(name: str, fd: int, size: int) -> Any:
    pointer = lib.segment_map(fd, size, 0)
    if pointer == ffi.NULL:
        raise ResourceError(f"segment {name}: cannot map it: {os.strerror(ffi.errno)}")
    return pointer
