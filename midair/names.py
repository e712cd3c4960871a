"""Names of everything an instance has outside its processes, derived from its owner and its name.

Two instances of a user differ in nothing but their name, and those of two users in their owner, so
every shared name has to come from here: a name made up elsewhere would be missed by
`ipc.remove_all`. The owner of an instance is the user whose runtime directory it has
(`Runtime.owner_uid`): parts that run as other users come to the same names.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from midair.errors import MidairError
from midair.exits import Exit

ROUTER = "router"
DISPATCHER = "dispatcher"
CONNMGR = "connmgr"
KEEPER = "keeper"
MANAGER = "manager"
MONITOR = "monitor"
TRACER = "tracer"
ROLES = (MANAGER, KEEPER, ROUTER, CONNMGR, DISPATCHER, MONITOR, TRACER)
OTHER_USERS = (ROUTER, MONITOR, TRACER)  # may run as another user than the owner of the instance
# They look at an instance, which goes on whatever happens to them.
ONLOOKERS = (MONITOR, TRACER)

# A ledger word has a bit for each port: connection managers, and what else takes part.
PORTS_MAX = 32
CONNMGRS_MAX = PORTS_MAX

CONNTABLE = "conntable"
ARENA = "arena"
JOURNAL = "journal"
PORT = "port"  # of a port that is no connection manager
ROUTING = "routing"
STATS = "stats"  # of a connection manager
STATS_ROUTER = "stats-router"
STATS_DISPATCHER = "stats-dispatcher"
TRACE = "trace"  # records of the deliveries of a connection manager
TRACE_CONTROL = "trace-control"
# Nobody needs them to recover.
STATISTICS = (STATS, STATS_ROUTER, STATS_DISPATCHER, TRACE, TRACE_CONTROL)
# Noun of a segment -> whether there is one for each connection manager (PORT: for other ports).
SEGMENTS = {
    CONNTABLE: False,
    ARENA: True,
    JOURNAL: True,
    PORT: True,
    ROUTING: False,
    STATS: True,
    STATS_ROUTER: False,
    STATS_DISPATCHER: False,
    TRACE: True,
    TRACE_CONTROL: False,
}

REFS = "refs"  # connmgr -> router: references to messages
ORDERS = "orders"  # router -> connmgr: routing instructions
QUEUES = (REFS, ORDERS)
# Of the owner of an instance alone. The others may be shared with the group of its runtime
# directory: the router, and who looks, may run as users of their own.
PRIVATE = (CONNTABLE, ARENA, JOURNAL, PORT, TRACE, TRACE_CONTROL)

# Names of the listening descriptors in LISTEN_FDNAMES.
FD_CLIENT = "client"
FD_HANDOFF = "handoff"
FD_KEEPER = "keeper"
FD_MONITOR = "monitor"

KEEPER_SOCKET = "keeper.sock"
CONTROL_SOCKET = "control.sock"
NOTIFY_SOCKET = "notify.sock"

SHM = Path("/dev/shm")  # where segments can be seen

INSTANCE = "[a-z0-9][a-z0-9-]{0,31}"
INSTANCE_ALLOWED = "use 1 to 32 of a-z, 0-9 and '-', not starting with '-'"


def check_instance(name: str) -> str:
    """The name itself, or an error that says what a name may look like."""
    if not re.fullmatch(INSTANCE, name):
        raise MidairError(f"instance name {name!r}: {INSTANCE_ALLOWED}", Exit.USAGE)
    return name


def prefix(instance: str, uid: int | None) -> str:
    """What the names of all segments and queues of an instance begin with, and a dot.

    `uid`: its owner. None: the names of release 0.1, which did not carry it; an instance that was
    started by 0.1 keeps them (`Runtime.prefix`).
    """
    return f"midair{'' if uid is None else f'-{uid}'}.{check_instance(instance)}"


def segment(prefix: str, noun: str, index: int | None = None) -> str:
    """`/midair-<uid>.<instance>.<noun>`, with `.<n>` for the nouns each connmgr has its own of."""
    if (index is not None) != SEGMENTS[noun]:
        raise ValueError(f"{noun}: index {index}")
    tail = "" if index is None else f".{_checked(index)}"
    return f"/{prefix}.{noun}{tail}"


def queue(prefix: str, noun: str, index: int) -> str:
    """`/midair-<uid>.<instance>.<noun>.<n>`: REFS or ORDERS of connection manager `index`."""
    if noun not in QUEUES:
        raise ValueError(noun)
    return f"/{prefix}.{noun}.{_checked(index)}"


def instance_of(name: str) -> str:
    """The instance a segment or queue name belongs to."""
    owner, instance, _ = name.split(".", 2)
    if not re.fullmatch(r"/midair(-\d+)?", owner):
        raise ValueError(name)
    return check_instance(instance)


def noun_of(name: str) -> str:
    """Which of the SEGMENTS or QUEUES a name stands for."""
    return name.split(".")[2]


def handoff_socket(index: int) -> str:
    """File name, in the runtime directory, of the socket a connmgr receives clients on."""
    return f"connmgr-{_checked(index)}.sock"


def component(role: str, index: int | None = None) -> str:
    """How a component is called in messages: `router`, `connmgr/0`."""
    return role if index is None else f"{role}/{index}"


def lease_key(uid: int, instance: str, role: str, index: int | None = None) -> int:
    """SysV key of a role's lease: 31 bits, never 0 (which would mean IPC_PRIVATE).

    `uid` is the owner of the instance (of its runtime directory), not of the process that
    asks: a router that runs as another user must come to the same key.
    """
    text = f"midair lease {uid} {instance} {role} {0 if index is None else index}"
    digest = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(digest[:4], "big") & 0x7FFFFFFF) or 1


def _checked(index: int) -> int:
    if not 0 <= index < CONNMGRS_MAX:
        raise ValueError(f"connmgr index {index}")
    return index
