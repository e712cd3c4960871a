"""What belongs to another user, or is open to others, is neither used nor removed.

Names can be guessed: whatever is found under one is looked at before it is used. What another user
has put there, root has to play here; the rest is tried by everybody.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import posix_ipc
import pytest
import sysv_ipc

from midair import names
from midair.client.wire_nats import msg, pub
from midair.errors import PermissionsError
from midair.exits import Exit
from midair.keeper.client import KeeperClient
from midair.keeper.main import Keeper
from midair.process import ipc, lame_duck, lease
from midair.process.lease import Lease
from midair.process.runtime import Origin, Runtime, State, start_ticks
from tests.parts.test_isolation import python_for_nobody
from tests.support.instance import (
    BASE,
    PATIENCE_S,
    ROOT,
    Instance,
    cli,
    eventually,
    leaks_of,
    new_name,
    start,
)
from tests.support.stream import Stream

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users take part")
pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
SIZE = 4096
Put = Callable[[Path], None]


def nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def as_nobody(what: Callable[[], None]) -> None:
    """Done by a process of another user."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(*[nobody().pw_gid] * 3)
            os.setresuid(*[nobody().pw_uid] * 3)
            os.umask(0)
            what()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def file_of(mode: int) -> Put:
    def put(path: Path) -> None:
        path.write_bytes(bytes(SIZE))
        path.chmod(mode)

    return put


def link_to_own(path: Path) -> None:
    target = path.with_name(path.name + "-target")
    file_of(0o600)(target)
    path.symlink_to(target)


def two_names(path: Path) -> None:
    file_of(0o600)(path)
    path.with_name(path.name + "-again").hardlink_to(path)


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


# What may be under the name of a segment, made by the user of the instance itself.
WRONG = {
    "open to all": (file_of(0o666), "is open to others"),
    "readable by all": (file_of(0o604), "is open to others"),
    "open to a group": (file_of(0o660), "is open to others"),
    "a symbolic link": (link_to_own, "is not a regular file"),
    "two names": (two_names, "has 2 names"),
    "a FIFO": (fifo, "is not a regular file"),
    "a socket": (bound, "is not a regular file"),
}


@contextlib.contextmanager
def swept(prefix: str) -> Iterator[None]:
    """Removes what a test put into /dev/shm, of whatever kind."""
    try:
        yield
    finally:
        for path in names.SHM.glob(f"{prefix}.*"):
            path.unlink()


@pytest.mark.parametrize("what", WRONG)
def test_a_segment_of_the_wrong_kind_is_not_used(place: Runtime, what: str) -> None:
    put, said = WRONG[what]
    name = place.segment(names.CONNTABLE)
    with swept(place.prefix):
        put(names.SHM / name[1:])
        before = (names.SHM / name[1:]).lstat()
        attempts: list[Callable[[], object]] = [
            lambda: ipc.open_segment(name, SIZE, create=False),
            lambda: ipc.open_segment(name, SIZE, create=True),
            lambda: ipc.open_existing(name, os.O_RDONLY),
            lambda: ipc.segment_header(name),
            lambda: ipc.check_names(place),
        ]
        for attempt in attempts:
            with pytest.raises(PermissionsError, match=said) as caught:
                attempt()
            assert caught.value.code == Exit.NO_PERMISSION
            assert name in str(caught.value)
        after = (names.SHM / name[1:]).lstat()
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)


def test_a_queue_that_is_open_to_others_is_not_used(place: Runtime) -> None:
    name = place.queue(names.REFS, 0)
    ipc.open_queue(name).close()
    queue = ipc.open_queue(name)
    os.fchmod(queue.fd, 0o666)
    for attempt in (ipc.open_queue, ipc.existing_queue):
        with pytest.raises(PermissionsError, match=r"open to others \(mode 0666\)"):
            attempt(name)
    os.fchmod(queue.fd, 0o600)
    ipc.open_queue(name).close()
    queue.close()


