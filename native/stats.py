"""Statistics segments (native/stats.c): what a component lets others see of its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import posix_ipc

from midair import names
from midair.errors import LayoutError, MissingError
from midair.process import ipc
from midair.process.runtime import Runtime
from native import ffi, lib
from native.segment import Kind, View, open_segment

KIND = Kind(lib.SEGMENT_STATS, lib.STATS_LAYOUT, lib.stats_fingerprint(), "struct stats *")

# Role -> (noun of its segment, C type of the totals, C type of the gauges).
_ROLES = {
    names.CONNMGR: (names.STATS, "struct connmgr_stats", "struct connmgr_gauges"),
    names.ROUTER: (names.STATS_ROUTER, "struct router_stats", "struct router_gauges"),
    names.DISPATCHER: (
        names.STATS_DISPATCHER,
        "struct dispatcher_stats",
        "struct dispatcher_gauges",
    ),
}


def _labels(enum: str, prefix: str) -> dict[int, str]:
    elements: dict[int, str] = ffi.typeof(enum).elements
    return {abs(at): name.removeprefix(prefix).lower() for at, name in elements.items()}


# Why connections ended and frames were refused: the names of the enums, in lower case.
_reasons = _labels("enum close_reason", "CLOSE_")
CLOSE_REASONS = ("", *(_reasons[at] for at in range(1, lib.CLOSE_REASONS)))
_refusals = _labels("enum refusal", "REFUSED_")
REFUSALS = tuple(_refusals.get(at, "") for at in range(lib.REFUSALS))


@dataclass(frozen=True)
class Conn:
    """A row: one connection as its connmgr saw it lately."""

    uid: int
    connmgr: int
    name: str
    lang: str
    version: str
    ip: str
    port: int
    since_ns: int  # wall clock
    active_ns: int  # wall clock
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    pending: int
    subs: int
    stuck_ns: int
    rtt_us: int  # as the kernel sees it; 0: not known yet
    payload_in: int  # bytes of headers and bodies; bytes_in and bytes_out are of the streams
    payload_out: int


@dataclass(frozen=True)
class Counts:
    """Totals and gauges of one component, by name. Arrays are lists."""

    role: str
    index: int | None
    pid: int
    published_ns: int  # monotonic clock
    totals: dict[str, Any]
    gauges: dict[str, Any]


class Own:
    """The segment of this process: its only writer."""

    def __init__(
        self, runtime: Runtime, role: str, index: int | None, rows: int, gid: int | None
    ) -> None:
        """Opens what a predecessor has left, or makes it. Call it with the lease in hand."""
        noun, totals, gauges = _ROLES[role]
        name = runtime.segment(noun, index)

        def make(seg: Any) -> None:
            lib.stats_format(seg, rows)

        def attach() -> Any:
            mode = 0o600 if gid is None else 0o640
            size = lib.stats_bytes(rows)
            return open_segment(name, size, KIND, make=make, mode=mode, gid=gid)

        try:
            self.pointer = attach()
        except LayoutError:  # another version counted something else: begin anew
            before = _same_rows(name)
            posix_ipc.unlink_shared_memory(name)
            self.pointer = attach()
            if before is not None:
                lib.stats_take_rows(self.pointer, before.pointer)
        self._totals = ffi.new(f"{totals} *")
        self._gauges = ffi.new(f"{gauges} *")

    def resume(self) -> dict[str, int]:
        """The totals a predecessor published last, for a writer that counts in Python."""
        ffi.memmove(self._totals, self.pointer.totals, ffi.sizeof(self._totals[0]))
        return _words(self._totals)

    def publish(self, totals: dict[str, int], gauges: dict[str, int]) -> None:
        """For a writer that counts in Python."""
        for name, value in totals.items():
            setattr(self._totals, name, value)
        for name, value in gauges.items():
            setattr(self._gauges, name, value)
        sizes = ffi.sizeof(self._totals[0]), ffi.sizeof(self._gauges[0])
        lib.stats_publish(self.pointer, self._totals, sizes[0], self._gauges, sizes[1])


def connmgr_gauges(stats: Any) -> Any:
    """Of the owner's own segment: the struct, as it was published last."""
    return ffi.cast("struct connmgr_gauges *", stats.gauges)


def router_gauges(stats: Any) -> Any:
    return ffi.cast("struct router_gauges *", stats.gauges)


def router_totals(stats: Any) -> Any:
    return ffi.cast("struct router_stats *", stats.totals)


def _same_rows(name: str) -> View | None:
    """The segment of another version, if its rows are as ours."""
    with contextlib.suppress(LayoutError, MissingError):
        header = ipc.segment_header(name)
        if header is None or (header.kind, header.layout) != (KIND.kind, KIND.layout):
            return None
        return View(name, replace(KIND, fingerprint=header.fingerprint))
    return None


class Reader:
    """The segment of another process. MissingError, LayoutError, PermissionsError: as View."""

    def __init__(self, runtime: Runtime, role: str, index: int | None = None) -> None:
        noun, totals, gauges = _ROLES[role]
        self.role, self.index = role, index
        self._view = View(runtime.segment(noun, index), KIND)
        self._stats = self._view.pointer
        self._totals = ffi.new(f"{totals} *")
        self._gauges = ffi.new(f"{gauges} *")
        self._row = ffi.new("struct stats_conn *")

    @property
    def current(self) -> bool:
        """False: open it again."""
        return self._view.current

    def counts(self) -> Counts:
        """What it has counted."""
        ffi.memmove(self._totals, self._stats.totals, ffi.sizeof(self._totals[0]))
        ffi.memmove(self._gauges, self._stats.gauges, ffi.sizeof(self._gauges[0]))
        gauges = _words(self._gauges)
        if self.role == names.ROUTER:
            del gauges["orders_waiting"][gauges.pop("connmgrs") :]
        return Counts(
            self.role,
            self.index,
            int(self._stats.pid),
            int(self._stats.published_ns),
            _words(self._totals),
            gauges,
        )

    def conns(self) -> Iterator[Conn]:
        """Its connections, in the order of their slots."""
        row = self._row
        for at in range(min(self._stats.high, self._stats.rows)):
            if lib.stats_read_conn(self._stats, at, row):
                yield Conn(
                    uid=int(ffi.cast("uint64_t *", row)[0]),
                    connmgr=self.index or 0,
                    name=_text(row.name),
                    lang=_text(row.lang),
                    version=_text(row.version),
                    ip=_text(row.ip),
                    port=row.port,
                    since_ns=row.since_ns,
                    active_ns=row.active_ns,
                    messages_in=row.messages_in,
                    messages_out=row.messages_out,
                    bytes_in=row.bytes_in,
                    bytes_out=row.bytes_out,
                    pending=row.pending,
                    subs=row.subs,
                    stuck_ns=row.stuck_ms * 1_000_000,
                    rtt_us=row.rtt_us,
                    payload_in=row.payload_in,
                    payload_out=row.payload_out,
                )


def _text(field: Any) -> str:
    return bytes(ffi.string(field)).decode(errors="replace")


def _words(struct: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, field in ffi.typeof(struct).item.fields:
        value = getattr(struct, name)
        result[name] = list(value) if field.type.kind == "array" else int(value)
    return result
