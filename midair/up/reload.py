"""Another configuration for an instance at work: `midair reload`.

The parts are moved to a new arrangement (arrangement.py) one after the other, each as in an
upgrade: the new process gets ready beside the old one, and takes its role over. What can be found
to be wrong without touching anything is found first. If a part does not come up with the new
configuration, those that were moved go back to the old one, and what was added is taken away.

The order. Connection managers that are added start first: they make their segments. Then the
router and the other connection managers learn of them, and only then the dispatcher, which gives
them clients. So nobody gets a message whose body it has not mapped, whatever dies meanwhile, and
the only connection manager of an instance does not repeat decisions of the router any more when
the second gets its first client. Of those that are to leave the dispatcher learns first. The new
arrangement is put in use right before the dispatcher is moved. Up to there all can go back. From
there on clients may be where the old arrangement has nobody: then what was added is retiring, and
only the rest goes back.

`Removal` is the end of a retiring connection manager. It says itself when nobody needs it. It is
ended, its number begins a new life (rule R8), and everybody is moved to an arrangement without it.
Nothing of that goes back: a part that does not come up without it goes on as before, and a later
reload tries again. Its arena goes last: a part may have a batch to finish that names it.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from midair import names
from midair.config import Config
from midair.errors import MidairError
from midair.exits import Exit
from midair.process import ipc
from midair.process.runtime import Runtime
from midair.up import arrangement, listeners, plan
from midair.up.arrangement import Arrangement
from midair.up.component import Component
from midair.up.plan import Effect
from midair.up.process import Life, Process, Setup
from midair.up.release import Release
from midair.up.roster import Roster
from midair.up.sockets import Sockets
from midair.up.told import Event, Told
from midair.up.upgrade import READY_S, Upgrade

ATTEMPTS_MAX = 3  # at a part whose new process is killed by somebody
LOOK_S = 0.05  # between two looks at a process that is being waited for

Work = Generator[None, None, None]
Tell = Callable[[dict[str, Any]], None]


class Instance(Protocol):
    """What of the manager is changed here."""

    arranged: Arrangement
    components: list[Component]
    roster: Roster
    sockets: Sockets
    runtime: Runtime
    log: logging.Logger

    def start(
        self, component: Component, release: Release | None, setup: Setup | None
    ) -> Process: ...

    def rearrange(self, to: Arrangement) -> None:
        """Does itself as this one says."""


class Move(Upgrade):
    """One component to another setup: an upgrade to the release it has."""

    def __init__(
        self, instance: Instance, component: Component, setup: Setup, tell: Callable[[Told], None]
    ) -> None:
        self._setup = setup
        self._before = component.setup
        super().__init__(
            [component],
            component.release,
            READY_S,
            lambda it, release: instance.start(it, release, setup),
            tell,
        )

    @property
    def _old(self) -> str:
        return "the old one"

    def _called(self) -> str:
        return f"{self.component.called}: with the new configuration it"

    def _is_old(self, process: Process) -> bool:
        return process.setup == self._before

    def _settled(self, component: Component) -> None:
        component.setup = self._setup

    @property
    def was_killed(self) -> bool:
        """Somebody has killed the new process: that says nothing about what it was given."""
        code = self._candidate.last_code
        return code is not None and code < 0 and not self._candidate.retired


class _FailedError(Exception):
    """A part did not come up with what it was given: the text says how."""


class Job(abc.ABC):
    """Work that goes on a little in each turn of the manager. `over`: it is done."""

    what = ""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._move: Move | None = None
        self._aborted = ""
        self.over = False
        self._work = self._run()

    def turn(self) -> None:
        """Goes on as far as it can without waiting."""
        try:
            next(self._work)
        except StopIteration:
            self.over = True
        except (OSError, MidairError) as error:  # the parts are where they are
            self.over = True
            self._failed(f"cannot go on: {error}")

    def wait_s(self) -> float:
        """How long the manager may sleep."""
        return LOOK_S if self._move is None else self._move.wait_s()

    def abort(self, why: str) -> None:
        """The instance ends: leaves the processes to the manager."""
        if self._move is not None:
            self._move.abort(why)
        self._work.close()
        self.over = True
        self._failed(why)

    @abc.abstractmethod
    def _run(self) -> Work: ...

    @abc.abstractmethod
    def _failed(self, why: str) -> None: ...

    @abc.abstractmethod
    def _progress(self, told: Told) -> None: ...

    def _move_to(self, component: Component, setup: Setup) -> Work:
        """Moves a component; _FailedError: it is where it was."""
        failure = ""

        def tell(told: Told) -> None:
            nonlocal failure
            if told.event is Event.FAILED:
                failure = told.why
            elif told.event is not Event.DONE:
                self._progress(told)

        for attempt in range(ATTEMPTS_MAX):
            failure = ""
            self._move = move = Move(self._instance, component, setup, tell)
            while not move.over:
                move.turn()
                if not move.over:
                    yield
            self._move = None
            if not failure:
                return
            if not move.was_killed or attempt + 1 == ATTEMPTS_MAX:
                raise _FailedError(failure)

    def _end(self, component: Component) -> Work:
        """Ends all processes of a component, which is not started again."""
        component.switching = True
        for process in component.processes:
            process.retire()
        while component.processes:
            yield

    def _setup(self, component: Component, to: Arrangement) -> Setup:
        return self._instance.roster.setup(component.role, component.index, to)


class Reload(Job):
    """A new configuration. Raises MidairError, with nothing changed, if that cannot be.

    `tell` gets what happens, each an object for the control socket; the last has "done" or "error".
    """

    what = "a reload"

    def __init__(self, instance: Instance, conf: Config, dry_run: bool, tell: Tell) -> None:
        before = instance.arranged
        self._before = before
        self._tell = tell
        self._changes = plan.compare(before.conf, conf)
        self._dry_run = dry_run
        self._added: list[Component] = []
        self._moved: list[Component] = []
        self._given = False  # clients may have been given to those that were added
        made: list[str] = []
        self._after = arrangement.following(before, conf, instance.runtime)
        try:
            if not dry_run:
                made = self._reserve(instance)
        except MidairError:
            instance.sockets.close(self._after.sockets_but(before))
            self._after.remove()
            raise
        self._made = made
        self._effects = plan.effects(
            self._changes, instance.components, before.parts, self._after.parts
        )
        super().__init__(instance)

    def _reserve(self, instance: Instance) -> list[str]:
        """Makes the queues of those that are added; ResourceError: there is no room for them."""
        parts, made = self._after.parts, []
        new = range(self._before.parts.connmgrs, parts.connmgrs)
        if not new:
            return []
        each = parts.connmgr.arena_bytes + parts.connmgr.output_bytes
        ipc.check_space(len(new) * each, f"{len(new)} more connection managers")
        gid = instance.roster.gid
        try:
            for index in new:
                forget_connmgr(instance, index)
                for noun in names.QUEUES:
                    name = instance.runtime.queue(noun, index)
                    made.append(name)
                    ipc.open_queue(
                        name, depth=parts.queues.depth, mode=ipc.queue_mode(gid), gid=gid
                    ).close()
        except MidairError as error:
            for name in made:
                ipc.remove_queue(name)
            raise type(error)(f"{error}; nothing was changed", Exit(error.code)) from None
        return made

    # The work

    def _run(self) -> Work:
        if self._dry_run or not self._changes:
            self._instance.sockets.close(self._after.sockets_but(self._before))
            self._after.remove()
            if not self._dry_run:
                self._instance.log.info("reload: nothing to change")
            self._done()
            return
        try:
            yield from self._forward()
        except _FailedError as failure:
            self._instance.log.error("reload: %s; going back", failure)
            yield from self._back(str(failure))
            return
        self._instance.sockets.close(self._before.sockets_but(self._after))
        for effect in self._effects:
            self._instance.log.info("reload: %s", effect.text(True))
        self._done()

    def _forward(self) -> Work:
        instance, before, after = self._instance, self._before, self._after
        for index in range(before.parts.connmgrs, after.parts.connmgrs):
            yield from self._add(names.CONNMGR, index)
        due = [
            component
            for component in plan.in_order(instance.components)
            if component not in self._added
            if plan.needs_restart(component, before.parts, after.parts)
            or component.setup.config != before.file
        ]
        late = [c for c in due if c.role == names.CONNMGR and (c.index or 0) >= after.parts.serving]
        gone = [c for c in instance.components if c.role == names.MONITOR and not after.monitor]
        watching = [c for c in due if c.role == names.MONITOR and c not in gone]
        accepting = [c for c in due if c.role == names.DISPATCHER]
        for component in due:
            if component not in (*late, *gone, *watching, *accepting):
                yield from self._move_part(component)
        try:
            for it in after.doors.listening:
                if it.sock is not None:
                    listeners.listen(it.sock)
        except MidairError as error:
            raise _FailedError(str(error)) from None
        after.put_in_use(instance.runtime)
        self._given = True
        for component in (*accepting, *late):
            yield from self._move_part(component)
        self._in_place(after)
        for component in watching:
            yield from self._move_part(component)
        for component in gone:
            yield from self._end(component)
            instance.components.remove(component)
        if after.monitor is not None and before.monitor is None:
            instance.components.append(instance.roster.make(names.MONITOR, None, after))

    def _move_part(self, component: Component) -> Work:
        yield from self._move_to(component, self._setup(component, self._after))
        self._moved.append(component)

    def _in_place(self, to: Arrangement) -> None:
        """What does not take a restart: also who is started again later finds the new one."""
        self._instance.rearrange(to)
        for component in self._instance.components:
            if not component.switching and component.role != names.TRACER:
                component.setup = self._setup(component, to)

    def _add(self, role: str, index: int) -> Work:
        """Starts one more component, and waits until it is at work."""
        instance = self._instance
        component = instance.roster.make(role, index, self._after)
        component.switching = True
        instance.sockets.open_all([component])
        self._added.append(component)
        instance.components.append(component)
        self._progress(Told(Event.STARTING, component.called, component.release.version))
        process = component.candidate = instance.start(component, None, None)
        until = time.monotonic() + READY_S
        began = time.monotonic()
        while process.life is not Life.READY:
            if not process.alive:
                raise _FailedError(f"{component.called} did not start: {process.how_it_ended()}")
            if time.monotonic() > until:
                raise _FailedError(f"{component.called} was not ready within {READY_S:g} s")
            yield
        component.candidate, component.switching = None, False
        took_s = max(0.0, process.ready_at - began)
        self._progress(Told(Event.ACTIVE, component.called, ms=round(took_s * 1e3, 3)))

    # The way back

    def _back(self, failure: str) -> Work:
        """Everybody to the old configuration, whatever comes; `failure` is told at the end."""
        instance, before = self._instance, self._before
        count = self._after.parts.connmgrs
        old = before
        if self._given and self._added:
            # They may have clients: they leave as retiring ones do.
            old = before.with_connmgrs(instance.runtime, count)
        old.put_in_use(instance.runtime)
        stuck = []
        order = [*reversed(self._moved)]
        if old is not before:
            order = plan.in_order([c for c in instance.components if c.role != names.KEEPER])
            order.sort(key=lambda c: c.role != names.DISPATCHER)
        for component in order:
            try:
                yield from self._move_to(component, self._setup(component, old))
            except _FailedError as error:
                stuck.append(str(error))
        if old is before:
            for component in self._added:
                yield from self._end(component)
                instance.components.remove(component)
                instance.sockets.close(component.listen)
                assert component.index is not None
                forget_connmgr(instance, component.index)
        self._in_place(old)
        instance.sockets.close(self._after.sockets_but(before))
        self._after.remove()
        text = f"{failure}; everything is back to the old configuration"
        if stuck:
            text = f"{failure}; not everything could go back: {'; '.join(stuck)}"
        self._failed(text)

    # What is told

    def _progress(self, told: Told) -> None:
        if told.event in (Event.ACTIVE, Event.DIED):
            self._instance.log.info("reload: %s: %s", told.component, told.text)
        self._tell(told.to_json())

    def _done(self) -> None:
        done = not self._dry_run
        self._tell({"done": True, "changes": [it.to_json(done) for it in self._effects]})

    def _failed(self, why: str) -> None:
        self._instance.log.error("reload: %s", why)
        self._tell({"error": why, "code": int(Exit.FAILED)})

    @property
    def effects(self) -> list[Effect]:
        return self._effects


class Settling(Job):
    """Parts that run with another configuration than the one in use: their manager has died while
    it moved them. They are moved to the one that counts, and what nobody has is removed."""

    what = "a reload that another manager began"

    def __init__(self, instance: Instance, components: Sequence[Component]) -> None:
        self._components = components
        super().__init__(instance)

    def _run(self) -> Work:
        instance = self._instance
        stuck = []
        for component in plan.in_order(self._components):
            to, active = component.setup, component.active
            if active is not None:
                component.setup = active.setup
                try:
                    yield from self._move_to(component, to)
                except _FailedError as error:
                    stuck.append(str(error))
        if stuck:
            return self._failed("; ".join(stuck))
        for index in left_behind(instance):
            forget_connmgr(instance, index)
        instance.log.info("a reload that was interrupted is settled")

    def _progress(self, told: Told) -> None:
        if told.event is Event.ACTIVE:
            self._instance.log.info("reload: %s: %s", told.component, told.text)

    def _failed(self, why: str) -> None:
        self._instance.log.error("reload: interrupted, and not settled: %s", why)


def left_behind(instance: Instance) -> list[int]:
    """Numbers of connection managers that are not any more, and have left something."""
    place = instance.runtime
    return [
        index
        for index in range(instance.arranged.parts.ports, names.CONNMGRS_MAX)
        if ipc.segment_exists(place.segment(names.ARENA, index))
        or ipc.segment_exists(place.segment(names.JOURNAL, index))
    ]


class Removal(Job):
    """The end of a retiring connection manager, the last one, which nobody needs any more."""

    what = "the end of a connection manager"

    def __init__(
        self, instance: Instance, component: Component, tell: Callable[[Component, str], None]
    ) -> None:
        self._component = component
        self._tell = tell
        self._stuck: list[str] = []
        super().__init__(instance)

    def _run(self) -> Work:
        instance, component = self._instance, self._component
        assert component.index is not None
        before = instance.arranged
        after = before.with_connmgrs(instance.runtime, component.index)
        others = [c for c in plan.in_order(instance.components) if c is not component]
        # Whoever watches must not miss it; whoever gives clients has not given it any for long.
        yield from self._tell_all([c for c in others if c.role in names.ONLOOKERS], after)
        yield from self._end(component)
        after.put_in_use(instance.runtime)
        instance.rearrange(after)
        instance.components.remove(component)
        end_life(instance, component.index)
        others = [c for c in others if c.role not in names.ONLOOKERS]
        others.sort(key=lambda c: c.role != names.DISPATCHER)
        yield from self._tell_all(others, after)
        if self._stuck:
            self._failed("; ".join(self._stuck))
            return
        instance.sockets.close(component.listen)
        forget_connmgr(instance, component.index)
        instance.log.info("%s has retired", component.called)
        self._tell(component, "")

    def _tell_all(self, components: Sequence[Component], to: Arrangement) -> Work:
        for component in components:
            setup = self._setup(component, to)
            try:
                if component.role == names.KEEPER:  # it does not care
                    component.setup = setup
                else:
                    yield from self._move_to(component, setup)
            except _FailedError as error:
                self._stuck.append(str(error))

    def _progress(self, told: Told) -> None:
        if told.event is Event.ACTIVE:
            self._instance.log.debug("%s: %s", told.component, told.text)

    def _failed(self, why: str) -> None:
        called = self._component.called
        self._instance.log.error("%s has ended, and not everybody knows it: %s", called, why)
        self._tell(self._component, why)


def end_life(instance: Instance, index: int) -> None:
    """What was said between the router and that connection manager is over."""
    place = instance.runtime
    place.end_life(names.CONNMGR, index)
    ipc.remove_segment(place.segment(names.JOURNAL, index))
    for noun in names.QUEUES:
        ipc.remove_queue(place.queue(noun, index))


def forget_connmgr(instance: Instance, index: int) -> None:
    """Removes all that may be left of a connection manager which everybody has forgotten."""
    end_life(instance, index)
    ipc.remove_connmgr(instance.runtime, index)
    instance.roster.forget(index)