def test_a_lease_that_is_open_to_others_is_not_used(place: Runtime) -> None:
    key = names.lease_key(place.owner_uid, place.instance, names.ROUTER)
    semaphore = sysv_ipc.Semaphore(key, sysv_ipc.IPC_CREX, mode=0o666, initial_value=1)
    with pytest.raises(PermissionsError, match=r"open to others \(mode 0666\)"):
        Lease(place, names.ROUTER)
    with pytest.raises(PermissionsError, match="lease of router"):
        ipc.check_names(place)
    semaphore.mode = 0o600
    assert Lease(place, names.ROUTER).try_acquire()


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o777, "written by everybody"), (0o1777, "written by everybody"), (0o770, "not sticky")],
)
def test_a_directory_that_others_can_write_to_is_not_used(
    instance_name: str, mode: int, said: str
) -> None:
    path = BASE / instance_name
    path.mkdir()
    path.chmod(mode)
    for attempt in (Runtime.open, Runtime.create):
        with pytest.raises(PermissionsError, match=said):
            attempt(instance_name)
    done = cli("up", "--name", instance_name, "--port", "0")
    assert done.returncode == Exit.NO_PERMISSION
    assert done.stderr.count("\n") == 1


def test_a_directory_that_others_can_read_is_closed(instance_name: str) -> None:
    """As systemd makes one (RuntimeDirectoryMode=0755)."""
    path = BASE / instance_name
    path.mkdir(mode=0o755)
    Runtime.create(instance_name)
    assert path.stat().st_mode & 0o7777 == 0o700


def test_a_link_in_the_place_of_a_directory_is_not_used(instance_name: str, tmp_path: Path) -> None:
    (BASE / instance_name).symlink_to(tmp_path)
    try:
        for attempt in (Runtime.open, Runtime.create):
            with pytest.raises(PermissionsError, match="not a directory"):
                attempt(instance_name)
    finally:
        (BASE / instance_name).unlink()


@pytest.mark.parametrize("what", ["open to all", "a symbolic link", "two names", "a FIFO"])
def test_files_of_the_directory_are_looked_at(place: Runtime, what: str) -> None:
    put, _ = WRONG[what]
    put(place.path / "events.jsonl")
    with pytest.raises(PermissionsError):
        place.open_shared("events.jsonl")
    put(place.path / "router.1.state")
    assert place.states() == []


def test_instances_of_0_1_are_known_by_segments_of_their_owner(place: Runtime) -> None:
    """Only those: what is open to others, or nobody's segment, does not count."""
    old = names.prefix(place.instance, None)
    path = names.SHM / names.segment(old, names.ARENA, 0)[1:]
    for put, _ in WRONG.values():
        with swept(old):
            put(path)
            assert Runtime.open(place.instance).prefix == names.prefix(
                place.instance, place.owner_uid
            )
    with swept(old):
        file_of(0o600)(path)
        assert Runtime.open(place.instance).prefix == old
        assert ipc.leftovers(place.instance) == [f"segment /{path.name}"]
        assert ipc.remove_all(place.instance) == [f"segment /{path.name}"]


# With two users


def give_away(path: Path) -> None:
    os.chown(path, nobody().pw_uid, nobody().pw_gid)


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_segment_of_another_user_is_neither_used_nor_removed(place: Runtime, mode: int) -> None:
    for noun, each in names.SEGMENTS.items():
        name = place.segment(noun, 0 if each else None)
        path = names.SHM / name[1:]
        with swept(place.prefix):
            file_of(mode)(path)
            give_away(path)
            for create in (False, True):
                with pytest.raises(PermissionsError, match="another user"):
                    ipc.open_segment(name, SIZE, create=create)
            with pytest.raises(PermissionsError, match="another user"):
                ipc.check_names(place)
            assert ipc.remove_all(place.instance) == []
            assert ipc.leftovers(place.instance) == []
            assert path.exists()


