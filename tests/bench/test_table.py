"""What is made of measurements: marks, the better setting of a peer, cores, instruction counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import growth, instructions, loadgen, run
from bench.instructions_load import MESSAGES, ROUNDS
from bench.peers import ROOT
from bench.placement import Placement, span, summary
from bench.scenarios import Metric, Sample, Scenario
from bench.table import (
    MET,
    MISSED,
    Row,
    is_met,
    make_rows,
    marks_table,
    others_table,
    placement_table,
)
from midair.shown import columns

pytestmark = pytest.mark.slow

RATE = Metric("rate", "a rate", "deliveries/s", True, 2.0, 0.5)
TIME = Metric("time", "a time", "us", False, 0.5, shows_cpu=False)
LOAD = Scenario("load", (RATE, TIME), lambda *_: None, ("relay", "redis"))


def sample(server: str, rate: float, time: float, cpu: float, lost: int = 0) -> Sample:
    made = Sample("load", server, 0, {"rate": rate, "time": time}, cpu, {"lost": lost})
    placed = {"allowed": "0-1", "share": {"0": 0.95, "1": 0.05}}
    made.reports.append({"placement": {"generator": placed, "server": placed}})
    return made


def rows_of(*samples: Sample) -> list[Row]:
    return make_rows(samples, [LOAD])


# ---- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "mark", "higher", "expected"),
    [
        (2.0, 2.0, True, True),
        (1.99, 2.0, True, False),
        (0.5, 0.5, False, True),
        (0.51, 0.5, False, False),
        (None, 2.0, True, False),
        (7.0, None, True, None),
    ],
)
def test_when_a_mark_is_met(
    ratio: float | None, mark: float | None, higher: bool, expected: bool | None
) -> None:
    assert is_met(ratio, mark, higher) is expected


def test_ratios_are_ours_by_theirs_of_medians() -> None:
    ours = [sample("a:midair", rate, 10, 100) for rate in (900, 4000, 5000)]
    theirs = [sample("b:nats-server", rate, 40, 400) for rate in (2000, 1000, 9000)]
    rate, time = rows_of(*ours, *theirs)
    assert (rate.ratio, rate.met) == (2.0, True)
    assert (rate.cpu_ratio, rate.cpu_met) == (0.25, True)
    assert (time.ratio, time.met) == (0.25, True)
    assert time.cpu_ratio is None
    assert rate.ours.spread == pytest.approx(4100 / 4000)


def test_of_a_peer_the_better_setting_counts_row_by_row() -> None:
    rate, time = rows_of(
        sample("a:midair", 100, 10, 100),
        sample("b:nats-server", 90, 30, 500),
        sample("b:nats-server GOMAXPROCS=1", 80, 20, 300),
    )
    assert (rate.theirs.variant, rate.theirs.figure) == ("nats-server", 90)
    assert rate.theirs.cpu_ns == 500
    assert (time.theirs.variant, time.theirs.figure) == ("nats-server GOMAXPROCS=1", 20)


def test_trouble_of_any_setting_fails_the_row() -> None:
    rate, _ = rows_of(
        sample("a:midair", 100, 10, 100),
        sample("b:nats-server", 90, 30, 500),
        sample("b:nats-server GOMAXPROCS=1", 80, 20, 300, lost=3),
    )
    assert rate.theirs.failed
    assert rate.theirs.checks == "3/0/0"
    assert not rate.ours.failed


def test_the_limit_and_the_others() -> None:
    rows = rows_of(
        sample("a:midair", 100, 10, 100),
        sample("b:nats-server", 40, 30, 500),
        sample("relay:relay", 400, 5, 30),
        sample("redis:redis", 20, 5, 30),
    )
    assert (rows[0].by_limit, rows[1].by_limit) == (0.25, 2.0)
    servers = ("midair", "nats-server")
    marks = marks_table(rows, [LOAD], servers)
    assert ">= 2" in marks
    assert "<= 0.5" in marks
    assert MET in marks
    assert MISSED not in marks
    others = others_table(rows, servers)
    assert "redis" in others
    assert "mosquitto" not in others
    cores = placement_table(rows)
    assert [line.split()[-7:-1] for line in cores.splitlines()[1:]] == [["0", "of", "0-1"] * 2] * 4


def test_a_side_without_figures_misses_its_marks() -> None:
    broken = Sample("load", "a:midair", 0, error="it fell over")
    rate, _ = rows_of(broken, sample("b:nats-server", 40, 30, 500))
    assert rate.ours.failed
    assert (rate.met, rate.cpu_met) == (False, False)
    assert MISSED in marks_table(rows_of(broken), [LOAD], ("midair", "nats-server"))


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns([["a", "b"], ["long", "1"]], left=(0,)) == ["a     b", "long  1"]


@pytest.mark.parametrize(
    "words",
    [
        ["--scenarios", "walk"],
        ["--servers", "midair"],
        ["--beside", "kafka"],
        ["--repeat", "0"],
    ],
    ids=" ".join,
)
def test_bad_arguments_of_the_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err.replace("scenario", "--scenarios")


# ---- cores ---------------------------------------------------------------------------------------


def test_spans_of_cores() -> None:
    assert span({0, 1, 2, 3, 8}) == "0-3,8"
    assert span([5]) == "5"
    assert span([]) == ""


def test_a_busy_process_is_seen_on_the_core_it_is_bound_to() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            placement = Placement(server=[process.pid], generator=[])
            while not placement.report()["server"]["share"].get(str(core)):
                placement.sample()
        finally:
            process.kill()
    assert placement.report()["server"] == {"allowed": str(core), "share": {str(core): 1.0}}
    assert summary([placement.report()], "server") == f"{core} of {core}"
    assert summary([placement.report()], "generator") == "?"
    placement.sample()  # of a process that has ended


# ---- instruction counts --------------------------------------------------------------------------

CALLGRIND = """\
version: 1
events: Ir
ob=(1) /x/_midair.so
fl=(1) a.c
fn=(1) parse
10 5
+2 7
calls=3 20
* 900
cob=(2) /lib/libc.so
cfn=(2) memcpy
calls=1 0
12 80
-1 1

