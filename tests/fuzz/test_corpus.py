"""Every known input of the fuzzers, again: to the things themselves, and to a running instance."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midair import names
from midair.client.wire_nats import pub
from midair.process import wire
from tests.fuzz import child, seeds
from tests.fuzz.parser_build import build, replay
from tests.fuzz.targets import TARGETS, pieces
from tests.support.instance import PATIENCE_S, Instance
from tests.support.stream import Stream

Make = Callable[..., Instance]
# Requests that an instance obeys: it ends, or starts programs of the input's choice.
ENDS = ("down", "upgrade")


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_of_a_target(target: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = child.run([sys.executable, "-m", "tests.fuzz.replay", target], log)
    assert code == 0, log.read_text()


def test_inputs_of_the_parser(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for called, data in seeds.inputs("parser").items():
        (inputs / called).write_bytes(data)
    assert replay(inputs, tmp_path) == ""


def test_the_parsers_program_notices_what_does_not_hold(tmp_path: Path) -> None:
    """The same program with a parser that reads past the end, and one whose cuts can be seen."""
    source = Path(seeds.HERE.parents[1] / "native/src/protocol/nats/parse.c").read_text()
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for called, data in seeds.inputs("parser").items():
        (inputs / called).write_bytes(data)
    for old, new in (
        ("#define PUB_MARGIN (1 + 7 + 2)", "#define PUB_MARGIN (1 + 2)"),
        ("if (o->blank && n < len && ", "if (o->blank && "),
        ("w = (w * 100 + (w >> 16))", "w = (w * 10 + (w >> 16))"),
    ):
        assert old in source
        broken = tmp_path / "parse.c"
        broken.write_text(source.replace(old, new))
        assert replay(inputs, tmp_path, broken) != ""


def requests() -> Iterator[bytes]:
    """Of the control socket, but for those that an instance obeys."""
    for data in seeds.inputs("control").values():
        request = None
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(data)
        if data and not (isinstance(request, dict) and request.get("op") in ENDS):
            yield data


def send(kind: socket.SocketKind, path: Path, messages: list[tuple[int, bytes]]) -> None:
    """To a socket of an instance, which may close the connection at any time."""
    with socket.socket(socket.AF_UNIX, kind) as sock, open("/dev/null") as null:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        for count, data in messages:
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                wire.send(sock, data, [null.fileno()] * count)


def shout(instance: Instance, stream: bytes) -> None:
    """To the port, and reads what is said until the server closes, or waits for more."""
    with instance.connect() as sock, contextlib.suppress(OSError):
        sock.sendall(stream)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_a_running_instance_lives_through_all_of_them(make_midair: Make, connmgrs: int) -> None:
    instance = make_midair('[limits]\nmax_payload = "64KiB"\n', connmgrs=connmgrs)
    before = {name: row["pid"] for name, row in instance.components().items()}
    place = instance.runtime_path
    for data in requests():
        send(socket.SOCK_SEQPACKET, place / names.CONTROL_SOCKET, [(0, data)])
    for data in seeds.inputs("notify").values():
        send(socket.SOCK_DGRAM, place / names.NOTIFY_SOCKET, [(0, data)])
    for data in seeds.inputs("keeper").values():
        send(socket.SOCK_SEQPACKET, place / names.KEEPER_SOCKET, list(pieces(data)))
    for data in seeds.inputs("handoff").values():
        for path in place.glob("connmgr-*.sock"):
            for count in (0, 1, 2):
                send(socket.SOCK_SEQPACKET, path, [(count, data)])
    for data in seeds.inputs("parser").values():
        shout(instance, data[6:])
    for data in seeds.inputs("connect").values():
        shout(instance, b"CONNECT %b\r\nPING\r\n" % data[1:].replace(b"\n", b" "))
    with contextlib.closing(Stream(instance.host, instance.port)) as stream:
        stream.sub(b"still.here", b"1")
        stream.send(pub(b"still.here", b"yes"))
        assert stream.take(1)[0].body == b"yes"
    after = {name: row["pid"] for name, row in instance.components().items()}
    assert {name: after.get(name) for name in before} == before, instance.stderr()
    assert "Traceback" not in instance.stderr()


@pytest.mark.skipif(shutil.which("afl-clang-fast") is None, reason="AFL++ is not installed")
def test_the_parsers_program_is_one_for_afl(tmp_path: Path) -> None:
    assert build("afl-clang-fast", tmp_path).exists()
