"""The loads with other protocols, wildcards and queue groups: they run, and their checks can fail.

Method: as in test_small.py. Real servers for what must work; for what must be noticed, a
server in faulty_server.py that routes by wildcards and groups and does one thing wrong.
"""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench import loadgen
from bench.peers import Mosquitto, NatsServer, Redis, Relay, Server
from tests.bench.faulty_server import Mixed, MixedFault, Route, Subscription

pytestmark = pytest.mark.slow

CLEAN = {"lost": 0, "duplicated": 0, "reordered": 0, "misrouted": 0, "corrupt": 0}
MIXED: dict[str, Any] = {
    "subject_mode": "mixed",
    "publishers": 3,
    "subscribers": 7,
    "subjects": 250,
    "messages": 400,
    "warmup": 0,
    "stall": 0.5,
}


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    loadgen.build()
    loadgen.build("relay")


def verdict(report: loadgen.Report) -> dict[str, int]:
    return {name: report[name] for name in CLEAN}


# ---- wildcards and queue groups ------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {"publishers": 100, "subscribers": 100, "subjects": 1000, "messages": 30, "warmup": 3},
        {"publishers": 1, "subscribers": 1, "subjects": 1, "messages": 100},
        {"publishers": 2, "subscribers": 3, "subjects": 99, "messages": 1000, "warmup": 77},
        {"publishers": 3, "subscribers": 120, "subjects": 1234, "messages": 3000, "size": 16},
    ],
    ids=str,
)
def test_mixed_counts_every_match_and_every_group(shape: dict[str, Any], verify: bool) -> None:
    with NatsServer() as server:
        outcome = loadgen.run("throughput", server.port, **{**MIXED, **shape}, verify=verify)
    assert outcome.code == loadgen.EXIT_OK, outcome.report
    assert verdict(outcome.report) == CLEAN
    assert outcome.report["deliveries"] == 5 * outcome.report["published"]
    assert outcome.report["published"] == shape["messages"] * shape["publishers"]


def plain_of(route: Route) -> int:
    """Where the first delivery to a plain subscription is."""
    return next(at for at, (it, *_) in enumerate(route) if not it.queue)


def group_of(route: Route) -> int:
    return next(at for at, (it, *_) in enumerate(route) if it.queue)


def without(route: Route, at: int) -> Route:
    return route[:at] + route[at + 1 :]


def on_one(edit: Callable[[Route, list[Subscription]], Route]) -> MixedFault:
    """A fault in the 500th message only."""

    def fault(number: int, route: Route, everyone: list[Subscription]) -> Route:
        return edit(route, everyone) if number == 500 else route

    return fault


def other_member(route: Route, everyone: list[Subscription]) -> Route:
    """A second member of a group gets it, too."""
    it, *what = route[group_of(route)]
    same = [m for m in everyone if m.queue == it.queue and m.pattern == it.pattern and m is not it]
    return [*route, (same[0], what[0], what[1])]


def stranger(route: Route, everyone: list[Subscription]) -> Route:
    """Somebody gets it whose subscription does not match, instead of one whose does."""
    at = plain_of(route)
    wrong = next(m for m in everyone if m not in [it for it, *_ in route] and not m.queue)
    return [*without(route, at), (wrong, *route[at][1:])]


def spoilt(route: Route, _everyone: list[Subscription]) -> Route:
    at = plain_of(route)
    it, subject, body = route[at]
    return [*without(route, at), (it, subject, body[:-1] + b"!")]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda route, _: route, {}),
        (lambda route, _: without(route, plain_of(route)), {"lost": 1}),
        (lambda route, _: without(route, group_of(route)), {"lost": 1}),
        (lambda route, _: [*route, route[plain_of(route)]], {"duplicated": 1}),
        (lambda route, _: [*route, route[group_of(route)]], {"duplicated": 1}),
        (other_member, {"duplicated": 1}),
        (stranger, {"misrouted": 1, "lost": 1}),
        (spoilt, {"corrupt": 1, "lost": 1}),
    ],
    ids=["good", "plain lost", "group lost", "plain twice", "member twice", "two members",
         "stranger", "spoilt"],
)  # fmt: skip
def test_mixed_notices_one_wrong_delivery(
    edit: Callable[[Route, list[Subscription]], Route], expected: dict[str, int]
) -> None:
    with Mixed(on_one(edit)) as server:
        outcome = loadgen.run("throughput", server.port, **MIXED, verify=True)
    assert verdict(outcome.report) == CLEAN | expected
    assert outcome.code == (loadgen.EXIT_CHECKS if expected else loadgen.EXIT_OK)