ob=(2)
fn=(2)
0 80
ob=(1)
fn=(3) flush.constprop.0
30 4
fn=(1)
40 2
"""


def test_self_costs_are_read_and_those_of_callees_are_not() -> None:
    assert instructions.parse(CALLGRIND).cost == {
        ("/x/_midair.so", "parse"): 5 + 7 + 1 + 2,
        ("/lib/libc.so", "memcpy"): 80,
        ("/x/_midair.so", "flush.constprop.0"): 4,
    }


def test_a_part_belongs_to_the_turn_before_it(tmp_path: Path) -> None:
    per = ROUNDS * MESSAGES
    out = tmp_path / "out"
    for number, cost in ((1, 1), (2, 2 * per), (3, 3 * per)):
        text = f"ob=(1) _midair.so\nfn=(1) work.part.0\n1 {cost}\n"
        (tmp_path / f"out.{number}").write_text(text)
    out.write_text(f"ob=(1) /lib/libc.so\nfn=(1) memcpy\n1 {4 * per}\n")
    turns = ["1to1-128 read", "-", "1to1-128 deliver"]
    counts = instructions._collect(out, turns)["1to1-128"]
    assert counts == {"read": {"work": 2.0}, "route": {}, "deliver": {"(C library)": 4.0}}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"parse": 100.0, "total": 120.0}, []),
        ({"parse": 104.9, "total": 125.0}, []),
        ({"parse": 106.0, "total": 120.0}, ["parse: 100 -> 106 (+6%)"]),
        ({"parse": 90.0, "total": 110.0}, ["parse: 100 -> 90 (-10%)", "total: 120 -> 110 (-8%)"]),
        ({"total": 120.0}, ["parse: 100 -> 0 (-100%)"]),
        ({"parse": 100.0, "more": 30.0, "total": 120.0}, ["more: 0 -> 30 (new)"]),
    ],
    ids=str,
)
def test_what_counts_as_a_change(now: dict[str, float], expected: list[str]) -> None:
    before = {"w": {"read": {"parse": 100.0, "total": 120.0}}}
    found = instructions.compare({"w": {"read": now}}, before)
    assert found == [f"w read {line}" for line in expected]


def test_the_counts_on_file_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert instructions.main(["--show"]) == 0
    said = capsys.readouterr().out
    for stage in ("read", "route", "deliver", "all"):
        assert f" {stage} " in said


def test_a_change_of_the_counts_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was counted is what the repository has on file; the counting is in `make check`."""
    counted = json.loads((ROOT / "bench" / "instructions.json").read_text())["counts"]
    monkeypatch.setattr(instructions, "count", lambda: counted)
    file = tmp_path / "counts.json"
    assert instructions.main(["--update", "--file", str(file)]) == 0
    assert instructions.main(["--file", str(file)]) == 0
    kept = json.loads(file.read_text())
    for workload, stages in kept["counts"].items():
        for stage, functions in stages.items():
            assert functions["total"] > 0, (workload, stage)
            assert workload.startswith("run") or len(functions) > 2, (workload, stage)
    route = kept["counts"]["1to1-128"]["route"]
    function = max(route, key=lambda name: (name != "total", route[name]))
    route[function] *= 1.2
    file.write_text(json.dumps(kept))
    capsys.readouterr()
    assert instructions.main(["--file", str(file)]) == 1
    assert f"changed: 1to1-128 route {function}: " in capsys.readouterr().err


