"""The dashboard: `midair dashboard`, and its page as a browser shows it.

Method: the page of a report is opened in headless Chromium without a network. Every number in its
tables carries the value it stands for; those are compared with the Parquet tables.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from midair.trace.schema import STAGE_NAMES
from spark_jobs import dashboard
from tests.support.instance import ROOT, cli
from tests.support.spark import SMALL, dashboard_of, read, report_of, run_of

# py4j leaves the closing of its sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

PATIENCE_S = 600


class Page(HTMLParser):
    """The tables of a page by id: rows of (text, value), and all other texts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.texts: dict[str, str] = {}
        self.values: list[str] = []
        self.root: dict[str, str | None] = {}
        self.hidden: set[str] = set()
        self.charts: list[float] = []  # how wide each is drawn
        self._table = self._id = ""
        self._body = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "html":
            self.root = found
        if tag == "table":
            self._table = str(found.get("id"))
            self.tables[self._table] = []
        elif tag in ("thead", "tbody"):
            self._body = tag == "tbody"
        elif tag == "tr" and self._body:
            self.tables[self._table].append([])
        elif tag == "td":
            self.tables[self._table][-1].append(("", found.get("data-value")))
        if tag == "svg" and found.get("class") == "main-svg" and found.get("style"):
            self.charts.append(float(found.get("width") or 0))
        if "hidden" in found:
            self.hidden.add(str(found.get("id")))
        self._id = str(found.get("id") or "")

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data
        rows = self.tables.get(self._table)
        if self._body and rows and rows[-1]:
            text, value = rows[-1][-1]
            rows[-1][-1] = (text + data, value)

    def handle_endtag(self, tag: str) -> None:
        self._id = ""
        if tag == "table":
            self._table, self._body = "", False


