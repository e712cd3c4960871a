"""The transport seam (docs/decisions, native/src/transport): crashes with envelopes on the wire.

Method: as tests/crash/test_points.py, but the listener's transport is that of
tests/wire/envelopes/envelope.c: every byte on the wire is in a numbered envelope whose raw bytes
depend on its number. The clients are the same; a proxy opens the envelopes and ends at the first
number that comes twice, is left out or has another content than was begun. All crash points of a
connmgr, then a storm of kills at any instruction. Shows J2 and J3 for two streams.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.crash.points import CONFIG, Storm, stormed
from tests.crash.test_points import ELSEWHERE, ONCE, SEED, points
from tests.support.instance import ROOT, Instance, start
from tests.wire.envelopes.codec import Opener, Sealer

FOLDER = ROOT / "tests" / "wire" / "envelopes"
LISTEN = '[server]\nlisten = [{address = "127.0.0.1:0", transport = "envelope"}]\n'
KILLS = 40
RAW = ("raw.opened", "raw.dropped", "raw.fixed")
# The proxy does not pass on one end without the other, so there are no clients that end their
# sending side here, and nobody else has sids that need cells: test_points.py kills there.
HALVES = ("sid.cells",)


@contextlib.contextmanager
def proxied(instance: Instance) -> Iterator[int]:
    """Where plain clients connect."""
    where = [instance.host, str(instance.port), str(SEED)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.wire.envelopes.proxy", *where],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
        assert process.poll() is None, process.stdout.read()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def storm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Storm]:
    roles = ("small", "small", "large", "fan", "queue", "churn", "requests")
    roles += ("names", "silent")
    with stormed(
        __name__,
        tmp_path_factory.mktemp("envelopes"),
        request.param,
        (*roles, "idle"),
        SEED,
        config=LISTEN + CONFIG,
        build=("--test-transport", str(FOLDER / "envelope.c")),
        through=proxied,
    ) as made:
        yield made


def of_connmgr() -> list[str]:
    return [name for component, name in points() if component == "connmgr/*"]


@pytest.mark.parametrize(
    "point", [name for name in of_connmgr() if name not in (*ELSEWHERE, *HALVES)] + [*RAW]
)
def test_kill_at(storm: Storm, point: str) -> None:
    chance = random.Random(f"{SEED} {point}")
    storm.crash_at("connmgr/*", point, 1 if point in ONCE else chance.randint(1, 4))
    if point in RAW:
        for _ in range(5):
            storm.crash_at("connmgr/*", point, chance.randint(1, 200))


def test_a_storm_of_kills(storm: Storm) -> None:
    chance = random.Random(SEED)
    parts = ["router", *(f"connmgr/{n}" for n in range(storm.connmgrs))]
    for _ in range(KILLS):
        with contextlib.suppress(ProcessLookupError):
            os.kill(storm.pid(chance.choice(parts)), signal.SIGKILL)
        storm.check_clients()


def test_nothing_was_lost_and_nothing_is_left(storm: Storm) -> None:
    for report in storm.stop():
        assert "error" not in report, report
        assert len(report) > 1, f"did nothing: {report}"
    storm.nothing_is_left()


def test_a_broken_envelope_ends_the_connection(storm: Storm) -> None:
    """And so does one that can never be whole."""
    where = (storm.instance.host, storm.instance.port)
    good = Sealer().seal(b"PING\r\n")
    for raw in (b"PING\r\n" * 10, good + good, good[:-1] + b"?", good[:-1]):
        with socket.create_connection(where) as client:
            client.settimeout(30)
            client.sendall(raw)
            opener = Opener()
            with contextlib.suppress(OSError):  # it may have been reset by now
                client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # what it did not read is left behind
                while more := client.recv(1 << 16):
                    opener.feed(more)
            assert not opener.waiting


def test_a_transport_that_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(pytest.fail.Exception, match="one of plain is allowed"):
        start(__name__, LISTEN)