def test_counts_of_another_compiler_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(instructions, "count", dict)
    file = tmp_path / "counts.json"
    file.write_text('{"compiler": "cc of old", "counts": {}}')
    assert instructions.main(["--file", str(file)]) == 0
    assert "not compared: the counts on file are of cc of old" in capsys.readouterr().out


def test_counting_without_valgrind_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert instructions.main([]) == 2
    assert capsys.readouterr().err == (
        "valgrind is needed to count instructions: apt install valgrind\n"
    )


# ---- growth, and the native pieces ---------------------------------------------------------------


def test_growth_tables_small(tmp_path: Path) -> None:
    result = tmp_path / "growth.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.growth", "--small", "--json", str(result)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tables = json.loads(result.read_text())
    assert list(tables) == [table.key for table in growth.TABLES]
    for table in growth.TABLES:
        assert [point["x"] for point in tables[table.key]] == list(table.small_xs)
        for point in tables[table.key]:
            for figures in point["figures"].values():
                assert figures["rate"] > 0
                assert figures["cpu_ns"] >= 0
                assert (figures["wrong"], figures["errors"]) == (0, [])


def test_growth_goes_as_far_as_it_says() -> None:
    ends = {table.key: (table.xs[0], table.xs[-1]) for table in growth.TABLES}
    assert ends == {
        "subscriptions": (1000, 1_000_000),
        "connections": (10, 10_000),
        "managers": (1, 4),
        "body": (0, 16 << 20),
        "fan": (1, 1000),
    }


def test_native_pieces_small(tmp_path: Path) -> None:
    """Each benchmark once, untimed: its own assertions hold."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/bench_native.py",
         "--benchmark-disable", "--basetemp", str(tmp_path / "native")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# ---- building the programs -----------------------------------------------------------------------


def test_without_a_compiler_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadgen, "DIRECTORY", tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(loadgen.LoadgenError, match="a C compiler is needed to build loadgen"):
        loadgen.build()
    assert list(tmp_path.iterdir()) == []


def test_programs_are_built_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = loadgen._directory()
    assert directory.parent == tmp_path / "midair"
    monkeypatch.setattr(loadgen, "DIRECTORY", directory)
    relay = loadgen.build("relay")
    assert relay.parent == directory
    before = relay.stat().st_mtime_ns
    assert loadgen.build("relay").stat().st_mtime_ns == before
