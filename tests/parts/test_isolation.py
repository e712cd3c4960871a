"""The router cannot reach bodies, and there is one router at a time.

With `router.user` the operating system keeps the router away from what clients send: tried for
real, by a process of that user. Only root can give it a user of its own; without root it is
checked that everything is closed to other users.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from midair import names
from midair.client.wire_nats import msg, pub
from midair.process import ipc
from midair.process.runtime import ACTIVE, STANDBY, Runtime
from tests.support.instance import ROOT, Instance, environ, eventually
from tests.support.look import await_conn, get_json, monitor_of, named
from tests.support.stream import Stream, Worker, maps_of

Make = Callable[..., Instance]
ROOTS = os.geteuid() == 0
OWN_USER = "[router]\nuser = 'nobody'\n" if ROOTS else ""
CONNMGRS = 2


def python_for_nobody() -> tuple[str, str]:
    """(interpreter, PYTHONPATH) that the router's user can run the router with.

    The interpreter of the tests may lie in a directory that is closed to others, for example
    in root's home. Then the one of the system is taken, with the packages of this one.
    """
    user = pwd.getpwnam("nobody")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    paths = ":".join([str(ROOT), *(path for path in sys.path if path.endswith("-packages"))])
    said = []
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            done = subprocess.run(
                [python, "-P", "-c", "import router.main"],
                cwd="/",
                env={**os.environ, "PYTHONPATH": paths},
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[],
                capture_output=True,
                text=True,
            )
        except OSError as error:
            said.append(f"{python}: {error.strerror}")
            continue
        if done.returncode == 0:
            return python, paths
        said.append(f"{python}: {done.stderr.strip().splitlines()[-1]}")
    return pytest.fail(f"the user nobody can run no Python here that has Midair: {said}")


@pytest.fixture
def instance(make_midair: Make, monkeypatch: pytest.MonkeyPatch) -> Instance:
    if ROOTS:
        python, paths = python_for_nobody()
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.setenv("PYTHONPATH", paths)
    # Another user has to be able to walk to the runtime directory.
    os.chmod(os.environ["MIDAIR_RUNTIME_DIR"], 0o711)
    return make_midair(OWN_USER, connmgrs=CONNMGRS, options=("--monitor", "0"))


def segments(name: str, noun: str) -> list[str]:
    """The segments of that noun, by the names shm_open() takes."""
    if names.SEGMENTS[noun]:
        return [Runtime.open(name).segment(noun, index) for index in range(CONNMGRS)]
    return [Runtime.open(name).segment(noun)]


def exchange(instance: Instance) -> None:
    """Messages of every kind of body get through."""
    here, there = (Stream(instance.host, instance.port) for _ in range(2))
    with contextlib.closing(here), contextlib.closing(there):
        here.sub(b"here.>", b"1")
        here.sync()
        for n, size in enumerate((0, 100, 5000, 200_000)):
            there.send(pub(b"here.%d" % n, b"x" * size))
            here.expect(msg(b"here.%d" % n, b"1", b"x" * size))


def as_nobody(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What comes of each attempt in a process of the user nobody: `done`, or an errno's name."""
    user = pwd.getpwnam("nobody")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([user.pw_gid])
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
            found = {}
            for what, attempt in attempts.items():
                try:
                    attempt()
                    found[what] = "done"
                except posix_ipc.PermissionsError:
                    found[what] = "EACCES"
                except OSError as error:
                    found[what] = errno.errorcode[error.errno or 0]
            os.write(writer, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    result: dict[str, str] = json.loads(text)
    return result


def test_the_operating_system_keeps_others_away_from_bodies(instance: Instance) -> None:
    exchange(instance)
    closed = [
        name
        for noun in (names.ARENA, names.JOURNAL, names.CONNTABLE)
        for name in segments(instance.name, noun)
    ]
    [routing] = segments(instance.name, names.ROUTING)
    for name in closed:
        assert (ipc.SHM / name[1:]).stat().st_mode & 0o777 == 0o600, name
    # The group that shares the queues may read who has subscribed to what: the monitor does.
    mode = 0o640 if ROOTS else 0o600
    assert (ipc.SHM / routing[1:]).stat().st_mode & 0o777 == mode
    if not ROOTS:
        return
    nobody = pwd.getpwnam("nobody").pw_uid
    assert (ipc.SHM / routing[1:]).stat().st_uid == nobody
    assert {(ipc.SHM / name[1:]).stat().st_uid for name in closed} == {0}

    def knock(path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(path))

    attempts: dict[str, Callable[[], Any]] = {}
    for name in (*closed, routing):
        attempts[f"shm_open {name}"] = partial(posix_ipc.SharedMemory, name)
        attempts[f"open {name}"] = partial(os.open, ipc.SHM / name[1:], os.O_RDONLY)
    sockets = [names.KEEPER_SOCKET, names.CONTROL_SOCKET, names.handoff_socket(0)]
    for name in sockets:
        attempts[f"connect {name}"] = partial(knock, instance.runtime_path / name)
    found = as_nobody(attempts)
    # That it may open its own shows that the others fail for the right reason.
    assert found.pop(f"shm_open {routing}") == found.pop(f"open {routing}") == "done"
    assert found == dict.fromkeys(found, "EACCES")
    assert len(found) == 2 * len(closed) + len(sockets)


def test_each_part_maps_what_is_its_own(instance: Instance) -> None:
    exchange(instance)
    pids = {called: row["pid"] for called, row in instance.components().items()}
    if ROOTS:
        assert os.stat(f"/proc/{pids['router']}").st_uid == pwd.getpwnam("nobody").pw_uid

    def mapped(called: str) -> set[str]:
        lines = maps_of(pids[called]).splitlines()
        paths = {line.split()[-1] for line in lines if "/midair-" in line}
        return {path.removeprefix(f"/dev/shm/{instance.runtime.prefix}.") for path in paths}

    assert mapped("router") == {"routing", "stats-router"}
    for index in range(CONNMGRS):
        arenas = {f"arena.{n}" for n in range(CONNMGRS)}
        own = {"conntable", f"journal.{index}", f"stats.{index}"}
        own |= {f"trace.{index}", "trace-control"}
        assert mapped(f"connmgr/{index}") == {*own, *arenas}
    assert mapped("dispatcher") == {"conntable", "stats-dispatcher"}
    assert mapped("keeper") == set()
    # No descriptor of a segment stays open either.
    for called, pid in pids.items():
        links = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(path))
        assert not [link for link in links if link.startswith(str(ipc.SHM))], called


