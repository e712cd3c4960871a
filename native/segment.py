"""Shared segments (native/segment.c): opening, making, checking and mapping them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midair.errors import LayoutError, MissingError, ResourceError
from midair.process import ipc
from midair.version import __version__
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
    made by another version, or is damaged. `hot` bytes at its start are made resident.
    """
    refuse_other(name, what)
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
        raise ipc.damaged(name)
    return pointer


def refuse_other(name: str, what: Kind) -> None:
    """LayoutError if the header says that another version made it. Its size would say less."""
    header = ipc.segment_header(name)
    expected = (what.kind, what.layout, what.fingerprint)
    if header is None or (header.kind, header.layout, header.fingerprint) == expected:
        return
    # Every version writes the right kind and size, and since 0.2 its name.
    if (
        header.kind != what.kind
        or header.bytes != header.size
        or not re.fullmatch(r"(\d+\.\d[\w.+-]*)?", header.release, re.ASCII)
    ):
        raise ipc.damaged(name)
    if header.release == __version__:
        raise LayoutError(
            f"the header of segment {name} names this version ({__version__}) and another layout: "
            "it is damaged, or was made by another build; end the instance (midair down)"
        )
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
        refuse_other(name, what)
        fd = ipc.open_existing(name, os.O_RDONLY)
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
            raise ipc.damaged(name)
        self.pointer: Any = ffi.cast(what.pointer, mapped)

    @property
    def current(self) -> bool:
        """False: the segment of that name is another one by now, or there is none."""
        try:
            return (ipc.SHM / self.name[1:]).stat().st_ino == self._inode
        except OSError:
            return False
