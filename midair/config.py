"""The configuration: one TOML file, every value optional.

Whatever the file says is either used or refused, with its line and what is allowed:
a misspelt key that is silently ignored is found on the worst day. The dataclasses below
are the table of what there is; the type of each key says what is allowed (values.py).

`midair up` writes the configuration of its parts itself, every key of it. A part may be of another
version than the manager, so there what a part does not know is no error: see `load_part`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import os
import pwd
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from midair import names, values
from midair.errors import ConfigError
from midair.toml_lines import Lines
from midair.values import integer, number, shown, size

KIB, MIB, GIB = 2**10, 2**20, 2**30
LISTENERS_MAX = 16
FILE_BYTES_MAX = 64 * KIB
AUTO = "auto"
SPIN_AUTO_US = 300
SUBSCRIPTIONS_FEW = 16
# The first line of what a manager writes for its parts begins like this.
FOR_PARTS = "# For the parts of an instance, written by midair"

SlowConsumer = Literal["disconnect", "drop-newest", "backpressure"]


_ADDRESS = re.compile(
    r"(?:\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})"
)


def split_address(text: Any) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; port 0 means any free one."""
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if not match or int(match.group(3)) > 65535:
        raise ValueError(f'{shown(text)}: "host:port" or "[ipv6]:port" is allowed')
    return match.group(1) or match.group(2), int(match.group(3))


def join_address(host: str, port: int) -> str:
    """The text `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Listener:
    """Where clients connect, what they speak there, and what differs from the [limits]."""

    address: str
    slow_consumer: SlowConsumer | None = None  # None: limits.slow_consumer
    protocol: str | None = None  # None: NATS. Which there are is known to the C part
    transport: str | None = None  # None: plain. The same goes for these
    closed: bool | None = None  # nobody can connect: it keeps the place of those that did

    @classmethod
    def read(cls, item: Any) -> Listener:
        """Of "host:port", or of a table; ValueError: what is allowed."""
        given = item if isinstance(item, dict) else {"address": item}
        if "address" not in given or given.keys() - types(cls).keys():
            raise ValueError(
                f"{shown(item)}: `address` and perhaps `slow_consumer`, `protocol`, "
                "`transport`, `closed` are allowed"
            )
        split_address(given["address"])
        if "slow_consumer" in given:
            values.read(SlowConsumer, given["slow_consumer"])
        if "protocol" in given:
            values.read(str, given["protocol"])
        if "transport" in given:
            values.read(str, given["transport"])
        if "closed" in given:
            values.read(bool, given["closed"])
        return cls(**given)

    @classmethod
    def known(cls, item: Any) -> Any:
        """Of a table, what this version knows."""
        if not isinstance(item, dict):
            return item
        return {key: value for key, value in item.items() if key in types(cls)}

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}

    def to_toml(self) -> str:
        said = self.to_json()
        if len(said) == 1:
            return json.dumps(self.address)
        return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in said.items()) + "}"


def _listeners(value: Any) -> tuple[Listener, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'{shown(value)}: a list of "host:port" strings or tables is allowed')
    if len(value) > LISTENERS_MAX:
        raise ValueError(f"{len(value)} addresses: at most {LISTENERS_MAX} are allowed")
    listeners = tuple(map(Listener.read, value))
    # A closed one has no socket: it is in nobody's way.
    opened = [item for item in listeners if not item.closed]
    for at, one in enumerate(opened):
        for other in opened[:at]:
            if same_place(one.address, other.address):
                raise ValueError(
                    f"{shown(one.address)} and {shown(other.address)}: each address and port may "
                    "be there once"
                )
    if not opened:
        raise ValueError(f"{shown(value)}: one at least must not be closed")
    return listeners


def same_place(one: str, other: str) -> bool:
    """Whether two listeners would be in each other's way. Names are not looked up."""
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    if port != other_port or port == 0:
        return False
    if host.lower() == other_host.lower():
        return True
    try:
        ip, other_ip = ipaddress.ip_address(host), ipaddress.ip_address(other_host)
    except ValueError:
        return False
    anywhere = ip.is_unspecified or other_ip.is_unspecified
    return ip.version == other_ip.version and (ip == other_ip or anywhere)


