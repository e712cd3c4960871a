"""The subscriptions of a running router (native/census.c), read from its segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from midair import names
from midair.process.runtime import Runtime
from native import ffi, lib
from native.router import KIND
from native.segment import View

SLOTS_A_CALL = 65536


@dataclass(frozen=True)
class Sub:
    """One subscription."""

    uid: int  # of its connection
    connmgr: int
    subject: str
    queue: str
    sid: str  # what its client calls it: the first 46 bytes of that
    routed: int  # of a queue group: messages sent its way; 0 for others
    max: int  # of a queue group: ends after that many messages; 0: never


class Census:
    """The routing segment of an instance. MissingError, LayoutError, PermissionsError: as View."""

    def __init__(self, runtime: Runtime) -> None:
        self._view = View(runtime.segment(names.ROUTING), KIND)

    @property
    def current(self) -> bool:
        """False: open it again."""
        return self._view.current

    def subs(self, pattern: str = "", test: str = "", uid: int = 0) -> Iterator[Sub]:
        """Every subscription whose subject the pattern covers, that would get the subject
        `test`, of the connection `uid`; by connmgr and slot."""
        keep = [ffi.from_buffer(text.encode()) for text in (pattern, test)]
        found = ffi.new("struct census_filter *")
        if pattern:
            found.pattern, found.pattern_len = keep[0], len(keep[0])
        if test:
            found.test, found.test_len = keep[1], len(keep[1])
        found.uid = uid
        sub, at = ffi.new("struct census_sub *"), ffi.new("uint32_t *")
        for connmgr in range(names.CONNMGRS_MAX):
            at[0] = 0
            while (
                got := lib.census_next(self._view.pointer, connmgr, found, SLOTS_A_CALL, at, sub)
            ) >= 0:
                if got:
                    text = bytes(ffi.buffer(sub.text, sub.subject_len + sub.queue_len))
                    yield Sub(
                        uid=sub.uid,
                        connmgr=connmgr,
                        subject=text[: sub.subject_len].decode(errors="replace"),
                        queue=text[sub.subject_len :].decode(errors="replace"),
                        sid=bytes(ffi.buffer(sub.sid, sub.sid_len)).decode(errors="replace"),
                        routed=sub.routed,
                        max=sub.max,
                    )


def covers(pattern: str, subject: str) -> bool:
    """Whether a pattern covers a subject, which may be a pattern itself."""
    one, other = pattern.encode(), subject.encode()
    return bool(lib.census_covers(one, len(one), other, len(other)))
