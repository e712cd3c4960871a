"""Order and exactly-once under load, with nats-py in several processes.

Four processes publish numbered messages at once. One process subscribes to all of them through
a wildcard, one to a single subject, three are a queue group; each then says what it received:
225,000 deliveries of 100,000 messages, none lost, doubled or out of order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

from tests.support.instance import ROOT
from tests.support.server import Server

LOAD = "tests.wire.load"
PATIENCE_S = 30  # ends a test that would fail; nothing waits for it otherwise


def faults(numbers: list[int], count: int) -> dict[str, list[int]]:
    """What is wrong with a list that should be 0..count-1, each once; the first few of each."""
    seen = set(numbers)
    doubled = [n for n, times in Counter(numbers).items() if times > 1]
    found = {
        "lost": [n for n in range(count) if n not in seen][:5],
        "doubled": doubled[:5],
        "unknown": [n for n in seen if not 0 <= n < count][:5],
    }
    return {what: which for what, which in found.items() if which}


def in_order(numbers: list[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


class LoadProcess:
    """One tests/wire/load.py."""

    def __init__(self, server: Server, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", LOAD, server.url, *map(str, args)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def say(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def hear(self) -> Any:
        line = self.stdout.readline()
        assert line, "the process ended, or was ended because it took too long"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


def kill(processes: list[LoadProcess]) -> None:
    for process in processes:
        process.process.kill()


def collect(processes: list[LoadProcess], expected: int) -> list[dict[str, list[int]]]:
    """What each received, once that is as much as expected (or PATIENCE_S have passed)."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for process in processes:
            process.say("count")
        if sum([process.hear() for process in processes]) >= expected:
            break
    for process in processes:
        process.say("finish")
    return [process.hear() for process in processes]


def test_each_message_once_and_in_order(server: Server) -> None:
    publishers, each, members = 4, 25_000, 3
    whole = LoadProcess(server, "subscribe", "load.*")
    one = LoadProcess(server, "subscribe", "load.1")
    group = [LoadProcess(server, "subscribe", "load.>", "workers") for _ in range(members)]
    sources = [LoadProcess(server, "publish", f"load.{i}", each) for i in range(publishers)]
    everyone = [whole, one, *group, *sources]
    # A process that hangs is killed, and its silence then fails the test.
    watchdog = threading.Timer(PATIENCE_S * 2, kill, [everyone])
    watchdog.start()
    try:
        for process in everyone:
            assert process.hear() == "ready"
        for process in sources:
            process.say("go")
        for process in sources:
            assert process.hear() == each
        [everything] = collect([whole], publishers * each)
        [single] = collect([one], each)
        parts = collect(group, publishers * each)
    finally:
        watchdog.cancel()
        watchdog.join()
        for process in everyone:
            process.end()
    assert list(single) == ["load.1"]
    assert not faults(single["load.1"], each)
    assert in_order(single["load.1"])
    for subject in (f"load.{i}" for i in range(publishers)):
        assert not faults(everything[subject], each), subject
        assert in_order(everything[subject]), subject
        shares = [part.get(subject, []) for part in parts]
        assert not faults([n for share in shares for n in share], each), subject
        for share in shares:
            assert in_order(share), subject
    assert len(everything) == publishers
