"""`midair fsck`: whether what lies in shared memory keeps the rules of native/README.md.

A dead instance is read in private copies of its segments, in which committed steps are finished
first, as a recovery would: what is reported is exact. A running one changes while it is read. A
finding then counts only if the same one (same connection uid, same generation of a message, same
epoch of a subscription) is there in PASSES passes PASS_S apart, during which neither the router nor
a connection manager was replaced.

Exit codes: 0 nothing but notes, 1 errors or warnings, 3 no such instance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from midair import names
from midair.errors import MidairError, MissingError, NotRunningError
from midair.exits import Exit
from midair.fsck.checks import CHECKS, ERROR, NOTE, WARNING, Finding, describe, segment_name
from midair.process import ipc, runtime
from midair.process.lease import Lease
from midair.process.runtime import Runtime
from midair.up import command as up
from midair.up import takeover
from midair.version import __version__

if TYPE_CHECKING:
    from native.fsck import Pass, Raw

# Tested by tests/fsck/test_damage.py; the same in docs/operations.md.
SEEN = (
    "What is seen: headers, sizes, offsets and high marks; reserved words; states, links, indexes "
    "and handles that lead nowhere or to what is free; sequence numbers; records of batches that "
    "wait; what two segments say differently; messages that nobody knows of. What is not: the "
    "bytes of bodies, subjects and waiting output, times and counts, slots that are free, "
    "statistics and traces: there any value may be right. So 'nothing found' does not mean that "
    "nothing was written there by mistake."
)
PASSES = 3
PASS_S = 0.2
ATTEMPTS = 25  # passes in all while components are being replaced


@dataclass
class Report:
    """What one examination found."""

    instance: str
    alive: bool
    passes: int = 0
    settled: bool = True  # False: components kept being replaced
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)  # by --repair

    def number(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def code(self) -> Exit:
        clean = self.settled and not self.number(ERROR) and not self.number(WARNING)
        return Exit.OK if clean else Exit.FAILED


# ---- what is there ---------------------------------------------------------------------------


def segments(instance: str) -> dict[tuple[str, int], str]:
    """(noun, index) -> name of every segment of the instance that this version knows.

    Without the statistics: there is nothing about them that could be wrong.
    """
    found = {}
    for path in sorted(ipc.SHM.glob(f"{_prefix(instance)}.*")):
        _, _, noun, *index = path.name.split(".")
        each = names.SEGMENTS.get(noun)
        if (
            each is None
            or noun in names.STATISTICS
            or len(index) != each
            or not all(re.fullmatch("[0-9]{1,4}", word) for word in index)
        ):
            continue
        if not index or int(index[0]) < names.CONNMGRS_MAX:
            found[noun, int(index[0]) if index else 0] = f"/{path.name}"
    return found


def _prefix(instance: str) -> str:
    """What its names begin with. Of a dead one there need not be a runtime directory."""
    try:
        return Runtime.open(instance).prefix
    except MissingError:
        return names.prefix(instance, os.geteuid())


@contextlib.contextmanager
def _mapped(name: str, flags: int, protection: int) -> Iterator[mmap.mmap | None]:
    """A segment; None while it has no size yet."""
    writable = flags == mmap.MAP_SHARED and protection & mmap.PROT_WRITE
    fd = ipc.open_existing(name, os.O_RDWR if writable else os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            yield None
            return
        with mmap.mmap(fd, size, flags, protection) as mapping:
            yield mapping
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(
    instance: str, dead: bool, flags: int, protection: int
) -> Iterator[tuple[Pass, list[Finding]]]:
    """A pass with everything of the instance in it, and what is missing."""
    from native.fsck import Pass  # here: the other commands do without the C part

    missing: list[Finding] = []
    prefix, found = _prefix(instance), segments(instance)
    with contextlib.ExitStack() as stack:
        maps = {key: stack.enter_context(_mapped(p, flags, protection)) for key, p in found.items()}
        it = stack.enter_context(Pass(dead))
        for (noun, index), mapping in maps.items():
            if mapping is None:
                missing.append(_missing(segment_name(noun, index), "has no size yet"))
            else:
                it.add(noun, index, mapping)
        count = 1 + max((index for _, index in found), default=0)
        for noun, each in names.SEGMENTS.items():
            if noun in (names.CONNTABLE, names.ARENA, names.JOURNAL, names.ROUTING):
                for index in range(count if each else 1):
                    if (noun, index) not in found and (names.PORT, index) not in found:
                        missing.append(_missing(segment_name(noun, index), "is not there"))
        for noun in names.QUEUES:
            for index in range(count):
                try:
                    queue = ipc.existing_queue(names.queue(prefix, noun, index))
                except MissingError:
                    missing.append(_missing(f"{noun}.{index}", "the queue is not there"))
                    continue
                it.add_queue(noun == names.ORDERS, index, queue.depth, queue.waiting())
                queue.close()
        yield it, missing


def _missing(segment: str, text: str) -> Finding:
    return Finding(NOTE, segment, "missing", "S2", text)


# ---- examining -------------------------------------------------------------------------------


def examine(instance: str) -> Report:
    """Checks an instance, running or not. NotRunningError: there is nothing of it."""
    alive = bool(_running(instance))
    if not alive and not segments(instance):
        raise NotRunningError(f"no instance {instance!r}, running or dead")
    return _examine_alive(instance) if alive else _examine_dead(instance)


def _examine_dead(instance: str) -> Report:
    report = Report(instance, alive=False, passes=1)
    private = mmap.PROT_READ | mmap.PROT_WRITE
    with _opened(instance, True, mmap.MAP_PRIVATE, private) as (it, missing):
        it.finish_steps()
        report.findings = missing + [describe(raw, alive=False) for raw in it.run()]
        report.counts = it.counts()
    return report


def _examine_alive(instance: str) -> Report:
    report = Report(instance, alive=True)
    kept: dict[Any, Raw] = {}
    missing: list[Finding] = []
    agreed, who = 0, None
    while agreed < PASSES:
        if report.passes == ATTEMPTS:
            report.settled = False
            break
        if report.passes:
            time.sleep(PASS_S)  # nothing tells that a finding has gone away but looking again
        before = _at_work(instance)
        if before is None and not _running(instance):
            return examine(instance)  # it died meanwhile
        try:
            with _opened(instance, False, mmap.MAP_SHARED, mmap.PROT_READ) as (it, missing):
                found = {raw.identity: raw for raw in it.run()}
                report.counts = it.counts()
        except MissingError:
            raise NotRunningError(f"instance {instance!r} has ended meanwhile") from None
        report.passes += 1
        if before is None or before != who or before != _at_work(instance):
            kept, agreed, who = found, 0 if before is None else 1, before
        else:
            kept = {key: found[key] for key in kept if key in found}
            agreed += 1
        if not kept and before is not None:
            break
    report.findings = missing + [describe(raw, alive=True) for raw in kept.values()]
    return report


def _running(instance: str) -> list[runtime.State]:
    try:
        return Runtime.open(instance).states()
    except MissingError:
        return []


def _at_work(instance: str) -> frozenset[tuple[str, int | None, int]] | None:
    """Who writes the segments now; None while one of them is being replaced."""
    active = frozenset(
        (state.role, state.index, state.pid)
        for state in _running(instance)
        if state.state == runtime.ACTIVE and state.role in (names.ROUTER, names.CONNMGR)
    )
    journals = sum(noun == names.JOURNAL for noun, _ in segments(instance))
    return active if len(active) == journals + 1 else None


# ---- repairing -------------------------------------------------------------------------------


def repair(instance: str, remove: bool) -> Report:
    """Does to a dead instance what can be done without its sockets.

    Committed steps are finished, leaked messages freed, slots of ended connections freed. What
    else is broken is left as it is: it cannot be known what was right. `remove`: everything goes.
    """
    if not segments(instance) and not _running(instance):
        raise NotRunningError(f"no instance {instance!r}, running or dead")
    try:
        found = Runtime.open(instance)
    except MissingError:
        found = Runtime.create(instance)
    held = _hold(found)
    try:
        if remove:
            gone = up.clean(found)
            return Report(instance, alive=False, done=[f"removed {what}" for what in gone])
        done = _mend(instance)
        report = _examine_dead(instance)
        report.done = done
        return report
    finally:
        for lease in held:
            with contextlib.suppress(MidairError):
                lease.release()


def _mend(instance: str) -> list[str]:
    done = []
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    with _opened(instance, True, mmap.MAP_SHARED, writable) as (it, _):
        if words := it.finish_steps():
            done.append(f"finished committed steps: {words} words stored")
        broken = [raw for raw in it.run() if CHECKS[raw.check].dead == ERROR]
        if broken:
            # A message may seem leaked because what refers to it is what is broken.
            done.append("freed nothing: what is broken may still need it (--remove removes all)")
            return done
        if count := it.free_leaks():
            done.append(f"freed {count} leaked messages")
        if count := it.free_slots():
            done.append(f"freed {count} slots of ended connections")
    return done


def _hold(found: Runtime) -> list[Lease]:
    """Takes every lease of the instance, so that nobody starts meanwhile; or says who runs."""
    alive = found.states()
    if alive:
        pids = ", ".join(str(state.pid) for state in alive)
        raise MidairError(
            f"instance {found.instance!r} is running (pids {pids}): --repair is for a dead one",
            Exit.ALREADY_RUNNING,
        )
    held = [takeover.only_manager(found)]
    count = 1 + max((index for _, index in segments(found.instance)), default=0)
    roles: list[tuple[str, int | None]] = [(names.ROUTER, None), (names.DISPATCHER, None)]
    for role, index in roles + [(names.CONNMGR, n) for n in range(count)]:
        lease = Lease(found, role, index)
        if not lease.try_acquire():
            raise MidairError(
                f"{names.component(role, index)} of instance {found.instance!r} is running "
                f"(pid {lease.holder_pid()}): --repair is for a dead one",
                Exit.ALREADY_RUNNING,
            )
        held.append(lease)
    return held


# ---- the command -----------------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """`midair fsck`, for midair/cli.py."""
    it = commands.add_parser(
        "fsck",
        help="check the shared memory of an instance, running or dead",
        description="Checks what lies in shared memory against its rules. " + _how(),
        epilog=SEEN,
    )
    it.add_argument("--name", metavar="INSTANCE", default="midair", help="default: midair")
    it.add_argument("--json", action="store_true", help="for programs")
    it.add_argument(
        "--repair",
        action="store_true",
        help="of a dead instance: finish committed steps, free leaked messages and slots",
    )
    it.add_argument("--remove", action="store_true", help="with --repair: remove all of it instead")
    it.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    instance = names.check_instance(args.name)
    if args.remove and not args.repair:
        raise MidairError("--remove goes with --repair", Exit.USAGE)
    report = repair(instance, args.remove) if args.repair else examine(instance)
    print(as_json(report) if args.json else as_text(report))
    return report.code


def _how() -> str:
    return (
        f"Of a running instance only what is found in {PASSES} passes {PASS_S * 1e3:g} ms apart "
        "is reported."
    )


def as_text(report: Report) -> str:
    """One line for each finding, a summary at the end."""
    lines = [str(finding) for finding in report.findings]
    lines += [f"repaired: {what}" for what in report.done]
    if not report.settled:
        lines.append("warning: components kept being replaced; what is above may be their doing")
    found = ", ".join(f"{report.number(kind)} {kind}s" for kind in (ERROR, WARNING, NOTE))
    how = f"running, {report.passes} passes" if report.alive else "not running"
    lines.append(f"instance {report.instance} ({how}): {found}{_counted(report.counts)}")
    if report.alive and report.findings:
        lines[-1] += ". " + _how()
    if not report.findings:
        lines[-1] += ". Bodies, times and counts are not looked at: midair fsck --help"
    return "\n".join(lines)


def _counted(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    return (
        "; {messages} live messages in {chunks} chunks, {connections} connections, {sessions} "
        "sessions, {subscriptions} subscriptions, {pending_bytes} bytes of output pending, "
        "{unsent} batches unsent, {in_flight} in flight".format(**counts)
    ) + (f"; {counts['dropped']} more findings not shown" if counts["dropped"] else "")


def as_json(report: Report) -> str:
    """The same for programs."""
    return json.dumps(
        {
            "version": __version__,
            "instance": report.instance,
            "alive": report.alive,
            "passes": report.passes,
            "settled": report.settled,
            "findings": [vars(finding) for finding in report.findings],
            "repaired": report.done,
            "counts": report.counts,
        },
        indent=2,
    )
