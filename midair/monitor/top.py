"""`midair top`: one page about an instance, drawn again and again."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from datetime import datetime
from types import FrameType
from typing import Any

from midair import config, names, shown
from midair.errors import NotRunningError
from midair.exits import Exit
from midair.monitor.gather import ConnRate, Rates, Snapshot, Sources
from midair.process import events
from midair.up import status
from native.stats import CLOSE_REASONS

CONNS_SHOWN = 5
EVENTS_SHOWN = 6
# The events that say how long something took, and who manages.
NOTED = (
    events.TAKEN_OVER,
    events.DIED,
    events.HUNG,
    events.BACK,
    events.RECOVERED,
    events.UPGRADED,
    events.UPGRADE_FAILED,
    events.GAVE_UP,
)


def run(args: argparse.Namespace) -> int:
    runtime = status.find(names.check_instance(args.name))
    sources = Sources(runtime)
    before = _look(sources)
    if args.once or not sys.stdout.isatty():
        time.sleep(args.interval)  # rates need two looks
        print("\n".join(page(sources, before, _look(sources))))
        return Exit.OK
    with _screen() as pressed:
        base = before
        while not pressed(args.interval):
            now = _look(sources)
            if now.at - before.at >= args.interval / 2:  # else: drawn because the window changed
                base, before = before, now
            _draw(page(sources, now if base is before else base, now))
    return Exit.OK


def _look(sources: Sources) -> Snapshot:
    snapshot = sources.look()
    if not snapshot.states:
        raise NotRunningError(f"instance {sources.runtime.instance!r} has ended", Exit.NOT_RUNNING)
    return snapshot


# The page


def page(sources: Sources, before: Snapshot, now: Snapshot) -> list[str]:
    """Its lines, however many there are."""
    rates = Rates(before, now)
    lines = _head(sources, now, rates)
    lines += ["", *_components(sources, now, rates)]
    lines += ["", *_conns("busiest connections", sorted(rates.busy(), key=_by_messages), now)]
    slow = [it for it in rates.conns if it.conn.pending]
    slow.sort(key=lambda it: (-it.conn.stuck_ns, -it.conn.pending))
    lines += ["", *_conns("slowest connections", slow, now)]
    lines += ["", *_events(sources, now)]
    return lines


def _by_messages(it: ConnRate) -> float:
    return -it.messages


def _head(sources: Sources, now: Snapshot, rates: Rates) -> list[str]:
    began = min((state.started_at for state in now.states), default=now.wall)
    fairness, busy = rates.fairness(), len(rates.busy())
    share = "-" if fairness is None else f"{fairness:.3f} ({busy} busy)"
    at = datetime.fromtimestamp(now.wall)
    closed = [
        f"{name.replace('_', ' ')} {count}"
        for name, count in zip(CLOSE_REASONS, now.closed(), strict=False)
        if count
    ]
    up = shown.duration(now.wall - began)
    return [
        f"midair {sources.runtime.instance}   up {up}   {at:%H:%M:%S}",
        f"connections {now.gauge('connections')}   "
        f"subscriptions {now.router('subscriptions')}   "
        f"messages/s in {shown.number(rates.total('messages_in'))} "
        f"out {shown.number(rates.total('messages_out'))}   "
        f"bytes/s in {shown.size(rates.total('bytes_in'))} "
        f"out {shown.size(rates.total('bytes_out'))}   "
        f"fairness {share}   shared memory {shown.size(now.shared_bytes)}",
        f"closed: {', '.join(closed) or 'none'}",
    ]


def _components(sources: Sources, now: Snapshot, rates: Rates) -> list[str]:
    head = ["component", "state", "version", "pid", "gen", "uptime", "cpu%", "memory"]
    head += ["queues", "arena", "output"]
    rows = []
    for state in now.states:
        called = names.component(state.role, state.index)
        used = now.usage.get(state.pid)
        rows.append(
            (
                called,
                state.state,
                state.version,
                str(state.pid),
                str(state.generation),
                shown.duration(state.uptime_s),
                f"{rates.cpu_percent(state.pid):.1f}",
                "-" if used is None else shown.size(used.memory),
                *_fill(now, called, state.pid),
            )
        )
    lines = shown.table(head, rows, left=3)
    return lines + [f"{called}: {why}" for called, why in sources.problems.items()]


def _fill(now: Snapshot, called: str, pid: int) -> tuple[str, str, str]:
    """How full its queues, its arena and its output are."""
    counts = now.counts.get(called)
    if counts is None or counts.pid != pid:
        return "-", "-", "-"
    gauges = counts.gauges
    if counts.role == names.ROUTER:
        return f"{sum(gauges['orders_waiting'])} waiting", "-", "-"
    if counts.role == names.DISPATCHER:
        return f"{gauges['backlog']} waiting", "-", "-"
    queues = f"{gauges['refs_queued']}/{gauges['refs_depth']} out {gauges['orders_queued']}"
    queues += f"/{gauges['orders_depth']} in" + (" stopped" if gauges["reading_stopped"] else "")
    return (
        queues,
        _percent(gauges["arena_free"], gauges["arena_chunks"]),
        _percent(gauges["output_free"], gauges["output_blocks"]),
    )


def _percent(free: int, of: int) -> str:
    return f"{100 * (of - free) / of:.1f}%" if of else "-"


def _conns(title: str, found: list[ConnRate], now: Snapshot) -> list[str]:
    if not found:
        return [f"{title}: none"]
    head = [title, "address", "id", "connmgr", "in/s", "out/s", "bytes/s", "pending", "subs"]
    head += ["stuck", "age"]
    rows = [
        (
            shown.clean(it.conn.name) or "-",
            config.join_address(it.conn.ip, it.conn.port),
            str(it.conn.uid),
            str(it.conn.connmgr),
            shown.number(it.messages_in),
            shown.number(it.messages_out),
            shown.size(it.bytes),
            shown.size(it.conn.pending),
            str(it.conn.subs),
            shown.duration(it.conn.stuck_ns / 1e9) if it.conn.stuck_ns else "-",
            shown.duration(max(0.0, now.wall - it.conn.since_ns / 1e9)),
        )
        for it in found[:CONNS_SHOWN]
    ]
    return shown.table(head, rows, left=2)


def _events(sources: Sources, now: Snapshot) -> list[str]:
    noted = sources.events(*NOTED)[-EVENTS_SHOWN:]
    if not noted:
        return ["upgrades and recoveries: none"]
    return ["upgrades and recoveries"] + [
        f"  {shown.duration(max(0.0, now.wall - it['wall_ns'] / 1e9)):>7} ago  {events.tell(it)}"
        for it in reversed(noted)
    ]


# The terminal


@contextlib.contextmanager
def _screen() -> Iterator[Any]:
    """The alternate screen, and a function that waits for `q`; both undone at the end."""
    stop: list[int] = []
    changed = [True]  # draw at once: the first time, and when the window changes its size

    def on_stop(number: int, _frame: FrameType | None) -> None:
        stop.append(number)

    def on_resize(_number: int, _frame: FrameType | None) -> None:
        changed[0] = True

    def pressed(seconds: float) -> bool:
        """Waits for that long, or until something happens. True: it is over."""
        until = time.monotonic() + (0.0 if changed[0] else seconds)
        changed[0] = False
        while not stop and not changed[0]:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select(
                [*([stdin] if stdin is not None else []), reader], [], [], left
            )
            if reader in ready:
                os.read(reader, 512)
            if stdin is not None and stdin in ready and os.read(stdin, 64) in (b"q", b"Q", b""):
                return True
            if not left:
                break
        return bool(stop)

    stdin = sys.stdin.fileno() if sys.stdin.isatty() else None
    saved = None if stdin is None else termios.tcgetattr(stdin)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    old = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGINT, on_stop),
            (signal.SIGTERM, on_stop),
            (signal.SIGWINCH, on_resize),
        )
    }
    try:
        if stdin is not None:
            tty.setcbreak(stdin)
        _write("\x1b[?1049h\x1b[?25l")
        yield pressed
    finally:
        _write("\x1b[?25h\x1b[?1049l")
        if stdin is not None and saved is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, saved)
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)


def _draw(lines: list[str]) -> None:
    """As much as the terminal has room for."""
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    columns, rows = columns or 132, rows or 50  # 0: it does not know
    fitting = [line[:columns] + "\x1b[K" for line in lines[: max(1, rows - 1)]]
    _write("\x1b[H" + "\r\n".join(fitting) + "\x1b[J")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
