"""Starting Spark for a job, and telling how far the job is.

Started by spark-submit, a job takes the master and the settings it was given. Started as a plain
program it runs here, on all cores, in DRIVER_MEMORY, without Spark's log.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midair.errors import MidairError
from midair.exits import Exit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER_MEMORY = "3g"
# Below this much to read, most of the time would go into compiling every query twice, to Java and
# then to good machine code.
SMALL_BYTES = 64 << 20
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK = {"spark.sql.codegen.wholeStage": "false", "spark.sql.shuffle.partitions": "2"}
INSTALL = "pip install 'midair[spark]'"
INSTALL_JAVA = "sudo apt-get install -y default-jre-headless"


def check_installed(*modules: str) -> None:
    """One line about what is missing, and the command that installs it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MidairError(f"{' and '.join(missing)} not installed: {INSTALL}", Exit.NO_RESOURCES)


def check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if home is not None:
        if not os.access(Path(home) / "bin" / "java", os.X_OK):
            raise MidairError(f"JAVA_HOME={home}: no bin/java there", Exit.NO_RESOURCES)
    elif shutil.which("java") is None:
        raise MidairError(
            f"Spark needs Java 17, and there is no java here: {INSTALL_JAVA}", Exit.NO_RESOURCES
        )


def is_small(runs: Sequence[str]) -> bool:
    """Whether the runs are folders here, with little in them."""
    size = 0
    for run in runs:
        if not Path(run).is_dir():
            return False
        size += sum(path.stat().st_size for path in Path(run).glob("**/*.parquet"))
    return 0 < size <= SMALL_BYTES


def start(name: str, master: str | None = None, runs: Sequence[str] = ()) -> SparkSession:
    """A session. If Spark is started here, it is one that suits the runs it will read."""
    check_installed("pyspark")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has started Java already
    if not submitted:
        check_java()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    builder.config("spark.sql.session.timeZone", "UTC")
    builder.config("spark.sql.parquet.compression.codec", "zstd")
    builder.config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
    if not submitted:
        local = master is None or master.startswith("local")
        builder.master(master or "local[*]")
        builder.config("spark.driver.memory", DRIVER_MEMORY)
        builder.config("spark.ui.enabled", "false")
        quick = local and is_small(runs)
        java = QUICK_JAVA if quick else ""
        quiet = Path(__file__).with_name("log4j2.properties")
        builder.config(
            "spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={quiet.as_uri()} {java}"
        )
        if local:
            builder.config("spark.driver.host", "127.0.0.1")
            builder.config("spark.driver.bindAddress", "127.0.0.1")
            # A few tasks a core: Spark's 200 are for clusters, and cost more than small data.
            builder.config("spark.sql.shuffle.partitions", str(4 * (os.cpu_count() or 1)))
        for key, value in QUICK.items() if quick else ():
            builder.config(key, value)
    return builder.getOrCreate()


class Steps:
    """The steps of a job: each is told on standard error when it is done, with its time."""

    def __init__(self, spark: SparkSession, job: str, count: int, quiet: bool = False) -> None:
        self.spark = spark
        self.job = job
        self.count = count
        self.quiet = quiet
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}  # of Java, which locally does all the work

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        began, cpu = time.monotonic(), self._cpu_seconds()
        yield
        self.seconds[what] = round(time.monotonic() - began, 3)
        self.cpu_seconds[what] = round(self._cpu_seconds() - cpu, 2)
        if not self.quiet:
            place = f"{len(self.seconds)}/{self.count}"
            print(
                f"{self.job}: {place} {what}, {self.seconds[what]:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    def _cpu_seconds(self) -> float:
        """CPU time of the Java that was started here; 0 if it was not."""
        process: Any = getattr(self.spark.sparkContext._gateway, "proc", None)
        if process is None:
            return 0.0
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_main(job: str, main: Callable[[], int]) -> int:
    """Runs a job: failures that can be expected are one line on standard error."""
    try:
        return main()
    except MidairError as error:
        print(f"{job}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        line = spark_line(error)
        if line is None:
            raise
        print(f"{job}: {line}", file=sys.stderr)
        return Exit.FAILED


def spark_line(error: Exception) -> str | None:
    """The first line of what Spark says about a query or a path; None for other failures."""
    try:
        from pyspark.errors import PySparkException
    except ImportError:
        return None
    if not isinstance(error, PySparkException):
        return None
    text: Any = str(error)
    return str(text).strip().splitlines()[0]
