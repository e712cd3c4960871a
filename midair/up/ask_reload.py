"""`midair reload`: asks the manager of an instance, and prints what it tells."""

from __future__ import annotations

import json
from typing import Any

from midair import names
from midair.errors import MidairError, NotRunningError
from midair.exits import Exit
from midair.process.runtime import Runtime
from midair.up import control
from midair.up.ask_upgrade import Progress
from midair.up.told import Told
from midair.up.upgrade import READY_S


def run(runtime: Runtime, dry_run: bool, as_json: bool) -> None:
    """Has the manager read its configuration again; prints how far it is. Raises what failed."""
    request = {"op": control.RELOAD, "dry_run": dry_run}
    progress = Progress()
    parts: list[dict[str, Any]] = []
    try:
        for said in control.follow(runtime, request, READY_S + control.TIMEOUT_S):
            if "error" in said:
                raise MidairError(said["error"], Exit(said["code"]))
            if "done" in said:
                progress.end()
                _show(said["changes"], parts, dry_run, as_json)
                return
            parts.append(said)
            if not as_json:
                progress.show(Told.from_json(said))
    except TimeoutError:
        raise MidairError("the manager says nothing any more; see midair status") from None
    finally:
        progress.end()
    for state in runtime.states():
        if state.role == names.MANAGER:
            raise MidairError(
                f"the manager ({state.version}) cannot reload: midair down, midair up"
            )
    raise NotRunningError(
        f"instance {runtime.instance!r} has no manager (midair up); under systemd, restart the "
        "units that use what has changed, one after the other: docs/systemd.md"
    )


def _show(
    changes: list[dict[str, Any]], parts: list[dict[str, Any]], dry_run: bool, as_json: bool
) -> None:
    if as_json:
        active = [it for it in parts if it["event"] == "active"]
        switched = [{"component": it["component"], "ms": it["ms"]} for it in active]
        print(json.dumps({"dry_run": dry_run, "changes": changes, "active": switched}, indent=2))
        return
    for change in changes:
        print(change["text"])
    if not changes:
        print("nothing to change: the file says what is in use")
