"""An instance of the release before is upgraded to this one, with other layouts, under load.

Method: the release before is built from the repository's history, and an instance of it is started
with its own manager. Clients of tests/crash/load.py check every promise while `midair upgrade all`
replaces one part after the other; others are caught in the middle of something (half a frame, a
body along a chain, output that waits, a request without its answer) and go on afterwards. New parts
are killed at points in the middle of the conversion.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from midair import names
from midair.client import wire_nats
from midair.client.wire_nats import EndedError, Message
from midair.exits import Exit
from midair.process import crash, events, ipc
from midair.process.standstill import present
from midair.version import __version__
from native import stats
from tests.crash.modes import END, TAKEN, hpub, said
from tests.crash.points import Storm
from tests.support.copies import Copies
from tests.support.instance import BASE, ROOT, Instance, cli, environ, eventually, start
from tests.support.previous import VERSION, previous_release

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
    ),
]
UPGRADE_S_MAX = 100.0
# Not "names": of two that ask for one name just then, the second may be answered a PING that the
# release before has read, and only then be told that the name is taken.
ROLES = ("small", "large", "fan", "queue", "churn", "requests", "sessions", "comings")
FEW = ("small", "fan", "requests", "idle")
# Keys that the release before knows; capacities as in tests/crash/points.py.
CONFIG = """
[limits]
max_payload = "4MiB"
max_pending = "256KiB"
slow_consumer = "backpressure"
[connmgr]
arena_bytes = "64MiB"
[manager]
restart_limit = 100000
"""
PACKAGES = ("midair", "router", "dispatcher", "connmgr", "native")


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return previous_release(tmp_path_factory)


@contextlib.contextmanager
def running(
    previous: Path, where: Path, connmgrs: int, roles: Sequence[str], more: str = ""
) -> Iterator[Storm]:
    """An instance of the release before, with these clients."""
    armed = where / "armed"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MIDAIR_NATIVE", raising=False)
        patch.setenv("MIDAIR_CRASH", str(armed))
        instance = start(__name__, CONFIG + more, "--connmgrs", str(connmgrs), place=previous)
    try:
        storm = Storm(instance, armed, connmgrs, instance.port)
        try:
            for at, role in enumerate(roles):
                storm.add(role, 100 + at)
            yield storm
        finally:
            storm.abandon()
    finally:
        instance.stop()


def at_work(storm: Storm) -> None:
    """Every client has counted something."""
    for client in storm.clients:
        assert client.stdout is not None
        if client.args[3] != "idle":  # type: ignore[index]
            assert client.stdout.readline() == "at work\n", storm.log()


def parts(connmgrs: int) -> list[str]:
    return ["keeper", "router", *(f"connmgr/{n}" for n in range(connmgrs)), "dispatcher"]


def upgrade(storm: Storm, what: str, to: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """`midair upgrade` of the tree at `place`."""
    words = ("upgrade", what, "--name", storm.instance.name, "--to", str(to))
    return cli(*words, place=place, timeout=UPGRADE_S_MAX)


def upgraded(storm: Storm, place: Path) -> None:
    done = upgrade(storm, "all", ROOT, place)
    assert (done.returncode, done.stderr) == (0, ""), storm.log()
    line = rf"starting {re.escape(__version__)} \.\.\. standby \.\.\. switching \.\.\. active in "
    for part, told in zip(parts(storm.connmgrs), done.stdout.splitlines(), strict=True):
        assert re.match(f"{part}: {line}", told)
    migrated(storm)
    # A queue cannot be renamed: it keeps the names that 0.1 gave, and nothing has two.
    name = storm.instance.name
    assert storm.instance.runtime.prefix == names.prefix(name, None)
    assert not list(ipc.SHM.glob(f"midair-*.{name}.*"))

    def all_said() -> bool:
        rows = [row for row in events.read(storm.runtime) if row["kind"] == events.MIGRATED]
        return {row["component"] for row in rows} == set(parts(storm.connmgrs)[1:])

    eventually(all_said, "all parts have said so")


def at_work_now(storm: Storm) -> dict[str, tuple[str, int]]:
    """Version and pid of the process that is active in each role; standbys are left out."""
    rows = storm.instance.status()["components"]
    return {
        names.component(row["role"], row["index"]): (row["version"], row["pid"])
        for row in rows
        if row["state"] == "active"
    }


def migrated(storm: Storm) -> None:
    """Every part has converted what is its own."""

    def done() -> bool:
        storm.check_clients()
        return ipc.releases(storm.instance.runtime) == {__version__}

    eventually(done, f"all parts have converted\n{storm.log()}")
    for part in parts(storm.connmgrs):
        storm.pid(part)
    for name, (version, _) in at_work_now(storm).items():
        assert version == (VERSION if name == "manager" else __version__), name
    assert not list(ipc.SHM.glob(f"{storm.instance.runtime.prefix}.*.new"))


def clean(storm: Storm) -> None:
    done = cli("fsck", "--name", storm.instance.name)
    assert done.returncode == 0, done.stdout
    assert "0 errors, 0 warnings" in done.stdout


def drained(storm: Storm) -> None:
    """All clients come to their end, and nothing is left of them."""
    for report in storm.stop():
        assert "error" not in report, report
        assert len(report) > 1, f"did nothing: {report}"
    storm.nothing_is_left()
    clean(storm)


class Caught:
    """Clients that are in the middle of something while the instance is upgraded."""

    BIG = bytes(range(256)) * 4096  # 1 MiB: eight chunks
    MANY = 300

    def __init__(self, instance: Instance, stack: contextlib.ExitStack) -> None:
        def connect(subject: str = "", **options: object) -> Raw:
            return stack.enter_context(Raw(instance, subject, **options))

        self.reader = connect("half.>")
        self.line, self.body, self.chain = connect(), connect(), connect()
        self.line.send(b"PUB half.line 1")
        self.body.send(b"PUB half.body 10\r\n01234")
        self.chain.send(b"PUB half.chain %d\r\n" % len(self.BIG) + self.BIG[:300_000])
        self.silent = stack.enter_context(contextlib.closing(instance.connect()))
        self.greeting = self.silent.recv(65536)

        # Output that waits: its reader takes nothing. Small bodies are copied, large ones are not.
        self.slow, self.pusher = connect("slow"), connect()
        self.bodies = [b"%d:" % n + b"s" * (5000 if n % 3 else 50) for n in range(self.MANY)]
        for body in self.bodies:
            self.pusher.send(b"PUB slow %d\r\n%s\r\n" % (len(body), body))
        # What waits for a client makes its publishers wait: no PONG for them until it reads.

        self.twice, self.teller = connect("max"), connect()
        self.twice.send(b"UNSUB 1 3\r\n")
        self.twice.sync()
        self.teller.send(b"PUB max 1\r\n1\r\n")
        assert self.twice.text() == b"1"

        self.worker, self.asker = connect("work"), connect("answers")
        self.asker.send(hpub(b"work", b"answers", b"first", mode="semaphore"))
        self.reply = self.worker.next().reply
        self.guest, self.host = connect("session"), connect("talk")
        self.host.send(hpub(b"session", b"talk", b"0", mode="session-open"))
        self.session = self.guest.next().reply
        self.named = connect("_midair.ipc.test.named", name="ipc:test.named")

    def go_on(self) -> None:
        """Each of them as if nothing had happened."""
        self.line.send(b"4\r\n0123456789abcd\r\n")
        assert self.reader.text() == b"0123456789abcd"
        self.body.send(b"56789\r\n")
        assert self.reader.text() == b"0123456789"
        self.chain.send(self.BIG[300_000:] + b"\r\n")
        assert self.reader.text() == self.BIG
        self.silent.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        assert self.greeting.startswith(b"INFO {")
        assert self.silent.recv(65536) == b"PONG\r\n"
        assert [self.slow.text() for _ in self.bodies] == self.bodies
        assert self.pusher.sync() == self.slow.sync() == []
        self.teller.send(b"PUB max 1\r\n2\r\nPUB max 1\r\n3\r\nPUB max 1\r\n4\r\n")
        assert [self.twice.text(), self.twice.text()] == [b"2", b"3"]
        assert self.twice.sync() == []
        self.worker.send(b"PUB %s 6\r\nanswer\r\n" % self.reply)
        assert self.asker.text() == b"answer"
        assert self.asker.text() == END
        self.host.send(hpub(b"session", b"talk", b"1", mode="session"))
        assert self.guest.next().reply == self.session, "with the same responder"
        self.asker.send(hpub(b"_midair.ipc.test.named", b"answers", b"you", mode="semaphore"))
        reply = self.named.next().reply
        self.named.send(b"PUB %s 2\r\nme\r\n" % reply)
        assert self.asker.text() == b"me"
        assert self.asker.text() == END
        where = self.named.socket.getpeername()[:2]
        with wire_nats.Connection(*where, wire_nats.connect(name="ipc:test.named")) as second:
            assert self.named.message() is None, "a PING, which it answers"
            with pytest.raises(EndedError):
                second.sync()
            assert second.errors == [TAKEN]


class Raw(wire_nats.Connection):
    """A connection whose messages are read one by one."""

    def __init__(self, instance: Instance, subject: str = "", **options: object) -> None:
        hello = wire_nats.connect(**options)
        hello += wire_nats.sub(subject.encode(), b"1") if subject else b""
        super().__init__(instance.host, instance.port, hello)
        assert self.sync() == []

    def next(self) -> Message:
        while (found := self.message()) is None:
            continue
        return found

    def text(self) -> bytes:
        """The body of the next message, or the line of a status."""
        return said(self.next())


@pytest.mark.parametrize(
    ("connmgrs", "by", "more"),
    [(1, "new", ""), (2, "old", "standby = true\n")],
)
def test_all_parts_under_load(
    connmgrs: int, by: str, more: str, previous: Path, tmp_path: Path
) -> None:
    with running(previous, tmp_path, connmgrs, (*ROLES, "idle"), more) as storm:
        with contextlib.ExitStack() as stack:
            at_work(storm)
            caught = Caught(storm.instance, stack)
            upgraded(storm, ROOT if by == "new" else previous)
            caught.go_on()
            storm.check_clients()
            shown = [
                conn.name
                for n in range(connmgrs)
                for conn in stats.Reader(storm.instance.runtime, names.CONNMGR, n).conns()
            ]
            assert "ipc:test.named" in shown, "what it said about itself is still known"
        clean(storm)
        for part in parts(connmgrs):
            kill(storm, part)
        assert " error: " not in storm.instance.stderr()
        back_is_refused(storm, previous)
        drained(storm)


def kill(storm: Storm, part: str) -> None:
    """kill -9, as of any other instance: it is back, and nobody has noticed."""
    pid = storm.pid(part)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: storm.pid(part) != pid, f"{part} is back")
    if part == names.KEEPER:
        with contextlib.closing(Copies(storm.runtime)) as copies:
            eventually(copies.complete, f"the keeper has every socket again\n{storm.log()}")
    storm.check_clients()


def back_is_refused(storm: Storm, previous: Path) -> None:
    before = at_work_now(storm)
    for what in ("all", "router", "connmgr/0", "dispatcher", "keeper"):
        done = upgrade(storm, what, previous, ROOT)
        assert (done.returncode, done.stdout) == (Exit.FAILED, "")
        assert re.fullmatch(
            rf"midair: {VERSION} cannot read the shared memory of instance '[\w-]+', .*\n",
            done.stderr,
        )
    # A command of the release before does not know: the part itself refuses.
    done = upgrade(storm, "router", previous, previous)
    assert done.returncode == Exit.FAILED
    assert f"router: {VERSION} did not start: exit 65 (LAYOUT_MISMATCH)" in done.stderr
    assert f"{__version__} keeps working" in done.stderr
    storm.check_clients()
    assert at_work_now(storm) == before


def test_killed_in_the_middle_of_it(previous: Path, tmp_path: Path) -> None:
    """Every new part dies at every point, one after the other; the last one completes it."""
    connmgrs = 2
    with running(previous, tmp_path, connmgrs, FEW) as storm, contextlib.ExitStack() as stack:
        at_work(storm)
        caught = Caught(storm.instance, stack)
        markers = {
            tmp_path / f"{part.replace('/', '-')}.{point}": f"{part} {point} 1"
            for part in parts(connmgrs)[1:]
            for point in crash.MIGRATION_POINTS
        }
        for marker in markers:
            marker.touch()
        storm.armed.write_text("".join(f"{it} {marker}\n" for marker, it in markers.items()))
        done = upgrade(storm, "all", ROOT, ROOT)
        assert done.returncode == 0, (done.stdout, done.stderr, storm.log())
        eventually(
            lambda: not [marker for marker in markers if marker.exists()],
            f"every part comes to every point\n{storm.log()}",
        )
        storm.armed.unlink()
        migrated(storm)
        caught.go_on()
        stack.close()
        drained(storm)


def test_the_keeper_dies_while_the_others_stand_still(previous: Path, tmp_path: Path) -> None:
    """It has no copy of any socket then: those who stand still give it theirs."""
    connmgrs = 2
    with running(previous, tmp_path, connmgrs, FEW) as storm, contextlib.ExitStack() as stack:
        at_work(storm)
        caught = Caught(storm.instance, stack)
        words = ["upgrade", "all", "--name", storm.instance.name, "--to", str(ROOT)]
        command = subprocess.Popen(
            [sys.executable, "-m", "midair", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            eventually(
                lambda: standing(storm, ("connmgr", 0)) and standing(storm, ("connmgr", 1)),
                f"the connection managers stand still\n{storm.log()}",
            )
            os.kill(storm.pid("keeper"), signal.SIGKILL)
            output, _ = command.communicate(timeout=UPGRADE_S_MAX)
        finally:
            command.kill()
            command.communicate()
        assert command.returncode == 0, (output, storm.log())
        migrated(storm)
        caught.go_on()
        stack.close()
        drained(storm)


def standing(storm: Storm, role: tuple[str, int]) -> bool:
    """It has the role, and copies of the sockets: more descriptors than it needs by itself."""
    it = present(storm.runtime, role)
    return it is not None and len(os.listdir(f"/proc/{it[1]}/fd")) > 20


def test_one_part_alone_is_refused(previous: Path, tmp_path: Path) -> None:
    with running(previous, tmp_path, 1, FEW) as storm:
        at_work(storm)
        before = {name: row["pid"] for name, row in storm.instance.components().items()}
        for what in ("router", "connmgr/0", "connmgr", "dispatcher"):
            refused_alone(storm, what)
        # Nor because the keeper, which maps nothing, was upgraded some time ago.
        assert upgrade(storm, "keeper", ROOT, ROOT).returncode == 0
        keeper = storm.instance.runtime_path / "keeper.release"
        past = time.time() - 3600
        os.utime(keeper, (past, past))
        refused_alone(storm, "router")
        after = {name: row["pid"] for name, row in storm.instance.components().items()}
        assert {name for name in after if after[name] != before[name]} == {"keeper"}
        storm.check_clients()
        assert ipc.releases(storm.instance.runtime) == {""}


def refused_alone(storm: Storm, what: str) -> None:
    done = upgrade(storm, what, ROOT, ROOT)
    assert done.returncode == Exit.FAILED
    assert done.stderr.count("\n") == 1
    assert "exit 65 (LAYOUT_MISMATCH)" in done.stderr
    assert "takes them over with all parts at once: midair upgrade all" in done.stderr
    assert f"{VERSION} keeps working" in done.stderr


def test_a_trace_is_ended_first(previous: Path, tmp_path: Path) -> None:
    """The manager of the release before would not survive it: the command says so."""
    pytest.importorskip("pyarrow")
    with running(previous, tmp_path, 1, ()) as storm:
        name = ("--name", storm.instance.name)
        on = ("trace", "on", *name, "--run", "test", "--out", str(tmp_path / "traces"))
        done = cli(*on, place=previous)
        assert done.returncode == 0, done.stderr
        done = upgrade(storm, "all", ROOT, ROOT)
        assert (done.returncode, done.stdout) == (Exit.FAILED, "")
        assert done.stderr.startswith("midair: a trace is running: ")
        done = cli("trace", "off", *name, place=previous)
        assert done.returncode == 0, done.stderr
        eventually(
            lambda: not any(state.role == names.TRACER for state in storm.runtime.states()),
            "the tracer has ended",
        )
        upgraded(storm, ROOT)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Makes a copy of this release with one text replaced in one file."""

    def make(path: str, old: str, new: str) -> Path:
        place = tmp_path / "changed"
        if not place.exists():
            for package in PACKAGES:
                shutil.copytree(
                    ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__")
                )
        text = (place / path).read_text()
        assert old in text
        (place / path).write_text(text.replace(old, new))
        return place

    return make


