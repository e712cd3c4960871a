"""`midair pub|sub|req|reply` against a server, and against none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from midair.exits import Exit
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `midair sub` or `reply` that has subscribed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "midair", *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        assert process.stderr is not None
        assert b"Ctrl-C ends" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_pub_and_sub(midair: Instance) -> None:
    server = ("--server", midair.address)
    with running("sub", *server, "--count", "3", "demo.>") as sub:
        assert cli("pub", *server, "demo.a", "hello", "--header", "K:v w").returncode == 0
        assert cli("pub", *server, "demo.b", "--count", "2", "x").returncode == 0
        output, _ = sub.communicate(timeout=PATIENCE_S)
        assert sub.returncode == 0
    assert output.decode().splitlines() == ["demo.a: hello", "  K: v w", "demo.b: x", "demo.b: x"]


def test_raw_bodies_from_stdin(midair: Instance) -> None:
    server = ("--server", midair.address)
    with running("sub", *server, "--count", "1", "--raw", "raw") as sub:
        assert cli("pub", *server, "raw", "-", input="a\r\nb").returncode == 0
        output, _ = sub.communicate(timeout=PATIENCE_S)
    assert output == b"a\r\nb"


def test_req_and_reply(midair: Instance) -> None:
    server = ("--server", midair.address)
    with running("reply", *server, "up", "--command", "tr a-z A-Z"):
        done = cli("req", *server, "up", "hello")
        assert (done.returncode, done.stdout) == (0, "HELLO\n")
    with running("reply", *server, "echo"), running("reply", *server, "echo", "fixed"):
        done = cli("req", *server, "echo", "hello", "--replies", "2")
        assert done.returncode == 0
        assert sorted(done.stdout.split()) == ["fixed", "hello"]


def test_no_responders_and_timeout_are_said_plainly(midair: Instance) -> None:
    server = ("--server", midair.address)
    done = cli("req", *server, "nobody.there", "x")
    assert done.returncode == Exit.FAILED
    assert done.stderr == "midair: no responders: nobody is subscribed to nobody.there\n"
    with running("sub", *server, "deaf"):
        done = cli("req", *server, "deaf", "x", "--timeout", "0.2")
        assert done.returncode == Exit.TIMEOUT
        assert done.stderr == "midair: 0 of 1 answers from deaf within 0.2 s\n"


def test_nobody_listens_there() -> None:
    for command in (("pub", "a"), ("sub", "a"), ("req", "a"), ("reply", "a")):
        done = cli(*command, "--server", "127.0.0.1:1")
        assert done.returncode == Exit.NOT_RUNNING
        assert done.stderr.count("\n") == 1
        assert "nobody answers at 127.0.0.1:1" in done.stderr


def test_wrong_arguments(midair: Instance) -> None:
    server = ("--server", midair.address)
    assert cli("pub", "a", "--header", "nocolon").returncode == Exit.USAGE
    assert cli("pub", "a", "--server", "nowhere").returncode == Exit.USAGE
    for words in (("has space", "x"), ("", "x"), ("a\r\nPUB b 0", "x"), ("a", "--reply", "b c")):
        done = cli("pub", *server, *words)
        assert done.returncode == Exit.USAGE
        assert "one word without spaces is meant" in done.stderr
    done = cli("pub", *server, "a", "--header", "a:b\r\nc:d")
    assert done.returncode == Exit.USAGE


def test_modes_of_requests(midair: Instance) -> None:
    server = ("--server", midair.address)

    def req(*args: str, **options: str) -> tuple[int, str]:
        done = cli("req", *server, *args, **options)
        return done.returncode, done.stdout

    count = ("--queue", "group", "--lines", "--command", "xargs seq")
    with running("reply", *server, "count", *count):
        assert req("count", "3", "--mode", "semaphore") == (0, "1\n2\n3\n")
    with running("reply", *server, "talk", "--queue", "group", "--end-session", "bye"):
        assert req("talk", "-", "--mode", "session", input="a\nb\n") == (0, "a\nb\n")
        done = cli("req", *server, "talk", "-", "--mode", "session", input="a\nbye\nb\n")
        assert (done.returncode, done.stdout) == (Exit.FAILED, "a\n")
        assert done.stderr == "midair: talk: the responder ended the session\n"
    with running("reply", *server, "all", "a"), running("reply", *server, "all", "b"):
        done = cli("req", *server, "all", "--mode", "fanout")
        assert (done.returncode, sorted(done.stdout.split())) == (0, ["a", "b"])
        assert done.stderr == "midair: 2 replies to expect\n"
    with running("sub", *server, "news", "--count", "1") as sub:
        assert req("news", "open", "--mode", "broadcast") == (0, "")
        assert sub.communicate(timeout=PATIENCE_S)[0] == b"news: open\n"


def test_modes_say_what_goes_wrong(midair: Instance) -> None:
    server = ("--server", midair.address)
    for mode in ("semaphore", "session", "fanout"):
        done = cli("req", *server, "nobody.there", "x", "--mode", mode)
        assert done.returncode == Exit.FAILED
        assert done.stderr == "midair: no responders: nobody is subscribed to nobody.there\n"
    with running("sub", *server, "deaf"):
        for mode in ("semaphore", "session", "fanout"):
            done = cli("req", *server, "deaf", "x", "--mode", mode, "--timeout", "0.2")
            assert done.returncode == Exit.TIMEOUT
            assert done.stderr.endswith("midair: no (further) answer from deaf within 0.2 s\n")
    done = cli("req", *server, "deaf", "x", "--mode", "semaphore", "--header", "A:b")
    assert done.returncode == Exit.USAGE


def test_named_clients(midair: Instance) -> None:
    server = ("--server", midair.address)
    assert cli("clients", *server).stdout == ""
    with running("clients", *server, "--watch", "--count", "2") as watch:
        with running("reply", *server, "print", "--as", "printer.upstairs"):
            done = cli("req", *server, "printer.upstairs", "a letter", "--mode", "ipc")
            assert (done.returncode, done.stdout) == (0, "a letter\n")
            assert cli("clients", *server).stdout.startswith("printer.upstairs client ")
            done = cli("reply", *server, "other", "--as", "printer.upstairs")
            assert done.returncode == Exit.FAILED
            assert done.stderr == "midair: another client is called printer.upstairs\n"
        lines = watch.communicate(timeout=PATIENCE_S)[0].decode().splitlines()
        assert [line.split(" client ")[0] for line in lines] == [
            "up printer.upstairs",
            "down printer.upstairs",
        ]
    done = cli("req", *server, "printer.upstairs", "x", "--mode", "ipc")
    assert done.returncode == Exit.FAILED
    assert cli("reply", *server, "other", "--as", "printer").returncode == Exit.USAGE
