"""The configuration: one TOML file, every value optional.

Whatever the file says is either used or refused, with its line and what is allowed:
a misspelt key that is silently ignored is found on the worst day. The dataclasses below
are the table of what there is; `_key` beside each default says what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midair import names
from midair.errors import ConfigError, MidairError
from midair.toml_lines import Lines

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
KIB, MIB, GIB = 2**10, 2**20, 2**30
LISTENERS_MAX = 16
SLOW_CONSUMER = "disconnect drop-newest backpressure"


def _key(default: Any, kind: str, low: float = 0, high: float = 0, choices: str = "") -> Any:
    """A field with its default and what is allowed: `kind` is the name of a reader below."""
    meta = {"kind": kind, "low": low, "high": high, "choices": tuple(choices.split())}
    if isinstance(default, tuple):
        return field(default_factory=lambda: default, metadata=meta)
    return field(default=default, metadata=meta)


class Listener(str):
    """Where clients connect: the text "host:port", and what differs from the [limits] there."""

    slow_consumer: str = ""  # empty: limits.slow_consumer

    @classmethod
    def make(cls, address: str, slow_consumer: str = "") -> Listener:
        made = cls(address)
        made.slow_consumer = slow_consumer
        return made

    def to_toml(self) -> str:
        if not self.slow_consumer:
            return json.dumps(self)
        return f"{{address = {json.dumps(self)}, slow_consumer = {json.dumps(self.slow_consumer)}}}"

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True and (
            self.slow_consumer == getattr(other, "slow_consumer", "")
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


@dataclass(frozen=True)
class Server:
    name: str = _key("midair", "instance")
    listen: tuple[Listener, ...] = _key((Listener("127.0.0.1:4222"),), "listeners")


@dataclass(frozen=True)
class Limits:
    max_payload: int = _key(MIB, "size", 1, 64 * MIB)
    max_control_line: int = _key(4 * KIB, "size", 256, 6000)  # it must fit a batch
    max_connections: int = _key(65536, "integer", 1, 2**20)
    max_subscriptions: int = _key(0, "integer", 0, 2**31)  # of one connection; 0: no limit
    max_pending: int = _key(64 * MIB, "size", 64 * KIB, 64 * GIB)
    write_deadline_s: float = _key(10.0, "number", 0.01, 86400)
    ping_interval_s: float = _key(120.0, "number", 0.01, 86400)
    ping_max: int = _key(2, "integer", 1, 1000)
    slow_consumer: str = _key("disconnect", "choice", choices=SLOW_CONSUMER)
    max_messages_per_s: int = _key(0, "integer", 0, 10**9)  # from one connection; 0: no limit
    max_bytes_per_s: int = _key(0, "size", 0, 64 * GIB)  # likewise
    rate_action: str = _key("throttle", "choice", choices="throttle close")


@dataclass(frozen=True)
class Connmgr:
    count: int = _key(0, "integer", 0, names.CONNMGRS_MAX)  # 0: by the number of cores
    arena_bytes: int = _key(256 * MIB, "size", 8 * MIB, 8 * GIB)
    output_bytes: int = _key(256 * MIB, "size", 128 * MIB, 64 * GIB)
    subscriptions: int = _key(2**21, "integer", 1024, 2**24)


@dataclass(frozen=True)
class Router:
    user: str = _key("", "string")
    subjects: int = _key(2**22, "integer", 1024, 2**28)


@dataclass(frozen=True)
class Queues:
    depth: int = _key(10, "integer", 2, 65536)


AUTO = "auto"
SPIN_AUTO_US = 300


@dataclass(frozen=True)
class Latency:
    spin_us: int | str = _key(AUTO, "auto", 0, 10_000)
    pin: bool = _key(False, "boolean")
    flow_leases: bool = _key(True, "boolean")  # decisions of the router are repeated
    pace_local: bool = _key(False, "boolean")  # clients on this machine, as the kernel would

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
    restart_limit: int = _key(5, "integer", 1, 1_000_000)
    restart_window_s: float = _key(10.0, "number", 0.1, 86400)
    watchdog_s: float = _key(10.0, "number", 0.1, 3600)
    standby: bool = _key(False, "boolean")  # a second process of each, ready to take over


@dataclass(frozen=True)
class Monitor:
    listen: str = _key("", "address")  # empty: no monitor


@dataclass(frozen=True)
class Trace:
    ring_bytes: int = _key(32 * MIB, "size", 128 * KIB, 4 * GIB)  # of each connmgr


@dataclass(frozen=True)
class Log:
    level: str = _key("info", "choice", choices="debug info warning error")


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

    @property
    def slow_consumers(self) -> list[str]:
        """What happens to slow consumers of each listener, in the order of server.listen."""
        return [item.slow_consumer or self.limits.slow_consumer for item in self.server.listen]

    def listening_on(self, addresses: Sequence[str]) -> Config:
        """A copy with the addresses replaced, in the same order."""
        policies = [item.slow_consumer for item in self.server.listen]
        given = zip(addresses, [*policies, *[""] * len(addresses)], strict=False)
        return self.with_("server", listen=tuple(Listener.make(*item) for item in given))

    def with_(self, table: str, **values: Any) -> Config:
        """A copy with some values of one table replaced (command-line options)."""
        changed = dataclasses.replace(getattr(self, table), **values)
        return dataclasses.replace(self, **{table: changed})

    def to_toml(self) -> str:
        """Every value, as a file that `load` reads back to an equal Config."""
        lines: list[str] = []
        for table in dataclasses.fields(self):
            lines.append(f"[{table.name}]")
            values = getattr(self, table.name)
            for key in (item.name for item in dataclasses.fields(values)):
                value = getattr(values, key)
                # TOML's basic strings and arrays of them are written as JSON's are.
                if isinstance(value, tuple):
                    text = f"[{', '.join(item.to_toml() for item in value)}]"
                else:
                    text = json.dumps(value)
                lines.append(f"{key} = {text}")
            lines.append("")
        return "\n".join(lines)


def load(path: str | os.PathLike[str] | None) -> Config:
    """The configuration in a file, or the defaults for None."""
    if path is None:
        return Config()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    return parse(text, os.fspath(path))


def parse(text: str, name: str = "<config>") -> Config:
    """The configuration in a text; `name` is what messages call the file."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, where = str(error).partition(" (at ")
        at = re.match(r"line (\d+)", where)
        line = int(at.group(1)) if at else text.count("\n") + 1
        raise ConfigError(f"{name}:{line}: {message}") from None
    lines = Lines(text)
    tables: dict[str, Any] = {}
    known = {table.name: table.default_factory for table in dataclasses.fields(Config)}
    for table, values in data.items():
        if table not in known:
            near = _near(table, known)
            raise ConfigError(f"{name}:{lines.find(table)}: {table}: there is no such table{near}")
        if not isinstance(values, dict):
            raise ConfigError(f"{name}:{lines.find(table)}: {table}: is a table: write [{table}]")
        kind: Any = known[table]
        tables[table] = kind(**_table(kind, table, values, name, lines))
    conf = Config(**tables)
    # A message is reserved whole, beside 2 MiB that are kept for small ones.
    if conf.connmgr.arena_bytes < conf.limits.max_payload + 4 * MIB:
        table, key = ("connmgr", "arena_bytes") if "connmgr" in data else ("limits", "max_payload")
        raise ConfigError(
            f"{name}:{lines.find(table, key)}: {table}.{key}: connmgr.arena_bytes must be larger "
            "than limits.max_payload by 4 MiB at least"
        )
    return conf


def _table(
    kind: Any, table: str, values: dict[str, Any], name: str, lines: Lines
) -> dict[str, Any]:
    fields = {item.name: item for item in dataclasses.fields(kind)}
    result = {}
    for key, value in values.items():
        where = f"{name}:{lines.find(table, key)}: {table}.{key}"
        if key not in fields:
            raise ConfigError(f"{where}: there is no such key{_near(key, fields)}")
        meta = fields[key].metadata
        try:
            result[key] = _READERS[meta["kind"]](value, meta)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return result


def _near(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


# Readers: a value from TOML and the field's metadata to the value used, or ValueError.


def _integer(value: Any, meta: Any) -> int:
    low, high = int(meta["low"]), int(meta["high"])
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{_shown(value)}: an integer from {low} to {high} is allowed")
    return value


def _number(value: Any, meta: Any) -> float:
    low, high = meta["low"], meta["high"]
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"{_shown(value)}: a number from {low:g} to {high:g} is allowed")
    return float(value)


def _auto(value: Any, meta: Any) -> int | str:
    low, high = int(meta["low"]), int(meta["high"])
    if value == AUTO or (type(value) is int and low <= value <= high):
        return value  # type: ignore[no-any-return]
    raise ValueError(f'{_shown(value)}: "{AUTO}" or an integer from {low} to {high} is allowed')


def _size(value: Any, meta: Any) -> int:
    low, high = int(meta["low"]), int(meta["high"])
    allowed = f'{low} to {high} bytes are allowed, as an integer or like "64KiB", "256MB"'
    result = value
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", value.strip())
        if not match or match.group(2).upper() not in _UNITS:
            raise ValueError(f"{_shown(value)}: {allowed}")
        result = int(match.group(1)) * _UNITS[match.group(2).upper()]
    if type(result) is not int or not low <= result <= high:
        raise ValueError(f"{_shown(value)}: {allowed}")
    return result


def size(text: str) -> int:
    """Bytes of "64KiB" or "1000", for options."""
    return _size(int(text) if text.isdecimal() else text, {"low": 0, "high": 2**62})


def _boolean(value: Any, _meta: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)}: true or false is allowed")
    return value


