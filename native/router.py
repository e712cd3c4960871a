"""The router's data plane (native/router.c) and its segment."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

from midair import names
from midair.errors import LayoutError
from midair.process.runtime import Runtime
from native import ffi, lib
from native.segment import Kind, check, open_segment

KIND = Kind(lib.SEGMENT_ROUTING, lib.ROUTING_LAYOUT, lib.routing_fingerprint(), "struct routing *")


def open_routing(
    runtime: Runtime,
    connmgrs: int,
    sessions: int,
    subs_each: int,
    create: bool = True,
    gid: int | None = None,
    others: int = 0,
) -> Any:
    """The routing segment. The router's alone; `create`, under its lease: made if missing.

    `others`: ports behind those of the connection managers.

    `gid`: a group that may read it, to list subscriptions (census.py).

    There is a place in it for every port that can be added; the room that must be there is that of
    the ports there are.
    """

    ports = connmgrs + others
    size = lib.routing_bytes(sessions, subs_each)
    unused = (names.PORTS_MAX - ports) * (size - lib.routing_bytes(sessions, 0)) // names.PORTS_MAX
    unused += lib.routing_hot_bytes(names.PORTS_MAX) - lib.routing_hot_bytes(ports)

    def make(seg: Any) -> None:
        lib.routing_format(seg, connmgrs, others, sessions, subs_each)

    return open_segment(
        runtime.segment(names.ROUTING),
        size,
        KIND,
        make=make if create else None,
        hot=lib.routing_hot_bytes(ports),
        mode=0o600 if gid is None else 0o640,
        gid=gid,
        room=size - unused,
    )


class Router:
    """The routing engine: one `turn` per call, no Python per message."""

    def __init__(
        self,
        routing: Any,
        ports: int,
        subjects: int,
        spin_ns: int,
        spin_adaptive: bool,
        refs: list[int],
        orders: list[int],
        generation: int = 1,
        lives: Sequence[int] = (),
    ) -> None:
        """`lives`: which life each port is in (rule R8); those that are not given: the first."""
        conf = ffi.new("struct router_conf *")
        conf.ports = ports
        conf.subjects = subjects
        conf.spin_ns = spin_ns
        conf.spin_adaptive = spin_adaptive
        conf.generation = generation
        conf.lives[0 : len(lives)] = list(lives)
        found = ffi.new("struct router **")
        check(lib.router_open(conf, routing, refs, orders, found), "opening the router")
        self._rt = found[0]

    def start(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Finishes what a predecessor began and rebuilds the index: subscriptions found.

        With very many this takes a while: `meanwhile` is called now and then.
        """
        while more := lib.router_start(self._rt):
            if more == -errno.EBUSY:
                raise LayoutError(
                    "there are subscriptions of connection managers past connmgr.count: it can be "
                    "lowered when their clients have left (connmgr.retiring)"
                )
            check(more, "rebuilding the index")
            if meanwhile is not None:
                meanwhile()
        return int(lib.router_started(self._rt))

    def turn(self, timeout_ms: int) -> None:
        """Routes for at most that long."""
        check(lib.router_turn(self._rt, timeout_ms), "routing")

    def resume(self, stats: Any) -> None:
        """Before start(): goes on counting from what a predecessor has shown."""
        lib.router_resume(self._rt, stats)

    def show(self, stats: Any) -> None:
        """Copies the counters to where others see them."""
        lib.router_show(self._rt, stats)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        it = lib.router_get_stats(self._rt)
        return {name: int(getattr(it, name)) for name in STATS}


STATS = tuple(name for name, _ in ffi.typeof("struct router_stats").fields)
