"""`midair bench`: against a real instance, alone and beside nats-server; and what can go wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from bench import loadgen
from bench.peers import NatsServer, free_port
from bench.scenarios import SCENARIOS
from midair import cli
from midair.exits import Exit
from tests.bench.faulty_server import Faulty, drop
from tests.support.instance import ROOT, Instance

pytestmark = pytest.mark.slow

Make = Callable[..., Instance]
QUICK = ("--scale", "0", "--repeat", "1")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "midair", "bench", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_scenario_beside_another_server(make_midair: Make) -> None:
    instance = make_midair()
    with NatsServer() as nats:
        against = f"127.0.0.1:{nats.port}"
        done = bench("--server", instance.address, "--against", against, *QUICK)
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    possible = [scenario for scenario in SCENARIOS if not scenario.needs_memory]
    for scenario in possible:
        for metric in scenario.metrics:
            assert metric.title in done.stdout
    assert "ratio" in done.stdout
    assert instance.name in done.stdout
    # Progress: a line for each run where there is no terminal.
    steps = done.stderr.splitlines()
    assert len(steps) == 2 * len(possible)
    assert steps[0] == f"[1/{len(steps)}] {possible[0].key} {instance.address} (run 1)"


def test_json_of_one_server(make_midair: Make) -> None:
    instance = make_midair()
    words = ("--server", instance.address, "--scenario", "pingpong", "fan-10", "--json")
    done = bench(*words, *QUICK)
    assert done.returncode == Exit.OK, done.stderr
    report = json.loads(done.stdout)
    assert list(report["servers"]) == [instance.address]
    assert [row["scenario"] for row in report["rows"]] == ["fan-10", "pingpong", "pingpong"]
    for row in report["rows"]:
        assert row["servers"][instance.address]["figure"] > 0
        assert row["servers"][instance.address]["checks"] == "0/0/0"
    assert len(report["samples"]) == 2


def test_wrong_deliveries_fail_it() -> None:
    with Faulty(drop) as server:
        address = f"127.0.0.1:{server.port}"
        done = bench("--server", address, "--scenario", "paced", *QUICK)
    assert done.returncode == Exit.FAILED
    assert " 1/0/0" in done.stdout


def test_a_server_that_ends_connections_is_named() -> None:
    with Faulty(drop, fuss="-ERR 'Slow Consumer'\r\n") as server:
        address = f"127.0.0.1:{server.port}"
        done = bench("--server", address, "--scenario", "1to1-128", *QUICK)
    assert done.returncode == Exit.FAILED
    assert f"failed: {address} ended the connection" in done.stdout
    assert "Slow Consumer" in done.stdout


def test_nobody_answers() -> None:
    address = f"127.0.0.1:{free_port()}"
    done = bench("--server", address, *QUICK)
    assert done.returncode == Exit.NOT_RUNNING
    assert done.stderr == (
        f"midair: nobody answers at {address} (Connection refused); is it running? (midair up)\n"
    )


def test_a_server_of_another_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def greet() -> None:
            with listener.accept()[0] as client:
                client.sendall(b"220 mail.example ready\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        done = bench("--server", address, *QUICK)
        thread.join()
    assert done.returncode == Exit.FAILED
    assert done.stderr == f"midair: {address} does not speak the NATS client protocol\n"


@pytest.mark.parametrize(
    "words",
    [
        ("--server", "somewhere"),
        ("--server", "127.0.0.1:0"),
        ("--against", "127.0.0.1:99999"),
        ("--repeat", "0"),
        ("--scale", "-1"),
        ("--scenario", "walk"),
        ("--scenario", "idle"),
    ],
    ids=" ".join,
)
def test_bad_arguments(words: tuple[str, ...]) -> None:
    done = bench(*words)
    assert done.returncode == Exit.USAGE
    assert words[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise loadgen.LoadgenError("a C compiler is needed to build loadgen")

    monkeypatch.setattr(loadgen, "build", missing)
    assert cli.main(["bench", *QUICK]) == Exit.FAILED
    assert capsys.readouterr().err == "midair: a C compiler is needed to build loadgen\n"


def test_list_and_help_name_what_there_is() -> None:
    listed = bench("--list")
    assert listed.returncode == Exit.OK
    for scenario in SCENARIOS:
        assert (scenario.key in listed.stdout.split()) is not scenario.needs_memory
    told = bench("--help").stdout
    for word in ("--against", "--scenario", "--json", "examples:", "Exit codes"):
        assert word in told
