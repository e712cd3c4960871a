"""Upgrades: another release takes over, one component after the other, at full work.

For each component: the new process starts while the old one works, opens what it needs,
compares the layouts of the segments with its own, and waits for the lease. Only then is the
old one killed; the lease passes on, the new one recovers what it finds and goes on. A crash
and an upgrade differ in nothing but that the successor is ready before.

The steps of one component, and what a failure in them means:

    STARTING    the candidate gets ready          the old process never notices
    CLEARING    other standbys are ended          the same
    SWITCHING   the old one is killed, the        the candidate is started again a few times,
                candidate becomes active          then the old release
    SETTLING    it has to live for a moment       the same
    BACK        the old release is started        the manager goes on trying, as after a crash

This is the manager's side: it looks at the processes once a turn and never waits. The command's is
ask_upgrade.py; what is told between them, told.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from midair import names
from midair.up.component import Component
from midair.up.process import Life, Process
from midair.up.release import Release
from midair.up.told import Event, Told

READY_S = 30.0  # a candidate has to be standby within this, and active within it again
SETTLE_S = 0.5  # a new process that dies sooner than this after it became active has failed
ATTEMPTS_MAX = 3  # starts of the new release after the old process was ended
ALL = "all"
# The manager comes last, by another way (succession.py).
PARTS = (names.KEEPER, names.ROUTER, names.CONNMGR, names.DISPATCHER, names.MONITOR)
ORDER = (*PARTS, names.MANAGER)

Start = Callable[[Component, Release], Process]
Tell = Callable[[Told], None]


class Step(Enum):
    STARTING = "starting"
    CLEARING = "clearing"
    SWITCHING = "switching"
    SETTLING = "settling"
    BACK = "back"
    DONE = "done"


def choose(target: str, components: Sequence[Component]) -> list[Component]:
    """The components that are meant, in the order in which they are upgraded.

    A tracer is there for one recording, and ends with the release it began with.
    """
    found = [c for c in components if c.role in ORDER and target in (ALL, c.role, c.called)]
    return sorted(found, key=lambda c: (ORDER.index(c.role), c.index or 0))


class Upgrade:
    """An upgrade under way. `turn` moves it on; it is over when `over` says so.

    `tell` gets what happens (told.py); the last is DONE or FAILED. `start` spawns a process for
    a component.
    """

    def __init__(
        self,
        components: Sequence[Component],
        to: Release,
        ready_s: float,
        start: Start,
        tell: Tell,
    ) -> None:
        self.to = to
        self.over = False
        self._left = list(components)
        self._ready_s = ready_s
        self._start = start
        self._tell = tell
        self._failure = ""
        self._settled_at = 0.0
        self._steps = {
            Step.STARTING: self._starting,
            Step.CLEARING: self._clearing,
            Step.SWITCHING: self._switching,
            Step.SETTLING: self._settling,
            Step.BACK: self._back_again,
        }
        self._next()

    @property
    def called(self) -> str:
        """Who is being upgraded."""
        return self.component.called

    @property
    def component(self) -> Component:
        """The one that is being upgraded."""
        return self._left[0]

    def turn(self) -> None:
        """Looks how far the processes are, and does what can be done now."""
        before = None
        while not self.over and before is not self._step:
            before = self._step
            self._steps[self._step]()

    def wait_s(self) -> float:
        """How long the manager may sleep without missing a deadline of ours."""
        until = self._settled_at if self._step is Step.SETTLING else self._deadline
        return max(0.0, until - time.monotonic()) + 0.001

    def abort(self, why: str) -> None:
        """The instance ends: says so, leaves the processes to the manager."""
        if not self.over:
            self._end(f"{self.component.called}: {why}")

    # Steps

    def _next(self) -> None:
        """Begins with the component that is now the first of the list."""
        component = self.component
        self._from = component.release
        self._attempts = 1
        self._ended_at = 0.0
        self._say(Event.STARTING, version=self.to.version, old=self._from.version)
        component.candidate = self._candidate = self._start(component, self.to)
        self._go(Step.STARTING)

    def _starting(self) -> None:
        if not self._candidate.alive:
            self._keep(f"did not start: {self._candidate.how_it_ended()}")
        elif self._candidate.life is Life.STANDBY:
            self._say(Event.STANDBY)
            self._go(Step.CLEARING)
        elif self._candidate.life is Life.READY:  # the old one died meanwhile
            self._go(Step.CLEARING)
        elif self._late():
            said = self._candidate.last_line
            said = f"; it said: {said}" if said else ""
            self._keep(f"was not ready within {self._ready_s:g} s{said}")

    def _clearing(self) -> None:
        """The lease goes to any one of those who wait for it: nobody else may be waiting."""
        component = self.component
        others = [p for p in component.processes if p is not self._candidate and p.alive]
        waiting = [p for p in others if p.life is not Life.READY]
        if not self._candidate.alive:
            return self._keep(f"died as a standby: {self._candidate.how_it_ended()}")
        component.switching = True
        for process in waiting:
            process.retire()
        if waiting and self._candidate.life is Life.STANDBY:
            if self._late():
                self._keep("could not take over: an older standby does not end")
            return
        self._say(Event.SWITCHING)
        self._ended_at = time.monotonic()
        for process in others:
            process.retire()
        self._go(Step.SWITCHING)

    def _switching(self) -> None:
        if not self._candidate.alive:
            self._again()
        elif self._candidate.life is Life.READY:
            took_s = self._candidate.ready_at - self._ended_at
            self._say(Event.ACTIVE, ms=round(max(0.0, took_s) * 1e3, 3))
            self._settled_at = time.monotonic() + SETTLE_S
            self._go(Step.SETTLING)
        elif self._late():
            self._candidate.retire()
            self._back(f"was not active within {self._ready_s:g} s after the switch")

    def _settling(self) -> None:
        if not self._candidate.alive:
            self._again()
        elif time.monotonic() >= self._settled_at:
            component = self.component
            self._settled(component)
            component.candidate, component.switching = None, False
            self._say(Event.UPGRADED, pid=self._candidate.pid)
            self._left.pop(0)
            if self._left:
                self._next()
            else:
                self._end()

    def _back_again(self) -> None:
        active = self.component.active
        if active is not None and not active.retired and self._is_old(active):
            self._say(Event.ACTIVE, ms=round((active.ready_at - self._ended_at) * 1e3, 3))
            self._end(f"{self._failure}; {self._old} is back")
        elif self._late():
            self._end(f"{self._failure}; {self._old} is not back yet either")

    # What differs when something else than the release changes (reload.py)

    @property
    def _old(self) -> str:
        return self._from.version

    def _is_old(self, process: Process) -> bool:
        return process.release == self._from

    def _settled(self, component: Component) -> None:
        component.previous, component.release = self._from, self.to

    # What they come to

    def _again(self) -> None:
        """The new release died after the switch: once more, or not."""
        died = self._candidate
        self._say(Event.DIED)
        if died.hopeless or self._attempts >= ATTEMPTS_MAX:
            times = f"{self._attempts} times " if self._attempts > 1 else ""
            self._back(f"died {times}when it took over: {died.how_it_ended()}")
            return
        self._attempts += 1
        self.component.candidate = self._candidate = self._start(self.component, self.to)
        self._go(Step.SWITCHING)

    def _keep(self, why: str) -> None:
        """Failed before the switch: nothing has changed."""
        self._candidate.retire()
        self._end(f"{self._called()} {why}; {self._old} keeps working")

    def _back(self, why: str) -> None:
        """Failed after the switch: the manager starts the old release."""
        self._failure = f"{self._called()} {why}"
        self._release_component()
        self._say(Event.BACK, version=self._from.version)
        self._go(Step.BACK)

    def _end(self, failure: str = "") -> None:
        if self._left:
            self._release_component()
        self._step = Step.DONE
        self.over = True
        self._tell(Told(Event.FAILED, why=failure) if failure else Told(Event.DONE))

    def _release_component(self) -> None:
        self.component.candidate, self.component.switching = None, False

    def _called(self) -> str:
        return f"{self.component.called}: {self.to.version}"

    def _go(self, step: Step) -> None:
        self._step = step
        self._deadline = time.monotonic() + self._ready_s

    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _say(self, event: Event, **more: Any) -> None:
        self._tell(Told(event, self.component.called, **more))
