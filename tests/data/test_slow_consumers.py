"""What happens to a consumer that does not read, by policy, and to a publisher over its rate.

Policies belong to listeners, so one instance listens once for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from midair import config
from midair.client.wire_nats import hpub, msg, pub
from midair.config import MIB, SlowConsumer
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli, eventually, new_name
from tests.support.stream import Inside, Stream, Worker

Make = Callable[..., Instance]
PENDING = 256 * 1024
POLICIES = get_args(SlowConsumer)


@dataclass
class Several:
    """An instance with a listener for each policy."""

    name: str
    ports: dict[str, int]
    stderr: Path

    def connect(self, policy: str, receive_buffer: int = 0) -> Stream:
        return Stream("127.0.0.1", self.ports[policy], receive_buffer=receive_buffer)

    def kill(self, component: str) -> None:
        """kill -9, and waits for the successor."""
        rows = self._rows()
        os.kill(rows[component], signal.SIGKILL)
        eventually(
            lambda: self._rows().get(component, rows[component]) != rows[component],
            f"{component} is back",
        )

    def read_of(self, stream: Stream) -> int:
        """How many messages of a connection were read."""
        done = cli("conns", "--json", "--name", self.name)
        rows = {row["id"]: row for row in json.loads(done.stdout)}
        found: int = rows[stream.info["client_id"]]["messages_in"]
        return found

    def pids(self) -> list[str]:
        return list(self._rows())

    def _rows(self) -> dict[str, int]:
        done = cli("status", "--json", "--name", self.name)
        assert done.returncode == 0, done.stderr
        return {
            row["role"] if row["index"] is None else f"{row['role']}/{row['index']}": row["pid"]
            for row in json.loads(done.stdout)["components"]
            if row["state"] == "active"
        }


@contextlib.contextmanager
def several(owner: str, tmp_path: Path, connmgrs: int, limits: str = "") -> Iterator[Several]:
    name = new_name(owner)
    listen = ", ".join(f'{{address = "127.0.0.1:0", slow_consumer = "{p}"}}' for p in POLICIES)
    text = f"""
        [server]
        listen = [{listen}]
        [limits]
        max_pending = {PENDING}
        {limits or "write_deadline_s = 600"}
        [connmgr]
        count = {connmgrs}
        [manager]
        restart_limit = 1000
        [log]
        level = "debug"
    """
    path = tmp_path / "several.toml"
    path.write_text(text)
    stderr = tmp_path / "stderr"
    with stderr.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "midair", "up", "--config", str(path), "--name", name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert "listening on " in line, stderr.read_text()
        found = line.split("listening on ")[1].split(";")[0].split(", ")
        ports = [config.split_address(address)[1] for address in found]
        yield Several(name, dict(zip(POLICIES, ports, strict=True)), stderr)
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


def body(n: int, size: int) -> bytes:
    return b"%d " % n + b"x" * size


# More than the kernel takes for a client that does not read, and what may wait behind it.
SIZE, COUNT = 1000, 12_000


def flood(publisher: Stream, subject: bytes, count: int = COUNT, size: int = SIZE) -> None:
    publisher.send(b"".join(pub(subject, body(n, size)) for n in range(count)))


def test_disconnect_says_why_and_is_counted(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """More waits than is allowed: what was to be written before, then the error, then the end."""
    with several(request.node.nodeid, tmp_path, 1) as server:
        slow, publisher = server.connect("disconnect", 4096), server.connect("disconnect")
        slow.sub(b"s", b"1")
        slow.sync()
        flood(publisher, b"s")
        assert publisher.sync() == []
        got = slow.to_end()
        everything = b"".join(msg(b"s", b"1", body(n, SIZE)) for n in range(COUNT))
        error = b"-ERR 'Slow Consumer'\r\n"
        assert got.endswith(error)
        assert everything.startswith(got[: -len(error)])
        reason = "closed: slow consumer (pending bytes)"
        eventually(lambda: reason in server.stderr.read_text(), "the reason is known")
        assert publisher.sync() == []
        publisher.close()
        slow.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_deadline_holds_for_every_policy(
    request: pytest.FixtureRequest, tmp_path: Path, policy: str
) -> None:
    with several(request.node.nodeid, tmp_path, 1, "write_deadline_s = 0.2") as server:
        slow, publisher = server.connect(policy, 4096), server.connect("disconnect")
        slow.sub(b"s", b"1")
        slow.sync()
        # Just below what may wait, once the kernel takes no more: only time can be the reason.
        sending = Worker(lambda: [flood(publisher, b"s", 100) for _ in range(COUNT // 100)])
        reason = re.compile(r"closed: slow consumer \((pending bytes|write deadline)\)")
        said = eventually(lambda: reason.search(server.stderr.read_text()), "it is closed")
        assert policy == "disconnect" or said.group(1) == "write deadline"
        sending.done()  # it goes on, also the one that was held
        assert publisher.sync() == []
        publisher.close()
        slow.close()


def dropped(headers: bytes) -> int:
    found = re.search(rb"\r\nMidair-Dropped: (\d+)\r\n", headers)
    return int(found.group(1)) if found else 0


@pytest.mark.parametrize("size", [1000, 20_000])
@pytest.mark.parametrize("headers", [b"", b"NATS/1.0\r\nA: b\r\n\r\n"])
def test_drop_newest_tells_how_many(
    request: pytest.FixtureRequest, tmp_path: Path, size: int, headers: bytes
) -> None:
    """Every message is there, or counted in front of the next one that is."""
    count = COUNT * SIZE // size
    with several(request.node.nodeid, tmp_path, 2) as server:
        slow, publisher = server.connect("drop-newest", 4096), server.connect("disconnect")
        slow.sub(b"s", b"1")
        slow.sync()

        def send(n: int) -> bytes:
            return hpub(b"s", headers, body(n, size)) if headers else pub(b"s", body(n, size))

        publisher.send(b"".join(send(n) for n in range(count)))
        assert publisher.sync() == []
        server.kill("connmgr/0")
        server.kill("connmgr/1")  # the count outlives whoever counts
        reading = Worker(lambda: read_all(slow, size, headers, count))
        while reading.is_alive():  # until there is room for one more, which says what is missing
            publisher.send(send(count))
            publisher.sync()
            count += 1
        assert reading.done() > 0
        publisher.close()
        slow.close()


def read_all(slow: Stream, size: int, headers: bytes, until: int) -> int:
    """Reads up to message `until` or a later one, and returns how many were lost."""
    expected = lost = 0
    while expected <= until:
        (message,) = slow.take(1)
        missing = dropped(message.headers)
        lost += missing
        expected += missing
        assert message.body == body(expected, size)
        if not missing:
            assert message.headers == headers
        elif headers:
            assert message.headers.startswith(headers[:-2])
        expected += 1
    return lost


def test_backpressure_slows_who_feeds_it_and_nobody_else(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Nothing is lost and little waits, though the consumer sleeps; other pairs go on."""
    with several(request.node.nodeid, tmp_path, 2) as server:
        inside = Inside(server.name, 2, 256 * MIB)
        slow = server.connect("backpressure", 4096)
        slow.sub(b"slow.*", b"1")
        slow.sync()
        feeders = [server.connect("disconnect") for _ in range(4)]
        assert {inside.connmgr_of(stream) for stream in feeders} == {0, 1}
        sending = [
            Worker(lambda at=at: flood(feeders[at], b"slow.%d" % at))  # type: ignore[misc]
            for at in range(len(feeders))
        ]
        here, there = server.connect("disconnect"), server.connect("disconnect")
        there.sub(b"quick", b"1")
        there.sync()
        for n in range(300):
            here.send(pub(b"quick", body(n, 5000)) * 10)
            there.expect(msg(b"quick", b"1", body(n, 5000)) * 10)
        # What is on its way is little: far less than they send. Where they have put the rest, in
        # the kernel or not yet, is theirs.
        assert all(server.read_of(stream) < COUNT for stream in feeders)
        for component in ("connmgr/0", "router", "connmgr/1"):  # nobody stays held for ever
            server.kill(component)
        shares: dict[bytes, list[bytes]] = {}
        for message in slow.take(COUNT * len(feeders)):
            shares.setdefault(message.subject, []).append(message.body)
        for at in range(len(feeders)):
            assert shares[b"slow.%d" % at] == [body(n, SIZE) for n in range(COUNT)]
        for worker in sending:
            worker.done()
        for stream in (slow, *feeders, here, there):
            stream.close()
        inside.table.close()