def test_an_upgrade_that_fails_half_way_goes_back_by_itself(
    previous: Path, changed: Callable[[str, str, str], Path], tmp_path: Path
) -> None:
    """The last part does not work: those that stand still make room for the release before."""
    changed("midair/process/standstill.py", "PATIENCE_S = 90.0", "PATIENCE_S = 3.0")
    takes_over = "        self._presence = Presence(program)\n"
    dies = "        if program.role == names.DISPATCHER:\n            raise SystemExit(9)\n"
    place = changed("midair/process/standstill.py", takes_over, dies + takes_over)
    connmgrs = 2
    with running(previous, tmp_path, connmgrs, FEW) as storm, contextlib.ExitStack() as stack:
        at_work(storm)
        caught = Caught(storm.instance, stack)
        done = upgrade(storm, "all", place, ROOT)
        assert done.returncode == Exit.FAILED
        assert f"dispatcher: {__version__} died 3 times when it took over" in done.stderr

        def old_again() -> bool:
            storm.check_clients()
            rows = storm.instance.components()
            return all(
                rows[part]["version"] == VERSION and rows[part]["state"] == "active"
                for part in parts(connmgrs)[1:]
            )

        eventually(old_again, f"the release before is at work again\n{storm.log()}")
        assert f"did not become {__version__} within 3 s" in storm.instance.stderr()
        assert ipc.releases(storm.instance.runtime) == {""}
        storm.check_clients()
        upgraded(storm, ROOT)  # and the next attempt works
        caught.go_on()
        stack.close()
        drained(storm)


