"""Trace rings and the control segment (native/trace.c): who writes what is in trace.h."""

from __future__ import annotations

import time
from typing import Any

import posix_ipc

from midair import names
from midair.errors import LayoutError, MissingError, PermissionsError
from midair.process.runtime import Runtime
from native import ffi, lib
from native.segment import Kind, View, open_segment

RECORD_BYTES: int = ffi.sizeof("struct trace_record")
SUBJECT_MAX: int = lib.TRACE_SUBJECT_MAX
RING = Kind(lib.SEGMENT_TRACE, lib.TRACE_LAYOUT, lib.trace_fingerprint(), "struct trace_ring *")
CONTROL = Kind(
    lib.SEGMENT_TRACE_CONTROL,
    lib.TRACE_LAYOUT,
    lib.trace_fingerprint(),
    "struct trace_control *",
)


def _owned(name: str, size: int, kind: Kind, make: Any) -> Any:
    """As open_segment(); one of another version is replaced: nothing in it is needed."""
    try:
        return open_segment(name, size, kind, make=make)
    except LayoutError:
        posix_ipc.unlink_shared_memory(name)
        return open_segment(name, size, kind, make=make)


def capacity(ring_bytes: int) -> int:
    """Records of a ring of about that size: a power of two."""
    return 1 << max(10, (ring_bytes // RECORD_BYTES).bit_length() - 1)


def open_ring(runtime: Runtime, index: int, ring_bytes: int) -> Any:
    """The ring of connmgr `index`, its owner; made if it is not there."""
    records = capacity(ring_bytes)

    def make(seg: Any) -> None:
        lib.trace_ring_format(seg, index, records, time.monotonic_ns())

    name = runtime.segment(names.TRACE, index)
    return _owned(name, lib.trace_ring_bytes(records), RING, make)


def open_control(runtime: Runtime) -> Any:
    """The control segment to write to, for the tracer; made if it is not there."""
    name = runtime.segment(names.TRACE_CONTROL)
    size = ffi.sizeof("struct trace_control")
    return _owned(name, size, CONTROL, lib.trace_control_format)


def view_control(runtime: Runtime) -> View:
    """The control segment to look at; made if it is not there."""
    made = open_control(runtime)
    lib.segment_unmap(made, ffi.sizeof("struct trace_control"))
    return View(runtime.segment(names.TRACE_CONTROL), CONTROL)


class Control:
    """The tracer's own segment."""

    def __init__(self, runtime: Runtime) -> None:
        self._control = open_control(runtime)
        self._words = ffi.new("uint64_t[2]")

    def set(self, recording: int, every: int) -> None:
        """1 in `every` messages is traced, for the recording of that number; 0: none is."""
        lib.trace_control_set(self._control, recording, every)

    @property
    def word(self) -> int:
        return int(lib.trace_control_word(self._control))

    def tail(self, ring: Ring) -> tuple[int, int]:
        """How far a ring was read: (records, subjects)."""
        words = self._words
        lib.trace_control_tail(self._control, ring.index, ring.epoch, words, words + 1)
        return int(words[0]), int(words[1])

    def set_tail(self, ring: Ring, records: int, subjects: int) -> None:
        """The tracer has read so far: the connmgr may write over what lies before."""
        lib.trace_control_set_tail(self._control, ring.index, ring.epoch, records, subjects)


class Ring:
    """The ring of a connmgr, mapped read-only. MissingError: it is not there (yet)."""

    def __init__(self, runtime: Runtime, index: int) -> None:
        import numpy as np

        self.index = index
        self._view = View(runtime.segment(names.TRACE, index), RING)
        self._ring = self._view.pointer
        self.capacity = int(self._ring.capacity)
        self.epoch = int(self._ring.epoch)
        records = lib.trace_records(self._ring)
        self._records = np.frombuffer(
            ffi.buffer(records, self.capacity * RECORD_BYTES), _dtype("struct trace_record")
        )
        self._subjects = lib.trace_subjects(self._ring)

    @property
    def current(self) -> bool:
        """False: open it again."""
        return self._view.current

    @property
    def head(self) -> int:
        return int(lib.trace_ring_head(self._ring))

    @property
    def subjects_head(self) -> int:
        return int(lib.trace_ring_subjects_head(self._ring))

    @property
    def word(self) -> int:
        """What its connmgr was told to trace when it looked last."""
        return int(lib.trace_ring_word(self._ring))

    def counts(self) -> dict[str, int]:
        fields = ("sequence", "dropped", "undelivered", "unmarked", "flights")
        return {name: int(getattr(self._ring, name)) for name in fields}

    def records(self, start: int, end: int) -> Any:
        """A copy of the records numbered so, as a numpy array of structs."""
        import numpy as np

        at, count = start % self.capacity, end - start
        first = self._records[at : at + count]
        if len(first) == count:
            return first.copy()
        return np.concatenate([first, self._records[: count - len(first)]])

    def subjects(self, start: int, end: int) -> dict[int, str]:
        """Hash (signed) -> subject."""
        found = {}
        for number in range(start, end):
            it = self._subjects[number % lib.TRACE_SUBJECTS]
            kept = min(int(it.len), SUBJECT_MAX)
            text = bytes(ffi.buffer(it.text, kept)).decode(errors="replace")
            found[signed(int(it.hash))] = text + ("..." if it.len > kept else "")
        return found


def signed(value: int) -> int:
    """A 64-bit number as the signed one with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def ring_count(runtime: Runtime) -> int:
    """How many connmgrs there are, or have been: those with a ring, without gaps."""
    count = 0
    while (names.SHM / runtime.segment(names.TRACE, count)[1:]).exists():
        count += 1
    return count


def rings(runtime: Runtime, connmgrs: int, known: dict[int, Ring]) -> dict[int, Ring]:
    """Those that are there, the known ones again if they are still the same."""
    found = {}
    for index in range(connmgrs):
        ring = known.get(index)
        try:
            found[index] = ring if ring is not None and ring.current else Ring(runtime, index)
        except (MissingError, LayoutError, PermissionsError):
            continue
    return found


def _dtype(struct: str) -> Any:
    import numpy as np

    fields = [
        (name, field) for name, field in ffi.typeof(struct).fields if field.type.kind != "array"
    ]
    return np.dtype(
        {
            "names": [name for name, _ in fields],
            "formats": [f"<u{ffi.sizeof(field.type)}" for _, field in fields],
            "offsets": [field.offset for _, field in fields],
            "itemsize": ffi.sizeof(struct),
        }
    )
