"""`midair trace on|off|status`: what is traced is changed while everything goes on."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from midair import names
from midair.errors import MidairError, NotRunningError, PermissionsError
from midair.exits import Exit
from midair.process import trust
from midair.process.runtime import Runtime
from midair.trace import request as requests
from midair.trace.request import DONE, FAILED, OFF, ON, Request, Status
from midair.up import control, status

ON_S = 20.0  # a tracer takes less to start
OFF_S = 120.0  # and to write what is in the rings
POLL_S = 0.02
EVERY_MAX = 2**31


def add_commands(commands: Any) -> None:
    """Adds `trace` to the parser of `midair`."""
    it = commands.add_parser(
        "trace",
        help="record where the time of messages goes, in Parquet files",
        description="Records each delivery of a running instance, or one of many, in a run folder "
        "that `midair dashboard` reads. Nothing is restarted.",
    )
    actions = it.add_subparsers(required=True, metavar="ACTION")

    it = actions.add_parser("on", help="begin a run; during one: change its sampling")
    it.add_argument("--sample", type=_sample, default=100, metavar="1/N", help="default: 1/100")
    it.add_argument("--run", dest="run_id", metavar="ID", help="default: the time")
    it.add_argument(
        "--out", metavar="DIR", default="traces", help="run folders are made here (default: traces)"
    )
    _add_name(it)
    it.set_defaults(run_command=_on, run=_run)

    it = actions.add_parser("off", help="end the run: its folder is complete after this")
    _add_name(it)
    it.set_defaults(run_command=_off, run=_run)

    it = actions.add_parser("status", help="what is traced, and how much has been written")
    it.add_argument("--json", action="store_true", help="for programs")
    _add_name(it)
    it.set_defaults(run_command=_status, run=_run)


def _add_name(it: argparse.ArgumentParser) -> None:
    it.add_argument("--name", metavar="INSTANCE", default="midair", help="default: midair")


def _run(args: argparse.Namespace) -> int:
    found = status.find(names.check_instance(args.name))
    code: int = args.run_command(found, args)
    return code


def _on(found: Runtime, args: argparse.Namespace) -> int:
    before = running(found)
    request = begin(found, args.run_id, Path(args.out), args.sample)
    what = "every message" if request.every == 1 else f"one of {request.every} messages"
    verb = "tracing" if before is None else "now tracing"
    print(f"{verb} {what} to {request.folder}; stop: midair trace off", flush=True)
    return Exit.OK


def _off(found: Runtime, args: argparse.Namespace) -> int:
    request, done = end(found)
    dropped = f", {done.dropped:,} dropped" if done.dropped else ""
    print(f"{done.records:,} records{dropped}, {done.events:,} events in {request.folder}")
    return Exit.OK


def _status(found: Runtime, args: argparse.Namespace) -> int:
    request, said = requests.read_request(found), requests.read_status(found)
    on = running(found)
    if args.json:
        shown = {
            "on": on is not None,
            "request": None if request is None else asdict(request),
            "status": None if said is None else asdict(said),
        }
        print(json.dumps(shown, indent=2))
        return Exit.OK
    if on is None or said is None:
        print("nothing is traced")
        if said is not None and request is not None and said.number == request.number:
            print(f"last run: {request.folder}: {said.state}, {said.records:,} records{_why(said)}")
        return Exit.OK
    print(
        f"run {on.run}, 1/{on.every}, for {(time.monotonic_ns() - on.started_ns) / 1e9:.0f} s: "
        f"{said.records:,} records ({said.bytes / 1e6:.1f} MB), {said.dropped:,} dropped, "
        f"{said.events:,} events in {on.folder}"
    )
    return Exit.OK


def _why(said: Status) -> str:
    return f" ({said.error})" if said.error else ""


def running(found: Runtime) -> Request | None:
    """The run that is going on."""
    request, said = requests.read_request(found), requests.read_status(found)
    if request is None or request.state != ON:
        return None
    over = said is not None and said.number == request.number and said.state in (DONE, FAILED)
    return None if over else request


def _give(folder: Path, owner: os.stat_result) -> None:
    """To whom the directory around it belongs, if root asks: a tracer may be somebody else.

    It may have been there, and be somebody else's, or a link.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | trust.OPEN_FLAGS)
    try:
        about = os.fstat(fd)
        if about.st_uid not in (os.geteuid(), owner.st_uid):
            raise PermissionsError(
                f"{folder} belongs to another user (uid {about.st_uid}): not used"
            )
        if os.geteuid() == 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)
    finally:
        os.close(fd)


