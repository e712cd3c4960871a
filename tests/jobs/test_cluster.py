"""The same job, submitted to a real cluster on this machine, comes to the same numbers.

Method: a master and two workers, each a process of its own on loopback, run the report of a run
that was reported on locally; all tables are compared. The file is submitted as it is.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.session import QUICK, QUICK_JAVA
from tests.support.instance import ROOT, eventually
from tests.support.spark import SMALL, read, report_of, run_of

# py4j leaves the closing of its sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

PATIENCE_S = 600


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def environ(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        "PYSPARK_PYTHON": sys.executable,
    }


def daemon(stack: ExitStack, tmp_path: Path, name: str, *words: str) -> Path:
    """Starts a master or a worker, which is ended with the stack; its log."""
    log = tmp_path / f"{name}.log"
    process = subprocess.Popen(
        [str(spark_home() / "bin" / "spark-class"), *words],
        env=environ(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    return log


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The address of a master with two workers."""
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:
        options = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        log = daemon(stack, tmp_path, "master", f"{deploy}.master.Master", *options)
        found: Any = eventually(
            lambda: re.search(r"Starting Spark master at (spark://\S+)", log.read_text()),
            "a master",
            PATIENCE_S,
        )
        address: str = found.group(1)
        for number in range(2):
            words = ("--cores", "1", "--memory", "1g", *options, address)
            daemon(stack, tmp_path, f"worker{number}", f"{deploy}.worker.Worker", *words)
        eventually(
            lambda: log.read_text().count("Registering worker") == 2, "two workers", PATIENCE_S
        )
        yield address


def plain(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """A row that can be compared and sorted; means of shares differ in the last bit."""
    return sorted((k, round(v, 12) if isinstance(v, float) else v) for k, v in row.items())


def test_a_cluster_comes_to_the_same_numbers(master: str, tmp_path: Path) -> None:
    local, facts = report_of(SMALL)
    out = tmp_path / "out"
    submit = [
        str(spark_home() / "bin" / "spark-submit"),
        *("--master", master, "--driver-memory", "1g", "--executor-memory", "1g"),
        *("--conf", "spark.ui.enabled=false"),
        *itertools.chain(*(("--conf", f"{key}={value}") for key, value in QUICK.items())),
        *("--conf", f"spark.executor.extraJavaOptions={QUICK_JAVA}"),
        *("--conf", f"spark.driver.extraJavaOptions={QUICK_JAVA}"),
        *("--conf", "spark.driver.host=127.0.0.1"),
        str(ROOT / "spark_jobs" / "latency_report.py"),
        *(str(run_of(SMALL)), "--out", str(out)),
    ]
    done = subprocess.run(
        submit,
        env=environ(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    # spark-submit puts what Python says on standard error there too.
    assert f"small: {facts['headline']}\n" in done.stdout
    tables = sorted(path.name for path in local.iterdir() if path.is_dir())
    assert tables == sorted(path.name for path in out.iterdir() if path.is_dir())
    assert len(tables) == 12
    for table in tables:
        ours = sorted(map(repr, map(plain, read(local, table))))
        theirs = sorted(map(repr, map(plain, read(out, table))))
        assert ours == theirs, table
    # Both workers had a hand in it.
    assert len(list((tmp_path / "work").glob("app-*/*"))) == 2