def _address(value: Any) -> Any:
    if value != "":
        split_address(value)
    return value


@dataclass(frozen=True)
class Server:
    name: Annotated[str, values.text(names.INSTANCE, names.INSTANCE_ALLOWED)] = "midair"
    listen: Annotated[tuple[Listener, ...], values.prepared(_listeners)] = (
        Listener("127.0.0.1:4222"),
    )
    lame_duck_s: Annotated[float, number(0, 86400)] = 120.0  # until the last client has to leave
    lame_duck_grace_s: Annotated[float, number(0, 86400)] = 10.0  # until the first has to


@dataclass(frozen=True)
class Limits:
    max_payload: Annotated[int, size(1, 64 * MIB)] = MIB
    max_control_line: Annotated[int, size(256, 6000)] = 4 * KIB  # it must fit a batch
    max_connections: Annotated[int, integer(1, 2**20)] = 65536
    max_subscriptions: Annotated[  # of one connection; 0: no limit
        Annotated[int, integer(0, 2**31)] | Literal["auto"],
        values.either('"auto" or an integer from 0 to 2147483648 is allowed'),
    ] = "auto"
    max_pending: Annotated[int, size(64 * KIB, 64 * GIB)] = 64 * MIB
    write_deadline_s: Annotated[float, number(0.01, 86400)] = 10.0
    ping_interval_s: Annotated[float, number(0.01, 86400)] = 120.0
    ping_max: Annotated[int, integer(1, 1000)] = 2
    name_answer_s: Annotated[float, number(0, 86400)] = 3.0  # 0: a name stays with who has it
    slow_consumer: SlowConsumer = "disconnect"
    max_messages_per_s: Annotated[int, integer(0, 10**9)] = 0  # from one connection; 0: no limit
    max_bytes_per_s: Annotated[int, size(0, 64 * GIB)] = 0  # from one connection; 0: no limit
    rate_action: Literal["throttle", "close"] = "throttle"


@dataclass(frozen=True)
class Connmgr:
    count: Annotated[int, integer(0, names.CONNMGRS_MAX)] = 0  # 0: by the number of cores
    retiring: Annotated[int, integer(0, names.CONNMGRS_MAX - 1)] = 0  # the last of them
    arena_bytes: Annotated[int, size(8 * MIB, 8 * GIB)] = 256 * MIB
    output_bytes: Annotated[int, size(128 * MIB, 64 * GIB)] = 256 * MIB
    subscriptions: Annotated[int, integer(1024, 2**24)] = 2**21


@dataclass(frozen=True)
class Router:
    user: str = ""
    subjects: Annotated[int, integer(1024, 2**28)] = 2**22
    other_ports: Annotated[int, integer(0, names.PORTS_MAX - 1)] = 0  # beside the connmgrs


@dataclass(frozen=True)
class Queues:
    depth: Annotated[int, integer(2, 65536)] = 10


@dataclass(frozen=True)
class Latency:
    spin_us: Annotated[
        Annotated[int, integer(0, 10_000)] | Literal["auto"],
        values.either('"auto" or an integer from 0 to 10000 is allowed'),
    ] = "auto"
    pin: bool = False
    flow_leases: bool = True  # decisions of the router are repeated
    pace_local: bool = False  # clients on this machine, as the kernel would

    @property
    def spin_ns(self) -> int:
        """How long to look again before sleeping; on a single core nobody else would come."""
        if isinstance(self.spin_us, int):
            return self.spin_us * 1000
        return SPIN_AUTO_US * 1000 if len(os.sched_getaffinity(0)) > 1 else 0

    @property
    def spin_adaptive(self) -> bool:
        return self.spin_us == AUTO


@dataclass(frozen=True)
class Manager:
    restart_limit: Annotated[int, integer(1, 1_000_000)] = 5
    restart_window_s: Annotated[float, number(0.1, 86400)] = 10.0
    watchdog_s: Annotated[float, number(0.1, 3600)] = 10.0
    standby: bool = False  # a second process of each, ready to take over


