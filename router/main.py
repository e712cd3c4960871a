"""midair-router: knows who subscribed to what, and says who gets each message.

C does the routing (native/router.c); this decides what clients are told about the server,
and keeps the process in its role.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from midair import names
from midair.errors import MissingError
from midair.process import crash, events, program
from midair.process.program import Program
from midair.process.standstill import Standstill
from midair.version import __version__
from native import migrate
from native import router as native
from native.stats import Own

SHOW_S = 0.2  # how often counters are published
TURN_MS = 250  # the longest C keeps the processor from Python: signals, watchdog
PROTO = 1  # the server may send INFO again


def info(program: Program) -> dict[str, Any]:
    """INFO, without what differs from client to client."""
    config = program.config
    host, _, port = config.server.listen[0].address.rpartition(":")
    return {
        "server_id": f"MIDAIR-{program.instance}",
        "server_name": config.server.name,
        "version": __version__,
        "proto": PROTO,
        "host": host.strip("[]"),
        "port": int(port),
        "headers": True,
        "max_payload": config.limits.max_payload,
    }


def serve(program: Program) -> None:
    config, instance = program.config, program.instance
    crash.arm(program.called)
    program.pin()
    queues = {
        noun: [program.open_queue(noun, n).fd for n in range(config.connmgrs)]
        for noun in names.QUEUES
    }

    def open_engine(create: bool) -> native.Router:
        """Maps the segment and reads its head; nothing in it changes before start()."""
        routing = native.open_routing(
            instance,
            config.connmgrs,
            config.limits.max_connections,
            config.connmgr.subscriptions,
            create,
            program.ipc_gid,
        )
        return native.Router(
            routing,
            config.connmgrs,
            config.router.subjects,
            config.latency.spin_ns,
            config.latency.spin_adaptive,
            info(program),
            queues[names.REFS],
            queues[names.ORDERS],
            program.generation,
        )

    engine: native.Router | None = None
    standstill = Standstill(program, migrate.for_router(instance))

    def warm() -> bool:
        nonlocal engine
        if standstill.ahead:
            standstill.join()
            return False
        with contextlib.suppress(MissingError):
            engine = open_engine(create=False)
        return engine is not None

    program.acquire_lease(warm)
    standstill.end()
    started = time.monotonic()
    engine = engine or open_engine(create=True)
    shown = Own(instance, names.ROUTER, None, 0, program.ipc_gid).pointer
    engine.resume(shown)
    found = engine.start()
    recovered: dict[str, float] = {}
    if program.generation > 1:
        stats = engine.stats()
        recovered = {
            "subscriptions": found,
            "words": stats["found_words"],
            "batches": stats["found_batches"],
            "took_ms": round((time.monotonic() - started) * 1e3, 1),
        }
        program.log.info(
            "recovered: %d subscriptions; repaired: %d words of a step, %d batches; in %.1f ms",
            *recovered.values(),
        )
    engine.turn(0)
    program.ready()
    if recovered:
        program.event(events.RECOVERED, **recovered)
    turn_ms = min(TURN_MS, int(program.wait_s_max * 1000))
    engine.show(shown)
    next_show = time.monotonic() + SHOW_S
    while not program.stopping:
        engine.turn(turn_ms)
        if time.monotonic() >= next_show:
            next_show = time.monotonic() + SHOW_S
            engine.show(shown)
        program.watchdog()


def main() -> int:
    return program.run(names.ROUTER, serve, description="Midair's router.")


if __name__ == "__main__":
    sys.exit(main())