def queue_of_nobody(name: str, mode: int) -> None:
    as_nobody(
        lambda: posix_ipc.MessageQueue(
            name, posix_ipc.O_CREX, mode=mode, max_messages=2, max_message_size=8192
        ).close()
    )


def semaphore_of_nobody(key: int, mode: int) -> None:
    def make() -> None:
        made = sysv_ipc.Semaphore(key, sysv_ipc.IPC_CREX, mode=mode, initial_value=1)
        if mode & 0o004:  # whom it is given to may be anybody
            made.uid = 0

    as_nobody(make)


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_queue_of_another_user_is_neither_used_nor_removed(place: Runtime, mode: int) -> None:
    for noun in names.QUEUES:
        name = place.queue(noun, 0)
        queue_of_nobody(name, mode)
        try:
            with pytest.raises(PermissionsError, match="another user"):
                ipc.open_queue(name)
            with pytest.raises(PermissionsError, match="another user"):
                ipc.check_names(place)
            assert ipc.remove_all(place.instance) == []
        finally:
            posix_ipc.unlink_message_queue(name)  # MissingError if it had been removed


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_lease_of_another_user_is_neither_used_nor_removed(place: Runtime, mode: int) -> None:
    key = names.lease_key(0, place.instance, names.ROUTER)
    semaphore_of_nobody(key, mode)
    try:
        with pytest.raises(PermissionsError, match="another user"):
            Lease(place, names.ROUTER)
        with pytest.raises(PermissionsError, match="another user"):
            ipc.check_names(place)
        assert not lease.remove(0, place.instance, names.ROUTER)
        assert ipc.leftovers(place.instance) == []
    finally:
        sysv_ipc.Semaphore(key).remove()


@needs_root
@pytest.mark.parametrize("what", ["segment", "queue", "lease", "directory"])
def test_up_refuses_what_another_user_has_prepared(
    request: pytest.FixtureRequest, what: str
) -> None:
    """One line, exit code 77, and what was there is there afterwards."""
    name = new_name(request.node.nodeid)
    prefix = names.prefix(name, 0)
    segment = names.SHM / names.segment(prefix, names.ARENA, 0)[1:]
    queue, key = names.queue(prefix, names.REFS, 0), names.lease_key(0, name, names.KEEPER)
    directory = BASE / name
    if what == "segment":
        file_of(0o666)(segment)
        give_away(segment)
    elif what == "queue":
        queue_of_nobody(queue, 0o666)
    elif what == "lease":
        semaphore_of_nobody(key, 0o666)
    else:
        directory.mkdir(mode=0o700)
        give_away(directory)
    done = cli("up", "--name", name, "--port", "0")
    if what == "segment":
        segment.unlink()
    elif what == "queue":
        posix_ipc.unlink_message_queue(queue)
    elif what == "lease":
        sysv_ipc.Semaphore(key).remove()
    else:
        directory.rmdir()
    assert done.returncode == Exit.NO_PERMISSION, done.stderr
    assert done.stderr.count("\n") == 1
    assert "another user" in done.stderr
    assert leaks_of(name) == []


def exchange(instance: Instance, count: int) -> None:
    here, there = (Stream(instance.host, instance.port) for _ in range(2))
    with contextlib.closing(here), contextlib.closing(there):
        here.sub(b"here", b"1")
        here.sync()
        for n in range(count):
            there.send(pub(b"here", b"%d" % n))
        here.expect(b"".join(msg(b"here", b"1", b"%d" % n) for n in range(count)))


