"""003-77: one-way to one of a group: `Midair-Mode: semaphore` without a reply subject."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.crash.modes import hpub
from tests.support.instance import Instance
from tests.support.stream import Stream

GROUP = 3


def workers(server: Instance, subject: bytes, queue: bytes = b"group") -> list[Stream]:
    made = [Stream(server.host, server.port) for _ in range(GROUP)]
    for it in made:
        it.sub(subject, b"1", queue)
        assert it.sync() == []
    return made


@pytest.mark.parametrize("queue", [b"group", b""], ids=["group", "plain"])
def test_each_goes_to_one_of_them_in_turn(server: Instance, queue: bytes) -> None:
    subject = b"turn." + (queue or b"plain")
    group = workers(server, subject, queue)
    with Stream(server.host, server.port) as client:
        for number in range(30):
            client.send(hpub(subject, b"", b"%d" % number, mode="semaphore"))
        assert client.sync() == [], "nobody is told anything"
        got = [[int(it.body) for it in worker.sync()] for worker in group]
        assert sorted(it for mine in got for it in mine) == list(range(30))
        for mine in got:
            assert mine == list(range(mine[0], 30, GROUP)), "nobody is busy: in turn, in order"
    for worker in group:
        worker.close()


def test_it_counts_for_nobody_as_busy(server: Instance) -> None:
    """One that was asked and has not answered is passed over; a one-way message asks nobody."""
    group = workers(server, b"busy")
    with Stream(server.host, server.port) as client:
        client.sub(b"in", b"1")
        client.send(hpub(b"busy", b"in", b"asked", mode="semaphore"))
        assert client.sync() == []
        asked = [bool(it.sync()) for it in group]
        assert asked.count(True) == 1
        for number in range(20):
            client.send(hpub(b"busy", b"", b"%d" % number, mode="semaphore"))
        assert client.sync() == []
        counts = [len(it.sync()) for it in group]
        assert sorted(counts) == [0, 10, 10]
        assert counts[asked.index(True)] == 0
    for worker in group:
        worker.close()


def test_nobody_is_there(server: Instance) -> None:
    with Stream(server.host, server.port) as client:
        client.send(hpub(b"empty", b"", b"x", mode="semaphore"))
        assert client.sync() == []


def test_past_its_deadline_it_is_not_delivered(server: Instance) -> None:
    group = workers(server, b"late")
    with Stream(server.host, server.port) as client:
        router = server.pid("router")
        os.kill(router, signal.SIGSTOP)
        try:
            client.send(hpub(b"late", b"", b"x", mode="semaphore", deadline="1"))
            client.send(hpub(b"late", b"", b"y", mode="semaphore", deadline="60000"))
            time.sleep(0.1)  # until it is sure to be past its deadline
        finally:
            os.kill(router, signal.SIGCONT)
        assert client.sync() == []
        assert [message.body for it in group for message in it.sync()] == [b"y"]
    for worker in group:
        worker.close()
