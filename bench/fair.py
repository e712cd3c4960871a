"""Shares of busy connections, and what a flood does to a quiet one.

    python -m bench.fair                      all of it, a few minutes
    python -m bench.fair --small              tiny: does it still work?
    python -m bench.fair --only shares --seconds 10 --json fair.json

Shares: busy connections, spread over connection managers as named (`1+2`: one on the first, two on
the second), publish as fast as they can for some seconds. Jain's index of what each got through: 1
when all got the same, 1/n when one got everything. With bodies of one size messages are counted,
with bodies of 1 MB beside 100 B bytes are. Told apart from what the socket buffers took: Midair's
own counters of each connection.

Flood: a connection with 100 messages a second, alone and beside one that publishes as fast as it
can to nobody. The 99 % of its latency with the flood by that without, of Midair and of nats-server.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench import loadgen
from bench.peers import Midair, NatsServer, PeerError, Server
from midair.client.wire_nats import Connection, EndedError, connect, pub
from midair.monitor import gather
from midair.up import status
from native.stats import Conn

HELLO = connect(headers=False, no_responders=False)
CONNECT_S = 10.0
BLOCK_BYTES = 256 * 1024  # of one send
SMALL_BODY, LARGE_BODY = 100, 1_000_000
INDEX_MIN = 0.99
FLOOD_MAX = 3.0
SPREADS = ("1", "3", "1+2", "2+1", "1+1+1", "50", "1+49", "25+25", "5+15+30", "2+8+15+25")


def jain(values: Sequence[float]) -> float:
    """1: all the same; 1/n: one has everything."""
    total = sum(values)
    return total**2 / (len(values) * sum(value**2 for value in values)) if total else 0.0


def connected(port: int) -> Connection:
    try:
        made = Connection("127.0.0.1", port, HELLO, timeout_s=CONNECT_S)
        made.sync()
    except EndedError as error:
        raise PeerError("the server closed a connection that had just come") from error
    return made


class Flood:
    """Publishes as fast as the server takes it, to nobody, until it is closed."""

    def __init__(self, connection: Connection, body: int = SMALL_BODY) -> None:
        frame = pub(b"flood", b"x" * body)
        self._block = frame * max(1, BLOCK_BYTES // len(frame))
        self._connection = connection
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._connection.socket.settimeout(None)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._connection.send(self._block)
        except OSError:  # closed
            return

    def close(self) -> None:
        self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


def look(server: Midair) -> dict[int, Conn]:
    """Port of each client -> its counters."""
    sources = gather.Sources(status.find(server.instance))
    return {conn.port: conn for conn in sources.look().conns.values()}


def placed(server: Midair, spread: Sequence[int]) -> list[Connection]:
    """Connections, a given number on each connection manager: the others are closed again."""
    wanted = list(spread)
    made = [connected(server.port) for _ in range(max(spread) * len(spread))]
    kept = []
    deadline = time.monotonic() + CONNECT_S
    ports = {it.port for it in made}
    while not ports <= (seen := look(server)).keys():
        if time.monotonic() > deadline:
            raise PeerError("midair does not list its connections")
        time.sleep(0.05)
    for it in made:
        at = seen[it.port].connmgr
        if wanted[at]:
            wanted[at] -= 1
            kept.append(it)
        else:
            it.close()
    if any(wanted):
        raise PeerError(f"the dispatcher spread {len(made)} connections unevenly")
    return kept


@contextmanager
def flooding(connections: Sequence[Connection], bodies: Sequence[int]) -> Iterator[None]:
    floods = [Flood(it, body) for it, body in zip(connections, bodies, strict=True)]
    for flood in floods:
        flood.start()
    try:
        yield
    finally:
        for flood in floods:
            flood.close()


@dataclass
class Share:
    """One spread."""

    spread: str
    what: str
    index: float
    lowest: float  # of a connection, by the mean
    highest: float
    each_s: float  # mean


def shares(spread: str, seconds: float, large: bool = False) -> Share:
    counts = [int(part) for part in spread.split("+")]
    server = Midair(connmgrs=len(counts))
    with server:
        busy = placed(server, counts)
        ports = [it.port for it in busy]
        bodies = [LARGE_BODY if large and n % 2 else SMALL_BODY for n in range(len(busy))]
        with flooding(busy, bodies):
            time.sleep(min(1.0, seconds))
            first, began = look(server), time.monotonic()
            time.sleep(seconds)
            last, ended = look(server), time.monotonic()
    got = [
        (last[port].bytes_in - first[port].bytes_in)
        if large
        else (last[port].messages_in - first[port].messages_in)
        for port in ports
    ]
    mean = sum(got) / len(got) or 1.0
    what = f"bytes, 1 MB beside {SMALL_BODY} B" if large else "messages"
    return Share(spread, what, jain(got), min(got) / mean, max(got) / mean, mean / (ended - began))


@dataclass
class Effect:
    """Latency of the quiet connection, us."""

    server: str
    alone_p50: float
    alone_p99: float
    flood_p50: float
    flood_p99: float

    @property
    def factor(self) -> float:
        return self.flood_p99 / self.alone_p99


def quiet(server: Server, messages: int) -> tuple[float, float]:
    done = loadgen.run(
        "paced",
        server.port,
        timeout=60.0 + messages / 50,
        messages=messages,
        warmup=messages // 10,
        rate=100,
        size=SMALL_BODY,
    )
    if done.code != loadgen.EXIT_OK:
        raise PeerError(f"{server.name} lost, doubled or reordered messages: {done.report}")
    return float(done.report["p50_us"]), float(done.report["p99_us"])


def effect(server: Server, messages: int, repeat: int) -> Effect:
    alone, beside = [], []
    with server:
        for _ in range(repeat):
            alone.append(quiet(server, messages))
            with flooding([connected(server.port)], [SMALL_BODY]):
                beside.append(quiet(server, messages))
    p50, p99 = (median(run[n] for run in alone) for n in range(2))
    return Effect(
        server.name, p50, p99, median(run[0] for run in beside), median(run[1] for run in beside)
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fair",
        description="Shares of busy connections, and what a flood does to a quiet one. Ends with 1 "
        f"if an index is below {INDEX_MIN} or the flood costs Midair over {FLOOD_MAX:g} times.",
    )
    parser.add_argument("--only", choices=("shares", "flood"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of one spread (default: 10)")
    parser.add_argument("--repeat", type=int, default=3, help="of the flood (default: 3)")
    parser.add_argument("--small", action="store_true", help="a moment of each, nothing judged")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    seconds, messages, repeat = (0.5, 50, 1) if args.small else (args.seconds, 1000, args.repeat)
    spreads = ("1+2",) if args.small else SPREADS
    found: list[Share] = []
    effects: list[Effect] = []
    try:
        if args.only != "flood":
            for spread, large in [*((it, False) for it in spreads), ("2", True), ("1+1", True)]:
                found.append(shares(spread, seconds, large))
                progress(f"  {spread}: {found[-1].what}, index {found[-1].index:.4f}")
        if args.only != "shares":
            for server in (Midair(), NatsServer()):
                effects.append(effect(server, messages, repeat))
                progress(f"  {server.name}: {effects[-1].factor:.2f} times")
    except (PeerError, loadgen.LoadgenError) as error:
        progress(f"bench.fair: {error}")
        return 3
    if found:
        print("| busy connections | counted | Jain's index | lowest | highest | each, a second |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
    for it in found:
        print(
            f"| {it.spread} | {it.what} | {it.index:.4f} | {it.lowest:.2f} | {it.highest:.2f} "
            f"| {it.each_s:,.0f} |"
        )
    if effects:
        print("\n| server | median us | 99 % us | median, flood | 99 %, flood | 99 % by 99 % |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for of in effects:
        print(
            f"| {of.server} | {of.alone_p50:.0f} | {of.alone_p99:.0f} | {of.flood_p50:.0f} "
            f"| {of.flood_p99:.0f} | {of.factor:.2f} |"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"shares": [*map(asdict, found)], "flood": [*map(asdict, effects)]}) + "\n"
        )
    if args.small:
        return 0
    broken = [it for it in found if it.index < INDEX_MIN]
    return 1 if broken or any(of.factor > FLOOD_MAX for of in effects[:1]) else 0


if __name__ == "__main__":
    sys.exit(main())
