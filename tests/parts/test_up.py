"""`midair up`: starts, says one line, keeps everything alive, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from midair import names
from midair.exits import Exit
from midair.process import ipc
from midair.process.runtime import Runtime
from tests.support.instance import (
    PATIENCE_S,
    ROOT,
    Instance,
    cli,
    environ,
    eventually,
    leaks_of,
    new_name,
    processes_of,
    start,
)
from tests.support.processes import KeeperProcess

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
PARTS = ["manager", "keeper", "router", "connmgr/0", "dispatcher"]


def greeted(instance: Instance) -> bool:
    """A client is served: it gets INFO, and an answer to its PING."""
    with instance.connect() as sock, sock.makefile("rb") as lines:
        if not lines.readline().startswith(b"INFO {"):
            return False
        sock.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        return lines.readline() == b"PONG\r\n"


def test_one_line_on_stdout_says_everything(make_midair: Make) -> None:
    instance = make_midair()
    assert f"listening on 127.0.0.1:{instance.port};" in instance.line
    assert "midair pub" in instance.line
    assert f"midair down --name {instance.name}" in instance.line
    assert greeted(instance)
    assert instance.process is not None
    assert instance.process.stdout is not None
    instance.process.send_signal(signal.SIGINT)
    assert instance.process.stdout.read() == b"", "one line, and no other"
    assert instance.process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing(number: signal.Signals, make_midair: Make) -> None:
    instance = make_midair(connmgrs=2)
    assert greeted(instance)
    assert leaks_of(instance.name), "there is something that could be left"
    assert instance.stop(number) == 0
    assert leaks_of(instance.name) == []


def test_status_and_down(make_midair: Make) -> None:
    instance = make_midair(connmgrs=2)
    report = instance.status()
    assert report["instance"] == instance.name
    assert report["listen"] == [instance.address]
    rows = instance.components()
    assert list(rows) == ["manager", "keeper", "router", "connmgr/0", "connmgr/1", "dispatcher"]
    assert {row["state"] for row in rows.values()} == {"active"}
    assert {row["restarts"] for row in rows.values()} == {0}
    assert instance.process is not None
    assert rows["manager"]["pid"] == instance.process.pid
    assert all(row["uptime_s"] >= 0 and row["generation"] == 1 for row in rows.values())
    table = cli("status", "--name", instance.name)
    assert table.returncode == 0
    assert "connmgr/1" in table.stdout
    done = cli("down", "--name", instance.name)
    assert (done.returncode, done.stderr) == (0, "")
    assert instance.process.wait() == 0
    assert leaks_of(instance.name) == []
    for command in ("status", "down"):
        done = cli(command, "--name", instance.name)
        assert done.returncode == Exit.NOT_RUNNING
        assert done.stderr.count("\n") == 1
        assert "is not running" in done.stderr


@pytest.mark.parametrize("victim", ["keeper", "router", "connmgr/0", "dispatcher"])
def test_what_is_killed_comes_back(victim: str, make_midair: Make) -> None:
    instance = make_midair()
    before = instance.components()
    os.kill(before[victim]["pid"], signal.SIGKILL)
    eventually(
        lambda: (
            instance.components()[victim]["generation"] == 2
            and instance.components()[victim]["state"] == "active"
        ),
        f"{victim} is back",
    )
    after = instance.components()
    assert after[victim]["restarts"] == 1
    for other in PARTS:
        if other != victim:
            assert after[other]["pid"] == before[other]["pid"]
    assert greeted(instance)
    assert f"{victim} died: killed by SIGKILL" in instance.stderr()


def test_a_client_waits_for_a_dispatcher_that_is_away(make_midair: Make) -> None:
    instance = make_midair()
    os.kill(instance.pid("dispatcher"), signal.SIGKILL)
    assert greeted(instance)


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_the_port_answers_when_all_parts_are_ready(
    connmgrs: int, request: pytest.FixtureRequest
) -> None:
    """Until then connecting is refused: the first client that gets in is greeted."""
    name = new_name(request.node.nodeid)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["up", "--name", name, "--port", str(port), "--connmgrs", str(connmgrs)]
    with subprocess.Popen(
        [sys.executable, "-m", "midair", *words], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        try:
            refused = 0
            while True:
                try:
                    sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
                    break
                except ConnectionRefusedError:
                    refused += 1
                    assert process.poll() is None
            found = Runtime.open(name).states()
            assert {state.state for state in found} == {"active"}
            assert len(found) == 4 + connmgrs
            with sock:
                assert sock.recv(5) == b"INFO "
            assert refused > 0
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
    assert leaks_of(name) == []


def test_two_that_begin_with_the_same_port(request: pytest.FixtureRequest) -> None:
    """Both are bound before one of them listens; the other ends, and says why."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = [new_name(request.node.nodeid) for _ in range(2)]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "midair", "up", "--name", name, "--port", str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in made
    ]
    eventually(lambda: any(process.poll() is not None for process in both), "one gives up")
    [failed] = [process for process in both if process.poll() is not None]
    [works] = [process for process in both if process is not failed]
    said = failed.communicate()[1]
    assert failed.returncode == Exit.CANNOT_LISTEN
    assert "the port is in use by another program" in said.splitlines()[-1]
    assert works.stdout is not None
    assert "is listening on" in works.stdout.readline()
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        assert sock.recv(5) == b"INFO "
    works.terminate()
    works.communicate()
    assert works.returncode == 0
    assert [leaks_of(name) for name in made] == [[], []]