def _string(value: Any, _meta: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)}: a string is allowed")
    return value


def _choice(value: Any, meta: Any) -> str:
    if not isinstance(value, str) or value not in meta["choices"]:
        raise ValueError(f"{_shown(value)}: one of {', '.join(meta['choices'])} is allowed")
    return value


def _instance(value: Any, meta: Any) -> str:
    try:
        return names.check_instance(_string(value, meta))
    except MidairError as error:
        raise ValueError(str(error)) from None


def _listeners(value: Any, _meta: Any) -> tuple[Listener, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'{_shown(value)}: a list of "host:port" strings or tables is allowed')
    if len(value) > LISTENERS_MAX:
        raise ValueError(f"{len(value)} addresses: at most {LISTENERS_MAX} are allowed")
    return tuple(_listener(item) for item in value)


def _listener(item: Any) -> Listener:
    if not isinstance(item, dict):
        split_address(item)
        return Listener.make(item)
    unknown = set(item) - {"address", "slow_consumer"}
    if unknown or "address" not in item:
        raise ValueError(f"{_shown(item)}: `address` and perhaps `slow_consumer` are allowed")
    split_address(item["address"])
    policy = item.get("slow_consumer", "")
    if "slow_consumer" in item:
        _choice(policy, {"choices": tuple(SLOW_CONSUMER.split())})
    return Listener.make(item["address"], policy)


def _address(value: Any, _meta: Any) -> str:
    if value != "":
        split_address(value)
    return str(value)


def split_address(text: Any) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; port 0 means any free one."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/\s]+)):(\d{1,5})", str(text))
    if not isinstance(text, str) or not match or int(match.group(3)) > 65535:
        raise ValueError(f'{_shown(text)}: "host:port" or "[ipv6]:port" is allowed')
    return match.group(1) or match.group(2), int(match.group(3))


def join_address(host: str, port: int) -> str:
    """The text `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


_READERS: dict[str, Any] = {
    "integer": _integer,
    "number": _number,
    "size": _size,
    "auto": _auto,
    "boolean": _boolean,
    "string": _string,
    "choice": _choice,
    "instance": _instance,
    "listeners": _listeners,
    "address": _address,
}
