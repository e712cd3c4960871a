"""What people type, set and find: one line for each thing that is wrong, and never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from midair.cli import main
from midair.exits import Exit
from midair.process.runtime import Runtime
from tests.support.instance import BASE, PATIENCE_S, ROOT, Instance, cli, eventually, new_name
from tests.support.segments import kill_all

LONG = "9" * 5000
UP = ("up", "--name", "words-never-up")
WRONG_ARGUMENTS: list[tuple[str, ...]] = [
    *((*UP, "--port", port) for port in ("65536", "-1", "nan", "1e3", "\uff14\uff12", "4_2", LONG)),
    *((*UP, "--connmgrs", count) for count in ("0", "33", "two", LONG)),
    *((*UP, "--monitor", where) for where in ("x:y:z", "65536", "\uff14", ":", "[::1]", LONG)),
    *(("upgrade", "all", "--timeout", s) for s in ("nan", "inf", "-inf", "-1", "0", "1e9", LONG)),
    ("upgrade", "connmgr/\uff11"),
    ("upgrade", "everything"),
    *(("top", "--interval", seconds) for seconds in ("nan", "0", "-1", "1e400", "x")),
    *(("req", "a", "--timeout", seconds) for seconds in ("nan", "inf", "0", "1_0")),
    *(("sub", "a", "--count", count) for count in ("0", "-5", "1.5", "\u0661", LONG)),
    *(("trace", "on", "--sample", sample) for sample in ("1/0", "1/\u00b2", "nan", f"1/{LONG}")),
    *(("drill", "--minutes", minutes) for minutes in ("nan", "inf", "-1")),
    *(("conns", "--limit", limit) for limit in ("-1", "x", LONG)),
    *(
        ("pub", "a", "--server", at)
        for at in ("x", "x:", ":1", "x:99999", "a b:1", "\u00e4:1", "[x]:1")
    ),
    ("status", "--name", "Big One"),
    ("status", "--name", "x" * 33),
    ("status", "--name", "a\n"),
    ("fsck", "--name", "../etc"),
    ("fsck", "--remove"),
    ("down", "--name", ""),
    (),
    ("nonsense",),
]


@pytest.mark.parametrize("args", WRONG_ARGUMENTS, ids=lambda args: " ".join(args)[:40])
def test_wrong_arguments_are_refused(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(args)
    except SystemExit as end:  # of argparse
        code = end.code  # type: ignore[assignment]
    assert code == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("midair")


@pytest.mark.parametrize(
    "place", ["/proc", "/proc/self", "/dev/null", "/nowhere/at/all", "x" * 200, "/sys", "a\nb"]
)
@pytest.mark.parametrize("command", [("status",), ("down",), ("fsck",), ("up", "--port", "0")])
def test_a_runtime_directory_that_cannot_be(
    place: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    """`MIDAIR_RUNTIME_DIR` may say anything. Root could make some of these, and must not."""
    if command[0] == "up" and (place.startswith("/nowhere") or place == "a\nb"):
        pytest.skip("can be made")
    done = subprocess.run(
        [sys.executable, "-m", "midair", *command, "--name", new_name("words")],
        cwd=tmp_path,
        env={**os.environ, "MIDAIR_RUNTIME_DIR": place, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    assert done.returncode in list(Exit)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("midair: ")


@pytest.mark.parametrize(
    "environ",
    [
        {"LISTEN_PID": "x", "LISTEN_FDS": "-1", "LISTEN_FDNAMES": ":::"},
        {"WATCHDOG_USEC": LONG, "WATCHDOG_PID": "nan"},
        {"NOTIFY_SOCKET": "/nowhere/at/all"},
        {"NOTIFY_SOCKET": "x" * 500},
        {"XDG_RUNTIME_DIR": "relative", "MIDAIR_RUNTIME_DIR": ""},
        {"COLUMNS": "none", "LINES": "-1", "TERM": "nothing"},
        {"PYTHONIOENCODING": "ascii"},
        {"HOME": "/nowhere"},
    ],
    ids=lambda environ: " ".join(environ),
)
def test_other_variables_may_say_anything(environ: dict[str, str], tmp_path: Path) -> None:
    for command in (("status",), ("top", "--once"), ("conns",)):
        done = subprocess.run(
            [sys.executable, "-m", "midair", *command, "--name", new_name("words")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == Exit.NOT_RUNNING, done.stderr
        assert done.stderr.count("\n") == 1


def test_bodies_may_be_any_bytes(midair: Instance) -> None:
    server = ("--server", midair.address)
    listening = subprocess.Popen(
        [sys.executable, "-m", "midair", "sub", *server, "bytes", "--count", "1", "--raw"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert listening.stderr is not None
    assert b"Ctrl-C" in listening.stderr.readline()
    done = subprocess.run(
        [sys.executable, "-m", "midair", "pub", *server, "bytes", b"\xff\xfe\x80"],
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    out, _ = listening.communicate(timeout=PATIENCE_S)
    assert out == b"\xff\xfe\x80"


def test_an_instance_that_is_not_running_is_not_called_running(
    make_midair: object, request: pytest.FixtureRequest
) -> None:
    """What a killed instance has left is no running instance; others are named."""
    assert callable(make_midair)
    here, dead = make_midair(), make_midair()
    try:
        kill_all(dead)
        done = cli("status", "--name", dead.name)
        assert done.returncode == Exit.NOT_RUNNING
        said, _, others = done.stderr.strip().partition("; running: ")
        assert said == f"midair: instance {dead.name!r} is not running"
        assert here.name in others
        assert dead.name not in others
    finally:
        cli("down", "--name", dead.name)


def test_names_that_are_no_instances_are_not_called_running(instance_name: str) -> None:
    for name in ("Not An Instance", "file"):
        path = BASE / name
        path.mkdir() if name != "file" else path.touch()
    try:
        done = cli("status", "--name", instance_name)
        assert done.returncode == Exit.NOT_RUNNING
        assert "file" not in done.stderr
        assert "Not An" not in done.stderr
    finally:
        (BASE / "Not An Instance").rmdir()
        (BASE / "file").unlink()


def ignoring(numbers: list[int], blocked: list[int]) -> object:
    """Sets up a process as a script's background job, or worse."""

    def prepare() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    return prepare


INHERITED = {
    "ignored": ([signal.SIGINT, signal.SIGTERM], []),
    "blocked": ([], [signal.SIGINT, signal.SIGTERM]),
}
LASTING = {
    "sub": ("sub", "a"),
    "reply": ("reply", "a"),
    "clients": ("clients", "--watch"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("inherited", INHERITED)
@pytest.mark.parametrize("command", LASTING)
def test_commands_end_on_signals_whatever_they_inherit(
    midair: Instance, command: str, inherited: str, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "midair", *LASTING[command], "--server", midair.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=ignoring(*INHERITED[inherited]),  # type: ignore[arg-type]
    )
    assert process.stderr is not None
    assert b"Ctrl-C" in process.stderr.readline()
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert err == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("inherited", INHERITED)
def test_an_instance_ends_on_signals_whatever_it_inherits(
    request: pytest.FixtureRequest, inherited: str, number: signal.Signals
) -> None:
    name = new_name(request.node.nodeid)
    process = subprocess.Popen(
        [sys.executable, "-m", "midair", "up", "--name", name, "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=ignoring(*INHERITED[inherited]),  # type: ignore[arg-type]
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert b"listening on" in out.readline()
        parts = Runtime.open(name).states()
        process.send_signal(number)
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    assert len(parts) > 4
    eventually(
        lambda: not any(Path(f"/proc/{part.pid}").exists() for part in parts), "its parts are gone"
    )
