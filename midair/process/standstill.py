"""Standing still: how all parts of an instance go to a release with other layouts together.

A part that meets segments of the layout before cannot work with the parts that still use them.
So nobody changes a byte before the last process of the release before is gone:

1. As a candidate (another process has the role) it looks whether the parts that an upgrade of
   `all` replaces before it are of its own release. If not it refuses (`join`), and the old
   process keeps working.
2. With the lease in hand it says that it is ready, and stands still: it serves nobody and writes
   nothing. That it is there is said by a lock on a file in the runtime directory (`Presence`),
   which the kernel releases when it dies. A process that is not allowed to see the others in /proc
   can read it all the same. A connmgr keeps copies of the sockets, in case the keeper dies.
3. When all roles have been held by the same processes of this release for SETTLE_S, one of them
   writes the decision down: the file `migration-<version>`. Before it, everything can go back, and
   does so if nothing moves on for PATIENCE_S: the part ends with LAYOUT_MISMATCH, and the manager
   starts the release before. After it, nothing goes back.
4. Each owner converts its segments (native/migrate.py) and waits for those of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from midair import names
from midair.errors import LayoutError
from midair.exits import Exit
from midair.process import crash, events
from midair.process.program import Program
from midair.process.runtime import Runtime
from midair.version import __version__

# Longer than the manager waits before it believes in a process that has said it is ready.
SETTLE_S = 1.0
# An upgrade of `all` replaces the next part within this, or it has failed.
PATIENCE_S = 90.0
# A candidate whose predecessors in `all` have been at work for longer was started alone.
JOIN_S = 60.0
LOOK_S = 0.02
SAY_S = 10.0
NEEDED = (names.KEEPER, names.ROUTER, names.CONNMGR, names.DISPATCHER)  # as `all` replaces them

Role = tuple[str, int | None]


class Memory(Protocol):
    """What native.migrate knows about the segments of a component."""

    def outdated(self) -> list[str]: ...
    def check_room(self) -> None: ...
    def convert(self) -> int: ...


class Presence:
    """A process of this release has a role: said to the others until it dies."""

    def __init__(self, program: Program) -> None:
        self._fd = program.runtime.open_shared(_file((program.role, program.index)))
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        text = f"{__version__} {os.getpid()}\n".encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)


def present(runtime: Runtime, role: Role) -> tuple[str, int, float] | None:
    """(version, pid, since when) of the process that says it has the role."""
    try:
        fd = os.open(runtime.path / _file(role), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None  # nobody holds it
        words = os.pread(fd, 256, 0).split()
        if len(words) != 2:  # just being written
            return None
        return words[0].decode(), int(words[1]), os.fstat(fd).st_mtime
    finally:
        os.close(fd)


class Standstill:
    """One part's share of it. Nothing happens unless a segment has the layout before."""

    def __init__(
        self, program: Program, memory: Memory, turn: Callable[[], None] = lambda: None
    ) -> None:
        """`turn` is called again and again while it stands still."""
        self._program = program
        self._turn = turn
        self._runtime = program.runtime
        self._memory = memory
        self._me: Role = (program.role, program.index)
        connmgrs = range(program.config.connmgrs)
        self._roles: list[Role] = [
            (role, index)
            for role in NEEDED
            for index in (connmgrs if role == names.CONNMGR else (None,))
        ]
        self._decision = f"migration-{__version__}"
        self._presence: Presence | None = None

    @property
    def ahead(self) -> bool:
        """Whether there is something to convert or to wait for."""
        return bool(self._memory.outdated())

    def join(self) -> None:
        """For a candidate: raises LayoutError unless the whole instance is on its way."""
        if self._is_ours(self._me) or self._decided():
            return
        before = self._roles[: self._roles.index(self._me)]
        found = [present(self._runtime, role) for role in before]
        others = [it for it in found if it is None or it[0] != __version__]
        since = max((it[2] for it in found if it is not None), default=0.0)
        if others or time.time() - since > JOIN_S:
            raise LayoutError(
                f"the segments of instance {self._runtime.instance!r} have the layout of the "
                f"release before; {__version__} takes them over with all parts at once: "
                "midair upgrade all"
            )
        self._memory.check_room()

    def end(self) -> None:
        """With the lease in hand: returns when every segment that is needed is of this release."""
        old = self._memory.outdated()
        if not old:
            return
        program = self._program
        began = time.monotonic()
        self._presence = Presence(program)
        program.log.info("%s: layout of the release before; standing still", ", ".join(old))
        program.ready("standing still until all parts are of this release", serving=False)
        crash.here("migrate.standing")
        self._wait_for_all()
        crash.here("migrate.decided")
        stood = time.monotonic()
        converted = self._convert()
        self._wait_for_memory()
        took = time.monotonic()
        program.log.info(
            "converted %d segments: stood still for %.1f ms, and %.1f ms for the conversion",
            converted,
            (stood - began) * 1e3,
            (took - stood) * 1e3,
        )
        program.event(
            events.MIGRATED,
            version=__version__,
            segments=converted,
            stood_ms=round((stood - began) * 1e3, 1),
            took_ms=round((took - stood) * 1e3, 1),
        )

    def _wait_for_all(self) -> None:
        """Until it is decided that the release before does not come back."""
        settled: list[tuple[str, int, float] | None] = []
        since = moved_on = said = time.monotonic()
        most = 0
        while not self._decided():
            now = time.monotonic()
            found = [present(self._runtime, role) for role in self._roles]
            missing = [
                names.component(*role)
                for role, it in zip(self._roles, found, strict=True)
                if it is None or it[0] != __version__
            ]
            if found != settled:
                settled, since = found, now
            if len(found) - len(missing) > most:
                most, moved_on = len(found) - len(missing), now
            if not missing and now - since >= SETTLE_S:
                self._runtime.write(self._decision, f"{self._program.called} {os.getpid()}\n")
                return
            if now - moved_on > PATIENCE_S and self._can_go_back():
                raise LayoutError(
                    f"{', '.join(missing)} did not become {__version__} within {PATIENCE_S:g} s: "
                    "the release before goes on with its segments; midair upgrade all"
                )
            if now - said > SAY_S:
                said = now
                self._program.log.warning(
                    "standing still: %s not of %s yet", ", ".join(missing), __version__
                )
            self._pause()

    def _convert(self) -> int:
        """In a thread of its own: the watchdog must hear of us meanwhile."""
        done: list[int] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(self._memory.convert())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_S)
            self._program.watchdog()
        if failed:
            raise failed[0]
        return done[0]

    def _wait_for_memory(self) -> None:
        """Until the owners of the other segments have converted theirs."""
        while self._memory.outdated():
            self._pause()

    def _pause(self) -> None:
        program = self._program
        program.watchdog()
        self._turn()
        select.select([program.wake_fd], [], [], LOOK_S)
        if program.stopping:
            raise SystemExit(Exit.OK)

    def _decided(self) -> bool:
        return (self._runtime.path / self._decision).exists()

    def _is_ours(self, role: Role) -> bool:
        it = present(self._runtime, role)
        return it is not None and it[0] == __version__

    def _can_go_back(self) -> bool:
        """Whether `midair up` started us: systemd has no release before to start."""
        mine = self._runtime.socket(names.NOTIFY_SOCKET)
        return os.environ.get("NOTIFY_SOCKET") == mine


def _file(role: Role) -> str:
    name, index = role
    return f"{name}.release" if index is None else f"{name}-{index}.release"
