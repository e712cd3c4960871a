"""`midair drill`: everything that may happen to an instance, under load, and what came of it."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from midair import arguments, config, names
from midair.arguments import positive
from midair.errors import MidairError, NotRunningError
from midair.exits import Exit
from midair.process import questions, spawn
from midair.process.runtime import ACTIVE, Runtime
from midair.trace import commands as trace
from midair.up import status

UPGRADES = (names.ROUTER, names.DISPATCHER, names.CONNMGR, names.KEEPER)
KILL = "kill-9"
EVENTS = (*UPGRADES, KILL)
EVENT_EVERY_S = 6.0
START_S = 60.0
BACK_S = 30.0  # a killed component is at work again
ARRIVE_S = 60.0  # everything sent has arrived
POLL_S = 0.05


def add_command(commands: Any) -> None:
    """Adds `drill` to the parser of `midair`."""
    it = commands.add_parser(
        "drill",
        help="upgrade and kill everything under load, check every message, draw what happened",
        description="Starts an instance, puts load on it, upgrades and kills its processes, and "
        "checks that no connection ended and no message was lost, doubled or reordered. Every "
        "delivery is traced; at the end there is a page about it (needs Java and "
        "pip install 'midair[spark]'; --no-report does without). Ends with 1 if a promise was "
        "broken.",
    )
    it.add_argument("--out", metavar="DIR", default="drill", help="default: drill")
    it.add_argument(
        "--minutes",
        type=arguments.number(0.05, 24 * 60),
        default=2.0,
        metavar="M",
        help="default: 2",
    )
    it.add_argument(
        "--rate",
        type=positive,
        default=1000,
        metavar="N",
        help="messages a second (default: 1000)",
    )
    it.add_argument(
        "--connections",
        type=positive,
        default=20,
        metavar="N",
        help="publishers; there is a subscriber for each, and one for all (default: 20)",
    )
    it.add_argument("--size", type=positive, default=128, metavar="BYTES", help="default: 128")
    it.add_argument(
        "--events",
        type=_events,
        default=list(EVENTS),
        metavar="LIST",
        help=f"some of {','.join(EVENTS)} (default: all); the first four are upgrades",
    )
    it.add_argument("--connmgrs", type=positive, default=2, metavar="N", help="default: 2")
    it.add_argument(
        "--no-standby",
        action="store_true",
        help="without a second process of each part that waits for the first one to die",
    )
    it.add_argument("--name", metavar="INSTANCE", help="take this instance, which is running")
    it.add_argument("--no-report", action="store_true", help="end with the trace run")
    it.set_defaults(run=run)


class Client:
    """A process of clients.py."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "midair.drill.clients", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._what = str(arguments[0])
        self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(questions.line(question))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MidairError(f"the {self._what} ended by themselves ({self._process.wait()})")
        return questions.parse(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Drill:
    """One drill."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self._run = datetime.now().strftime("drill-%Y%m%d-%H%M%S")
        self._out = Path(args.out).absolute()
        self.folder = self._out / self._run
        self._done: list[str] = []
        self._victims: Iterator[str] = iter(())

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def run(self) -> dict[str, int]:
        """What the clients counted. The instance, if it is our own, has ended after this."""
        args = self._args
        self._out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            found = stack.enter_context(self._instance())
            host, port = config.split_address(status.gather(found.instance)["listen"][0])
            load = {
                "rate": args.rate,
                "connections": args.connections,
                "size": args.size,
                "minutes": args.minutes,
                "events": args.events,
            }
            trace.begin(found, self._run, self._out, 1, {"load": load})
            self.tell(f"tracing to {self.folder}")
            try:
                checks = self._load(found, host, port)
            except BaseException:
                trace.end(found)
                raise
            self.tell("writing the rest of the trace")
            _, done = trace.end(found, checks)
            dropped = f", {done.dropped:,} dropped" if done.dropped else ""
            self.tell(f"{done.records:,} records{dropped}, {done.events} events")
        return checks

    @contextmanager
    def _instance(self) -> Iterator[Runtime]:
        if self._args.name:
            yield status.find(names.check_instance(self._args.name))
            return
        name = f"drill-{os.getpid()}"
        self.tell(f"starting an instance with {self._args.connmgrs} connection managers")
        command = [sys.executable, "-m", "midair", "up", "--name", name, "--port", "0"]
        command += ["--connmgrs", str(self._args.connmgrs)]
        standby = "false" if self._args.no_standby else "true"
        config_path = self._out / f"{self._run}.toml"
        config_path.write_text(f"[manager]\nstandby = {standby}\n")
        command += ["--config", str(config_path)]
        log_path = self._out / f"{self._run}.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the drill, which ends it
                preexec_fn=lambda: spawn.end_with_parent(signal.SIGTERM),
            )
            try:
                self._await_up(name, process, log_path)
                yield status.find(name)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()

    def _await_up(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        def is_up() -> bool:
            if process.poll() is not None:
                lines = log_path.read_text(errors="replace").splitlines() or [""]
                raise MidairError(f"the instance did not start: {lines[-1]} (see {log_path})")
            return "is listening on" in log_path.read_text(errors="replace")

        _wait(is_up, START_S, f"instance {name} is not up; see {log_path}")

    def _load(self, found: Runtime, host: str, port: int) -> dict[str, int]:
        args = self._args
        subscribers = publishers = None
        try:
            subscribers = Client("subscribers", host, port, args.connections)
            publishers = Client("publishers", host, port, args.connections, args.rate, args.size)
            self.tell(
                f"{args.connections} publishers and {args.connections + 1} subscribers, "
                f"{args.rate:,} messages a second, {args.minutes:g} min"
            )
            self._events(found, publishers, subscribers)
            sent = publishers.ask(stop=True)
            self.tell(f"{sent['sent']:,} messages sent, {len(self._done)} events")
            return self._settle(publishers, subscribers)
        finally:
            for client in (publishers, subscribers):
                if client is not None:
                    client.end()

    def _settle(self, publishers: Client, subscribers: Client) -> dict[str, int]:
        """Until everything sent has arrived, or nothing does any more."""
        until, seen = time.monotonic() + ARRIVE_S, -1
        while True:
            sent = publishers.ask()
            got = subscribers.ask(numbers=sent["numbers"])
            if got["delivered"] != seen:
                seen, until = got["delivered"], time.monotonic() + ARRIVE_S
            if (not got["lost"] and not sent["waiting"]) or time.monotonic() > until:
                break
            time.sleep(POLL_S)
        return {
            "sent": sent["sent"],
            "delivered": got["delivered"],
            "lost": got["lost"],
            "doubled": got["doubled"] + got["strays"],
            "reordered": got["reordered"],
            "connections": 2 * self._args.connections + 1,
            "connections_ended": sent["ended"] + got["ended"],
        }

    def _events(self, found: Runtime, publishers: Client, subscribers: Client) -> None:
        seconds, events = self._args.minutes * 60, self._args.events
        every_s = min(EVENT_EVERY_S, seconds / (len(events) + 1))
        begin = time.monotonic()
        self._victims = itertools.cycle(_parts(found))
        for number, event in enumerate(itertools.cycle(events), 1):
            due = begin + number * every_s
            if due > begin + seconds - every_s / 2:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            what = self._kill(found) if event == KILL else self._upgrade(found, event)
            self._done.append(what)
            got, sent = subscribers.ask(), publishers.ask()
            broken = got["doubled"] + got["reordered"] + got["ended"] + sent["ended"]
            self.tell(
                f"{what}; {sent['sent']:,} sent, {got['delivered']:,} delivered"
                + (f", {broken} PROMISES BROKEN" if broken else "")
            )
        time.sleep(max(0.0, begin + seconds - time.monotonic()))

    def _upgrade(self, found: Runtime, target: str) -> str:
        command = [sys.executable, "-m", "midair", "upgrade", target, "--name", found.instance]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise MidairError(f"upgrade {target}: {(done.stderr or done.stdout).strip()}")
        return f"upgraded {target}"

    def _kill(self, found: Runtime) -> str:
        victim = next(self._victims)
        pid = _pid(found, victim)
        if pid is None:
            raise MidairError(f"{victim} is not at work")
        os.kill(pid, signal.SIGKILL)
        _wait(lambda: _pid(found, victim) not in (None, pid), BACK_S, f"{victim} is not back")
        return f"killed {victim} (pid {pid})"


def _parts(found: Runtime) -> list[str]:
    """What can be killed."""
    roles = (names.ROUTER, names.CONNMGR, names.DISPATCHER, names.KEEPER)
    states = [it for it in found.states() if it.state == ACTIVE and it.role in roles]
    states.sort(key=lambda it: (roles.index(it.role), it.index or 0))
    return [names.component(it.role, it.index) for it in states]


def _pid(found: Runtime, called: str) -> int | None:
    """The process that is at work as this component."""
    for state in found.states():
        if state.state == ACTIVE and names.component(state.role, state.index) == called:
            return state.pid
    return None


def _wait(condition: Callable[[], bool], timeout_s: float, failure: str) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise MidairError(failure, Exit.TIMEOUT)
        time.sleep(POLL_S)


def verdict(checks: dict[str, int]) -> tuple[bool, str]:
    """(whether all promises were kept, what to say)."""
    broken = {
        name: checks[name]
        for name in ("lost", "doubled", "reordered", "connections_ended")
        if checks[name]
    }
    counts = f"{checks['sent']:,} messages sent, {checks['delivered']:,} deliveries checked"
    if not broken:
        return True, (
            f"all promises kept: {counts}; none lost, doubled or reordered; "
            f"none of {checks['connections']} connections ended"
        )
    said = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in broken.items())
    return False, f"PROMISES BROKEN: {said} ({counts})"


def run(args: argparse.Namespace) -> int:
    """The whole drill: its exit code."""
    from midair.trace.tracer import missing_packages

    if missing := missing_packages():
        raise MidairError(missing)
    if not args.no_report:
        _check_report()
    drill = Drill(args)
    try:
        checks = drill.run()
    except NotRunningError as error:
        raise MidairError(f"the instance has gone: {error}") from None
    kept, text = verdict(checks)
    if not args.no_report:
        drill.tell("making the report (Spark)")
        _report(drill.folder, sys.stdout)
    print(text, flush=True)
    return Exit.OK if kept else Exit.FAILED


DASHBOARD = [sys.executable, "-m", "midair", "dashboard"]


def _check_report() -> None:
    """Raises what would keep the report from being made, before the load instead of after it."""
    done = subprocess.run([*DASHBOARD, "--check"], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2].removeprefix("midair: ")
        raise MidairError(said, Exit(done.returncode))


def _report(folder: Path, out: IO[str]) -> None:
    done = subprocess.run([*DASHBOARD, str(folder)], stdout=subprocess.PIPE, text=True)
    out.write(done.stdout)
    out.flush()
    if done.returncode != 0:
        raise MidairError(f"no report: midair dashboard {folder} ended with {done.returncode}")


def _events(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    wrong = [word for word in words if word not in EVENTS]
    if wrong or not words:
        raise argparse.ArgumentTypeError(f"some of {','.join(EVENTS)}")
    return words
