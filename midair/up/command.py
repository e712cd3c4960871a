"""`midair up`: makes sure that it is alone, runs the manager, and leaves nothing behind.

An instance whose manager has died is taken over, with the configuration it has (takeover.py). A
manager that is killed, or fails by a mistake of its own, leaves the parts as they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable

from midair import config, names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.process import ipc, program, spawn
from midair.process.runtime import Runtime
from midair.up import arrangement, succession, takeover
from midair.up import release as releases
from midair.up import source as sources
from midair.up.logfile import LogFile
from midair.up.manager import Manager
from midair.up.source import Source
from midair.up.succession import Handed
from midair.version import __version__


def up(source: Source, check: Callable[[Config], None]) -> None:
    """Runs an instance in the foreground until Ctrl-C, SIGTERM or `midair down`.

    `check`: raises what is wrong with the configuration and cannot be seen here.
    """
    conf = source.load().counted()  # once: it may come from a pipe
    check(conf)
    log_file = LogFile()
    log_file.use(conf.log.file)
    try:
        _up(conf, source, log_file)
    finally:
        log_file.end()


def _up(conf: Config, source: Source, log_file: LogFile) -> None:
    instance = conf.server.name
    user = _router_user(conf)
    log = _prepare(conf.log.level)
    runtime = Runtime.create(instance, None if user is None else user.gid)
    lease = takeover.only_manager(runtime)  # until this process dies
    assert lease.held
    running = takeover.look(runtime)
    if running is None:
        _begin(conf, runtime, log, user, source, log_file)
        return
    source.keep(runtime)
    arranged = arrangement.found(runtime)
    if changed := takeover.differences(conf, arranged.conf, running):
        log.warning(
            "instance %r goes on with the configuration it has; yours differs in %s: midair reload",
            instance,
            ", ".join(changed),
        )

    def say() -> None:
        print(_took_over(running, manager), flush=True)

    manager = Manager(
        arranged, runtime, log, _router_user(running), say, source, log_file, take_over=True
    )
    _run(manager, runtime, log)


def succeed(instance: str, handed: Handed) -> None:
    """This process was the manager of another release: goes on as one of this release."""
    log_file = LogFile()
    try:
        runtime, running, log = _found(instance)
        log_file.use(running.log.file)
        assert takeover.only_manager(runtime).held

        def say() -> None:
            log.info("%s", _took_over(running, manager))

        manager = Manager(
            arrangement.found(runtime),
            runtime,
            log,
            _router_user(running),
            say,
            sources.kept(runtime),
            log_file,
            take_over=True,
        )
    except BaseException as error:
        if handed.failed:  # this is the release that worked before
            raise
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        back = Handed(handed.control_fd, handed.old, handed.to, handed.since, why)
        succession.become(instance, handed.old, back)
        raise
    manager.resume_upgrade(handed)
    _run(manager, runtime, log)


def rehearse(instance: str) -> None:
    """Reads all that a manager of this release would take over, and changes nothing."""
    runtime, running, _ = _found(instance)
    arrangement.found(runtime)
    _router_user(running)
    takeover.Memory(runtime).read()
    takeover.parts(runtime)
    releases.own()


def clean(runtime: Runtime) -> list[str]:
    """Removes all that an instance has outside its processes; what there was."""
    removed = ipc.remove_all(runtime.instance, runtime.owner_uid)
    runtime.remove()
    return removed


def _prepare(level: str) -> logging.Logger:
    log = program.make_log("midair", level)
    program.raise_descriptor_limit()
    program.set_process_name(names.MANAGER)
    return log


def _found(instance: str) -> tuple[Runtime, Config, logging.Logger]:
    runtime = Runtime.open(instance)
    running = config.load_part(runtime.path / takeover.CONFIG)
    return runtime, running, _prepare(running.log.level)


def _begin(
    conf: Config,
    runtime: Runtime,
    log: logging.Logger,
    user: spawn.User | None,
    source: Source,
    log_file: LogFile,
) -> None:
    """Starts an instance where there is none."""
    manager: Manager | None = None

    def say() -> None:
        assert manager is not None
        print(_listening(conf, manager), flush=True)

    try:
        ipc.check_space(
            conf.connmgrs * (conf.connmgr.arena_bytes + conf.connmgr.output_bytes),
            f"{conf.connmgrs} connection managers",
        )
        _remove_leftovers(runtime)
        source.keep(runtime)
        manager = Manager(
            arrangement.first(conf, runtime), runtime, log, user, say, source, log_file
        )
    finally:
        if manager is None:
            clean(runtime)
    _run(manager, runtime, log)


def _run(manager: Manager, runtime: Runtime, log: logging.Logger) -> None:
    try:
        manager.run()
    except MidairError:
        raise
    except Exception:
        log.exception("a mistake in the manager; the parts go on, and midair up takes them over")
        raise SystemExit(Exit.SOFTWARE) from None
    finally:
        if manager.ended:
            takeover.end_parts(runtime)  # none: whoever there is belongs to the manager
            clean(runtime)


def _remove_leftovers(runtime: Runtime) -> None:
    """Of an instance that has ended with all its parts."""
    ipc.remove_all(runtime.instance, runtime.owner_uid, keep_roles=(names.MANAGER,))
    try:
        ipc.check_names(runtime)
    except MidairError:
        clean(runtime)
        raise
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


def _listening(conf: Config, manager: Manager) -> str:
    """The one line of `midair up` on stdout: where, how to try it, how to stop it."""
    host, port = config.split_address(manager.addresses[0])
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    server = config.join_address(local, port)
    option = "" if server == "127.0.0.1:4222" else f" --server {server}"
    return (
        f"midair {__version__} is listening on {', '.join(manager.addresses)}; "
        f"try: midair sub{option} 'demo.>' and midair pub{option} demo.hello 'hi'; "
        + _stop(conf, manager)
    )


def _took_over(running: Config, manager: Manager) -> str:
    """The same of one that found an instance without a manager."""
    count, missing = manager.found
    again = f" and started {', '.join(missing)} again" if missing else ""
    return (
        f"midair {__version__} took over {count} parts of instance {running.server.name}{again}, "
        f"listening on {', '.join(manager.addresses)}; " + _stop(running, manager)
    )


def _stop(conf: Config, manager: Manager) -> str:
    name = conf.server.name
    down = "midair down" + ("" if name == "midair" else f" --name {shlex.quote(name)}")
    watch = f"; monitor: http://{manager.monitor_address}/" if manager.monitor_address else ""
    return f"stop: Ctrl-C or {down}{watch}"