@contextlib.contextmanager
def of_nobody(name: str, connmgrs: int, place: Path) -> Iterator[Instance]:
    """An instance of the user nobody, in a directory of that user."""
    python, paths = python_for_nobody()
    place.chmod(0o700)
    give_away(place)
    stderr_path = BASE / f"{name}.nobody.stderr"
    environ = {**os.environ, "PYTHONPATH": paths, "MIDAIR_RUNTIME_DIR": str(place)}
    options = ("--port", "0", "--connmgrs", str(connmgrs))
    with stderr_path.open("wb") as stderr:
        process = subprocess.Popen(
            [python, "-P", "-m", "midair", "up", "--name", name, *options],
            cwd="/",
            env=environ,
            stdout=subprocess.PIPE,
            stderr=stderr,
            user=nobody().pw_uid,
            group=nobody().pw_gid,
            extra_groups=[],
        )
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert "listening on " in line, stderr_path.read_text()
    host, _, port = line.split("listening on ")[1].split(";")[0].rpartition(":")
    instance = Instance(host, int(port), name, process, line, stderr_path)
    try:
        yield instance
    finally:
        instance.stop()


@needs_root
@pytest.mark.parametrize("connmgrs", [1, 2])
def test_root_and_another_user_have_instances_of_one_name(
    request: pytest.FixtureRequest, connmgrs: int
) -> None:
    """Nothing root does to its own touches the other one, which survives a kill of each part."""
    name = new_name(request.node.nodeid)
    place = Path("/tmp") / f"mdt-{name}"
    place.mkdir()
    try:
        with of_nobody(name, connmgrs, place) as theirs:
            exchange(theirs, 100)
            here = Stream(theirs.host, theirs.port)
            here.sub(b"steady", b"1")
            here.sync()
            ours = start(request.node.nodeid, "", "--connmgrs", str(connmgrs), name=name)
            exchange(ours, 100)
            runtime = Runtime(name, place / name, (place / name).stat())
            assert runtime.prefix == names.prefix(name, nobody().pw_uid)
            assert ours.runtime.prefix == names.prefix(name, 0)
            for state in runtime.states():
                if state.role in (names.ROUTER, names.CONNMGR, names.DISPATCHER):
                    os.kill(state.pid, 9)

            def back() -> bool:
                now = [s for s in runtime.states() if s.state == "active"]
                return len(now) == 4 + connmgrs and all(
                    s.generation > 1 for s in now if s.role not in (names.KEEPER, names.MANAGER)
                )

            eventually(back, "every part is back")
            with contextlib.closing(Stream(theirs.host, theirs.port)) as there:
                there.send(pub(b"steady", b"still here"))
                here.expect(msg(b"steady", b"1", b"still here"))
            done = cli("fsck", "--name", name)
            assert done.returncode == Exit.OK, done.stdout
            assert ours.stop() == 0
            assert ipc.leftovers(name) == []
            exchange(theirs, 100)
            here.close()
        assert not list(names.SHM.glob(f"midair*.{name}.*"))
    finally:
        with contextlib.suppress(OSError):
            for left in place.iterdir():
                left.rmdir()
        place.rmdir()