@pytest.mark.parametrize("pick", [plain_of, group_of], ids=["plain", "member"])
def test_mixed_notices_a_late_delivery(pick: Callable[[Route], int]) -> None:
    """Held back until the same subscription has a later message of the same publisher."""
    held: Route = []

    def late(number: int, route: Route, _everyone: list[Subscription]) -> Route:
        if number == 100:
            at = pick(route)
            held.append(route[at])
            return without(route, at)
        for it, _, body in route:
            if held and it is held[0][0] and body[4:8] == held[0][2][4:8]:
                return [*route, held.pop()]
        return route

    with Mixed(late) as server:
        outcome = loadgen.run("throughput", server.port, **MIXED)
    assert not held
    assert verdict(outcome.report) == CLEAN | {"reordered": 1}


# ---- other servers -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[Mosquitto, Redis, Relay], ids=lambda kind: kind.name)
def other(request: pytest.FixtureRequest) -> Iterator[Server]:
    with request.param() as server:
        yield server


@pytest.mark.parametrize("size", [0, 16, 128, 1024, 100_000])
def test_throughput_of_other_servers(other: Server, size: int) -> None:
    outcome = loadgen.run(
        "throughput",
        other.port,
        protocol=other.protocol,
        size=size,
        messages=500,
        warmup=50,
        verify=size >= 16,
        server_pids=other.pids(),
    )
    report = outcome.report
    assert outcome.code == loadgen.EXIT_OK, report
    assert verdict(report) == CLEAN
    assert report["deliveries"] == 500
    assert report["protocol"] == other.protocol
    assert report["server_cpu_ns"] >= 0
    assert other.version() != "unknown"


@pytest.mark.parametrize(
    "options",
    [
        {"subscribers": 20},
        {"subscribers": 5, "publishers": 3},
        {"subscribers": 6, "publishers": 6, "subject_mode": "pairs"},
        {"subscribers": 9, "publishers": 9, "subject_mode": "pairs", "spread": 4, "size": 5000},
    ],
    ids=str,
)
def test_shapes_of_a_relay(options: dict[str, Any]) -> None:
    with Relay() as relay:
        for _ in range(2):  # the second on slots that others have left
            outcome = loadgen.run(
                "throughput", relay.port, protocol="relay", messages=2000, verify=True, **options
            )
            assert outcome.code == loadgen.EXIT_OK, outcome.report
            assert verdict(outcome.report) == CLEAN
        each = {"pairs": options.get("spread", 1)}.get(
            options.get("subject_mode", ""), options["subscribers"]
        )
        assert outcome.report["deliveries"] == 2000 * options.get("publishers", 1) * each


def test_spread_pairs_of_nats() -> None:
    with NatsServer() as server:
        outcome = loadgen.run(
            "throughput",
            server.port,
            subject_mode="pairs",
            publishers=8,
            subscribers=8,
            spread=3,
            messages=500,
        )
    assert outcome.code == loadgen.EXIT_OK, outcome.report
    assert outcome.report["deliveries"] == 8 * 500 * 3


@pytest.mark.parametrize("mode", ["pingpong", "paced", "connect"])
def test_other_modes_of_a_relay(mode: str) -> None:
    with Relay() as relay:
        outcome = loadgen.run(
            mode, relay.port, protocol="relay", messages=300, connections=300, rate=5000
        )
    assert outcome.code == loadgen.EXIT_OK, outcome.report


