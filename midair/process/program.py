"""What every component program shares: command line, log, lease, state, readiness.

In which order a program uses it is in role.py; the monitor, whose loop is asyncio's, does the same
by hand.

Expected failures (MidairError) become one line on stderr and their exit code. There is
no clean-up at the end, here or in a component: a stop is a death like any other.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import grp
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from midair import arguments, config, names
from midair.errors import ConfigError, MidairError
from midair.exits import Exit
from midair.process import events, ipc, sdnotify, spawn
from midair.process.lease import WAIT_S, Lease
from midair.process.runtime import (
    ACTIVE,
    STANDBY,
    STARTING,
    Origin,
    Runtime,
    State,
    start_ticks,
)
from midair.version import __version__


class Program:
    """One running component. `index` is None for the roles there is only one of."""

    def __init__(self, role: str, args: argparse.Namespace) -> None:
        self.role = role
        self.index: int | None = args.index
        self.called = names.component(role, self.index)
        self.config = config.load_part(args.config)
        self._config_path = os.path.abspath(args.config) if args.config else ""
        if self.index is not None and self.index >= self.config.connmgrs:
            raise ConfigError(
                f"there is no {self.called}: connmgr.count is {self.config.connmgrs}, "
                f"so the last one is {self.config.connmgrs - 1}"
            )
        self.instance = names.check_instance(args.name or self.config.server.name)
        self.log = make_log(f"midair-{self.called}", self.config.log.level)
        # Group that may use what the router shares with the others; None: same user.
        self.ipc_gid: int | None = args.ipc_group
        self.ipc_mode = ipc.queue_mode(self.ipc_gid)
        self.stopping = False
        self.listen = sdnotify.listen_fds()
        self.started_at = time.time()
        self.state = STARTING
        self.doing = ""  # beside its work, in words
        self._notifier = sdnotify.Notifier()
        interval_s = sdnotify.watchdog_s()
        self._watchdog_every_s = None if interval_s is None else interval_s / 3
        self._watchdog_next = 0.0
        self._lease_check_next = 0.0
        self._waited = False  # for the lease
        self._taken_ns = 0  # when it got the lease
        self._prepared = False  # what is said about it once it is active has been written
        raise_descriptor_limit()
        set_process_name(self.called)
        self.runtime = Runtime.create(self.instance)
        self.generation = self.runtime.next_generation(role, self.index)
        self.lease = Lease(self.runtime, role, self.index)
        self.wake_fd = self._catch_signals()
        origin = self._origin()
        self.runtime.write_origin(role, self.index, origin)
        self.set_state(STARTING)
        if origin.managed:
            spawn.outlive_parent()

    def listen_fds(self, name: str) -> list[int]:
        """The listening descriptors of that name, in the order they were passed."""
        return [fd for given, fd in self.listen if given == name]

    def open_queue(self, noun: str, index: int) -> ipc.Queue:
        """The REFS or ORDERS queue of connection manager `index`."""
        return ipc.open_queue(
            self.runtime.queue(noun, index),
            depth=self.config.queues.depth,
            mode=self.ipc_mode,
            gid=self.ipc_gid,
        )

    def acquire_lease(self, warm: Callable[[], bool] = lambda: True) -> None:
        """Returns when this process is the only one in its role; ends it if told to stop.

        `warm` is called before it waits, if it has to (open(False) in role.py). It returns
        False if there is nothing it could open yet, and is called again later.
        """
        is_warm = True

        def wait() -> None:
            nonlocal is_warm
            self._waited = True
            is_warm = warm()
            gc.collect()
            gc.freeze()  # what there is stays: no reason to look at it again while taking over
            self.runtime.prepare_state(self._describe(ACTIVE))
            self._prepared = True
            self.set_state(STANDBY)

        def turn() -> bool:
            nonlocal is_warm
            self.watchdog()
            is_warm = is_warm or warm()
            return not self.stopping

        if not self.lease.acquire(wait, turn, min(WAIT_S, self.wait_s_max)):
            raise SystemExit(Exit.OK)
        self._taken_ns = time.monotonic_ns()

    def pin(self) -> None:
        """With `latency.pin`: the router to the last core, connmgrs to the others in turn.

        Called once the configuration was looked at: some of it depends on the number of cores.
        """
        if self.config.latency.pin:
            *others, last = sorted(os.sched_getaffinity(0))
            own = others[(self.index or 0) % len(others)] if others else last
            os.sched_setaffinity(0, {last if self.role == names.ROUTER else own})

    def set_state(self, state: str) -> None:
        """Says in the runtime directory, and to the service manager, how far it is."""
        self.state = state
        if state == ACTIVE and self._prepared:
            self.runtime.enter_state(self.role, self.index, os.getpid())
            self._prepared = False
        else:
            self.runtime.write_state(self._describe(state))
        self._notifier.send(STATUS=state)
        self.log.debug("%s, generation %d", state, self.generation)

    def _describe(self, state: str) -> State:
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        return State(
            role=self.role,
            index=self.index,
            pid=os.getpid(),
            start_ticks=ticks,
            version=__version__,
            state=state,
            generation=self.generation,
            started_at=self.started_at,
        )

    def _origin(self) -> Origin:
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        return Origin(
            pid=os.getpid(),
            start_ticks=ticks,
            managed=self._notifier.address == self.runtime.socket(names.NOTIFY_SOCKET),
            python=sys.executable,
            root=str(Path(__file__).resolve().parents[2]),
            stderr=_pipe_in(self.runtime),
            config=self._config_path,
            ports=self.config.ports if self.role in (names.ROUTER, names.CONNMGR) else 0,
            doing=self.doing,
        )

    def ready(self, status: str = "", *, serving: bool = True) -> None:
        """State active, and READY=1. To be called when the next turn can serve.

        Not `serving`: it has the role, and is called again when it serves (standstill.py).
        """
        self.set_state(ACTIVE)
        now_usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notifier.send(READY=1, STATUS=status or ACTIVE, MONOTONIC_USEC=now_usec)
        if not serving:
            return
        start_ms = round((time.time() - self.started_at) * 1e3, 1)
        more = {"taken_over_ns": self._taken_ns} if self._waited else {}
        self.event(events.ACTIVE, version=__version__, start_ms=start_ms, **more)

    def tell(self, doing: str, **fields: str | int) -> None:
        """Says what it does beside its work, in its state and to the service manager."""
        if doing != self.doing:
            self.doing = doing
            self.runtime.write_origin(self.role, self.index, self._origin())
        self._notifier.send(STATUS=doing or self.state, **fields)

    def event(self, kind: str, **details: Any) -> None:
        """Adds to the event log of the instance. Not while clients wait for a recovery."""
        who = self.called
        events.append(self.runtime, who, kind, who, os.getpid(), self.generation, **details)

    def watchdog(self) -> None:
        """Tells the service manager that the loop turns. Cheap: call it on every turn."""
        now = time.monotonic()
        if now >= self._lease_check_next:
            self._lease_check_next = now + self.wait_s_max
            self._check_lease()
        if self._watchdog_every_s is not None and now >= self._watchdog_next:
            self._watchdog_next = now + self._watchdog_every_s
            self._notifier.send(WATCHDOG=1)

    def _check_lease(self) -> None:
        """Ends a process that acts in a role which is not its own any more.

        That cannot happen as long as the kernel keeps the leases. If somebody takes one away
        by force while the holder is stopped, there is a successor when it wakes up, and the
        only right thing left to do is nothing: no clean-up, no last word to a segment.
        """
        if self.lease.held and not self.lease.is_ours():
            now_has = self.lease.holder_pid()
            who = "nobody has it" if now_has is None else f"pid {now_has} has it"
            self.log.error("the lease of %s was taken away (%s): exit", self.called, who)
            os._exit(Exit.SOFTWARE)

    @property
    def wait_s_max(self) -> float:
        """The longest a turn may sleep without the watchdog noticing."""
        return 1.0 if self._watchdog_every_s is None else min(1.0, self._watchdog_every_s)

    def drain_wake(self) -> None:
        """Empties `wake_fd` after it was readable."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake_fd, 512):
                pass

    def _catch_signals(self) -> int:
        """SIGTERM and SIGINT set `stopping`. The descriptor returned becomes readable then.

        Without it, a signal that arrives just before the loop goes to sleep would be seen
        only after the sleep.
        """
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        ending = (signal.SIGTERM, signal.SIGINT)
        for number in ending:
            signal.signal(number, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)  # whoever started it may block them
        for number in spawn.FOR_THE_MANAGER:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCONT, self._continue)
        return reader.detach()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _continue(self, _number: int, _frame: FrameType | None) -> None:
        """It was stopped, for nobody knows how long: looks before it does anything else."""
        self._check_lease()
        if not self.stopping:
            self.drain_wake()  # not every loop does, and there is nothing to wake it for