def test_a_component_that_keeps_dying_ends_the_instance(make_midair: Make) -> None:
    instance = make_midair(config="[manager]\nrestart_limit = 3\nrestart_window_s = 60\n")
    assert instance.process is not None
    for death in range(1, 4):
        killed = instance.pid("keeper")
        os.kill(killed, signal.SIGKILL)
        if death < 3:
            eventually(
                lambda killed=killed: instance.pid("keeper") not in (None, killed),
                "the keeper is started again",
            )
    assert instance.process.wait(30) == Exit.RESTART_LIMIT
    assert "midair: keeper died 3 times in 60 s" in instance.stderr()
    assert leaks_of(instance.name) == []


def test_a_component_that_hangs_is_killed(make_midair: Make) -> None:
    instance = make_midair(config="[manager]\nwatchdog_s = 1\n")
    hung = instance.pid("keeper")
    os.kill(hung, signal.SIGSTOP)
    eventually(lambda: instance.pid("keeper") not in (None, hung), "it is replaced")
    assert "keeper silent for" in instance.stderr()
    eventually(lambda: instance.components()["keeper"]["state"] == "active", "it works")
    assert greeted(instance)


def kill_all_of(instance: Instance) -> None:
    parts = [row["pid"] for row in instance.status()["components"]]
    instance.kill_manager()
    for pid in parts:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: processes_of(instance.name) == [], "its components are gone")


def test_if_all_are_killed_the_next_manager_cleans_up(make_midair: Make) -> None:
    instance = make_midair()
    kill_all_of(instance)
    assert ipc.leftovers(instance.name), "there is something to clean"
    again = make_midair(name=instance.name)
    assert "is listening on" in again.line
    assert again.components()["connmgr/0"]["generation"] == 1
    assert greeted(again)
    again.stop()
    assert leaks_of(instance.name) == []


def test_down_cleans_up_if_all_were_killed(make_midair: Make) -> None:
    instance = make_midair()
    kill_all_of(instance)
    done = cli("down", "--name", instance.name)
    assert done.returncode == Exit.NOT_RUNNING
    assert "removed what it had left" in done.stderr
    assert leaks_of(instance.name) == []


def test_two_instances_side_by_side(make_midair: Make) -> None:
    first, second = make_midair(), make_midair()
    assert first.port != second.port
    assert not {r["pid"] for r in first.status()["components"]} & {
        r["pid"] for r in second.status()["components"]
    }
    assert greeted(first)
    first.stop()
    assert leaks_of(first.name) == []
    assert greeted(second)


def test_the_same_name_twice_is_refused(make_midair: Make) -> None:
    instance = make_midair()
    done = cli("up", "--name", instance.name, "--port", "0")
    assert done.returncode == Exit.ALREADY_RUNNING
    assert done.stderr.count("\n") == 1
    assert instance.process is not None
    assert f"already running (pid {instance.process.pid})" in done.stderr
    assert greeted(instance), "and the first does not notice"


