"""`latency.pin`: each part has its core, and all of them agree about how many there are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from midair.client.wire_nats import msg, pub
from midair.config import Config
from midair.process.runtime import Runtime
from native.conntable import ConnTable
from tests.support.instance import Instance, eventually
from tests.support.stream import Stream

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]


def replaced(instance: Instance, part: str, pid: int) -> None:
    eventually(lambda: instance.components()[part]["pid"] not in (None, pid), f"another {part}")


@pytest.mark.parametrize("count", [1, 2, 0])
def test_every_connmgr_serves_clients_that_hear_each_other(make_midair: Make, count: int) -> None:
    """003-10; also after a death, as a successor works it out anew."""
    instance = make_midair(f"[latency]\npin = true\n[connmgr]\ncount = {count}\n")
    connmgrs = count or Config().connmgrs
    cores = sorted(os.sched_getaffinity(0))
    parts = [f"connmgr/{n}" for n in range(connmgrs)]
    assert [name for name in instance.components() if name.startswith("connmgr")] == parts

    def bound() -> bool:
        allowed = {part: os.sched_getaffinity(instance.pid(part)) for part in (*parts, "router")}
        others = cores[:-1] or cores
        wanted = {part: {others[n % len(others)]} for n, part in enumerate(parts)}
        return allowed == wanted | {"router": {cores[-1]}}

    streams = [Stream(instance.host, instance.port) for _ in range(2 * connmgrs)]
    for stream in streams:
        stream.sub(b"all", b"1")
        stream.sync()
    table = ConnTable.attach(Runtime.open(instance.name))
    assert {slot.connmgr for slot in table.used()} == set(range(connmgrs))
    table.close()
    for number, killed in enumerate(["", *parts, "router"]):
        if killed:
            before = instance.pid(killed)
            os.kill(before, signal.SIGKILL)
            replaced(instance, killed, before)
        for at, sender in enumerate(streams):
            body = b"%d %d" % (number, at)
            sender.send(pub(b"all", body))
            for stream in streams:
                stream.expect(msg(b"all", b"1", body))
        eventually(bound, "each has its core")
    for stream in streams:
        stream.close()