def test_the_monitor_sees_counters_and_subscriptions_and_nothing_else(instance: Instance) -> None:
    pid = instance.pid("monitor")
    if ROOTS:
        assert os.stat(f"/proc/{pid}").st_uid == pwd.getpwnam("nobody").pw_uid
    url = monitor_of(instance)
    with named(instance, "seen", "s.>"):
        await_conn(instance, "seen", subs=1)
        varz = get_json(f"{url}/varz")
        assert varz["midair"]["unreadable"] == {}
        assert varz["connections"] == 1
        rows = get_json(f"{url}/connz?subs=1")["connections"]
        assert [(it["name"], it["subscriptions_list"]) for it in rows] == [("seen", ["s.>"])]
        assert get_json(f"{url}/healthz") == {"status": "ok"}
    mapped = {
        line.split()[-1].rpartition(f"{instance.name}.")[2]: line.split()[1]
        for line in maps_of(pid).splitlines()
        if "/midair-" in line
    }
    seen = ["routing", "stats-dispatcher", "stats-router", *(f"stats.{n}" for n in range(CONNMGRS))]
    assert mapped == dict.fromkeys(seen, "r--s")


def routers(instance: Instance) -> dict[int, str]:
    """pid -> state, of every router there is."""
    return {
        row["pid"]: row["state"]
        for row in instance.status()["components"]
        if row["role"] == names.ROUTER and row["pid"]
    }


@contextlib.contextmanager
def second_router(instance: Instance) -> Iterator[int]:
    """A router started by mistake, beside the one there is; its pid."""
    user = pwd.getpwnam("nobody") if ROOTS else None
    runtime = Runtime.open(instance.name)
    argv = [sys.executable, "-P", "-m", "router.main", "--name", instance.name]
    argv += ["--config", str(runtime.path / "config.toml")]
    argv += ["--ipc-group", str(user.pw_gid)] if user else []
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environ(),
        stderr=subprocess.DEVNULL,
        user=user.pw_uid if user else None,
        group=user.pw_gid if user else None,
        extra_groups=[] if user else None,
    )
    try:
        eventually(
            lambda: routers(instance).get(process.pid) == STANDBY or process.poll() is not None,
            "the second router waits",
        )
        assert process.poll() is None
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_second_router_waits_and_takes_over_when_the_first_is_killed(instance: Instance) -> None:
    first = instance.pid("router")
    here, there = (Stream(instance.host, instance.port) for _ in range(2))
    here.sub(b"steady", b"1")
    here.sync()
    with second_router(instance) as second:
        assert routers(instance) == {first: ACTIVE, second: STANDBY}
        exchange(instance)
        assert routers(instance) == {first: ACTIVE, second: STANDBY}
        count = 20_000

        def publish() -> None:
            for n in range(count):
                there.send(pub(b"steady", b"%d" % n))
                if n == count // 4:
                    os.kill(first, signal.SIGKILL)

        sender = Worker(publish)
        here.expect(b"".join(msg(b"steady", b"1", b"%d" % n) for n in range(count)))
        sender.done()

        def settled() -> dict[int, str] | None:
            found = routers(instance)
            assert list(found.values()).count(ACTIVE) <= 1, found
            return found if sorted(found.values()) == [ACTIVE, STANDBY] else None

        found = eventually(settled, "one is active and the other waits")
        assert first not in found
        assert second in found
        exchange(instance)
    # The second is gone: whoever is left is, or becomes, the active one.
    eventually(lambda: list(routers(instance).values()) == [ACTIVE], "the last router is active")
    exchange(instance)
    assert here.sync() == []
    here.close()
    there.close()


def test_a_router_with_a_user_of_its_own_is_upgraded(instance: Instance) -> None:
    first = instance.pid("router")
    here, there = (Stream(instance.host, instance.port) for _ in range(2))
    here.sub(b"steady", b"1")
    here.sync()
    count = 20_000

    def publish() -> None:
        for n in range(count):
            there.send(pub(b"steady", b"%d" % n))

    sender = Worker(publish)
    done = instance.cli("upgrade", "router", "--name", instance.name, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    here.expect(b"".join(msg(b"steady", b"1", b"%d" % n) for n in range(count)))
    sender.done()
    second = instance.pid("router")
    assert second != first
    assert routers(instance) == {second: ACTIVE}
    if ROOTS:
        assert os.stat(f"/proc/{second}").st_uid == pwd.getpwnam("nobody").pw_uid
    here.close()
    there.close()