def run(
    role: str,
    serve: Callable[[Program], None],
    argv: Sequence[str] | None = None,
    *,
    indexed: bool = False,
    description: str = "",
) -> int:
    """The whole of a component's main(): its exit code."""
    args = parser(role, indexed, description).parse_args(argv)
    called = names.component(role, args.index)
    try:
        serve(Program(role, args))
    except MidairError as error:
        with contextlib.suppress(OSError):  # nobody reads it
            print(f"midair-{called}[{os.getpid()}] error: {error}", file=sys.stderr, flush=True)
        return error.code
    return Exit.OK


def parser(role: str, indexed: bool, description: str = "") -> argparse.ArgumentParser:
    """The command line every component has."""
    result = argparse.ArgumentParser(prog=f"midair-{role}", description=description or None)
    result.add_argument("--name", metavar="INSTANCE", help="instance (default: server.name)")
    result.add_argument("--config", metavar="FILE", help="configuration (default: none)")
    result.add_argument(
        "--index",
        metavar="N",
        type=arguments.integer(0, names.CONNMGRS_MAX - 1),
        required=indexed,
        default=None,
        help="which one of its kind" if indexed else argparse.SUPPRESS,
    )
    result.add_argument(
        "--ipc-group",
        metavar="GROUP",
        type=_group,
        default=None,
        help="group, by name or number, that may use the queues (when the router runs as its "
        "own user)",
    )
    result.add_argument("--version", action="version", version=f"midair-{role} {__version__}")
    return result


def make_log(called: str, level: str) -> logging.Logger:
    """A logger of single lines on stderr: `midair-connmgr/0[pid] level: message`."""
    log = logging.getLogger("midair")
    log.setLevel(level.upper())
    log.propagate = False
    logging.raiseExceptions = False  # a log that nobody reads is full after a while
    for old in list(log.handlers):
        log.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LowerLevel(f"{called}[{os.getpid()}] %(levelname)s: %(message)s"))
    log.addHandler(handler)
    return log


class _LowerLevel(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record)


def _pipe_in(runtime: Runtime) -> str:
    """The name of the pipe our log goes to, if it lies in the runtime directory."""
    with contextlib.suppress(OSError):
        path = Path(os.readlink("/proc/self/fd/2"))
        return path.name if path.parent == runtime.path.resolve() else ""
    return ""


def raise_descriptor_limit() -> int:
    """RLIMIT_NOFILE up to what the process may have; the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def set_process_name(called: str) -> None:
    """What ps and top show; the kernel keeps 15 bytes, so `connmgr` is shortened."""
    name = f"midair-{called.replace('connmgr', 'conn')}"
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def _group(text: str) -> int:
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"there is no group {text!r}") from None