@needs_root
def test_root_looks_at_an_instance_of_another_user_and_starts_nothing_in_it(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = new_name(request.node.nodeid)
    place = Path("/tmp") / f"mdt-{name}"
    place.mkdir()
    try:
        with of_nobody(name, 1, place) as theirs:
            monkeypatch.setenv("MIDAIR_RUNTIME_DIR", str(place))
            assert theirs.pid("router")
            assert cli("fsck", "--name", name).returncode == Exit.OK
            assert cli("conns", "--name", name).returncode == Exit.OK
            for program in ("router.main", "midair.keeper"):
                done = subprocess.run(
                    [sys.executable, "-m", program, "--name", name],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                )
                assert done.returncode == Exit.NO_PERMISSION, done.stderr
                assert done.stderr.count("\n") == 1
            done = cli("up", "--name", name, "--port", "0")
            assert done.returncode == Exit.NO_PERMISSION
            assert "another user" in done.stderr
            exchange(theirs, 10)
            assert cli("down", "--name", name).returncode == Exit.OK
            assert theirs.process is not None
            assert theirs.process.wait(PATIENCE_S) == 0
    finally:
        place.rmdir()


# Sockets


@needs_root
def test_who_is_at_the_other_end_of_a_socket_is_looked_at(tmp_path: Path) -> None:
    """Beside the modes of socket and directory, which are opened wide here."""
    BASE.chmod(0o711)
    place = BASE / "wide"
    place.mkdir()
    place.chmod(0o1777)
    path = str(place / "keeper.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        os.chmod(path, 0o666)
        listener.listen()
        listener.setblocking(False)
        keeper = Keeper(listener)

        def knock() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(path)

        as_nobody(knock)
        keeper.turn(0)
        assert not keeper._peers
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(path)
            keeper.turn(0)
            assert len(keeper._peers) == 1, "root's own is taken"
        keeper.turn(0)
        assert not keeper._peers
    os.unlink(path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresgid(*[nobody().pw_gid] * 3)
        os.setresuid(*[nobody().pw_uid] * 3)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            os.write(writer, b"x")
            listener.accept()
            os._exit(0)
    try:
        assert os.read(reader, 1) == b"x"
        with pytest.raises(PermissionsError, match="another user"):
            KeeperClient(path).give(timeout_s=1.0)
    finally:
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        os.unlink(path)
        place.rmdir()


# ---- what is said about processes ----


@needs_root
def test_another_user_can_say_what_only_its_own_router_does(instance_name: str) -> None:
    """A manager that takes over starts again what the files of states say."""
    runtime = Runtime.create(instance_name)
    user = nobody()
    with (
        subprocess.Popen(["sleep", "60"], user=user.pw_uid, group=user.pw_gid) as its,
        subprocess.Popen(["sleep", "60"]) as ours,
    ):
        try:
            for role, index in ((names.ROUTER, None), (names.CONNMGR, 0), (names.MANAGER, None)):
                for process in (its, ours):
                    written = _say(runtime, role, index, process.pid)
                    assert [it.pid for it in runtime.states()] == [process.pid], "of the owner"
                    os.chown(written, user.pw_uid, user.pw_gid)
                    allowed = role == names.ROUTER and process is its
                    assert [it.pid for it in runtime.states()] == [process.pid] * allowed
                    written.unlink()
            # Nor can it say where a process of ours comes from.
            written = _say(runtime, names.ROUTER, None, ours.pid)
            origin = written.with_suffix(".origin")
            os.chown(origin, user.pw_uid, user.pw_gid)
            assert [(it.pid, it.managed) for it in runtime.states()] == [(ours.pid, False)]
        finally:
            its.kill()
            ours.kill()
            runtime.remove()


def _say(runtime: Runtime, role: str, index: int | None, pid: int) -> Path:
    """A state and an origin of a process, written by the owner of the instance."""
    ticks = start_ticks(pid)
    assert ticks is not None
    runtime.write_origin(
        role, index, Origin(pid, ticks, managed=True, python="", root="", stderr="")
    )
    runtime.write_state(State(role, index, pid, ticks, "0.2.0", "active", 9, 0.0))
    (state,) = (it for it in runtime.states() if it.pid == pid)
    assert state.managed
    stem = role if index is None else f"{role}-{index}"
    return runtime.path / f"{stem}.{pid}.state"


@needs_root
@pytest.mark.parametrize(
    "name", ["lame-duck.json", "manager.json", "source.json", "connmgr-0.life"]
)
def test_what_only_the_owner_writes_is_read_only_from_the_owner(
    instance_name: str, name: str
) -> None:
    runtime = Runtime.create(instance_name)
    try:
        path = runtime.write(name, "7")
        assert runtime.read_own(name) == b"7"
        os.chown(path, nobody().pw_uid, nobody().pw_gid)
        with pytest.raises(FileNotFoundError):
            runtime.read_own(name)
        path.unlink()
        os.mkfifo(path)  # nobody waits for the other end
        with pytest.raises(FileNotFoundError):
            runtime.read_own(name)
        assert lame_duck.read(runtime) is None
        assert runtime.life(names.CONNMGR, 0) == 0
    finally:
        runtime.remove()
