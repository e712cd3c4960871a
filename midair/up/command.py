"""`midair up`: makes sure that it is alone, runs the manager, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import time

from midair import config, names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.process import ipc, program, spawn
from midair.process.lease import Lease
from midair.process.runtime import Runtime
from midair.up.manager import Manager
from midair.version import __version__

GONE_S = 5.0  # how long the components of a manager that was killed may take to follow it


def up(conf: Config) -> None:
    """Runs an instance in the foreground until Ctrl-C, SIGTERM or `midair down`."""
    conf = conf.counted()
    instance = conf.server.name
    user = _router_user(conf)
    log = program.make_log("midair", conf.log.level)
    program.raise_descriptor_limit()
    program.set_process_name(names.MANAGER)
    ipc.check_space(
        conf.connmgrs * (conf.connmgr.arena_bytes + conf.connmgr.output_bytes),
        f"{conf.connmgrs} connection managers",
    )
    runtime = Runtime.create(instance, None if user is None else user.gid)
    _take_over(runtime)
    try:
        manager = Manager(
            conf, runtime, log, user, lambda: _say(conf, manager.addresses, manager.monitor_address)
        )
        manager.run()
    finally:
        clean(runtime)


def clean(runtime: Runtime) -> list[str]:
    """Removes all that an instance has outside its processes; what there was."""
    removed = ipc.remove_all(runtime.instance, runtime.owner_uid)
    runtime.remove()
    return removed


def only_manager(runtime: Runtime) -> Lease:
    """Takes the manager's lease, or says who has it."""
    lease = Lease(runtime, names.MANAGER)
    if not lease.try_acquire():
        raise MidairError(
            f"instance {runtime.instance!r} is already running (pid {lease.holder_pid()}); "
            "stop it with `midair down`, or start another with --name",
            Exit.ALREADY_RUNNING,
        )
    return lease


def wait_gone(pids: list[int], timeout_s: float) -> bool:
    """Waits until none of the processes is left; False if that takes too long."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(fd)
    return True


def _take_over(runtime: Runtime) -> None:
    """Becomes the manager, and removes what a manager that was killed has left."""
    only_manager(runtime)
    alive = [s.pid for s in runtime.states() if s.role != names.MANAGER]
    if not wait_gone(alive, GONE_S):
        raise MidairError(
            f"components of instance {runtime.instance!r} are running under another service "
            f"manager (pids {', '.join(map(str, alive))}); stop them there, or use --name",
            Exit.ALREADY_RUNNING,
        )
    ipc.remove_all(runtime.instance, runtime.owner_uid, keep_roles=(names.MANAGER,))
    for path in runtime.path.iterdir():
        if path.suffix != ".lock":
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _router_user(conf: Config) -> spawn.User | None:
    """The router's own user: only root can give it one."""
    if not conf.router.user or os.geteuid() != 0:
        return None
    user = spawn.find_user(conf.router.user)
    return None if user.uid == 0 else user


def _say(conf: Config, addresses: list[str], monitor: str) -> None:
    """The one line of `midair up` on stdout: where, how to try it, how to stop it."""
    host, port = config.split_address(addresses[0])
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    server = config.join_address(local, port)
    option = "" if server == "127.0.0.1:4222" else f" --server {server}"
    name = conf.server.name
    down = "midair down" + ("" if name == "midair" else f" --name {shlex.quote(name)}")
    watch = f"; monitor: http://{monitor}/" if monitor else ""
    print(
        f"midair {__version__} is listening on {', '.join(addresses)}; "
        f"try: midair sub{option} 'demo.>' and midair pub{option} demo.hello 'hi'; "
        f"stop: Ctrl-C or {down}{watch}",
        flush=True,
    )