def begin(
    found: Runtime,
    run: str | None,
    out: Path,
    every: int,
    settings: dict[str, Any] | None = None,
) -> Request:
    """Begins a run, or changes the sampling of the one that is going on."""
    from midair.trace.run_folder import check_run_id
    from midair.trace.tracer import missing_packages

    if missing := missing_packages():
        raise MidairError(missing, Exit.FAILED)
    now = running(found)
    if now is not None:
        if run is not None and run != now.run:
            raise MidairError(f"run {now.run} is going on: midair trace off ends it")
        request = replace(now, every=every, change=now.change + 1)
    else:
        before = requests.read_request(found)
        run = check_run_id(run or datetime.now().strftime("%Y%m%d-%H%M%S"))
        folder = out.absolute() / run
        if folder.is_dir() and any(folder.iterdir()):
            raise MidairError(f"{folder}: there is a run already; choose another --run", Exit.USAGE)
        try:
            out.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            _give(folder, out.stat())
        except OSError as error:
            raise MidairError(f"{folder}: {error.strerror}") from None
        number = 1 if before is None else before.number + 1
        request = Request(
            number, 1, run, str(folder), every, ON, time.monotonic_ns(), settings or {}
        )
    requests.write_request(found, request)
    managed = _ask(found, want=True)
    _wait(found, request, ON_S, managed)
    return request


def end(
    found: Runtime, checks: dict[str, Any] | None = None, settings: dict[str, Any] | None = None
) -> tuple[Request, Status]:
    """Ends the run that is going on; returns when its folder is complete."""
    now = running(found)
    request = requests.read_request(found)
    if now is None and (request is None or request.state != OFF):
        raise MidairError("nothing is traced")
    if now is not None:
        request = replace(
            now,
            state=OFF,
            change=now.change + 1,
            checks=checks or {},
            settings={**now.settings, **(settings or {})},
        )
        requests.write_request(found, request)
    assert request is not None
    said = _wait(found, request, OFF_S, _ask(found, want=True))
    _ask(found, want=False)
    return request, said


def _ask(found: Runtime, want: bool) -> bool:
    """Tells the manager whether a tracer is needed. False: there is no manager."""
    for _ in control.follow(found, {"op": control.TRACE, "want": want}, control.TIMEOUT_S):
        return True
    return False


def _wait(found: Runtime, request: Request, timeout_s: float, managed: bool) -> Status:
    """Until the tracer has done what is asked for."""
    wanted = (DONE,) if request.state == OFF else (ON, DONE)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        said = requests.read_status(found)
        if said is not None and said.number == request.number and said.change >= request.change:
            if said.state in wanted:
                return said
            if said.state == FAILED:
                raise MidairError(said.error)
        time.sleep(POLL_S)
    if managed:
        raise MidairError("the tracer does not answer; see the log of midair up", Exit.TIMEOUT)
    raise NotRunningError("no tracer answers, and there is no midair up: start midair-tracer")


def _sample(text: str) -> int:
    one, slash, many = text.partition("/")
    number = many if slash and one == "1" else text
    if not re.fullmatch("[0-9]{1,10}", number) or not 1 <= int(number) < EVERY_MAX:
        raise argparse.ArgumentTypeError("1/1 (every message), 1/10, 1/100, ...")
    return int(number)
