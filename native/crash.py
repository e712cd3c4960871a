"""Crash points of the C part (native/crash.c): only a test build has any."""

from __future__ import annotations

from native import ffi, lib


def points() -> dict[str, tuple[str, ...]]:
    """Name of each crash point -> roles that pass it; empty in a normal build."""
    found = {}
    at = 0
    while (text := lib.crash_point(at)) != ffi.NULL:
        name, *roles = ffi.string(text).decode().split()
        found[name] = tuple(roles)
        at += 1
    return found


def arm(point: str, passes: int, path: str) -> bool:
    """Has the process killed at that pass of the point; False: it is not one of C's."""
    return bool(lib.crash_arm(point.encode(), passes, path.encode()) == 0)