def browse(path: Path, tmp_path: Path, *options: str) -> Page:
    """Opens a page without a network; fails on anything the page complains about."""
    done = subprocess.run(
        [
            "chromium",
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--no-first-run"),
            *("--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *("--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=8000"),
            f"--user-data-dir={tmp_path / 'chromium'}",
            *options,
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    page = Page(done.stdout)
    assert page.root.get("data-ready") == "yes", done.stderr
    return page


def values(page: Page, table: str) -> list[list[int]]:
    """The whole numbers behind each row of a table."""
    return [
        [int(value) for _, value in row if value is not None and re.fullmatch(r"-?\d+", value)]
        for row in page.tables[table]
    ]


SHOWN = ["p50_ns", "p90_ns", "p99_ns", "p99_9_ns", "p99_99_ns", "max_ns"]


def test_the_numbers_on_the_page_are_those_of_the_tables(tmp_path: Path) -> None:
    out, facts = report_of(SMALL)
    page = browse(out / "report.html", tmp_path)
    assert page.texts["headline"] == facts["headline"]
    assert page.root["data-theme"] == "light"

    summary = {row["stage"]: row for row in read(out, "summary")}
    assert [row[0][0] for row in page.tables["summary"]] == list(STAGE_NAMES)
    assert values(page, "summary") == [
        [summary[name][key] for key in ("count", "mean_ns", *SHOWN)] for name in STAGE_NAMES
    ]
    assert page.tables["summary"][5][4][0] == dashboard.duration(summary["server"]["p50_ns"])

    phases = {(row["event"], row["phase"], row["stage"]): row for row in read(out, "phases")}
    assert values(page, "events") == [
        [event[key] for key in ("event", "duration_ns", "pause_ns", "usual_ns", "crossed")]
        + [
            phases[event["event"], phase, "server"][key]
            for phase in ("before", "during", "after")
            for key in ("p50_ns", "p99_ns", "max_ns")
        ]
        for event in read(out, "events")
    ]
    connmgrs = [row for row in read(out, "connmgrs") if row["stage"] == "server"]
    assert values(page, "connmgrs") == [
        [row[key] for key in ("count", "mean_ns", *SHOWN)] for row in connmgrs
    ]
    stages = [f"{name}_ns" for name in STAGE_NAMES[:5]]
    slowest = sorted(read(out, "slowest"), key=lambda row: (-row["total_ns"], row["written_ns"]))
    assert values(page, "slowest") == [
        [row[key] for key in ("body_size", "total_ns", *stages)] for row in slowest
    ]
    assert len(page.tables["crossing"]) == min(len(read(out, "crossing")), 50)
    assert page.hidden == {"verdict-section", "difference-section"}


def test_dark(tmp_path: Path) -> None:
    out, _ = report_of(SMALL)
    page = browse(out / "report.html", tmp_path, "--blink-settings=preferredColorScheme=0")
    assert page.root["data-theme"] == "dark"


def test_printed_charts_are_as_wide_as_paper(tmp_path: Path) -> None:
    out, _ = report_of(SMALL)
    text = (out / "report.html").read_text(encoding="utf-8")
    printing = '<script>dispatchEvent(new Event("beforeprint"))</script></body>'
    assert text.count("</body>") == 1
    (tmp_path / "printing.html").write_text(text.replace("</body>", printing), encoding="utf-8")
    page = browse(tmp_path / "printing.html", tmp_path, "--window-size=1600,900")
    assert page.root["data-theme"] == "light"
    assert page.charts
    assert set(page.charts) == {680.0}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    out, _ = report_of(SMALL)
    text = (out / "report.html").read_text(encoding="utf-8")
    own = text.replace(dashboard.page({}, "").split("<script>")[1].split("</script>")[0], "")
    assert len(own) < len(text) / 2
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)\w+:""", own)
    data = json.loads(text.split('id="data">')[1].split("</script>")[0].replace("<\\/", "</"))
    heat = data["time"]["heat"]["server"]
    assert sum(cell[2] for cell in heat) == SMALL.records
    assert len({cell[0] for cell in heat}) <= dashboard.TIME_BINS


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 µs"),
        (49407, "49.4 µs"),
        (999_999, "1 ms"),
        (5_935_235, "5.94 ms"),
        (99_960_000, "100 ms"),
        (1_500_000_000, "1.5 s"),
    ],
)
def test_durations_are_written_with_three_digits(ns: int, text: str) -> None:
    assert dashboard.duration(ns) == text


def test_time_is_cut_into_a_bounded_number_of_columns() -> None:
    day = 24 * 3600 * 10**9
    axis = dashboard.time_axis(5 * 10**9, day, 10**9)
    assert axis["bins"] <= dashboard.TIME_BINS
    assert axis["first"] + axis["bins"] * axis["step"] > day // 10**9


# ---- the command ---------------------------------------------------------------------------------


def report_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


def test_missing_java_and_missing_packages_are_one_line(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = cli("dashboard", str(run_of(SMALL)), env=nothing)
    assert done.returncode == 71
    assert report_line(done) == (
        "midair: Spark needs Java 17, and there is no java here: "
        "sudo apt-get install -y default-jre-headless"
    )
    without = "import sys; sys.modules['pyspark'] = None; from midair.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{without}sys.exit(main())", "dashboard", str(run_of(SMALL))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 71
    assert report_line(done) == "midair: pyspark not installed: pip install 'midair[spark]'"
    done = cli("dashboard", str(tmp_path / "nothing"))
    assert (done.returncode, report_line(done)) == (
        3,
        f"midair: {tmp_path / 'nothing'}: no such run folder",
    )


def test_other_commands_do_not_import_spark() -> None:
    code = "import sys, midair.cli; midair.cli.parser(); print('pyspark' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_report_is_made_once_and_served() -> None:
    """From the command line; the second time nothing is computed."""
    run, done = dashboard_of(SMALL)
    _, facts = report_of(SMALL)
    assert done.stdout.splitlines() == [facts["headline"], f"see {run}/_report/report.html"]
    # Progress, and nothing else: Spark itself is silent.
    assert re.fullmatch(r"(latency_report: \d/8 [a-z ]+, [\d.]+ s\n){8}", done.stderr)

    process = subprocess.Popen(
        [sys.executable, "-m", "midair", "dashboard", str(run), "--serve", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line: Any = re.match(
                r"serving on (http://127\.0\.0\.1:\d+/)", process.stdout.readline()
            )
            assert process.stdout.readline() == f"{facts['headline']}\n"
            assert process.stdout.readline() == f"see {run}/_report/report.html\n"
            with urllib.request.urlopen(line.group(1), timeout=30) as answer:
                text = answer.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert text == (run / "_report" / "report.html").read_text(encoding="utf-8")
