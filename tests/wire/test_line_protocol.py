"""A second protocol beside NATS: one folder (line_protocol/) and one registration, a build option.

Nothing outside that folder knows the line protocol. Its clients and those of NATS are on two
listeners of one instance and talk to each other, through kills of the connmgr too.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midair.client.wire_nats import msg, pub
from midair.config import split_address
from tests.support.instance import Instance, eventually, start
from tests.support.stream import Stream
from tests.wire.line_protocol.client import Line

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "line_protocol"
CONFIG = """
[server]
listen = ["127.0.0.1:0", {address = "127.0.0.1:0", protocol = "line"}]
[limits]
max_payload = 8000
[manager]
restart_limit = 1000
"""
# Of the NATS protocol; constants of sockets (MSG_DONTWAIT, TCP_INFO) are other words.
WORDS = re.compile(r"(?i:nats)|\b(H?MSG|H?PUB|INFO|PONG)\b|-ERR|\+OK")


class Both:
    """An instance that speaks NATS at one port and the line protocol at another."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        said = instance.line.split("listening on ")[1].split(";")[0].split(", ")
        self.nats_port, self.line_port = (split_address(address)[1] for address in said)

    def nats(self) -> Stream:
        return Stream("127.0.0.1", self.nats_port)

    def line(self) -> Line:
        return Line(self.line_port)

    def kill(self, component: str) -> None:
        old = self.instance.pid(component)
        os.kill(old, signal.SIGKILL)
        eventually(lambda: self.instance.pid(component) != old, f"{component} is back")


@pytest.fixture(scope="module", params=(1, 2), ids=("1connmgr", "2connmgrs"))
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    build = ROOT / "build" / "line"
    build.mkdir(parents=True, exist_ok=True)
    with (build / ".lock").open("w") as lock:  # a test beside this one may be building, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(
            [
                *(sys.executable, "native/build.py", "--out", str(build)),
                *("--test-protocol", str(FOLDER / "line.c")),
            ],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDAIR_NATIVE", str(build))
        instance = start(__name__, CONFIG, "--connmgrs", str(request.param))
    yield Both(instance)
    instance.stop()


def test_only_its_folder_knows_the_protocol() -> None:
    """Of the C part: one line of the registry and the build's option, and neither names it."""
    for path in (ROOT / "native").rglob("*"):
        if path.suffix in (".c", ".h", ".py", ".build", ".txt") and path.is_file():
            assert "protocol_line" not in path.read_text(), path


def test_no_other_room_contains_a_word_of_nats() -> None:
    """C outside protocol/nats, and the Python of all parts but connmgr/protocols/nats.py."""
    rooms = [ROOT / name for name in ("native", "router", "dispatcher", "connmgr")]
    found = []
    for room in rooms:
        for path in sorted(room.rglob("*.[chp]*")):
            if path.suffix not in (".c", ".h", ".py") or path.name == "nats.py":
                continue
            inside = path.relative_to(ROOT).as_posix()
            if "protocol/nats/" in inside:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if WORDS.search(line) and "protocol/nats/nats.h" not in line:
                    found.append(f"{inside}:{number}: {line.strip()}")
    allowed = {"native/src/protocol/registry.c": 1}  # the registration
    counted = {path: sum(line.startswith(f"{path}:") for line in found) for path in allowed}
    assert counted == allowed
    assert [line for line in found if line.split(":")[0] not in allowed] == []


def test_both_protocols_talk_to_each_other(both: Both) -> None:
    with both.line() as line, both.line() as other:
        nats = both.nats()
        nats.sub(b"talk.*", b"7")
        line.send(b"S talk.> x")
        assert nats.sync() == []
        assert line.sync() == []
        other.send(b"P talk.a from a line")
        assert line.line() == b"M x talk.a from a line"
        nats.expect(msg(b"talk.a", b"7", b"from a line"))
        nats.send(pub(b"talk.b", b"from NATS"))
        nats.expect(msg(b"talk.b", b"7", b"from NATS"))
        assert line.line() == b"M x talk.b from NATS"
        line.send(b"U x", b"P talk.c now only NATS")
        assert line.sync() == []
        nats.expect(msg(b"talk.c", b"7", b"now only NATS"))
        nats.close()


def test_headers_stay_with_those_who_speak_the_protocol_of_the_sender(both: Both) -> None:
    with both.line() as line:
        nats = both.nats()
        line.send(b"S head a")
        line.sync()
        block = b"NATS/1.0\r\nKey: value\r\n\r\n"
        frame = b"HPUB head %d %d\r\n%bbody\r\n" % (len(block), len(block) + 4, block)
        nats.send(frame)
        assert line.line() == b"M a head body"
        nats.close()


@pytest.mark.parametrize("size", [1, 100, 4090, 5000])
def test_a_run_of_messages_in_order(both: Both, size: int) -> None:
    """Repeated frames go as they lie to who speaks the same, and are written for others."""
    count = 300
    bodies = [b"%05d" % n + b"x" * size for n in range(count)]
    with both.line() as line, both.line() as publisher:
        nats = both.nats()
        nats.sub(b"run", b"1")
        nats.sync()
        line.send(b"S run 1")
        line.sync()
        publisher.send(*(b"P run " + body for body in bodies))
        assert line.lines(count) == [b"M 1 run " + body for body in bodies]
        nats.expect(b"".join(msg(b"run", b"1", body) for body in bodies))
        nats.send(b"".join(pub(b"run", body) for body in bodies))
        assert line.lines(count) == [b"M 1 run " + body for body in bodies]
        nats.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"X y z", b"E what?"),
        (b"P subject " + b"x" * 9000, b"E too much"),
        (b"S a " + b"i" * 100, b"E no"),
        (b"P " + b"s" * 20000, b"E no"),
    ],
)
def test_what_it_refuses_ends_the_connection_with_a_word(
    both: Both, said: bytes, told: bytes
) -> None:
    with both.line() as line:
        line.send(said)
        assert line.line() == told
        assert line.line() == b""


def test_a_bad_subject_is_refused_and_the_connection_stays(both: Both) -> None:
    with both.line() as line:
        line.send(b"S a..b 1")
        assert line.line() == b"E not a subject"
        assert line.sync() == []


@pytest.mark.parametrize("component", ["connmgr/0", "router"])
def test_a_kill_mid_stream_loses_and_doubles_nothing(both: Both, component: str) -> None:
    """Both kinds of clients go on where they were: the record says what a connection speaks."""
    rounds, each = 6, 500
    with both.line() as line, both.line() as publisher:
        nats = both.nats()
        nats.sub(b"kill", b"n")
        nats.sync()
        line.send(b"S kill l")
        line.sync()
        for at in range(rounds):
            bodies = [b"%d body %d " % (at, n) + b"y" * (n % 50) for n in range(each)]
            publisher.send(*(b"P kill " + body for body in bodies[: each // 2]))
            both.kill(component)
            publisher.send(*(b"P kill " + body for body in bodies[each // 2 :]))
            assert line.lines(each) == [b"M l kill " + body for body in bodies]
            nats.expect(b"".join(msg(b"kill", b"n", body) for body in bodies))
        assert line.sync() == []
        nats.close()
