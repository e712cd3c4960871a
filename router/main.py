"""midair-router: knows who subscribed to what, and says who gets each message.

C does the routing (native/router.c); this keeps the process in its role.
"""

from __future__ import annotations

import sys

from midair import names
from midair.process import role
from midair.process.program import Program
from midair.process.tables import Tables
from native import migrate
from native import router as native
from native.stats import Own, router_gauges, router_totals


class Router(role.Role):
    """The router at work."""

    turn_s_max = 0.25  # the longest C keeps the processor from Python: signals, watchdog

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.memory = migrate.for_router(program.runtime)
        self._tables = Tables(self.log, program.event)
        self._queues = {
            noun: [program.open_queue(noun, n).fd for n in range(self.config.ports)]
            for noun in names.QUEUES
        }

    def open(self, create: bool) -> None:
        """Maps the segment and reads its head; nothing in it changes before recover()."""
        config, program = self.config, self.program
        routing = native.open_routing(
            program.runtime,
            config.connmgrs,
            config.limits.max_connections + config.router.other_ports,
            config.connmgr.subscriptions,
            create,
            program.ipc_gid,
            config.router.other_ports,
        )
        self._engine = native.Router(
            routing,
            config.ports,
            config.router.subjects,
            config.latency.spin_ns,
            config.latency.spin_adaptive,
            self._queues[names.REFS],
            self._queues[names.ORDERS],
            program.generation,
            [program.runtime.life(names.CONNMGR, n) for n in range(config.connmgrs)],
        )

    def recover(self) -> dict[str, int]:
        program = self.program
        program.pin()
        self._stats = Own(program.runtime, names.ROUTER, None, 0, program.ipc_gid).pointer
        self._engine.resume(self._stats)
        found = self._engine.start(program.watchdog)  # with very many subscriptions it takes long
        if program.generation == 1:
            return {}
        stats = self._engine.stats()
        return {
            "subscriptions": found,
            "words": stats["found_words"],
            "batches": stats["found_batches"],
        }

    def turn(self, timeout_s: float) -> None:
        self._engine.turn(int(timeout_s * 1000))

    def show(self) -> None:
        self._engine.show(self._stats)
        now, ever = router_gauges(self._stats), router_totals(self._stats)
        look = self._tables.look
        subjects = now.subjects - now.subjects_cached
        look("index of subjects", subjects, now.subjects_max, "router.subjects", ever.refused)
        look("requests", now.requests, now.requests_max, "fixed")
        look("responders of requests", now.legs, now.legs_max, "fixed")


def main() -> int:
    return role.run(names.ROUTER, Router, description="Midair's router.")


if __name__ == "__main__":
    sys.exit(main())
