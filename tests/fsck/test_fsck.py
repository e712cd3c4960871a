"""`midair fsck` on real instances: silent about what is right, running or killed.

Running instances are checked under load, where fsck must say nothing, however often it is asked;
what is broken in one is found. Instances are killed whole with traffic under way, checked, repaired
and removed. That each check finds what breaks its rule is shown in tests/fsck/test_rules.py.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from bench import loadgen
from midair.client.wire_nats import pub
from midair.fsck import command as fsck
from native.conntable import FREE
from tests.support.instance import ROOT, Instance, cli, eventually, leaks_of
from tests.support.segments import CONFIG, Segments, kill_all, leak
from tests.support.stream import Stream

Make = Callable[..., Instance]
CONNMGRS = 2


# ---- running instances --------------------------------------------------------------------------


def test_a_fresh_instance_is_clean_and_not_repaired(make_midair: Make) -> None:
    instance = make_midair(connmgrs=2)
    done = cli("fsck", "--name", instance.name)
    assert done.returncode == 0, done.stdout
    assert "0 errors, 0 warnings, 0 notes" in done.stdout
    assert "running" in done.stdout
    refused = cli("fsck", "--repair", "--name", instance.name)
    assert refused.returncode == 4
    assert "--repair is for a dead one" in refused.stderr


@contextlib.contextmanager
def load(instance: Instance) -> Iterator[Callable[[], list[str]]]:
    """Messages small and large, and clients that come and go; gives what of it has ended.

    On subjects of their own: a subscriber to both would have no window for what the other load
    sends it, and on a busy machine be closed for want of room for output.
    """
    loadgen.build()
    port, much = instance.port, {"messages": 10**8, "timeout": 600, "stall": 60}
    pairs = {"subject_mode": "pairs"}
    commands = [
        loadgen.arguments("throughput", port, publishers=2, subscribers=2, **pairs, **much),
        loadgen.arguments("throughput", port, size=200_000, window=8, **much),
        [sys.executable, "-m", "tests.support.churn", instance.host, str(port), "1", str(10**8)],
    ]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    running = [
        subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL, **quiet) for words in commands
    ]
    with Segments(instance.name, CONNMGRS) as it:
        step = it.routing.step
        eventually(lambda: it.routing.step > step + 1000, "messages are routed")
    try:
        yield lambda: [
            f"{process.args} ended with {process.returncode}"
            for process in running
            if process.poll() is not None
        ]
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_no_false_alarm_under_load(make_midair: Make) -> None:
    instance = make_midair(CONFIG.replace("= 64\n", "= 1024\n"), connmgrs=CONNMGRS)
    with load(instance) as ended:
        for _ in range(10):
            done = cli("fsck", "--name", instance.name)
            assert done.returncode == 0, done.stdout
            assert "0 errors, 0 warnings" in done.stdout
            assert not ended()
    # The same inside one process: passes without the start of an interpreter in between.
    with load(instance) as ended:
        for _ in range(50):
            report = fsck.examine(instance.name)
            assert report.code == 0, fsck.as_text(report)
        assert not ended()


def test_what_is_broken_in_a_running_instance_is_found(make_midair: Make) -> None:
    instance = make_midair(CONFIG, connmgrs=1)
    with contextlib.closing(Stream(instance.host, instance.port)) as stream:
        stream.sub(b"mine", b"1")
        stream.send(pub(b"nobody", b"x") * 3)
        stream.sync()
        with Segments(instance.name, 1) as it:
            for how, wanted in (
                (lambda: leak(it), "warning: arena.0: leaked message"),
                (lambda: it.set(it.table.slots[0], "state", FREE), "error: journal.0: connection"),
                (lambda: it.set(it.sessions()[0], "uid", 77), "error: journal.0: connection 0"),
                (lambda: it.set(it.routing_subs(0)[0], "uid", 77), "error: routing: subscription"),
            ):
                how()
                done = cli("fsck", "--name", instance.name)
                assert done.returncode == 1
                assert wanted in done.stdout
                assert f"running, {fsck.PASSES} passes" in done.stdout
                it.restore()
                done = cli("fsck", "--name", instance.name)
                assert done.returncode == 0, done.stdout


def test_body_of_pending_output_that_was_freed_is_found_while_running(make_midair: Make) -> None:
    instance = make_midair(CONFIG, connmgrs=1)
    with (
        contextlib.closing(Stream(instance.host, instance.port, receive_buffer=4096)) as reader,
        contextlib.closing(Stream(instance.host, instance.port)) as publisher,
        Segments(instance.name, 1) as it,
    ):
        reader.sub(b"feed", b"1")
        reader.sync()
        publisher.send(pub(b"feed", b"f" * 5000) * 2000)
        publisher.sync()
        assert fsck.examine(instance.name).findings == []
        out = next(out for slot in range(2) if (out := it.output(0, slot)))
        words, entry = it.word(
            next(it.segs(0)[g].handle for g in out[::-1] if it.segs(0)[g].handle)
        )
        it.set(words, entry, words[entry] | 1 << 58 | 1)
        report = fsck.examine(instance.name)
        assert [finding.check for finding in report.findings] == ["out_body"]
        it.restore()
        assert fsck.examine(instance.name).findings == []


def test_what_is_not_there_cannot_be_checked() -> None:
    done = cli("fsck", "--name", "nobody")
    assert done.returncode == 3
    assert "no instance 'nobody'" in done.stderr


# ---- killed and repaired ------------------------------------------------------------------------


@pytest.mark.parametrize("round", range(3))
def test_killed_with_traffic_under_way(make_midair: Make, round: int) -> None:
    instance = make_midair(CONFIG.replace("= 64\n", "= 1024\n"), connmgrs=CONNMGRS)
    with load(instance) as ended:
        assert not ended()
        kill_all(instance)
    before = fsck.examine(instance.name)
    assert before.code == 0, fsck.as_text(before)
    done = cli("fsck", "--repair", "--name", instance.name)
    assert done.returncode == 0, done.stdout
    after = fsck.examine(instance.name)
    assert after.code == 0
    left = {it.check for it in after.findings}
    assert not left & {"redo_waits", "table_closed", "table_alone", "leak"}
    assert after.counts["messages"] == before.counts["messages"]
    assert cli("fsck", "--repair", "--remove", "--name", instance.name).returncode == 0
    assert leaks_of(instance.name) == []
    assert cli("fsck", "--name", instance.name).returncode == 3