def test_idle_connections_of_a_relay() -> None:
    with Relay() as relay, loadgen.idle(relay.port, protocol="relay", connections=200) as crowd:
        outcome = crowd.finish()
    assert outcome.report["reached"] == 200


def test_a_relay_wants_a_port() -> None:
    done = subprocess.run(
        [loadgen.build("relay"), "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "usage: relay PORT\n"


# ---- servers of those protocols that break their promise -----------------------------------------


def mqtt_frame(topic: bytes, body: bytes) -> bytes:
    rest = len(topic).to_bytes(2, "big") + topic + body
    assert len(rest) < 128
    return bytes([0x30, len(rest)]) + rest


def redis_frame(topic: bytes, body: bytes) -> bytes:
    words = (b"message", topic, body)
    return b"*3\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


# protocol: what confirms the handshakes, how long a publisher's greeting is, a delivery
SPOKEN = {
    "mqtt": (b"\x20\x02\x00\x00\x90\x03\x00\x01\x00\xd0\x00", b"\x20\x02\x00\x00\xd0\x00",
             mqtt_frame, b"\xd0\x00"),
    "redis": (b"*3\r\n$9\r\nsubscribe\r\n$8\r\nload.one\r\n:1\r\n*2\r\n$4\r\npong\r\n$0\r\n\r\n",
              b"+PONG\r\n", redis_frame, b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"),
}  # fmt: skip


@contextmanager
def scripted(protocol: str, numbers: list[int]) -> Iterator[int]:
    """Confirms a subscriber and a publisher, reads what is published, and delivers `numbers`."""
    subscribed, greeted, frame, pong = SPOKEN[protocol]
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        subscriber = listener.accept()[0]
        with subscriber:
            subscriber.recv(65536)
            subscriber.sendall(subscribed)
            publisher = listener.accept()[0]
            with publisher:
                publisher.recv(65536)
                publisher.sendall(greeted)
                body = b""
                while body.count(b"load.one") < len(set(numbers)):
                    body += publisher.recv(65536)
                first = body[body.index(b"GLAM") :][:16]
                for number in numbers:
                    what = first[:8] + number.to_bytes(8, "little")
                    subscriber.sendall(frame(b"load.one", what))
                subscriber.recv(65536)  # the ping at the end
                subscriber.sendall(pong)
                subscriber.recv(65536)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join()
        listener.close()


@pytest.mark.parametrize("protocol", SPOKEN)
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0, 1, 2, 3], {}),
        ([0, 1, 3, 2], {"reordered": 1}),
        ([0, 1, 1, 2, 3], {"duplicated": 1}),
        ([0, 1, 2, 3, 3], {"duplicated": 1}),
        ([0, 1, 3], {"lost": 1}),
    ],
)
def test_other_protocols_are_checked_too(
    protocol: str, numbers: list[int], expected: dict[str, int]
) -> None:
    with scripted(protocol, numbers) as port:
        outcome = loadgen.run(
            "throughput", port, protocol=protocol, size=16, messages=4, warmup=0, stall=0.3
        )
    assert verdict(outcome.report) == CLEAN | expected


@pytest.mark.parametrize(
    "words",
    [
        ("throughput", "--protocol", "smtp"),
        ("pingpong", "--protocol", "mqtt"),
        ("connect", "--protocol", "redis"),
        ("throughput", "--protocol", "redis", "--subject-mode", "many"),
        ("throughput", "--protocol", "relay", "--subject-mode", "mixed"),
        ("throughput", "--subject-mode", "mixed", "--size", "8"),
        ("throughput", "--subject-mode", "mixed", "--subjects", "100001"),
        ("throughput", "--spread", "2"),
        ("throughput", "--subject-mode", "pairs", "--spread", "2"),
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_one_line(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(loadgen.PROGRAM), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == loadgen.EXIT_USAGE
    assert done.stderr.startswith("loadgen: --")
    assert done.stderr.count("\n") == 1
