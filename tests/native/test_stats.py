"""Statistics segments and the census: what is written is read back, torn rows are not.

Method: real segments, a writer in this process and readers that map them read-only.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from midair import names
from midair.errors import LayoutError, MissingError
from midair.process.runtime import Runtime
from native import ffi, lib, segment, stats
from native.census import covers

ACCEPTED = {"accepted": 7, "refused": 2, "descriptors_out": 1}


def test_what_is_published_is_read(place: Runtime) -> None:
    own = stats.Own(place, names.DISPATCHER, None, 0, None)
    assert own.resume() == dict.fromkeys(ACCEPTED, 0)
    own.publish(ACCEPTED, {"backlog": 3, "connections_max": 9})
    counts = stats.Reader(place, names.DISPATCHER).counts()
    assert counts.totals == ACCEPTED
    assert counts.gauges == {"backlog": 3, "connections_max": 9}
    assert counts.pid == os.getpid()
    assert counts.published_ns > 0


def test_a_successor_goes_on_from_what_was_published(place: Runtime) -> None:
    child = os.fork()
    if child == 0:
        own = stats.Own(place, names.DISPATCHER, None, 0, None)
        own.publish(ACCEPTED, {"backlog": 3, "connections_max": 9})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert stats.Own(place, names.DISPATCHER, None, 0, None).resume() == ACCEPTED


def test_a_segment_of_another_size_is_made_anew(place: Runtime) -> None:
    """Statistics never keep a version, or a configuration, from starting."""
    stats.Own(place, names.CONNMGR, 0, 10, None)
    reader = stats.Reader(place, names.CONNMGR, 0)
    assert reader.current
    stats.Own(place, names.CONNMGR, 0, 20, None)
    assert not reader.current
    assert stats.Reader(place, names.CONNMGR, 0).current


def test_what_is_not_ours_is_refused(place: Runtime) -> None:
    name = place.segment(names.STATS, 0)
    with pytest.raises(MissingError):
        segment.View(name, stats.KIND)
    stats.Own(place, names.CONNMGR, 0, 10, None)
    other = segment.Kind(stats.KIND.kind, stats.KIND.layout, 1, stats.KIND.pointer)
    with pytest.raises(LayoutError):
        segment.View(name, other)


def test_a_reader_cannot_write(place: Runtime) -> None:
    stats.Own(place, names.CONNMGR, 0, 10, None)
    name = place.segment(names.STATS, 0)
    view = segment.View(name, stats.KIND)
    lines = Path("/proc/self/maps").read_text().splitlines()
    rights = sorted(line.split()[1] for line in lines if line.endswith(name))
    assert rights == ["r--s", "rw-s"], "its own mapping, and the one to look at it"
    assert view.current


def row_of(own: stats.Own, at: int) -> Any:
    """A row as its writer has it: the uid is its first word."""
    base = ffi.cast("char *", own.pointer) + lib.stats_bytes(at)
    return ffi.cast("uint64_t *", base), ffi.cast("struct stats_conn *", base)


def test_rows_that_change_hands_are_not_read(place: Runtime) -> None:
    own = stats.Own(place, names.CONNMGR, 3, 4, None)
    own.pointer.high = 4
    for at, uid in enumerate((11, 0, 13, 0)):
        word, row = row_of(own, at)
        word[0] = uid
        row.messages_in = 100 + at
        row.ip = b"127.0.0.1"
        row.name = "größer".encode()
    reader = stats.Reader(place, names.CONNMGR, 3)
    found = {conn.uid: conn for conn in reader.conns()}
    assert list(found) == [11, 13]
    assert (found[13].messages_in, found[13].connmgr) == (102, 3)
    assert (found[11].ip, found[11].name) == ("127.0.0.1", "größer")
    row_of(own, 0)[0][0] = 0
    assert [conn.uid for conn in reader.conns()] == [13]


def test_what_clients_said_outlives_another_version(place: Runtime) -> None:
    """Its counters are not ours, its rows are."""
    own = stats.Own(place, names.CONNMGR, 0, 4, None)
    own.pointer.high = 2
    own.pointer.totals[0] = 99
    word, row = row_of(own, 1)
    word[0], row.name, row.messages_in = 12, b"named", 7
    path = Path("/dev/shm") / place.segment(names.STATS, 0)[1:]
    with path.open("r+b") as file:  # its fingerprint follows magic, kind and layout
        file.seek(16)
        file.write(b"\1" * 8)
    after = stats.Own(place, names.CONNMGR, 0, 4, None)
    found = list(stats.Reader(place, names.CONNMGR, 0).conns())
    assert [(conn.uid, conn.name, conn.messages_in) for conn in found] == [(12, "named", 7)]
    assert after.pointer.totals[0] == 0
    assert own.pointer.totals[0] == 99, "the old one is left alone: somebody may look at it"


@pytest.mark.parametrize(
    ("pattern", "subject", "wanted"),
    [
        (">", "a", True),
        (">", "a.b.c", True),
        (">", ">", True),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        ("*", ">", False),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.*.c", True),
        ("a.>", "a.>", True),
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a", "a.b", False),
        ("a.b", "a.*", False),
        ("*.b", "a.b", True),
        ("*.b", "a.c", False),
    ],
)
def test_covers(pattern: str, subject: str, wanted: bool) -> None:
    assert covers(pattern, subject) is wanted


def test_every_reason_and_error_has_a_name() -> None:
    assert len(stats.CLOSE_REASONS) == len(set(stats.CLOSE_REASONS)) == lib.CLOSE_REASONS
    assert all(stats.CLOSE_REASONS[1:])
    assert len(stats.REFUSALS) == lib.REFUSALS
    assert all(stats.REFUSALS[1:])
