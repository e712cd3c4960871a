"""The connection manager's data plane (native/connmgr.c) and its segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from midair import names
from midair.process.runtime import Runtime
from native import ffi, lib
from native.segment import Kind, check, open_segment

ARENA = Kind(lib.SEGMENT_ARENA, lib.ARENA_LAYOUT, lib.arena_fingerprint(), "struct arena *")
JOURNAL = Kind(
    lib.SEGMENT_JOURNAL, lib.JOURNAL_LAYOUT, lib.journal_fingerprint(), "struct journal *"
)

FD: int = lib.EVENT_FD
CONNECT: int = lib.EVENT_CONNECT
CLOSED: int = lib.EVENT_CLOSED
ENDED: int = lib.EVENT_ENDED

VERBOSE: int = lib.CONN_VERBOSE
PEDANTIC: int = lib.CONN_PEDANTIC
NO_ECHO: int = lib.CONN_NO_ECHO
HEADERS: int = lib.CONN_HEADERS
NO_RESPONDERS: int = lib.CONN_NO_RESPONDERS
GREET_AGAIN: int = lib.CONN_GREET_AGAIN

# Why a connection ended: enum close_reason, in its order.
REASONS = (
    "",
    "client closed",
    "read error",
    "write error",
    "protocol error",
    "stale connection",
    "slow consumer (pending bytes)",
    "slow consumer (write deadline)",
    "maximum subscriptions exceeded",
    "server stopped",
    "maximum rate exceeded",
    "client name taken",
    "slow consumer (no room for output)",
    "replaced by a client of the same name",
    "unfinished message, others waited for its room",
    "lame duck",
)
assert len(REASONS) == lib.CLOSE_REASONS
PROTOCOL: int = lib.CLOSE_PROTOCOL
LAME_DUCK: int = lib.CLOSE_LAME_DUCK
GREETING_MAX: int = lib.CONNMGR_GREETING_MAX  # bytes, with the one that ends it
# In a greeting: what is filled in for each client.
CLIENT_ID = bytes([lib.GREETING_CLIENT_ID])
CLIENT_IP = bytes([lib.GREETING_CLIENT_IP])
NAME_MAX: int = lib.JOURNAL_NAME_MAX  # bytes of a name, with the one that ends it

SUBSCRIPTIONS: int = lib.CLOSE_SUBSCRIPTIONS
BLOCKS_KEPT: int = lib.JOURNAL_BLOCKS_MIN // 2  # OUTPUT_BLOCKS_KEPT: free before a batch is begun
SLOW_REASONS = (lib.CLOSE_SLOW_BYTES, lib.CLOSE_SLOW_DEADLINE, lib.CLOSE_SLOW_ROOM)

# What happens to a slow consumer, as it is configured: enum slow_policy, in its order.
SLOW = ("disconnect", "drop-newest", "backpressure")


@dataclass(frozen=True)
class Event:
    """Something Python has to decide on."""

    type: int
    slot: int
    uid: int
    code: int
    data: bytes


def pending(stats: Any, slot: int, uid: int) -> int:
    """Bytes that waited for a client when its counters were published last; 0: not known."""
    row = ffi.new("struct stats_conn *")
    known = slot < stats.rows and lib.stats_read_conn(stats, slot, row)
    return int(row.pending) if known and ffi.cast("uint64_t *", row)[0] == uid else 0


def arena_chunks(wanted_bytes: int) -> int:
    """How many chunks an arena of about that size has."""
    return int(
        min(max(wanted_bytes // lib.ARENA_CHUNK_BYTES, lib.ARENA_CHUNKS_MIN), lib.ARENA_CHUNKS_MAX)
    )


def open_arena(runtime: Runtime, index: int, chunks: int, create: bool = True) -> Any:
    """The arena of connmgr `index`; `create`: made if it is not there."""

    def make(seg: Any) -> None:
        lib.arena_format(seg, index, chunks)

    return open_segment(
        runtime.segment(names.ARENA, index),
        lib.arena_bytes(chunks),
        ARENA,
        make=make if create else None,
    )


def arena_census(arena: Any) -> tuple[int, int]:
    """(messages alive, chunks in use)."""
    live, busy = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    lib.arena_census(arena, live, busy)
    return int(live[0]), int(busy[0])


def open_journal(
    runtime: Runtime, index: int, conns: int, subs: int, output_bytes: int, create: bool = True
) -> Any:
    """The journal of connmgr `index`, its own connmgr's alone; `create`: made if missing."""

    def make(seg: Any) -> None:
        lib.journal_format(seg, index, conns, subs, blocks)

    blocks = max(output_bytes // lib.JOURNAL_BLOCK_BYTES, lib.JOURNAL_BLOCKS_MIN)
    return open_segment(
        runtime.segment(names.JOURNAL, index),
        lib.journal_bytes(conns, subs, blocks),
        JOURNAL,
        make=make if create else None,
        hot=lib.journal_hot_bytes(),
    )


class Connmgr:
    """The engine: one `turn` per call returns only the events Python must look at."""

    def __init__(self, journal: Any, table: Any, refs: int, orders: int, **conf: Any) -> None:
        given = ffi.new("struct connmgr_conf *", conf)
        found = ffi.new("struct connmgr **")
        result = lib.connmgr_open(given, journal, table, refs, orders, found)
        check(result, "opening the connection manager")
        self._cm = found[0]
        self._uid = ffi.new("uint64_t *")
        self._shown = 0  # where show() goes on

    def add_arena(self, index: int, arena: Any) -> None:
        """Makes the bodies of connmgr `index` readable."""
        check(lib.connmgr_add_arena(self._cm, index, arena), f"arena {index}")

    def trace(self, ring: Any, control: Any, generation: int) -> None:
        """Where records of deliveries go, and what says whether there are any."""
        check(lib.trace_open(self._cm, ring, control, generation), "opening the trace ring")

    def load(self) -> int:
        """Reads the journal: how many connections a predecessor had."""
        return check(lib.connmgr_load(self._cm), "reading the journal")

    def needs_socket(self, slot: int) -> int | None:
        """The uid of the connection in that slot if it waits for its socket."""
        return int(self._uid[0]) if lib.connmgr_found(self._cm, slot, self._uid) else None

    def readopt(self, slot: int, uid: int, fd: int) -> None:
        """Gives a connection of a predecessor its socket back."""
        check(lib.connmgr_readopt(self._cm, slot, uid, fd), f"connection {uid}")

    def start(self) -> list[Event]:
        """Rebuilds the rest; connections without a socket are ended."""
        return self._take(check(lib.connmgr_start(self._cm), "recovering"))

    def watch(self, fd: int, tag: int) -> None:
        """Readability of `fd` becomes an FD event with that tag."""
        check(lib.connmgr_watch(self._cm, fd, tag), "watching a descriptor")

    def unwatch(self, fd: int) -> None:
        """Before it is closed."""
        lib.connmgr_unwatch(self._cm, fd)

    def turn(self, timeout_ms: int) -> list[Event]:
        """Moves messages until something needs a decision, or for at most that long."""
        return self._take(check(lib.connmgr_turn(self._cm, timeout_ms), "serving"))

    def tick(self) -> list[Event]:
        """Once a second: pings, stale peers, deadlines."""
        lib.connmgr_tick(self._cm)
        return self._take(-1)

    def adopt(self, slot: int, uid: int, fd: int) -> None:
        """Takes over a new connection."""
        check(lib.connmgr_adopt(self._cm, slot, uid, fd), f"connection {uid}")

    def connected(self, slot: int, uid: int, options: int, name: str) -> list[Event]:
        """What it says about itself was accepted; goes on with what the client sent after it.

        `name`: what it asks to be addressed by, or empty.
        """
        text = name.encode()
        lib.connmgr_connected(self._cm, slot, uid, options, text, len(text))
        return self._take(-1)

    def end(self, slot: int, uid: int, reason: int, text: str = "") -> None:
        """Ends the connection; `text` is what it is told, if the reason is one it is told."""
        line = text.encode()
        lib.connmgr_end(self._cm, slot, uid, reason, line, len(line))

    def set_greeting(self, listener: int, text: bytes) -> None:
        """What clients of that listener are greeted with from now on."""
        check(lib.connmgr_set_greeting(self._cm, listener, text, len(text)), "a greeting")

    def greet_again(self, slot: int, uid: int) -> bool:
        """Greets a client once more; False: it cannot take it now, or ever."""
        return int(lib.connmgr_greet_again(self._cm, slot, uid)) == 0

    @property
    def idle(self) -> bool:
        """It has no connection and no message, and nobody waits for anything of it."""
        return bool(lib.connmgr_idle(self._cm))

    @property
    def found_batch(self) -> bool:
        """A batch of orders lies here that a predecessor did not finish."""
        return bool(lib.connmgr_found_batch(self._cm))

    def served(self) -> Iterator[tuple[int, int]]:
        """(slot, uid) of every connection served now."""
        for slot in range(lib.connmgr_slots(self._cm)):
            if lib.connmgr_socket(self._cm, slot, self._uid) >= 0:
                yield slot, int(self._uid[0])

    def sockets(self) -> Iterator[tuple[int, int]]:
        """(uid, descriptor) of every connection served now."""
        for slot in range(lib.connmgr_slots(self._cm)):
            fd = lib.connmgr_socket(self._cm, slot, self._uid)
            if fd >= 0:
                yield int(self._uid[0]), fd

    @property
    def connections(self) -> int:
        """Clients served now."""
        return int(lib.connmgr_conn_count(self._cm))

    def bucket(self, slot: int, sid: bytes) -> int:
        """Where a subscription of this connection is looked for. Only tests ask."""
        return int(lib.connmgr_sub_bucket(self._cm, slot, sid, len(sid)))

    def stats(self) -> dict[str, Any]:
        """Counters, by name; `closed` by reason, `refused` by error."""
        it = lib.connmgr_get_stats(self._cm)
        return {
            name: list(getattr(it, name)) if name in ARRAYS else int(getattr(it, name))
            for name in STATS
        }

    def resume(self, stats: Any) -> None:
        """After load(): goes on counting from what a predecessor has shown."""
        lib.connmgr_resume(self._cm, stats)

    def show(self, stats: Any) -> None:
        """Copies counters, and the next few thousand connections, to where others see them."""
        self._shown = lib.connmgr_show(self._cm, stats, self._shown)

    def describe(self, stats: Any, slot: int, uid: int, name: str, lang: str, version: str) -> None:
        """What a client said about itself, for others to see."""
        texts = [text.encode(errors="replace") for text in (name, lang, version)]
        given = [part for text in texts for part in (text, len(text))]
        lib.connmgr_describe(self._cm, stats, slot, uid, *given)

    def _take(self, count: int) -> list[Event]:
        return list(self._events(count))

    def _events(self, count: int) -> Iterator[Event]:
        events = lib.connmgr_events(self._cm)
        for at in range(count if count >= 0 else lib.connmgr_event_count(self._cm)):
            it = events[at]
            data = bytes(ffi.buffer(it.data, it.len)) if it.len else b""
            yield Event(it.type, it.slot, it.uid, it.code, data)
        lib.connmgr_forget_events(self._cm)


STATS = tuple(name for name, _ in ffi.typeof("struct connmgr_stats").fields)
ARRAYS = ("closed", "refused")
