"""Nothing that arrives on a socket ends a process: not on those of the parts, not on the manager's.

Method: one peer after the other sends what nobody should send, or nothing, and stays or goes. Then
every process is the one it was, and all of them do their work: the manager answers and starts what
died, the keeper gives sockets back, the connmgrs get new clients, the monitor answers.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from midair import names
from midair.process import program, wire
from midair.process.runtime import ACTIVE, Runtime
from midair.up import release
from midair.up.process import Life, Process
from tests.support.instance import PATIENCE_S, Instance, cli, eventually, start
from tests.support.live import Client, held

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]

DEEP = b"[" * 60_000
DEEP_OBJECT = b'{"op":' * 10_000 + b"1" + b"}" * 10_000
DIGITS = b'{"op":"status","v":' + b"9" * 5000 + b"}"
CONTROL = {
    "deep": DEEP,
    "deep object": DEEP_OBJECT,
    "deep inside": b'{"op":"upgrade","target":"all","release":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "digits": DIGITS,
    "digits in a place": b'{"op":"upgrade","target":"all","ready_s":' + b"9" * 4000 + b"}",
    "huge": b'{"op":"' + b"x" * 100_000 + b'"}',
    "half": b'{"op":"sta',
    "empty": b"",
    "no UTF-8": b'{"op":"\xff\xfe\xc0"}',
    "surrogate": b'{"op":"upgrade","target":"\\ud800","release":{},"ready_s":1}',
    "no object": b"[1,2,3]",
    "a number": b"7",
    "op is a list": b'{"op":[]}',
    "version is text": b'{"op":"down","v":"1"}',
    "nan": b'{"op":"upgrade","target":"router","ready_s":NaN,"release":'
    b'{"python":"/x","root":"/x","version":"9"}}',
    "no such python": b'{"op":"upgrade","target":"router","ready_s":5,"release":'
    b'{"python":"/no\\u0000such","root":"/x","version":"9"}}',
}


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


PEER = {
    "empty": b"",
    "half a head": b"\1\0\0",
    "deep": DEEP,
    "huge": b"\1" * 200_000,
    "no such op": wire.HEAD.pack(99, 0, 0),
    "newer": wire.HEAD.pack(1, 99, 0),
    "count too large": wire.HEAD.pack(1, 0, 2**32 - 1) + u64(1),
    "count too small": wire.HEAD.pack(1, 0, 0) + u64(1, 2, 3),
    "uids without descriptors": wire.HEAD.pack(1, 0, 2) + u64(1, 2),
    "a slot that there is not": wire.pack_handoff([(7, 2**31, 0)]),
    "largest numbers": wire.pack_handoff([(2**64 - 1, 2**32 - 1, 2**32 - 1)]),
}
NOTICES = {
    "empty": b"",
    "deep": DEEP,
    "no UTF-8": b"READY=1\nSTATUS=\xff\xfe",
    "digits": b"READY=1\nMONOTONIC_USEC=" + b"9" * 3000,
    "no lines": b"x" * 4096,
    "huge": b"READY=1\n" * 10_000,
}


def processes(instance: Instance) -> dict[str, int]:
    """Who is there, as they say themselves."""
    states = Runtime.open(instance.name).states()
    return {names.component(it.role, it.index): it.pid for it in states if it.state == ACTIVE}


@contextlib.contextmanager
def unharmed(instance: Instance) -> Iterator[None]:
    """Whatever happens inside, everybody is there and works afterwards."""
    before = processes(instance)
    with held(instance, 5):
        yield
        with Client(instance, "new") as client:
            client.echo(b"a new one is served")
    assert processes(instance) == before
    assert "Traceback" not in instance.stderr()
    killed = before["connmgr/0"]  # it gets its sockets back from the keeper, by the manager
    with held(instance, 5):
        os.kill(killed, signal.SIGKILL)
        eventually(
            lambda: processes(instance).get("connmgr/0", killed) != killed, "it is started again"
        )


@pytest.fixture(scope="module", params=[1, 2])
def instance(request: pytest.FixtureRequest) -> Iterator[Instance]:
    program.raise_descriptor_limit()
    config = "[manager]\nrestart_limit = 1000\n"
    options = ("--connmgrs", str(request.param), "--monitor", "0")
    made = start(request.node.nodeid, config, *options)
    eventually(lambda: "monitor" in processes(made), "the monitor answers")
    yield made
    made.stop()


def connect(instance: Instance, name: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.settimeout(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            sock.connect(Runtime.open(instance.name).socket(name))
            return sock
        except BlockingIOError:  # too many others
            assert time.monotonic() < deadline
            time.sleep(0.01)


def send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it is too large for the kernel, or the end has come
        sock.send(data)


def test_the_control_socket(instance: Instance) -> None:
    with unharmed(instance):
        before = processes(instance)
        for what, data in CONTROL.items():
            with connect(instance, names.CONTROL_SOCKET) as sock:
                send(sock, data)
                with contextlib.suppress(ConnectionError):
                    sock.recv(65536)  # an error, or the end
            with connect(instance, names.CONTROL_SOCKET) as sock:
                send(sock, data)  # and it does not wait for an answer
            assert processes(instance) == before, what
        eventually(
            lambda: json.loads(cli("status", "--json", "--name", instance.name).stdout),
            "the manager answers",
        )


@pytest.mark.parametrize("name", [names.KEEPER_SOCKET, names.handoff_socket(0)])
def test_sockets_between_the_parts(name: str, instance: Instance) -> None:
    with unharmed(instance):
        before = processes(instance)
        for what, data in PEER.items():
            with connect(instance, name) as sock, connect(instance, name) as again:
                send(sock, data)
                rights = array.array("i", [sock.fileno()])
                with contextlib.suppress(OSError):
                    again.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            assert processes(instance) == before, what


def test_a_peer_of_the_keeper_that_asks_and_does_not_read(instance: Instance) -> None:
    with unharmed(instance), connect(instance, names.KEEPER_SOCKET) as sock:
        sock.setblocking(False)
        ping = wire.pack_uids(wire.PING)
        with contextlib.suppress(OSError):  # it is closed in the end, or the socket is full
            for _ in range(100_000):
                sock.send(ping)


def test_the_socket_for_notifications(instance: Instance) -> None:
    with unharmed(instance), connect(instance, names.NOTIFY_SOCKET, socket.SOCK_DGRAM) as sock:
        for data in NOTICES.values():
            for _ in range(100):
                send(sock, data)


@pytest.mark.parametrize(
    "name", [names.CONTROL_SOCKET, names.KEEPER_SOCKET, names.handoff_socket(0)]
)
def test_a_thousand_connections_that_say_nothing(name: str, instance: Instance) -> None:
    with contextlib.ExitStack() as stack, unharmed(instance):
        for _ in range(1000):
            stack.enter_context(connect(instance, name))
        assert cli("status", "--name", instance.name).returncode == 0


HTTP = {
    "digits": b"GET /connz?limit=" + b"9" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "more digits": b"GET /connz?offset=" + b"9" * 15000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "tokens": b"GET /subsz?test=" + b"a." * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "no UTF-8": b"GET /%ff%fe%c0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "raw bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "deep": b"POST /varz HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + DEEP,
    "half": b"GET /var",
    "huge": b"\0" * 100_000,
}


def test_the_monitor(instance: Instance) -> None:
    host, port = instance.status()["monitor"].split(":")

    def ask(data: bytes) -> bytes:
        sock = socket.create_connection((host, int(port)), PATIENCE_S)
        with sock, contextlib.suppress(ConnectionError):
            sock.sendall(data)
            return sock.recv(4096) if data.endswith(b"\r\n\r\n") else b""
        return b""

    with unharmed(instance):
        for what, data in HTTP.items():
            ask(data)
            answer = ask(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.0 200"), what


def test_the_monitor_and_a_thousand_connections(instance: Instance) -> None:
    host, port = instance.status()["monitor"].split(":")
    with unharmed(instance), contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))


def test_deep_nesting_from_a_client(instance: Instance) -> None:
    """On the port that is open to everybody."""
    with unharmed(instance):
        for text in (b"[" * 3000, b"9" * 3000, b'{"name":"\xff\xfe"}', b'{"verbose":' * 300):
            with instance.connect() as sock:
                sock.sendall(b"CONNECT " + text + b"\r\nPING\r\n")
                while sock.recv(4096):
                    pass


def test_a_process_that_says_when_it_was_ready_in_too_many_digits() -> None:
    process = Process(release.own(), os.getpid(), os.pidfd_open(os.getpid()), None)
    for digits in ("9" * 400, "9" * 5000, "-" + "9" * 400, "nan", ""):
        process.life = Life.STARTING
        process.notified({"READY": "1", "MONOTONIC_USEC": digits})
        assert process.life is Life.READY
        assert process.ready_at <= time.monotonic()
    os.close(process.pidfd)


def test_one_that_hangs_is_reported_once(make_midair: Make) -> None:
    """Its death takes a while, and the manager has other things to do meanwhile."""
    made = make_midair(config="[manager]\nwatchdog_s = 1\nrestart_limit = 100\n")
    pid = processes(made)["connmgr/0"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: processes(made).get("connmgr/0", pid) != pid, "it is replaced")
    assert made.stderr().count("connmgr/0 silent for") == 1
    hung = [it for it in made.status()["events"] if it["kind"] == "hung"]
    assert len(hung) == 1
