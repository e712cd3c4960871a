"""The service manager of `midair up`: owns the listening sockets, keeps everything alive.

It writes no shared memory and reads none, so damage there cannot take it along. What
should run is the list of components; each turn of the loop compares it with what does.
An upgrade (upgrade.py) is one more thing that is looked at in each turn.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from midair import names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.process import sdnotify, spawn
from midair.process.runtime import ACTIVE, Runtime, State, start_ticks
from midair.up import control, listeners, notices, report, upgrade
from midair.up import release as releases
from midair.up.component import Component, Life, Process
from midair.up.history import History
from midair.up.release import Release
from midair.up.roster import Roster, environ_for
from midair.up.told import ENDS, Event, Told
from midair.up.upgrade import Upgrade
from midair.version import __version__

STOP_S = 3.0  # how long components may take to end before they are killed
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
        conf: Config,
        runtime: Runtime,
        log: logging.Logger,
        router_user: spawn.User | None,
        on_ready: Callable[[], None],
    ) -> None:
        self._conf = conf
        self._runtime = runtime
        self._log = log
        self._on_ready = on_ready
        self._started_at = time.time()
        self._signals: list[int] = []
        self._asked_to_stop = False
        self._failure: MidairError | None = None
        self._stop_by: float | None = None  # set while everything is being ended
        self._all_ready = False
        self._turned_at = time.monotonic()
        self._upgrade: Upgrade | None = None
        self._selector = selectors.DefaultSelector()
        self._catch_signals()

        self._clients = listeners.open_clients([item.address for item in conf.server.listen])
        self.addresses = [listeners.address_of(sock) for sock in self._clients]
        self._monitor: socket.socket | None = None
        if conf.monitor.listen:
            where = "--monitor, monitor.listen"
            self._monitor = listeners.open_client(conf.monitor.listen, where)
        self._notify = listeners.open_notify(runtime, router_user is not None)
        self._control = listeners.open_peer(runtime, names.CONTROL_SOCKET)
        self._selector.register(self._notify, selectors.EVENT_READ, self._read_notify)
        self._selector.register(self._control, selectors.EVENT_READ, self._accept_control)
        # INFO tells clients where they are: a port that was left open is known by now.
        actual = conf.listening_on(self.addresses)
        actual = actual.with_("monitor", listen=self.monitor_address)
        config_path = runtime.write("config.toml", actual.for_parts(__version__))
        self._roster = Roster(conf, runtime, config_path, router_user)
        self._components = self._roster.make_all(self._clients, self._monitor)
        self._environ = environ_for(runtime, conf.manager.watchdog_s)
        self._notifier = sdnotify.Notifier()
        self._history = History(runtime, self._write_state())

    @property
    def monitor_address(self) -> str:
        """Where the monitor answers; empty: there is none."""
        return "" if self._monitor is None else listeners.address_of(self._monitor)

    def run(self) -> None:
        """Returns when the instance was ended; raises what made it fail.

        The order within a turn matters once: signals before starting anything, so that a
        component is never started after a stop was asked for.
        """
        try:
            while True:
                self._take_signals()
                self._reap()
                self._kill_hung()
                self._start_missing()
                self._go_on_upgrading()
                self._announce()
                if self._finished():
                    break
                for key, _ in self._selector.select(self._turn_s()):
                    key.data(key.fileobj)
        finally:
            self._kill_all(signal.SIGKILL)
            for component in self._components:
                for process in component.processes:
                    process.reap(wait=True)
        if self._failure is not None:
            raise self._failure

    # Turns

    def _take_signals(self) -> None:
        numbers, self._signals = self._signals, []
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            if self._asked_to_stop:
                self._kill_all(signal.SIGKILL)  # asked twice: at once
            self._asked_to_stop = True
        if self._asked_to_stop and self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_S
            self._history.down(str(self._failure or "asked to"))
            self._kill_all(signal.SIGTERM)

    def _reap(self) -> None:
        for component in self._components:
            for process in list(component.processes):
                fd = process.stderr_fd
                if process.reap():
                    self._selector.unregister(fd)
                    component.processes.remove(process)
                    if self._stop_by is None:
                        self._bury(component, process)
        self._components = [
            c for c in self._components if c.role != names.TRACER or c.processes or not c.switching
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
                self._give_up(MidairError(f"{called} {why}", Exit.RESTART_LIMIT))
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
        for component in self._components:
            for process in component.processes:
                if late_s > self._conf.manager.watchdog_s / 2:  # it was we who did not listen
                    process.heard_at = now
                silent_s = process.hung_s(self._conf.manager.watchdog_s)
                if silent_s is not None:
                    self._log.error("%s silent for %.1f s: killed", component.called, silent_s)
                    self._history.hung(component, process, silent_s)
                    process.kill(signal.SIGKILL)

    def _start_missing(self) -> None:
        if self._stop_by is not None:
            return
        for component in self._components:
            staff = component.staff
            if component.switching or time.monotonic() < component.start_after:
                continue
            if not staff or (
                len(staff) == 1
                and self._wants_standby(component)
                and time.monotonic() >= component.standby_after
            ):
                self._start(component)

    def _wants_standby(self, component: Component) -> bool:
        """Only beside one at work; never the keeper: its copies would be a second set."""
        return (
            self._conf.manager.standby
            and component.role not in (names.KEEPER, *names.ONLOOKERS)
            and component.active is not None
        )

    def _start(self, component: Component, release: Release | None = None) -> Process:
        process = component.start(self._environ, release)
        self._selector.register(
            process.stderr_fd, selectors.EVENT_READ, lambda _fd: process.read_stderr()
        )
        return process

    def _go_on_upgrading(self) -> None:
        if self._upgrade is None:
            return
        if self._stop_by is not None:
            self._upgrade.abort("the instance is ending")
        self._upgrade.turn()
        if self._upgrade.over:
            self._upgrade = None

    def _announce(self) -> None:
        if self._all_ready or self._stop_by is not None:
            return
        needed = [c for c in self._components if c.role not in names.ONLOOKERS]
        if all(component.active is not None for component in needed):
            self._all_ready = True
            self._history.up(__version__, self.addresses)
            self._notifier.send(READY=1, STATUS="listening on " + ", ".join(self.addresses))
            self._on_ready()

    def _finished(self) -> bool:
        return self._stop_by is not None and not any(c.processes for c in self._components)

    def _turn_s(self) -> float:
        if self._stop_by is not None:
            return max(0.0, min(TURN_S_MAX, self._stop_by - time.monotonic() + 0.001))
        turn_s = min(TURN_S_MAX, self._conf.manager.watchdog_s / 4)
        return turn_s if self._upgrade is None else min(turn_s, self._upgrade.wait_s())

    def _kill_all(self, number: signal.Signals) -> None:
        for component in self._components:
            for process in component.processes:
                process.kill(number)

    # Events

    def _read_wake(self, reader: socket.socket) -> None:
        reader.recv(4096)

    def _read_notify(self, sock: socket.socket) -> None:
        for pid, fields in notices.read(sock):
            for component in self._components:
                for process in component.processes:
                    if process.pid == pid:
                        was = process.life
                        process.notified(fields)
                        if process.life is Life.READY and was is not Life.READY:
                            self._history.ready(component, process)

    def _accept_control(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, self._read_control)

    def _read_control(self, sock: socket.socket) -> None:
        request = control.read(sock)
        self._selector.unregister(sock)
        op = request.get("op")
        if op == control.UPGRADE:
            return self._begin_upgrade(sock, request)
        if op == control.STATUS:
            control.answer(sock, self.report())
        elif op == control.TRACE:
            self._want_tracer(bool(request.get("want")))
            control.answer(sock, {"tracer": bool(request.get("want"))})
        elif op == control.DOWN:
            control.answer(sock, {"pid": os.getpid()})
            self._asked_to_stop = True
        sock.close()

    def _want_tracer(self, want: bool) -> None:
        """A tracer is here while a run is: it is started and ended, and nothing else changes."""
        found = [c for c in self._components if c.role == names.TRACER]
        for component in found:
            component.switching = not want
            for process in component.processes if not want else []:
                process.retire()
        if want and not found:
            self._components.append(self._roster.make(names.TRACER))

    def _begin_upgrade(self, sock: socket.socket, request: dict[str, Any]) -> None:
        """Starts it, or says why not. It goes on even if the one who asked goes away."""

        def tell(told: Told) -> None:
            if told.event is Event.FAILED:
                self._log.error("upgrade: %s", told.why)
            elif told.event is not Event.DONE:
                self._log.info("upgrade: %s: %s", told.component, told.text)
            self._history.upgrade(told)
            control.answer(sock, told.to_json())
            if told.event in ENDS:
                sock.close()

        target = str(request.get("target"))
        chosen = upgrade.choose(target, self._components)
        refusal = ""
        if self._upgrade is not None:
            under_way = f"{self._upgrade.component.called} to {self._upgrade.to.version}"
            refusal = f"another upgrade is under way ({under_way}); try again when it is over"
        elif not self._all_ready or self._stop_by is not None:
            refusal = "the instance is just starting or ending; try again when it is up"
        elif not chosen:
            all_of_them = ", ".join(component.called for component in self._components)
            refusal = f"{target}: there is no such component here; there are {all_of_them}"
        try:
            to = msgspec.convert(request["release"], Release)
            ready_s = float(request["ready_s"])
            refusal = refusal or releases.no_way_back(self._runtime.instance, to)
        except (KeyError, TypeError, ValueError):
            refusal = f"this manager ({__version__}) does not understand what is asked for"
        if refusal:
            tell(Told(Event.FAILED, why=refusal))
        else:
            self._upgrade = Upgrade(chosen, to, ready_s, self._start, tell)

    # What there is

    def report(self) -> dict[str, Any]:
        """What `midair status` shows."""
        return {
            "instance": self._runtime.instance,
            "listen": self.addresses,
            "monitor": self.monitor_address,
            "components": report.rows(self._runtime.states(), self._components),
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

    def _catch_signals(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wake = (reader, writer)  # kept: the selector and the handler use them
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, self._read_wake)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._queue_signal)

    def _queue_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
