"""Processes of different releases understand the one before, and refuse what they cannot know.

Method: messages of the release before, and of one to come, are sent to real processes byte by
byte; then a release to come, which is a copy of the tree changed in a few places, works in one
instance with this one.
"""

from __future__ import annotations

import array
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connmgr.arrivals import Arrivals
from dispatcher.outbox import Client, Link
from midair import names
from midair.errors import MidairError, MissingError
from midair.keeper.client import KeeperClient
from midair.process import questions, wire
from midair.process.runtime import Runtime
from midair.up import control, listeners
from midair.up.told import Event, Told
from midair.version import __version__
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli, eventually, start
from tests.support.live import nobody_notices
from tests.support.previous import previous_release
from tests.support.processes import KeeperProcess

Make = Callable[..., Instance]
COMING = "0.9.5"
PACKAGES = ("midair", "router", "dispatcher", "connmgr", "native")
OLD_HEAD = struct.Struct("<II")  # op, count: release 0.1


def connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(PATIENCE_S)
    made.connect(path)
    return made


def send(sock: socket.socket, data: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def uids(*given: int) -> bytes:
    return struct.pack(f"<{len(given)}Q", *given)


@pytest.fixture
def keeper(instance_name: str, tmp_path: Path) -> Iterator[KeeperProcess]:
    with (tmp_path / "stderr").open("wb") as stderr:
        made = KeeperProcess(Runtime.create(instance_name), stderr.fileno())
        yield made
        made.kill()
        made.listener.close()


# ---- the keeper ------------------------------------------------------------------------------


def test_the_keeper_answers_the_release_before_in_its_own_bytes(keeper: KeeperProcess) -> None:
    with connect(keeper.path) as old:
        one, other = socket.socketpair()
        with one, other:
            send(old, OLD_HEAD.pack(wire.HOLD, 1) + uids(7), one.fileno())
            send(old, OLD_HEAD.pack(wire.GIVE, 2) + uids(7, 8))
            data, rights, _, _ = old.recvmsg(4096, 4096)
            assert data == OLD_HEAD.pack(wire.HELD, 1) + uids(7)
            assert len(rights) == 1
            os.close(array.array("i", rights[0][2])[0])
            assert old.recv(4096) == OLD_HEAD.pack(wire.END, 0)
        send(old, OLD_HEAD.pack(wire.PING, 0))
        assert old.recv(4096) == OLD_HEAD.pack(wire.PONG, 0)


def test_who_asks_is_told_the_version_and_answered_in_the_one_it_speaks(
    keeper: KeeperProcess,
) -> None:
    with connect(keeper.path) as peer:
        send(peer, OLD_HEAD.pack(wire.HOLD, 0))  # ASK, as a release to come sends it too
        assert wire.HEAD.unpack(peer.recv(4096)) == (wire.HELLO, wire.VERSION, 0)
        for version in range(wire.VERSION + 1):
            send(peer, wire.pack_uids(wire.PING, (), version))
            assert wire.HEAD.unpack(peer.recv(4096)) == (wire.PONG, version, 0)


def test_the_keeper_refuses_a_version_to_come_and_serves_the_others(
    keeper: KeeperProcess, tmp_path: Path
) -> None:
    client = KeeperClient(keeper.path)
    ours, theirs = socket.socketpair()
    with connect(keeper.path) as coming, ours, theirs:
        assert client.hold([(1, theirs.fileno())]) == 1
        # Misread it would be a DROP of all that is held.
        message = wire.HEAD.pack(wire.DROP, wire.VERSION + 1, 1) + uids(1)
        send(coming, message, theirs.fileno())
        assert coming.recv(1) == b"", "the connection was closed"
        [(_, fd)] = client.give([1])
        os.close(fd)
        client.close()
    said = (tmp_path / "stderr").read_text()
    assert said.count("\n") == 1
    assert f"error: refused: message of version {wire.VERSION + 1}; this release " in said


def test_what_a_process_sent_before_it_died_counts_whatever_it_had_not_read(
    keeper: KeeperProcess,
) -> None:
    """The kernel reports an unread answer before it gives what came earlier."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.kill(keeper.number, signal.SIGSTOP)
        peer = connect(keeper.path)
        send(peer, wire.ASK)
        os.kill(keeper.number, signal.SIGCONT)
        select_readable(peer)
        os.kill(keeper.number, signal.SIGSTOP)
        send(peer, wire.pack_uids(wire.HOLD, [5], wire.VERSION), theirs.fileno())
        peer.close()  # HELLO was not read
        os.kill(keeper.number, signal.SIGCONT)
        client = KeeperClient(keeper.path)
        [(uid, fd)] = client.give([5])
        os.close(fd)
        assert uid == 5
        client.close()


def select_readable(sock: socket.socket) -> None:
    assert sock.recv(1, socket.MSG_PEEK)


class Peer:
    """Stands where a keeper of another release would."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.listener = listeners.open_peer(runtime, name)
        self.listener.setblocking(True)
        self.listener.settimeout(PATIENCE_S)
        self.path = runtime.socket(name)

    def accept(self) -> socket.socket:
        sock, _ = self.listener.accept()
        sock.settimeout(PATIENCE_S)
        return sock


@pytest.mark.parametrize(
    ("answer", "spoken"),
    [
        (None, 0),  # release 0.1 does not answer
        (wire.HEAD.pack(wire.HELLO, 1, 0), 1),
        (wire.HEAD.pack(wire.HELLO, 77, 0) + b"and more", wire.VERSION),
    ],
)
def test_a_client_of_the_keeper_speaks_what_both_understand(
    answer: bytes | None, spoken: int, instance_name: str
) -> None:
    peer = Peer(Runtime.create(instance_name), names.KEEPER_SOCKET)
    client = KeeperClient(peer.path)
    assert not client.check()
    with peer.listener, peer.accept() as keeper:
        assert keeper.recv(4096) == OLD_HEAD.pack(1, 0)
        if answer is not None:
            keeper.send(answer)
            client.check()
        client.drop([3])
        assert wire.HEAD.unpack_from(keeper.recv(4096)) == (wire.DROP, spoken, 1)
        # What it does not understand is said, and not waited for in vain.
        keeper.send(wire.HEAD.pack(wire.HELD, wire.VERSION + 1, 0))
        with pytest.raises(MissingError, match=f"message of version {wire.VERSION + 1}; this rel"):
            client.give([3], 0.5)
    client.close()


def test_the_end_of_a_keeper_is_seen_behind_its_answer(instance_name: str) -> None:
    peer = Peer(Runtime.create(instance_name), names.KEEPER_SOCKET)
    client = KeeperClient(peer.path)
    assert not client.check()
    with peer.listener:
        with peer.accept() as keeper:
            keeper.send(wire.hello())
        assert client.check(), "it is another keeper, and has nothing"
    client.close()


# ---- hand-offs -------------------------------------------------------------------------------


class World:
    """Stands for the engine and the sockets of a connmgr."""

    def __init__(self) -> None:
        self.adopted: list[tuple[int, int]] = []
        self.missing = 0

    def watch(self, _fd: int, _tag: int) -> None: ...
    def unwatch(self, _fd: int) -> None: ...

    def adopt(self, slot: int, uid: int, fd: int) -> None:
        self.adopted.append((slot, uid))
        os.close(fd)

    def missed(self) -> None:
        self.missing += 1


@pytest.fixture
def arrivals(instance_name: str) -> Iterator[tuple[Arrivals, World, str, int]]:
    runtime = Runtime.create(instance_name)
    listener = listeners.open_peer(runtime, names.handoff_socket(0))
    path, fd, world = runtime.socket(names.handoff_socket(0)), listener.detach(), World()
    made = Arrivals(fd, world, world, logging.getLogger("test"))
    yield made, world, path, fd
    made.close()


Received = tuple[Arrivals, World, str, int]


def test_hand_offs_of_the_release_before_and_of_one_to_come(
    arrivals: Received, caplog: pytest.LogCaptureFixture
) -> None:
    here, world, path, listener = arrivals
    entry = wire.HANDOFF_ENTRY.pack(11, 2, 0)
    ours, theirs = socket.socketpair()
    with ours, theirs, connect(path) as old, connect(path) as coming:
        here.receive(listener)
        accepted = list(here._peers)
        send(old, OLD_HEAD.pack(wire.HANDOFF, 1) + entry, theirs.fileno())
        send(coming, wire.HEAD.pack(wire.HANDOFF, 9, 1) + entry * 2, theirs.fileno())
        assert here.receive(accepted[0])
        assert world.adopted == [(2, 11)]
        assert here.receive(accepted[1])
        assert coming.recv(1) == b"", "the connection was closed"
        assert (world.adopted, world.missing) == ([(2, 11)], 1)
        assert not here.receive(accepted[1])
        theirs.close()
        assert ours.recv(1) == b"", "no copy is left open"
    (record,) = caplog.records
    assert record.message.startswith("hand-off refused: message of version 9; this release ")


def test_the_dispatcher_speaks_what_both_understand(arrivals: Received) -> None:
    here, world, path, listener = arrivals
    link = Link(path)
    versions = []
    receive = wire.receive

    for uid in (1, 2):
        ours, theirs = socket.socketpair()
        ours.close()
        link.waiting.append(Client(uid, uid, 0, 0, theirs.detach()))
        link.flush()
        here.receive(listener)
        (peer,) = here._peers.values()
        while peer.fileno() in here._peers:
            data, fds = receive(peer)
            if wire.is_ask(data):
                wire.send(peer, wire.hello())
                continue
            versions.append(wire.version_of(data))
            wire.close_all(fds)
            break
    assert versions == [0, wire.VERSION]
    link.close()
    assert world.adopted == []


# ---- control socket and questions ------------------------------------------------------------


def ask_control(instance: Instance, request: dict[str, Any]) -> dict[str, Any]:
    with connect(Runtime.open(instance.name).socket(names.CONTROL_SOCKET)) as sock:
        sock.send(json.dumps(request).encode())
        answer: dict[str, Any] = json.loads(sock.recv(65536))
    return answer


def test_the_manager_answers_the_release_before_and_refuses_one_to_come(
    make_midair: Make,
) -> None:
    instance = make_midair(connmgrs=1)
    assert ask_control(instance, {"op": "status"})["instance"] == instance.name
    answer = ask_control(instance, {"op": "down", "v": control.VERSION + 1})
    assert answer["error"].startswith(f"this manager ({__version__}) understands requests up to")
    assert set(answer) == {"error", "code", "v"}
    assert instance.components()["router"]["state"] == "active", "it was not ended"
    assert "v" not in instance.status()


def test_a_manager_to_come_is_not_misread(instance_name: str) -> None:
    runtime = Runtime.create(instance_name)
    listener = listeners.open_peer(runtime, names.CONTROL_SOCKET)
    listener.setblocking(True)
    words = [sys.executable, "-m", "midair", "status", "--name", instance_name]
    with listener, subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as asking:
        sock, _ = listener.accept()
        with sock:
            assert json.loads(sock.recv(4096)) == {"op": "status", "v": control.VERSION}
            sock.send(json.dumps({"v": control.VERSION + 1, "instance": []}).encode())
        assert asking.wait(PATIENCE_S) == 1
        assert asking.stderr is not None
        said = asking.stderr.read()
    assert said.count("\n") == 1
    assert "is of a newer release, and answers in version" in said


def test_questions_of_a_version_to_come_are_an_error() -> None:
    assert questions.parse('{"ready": true}') == {"ready": True}
    assert questions.parse(questions.line({"sent": 3})) == {"sent": 3}
    with pytest.raises(MidairError, match="understands up to"):
        questions.parse(json.dumps({"sent": 3, "v": questions.VERSION + 1}))


# ---- the release before ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return previous_release(tmp_path_factory)


def test_this_release_has_its_sockets_kept_by_the_keeper_of_the_release_before(
    previous: Path, instance_name: str
) -> None:
    keeper = KeeperProcess(Runtime.create(instance_name), place=previous)
    client, newcomer = KeeperClient(keeper.path), KeeperClient(keeper.path)
    ours, theirs = socket.socketpair()
    with keeper.listener, ours, theirs:
        try:
            assert not client.check()
            assert client.hold([(1, theirs.fileno()), (2, theirs.fileno())]) == 2
            client.drop([2])
            client.ping()
            [(uid, fd)] = newcomer.give([1, 2])
            os.close(fd)
            assert uid == 1
            keeper.kill()
            keeper.start()
            eventually(client.check, "a new keeper is noticed")
            assert client.give() == []
        finally:
            keeper.kill()
            client.close()
            newcomer.close()


def test_parts_of_the_release_before_have_their_sockets_kept_by_this_one(
    previous: Path,
) -> None:
    """Its dispatcher gives, its connmgr asks for them again after its death, and drops them."""
    instance = start(__name__, "", "--connmgrs", "1", place=previous)
    try:
        with nobody_notices(instance):
            done = cli("upgrade", "keeper", "--name", instance.name, "--to", str(ROOT))
            assert done.returncode == 0, done.stderr
            for victim in ("connmgr/0", "dispatcher", "keeper"):
                before = instance.components()[victim]["pid"]
                os.kill(before, signal.SIGKILL)
                eventually(
                    lambda: (
                        (row := instance.components()[victim])["state"] == "active"  # noqa: B023
                        and row["pid"] != before  # noqa: B023
                    ),
                    f"{victim} is back",
                )
        found = versions(instance)
        assert found.pop("keeper") == __version__
        assert set(found.values()) == {"0.1.0"}
    finally:
        instance.stop()


# ---- a release to come in one instance with this one -----------------------------------------


@pytest.fixture(scope="module")
def coming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks a newer version, has more configuration, and says more about itself."""
    place = tmp_path_factory.mktemp("coming")
    for package in PACKAGES:
        skipped = shutil.ignore_patterns("__pycache__", "src")
        shutil.copytree(ROOT / package, place / package, ignore=skipped)

    def patch(path: str, pattern: str, new: str) -> None:
        text, count = re.subn(pattern, lambda _: new, (place / path).read_text(), count=1)
        assert count == 1, f"{path}: no {pattern}"
        (place / path).write_text(text)

    patch("midair/version.py", r'"\d[^"]*"', f'"{COMING}"')
    patch("midair/process/wire.py", r"VERSION = \d+", f"VERSION = {wire.VERSION + 1}")
    patch("midair/config.py", r"(?<=class Limits:\n)", "    to_come: bool = True\n")
    patch("midair/config.py", r"(?<=as in the file.\"\"\"\n)", "    to_come: Log = Log()\n")
    started = r"(?<=started_at: float  # seconds since the epoch\n)"
    patch("midair/process/runtime.py", started, '    to_come: str = "x"\n')
    return place


def coming_cli(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(place)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "midair", *words],
        cwd="/",
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
    )


def versions(instance: Instance) -> dict[str, str]:
    return {name: row["version"] for name, row in instance.components().items()}


@pytest.mark.parametrize("part", ["keeper", "connmgr", "dispatcher"])
def test_each_part_works_beside_parts_of_a_release_to_come(
    part: str, coming: Path, make_midair: Make
) -> None:
    """Sockets go from a dispatcher by a keeper to a connmgr, one of them of the other release."""
    instance = make_midair(connmgrs=1)
    with nobody_notices(instance):
        done = cli(
            "upgrade", part, "--name", instance.name, "--to", str(coming), timeout=PATIENCE_S * 3
        )
        assert done.returncode == 0, done.stderr
        for victim in ("connmgr/0", "keeper", "dispatcher"):
            before = instance.components()
            os.kill(before[victim]["pid"], signal.SIGKILL)
            eventually(
                lambda: (
                    (row := instance.components()[victim])["state"] == "active"  # noqa: B023
                    and row["pid"] != before[victim]["pid"]  # noqa: B023
                ),
                f"{victim} is back",
            )
    found = versions(instance)
    assert found.pop("connmgr/0" if part == "connmgr" else part) == COMING
    assert set(found.values()) == {__version__}
    assert "refused" not in instance.stderr()


def test_parts_read_the_configuration_of_a_manager_to_come(
    coming: Path, instance_name: str
) -> None:
    """Its manager and its parts; then all are replaced by those of this release, it comes last."""
    words = ["up", "--name", instance_name, "--port", "0", "--connmgrs", "1", "--monitor", "0"]
    environ = {**os.environ, "PYTHONPATH": str(coming)}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "midair", *words],
        cwd="/",
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as manager:
        try:
            assert manager.stdout is not None
            assert f"midair {COMING} is listening" in manager.stdout.readline()
            written = (Runtime.open(instance_name).path / "config.toml").read_text()
            assert written.count("to_come") == 2
            parts = ("keeper", "router", "connmgr", "dispatcher", "monitor")
            for role in (*parts, "manager"):
                to = ("--name", instance_name, "--to", str(ROOT))
                done = coming_cli(coming, "upgrade", role, *to)
                assert done.returncode == 0, done.stderr
                report = json.loads(cli("status", "--json", "--name", instance_name).stdout)
                found = {row["role"]: row["version"] for row in report["components"]}
                assert found.pop("manager") == (__version__ if role == "manager" else COMING)
            assert found == dict.fromkeys(parts, __version__)
            done = cli("check-config", str(Runtime.open(instance_name).path / "config.toml"))
            assert done.returncode == 78, "to a user it is an error"
        finally:
            manager.terminate()
            manager.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"component": "router", "event": "starting", "version": "0.1", "old": "0.0"}, "starting"),
        ({"component": "router", "event": "standby"}, "standby"),
        ({"component": "router", "event": "active", "ms": 0.0}, "active in 0.0 ms"),
        ({"component": "router", "event": "upgraded", "pid": 7}, "upgraded, pid 7"),
        ({"component": "router", "event": "back", "version": "0.0"}, "back to 0.0"),
        ({"error": "died", "code": 1}, "died"),
        ({"done": True}, "done"),
    ],
)
def test_what_an_upgrade_tells_is_what_release_0_1_reads_and_writes(
    said: dict[str, Any], text: str
) -> None:
    told = Told.from_json(said)
    assert told.to_json() == said
    assert told.text.startswith(text)


def test_what_a_manager_to_come_tells_is_shown_as_it_calls_it() -> None:
    told = Told.from_json({"component": "router", "event": "resting", "for_s": 3})
    assert (told.event, told.component, told.text) == (Event.OTHER, "router", "resting")