@dataclass(frozen=True)
class Monitor:
    listen: Annotated[str, values.prepared(_address)] = ""  # empty: no monitor


@dataclass(frozen=True)
class Trace:
    ring_bytes: Annotated[int, size(128 * KIB, 4 * GIB)] = 32 * MIB  # of each connmgr


@dataclass(frozen=True)
class Log:
    level: Literal["debug", "info", "warning", "error"] = "info"
    file: str = ""  # of `midair up`; empty: standard error


@dataclass(frozen=True)
class Config:
    """The whole configuration. Tables and keys are named as in the file."""

    server: Server = field(default_factory=Server)
    limits: Limits = field(default_factory=Limits)
    connmgr: Connmgr = field(default_factory=Connmgr)
    router: Router = field(default_factory=Router)
    queues: Queues = field(default_factory=Queues)
    latency: Latency = field(default_factory=Latency)
    manager: Manager = field(default_factory=Manager)
    monitor: Monitor = field(default_factory=Monitor)
    trace: Trace = field(default_factory=Trace)
    log: Log = field(default_factory=Log)

    @property
    def connmgrs(self) -> int:
        """How many connection managers there are, with `count = 0` worked out."""
        if self.connmgr.count:
            return self.connmgr.count
        cores = len(os.sched_getaffinity(0))
        return 1 if cores <= 2 else min(4, cores // 2)

    def counted(self) -> Config:
        """A copy whose `connmgr.count` is what there are: wherever it is read, it stays that."""
        return self.with_("connmgr", count=self.connmgrs)

    @property
    def serving(self) -> int:
        """How many of them take new clients."""
        return max(1, self.connmgrs - self.connmgr.retiring)

    @property
    def listen(self) -> str:
        """Where clients are told that they are: the first listener that is not closed."""
        return next(item.address for item in self.server.listen if not item.closed)

    @property
    def ports(self) -> int:
        """What takes part in the traffic: the connection managers first, then the others."""
        return self.connmgrs + self.router.other_ports

    @property
    def subscriptions_each(self) -> int:
        """How many one connection may have; 0: no limit."""
        if isinstance(self.limits.max_subscriptions, int):
            return self.limits.max_subscriptions
        return self.connmgr.subscriptions // 2

    @property
    def subscriptions_few(self) -> int:
        """Who has fewer gets some also of the last quarter of a connmgr's; 0: everybody does."""
        if self.limits.max_subscriptions == 0:
            return 0
        return max(SUBSCRIPTIONS_FEW, self.connmgr.subscriptions // 1024)

    @property
    def slow_consumers(self) -> list[str]:
        """What happens to slow consumers of each listener, in the order of server.listen."""
        return [item.slow_consumer or self.limits.slow_consumer for item in self.server.listen]

    def listening_on(self, addresses: Sequence[str]) -> Config:
        """A copy with the addresses replaced, in the same order."""
        old = self.server.listen
        listen = [
            dataclasses.replace(old[at], address=address) if at < len(old) else Listener(address)
            for at, address in enumerate(addresses)
        ]
        return self.with_("server", listen=tuple(listen))

    def with_(self, table: str, **given: Any) -> Config:
        """A copy with some values of one table replaced (command-line options)."""
        changed = dataclasses.replace(getattr(self, table), **given)
        return dataclasses.replace(self, **{table: changed})

    def to_toml(self) -> str:
        """Every value, as a file that `load` reads back to an equal Config."""
        lines: list[str] = []
        for table in dataclasses.fields(self):
            lines.append(f"[{table.name}]")
            kept = getattr(self, table.name)
            for key in (item.name for item in dataclasses.fields(kept)):
                value = getattr(kept, key)
                # TOML's basic strings and arrays of them are written as JSON's are.
                if isinstance(value, tuple):
                    text = f"[{', '.join(item.to_toml() for item in value)}]"
                else:
                    text = json.dumps(value)
                lines.append(f"{key} = {text}")
            lines.append("")
        return "\n".join(lines)

    def for_parts(self, version: str) -> str:
        """The same for parts that may be of another version than this one; all count the same."""
        text = self.counted().to_toml()
        return f"{FOR_PARTS} {version}: what a part does not know is left out.\n{text}"


def load(path: str | os.PathLike[str] | None) -> Config:
    """The configuration in a file of a user, or the defaults for None."""
    return Config() if path is None else parse(_text(path), os.fspath(path))


def load_part(path: str | os.PathLike[str] | None) -> Config:
    """The configuration of a part: the user's file, or what a manager wrote for its parts.

    A part may bind itself to one core later, which must not change how many connmgrs it counts.
    """
    if path is None:
        return Config().counted()
    text = _text(path)
    return parse(text, os.fspath(path), known_only=text.startswith(FOR_PARTS)).counted()


def _text(path: str | os.PathLike[str]) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes are no configuration")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def parse(text: str, name: str = "<config>", known_only: bool = False) -> Config:
    """The configuration in a text; `name` is what messages call the file.

    `known_only`: tables and keys that there are not are left out instead of refused.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, where = str(error).partition(" (at ")
        at = re.match(r"line (\d+)", where)
        line = int(at.group(1)) if at else text.count("\n") + 1
        raise ConfigError(f"{name}:{line}: {message}") from None
    except RecursionError:
        raise ConfigError(f"{name}: lists and tables are nested too deeply") from None
    except ValueError:  # what Python says of an integer of thousands of digits, without its place
        raise ConfigError(f"{name}:{_long_number(text)}: the number is too long") from None
    lines = Lines(text)
    tables: dict[str, Any] = {}
    known = types(Config)
    for table, given in data.items():
        if table not in known:
            if known_only:
                continue
            near = _near(table, known)
            raise ConfigError(f"{name}:{lines.find(table)}: {table}: there is no such table{near}")
        if not isinstance(given, dict):
            raise ConfigError(f"{name}:{lines.find(table)}: {table}: is a table: write [{table}]")
        keys = types(known[table])
        found = {}
        for key, value in given.items():
            where = f"{name}:{lines.find(table, key)}: {table}.{key}"
            if key in keys:
                if known_only and keys[key] == types(Server)["listen"] and isinstance(value, list):
                    value = [Listener.known(item) for item in value]
                try:
                    found[key] = values.read(keys[key], value)
                except ValueError as error:
                    raise ConfigError(f"{where}: {error}") from None
            elif not known_only:
                raise ConfigError(f"{where}: there is no such key{_near(key, keys)}")
        tables[table] = known[table](**found)
    conf = Config(**tables)
    # A message is reserved whole, beside 2 MiB that are kept for small ones.
    if conf.connmgr.arena_bytes < conf.limits.max_payload + 4 * MIB:
        table, key = ("connmgr", "arena_bytes") if "connmgr" in data else ("limits", "max_payload")
        raise ConfigError(
            f"{name}:{lines.find(table, key)}: {table}.{key}: connmgr.arena_bytes must be larger "
            "than limits.max_payload by 4 MiB at least"
        )
    if not known_only:
        _check_together(conf, name, lines)
    return conf


def _check_together(conf: Config, name: str, lines: Lines) -> None:
    """What a manager would find out only when it starts."""
    if conf.router.user:
        try:
            pwd.getpwnam(conf.router.user)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{name}:{lines.find('router', 'user')}: router.user: there is no user "
                f"{conf.router.user!r}"
            ) from None
    for listener in conf.server.listen if conf.monitor.listen else ():
        if not listener.closed and same_place(conf.monitor.listen, listener.address):
            raise ConfigError(
                f"{name}:{lines.find('monitor', 'listen')}: monitor.listen: "
                f"{shown(conf.monitor.listen)}: clients connect there (server.listen)"
            )


def _long_number(text: str) -> int:
    """The line of the first one that is longer than any that is allowed."""
    found = re.search(r"[0-9_]{100,}", text)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def types(table: type) -> dict[str, Any]:
    """Key -> type, with what is allowed beside it (values.meta)."""
    return get_type_hints(table, include_extras=True)


def bytes_of(text: str) -> int:
    """Of "64KiB" or "1000", for options."""
    given = int(text) if re.fullmatch("[0-9]{1,20}", text) else text
    return int(values.read(Annotated[int, size(0, 2**62)], given))


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
