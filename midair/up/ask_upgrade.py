"""`midair upgrade`: asks the manager of an instance, and prints what it tells."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict

from midair import names
from midair.errors import MidairError, NotRunningError
from midair.exits import Exit
from midair.process.runtime import Runtime
from midair.up import control, release
from midair.up.told import Event, Told
from midair.up.upgrade import ALL, ORDER


def run(runtime: Runtime, target: str, place: str | None, ready_s: float) -> None:
    """Has the manager of an instance upgrade it; prints how far it is. Raises what failed."""
    target, to = check_target(target), release.find(place)
    if refusal := release.no_way_back(runtime, to):  # the manager may be an older one
        raise MidairError(refusal)
    if target == ALL and _trips_over_a_tracer(runtime):
        raise MidairError(
            "a trace is running: the manager of this instance (0.1) would end with an upgrade of "
            "all; midair trace off first"
        )
    request = {
        "op": control.UPGRADE,
        "target": target,
        "ready_s": ready_s,
        "release": asdict(to),
    }
    progress = Progress()
    begun = False
    try:
        # Between two things it tells, the manager waits for ready_s at most.
        for said in control.follow(runtime, request, ready_s + control.TIMEOUT_S):
            told, begun = Told.from_json(said), True
            if told.event is Event.FAILED:
                raise MidairError(told.why, Exit(told.code))
            if told.event is Event.DONE:
                return
            progress.show(told)
    except TimeoutError:
        raise MidairError("the manager says nothing any more; see midair status") from None
    finally:
        progress.end()
    if begun:
        raise NotRunningError(
            "the manager has gone in the middle of it; midair up takes the instance over, and "
            "midair status shows which version works"
        )
    raise NotRunningError(
        f"instance {runtime.instance!r} has no manager (midair up); under systemd, restart its "
        "units one after the other"
    )


def check_target(text: str) -> str:
    """What can be upgraded, as it is written: `router`, `connmgr`, `connmgr/2`, `all`."""
    if text in (*ORDER, ALL) or re.fullmatch(rf"{names.CONNMGR}/[0-9]{{1,4}}", text):
        return text
    raise MidairError(
        f"{text}: there is no such component; {', '.join(ORDER)}, {names.CONNMGR}/N or {ALL}",
        Exit.USAGE,
    )


def _trips_over_a_tracer(runtime: Runtime) -> bool:
    """A manager of 0.1 has no place for a tracer in the order of an upgrade, and dies of that."""
    states = runtime.states()
    return any(state.role == names.TRACER for state in states) and any(
        state.role == names.MANAGER and state.version.startswith("0.1.") for state in states
    )


class Progress:
    """One line for each component, written as things happen."""

    def __init__(self) -> None:
        self._open = False

    def show(self, told: Told) -> None:
        if told.event is Event.STARTING:
            self.end()
            self._write(f"{told.component}: {told.text}")
        elif told.event is not Event.UPGRADED:  # the line ends with how long it took
            self._write(f" ... {told.text}")

    def end(self) -> None:
        """Ends a line that was begun."""
        if self._open:
            print(flush=True)
        self._open = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._open = True
