"""Who uses which key of the configuration: what `midair reload` has to do when it changes.

Every key is here, once. A part reads its configuration when it starts, so a part that uses a key is
restarted. What the manager uses itself changes in place. A key that segments or queues are made by
cannot change while they exist.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from midair import names
from midair.config import Config, Listener

# In the order in which they are restarted. The dispatcher is the last of those that see clients:
# it sends none to a part that does not know what it should.
RESTART_ORDER = (
    names.KEEPER,
    names.ROUTER,
    names.CONNMGR,
    names.DISPATCHER,
    names.MONITOR,
)


@dataclass(frozen=True)
class Use:
    """What a change of a key needs."""

    parts: tuple[str, ...] = ()  # that are restarted; none: it changes in place
    down: str = ""  # why it cannot change without `midair down`


EVERYONE = Use(RESTART_ORDER)
CONNMGR = Use((names.CONNMGR,))
IN_PLACE = Use()
_SEGMENTS = Use(down="segments are made by it")
# How many connection managers there are: everybody who has a place for each of them.
_COUNT = Use((names.ROUTER, names.CONNMGR, names.DISPATCHER, names.MONITOR))

USES: dict[str, Use] = {
    "server.name": Use(down="it is the instance"),
    "server.listen": Use((names.CONNMGR, names.DISPATCHER, names.MONITOR)),
    "server.lame_duck_s": IN_PLACE,
    "server.lame_duck_grace_s": IN_PLACE,
    "limits.max_payload": Use((names.CONNMGR, names.MONITOR)),
    "limits.max_control_line": Use((names.CONNMGR, names.MONITOR)),
    "limits.max_connections": _SEGMENTS,
    "limits.max_subscriptions": Use((names.CONNMGR, names.MONITOR)),
    "limits.max_pending": Use((names.CONNMGR, names.MONITOR)),
    "limits.write_deadline_s": Use((names.CONNMGR, names.MONITOR)),
    "limits.ping_interval_s": Use((names.CONNMGR, names.MONITOR)),
    "limits.ping_max": Use((names.CONNMGR, names.MONITOR)),
    "limits.name_answer_s": CONNMGR,
    "limits.slow_consumer": CONNMGR,
    "limits.max_messages_per_s": CONNMGR,
    "limits.max_bytes_per_s": CONNMGR,
    "limits.rate_action": CONNMGR,
    "connmgr.count": _COUNT,
    "connmgr.retiring": _COUNT,
    "connmgr.arena_bytes": _SEGMENTS,
    "connmgr.output_bytes": _SEGMENTS,
    "connmgr.subscriptions": _SEGMENTS,
    "router.user": Use(down="segments and queues belong to it"),
    "router.subjects": Use((names.ROUTER,)),
    "router.other_ports": Use(down="the ports have their numbers by it"),
    "queues.depth": Use(down="queues are made by it"),
    "latency.spin_us": Use((names.ROUTER, names.CONNMGR)),
    "latency.pin": Use((names.ROUTER, names.CONNMGR)),
    "latency.flow_leases": CONNMGR,
    "latency.pace_local": Use((names.DISPATCHER,)),
    "manager.restart_limit": IN_PLACE,
    "manager.restart_window_s": IN_PLACE,
    "manager.watchdog_s": EVERYONE,
    "manager.standby": IN_PLACE,
    "monitor.listen": Use((names.MONITOR,)),
    "trace.ring_bytes": _SEGMENTS,
    "log.level": EVERYONE,
    "log.file": IN_PLACE,
}


@dataclass(frozen=True)
class Change:
    """A key with another value than before."""

    key: str
    old: Any
    new: Any

    @property
    def use(self) -> Use:
        return USES[self.key]

    @property
    def text(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


def changes(old: Config, new: Config) -> list[Change]:
    """What differs, in the order of the tables. `count = 0` is worked out before it is compared."""
    found = []
    for table in dataclasses.fields(Config):
        before, after = getattr(old, table.name), getattr(new, table.name)
        for item in dataclasses.fields(before):
            one, other = getattr(before, item.name), getattr(after, item.name)
            if one != other:
                found.append(Change(f"{table.name}.{item.name}", one, other))
    return found


def settled(conf: Config) -> Config:
    """The same with as many connection managers as take clients: `midair up` runs no others."""
    return conf.with_("connmgr", count=conf.serving, retiring=0)


def shown(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, tuple):
        return f"[{', '.join(_listener(item) for item in value)}]"
    return value if isinstance(value, str) and value else json.dumps(value)


def _listener(item: Listener) -> str:
    said = item.to_json()
    more = ", ".join(f"{key} {json.dumps(said[key])}" for key in said if key != "address")
    return f"{item.address} ({more})" if more else item.address
