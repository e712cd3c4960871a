"""`midair status` and `midair down`: about an instance, from outside it."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

from midair import names, shown
from midair.errors import MidairError, MissingError, NotRunningError
from midair.exits import Exit
from midair.process import events, runtime
from midair.process.lease import Lease
from midair.process.runtime import Runtime
from midair.up import command as up
from midair.up import control, takeover
from midair.up.report import row

DOWN_S = 15.0
AGAIN_S = 0.05
EVENTS_SHOWN = 10


def gather(instance: str) -> dict[str, Any]:
    """The report on a running instance: its manager's, or (systemd) what its parts say."""
    found = find(instance)
    try:
        report = control.ask(found, control.STATUS)
        report["events"] = noted(found)
        return report
    except NotRunningError:
        states = found.states()
        if not states:
            raise _not_running(instance) from None
    try:
        addresses = json.loads(found.read("listen.json"))
    except (OSError, ValueError, RecursionError):
        addresses = []
    return {
        "instance": instance,
        "managed": any(state.managed for state in states),  # and its manager is gone
        "listen": addresses,
        "components": [row(state, max(0, state.generation - 1)) for state in states],
        "events": noted(found),
    }


def noted(found: Runtime) -> list[dict[str, Any]]:
    """The last events, without those that every start has."""
    usual = (events.UP, events.ACTIVE)
    return [it for it in events.read(found) if it.get("kind") not in usual][-EVENTS_SHOWN:]


def table(report: dict[str, Any]) -> str:
    """A report for people."""
    head = ("component", "pid", "state", "version", "generation", "uptime", "restarts")
    rows = [head]
    for item in report["components"]:
        index = item["index"]
        rows.append(
            (
                item["role"] if index is None else f"{item['role']}/{index}",
                _text(item["pid"]),
                item.get("doing") or item["state"],
                _text(item["version"]),
                _text(item["generation"]),
                "-" if item["uptime_s"] is None else shown.duration(item["uptime_s"]),
                str(item["restarts"]),
            )
        )
    lines = [f"instance {report['instance']}, listening on {', '.join(report['listen'])}"]
    lines += shown.columns(rows, left=range(len(head)))
    if report.get("managed"):
        lines.append(f"there is no manager: midair up --name {report['instance']} takes over")
    if report.get("monitor"):
        lines.append(f"monitor: http://{report['monitor']}/")
    for it in report["events"]:
        at = datetime.fromtimestamp(it["wall_ns"] / 1e9)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S}  {events.tell(it)}")
    return "\n".join(line.rstrip() for line in lines)


def down(instance: str, lame_duck: bool = False) -> str:
    """Ends an instance and waits until it is gone; what to tell the user."""
    found = find(instance)
    deadline = time.monotonic() + DOWN_S
    while True:
        try:
            more = {"lame_duck": True} if lame_duck else {}
            answer = control.ask(found, control.DOWN, **more)
            pid, patience_s = answer["pid"], DOWN_S + answer.get("lame_duck_s", 0.0)
            break
        except NotRunningError:
            lease = Lease(found, names.MANAGER)
            if lease.try_acquire():
                return _end_without_manager(found)
            if time.monotonic() > deadline:
                takeover.only_manager(found)  # says who has it
            time.sleep(AGAIN_S)  # one that has just been started, or is just ending
    if not takeover.wait_gone([pid], patience_s):
        raise MidairError(f"instance {instance!r} (pid {pid}) has not ended in {patience_s:g} s")
    return f"instance {instance!r} has ended"


def _end_without_manager(found: Runtime) -> str:
    """For who has the manager's lease: there is nobody else who would do it."""
    strangers = [state.pid for state in takeover.parts(found) if not state.managed]
    if strangers:
        raise MidairError(
            f"instance {found.instance!r} was not started by `midair up` (pids "
            f"{', '.join(map(str, strangers))}): stop it where it was started, "
            "for example with systemctl"
        )
    ended = takeover.end_parts(found)
    up.clean(found)
    if ended:
        return f"instance {found.instance!r} has ended; its manager was gone, its parts were not"
    raise NotRunningError(
        f"instance {found.instance!r} was not running any more; removed what it had left"
    )


def find(instance: str) -> Runtime:
    """The runtime directory of an instance that has been started, or an error with advice."""
    try:
        return Runtime.open(instance)
    except MissingError:
        raise _not_running(instance) from None


def _not_running(instance: str) -> NotRunningError:
    others = runtime.others(instance)
    hint = f"; running: {', '.join(others)} (use --name)" if others else "; start it: midair up"
    return NotRunningError(f"instance {instance!r} is not running{hint}", Exit.NOT_RUNNING)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
