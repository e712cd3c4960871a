"""bench.pauses, small: it measures what it says, and its table has every kind of event.

No figure is asserted but counts: nothing lost, doubled, reordered, dropped or refused by Midair;
nats-server, restarted, drops everybody, which shows that the counts count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pauses import SMALL, Event, kinds, row, table
from bench.pauses_clients import Arrivals, Line, take
from midair.client.wire_nats import Connection, Reader
from tests.support.instance import ROOT

pytestmark = pytest.mark.slow


def test_every_kind_of_event_once(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.pauses", "--small", "--repeat", "1", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert list(found["events"]) == kinds(True)
    for kind, events in found["events"].items():
        assert f"| {kind} | 1 |" in done.stdout
        (event,) = events
        counts = {name: event[name] for name in ("duplicated", "reordered", "dropped")}
        if kind == "nats-server restarted":
            assert counts["dropped"] == SMALL.connections + 2
        else:
            assert counts == {"duplicated": 0, "reordered": 0, "dropped": 0}, kind
            assert event["lost"] == event["refused"] == 0, kind
    for fact in ("date", "cpu", "cores", "kernel", "python", "midair", "nats_server", "load"):
        assert found[fact], fact


def test_arrivals_tell_what_happened() -> None:
    arrivals = Arrivals()
    for now, numbers in ((1.0, [0, 1]), (1.5, [2, 4]), (4.5, [4, 3]), (5.0, [7])):
        arrivals.read(now, numbers)
    assert (arrivals.missing, arrivals.doubled, arrivals.reordered) == ({5, 6}, 1, 1)
    assert arrivals.gap_s(0.0, 9.0) == 3.0
    assert arrivals.gap_s(2.0, 2.5) == 3.0  # it began before and ended after
    assert arrivals.gap_s(4.6, 4.7) == 0.5
    assert arrivals.gap_s(0.0, 0.0) == 0.0


def test_a_stream_is_taken_apart_however_it_is_cut() -> None:
    line = Line.__new__(Line)
    line.wire = Connection.__new__(Connection)
    line.wire.reader = Reader()
    frames = b"".join(b"MSG pauses.stream 1 16\r\n%016d\r\n" % n for n in range(3))
    for cut in range(len(frames)):
        line.wire.reader.feed(frames[:cut])
        first = take(line)
        line.wire.reader.feed(frames[cut:])
        assert first + take(line) == [0, 1, 2]


def test_a_row_has_the_worst_and_the_sums() -> None:
    events = [Event(float(ms), 1.0, 1, 0, 0, 2, 0) for ms in range(1, 11)]
    cells = row("kill router", events)
    assert cells[:3] == ["kill router", "10", "5.5"]
    assert cells[4] == "10.0"
    assert cells[7:] == ["10", "0", "0", "20", "0"]
    assert len(table({"kill router": events}).splitlines()) == 3
