"""The connection table (native/conntable.c): who is connected, and to which connmgr."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from midair import names
from midair.errors import MissingError, ResourceError
from midair.process import ipc
from midair.process.runtime import Runtime
from native import ffi, lib
from native.segment import Kind, refuse_other

KIND = Kind(
    lib.SEGMENT_CONNTABLE,
    lib.CONNTABLE_LAYOUT,
    lib.conntable_fingerprint(),
    "struct conntable *",
)
FREE: int = lib.CONN_FREE
ASSIGNED: int = lib.CONN_ASSIGNED
ACTIVE: int = lib.CONN_ACTIVE
CLOSED: int = lib.CONN_CLOSED
CONNMGRS_MAX: int = lib.PORTS_MAX
assert CONNMGRS_MAX == names.PORTS_MAX
ASSIGNED_MEANWHILE = 64  # more than that between two looks, and there is a third
_SLOT_BYTES: int = lib.conntable_bytes(1) - lib.conntable_bytes(0)


@dataclass(frozen=True)
class Slot:
    """A copy of one slot."""

    slot: int
    state: int
    connmgr: int
    uid: int
    accepted_ns: int
    listener: int
    ip: str
    port: int
    cookie: int


class ConnTable:
    """A mapping of the table. `pointer` is the `struct conntable *` for other C calls."""

    def __init__(self, fd: int, capacity: int) -> None:
        self._bytes = lib.conntable_bytes(capacity)
        mapped = lib.segment_map(fd, self._bytes, 0)
        if mapped == ffi.NULL:
            raise ResourceError(f"conntable: cannot map it: {os.strerror(ffi.errno)}")
        self.capacity = capacity
        self.pointer: Any = ffi.cast("struct conntable *", mapped)
        self._counts = ffi.new("uint32_t[]", CONNMGRS_MAX)
        self._slot = ffi.new("uint32_t *")
        self._uid = ffi.new("uint64_t *")
        self._free: Any = ffi.NULL

    @classmethod
    def open(cls, runtime: Runtime, capacity: int, *, create: bool) -> ConnTable:
        """Maps the table of an instance. `create`: the first process that needs it makes it.

        MissingError: it is not there, or its creator has not finished it yet.
        """
        name = runtime.segment(names.CONNTABLE)
        refuse_other(name, KIND)
        fd = ipc.open_segment(name, lib.conntable_bytes(capacity), create=create)
        try:
            table = cls(fd, capacity)
        finally:
            os.close(fd)
        try:
            if create:
                # Formatting twice would start the uids anew: one at a time, and only one.
                with runtime.lock("conntable"):
                    table._check(name, create)
            else:
                table._check(name, create)
        except BaseException:
            table.close()
            raise
        return table

    @classmethod
    def attach(cls, runtime: Runtime) -> ConnTable:
        """Maps the table of a running instance, of whatever capacity, to look at it."""
        fd = ipc.open_existing(runtime.segment(names.CONNTABLE), os.O_RDONLY)
        size = os.fstat(fd).st_size
        os.close(fd)
        capacity = max(0, size - lib.conntable_bytes(0)) // _SLOT_BYTES
        return cls.open(runtime, capacity, create=False)

    def _check(self, name: str, create: bool) -> None:
        what = (KIND.kind, KIND.layout, KIND.fingerprint)
        result = lib.segment_check(self.pointer, *what, self._bytes)
        if result == -errno.ENODATA and create:
            lib.conntable_format(self.pointer, self.capacity)
        elif result == -errno.ENODATA:
            raise MissingError(f"segment {name} is not finished yet")
        elif result < 0:
            raise ipc.damaged(name)

    def close(self) -> None:
        """Unmaps the table; `pointer` must not be used any more."""
        if self._free != ffi.NULL:
            lib.conntable_free_delete(self._free)
            self._free = ffi.NULL
        if self.pointer != ffi.NULL:
            lib.segment_unmap(self.pointer, self._bytes)
            self.pointer = ffi.NULL

    # The dispatcher's

    def reap(self) -> int:
        """Makes CLOSED slots FREE; how many are free now. The dispatcher's first call."""
        if self._free == ffi.NULL:
            self._free = lib.conntable_free_new(self.capacity)
            if self._free == ffi.NULL:
                raise ResourceError("conntable: no memory for the list of free slots")
        return int(lib.conntable_reap(self.pointer, self._free))

    def assign(
        self, connmgr: int, listener: int, ip: str, port: int, accepted_ns: int, cookie: int = 0
    ) -> tuple[int, int] | None:
        """(slot, uid) of a new connection, given to a connmgr; None when the table is full."""
        result = lib.conntable_assign(
            self.pointer,
            self._free,
            connmgr,
            listener,
            ip.encode(),
            port,
            accepted_ns,
            cookie,
            self._slot,
            self._uid,
        )
        if result == -errno.ENOSPC:
            return None
        if result < 0:
            raise ValueError(f"assign(connmgr={connmgr}, ip={ip!r}): {os.strerror(-result)}")
        return int(self._slot[0]), int(self._uid[0])

    def unassign(self, slot: int) -> None:
        """Takes back an assignment whose hand-off was never sent."""
        lib.conntable_unassign(self.pointer, self._free, slot)

    # Everybody's

    def counts(self) -> list[int]:
        """Connections of each connmgr, counted in the table (all CONNMGRS_MAX of them)."""
        lib.conntable_count(self.pointer, self._counts)
        return list(self._counts)

    def set_state(self, slot: int, state: int) -> None:
        """A step on the ring of conntable.h; the caller is the writer named there."""
        lib.conntable_set_state(self.pointer, slot, state)

    def state(self, slot: int) -> int:
        """The state of a slot: its first word."""
        return int(ffi.cast("uint32_t *", self._at(slot))[0])

    def is_assigned(self, slot: int, uid: int, connmgr: int) -> bool:
        """Whether there is such a slot, which waits for that connmgr to serve that connection."""
        if not 0 <= slot < self.capacity:
            return False
        it = self._at(slot)
        return self.state(slot) == ASSIGNED and it.uid == uid and it.connmgr == connmgr

    def slot(self, slot: int) -> Slot:
        """A copy of a slot."""
        it = self._at(slot)
        return Slot(
            slot=slot,
            state=self.state(slot),
            connmgr=it.connmgr,
            uid=it.uid,
            accepted_ns=it.accepted_ns,
            listener=it.listener,
            ip=ffi.string(it.ip).decode(),
            port=it.port,
            cookie=it.cookie,
        )

    def used(self, connmgr: int = CONNMGRS_MAX, state: int | None = None) -> Iterator[Slot]:
        """Every slot that is not FREE, of one connmgr or of all, in one state or any."""
        for slot in self._used(connmgr):
            if state is None or self.state(slot) == state:
                yield self.slot(slot)

    def slots_by_uid(self, connmgr: int) -> dict[int, int]:
        """uid -> slot of what `used` lists, without copying the rest: a start is in a hurry."""
        slots = self.pointer.slots
        found = {}
        for slot in self._used(connmgr):
            uid = slots[slot].uid
            # Closed when it was listed, it may be another connmgr's by now: see conntable_assign,
            # which stores that before the uid.
            if slots[slot].connmgr == connmgr:
                found[uid] = slot
        return found

    def _used(self, connmgr: int) -> list[int]:
        """Slots that were in use all the while are in it, whatever is assigned meanwhile."""
        room = 0
        while True:
            found = ffi.new("uint32_t[]", room + 1)
            count = lib.conntable_list(self.pointer, connmgr, room, found)
            if count <= room:
                return list(found[0:count])
            room = count + ASSIGNED_MEANWHILE

    def _at(self, slot: int) -> Any:
        if not 0 <= slot < self.capacity:
            raise IndexError(slot)
        return ffi.addressof(self.pointer.slots[slot])