RATE = """
[limits]
max_messages_per_s = {messages}
max_bytes_per_s = {size}
rate_action = "{action}"
"""


@pytest.mark.parametrize(("messages", "size"), [(500, 0), (0, "'100KB'")])
def test_a_publisher_over_its_rate_is_read_later(
    make_midair: Make, messages: int, size: str
) -> None:
    """Two seconds' worth more than the burst takes two seconds at least; nothing is lost."""
    instance = make_midair(RATE.format(messages=messages, size=size, action="throttle"), connmgrs=1)
    reader = Stream(instance.host, instance.port)
    reader.sub(b"r", b"1")
    reader.sync()
    publisher = Stream(instance.host, instance.port)
    publisher.sync()
    started = time.monotonic()
    for n in range(30):  # one read is not cut: many small ones
        publisher.send(
            b"".join(pub(b"r", b"%d " % m + bytes(150)) for m in range(n * 50, n * 50 + 50))
        )
        publisher.sync()
    took = time.monotonic() - started
    assert [int(m.body.split(b" ")[0]) for m in reader.take(1500)] == list(range(1500))
    assert took > 1.0
    reader.close()
    publisher.close()


def test_a_publisher_over_its_rate_is_closed(make_midair: Make) -> None:
    instance = make_midair(RATE.format(messages=100, size=0, action="close"), connmgrs=1)
    polite, rude = (Stream(instance.host, instance.port) for _ in range(2))
    with contextlib.suppress(ConnectionError):
        for _ in range(50):
            rude.send(pub(b"r", b"x") * 100)
    assert rude.to_end().endswith(b"-ERR 'maximum rate exceeded'\r\n")
    polite.send(pub(b"r", b"x") * 90)
    assert polite.sync() == []
    polite.close()
    rude.close()
