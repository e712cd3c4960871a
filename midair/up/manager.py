"""The service manager of `midair up`: owns the listening sockets, keeps everything alive.

It writes no shared memory and reads none, so damage there cannot take it along. What
should run is the list of components; each turn of the loop compares it with what does.
An upgrade (upgrade.py) is one more thing that is looked at in each turn.

The parts do not need it: if it dies they go on, and the next manager takes them over (takeover.py).
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from midair import names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.process import sdnotify, spawn
from midair.process.runtime import ACTIVE, Runtime, State, start_ticks
from midair.up import arrangement, control, listeners, notices, report, takeover
from midair.up.arrangement import Arrangement
from midair.up.component import Component
from midair.up.ending import Ending
from midair.up.history import History
from midair.up.logfile import LogFile
from midair.up.process import Life, Process, Setup
from midair.up.release import Release
from midair.up.reload import Job
from midair.up.reloads import Reloads
from midair.up.roster import Roster, environ_for
from midair.up.signals import Signals, Wish
from midair.up.sockets import Sockets
from midair.up.source import Source
from midair.up.succession import Handed
from midair.up.upgrades import Upgrades
from midair.version import __version__

TURN_S_MAX = 1.0
# A standby that died is replaced, but not in a tight loop: this long after its start, or
# (one that never got as far as waiting) after its death.
STANDBY_AGAIN_S = 1.0
STANDBY_BROKEN_S = 10.0
# The monitor is looked through, not needed: whatever it does, the instance goes on. Once it
# has died as often as would end the instance if it were another, it waits this long.
MONITOR_BROKEN_S = 10.0


class Manager:
    """Runs one instance until it is told to stop."""

    def __init__(
        self,
        arranged: Arrangement,
        runtime: Runtime,
        log: logging.Logger,
        router_user: spawn.User | None,
        on_ready: Callable[[], None],
        source: Source,
        log_file: LogFile,
        take_over: bool = False,
    ) -> None:
        """`take_over`: the instance is there, arranged like that. `source`: for a reload."""
        self.ended = False  # nothing of the instance is left
        self.found: tuple[int, list[str]] = (0, [])  # parts that were there, those that were not
        self.arranged = arranged
        self.runtime = self._runtime = runtime
        self.log = self._log = log
        self._log_file = log_file
        self._on_ready = on_ready
        self._started_at = time.time()
        self._asked_to_stop = False
        self._failure: MidairError | None = None
        self._stop_by: float | None = None  # set while everything is being ended
        self._all_ready = False
        self._turned_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        self._selector.register(self._signals.reader, selectors.EVENT_READ, self._read_wake)

        self.roster = Roster(runtime, router_user)
        self.components = self.roster.make_all(arranged)
        self.sockets = Sockets(runtime, log)
        if not take_over:
            self.sockets.open_all(self.components)
        self._notify = listeners.open_notify(runtime, router_user is not None)
        self._selector.register(self._notify, selectors.EVENT_READ, self._read_notify)
        self._memory = takeover.Memory(runtime)
        self._environ = environ_for(runtime)
        self._notifier = sdnotify.Notifier()
        self.history = self._history = History(runtime, self._write_state())
        self._upgrades = Upgrades(
            runtime,
            log,
            self._history,
            self.start,
            self._watch,
            self._unwatch,
            self._signals.unheard,
            lambda: takeover.all_known(runtime, self.components),
        )
        self._job: Job | None = None
        self._reloads = Reloads(self, source.load_again)
        self._ending = Ending(self)
        if take_over:
            self._take_over()
        self._memory.keep(self.components)
        self._control = listeners.open_peer(runtime, names.CONTROL_SOCKET)
        self._desk = control.Desk(self._selector, self._control, self._serve_control)

    @property
    def _conf(self) -> Config:
        return self.arranged.conf

    @property
    def addresses(self) -> list[str]:
        return [] if self._ending.begun else self.arranged.doors.addresses

    @property
    def monitor_address(self) -> str:
        """Where the monitor answers; empty: there is none."""
        return self.arranged.parts.monitor.listen

    def _take_over(self) -> None:
        """Makes the parts that another manager has left its own. The others are started."""
        known = self._memory.read()
        if names.TRACER in known:
            self._want_tracer(True)
        standby = self._conf.manager.standby
        count = takeover.adopt(self._runtime, self.components, known, standby)
        missing = [c for c in self.components if not c.processes]
        for component in missing:
            if self._runtime.has_started(component.role, component.index):
                component.died()
        for component in self.components:
            for process in component.processes:
                self._watch(process)
        self.found = count, [c.called for c in missing]
        self._history.taken_over(__version__, *self.found)

    def resume_upgrade(self, handed: Handed) -> None:
        """This process was the manager of another release, which was asked to become this one."""
        self._upgrades.resume(handed)

    def run(self) -> None:
        """Returns when the instance was ended; raises what made it fail.

        The order within a turn matters once: signals before starting anything, so that a
        component is never started after a stop was asked for.
        """
        try:
            while not self._finished():
                self.turn()
        finally:
            if self._stop_by is not None:  # if not, a mistake of ours: the parts go on
                self._kill_all(signal.SIGKILL)
                for component in self.components:
                    for process in component.processes:
                        process.reap(wait=True)
                self.ended = True
        if self._failure is not None:
            raise self._failure

    def turn(self) -> None:
        """Compares what should be with what is, and waits for something to happen."""
        self._take_signals()
        self._reap()
        self._kill_hung()
        self.sockets.turn(self.components)
        self._start_missing()
        self._let_leave()
        self._go_on_upgrading()
        self._announce()
        self._memory.keep(self.components)
        self._desk.turn()
        if self._finished():
            return
        for key, _ in self._selector.select(self._turn_s()):
            try:
                key.data(key.fileobj)
            except Exception:  # whatever it was: nobody's message is worth the manager
                self._log.exception("what arrived could not be handled")

    # Turns

    def _take_signals(self) -> None:
        for wish in self._signals.take():
            if wish is not Wish.END:
                self._fulfil(wish)
                continue
            if self._asked_to_stop:
                self._kill_all(signal.SIGKILL)  # asked twice: at once
            self._asked_to_stop = True
        if self._asked_to_stop and self._stop_by is None:
            self._stop_by = time.monotonic() + takeover.STOP_S
            self._history.down(str(self._failure or "asked to"))
            self._kill_all(signal.SIGTERM)

    def _fulfil(self, wish: Wish) -> None:
        if wish is Wish.REOPEN_LOG:
            try:
                self._log_file.reopen()
                self._log.info("the log goes on here")
            except MidairError as error:
                self._log.error("%s; the log goes on where it was", error)
        elif wish is Wish.RELOAD:
            self._begin(self._reloads.begin(lambda _said: None))
        elif wish is Wish.LAME_DUCK and self._stop_by is None:
            self._ending.begin()

    def _let_leave(self) -> None:
        """Those that have no clients any more and were only waiting for that."""
        if self._stop_by is None and self._ending.over():
            self._asked_to_stop = True
            self._take_signals()
        elif not self.busy():
            self._begin(self._reloads.due())

    def _begin(self, job: Job | None) -> None:
        self._job = self._job if job is None else job

    def busy(self) -> str:
        """Why nothing can be begun now, or nothing."""
        if self._job is not None:
            return f"{self._job.what} is under way; try again when it is over"
        if under_way := self._upgrades.under_way:
            return under_way
        if not self._all_ready or self._stop_by is not None:
            return "the instance is just starting or ending; try again when it is up"
        return "the instance is a lame duck: it is going to end" if self._ending.begun else ""

    def rearrange(self, to: Arrangement) -> None:
        """Does itself as that arrangement says."""
        before, self.arranged = self.arranged.conf, to
        self._log.setLevel(to.conf.log.level.upper())
        if before.log.file != to.conf.log.file:
            try:
                self._log_file.use(to.conf.log.file)
            except MidairError as error:
                self._log.error("%s; the log goes on where it was", error)
        for component in self.components if not to.conf.manager.standby else []:
            for process in component.staff:
                if process is not component.active and process.life is Life.STANDBY:
                    process.retire()

    def _reap(self) -> None:
        for component in self.components:
            for process in list(component.processes):
                watched = (process.stderr_fd, process.pidfd)
                if process.reap():
                    self._unwatch(watched)
                    component.processes.remove(process)
                    if self._stop_by is None:
                        self._bury(component, process)
        self.components = [
            c for c in self.components if c.role != names.TRACER or c.processes or not c.switching
        ]

    def _bury(self, component: Component, process: Process) -> None:
        """A process has died: what that means for its component."""
        called, end = component.called, process.last_end
        if process.retired:
            self._log.debug("%s (%s) has ended", called, process.release.version)
        elif process is component.candidate:
            self._log.warning("%s (%s, new) died: %s", called, process.release.version, end)
        elif not process.ready_at and component.active is not None:
            # The one at work does not need it: no reason to give up, or to hurry.
            self._log.warning("standby of %s died: %s", called, process.how_it_ended())
            again = process.started_at + STANDBY_AGAIN_S
            broken = time.monotonic() + STANDBY_BROKEN_S
            component.standby_after = again if process.waited else broken
        else:
            component.died()
            deaths = component.deaths(self._conf.manager.restart_window_s)
            self._history.died(component, process, deaths)
            if not process.hopeless and deaths < self._conf.manager.restart_limit:
                self._log.warning("%s died: %s", called, end)
                return
            why = self._why(process, deaths)
            if not component.go_back():
                if component.role in names.ONLOOKERS:
                    self._log.error("%s %s; again in %g s", called, why, MONITOR_BROKEN_S)
                    component.start_after = time.monotonic() + MONITOR_BROKEN_S
                    return
                self._history.gave_up(component, process, why)
                known = process.last_code if process.hopeless else None
                code = Exit.RESTART_LIMIT if known is None else Exit(known)
                self._give_up(MidairError(f"{called} {why}", code))
                return
            back = component.release
            self._log.error("%s %s; going back to %s", called, why, back.version)
            for other in component.staff:
                if other.release != back:  # a standby
                    other.retire()

    def _why(self, process: Process, deaths: int) -> str:
        if process.hopeless:
            return f"cannot run: {process.how_it_ended()}"
        window = self._conf.manager.restart_window_s
        return f"died {deaths} times in {window:g} s, the last time: {process.how_it_ended()}"

    def _give_up(self, failure: MidairError) -> None:
        self._failure = self._failure or failure
        self._asked_to_stop = True
        self._take_signals()

    def _kill_hung(self) -> None:
        now = time.monotonic()
        late_s, self._turned_at = now - self._turned_at, now
        if self._stop_by is not None:
            if now > self._stop_by:
                self._kill_all(signal.SIGKILL)
            return
        for component in self.components:
            for process in component.processes:
                if late_s > process.setup.watchdog_s / 2:  # it was we who did not listen
                    process.heard_at = now
                silent_s = process.hung_s()
                if silent_s is not None:
                    self._log.error("%s silent for %.1f s: killed", component.called, silent_s)
                    self._history.hung(component, process, silent_s)
                    process.gone_quiet = True
                    process.kill(signal.SIGKILL)

    def _start_missing(self) -> None:
        if self._stop_by is not None:
            return
        for component in self.components:
            staff = component.staff
            if component.switching or time.monotonic() < component.start_after:
                continue
            if not component.can_start:
                continue
            if not staff or (
                len(staff) == 1
                and self._wants_standby(component)
                and time.monotonic() >= component.standby_after
            ):
                self.start(component)

    def _wants_standby(self, component: Component) -> bool:
        """Only beside one at work; never the keeper: its copies would be a second set."""
        return (
            self._conf.manager.standby
            and component.role not in (names.KEEPER, *names.ONLOOKERS)
            and component.active is not None
        )

    def start(
        self, component: Component, release: Release | None = None, setup: Setup | None = None
    ) -> Process:
        process = component.start(self._runtime, self._environ, release, setup)
        self._watch(process)
        return process

    def _watch(self, process: Process) -> None:
        """Its last words and its end wake us up."""
        if process.stderr_fd >= 0:
            self._selector.register(
                process.stderr_fd, selectors.EVENT_READ, lambda _fd: process.read_stderr()
            )
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda _fd: None)

    def _unwatch(self, fds: Sequence[int]) -> None:
        for fd in fds:
            if fd >= 0:
                self._selector.unregister(fd)

    def _go_on_upgrading(self) -> None:
        if self._stop_by is not None:
            self._upgrades.abort("the instance is ending")
            if self._job is not None:
                self._job.abort("the instance is ending")
        self._upgrades.turn()
        if self._job is not None and not self._job.over:
            self._job.turn()
        if self._job is not None and self._job.over:
            self._job = None
            used = {p.setup.config for c in self.components for p in c.processes}
            arrangement.tidy(self._runtime, {self.arranged.file, *used})

    def _announce(self) -> None:
        if self._all_ready or self._stop_by is not None:
            return
        needed = [c for c in self.components if c.role not in names.ONLOOKERS]
        if all(c.active is not None and c.can_start for c in needed):
            try:
                self.sockets.listen(needed)
            except MidairError as failure:
                return self._give_up(failure)
            self._all_ready = True
            if not any(self.found):
                self._history.up(__version__, self.addresses)
            self._notifier.send(READY=1, STATUS="listening on " + ", ".join(self.addresses))
            if self.addresses or any(self.found):
                self._on_ready()

    def _finished(self) -> bool:
        return self._stop_by is not None and not any(c.processes for c in self.components)

    def _turn_s(self) -> float:
        if self._stop_by is not None:
            return max(0.0, min(TURN_S_MAX, self._stop_by - time.monotonic() + 0.001))
        watchdogs = [p.setup.watchdog_s for c in self.components for p in c.processes]
        turn_s = min(TURN_S_MAX, min(watchdogs, default=TURN_S_MAX) / 4)
        turn_s = min(turn_s, self.sockets.wait_s(self.components))
        if self._job is not None:
            turn_s = min(turn_s, self._job.wait_s())
        return min(turn_s, self._upgrades.wait_s())

    def _kill_all(self, number: signal.Signals) -> None:
        for component in self.components:
            for process in component.processes:
                process.kill(number)

    # Events

    def _read_wake(self, _reader: socket.socket) -> None:
        self._signals.drain()

    def _read_notify(self, sock: socket.socket) -> None:
        for pid, fields in notices.read(sock):
            for component in self.components:
                for process in component.processes:
                    if process.pid == pid:
                        was = process.life
                        process.notified(fields)
                        if process.life is Life.READY and was is not Life.READY:
                            self._history.ready(component, process)

    def _serve_control(self, sock: socket.socket, request: dict[str, Any]) -> None:
        op = request.get("op")
        if op == control.UPGRADE:
            return self._upgrades.begin(sock, request, self.components, self.busy())
        if op == control.RELOAD:
            return self._begin_reload(sock, bool(request.get("dry_run")))
        if op == control.STATUS:
            control.answer(sock, self.report())
        elif op == control.TRACE:
            self._want_tracer(bool(request.get("want")))
            control.answer(sock, {"tracer": bool(request.get("want"))})
        elif op == control.DOWN and request.get("lame_duck"):
            self._ending.begin()
            control.answer(sock, {"pid": os.getpid(), "lame_duck_s": self._conf.server.lame_duck_s})
        elif op == control.DOWN:
            control.answer(sock, {"pid": os.getpid()})
            self._asked_to_stop = True
        sock.close()

    def _begin_reload(self, sock: socket.socket, dry_run: bool) -> None:
        """It goes on even if the one who asked goes away."""

        def tell(said: dict[str, Any]) -> None:
            control.answer(sock, said)
            if "done" in said or "error" in said:
                sock.close()

        self._begin(self._reloads.begin(tell, dry_run))

    def _want_tracer(self, want: bool) -> None:
        """A tracer is here while a run is: it is started and ended, and nothing else changes."""
        found = [c for c in self.components if c.role == names.TRACER]
        for component in found:
            component.switching = not want
            for process in component.processes if not want else []:
                process.retire()
        if want and not found:
            self.components.append(self.roster.make(names.TRACER, None, self.arranged))

    # What there is

    def report(self) -> dict[str, Any]:
        """What `midair status` shows."""
        return {
            "instance": self._runtime.instance,
            "listen": self.addresses,
            "monitor": self.monitor_address,
            "components": report.rows(self._runtime.states(), self.components),
        }

    def _write_state(self) -> int:
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        generation = self._runtime.next_generation(names.MANAGER)
        self._runtime.write_state(
            State(
                role=names.MANAGER,
                index=None,
                pid=os.getpid(),
                start_ticks=ticks,
                version=__version__,
                state=ACTIVE,
                generation=generation,
                started_at=self._started_at,
            )
        )
        return generation
