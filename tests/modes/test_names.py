"""A name (docs/modes.md, ipc) whose client is silent: the next one that asks for it gets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from midair.process.runtime import ACTIVE, Runtime
from tests.support.instance import ROOT, Instance, eventually, start
from tests.support.stream import Stream

ANSWER_S = 2.0
CONFIG = f"[limits]\nname_answer_s = {ANSWER_S}\n"
# Looked at once a second, and asked for once a second.
TAKEN_OVER_S = ANSWER_S + 4.0
HELLO = b'CONNECT {"verbose":false,"name":"ipc:tool.one"}\r\nPING\r\n'

# A client that answers PINGs, as long as it runs.
HOLDER = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(b'CONNECT {"verbose":false,"name":"ipc:tool.one"}\\r\\nPING\\r\\n')
for line in sock.makefile("rb"):
    print(line.decode().strip(), flush=True)
    if line == b"PING\\r\\n":
        sock.sendall(b"PONG\\r\\n")
"""


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def server(request: pytest.FixtureRequest) -> Iterator[Instance]:
    instance = start(request.node.nodeid, CONFIG, "--connmgrs", str(request.param))
    yield instance
    instance.stop()


@contextmanager
def holder(server: Instance) -> Iterator[subprocess.Popen[str]]:
    """A process whose client has the name."""
    where = [server.host, str(server.port)]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *where], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert next(lines).startswith("INFO ")
        assert next(lines) == "PONG\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def ask(server: Instance) -> tuple[Stream, bytes]:
    """A newcomer that asks for the name, and the first line it is told."""
    stream = Stream(server.host, server.port)
    stream.send(HELLO)
    return stream, stream.line()


def test_a_client_that_answers_keeps_its_name(server: Instance) -> None:
    with holder(server) as old:
        for _ in range(3):
            began = time.monotonic()
            stream, said = ask(server)
            assert said == b"-ERR 'Client Name Taken'"
            assert stream.line() == b"", "and nothing else: no PONG"
            assert time.monotonic() - began < ANSWER_S, "told when the other one answers"
            stream.close()
        assert old.poll() is None


def test_a_stopped_client_loses_its_name(server: Instance) -> None:
    """Its kernel still takes what is sent to it, as that of a client whose program hangs."""
    with holder(server) as old:
        old.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        stream, said = ask(server)
        took = time.monotonic() - began
        assert said == b"PONG"
        assert ANSWER_S <= took < TAKEN_OVER_S
        stream.sub(b"_midair.ipc.tool.one", b"1")
        assert stream.sync() == []
        with closing(Stream(server.host, server.port)) as other:
            other.send(b"PUB _midair.ipc.tool.one 2\r\nhi\r\n")
            (message,) = stream.take(1)
            assert message.body == b"hi"
        old.send_signal(signal.SIGCONT)
        out, _ = old.communicate(timeout=30)
        assert out.splitlines()[-1] == "-ERR 'Connection Replaced'"
        second, said = ask_while_answering(server, stream)
        assert said == b"-ERR 'Client Name Taken'", "the newcomer has it now, and answers"
        second.close()
        stream.close()


def ask_while_answering(server: Instance, alive: Stream) -> tuple[Stream, bytes]:
    stream = Stream(server.host, server.port)
    stream.send(HELLO)
    assert alive.line() == b"PING"
    alive.send(b"PONG\r\n")
    return stream, stream.line()


@pytest.mark.parametrize("component", ["router", "connmgr"])
def test_it_is_asked_again_when_a_process_dies_meanwhile(server: Instance, component: str) -> None:
    """Nobody but who asks remembers the question."""
    with holder(server) as old:
        old.send_signal(signal.SIGSTOP)
        stream = Stream(server.host, server.port)
        stream.send(HELLO)
        for _ in range(2):
            old_ones = active(server, component)
            for pid in old_ones:
                os.kill(pid, signal.SIGKILL)
            eventually(
                lambda gone=old_ones: len(active(server, component) - gone) == len(gone),
                "there are new ones",
            )
        assert stream.line() == b"PONG"
        stream.close()


def active(server: Instance, role: str) -> set[int]:
    states = Runtime.create(server.name).states()
    return {it.pid for it in states if it.role == role and it.state == ACTIVE}