def test_with_a_router_of_its_own_user(previous: Path, tmp_path: Path) -> None:
    """Each owner converts what it may open; the new segments are as closed as the old ones."""
    if os.geteuid() != 0:
        pytest.skip("only root can start the router as another user")
    user = pwd.getpwnam("nobody")
    os.chmod(os.environ["MIDAIR_RUNTIME_DIR"], 0o711)
    # Where pytest puts things only root can look.
    previous = shutil.copytree(previous, BASE / "release-0.1")
    for place in (ROOT, previous):
        try:
            subprocess.run(
                [sys.executable, "-c", "import router.main"],
                cwd="/",
                env={**environ(), "PYTHONPATH": str(place)},
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[],
                capture_output=True,
                check=True,
            )
        except (PermissionError, subprocess.CalledProcessError):
            pytest.skip("the user nobody may not read this Python or this directory")
    with running(previous, tmp_path, 2, FEW, "[router]\nuser = 'nobody'\n") as storm:
        at_work(storm)
        runtime = storm.instance.runtime
        segments = [runtime.segment(names.ROUTING), runtime.segment(names.ARENA, 0)]
        before = [(ipc.SHM / it[1:]).stat() for it in segments]
        upgraded(storm, ROOT)
        after = [(ipc.SHM / it[1:]).stat() for it in segments]
        for old, new in zip(before, after, strict=True):
            assert (old.st_uid, old.st_gid, old.st_mode) == (new.st_uid, new.st_gid, new.st_mode)
        drained(storm)
