"""The storm: an instance of its own, client processes that check everything, and a killer.

    storm(Options(kills=1000, seed=7)) -> Report, or StormError

It goes: start the instance, start the clients, kill until there were enough kills, have the
clients get everything that was published, look for debris, end the instance, look again.
Choices come from the seed; the moments at which they strike do not, so the same seed need
not find the same mistake at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from midair import config, names
from midair.process.runtime import Runtime
from tests.storm.debris import Debris, leftovers, own_deaths
from tests.storm.killer import Killer, StormError, plan

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "tests.storm"
START_S = 60.0
DRAIN_S = 150.0  # the clients' own patience, and a little
PARTS = (names.ROUTER, names.CONNMGR, names.DISPATCHER, names.KEEPER)
COMPONENTS = (*PARTS, names.MANAGER)
CLIENTS = (
    *("steady", "bursty", "fanout", "large", "slow", "groups", "requests", "verbose", "idle"),
    *("churn1", "churn2", "library", "asks", "sessions", "comings", "names"),
)

CONFIG = """\
[limits]
max_payload = "17MiB"
max_pending = "512MiB"
write_deadline_s = 600
name_answer_s = 60
[connmgr]
count = {connmgrs}
subscriptions = 65536
[manager]
restart_limit = 1000000
"""


@dataclass(frozen=True)
class Options:
    kills: int = 1000
    seed: int = 1
    minutes: float = 60.0  # at most
    connmgrs: int = 2
    components: tuple[str, ...] = COMPONENTS
    clients: tuple[str, ...] = CLIENTS
    extra_config: str = ""
    upgrades: bool = True
    forgive_accept: bool = False  # count clients lost between accept() and the keeper
    name: str = ""

    def named(self, name: str) -> Options:
        """The same storm on an instance of that name."""
        return dataclasses.replace(self, name=name)

    def command(self) -> str:
        """The line that starts the same storm again."""
        words = [f"python -m {PACKAGE} --seed {self.seed} --kills {self.kills}"]
        words.append(f"--minutes {self.minutes:g} --connmgrs {self.connmgrs}")
        words.append(f"--components {','.join(self.components)}")
        if self.clients != CLIENTS:
            words.append(f"--clients {','.join(self.clients)}")
        if not self.upgrades:
            words.append("--no-upgrades")
        if "standby" in self.extra_config:
            words.append("--standby")
        if self.forgive_accept:
            words.append("--forgive-accept")
        return " ".join(words)


@dataclass
class Report:
    kills: int = 0
    by_component: dict[str, int] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    turned_away: int = 0
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        sent = sum(client["sent"] for client in self.clients.values())
        received = sum(client["received"] for client in self.clients.values())
        visits = sum(client.get("visits", 0) for client in self.clients.values())
        stayed = sum(len(client["ports"]) for client in self.clients.values())
        modes: Counter[str] = Counter()
        for client in self.clients.values():
            modes.update(client.get("modes", {}))
        return (
            f"{self.kills} kills in {self.seconds:.0f} s ({_counts(self.by_component)}; "
            f"{_counts(self.by_kind)}); {sent} messages sent, {received} deliveries checked, "
            f"{stayed} connections stayed, {visits} came and went, modes: {_counts(modes)}, "
            f"{self.turned_away} turned away"
        )


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


class Client:
    """A client process and what it has said."""

    def __init__(self, name: str, port: int, seed: int, directory: Path) -> None:
        self.name = name
        self.states: dict[str, dict[str, Any]] = {}
        self.turned_away: list[str] = []
        self.stderr_path = directory / f"{name}.stderr"
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE}.clients", name, str(port), str(seed)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.out: IO[bytes] = self.process.stdout
        self.orders: IO[bytes] = self.process.stdin
        os.set_blocking(self.out.fileno(), False)
        self._text = b""

    def read(self) -> None:
        """Takes what it said; raises if it broke or died."""
        while got := self.out.read(65536):
            self._text += got
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.states[said["state"]] = said
            if said["state"] == "turned away":
                self.turned_away.append(f"{said['why']} (at {said['at']:.3f})")
            if said["state"] == "broken":
                raise StormError(f"{said['why']} (at {said['at']:.3f})")
        if self.process.poll() is not None and "closed" not in self.states:
            raise StormError(
                f"client {self.name} ended with {self.process.returncode}: "
                + self.stderr_path.read_text()[-2000:]
            )

    def tell(self, word: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.orders.write(word.encode() + b"\n")
            self.orders.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.out.close()
        with contextlib.suppress(BrokenPipeError):
            self.orders.close()


class Run:
    """One run."""

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self.options = options
        self.tell = tell
        self.directory = Path(tempfile.mkdtemp(prefix="storm-"))
        self.name = options.name or f"storm-{os.getpid()}"
        self.runtime_base = Path(os.environ.get("MIDAIR_RUNTIME_DIR") or self.directory / "run")
        self.environ = {**os.environ, "MIDAIR_RUNTIME_DIR": str(self.runtime_base)}
        self.stderr_path = self.directory / "instance.stderr"
        self.clients: list[Client] = []
        self.report = Report()
        self.killer: Killer | None = None
        self.manager: subprocess.Popen[bytes] | None = None  # the one that was started last
        self._looked = 0.0

    # The instance

    def start(self) -> int:
        """Starts the instance; its port."""
        path = self.directory / "midair.toml"
        path.write_text(CONFIG.format(connmgrs=self.options.connmgrs) + self.options.extra_config)
        manager = self.up()
        assert manager.stdout is not None
        ready, _, _ = select.select([manager.stdout], [], [], START_S)
        line = manager.stdout.readline().decode() if ready else ""
        if "listening on " not in line:
            raise StormError(f"midair up did not start: {line!r} {self.stderr_path.read_text()}")
        address = line.split("listening on ")[1].split(";")[0].split(", ")[0]
        os.environ["MIDAIR_RUNTIME_DIR"] = str(self.runtime_base)  # for Runtime.open
        self.killer = Killer(
            manager,
            self.up,
            self.components(PARTS),
            Runtime.open(self.name),
            self.directory / "kills",
            self.look,
        )
        return config.split_address(address)[1]

    def up(self) -> subprocess.Popen[bytes]:
        """Starts a manager: the first one, or one that takes over."""
        path = self.directory / "midair.toml"
        with self.stderr_path.open("ab") as stderr:
            self.manager = subprocess.Popen(
                [
                    *(sys.executable, "-m", "midair", "up", "--name", self.name),
                    *("--config", str(path), "--port", "0"),
                ],
                cwd=ROOT,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        return self.manager

    def look(self) -> None:
        """Raises when something broke: a client, the manager, or a part by itself."""
        for client in self.clients:
            client.read()
            if client.turned_away and not self.options.forgive_accept:
                raise StormError(client.turned_away[0])
        ended = self.manager is not None and self.manager.poll() is not None
        if ended and self.manager is not None and self.manager.returncode != -signal.SIGKILL:
            raise StormError(f"midair up ended with {self.manager.returncode}")
        if time.monotonic() - self._looked > 1.0:
            self._looked = time.monotonic()
            if found := own_deaths(self.stderr_path.read_text(errors="replace")):
                raise StormError("a part died by itself: " + found[0])

    def await_state(self, state: str, patience_s: float) -> None:
        assert self.killer is not None
        deadline = time.monotonic() + patience_s
        while missing := [client.name for client in self.clients if state not in client.states]:
            if time.monotonic() > deadline:
                raise StormError(f"clients not {state} within {patience_s:g} s: {missing}")
            self.killer.sleep(0.02)

    # The storm

    def run(self) -> Report:
        port = self.start()
        assert self.killer is not None
        for at, name in enumerate(self.options.clients):
            seed = self.options.seed * 1000 + at
            self.clients.append(Client(name, port, seed, self.directory))
        self.await_state("ready", START_S)
        self.rage(self.killer)
        self.tell(f"{self.killer.kills} kills done; draining")
        for client in self.clients:
            client.tell("stop")
        self.await_state("drained", DRAIN_S)
        self.look_for_debris(self.killer)
        self.down()
        self.report.seconds = time.monotonic() - self.killer.started
        shutil.rmtree(self.directory)
        return self.report

    def components(self, roles: Sequence[str]) -> list[str]:
        """The components of some roles."""
        found = []
        for role in roles:
            indexes = range(self.options.connmgrs) if role == names.CONNMGR else [None]
            found += [names.component(role, index) for index in indexes]
        return found

    def rage(self, killer: Killer) -> None:
        components = self.components(self.options.components)
        upgrades = self.options.upgrades and can_upgrade()
        self.tell(
            f"seed {self.options.seed}: {self.options.kills} kills of {', '.join(components)}"
            + (", with upgrades" if upgrades else ", without upgrades")
        )
        deadline = killer.started + self.options.minutes * 60
        told = time.monotonic()
        for action in plan(self.options.seed, components, upgrades):
            if killer.kills >= self.options.kills or time.monotonic() > deadline:
                break
            killer.do(action)
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                self.tell(f"{killer.kills} kills in {told - killer.started:.0f} s")
        killer.await_whole()
        self.report.kills = killer.kills
        self.report.by_component = dict(killer.by_component)
        self.report.by_kind = dict(killer.by_kind)

    def look_for_debris(self, killer: Killer) -> None:
        drained = {client.name: client.states["drained"] for client in self.clients}
        self.report.clients = drained
        self.report.turned_away = sum(len(client.turned_away) for client in self.clients)
        conf = config.load(self.directory / "midair.toml")
        debris = Debris(killer, conf, self.stderr_path)
        try:
            debris.connections([port for said in drained.values() for port in said["ports"]])
            debris.primary_state(sum(said["subs"] for said in drained.values()))
            debris.arenas_empty()
            debris.keeper()
            debris.descriptors()
            self.fsck()
            for client in self.clients:
                client.tell("close")
            self.await_state("closed", START_S)
            debris.connections([])
            debris.keeper()
        finally:
            debris.close()

    def cli(self, command: str) -> None:
        """`midair COMMAND`, which has to succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "midair", command, "--name", self.name],
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        if done.returncode != 0:
            raise StormError(f"midair {command}: {done.returncode}: {done.stdout}{done.stderr}")

    def fsck(self) -> None:
        """Every rule of the shared memory holds."""
        self.cli("fsck")

    def down(self) -> None:
        assert self.manager is not None
        self.cli("down")
        if self.manager.wait(START_S) != 0:
            raise StormError(f"midair up ended with {self.manager.returncode}")
        if found := leftovers(self.name, self.runtime_base / self.name):
            raise StormError(f"left after midair down: {found}")

    def end(self) -> None:
        """Ends what was started, whatever happened."""
        for client in self.clients:
            client.end()
        if self.manager is None:
            return
        if self.manager.poll() is None:
            self.manager.terminate()
            try:
                self.manager.wait(START_S)
            except subprocess.TimeoutExpired:
                self.manager.kill()
                self.manager.wait()
        if self.manager.returncode < 0:
            with contextlib.suppress(StormError):
                self.cli("down")
        assert self.manager.stdout is not None
        self.manager.stdout.close()


def can_upgrade() -> bool:
    """Whether this version knows `midair upgrade`."""
    done = subprocess.run(
        [sys.executable, "-m", "midair", "upgrade", "--help"], cwd=ROOT, capture_output=True
    )
    return done.returncode == 0


def storm(options: Options, tell: Callable[[str], None] = print) -> Report:
    """Runs one storm. StormError says what broke, and how to see it again."""
    it = Run(options, tell)
    try:
        return it.run()
    except StormError as error:
        killer = it.killer
        schedule = killer.log[-25:] if killer is not None else []
        now = f"now: {time.monotonic():.3f}, started: {killer.started:.3f}" if killer else ""
        raise StormError(
            "\n".join(
                [
                    str(error),
                    f"seed {options.seed}; the last of {len(killer.log) if killer else 0} actions"
                    f" (all: {it.directory}/kills; {now}):",
                    *schedule,
                    f"logs: {it.directory}",
                    f"again: {options.command()}",
                ]
            )
        ) from error
    finally:
        it.end()
