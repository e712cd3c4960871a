"""How long a stream stands still when a part of the server is killed, replaced or restarted.

    python -m bench.pauses                        30 events of each kind, Midair and nats-server
    python -m bench.pauses --small                a few of each, tiny: does it still work?
    python -m bench.pauses --only 'kill router,kill connmgr' --repeat 100 --json today.json

One stream of numbered messages at a steady pace, many idle connections with subscriptions, and
a client that connects anew all the time. For each event: the longest time without a delivery,
the longest connect, and what was lost, doubled, reordered or dropped. nats-server is killed and
started again at once, as a service manager would; its clients reconnect at once and by
themselves, and lose nothing that they had not yet handed to the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any

from bench.peers import ROOT, Midair, NatsServer, PeerError
from midair import names
from midair.keeper.client import KeeperClient
from midair.process import questions, wire
from midair.process.runtime import ACTIVE, STANDBY, Runtime

PATIENCE_S = 120.0
BEFORE_S, AFTER_S = 0.05, 0.3  # of an event that belong to it
ROLES = (names.ROUTER, names.CONNMGR, names.DISPATCHER, names.KEEPER)
RESTART = "nats-server restarted"  # the only kind that may do harm
WITH_STANDBY = (names.ROUTER, names.CONNMGR, names.DISPATCHER)  # the keeper has none


class PausesError(Exception):
    """Something that should have happened did not."""


@dataclass(frozen=True)
class Size:
    """How much load."""

    connections: int = 1000
    subscriptions: int = 10_000
    rate: float = 2000.0
    repeat: int = 30


SMALL = Size(connections=20, subscriptions=100, rate=200.0, repeat=2)


@dataclass(frozen=True)
class Event:
    """What was seen of one event."""

    gap_ms: float
    connect_ms: float
    lost: int
    duplicated: int
    reordered: int
    dropped: int  # connections of the stream and the crowd
    refused: int  # attempts to connect that failed

    def harmed(self) -> bool:
        return any((self.lost, self.duplicated, self.reordered, self.dropped, self.refused))


# ---- clients ------------------------------------------------------------------------------------


class Client:
    """A process of bench.pauses_clients."""

    def __init__(self, kind: str, port: int, *options: object) -> None:
        self.kind = kind
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.pauses_clients", kind, str(port), *map(str, options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in: IO[bytes] = self.process.stdin
        self._out: IO[bytes] = self.process.stdout

    def answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        os.set_blocking(self._out.fileno(), False)
        text = b""
        while not text.endswith(b"\n"):
            text += self._out.read() or b""
            if self.process.poll() is not None and not text:
                raise PausesError(f"the {self.kind} ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise PausesError(f"the {self.kind} does not answer")
            time.sleep(0.001)
        return questions.parse(text)

    def ask(self, **question: float) -> dict[str, Any]:
        self._in.write(questions.line(question).encode())
        self._in.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._out.close()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()


class Load:
    """All clients of one server."""

    def __init__(self, port: int, size: Size, stack: ExitStack) -> None:
        def start(kind: str, *options: object) -> Client:
            client = Client(kind, port, *options)
            stack.callback(client.close)
            client.answer()
            return client

        self.crowd = start("crowd", size.connections, size.subscriptions)
        self.subscriber = start("subscriber")
        self.publisher = start("publisher", float(size.rate))
        self.knocker = start("knocker", 0.02)
        self.before = self.look(0.0, 0.0)

    def look(self, since: float, until: float) -> dict[str, float]:
        """All counts so far, and the longest times between two moments."""
        said = self.subscriber.ask(since=since, until=until)
        knocks = self.knocker.ask(since=since, until=until)
        drops = said["drops"] + self.publisher.ask()["drops"] + self.crowd.ask()["drops"]
        counts = {name: said[name] for name in ("gap_s", "lost", "duplicated", "reordered")}
        return {**counts, **knocks, "drops": drops}

    def caught_up(self) -> bool:
        """Waits until what is published now has arrived, or is known to be lost."""
        wanted = self.publisher.ask()["number"]
        deadline = time.monotonic() + PATIENCE_S
        while self.subscriber.ask(since=0.0, until=0.0)["next"] < wanted:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def event(self, happen: Callable[[], None]) -> Event:
        """Has it happen, waits until all is as before, and says what it did."""
        began = time.monotonic()
        happen()
        if not self.caught_up():
            raise PausesError("the stream did not go on")
        time.sleep(AFTER_S)  # what comes twice comes within this
        after = self.look(began - BEFORE_S, time.monotonic())
        change = {name: after[name] - self.before[name] for name in after}
        self.before = after
        return Event(
            gap_ms=after["gap_s"] * 1e3,
            connect_ms=after["connect_s"] * 1e3,
            lost=int(change["lost"]),
            duplicated=int(change["duplicated"]),
            reordered=int(change["reordered"]),
            dropped=int(change["drops"]),
            refused=int(change["refusals"]),
        )


# ---- servers ------------------------------------------------------------------------------------


class RestartedNats(NatsServer):
    """nats-server that can be killed and started again on its port."""

    def restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self._process = subprocess.Popen(
            self.command(),
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._await_answer()


class Parts:
    """The components of a running Midair."""

    def __init__(self, server: Midair, connections: int) -> None:
        self.instance = server.instance
        self.runtime = Runtime.open(server.instance)
        self.connections = connections

    def pid(self, role: str, state: str = ACTIVE) -> int | None:
        found = [it.pid for it in self.runtime.states() if it.role == role and it.state == state]
        return found[0] if found else None

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise PausesError(f"not within {PATIENCE_S:g} s: {what}")
            time.sleep(0.005)

    def settle(self, standby: bool) -> None:
        """Everybody is up, the keeper has everything, standbys are ready."""
        for role in ROLES:
            self.eventually(lambda role=role: self.pid(role) is not None, role)  # type: ignore[misc]
            if standby and role in WITH_STANDBY:
                self.eventually(
                    lambda role=role: self.pid(role, STANDBY) is not None,  # type: ignore[misc]
                    f"a standby of {role}",
                )
        client = KeeperClient(self.runtime.socket(names.KEEPER_SOCKET))
        try:
            self.eventually(lambda: self._held(client) >= self.connections, "the keeper has all")
        finally:
            client.close()

    def _held(self, client: KeeperClient) -> int:
        held = client.give(None)
        wire.close_all(fd for _, fd in held)
        return len(held)

    def do(self, kind: str) -> None:
        """One event, until it is over."""
        act, _, role = kind.partition(",")[0].partition(" ")
        if act == "kill":
            self.kill(role)
        elif act == "upgrade":
            self.upgrade(role)
        else:
            time.sleep(0.5)  # what an event of nothing looks like

    def kill(self, role: str) -> None:
        pid = self.pid(role)
        if pid is None:
            raise PausesError(f"{role} is not up")
        os.kill(pid, signal.SIGKILL)
        self.eventually(lambda: self.pid(role) not in (None, pid), f"{role} is up again")

    def upgrade(self, role: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "midair", "upgrade", role, "--name", self.instance],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            raise PausesError(f"midair upgrade {role}: {done.stdout} {done.stderr}")


def can_upgrade() -> bool:
    words = [sys.executable, "-m", "midair", "upgrade", "--help"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0


# ---- the run ------------------------------------------------------------------------------------


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def midair(size: Size, standby: bool) -> Iterator[tuple[Parts, Load]]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pauses-")))
        config = directory / "midair.toml"
        more = "standby = true\n" if standby else ""
        config.write_text(f"[connmgr]\ncount = 1\n[manager]\nrestart_limit = 1000000\n{more}")
        server = stack.enter_context(Midair(config))
        yield Parts(server, size.connections), Load(server.port, size, stack)


def kinds(standbys: bool) -> list[str]:
    found = ["nothing"]
    found += [f"kill {role}" for role in ROLES]
    if can_upgrade():
        found += [f"upgrade {role}" for role in ROLES]
    if standbys:
        found += [f"kill {role}, standby" for role in WITH_STANDBY]
    return [*found, RESTART]


def measure(wanted: Sequence[str], size: Size) -> dict[str, list[Event]]:
    """Events of each kind. Kinds take turns, so that a slow minute meets all of them."""
    events: dict[str, list[Event]] = {kind: [] for kind in wanted}

    def add(kind: str, event: Event) -> None:
        events[kind].append(event)
        progress(f"  {kind} #{len(events[kind])}: {event.gap_ms:.1f} ms, {event}")

    for standby in (False, True):
        mine = [
            kind
            for kind in wanted
            if kind.endswith(", standby") == standby and not kind.startswith("nats-server")
        ]
        if not mine:
            continue
        with midair(size, standby) as (parts, load):
            for _ in range(size.repeat):
                for kind in mine:
                    parts.settle(standby)
                    add(kind, load.event(functools.partial(parts.do, kind)))
    for kind in wanted:
        if kind.startswith("nats-server"):
            with ExitStack() as stack:
                server = stack.enter_context(RestartedNats())
                load = Load(server.port, size, stack)
                for _ in range(size.repeat):
                    add(kind, load.event(server.restart))
    return events


def row(kind: str, events: Sequence[Event]) -> list[str]:
    gaps = sorted(event.gap_ms for event in events)
    connects = [event.connect_ms for event in events]
    p90 = quantiles(gaps, n=10)[8] if len(gaps) > 1 else gaps[0]
    sums = [
        sum(getattr(event, name) for event in events)
        for name in ("lost", "duplicated", "reordered", "dropped", "refused")
    ]
    times = [median(gaps), min(p90, gaps[-1]), gaps[-1], median(connects), max(connects)]
    return [kind, str(len(events)), *(f"{value:.1f}" for value in times), *map(str, sums)]


HEAD = (
    *("event", "events", "median ms", "p90 ms", "max ms", "connect median ms", "connect max ms"),
    *("lost", "duplicated", "reordered", "connections dropped", "connects refused"),
)


def table(events: dict[str, list[Event]]) -> str:
    rows = [row(kind, found) for kind, found in events.items() if found]
    lines = ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def about(size: Size) -> dict[str, Any]:
    from midair.version import __version__

    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cpu": cpu[0] if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "midair": __version__,
        "nats_server": NatsServer().version(),
        "load": dataclasses.asdict(size),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pauses", description="Pauses when parts are killed or replaced."
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="events of each kind (default 30)")
    parser.add_argument("--small", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--only", metavar="KIND,...", help="; ".join(kinds(True)))
    parser.add_argument("--json", metavar="FILE", help="every event, with machine and versions")
    args = parser.parse_args(argv)
    size = SMALL if args.small else Size()
    if args.repeat:
        size = dataclasses.replace(size, repeat=args.repeat)
    all_kinds = kinds(True)
    wanted = args.only.replace(", standby", "; standby").split(",") if args.only else all_kinds
    wanted = [kind.replace("; standby", ", standby") for kind in wanted]
    if unknown := [kind for kind in wanted if kind not in all_kinds]:
        parser.error(f"{unknown[0]!r} is none of: {'; '.join(all_kinds)}")
    try:
        events = measure(wanted, size)
        facts = about(size)
    except (PausesError, PeerError) as error:
        progress(f"pauses: {error}")
        return 1
    print(table(events))
    print(json.dumps(facts))
    if args.json:
        found = {kind: list(map(dataclasses.asdict, them)) for kind, them in events.items()}
        Path(args.json).write_text(json.dumps({**facts, "events": found}, indent=1) + "\n")
    if broken := [
        kind for kind, them in events.items() if kind != RESTART and any(it.harmed() for it in them)
    ]:
        progress(f"pauses: promises were broken by: {', '.join(broken)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
