"""midair-monitor: answers HTTP about an instance, and is needed by nobody.

It maps the statistics and the routing table read-only and reads the runtime directory; it can
open neither bodies nor journals when it runs as a user of its own. Killed, it is started
again; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midair import names
from midair.errors import LayoutError, MidairError, MissingError, PermissionsError
from midair.exits import Exit
from midair.monitor import metrics
from midair.monitor.http import Answer, Server, plain
from midair.monitor.natsz import Nats
from midair.monitor.query import BadQueryError, callback
from midair.process.program import Program, run

INDEX = """\
<!DOCTYPE html><title>Midair</title><h1>Midair</h1><ul>
<li><a href="/healthz">/healthz</a><li><a href="/varz">/varz</a><li><a href="/connz">/connz</a>
<li><a href="/subsz">/subsz</a><li><a href="/routez">/routez</a><li><a href="/leafz">/leafz</a>
<li><a href="/gatewayz">/gatewayz</a><li><a href="/accountz">/accountz</a>
<li><a href="/accstatz">/accstatz</a><li><a href="/jsz">/jsz</a>
<li><a href="/metrics">/metrics</a></ul>
"""


class Monitor:
    """What each path is answered with."""

    def __init__(self, nats: Nats) -> None:
        self._nats = nats
        self._exporter = metrics.Exporter(self._seen)
        self._paths: dict[str, Callable[[Mapping[str, str]], Answer]] = {
            "/": lambda _: Answer(200, "text/html; charset=utf-8", INDEX.encode()),
            "/healthz": self._healthz,
            "/varz": lambda query: _json(self._nats.varz(), query),
            "/connz": lambda query: _json(self._nats.connz(query), query),
            "/subsz": lambda query: _json(self._nats.subsz(query), query),
            "/subscriptionsz": lambda query: _json(self._nats.subsz(query), query),
            "/routez": lambda query: _json(self._nats.routez(), query),
            "/gatewayz": lambda query: _json(self._nats.gatewayz(), query),
            "/leafz": lambda query: _json(self._nats.leafz(), query),
            "/accountz": lambda query: _json(self._nats.accountz(query), query),
            "/accstatz": lambda query: _json(self._nats.accstatz(query), query),
            "/jsz": lambda query: _json(self._nats.jsz(), query),
            "/metrics": self._metrics,
        }

    def handle(self, path: str, query: Mapping[str, str]) -> Answer:
        """The answer to one request."""
        answer = self._paths.get(path)
        if answer is None:
            return plain(404, f"there is {', '.join(self._paths)}")
        counted = self._nats.requests
        counted[path] = counted.get(path, 0) + 1
        try:
            return answer(query)
        except BadQueryError as error:
            return plain(400, str(error))
        except (MissingError, LayoutError, PermissionsError) as error:
            return plain(503, str(error))

    def _healthz(self, query: Mapping[str, str]) -> Answer:
        status, said = self._nats.healthz()
        return _json(said, query, status)

    def _metrics(self, _query: Mapping[str, str]) -> Answer:
        return Answer(200, metrics.CONTENT_TYPE, self._exporter.page())

    def _seen(self) -> metrics.Seen:
        nats = self._nats
        healthy = nats.healthz()[0] == 200
        now = nats.look()  # before the rates, which it may renew
        return metrics.Seen(nats.runtime.instance, now, nats.rates, nats.sources.events(), healthy)


def _json(said: dict[str, Any], query: Mapping[str, str], status: int = 200) -> Answer:
    text = json.dumps(said, indent=2)
    if name := callback(query):
        return Answer(status, "application/javascript", f"{name}({text})".encode())
    return Answer(status, "application/json", text.encode())


async def _loop(program: Program, listener: socket.socket) -> None:
    nats = Nats(program.runtime, program.config)
    server = await Server(Monitor(nats).handle, program.log).start(listener)
    woken = asyncio.Event()

    def wake() -> None:
        program.drain_wake()
        woken.set()

    asyncio.get_running_loop().add_reader(program.wake_fd, wake)
    program.ready()
    while not program.stopping:
        program.watchdog()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), program.wait_s_max)
        woken.clear()
    server.close()


def serve(program: Program) -> None:
    fds = program.listen_fds(names.FD_MONITOR)
    if len(fds) != 1:
        raise MidairError(
            f"needs one listening socket called {names.FD_MONITOR!r} (LISTEN_FDNAMES), "
            f"got {len(fds)}; it is started by `midair up --monitor PORT` or systemd",
            Exit.USAGE,
        )
    program.acquire_lease()
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    asyncio.run(_loop(program, listener))


def main(argv: Sequence[str] | None = None) -> int:
    return run(names.MONITOR, serve, argv, description="Answers HTTP about an instance.")


if __name__ == "__main__":
    sys.exit(main())
