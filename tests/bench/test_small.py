"""The load generator and the table, small: every mode runs, and every check can fail.

Method: the modes run against a real nats-server; the checks run against a server in this file that
speaks just enough of the protocol and breaks its promise on one chosen message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import loadgen
from bench.peers import NATS_MISSING, ROOT, NatsServer, PeerError, free_port
from bench.scenarios import SCENARIOS
from tests.bench.faulty_server import (
    Fault,
    Faulty,
    drop,
    duplicate,
    duplicate_last,
    flip_last_byte,
    flip_publisher,
    obey,
    replay_much_later,
    swap,
    truncate,
)

pytestmark = pytest.mark.slow

LATENCY_NAMES = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")
CLEAN = {"lost": 0, "duplicated": 0, "reordered": 0, "misrouted": 0, "corrupt": 0}


@pytest.fixture(scope="module", autouse=True)
def _program() -> None:
    loadgen.build()


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    try:
        NatsServer.program()
    except PeerError:
        pytest.fail(NATS_MISSING)
    with NatsServer() as server:
        yield server


def verdict(report: loadgen.Report) -> dict[str, int]:
    return {name: report[name] for name in CLEAN}


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(loadgen.PROGRAM), *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---- the checks can fail -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (obey, {}),
        (drop, {"lost": 1}),
        (duplicate, {"duplicated": 1}),
        (duplicate_last, {"duplicated": 1}),
        (swap, {"reordered": 1}),
        (replay_much_later, {"duplicated": 1}),
        (flip_last_byte, {"corrupt": 1, "lost": 1}),
        (flip_publisher, {"corrupt": 1, "lost": 1}),
        (truncate, {"corrupt": 1, "lost": 1}),
    ],
)
def test_one_wrong_message_is_found(fault: Fault, expected: dict[str, int]) -> None:
    with Faulty(fault) as server:
        outcome = loadgen.run(
            "throughput", server.port, size=64, messages=100, warmup=0, verify=True, stall=0.5
        )
    assert verdict(outcome.report) == CLEAN | expected
    assert outcome.code == (loadgen.EXIT_CHECKS if expected else loadgen.EXIT_OK)
    assert outcome.report["verdict"] == ("failed" if expected else "ok")


def test_a_message_on_the_wrong_subject_is_found() -> None:
    def misroute(number: int, frame: bytes, _held: list[bytes]) -> list[bytes]:
        line, body = frame.split(b"\r\n", 1)
        words = line.split()
        other = b"2" if words[2] == b"1" else b"1"
        wrong = b" ".join([*words[:2], other, *words[3:]])
        return [wrong + b"\r\n" + body] if number == 40 else [frame]

    with Faulty(misroute) as server:
        outcome = loadgen.run(
            "throughput",
            server.port,
            subject_mode="many",
            subjects=5,
            messages=100,
            warmup=0,
            stall=0.5,
        )
    assert outcome.code == loadgen.EXIT_CHECKS
    assert verdict(outcome.report) == CLEAN | {"misrouted": 1, "lost": 1}


@pytest.mark.parametrize("size", [0, 8])
@pytest.mark.parametrize(("fault", "name"), [(drop, "lost"), (duplicate, "duplicated")])
def test_small_bodies_are_counted(size: int, fault: Fault, name: str) -> None:
    with Faulty(fault) as server:
        options = {"size": size, "messages": 100, "warmup": 0, "stall": 0.5}
        outcome = loadgen.run("throughput", server.port, **options)
    assert outcome.code == loadgen.EXIT_CHECKS
    assert outcome.report["checks"] == "count only"
    assert verdict(outcome.report) == CLEAN | {name: 1}


@pytest.mark.parametrize("mode", ["pingpong", "paced"])
@pytest.mark.parametrize(("fault", "name"), [(drop, "lost"), (duplicate, "duplicated")])
def test_latency_modes_check_too(mode: str, fault: Fault, name: str) -> None:
    with Faulty(fault) as server:
        outcome = loadgen.run(mode, server.port, messages=100, warmup=0, rate=5000, stall=0.5)
    assert outcome.code == loadgen.EXIT_CHECKS
    assert outcome.report[name] >= 1


@pytest.mark.parametrize(("fault", "name"), [(drop, "lost"), (duplicate, "duplicated")])
def test_idle_checks_that_everyone_is_reached_once(fault: Fault, name: str) -> None:
    reached = 0

    def on_the_fifth_client(_number: int, frame: bytes, held: list[bytes]) -> list[bytes]:
        nonlocal reached
        reached += 1
        return fault(40 if reached == 5 else 0, frame, held)

    with (
        Faulty(on_the_fifth_client) as server,
        loadgen.idle(server.port, connections=10, stall=0.5) as crowd,
    ):
        outcome = crowd.finish()
    assert outcome.code == loadgen.EXIT_CHECKS
    assert verdict(outcome.report) == CLEAN | {name: 1}


# ---- a server that does not answer, and arguments that make no sense -----------------------------


def complaint(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("loadgen: ")
    return done.stderr


@pytest.mark.parametrize("mode", ["throughput", "pingpong", "paced", "connect", "idle"])
def test_nobody_listens(mode: str) -> None:
    port = free_port()
    said = complaint(command(mode, "--port", port), loadgen.EXIT_SERVER)
    assert f"127.0.0.1:{port}" in said


@pytest.mark.parametrize("mode", ["throughput", "pingpong", "paced", "connect", "idle"])
def test_a_server_that_says_nothing(mode: str) -> None:
    with Faulty(obey, silent=True) as server:
        done = command(mode, "--port", server.port, "--timeout", "0.5")
    assert "timed out" in complaint(done, loadgen.EXIT_SERVER)


def test_a_server_that_goes_deaf() -> None:
    with Faulty(obey, deaf_after=40) as server:
        words = ("throughput", "--port", server.port, "--messages", 100, "--warmup", 0)
        done = command(*words, "--stall", 0.3, "--json")
    assert done.returncode == loadgen.EXIT_CHECKS, done.stderr
    assert json.loads(done.stdout)["lost"] == 61


def test_a_server_that_ends_the_connection_is_quoted() -> None:
    with Faulty(obey, fuss="-ERR 'Slow Consumer'\r\n") as server:
        done = command("throughput", "--port", server.port, "--messages", 100, "--warmup", 0)
    assert "Slow Consumer" in complaint(done, loadgen.EXIT_SERVER)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("walk",),
        ("throughput", "paced"),
        ("throughput", "--speed", "9"),
        ("throughput", "--port"),
        ("throughput", "--port", "0"),
        ("throughput", "--port", "99999"),
        ("throughput", "--size", "-1"),
        ("throughput", "--size", "12x"),
        ("throughput", "--subject-mode", "few"),
        ("throughput", "--subject-mode", "pairs", "--publishers", "2"),
        ("throughput", "--subjects", "1000001"),
        ("throughput", "--size", "8", "--verify"),
        ("throughput", "--server-pids", "1,,2"),
        ("throughput", "--server-pids", "4194304"),
        ("paced", "--rate", "0"),
        ("paced", "--timeout", "nan"),
        ("connect", "--connections", "999999"),
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line_and_code_2(words: tuple[str, ...]) -> None:
    complaint(command(*words), loadgen.EXIT_USAGE)


def test_help_names_every_mode_and_exit_code() -> None:
    done = command("--help")
    assert done.returncode == loadgen.EXIT_OK
    for word in ("throughput", "pingpong", "paced", "connect", "idle", "--window", "Exit codes"):
        assert word in done.stdout


# ---- every mode, for real ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"size": 16},
        {"size": 128, "subscribers": 10},
        {"size": 0, "publishers": 2, "subscribers": 2},
        {"size": 128, "publishers": 5, "subscribers": 5, "subject_mode": "pairs"},
        {"size": 128, "publishers": 2, "subject_mode": "many", "subjects": 500},
        {"size": 100_000, "verify": True},
        {"size": 1000, "window": 1},
        {"size": 17, "window_bytes": 0},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_throughput(nats: NatsServer, options: dict[str, Any]) -> None:
    outcome = loadgen.run(
        "throughput", nats.port, messages=500, warmup=50, server_pids=nats.pids(), **options
    )
    report = outcome.report
    assert outcome.code == loadgen.EXIT_OK, report
    assert verdict(report) == CLEAN
    publishers, subscribers = options.get("publishers", 1), options.get("subscribers", 1)
    each = 1 if options.get("subject_mode") == "pairs" else subscribers
    assert report["published"] == 500 * publishers
    assert report["deliveries"] == 500 * publishers * each
    assert report["deliveries_per_s"] > 0
    assert report["server_cpu_ns"] >= 0
    assert report["generator_cpu_ns"] > 0
    assert report["server_version"]


def test_the_servers_cpu_time_is_counted(nats: NatsServer) -> None:
    """The kernel adds it up when a process is switched or at a tick: a short run may show none."""
    outcome = loadgen.run("throughput", nats.port, messages=200_000, server_pids=nats.pids())
    assert outcome.code == loadgen.EXIT_OK, outcome.report
    assert outcome.report["server_cpu_ns"] > 0
    assert outcome.report["server_cpu_ns_per_delivery"] > 0


@pytest.mark.parametrize("mode", ["pingpong", "paced"])
def test_latency(nats: NatsServer, mode: str) -> None:
    outcome = loadgen.run(
        mode, nats.port, messages=500, warmup=50, rate=5000, server_pids=nats.pids()
    )
    report = outcome.report
    assert outcome.code == loadgen.EXIT_OK, report
    assert verdict(report) == CLEAN
    figures = [report[name] for name in LATENCY_NAMES]
    assert figures == sorted(figures)
    assert 0 < report["mean_us"] <= report["max_us"]
    assert report["server_cpu_ns_per_delivery"] >= 0


def test_connect(nats: NatsServer) -> None:
    outcome = loadgen.run("connect", nats.port, connections=300, server_pids=nats.pids())
    assert outcome.code == loadgen.EXIT_OK
    assert outcome.report["connections"] == 300
    assert outcome.report["connections_per_s"] > 0


def test_idle_waits_and_then_reaches_everyone(nats: NatsServer) -> None:
    with loadgen.idle(nats.port, connections=200) as crowd:
        assert nats.pss_bytes() > 0
        outcome = crowd.finish()
    assert outcome.code == loadgen.EXIT_OK
    assert outcome.report["reached"] == 200
    assert verdict(outcome.report) == CLEAN


def test_figures_for_people(nats: NatsServer) -> None:
    done = command("throughput", "--port", nats.port, "--messages", 100)
    assert done.returncode == loadgen.EXIT_OK, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["deliveries"] == "100"
    assert lines["verdict"] == "ok"


# ---- the table -----------------------------------------------------------------------------------


def small_table(servers: str, result: Path) -> None:
    """Every scenario gives both servers a figure, and no message goes wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.run", "--small", "--servers", servers, "--json", str(result)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(result.read_text())
    assert [s.key for s in SCENARIOS] == list(dict.fromkeys(r["scenario"] for r in table["rows"]))
    for row in table["rows"]:
        assert row["title"] in done.stdout
        for server in (row["ours"], row["theirs"]):
            assert server["figure"] is not None, row
            assert server["checks"] == "0/0/0", row
    assert table["machine"]["cores"] > 0
    assert table["commit"]
    assert set(servers.split(",")) <= set(table["versions"])


def test_small_table_of_nats_server_beside_itself(tmp_path: Path) -> None:
    small_table("nats-server,nats-server", tmp_path / "table.json")


def test_small_table_against_midair(tmp_path: Path) -> None:
    small_table("midair,nats-server", tmp_path / "table.json")


def test_a_server_that_does_not_start_fails_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import run

    monkeypatch.setattr(NatsServer, "command", lambda self: ["false"])
    result = tmp_path / "table.json"
    words = ["--small", "--servers", "nats-server,nats-server", "--scenarios", "connect"]
    assert run.main([*words, "--json", str(result)]) == 1
    table = json.loads(result.read_text())
    assert table["rows"][0]["ours"]["figure"] is None
    assert "while starting" in table["samples"][0]["error"]
