"""What one subscriber that does not read costs the others.

    python -m bench.slow                      Midair under each policy, nats-server beside it
    python -m bench.slow --small              tiny: does it still work?
    python -m bench.slow --repeat 9 --json slow.json

One publisher, ten subscribers that read, as fast as it goes (`bench/loadgen throughput`), without
and with one more subscriber that never reads. When a server closes that one, it is back at once,
so it is there all the time. The first 64 MB that wait for it are written to memory nobody has
touched lately, so a run lasts some seconds. Both runs are on the same server, one after the other,
and which comes first alternates. Figures are medians; the cost is 1 minus the median of the ratios
with / without.

Backpressure is not in the table: there the publisher is meant to wait for who does not read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench import loadgen
from bench.peers import Midair, NatsServer, PeerError, Server
from midair.client.wire_nats import PING, Connection, EndedError, connect, sub

SUBSCRIBERS = 10
SIZE = 128
RECEIVE_BUFFER = 4096
CONNECT_S = 10.0
COST_MAX = 0.05
HELLO = connect(no_responders=False) + sub(b">", b"1") + PING


class Sleeper:
    """A subscriber to everything that never reads, and comes back when it is closed."""

    def __init__(self, port: int) -> None:
        self.closed = 0  # by the server
        self._port = port
        self._over = threading.Event()
        self._socket = self._connect()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        """Subscribed: the answer to PING has come, or a message."""
        try:
            made = Connection(
                *("127.0.0.1", self._port, HELLO),
                receive_buffer=RECEIVE_BUFFER,
                timeout_s=CONNECT_S,
            )
            while isinstance(said := made.frame(), bytes) and said != b"PONG":
                pass
        except EndedError as error:
            raise PeerError("the server closed a subscriber that had just come") from error
        return made.socket

    def _watch(self) -> None:
        """Notices the end without reading: a peer that hangs up is seen by sending to it."""
        while not self._over.wait(0.02):
            try:
                self._socket.send(b"PING\r\n", socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                self._socket.close()
                self.closed += 1
                with contextlib.suppress(OSError, PeerError):
                    self._socket = self._connect()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()


@dataclass
class Result:
    """One server: deliveries a second, one figure for each repetition."""

    server: str
    without: list[float] = field(default_factory=list)
    with_one: list[float] = field(default_factory=list)
    closed: int = 0  # how often the one that does not read was closed

    @property
    def cost(self) -> float:
        pairs = zip(self.without, self.with_one, strict=True)
        return 1 - median(slow / quick for quick, slow in pairs)


def throughput(server: Server, messages: int) -> float:
    done = loadgen.run(
        "throughput",
        server.port,
        timeout=120.0,
        stall=30.0,  # a server may hold a publisher up for long, and lose nothing
        messages=messages,
        warmup=max(1, messages // 20),
        size=SIZE,
        subscribers=SUBSCRIBERS,
    )
    if done.code != loadgen.EXIT_OK:
        raise PeerError(f"{server.name} lost, doubled or reordered messages: {done.report}")
    return float(done.report["deliveries_per_s"])


def measure(name: str, server: Server, repeat: int, messages: int) -> Result:
    result = Result(name)

    def plain() -> None:
        result.without.append(throughput(server, messages))

    def with_a_sleeper() -> None:
        sleeper = Sleeper(server.port)
        try:
            result.with_one.append(throughput(server, messages))
        finally:
            sleeper.close()
            result.closed += sleeper.closed

    runs: list[Callable[[], None]] = [plain, with_a_sleeper]
    with server:
        for repetition in range(repeat):
            for run in runs if repetition % 2 == 0 else reversed(runs):
                run()
            print(
                f"  {name} #{repetition + 1}: {result.without[-1]:,.0f} without, "
                f"{result.with_one[-1]:,.0f} with",
                file=sys.stderr,
                flush=True,
            )
    return result


@contextlib.contextmanager
def servers() -> Iterator[list[tuple[str, Server]]]:
    with tempfile.TemporaryDirectory() as directory:
        found: list[tuple[str, Server]] = []
        for policy in ("disconnect", "drop-newest"):
            path = Path(directory) / f"{policy}.toml"
            path.write_text(f'[limits]\nslow_consumer = "{policy}"\n')
            found.append((f"Midair, {policy}", Midair(path)))
        yield [*found, ("nats-server", NatsServer())]


def table(results: Sequence[Result]) -> str:
    lines = [
        "| server | without | with one that does not read | cost | times it was closed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for it in results:
        lines.append(
            f"| {it.server} | {median(it.without):,.0f} | {median(it.with_one):,.0f} "
            f"| {it.cost * 100:.1f} % | {it.closed} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.slow",
        description="Deliveries a second to ten subscribers, without and with one that does not "
        f"read. Ends with 1 if it costs the others of Midair more than {COST_MAX:.0%}.",
    )
    parser.add_argument("--repeat", type=int, default=5, help="pairs of runs (default: 5)")
    parser.add_argument(
        "--messages",
        type=int,
        default=3_000_000,
        help="of one run (default: 3,000,000); nats-server gets a tenth of them",
    )
    parser.add_argument("--only", help="servers whose name has this in it")
    parser.add_argument("--small", action="store_true", help="one tiny pair of runs each")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    repeat, messages = (1, 2000) if args.small else (args.repeat, args.messages)
    if repeat < 1 or messages < 1:
        parser.error("--repeat and --messages must be 1 at least")
    try:
        with servers() as found:
            results = [
                measure(name, server, repeat, messages // (10 if "nats" in name else 1))
                for name, server in found
                if not args.only or args.only in name
            ]
    except (PeerError, loadgen.LoadgenError) as error:
        print(f"bench.slow: {error}", file=sys.stderr)
        return 3
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([{**asdict(it), "cost": it.cost} for it in results]))
    ours = [it for it in results if it.server.startswith("Midair")]
    return 1 if not args.small and any(it.cost > COST_MAX for it in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
