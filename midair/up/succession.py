"""`midair upgrade manager`: the manager becomes another release, in the process that it is.

Nobody may be lost on the way: a process that has just been spawned, and has not said yet who it is,
does not end with a manager that goes on as another program. So exec() waits until all are known.

First the other release shows that it could: `midair.up.successor --check` runs beside us, reads all
that it would take over, and ends. Then exec() puts it in our place: the process keeps its number,
terminal, lease and children, and everything else it takes over as from a manager that has died
(takeover.py). Its own start may still fail: then it goes back by exec() to the release before,
which takes over in the same way.

One that hangs after exec() ends by an alarm. Then there is no manager, the parts go on, and
`midair up` takes over.

Facts relied on: exec() keeps the process, its parent and children, its undo lists (lease.py), its
alarm, its blocked and pending signals, and the descriptors that are inheritable; all others are
closed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec

from midair import names
from midair.process.runtime import Runtime
from midair.up import release as releases
from midair.up.process import Process
from midair.up.release import Release
from midair.up.signals import SIGNALS
from midair.up.told import Event, Told

MODULE = "midair.up.successor"
HANDED = "MIDAIR_SUCCESSION"
# A successor that is not at work by then, or in the time of the upgrade, is ended by SIGALRM: it
# holds the lease, and hears nothing.
START_S_MAX = 60.0
LOOK_S = 0.02  # how often it looks whether all have said who they are

Tell = Callable[[Told], None]


@dataclass(frozen=True)
class Handed:
    """What goes over exec(): who asked, and the way back."""

    control_fd: int
    old: Release
    to: Release
    since: float  # monotonic
    failed: str = ""  # why the new release did not start: `old` runs again


def take_handed() -> Handed | None:
    """What a manager that became this process has handed over, if that is what happened."""
    text = os.environ.pop(HANDED, "")
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(text, type=Handed)
    return None


def become(
    instance: str,
    release: Release,
    handed: Handed,
    unheard: Callable[[], Sequence[int]] = lambda: (),
    start_s: float = START_S_MAX,
) -> None:
    """This process becomes the manager of that release. OSError: it does not.

    `unheard`: signals that have come and that nobody has acted upon; it is asked once no more come.
    `start_s`: by then it is at work, or ends.
    """
    os.set_inheritable(handed.control_fd, True)
    base = dict(os.environ)
    ours = (handed.old.root, handed.to.root)
    paths = [path for path in base.pop("PYTHONPATH", "").split(":") if path not in ("", *ours)]
    if paths:
        base["PYTHONPATH"] = ":".join(paths)
    environ = {**release.environ(base), HANDED: json.dumps(asdict(handed))}
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(start_s))
    try:
        for number in unheard():
            os.kill(os.getpid(), number)
        os.execve(release.python, [*release.command(MODULE), "--name", instance], environ)
    finally:
        signal.alarm(0)
        os.set_inheritable(handed.control_fd, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def tell_after(handed: Handed, tell: Tell) -> None:
    """In the process after exec(), when it is at work: says how it went."""
    signal.alarm(0)
    if handed.failed:
        keeps = f"{handed.old.version} keeps working"
        why = f"{names.MANAGER}: {handed.to.version} did not start: {handed.failed}; {keeps}"
        return tell(Told(Event.FAILED, why=why))
    ms = round((time.monotonic() - handed.since) * 1e3, 3)
    tell(Told(Event.ACTIVE, names.MANAGER, ms=ms))
    tell(Told(Event.UPGRADED, names.MANAGER, pid=os.getpid()))
    tell(Told(Event.DONE))


class Succession:
    """An upgrade of the manager under way. If it succeeds, it does not end here."""

    def __init__(
        self,
        runtime: Runtime,
        to: Release,
        ready_s: float,
        sock: socket.socket,
        tell: Tell,
        watch: Callable[[Process], None],
        unwatch: Callable[[Sequence[int]], None],
        unheard: Callable[[], Sequence[int]],
        all_known: Callable[[], bool],
    ) -> None:
        self.to = to
        self.over = False
        self.called = names.MANAGER
        self._runtime = runtime
        self._sock = sock
        self._ready_s = ready_s
        self._deadline = time.monotonic() + ready_s
        self._tell = tell
        self._unwatch = unwatch
        self._unheard = unheard
        self._all_known = all_known
        self._checked = False
        self._old = releases.own()
        tell(Told(Event.STARTING, names.MANAGER, version=to.version, old=self._old.version))
        command = [*to.command(MODULE), "--name", runtime.instance, "--check"]
        environ = to.environ(os.environ)
        self._check = Process.start(runtime, to, command, environ, (), None)
        watch(self._check)

    def turn(self) -> None:
        """Looks how far the check is."""
        late = time.monotonic() > self._deadline
        if not self._checked:
            if not self._ended(kill=late):
                return
            if late:
                return self._fail(f"was not ready within {self._ready_s:g} s")
            if self._check.last_code != 0:
                return self._fail(f"did not start: {self._check.how_it_ended()}")
            self._checked = True
            self._say(Event.STANDBY)
        if not self._all_known():
            if late:
                self._fail(f"could not take over within {self._ready_s:g} s: a part is starting")
            return
        self._say(Event.SWITCHING)
        handed = Handed(self._sock.fileno(), self._old, self.to, time.monotonic())
        try:
            become(self._runtime.instance, self.to, handed, self._unheard, self._ready_s)
        except OSError as error:
            self._fail(f"did not start: {error}")

    def wait_s(self) -> float:
        left_s = max(0.0, self._deadline - time.monotonic()) + 0.001
        return min(left_s, LOOK_S) if self._checked else left_s

    def abort(self, why: str) -> None:
        """The instance ends."""
        if not self.over:
            if not self._checked:
                self._ended(kill=True)
            self._end(f"{names.MANAGER}: {why}")

    def _ended(self, kill: bool) -> bool:
        """Whether the check has come to an end, if need be by force."""
        watched = (self._check.stderr_fd, self._check.pidfd)
        if kill:
            self._check.kill(signal.SIGKILL)
        if not self._check.reap(wait=kill):
            return False
        self._unwatch(watched)
        return True

    def _fail(self, why: str) -> None:
        keeps = f"{self._old.version} keeps working"
        self._end(f"{names.MANAGER}: {self.to.version} {why}; {keeps}")

    def _end(self, failure: str) -> None:
        self.over = True
        self._tell(Told(Event.FAILED, why=failure))

    def _say(self, event: Event) -> None:
        self._tell(Told(event, names.MANAGER))
