"""The segments of an instance for tests that break a rule on purpose: read, changed, put back.

The layouts are not written down again: they are taken from the headers in native/, whose structs
are declared to cffi without their comments.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

import cffi

from midair import names
from midair.process.runtime import Runtime
from native import lib
from tests.support.instance import ROOT, Instance, eventually, processes_of

SOURCES = ROOT / "native" / "src"
HEADERS = (
    "limits",
    "ledger",
    "segment",
    "conntable",
    "arena",
    "redo",
    "batch",
    "records",
    "port",
    "journal",
    "routing",
)

CHUNK_MESSAGES: int = lib.ARENA_CHUNK_MESSAGES
CHUNK_BYTES: int = lib.ARENA_CHUNK_BYTES
BATCH_HEAD = 32
GENERATION: int = lib.LEDGER_GENERATION
SEG_BODY = 1 << 63
SEG_SHARED = 1 << 62
SUB_ACTIVE, SUB_DYING = 1 << 63, 1 << 62

# Small enough to have several at once, large enough for what the tests send.
CONFIG = """
[limits]
max_connections = 64
max_pending = "1GiB"
write_deadline_s = 600
[connmgr]
arena_bytes = "64MiB"
output_bytes = "128MiB"
subscriptions = 1024
[queues]
depth = 6
"""


def declare(headers: tuple[str, ...] = HEADERS) -> cffi.FFI:
    """Every struct of the headers."""
    ffi = cffi.FFI()
    values: dict[str, int] = {}
    for stem in headers:
        text = re.sub(r"/\*.*?\*/", "", next(SOURCES.rglob(f"{stem}.h")).read_text(), flags=re.S)
        for name, value in re.findall(r"^#define (\w+) \(?([\d xa-fA-Fu*]+?)\)?\s*$", text, re.M):
            values[name] = eval(value.replace("u", ""))
        for struct in re.findall(r"^(?:API )?(struct \w+ \{.*?^\};)", text, re.M | re.S):
            if re.search(r"\b(mqd_t|redo_log \*)", struct):
                continue  # private to a process
            struct = struct.replace("_Atomic ", "")
            struct = re.sub(r"\[([^\]]+)\]", lambda m: f"[{_number(m.group(1), values)}]", struct)
            ffi.cdef(struct)
    return ffi


def _number(text: str, values: dict[str, int]) -> int:
    for name in re.findall(r"[A-Z_][A-Z0-9_]+", text):
        text = text.replace(name, str(values[name]))
    return int(eval(text.replace("u", "").replace("/", "//")))


ffi = declare()
assert ffi.sizeof("struct batch") == 8192
assert -(-ffi.sizeof("struct journal") // 4096) * 4096 == lib.journal_hot_bytes()
assert -(-ffi.sizeof("struct routing") // 4096) * 4096 == lib.routing_hot_bytes(0)
assert ffi.sizeof("struct conntable") == lib.conntable_bytes(0)


class Segments:
    """Writable mappings of everything an instance has. `set` remembers what it changed."""

    def __init__(self, instance: str, connmgrs: int) -> None:
        self._maps: list[mmap.mmap] = []
        self._undo: list[Callable[[], None]] = []
        self.table = self._map(instance, names.CONNTABLE, None, "struct conntable *")
        self.routing = self._map(instance, names.ROUTING, None, "struct routing *")
        each = range(connmgrs)
        self.arenas = [self._map(instance, names.ARENA, n, "struct arena *") for n in each]
        self.journals = [self._map(instance, names.JOURNAL, n, "struct journal *") for n in each]

    def _map(self, instance: str, noun: str, index: int | None, kind: str) -> Any:
        fd = os.open(f"/dev/shm{Runtime.open(instance).segment(noun, index)}", os.O_RDWR)
        mapping = mmap.mmap(fd, 0)
        os.close(fd)
        self._maps.append(mapping)
        return ffi.cast(kind, ffi.from_buffer(mapping))

    def close(self) -> None:
        for name in ("table", "routing", "arenas", "journals"):
            delattr(self, name)
        self._undo.clear()
        for mapping in self._maps:
            mapping.close()

    def __enter__(self) -> Segments:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Changing

    def set(self, at: Any, field: str | int, value: Any) -> None:
        """Changes a field of a struct, or an item of an array, until `restore`."""
        if isinstance(field, int):
            old = at[field]
            self._undo.append(lambda: at.__setitem__(field, old))
            at[field] = value
            return
        old = getattr(at, field)
        if isinstance(old, ffi.CData):
            old = bytes(ffi.buffer(old))
            self._undo.append(lambda: ffi.memmove(getattr(at, field), old, len(old)))
            ffi.memmove(getattr(at, field), value, len(value))
            return
        self._undo.append(lambda: setattr(at, field, old))
        setattr(at, field, value)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    # Finding

    def _at(self, segment: Any, offset: int, kind: str) -> Any:
        return ffi.cast(kind, ffi.cast("char *", segment) + offset)

    def conns(self, n: int) -> Any:
        journal = self.journals[n]
        return self._at(journal, journal.conns_at, "struct conn_rec *")

    def subs(self, n: int) -> Any:
        journal = self.journals[n]
        return self._at(journal, journal.subs_at, "struct sub_rec *")

    def segs(self, n: int) -> Any:
        journal = self.journals[n]
        return self._at(journal, journal.segs_at, "struct out_seg *")

    def words(self, n: int) -> Any:
        return self._at(self.arenas[n], self.arenas[n].words, "uint64_t *")

    def entries(self, n: int) -> Any:
        return self._at(self.arenas[n], self.arenas[n].entries, "struct arena_entry *")

    def lane(self, n: int) -> Any:
        lanes = self._at(self.routing, self.routing.lanes_at, "struct routing_lane *")
        return ffi.addressof(lanes[n])

    def sessions(self) -> Any:
        return self._at(self.routing, self.routing.clients_at, "struct routing_client *")

    def requests(self) -> Any:
        return self._at(self.routing, self.routing.requests_at, "struct mode_request *")

    def legs(self) -> Any:
        return self._at(self.routing, self.routing.legs_at, "struct mode_leg *")

    def asides(self) -> Any:
        return self._at(self.routing, self.routing.asides_at, "struct routing_aside *")

    def names(self) -> Any:
        return self._at(self.routing, self.routing.names_at, "struct mode_name *")

    def aside(self, n: int) -> Any:
        return self._at(self.routing, self.routing.asides_at, "struct routing_aside *") + n

    def routing_subs(self, n: int) -> Any:
        first = self._at(self.routing, self.routing.subs_at, "struct routing_sub *")
        return first + n * self.routing.subs_each

    def first_record(self, batch: Any, kind: str) -> Any:
        return self._at(ffi.addressof(batch), BATCH_HEAD, f"struct {kind} *")

    def slot(self, ring: Any, seq: int) -> Any:
        return ring.slots[seq % len(ring.slots)]

    def word(self, handle: int) -> tuple[Any, int]:
        """(words of the arena, entry) of a message."""
        return self.words(handle >> 58), handle & 0xFFFFFFFF

    def output(self, n: int, slot: int) -> list[int]:
        """The segments of a connection's pending output, in order."""
        record, segs = self.conns(n)[slot], self.segs(n)
        found = []
        at = record.out_head
        while at:
            found.append(at - 1)
            at = 0 if at == record.out_tail else segs[at - 1].next
        return found


def kill_all(instance: Instance) -> None:
    """Kills everybody. The manager is stopped meanwhile: it starts nobody, and a part that is
    stopped is not woken up by its death, as the kernel does with those it leaves behind."""
    assert instance.process is not None
    instance.process.send_signal(signal.SIGSTOP)
    for pid in processes_of(instance.name):
        if pid != instance.process.pid:
            os.kill(pid, signal.SIGKILL)
    instance.kill_manager()
    eventually(lambda: not processes_of(instance.name), "everything is dead")


def leak(s: Segments) -> None:
    """A message that was let go lives again, and nobody knows of it."""
    arena, words = s.arenas[0], s.words(0)
    entry = next(
        c * CHUNK_MESSAGES + i
        for c in range(arena.chunk_count)
        for i in range(arena.chunks[c].messages)
        if arena.chunks[c].state in (1, 2)
        and words[c * CHUNK_MESSAGES + i] >> 58 == 1
        and words[c * CHUNK_MESSAGES + i] & 0xFFFFFFFF == 1
    )
    s.set(words, entry, words[entry] & GENERATION)