def test_a_port_in_use_is_one_clear_line(request: pytest.FixtureRequest) -> None:
    name = new_name(request.node.nodeid)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("up", "--name", name, "--port", str(port))
    assert done.returncode == Exit.CANNOT_LISTEN
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in done.stderr
    assert leaks_of(name) == []


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("[server]\nlisten = ['127.0.0.1']\n", Exit.BAD_CONFIG, "bad.toml:2: server.listen"),
        ("[server]\nlisten = ['no.such.host.invalid:1']\n", Exit.CANNOT_LISTEN, "cannot listen"),
        ("[server]\nlisten = ['192.0.2.1:0']\n", Exit.CANNOT_LISTEN, "cannot listen"),
        ("[connmgr]\narena_bytes = '8GiB'\ncount = 32\n", Exit.NO_RESOURCES, "/dev/shm has"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    text: str, code: Exit, says: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = new_name(request.node.nodeid)
    path = tmp_path / "bad.toml"
    path.write_text(text)
    done = cli("up", "--name", name, "--config", str(path))
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert leaks_of(name) == []


def test_queue_bytes_used_up_is_said_and_nothing_is_left(request: pytest.FixtureRequest) -> None:
    name = new_name(request.node.nodeid)
    limited = (
        "import resource, runpy, sys;"
        "resource.setrlimit(resource.RLIMIT_MSGQUEUE, (10000, 10000));"
        "runpy.run_module('midair', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "up", "--name", name, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    assert done.returncode == Exit.RESTART_LIMIT
    assert "RLIMIT_MSGQUEUE" in done.stderr.splitlines()[-1]
    assert "LimitMSGQUEUE=" in done.stderr.splitlines()[-1]
    assert leaks_of(name) == []


def test_ipv6(make_midair: Make) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    instance = make_midair(options=("--host", "::1"))
    assert f"listening on [::1]:{instance.port};" in instance.line
    assert greeted(instance)


def test_the_router_runs_as_its_own_user_and_cannot_open_bodies(
    make_midair: Make, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start the router as another user")
    user = pwd.getpwnam("nobody")
    try:
        subprocess.run(
            [sys.executable, "-c", "import router.main"],
            cwd="/",
            env=environ(),
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            capture_output=True,
            check=True,
        )
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip("the user nobody may not read this Python or this directory")
    os.chmod(os.environ["MIDAIR_RUNTIME_DIR"], 0o711)
    instance = make_midair(config="[router]\nuser = 'nobody'\n")
    pid = instance.pid("router")
    assert os.stat(f"/proc/{pid}").st_uid == user.pw_uid
    assert greeted(instance)
    for noun in (names.ARENA, names.JOURNAL):
        segment = ipc.SHM / names.segment(instance.name, noun, 0)[1:]
        assert segment.stat().st_mode & 0o777 == 0o600
        assert segment.stat().st_uid == 0
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: instance.pid("router") not in (None, pid), "it is started again")
    eventually(lambda: instance.components()["router"]["state"] == "active", "it works")
    assert greeted(instance)


def test_status_without_a_manager_reads_what_the_parts_say(make_midair: Make) -> None:
    """Under systemd there is no manager: the state files are all there is."""
    instance = make_midair()
    control = instance.runtime_path / names.CONTROL_SOCKET
    control.rename(control.with_suffix(".hidden"))
    rows = instance.components()
    assert list(rows) == PARTS
    assert instance.status()["listen"] == [instance.address]


def test_down_leaves_parts_alone_that_another_service_manager_started(instance_name: str) -> None:
    keeper = KeeperProcess(Runtime.create(instance_name))
    try:
        eventually(lambda: keeper.runtime.states(), "it says who it is")
        for command, code in (("down", Exit.FAILED), ("up", Exit.ALREADY_RUNNING)):
            done = cli(command, "--name", instance_name)
            assert done.returncode == code
            assert done.stderr.count("\n") == 1
            assert str(keeper.pid) in done.stderr
        assert [state.pid for state in keeper.runtime.states()] == [keeper.pid]
    finally:
        keeper.kill()
        keeper.listener.close()


def test_state_files_of_dead_processes_are_not_believed(instance_name: str) -> None:
    runtime = Runtime.create(instance_name)
    text = (
        '{"role": "router", "index": null, "pid": %d, "start_ticks": %d, "version": "0",'
        ' "state": "active", "generation": 1, "started_at": 0}'
    )
    runtime.write("router.1.state", text % (os.getpid(), 1))  # alive, but not that process
    runtime.write("router.2.state", text % (2**22 + 1, 1))
    runtime.write("router.3.state", "half a fi")
    assert runtime.states() == []


def test_version_and_help() -> None:
    assert cli("--version").stdout.startswith("midair 0.")
    done = cli("--help")
    assert done.returncode == 0
    assert "midair pub orders.new" in done.stdout
    assert cli("up", "--port", "70000").returncode == Exit.USAGE
    assert cli().returncode == Exit.USAGE


def test_start_helper_reports_failures(request: pytest.FixtureRequest) -> None:
    """The fixtures must not hide why an instance does not start."""
    with pytest.raises(pytest.fail.Exception, match="there is no such table"):
        start(request.node.nodeid, "[nonsense]\n")
