"""Shared segments (native/segment.c): opening, making, checking and mapping them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midair.errors import LayoutError, MissingError, PermissionsError, ResourceError
from midair.process import ipc
from native import ffi, lib

_HEADER_BYTES = 64  # struct segment_header


@dataclass(frozen=True)
class Kind:
    """What a segment must be to be mapped: its header is compared with this."""

    kind: int
    layout: int
    fingerprint: int
    pointer: str  # C type of the mapping


def open_segment(
    name: str,
    size: int,
    what: Kind,
    *,
    make: Callable[[Any], None] | None = None,
    hot: int = 0,
    mode: int = 0o600,
    gid: int | None = None,
    room: int | None = None,
) -> Any:
    """The mapped segment, as `what.pointer`. `make` formats a new one (its owner only).

    MissingError: it is not there, or its owner has not finished it. LayoutError: it was
    made by another version. `hot` bytes at its start are made resident.
    """
    refuse_other(name, what.layout, what.fingerprint)
    fd = ipc.open_segment(name, size, create=make is not None, mode=mode, gid=gid, room=room)
    try:
        mapped = lib.segment_map(fd, size, hot)
    finally:
        os.close(fd)
    if mapped == ffi.NULL:
        raise ResourceError(f"segment {name}: cannot map it: {os.strerror(ffi.errno)}")
    result = lib.segment_check(mapped, what.kind, what.layout, what.fingerprint, size)
    pointer = ffi.cast(what.pointer, mapped)
    if result == -errno.ENODATA and make is not None:
        make(pointer)
    elif result < 0:
        lib.segment_unmap(mapped, size)
        if result == -errno.ENODATA:
            raise MissingError(f"segment {name} is not finished yet")
        raise LayoutError(
            f"segment {name} was made by another version of Midair: "
            "end the instance (midair down) before starting this one"
        )
    return pointer


def refuse_other(name: str, layout: int, fingerprint: int) -> None:
    """LayoutError if the header says that another version made it. Its size would say less."""
    header = ipc.segment_header(name)
    if header is None or (header.layout, header.fingerprint) == (layout, fingerprint):
        return
    release = f" ({header.release})" if header.release else ""
    raise LayoutError(
        f"segment {name} was made by another version of Midair{release}: "
        "end the instance (midair down) before starting this one"
    )


def check(result: int, doing: str) -> int:
    """A count from C, or its negative errno as an OSError that says what was being done."""
    if result < 0:
        raise OSError(-result, f"{doing}: {os.strerror(-result)}")
    return result


class View:
    """A segment of another process, mapped read-only. Keep it as long as `pointer` is used."""

    def __init__(self, name: str, what: Kind) -> None:
        """MissingError: it is not there (yet). LayoutError: another version's."""
        self.name = name
        path = ipc.SHM / name[1:]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingError(f"segment {name} does not exist") from None
        except PermissionError:
            raise PermissionsError(f"segment {name} belongs to another user") from None
        try:
            about = os.fstat(fd)
            if about.st_size < _HEADER_BYTES:
                raise MissingError(f"segment {name} is not finished yet")
            mapped = lib.segment_view(fd, about.st_size)
        finally:
            os.close(fd)
        if mapped == ffi.NULL:
            raise ResourceError(f"segment {name}: cannot map it: {os.strerror(ffi.errno)}")
        size = about.st_size
        self._mapped = ffi.gc(mapped, lambda seg: lib.segment_unmap(seg, size))
        self._inode = about.st_ino
        result = lib.segment_check(mapped, what.kind, what.layout, what.fingerprint, about.st_size)
        if result == -errno.ENODATA:
            raise MissingError(f"segment {name} is not finished yet")
        if result < 0:
            raise LayoutError(f"segment {name} was made by another version of Midair")
        self.pointer: Any = ffi.cast(what.pointer, mapped)

    @property
    def current(self) -> bool:
        """False: the segment of that name is another one by now, or there is none."""
        try:
            return (ipc.SHM / self.name[1:]).stat().st_ino == self._inode
        except OSError:
            return False
