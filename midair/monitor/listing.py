"""`midair conns` and `midair subs`: lists of what is connected and subscribed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from midair import config, names, shown
from midair.exits import Exit
from midair.monitor import gather
from midair.up import status
from native.stats import Conn

Key = Callable[[Any], Any]

# Sort key -> (what it sorts by, whether the largest comes first).
CONN_KEYS: dict[str, tuple[Key, bool]] = {
    "id": (lambda it: it.uid, False),
    "name": (lambda it: (it.name, it.uid), False),
    "ip": (lambda it: (it.ip, it.port), False),
    "messages-in": (lambda it: it.messages_in, True),
    "messages-out": (lambda it: it.messages_out, True),
    "messages": (lambda it: it.messages_in + it.messages_out, True),
    "bytes-in": (lambda it: it.bytes_in, True),
    "bytes-out": (lambda it: it.bytes_out, True),
    "bytes": (lambda it: it.bytes_in + it.bytes_out, True),
    "pending": (lambda it: it.pending, True),
    "subs": (lambda it: it.subs, True),
    "idle": (lambda it: -it.active_ns, True),
    "age": (lambda it: -it.since_ns, True),
}
SUB_KEYS: dict[str, tuple[Key, bool]] = {
    "subject": (lambda it: (it["subject"], it["id"]), False),
    "queue": (lambda it: (it["queue"], it["subject"], it["id"]), False),
    "id": (lambda it: (it["id"], it["subject"]), False),
    "name": (lambda it: (it["name"], it["id"], it["subject"]), False),
    "messages": (lambda it: it["messages"], True),
}


def run_conns(args: argparse.Namespace) -> int:
    sources = gather.Sources(status.find(names.check_instance(args.name)))
    found = list(select(sources, args))
    key, largest_first = CONN_KEYS[args.sort]
    found.sort(key=key, reverse=largest_first != args.reverse)
    listed = found if args.limit == 0 else found[: args.limit]
    now_ns = time.time_ns()
    if args.json:
        print(json.dumps([conn_record(conn, now_ns) for conn in listed], indent=2))
    else:
        _print_conns(listed, len(found), now_ns)
    return Exit.OK


def run_subs(args: argparse.Namespace) -> int:
    sources = gather.Sources(status.find(names.check_instance(args.name)))
    conns = {conn.uid: conn for conn in select(sources, args)}
    everybody = not (args.client or args.ip or args.connmgr is not None)
    found = []
    for sub in sources.subs(args.subject or "", args.test or "", args.id or 0):
        conn = conns.get(sub.uid)
        if (conn is None and not everybody) or not fnmatchcase(sub.queue, args.queue or "*"):
            continue
        found.append(
            {
                "subject": sub.subject,
                "queue": sub.queue,
                "id": sub.uid,
                "connmgr": sub.connmgr,
                "name": "" if conn is None else conn.name,
                "ip": "" if conn is None else conn.ip,
                "port": 0 if conn is None else conn.port,
                "messages": sub.routed,
                "max": sub.max,
            }
        )
    key, largest_first = SUB_KEYS[args.sort]
    found.sort(key=key, reverse=largest_first != args.reverse)
    listed = found if args.limit == 0 else found[: args.limit]
    if args.json:
        print(json.dumps(listed, indent=2))
    else:
        _print_subs(listed, len(found))
    return Exit.OK


def select(sources: gather.Sources, args: argparse.Namespace) -> Iterable[Conn]:
    """The connections that pass the filters of the command line."""
    with_subject: set[int] | None = None
    if args.command == "conns" and args.subject:
        with_subject = {sub.uid for sub in sources.subs(args.subject)}
    for conn in sources.look().conns.values():
        if (
            (args.id is None or conn.uid == args.id)
            and (not args.client or fnmatchcase(conn.name, args.client))
            and (not args.ip or fnmatchcase(conn.ip, args.ip))
            and (args.connmgr is None or conn.connmgr == args.connmgr)
            and conn.pending >= getattr(args, "min_pending", 0)
            and (with_subject is None or conn.uid in with_subject)
        ):
            yield conn


def conn_record(conn: Conn, now_ns: int) -> dict[str, Any]:
    """A connection for programs."""
    record = asdict(conn)
    record["id"] = record.pop("uid")
    record["age_s"] = round(max(0, now_ns - record.pop("since_ns")) / 1e9, 3)
    record["idle_s"] = round(max(0, now_ns - record.pop("active_ns")) / 1e9, 3)
    record["stuck_s"] = round(record.pop("stuck_ns") / 1e9, 3)
    return record


def _print_conns(listed: list[Conn], total: int, now_ns: int) -> None:
    head = ["name", "address", "id", "connmgr", "in", "out", "bytes in", "bytes out"]
    head += ["pending", "subs", "idle", "age"]
    rows = [
        (
            shown.clean(conn.name) or "-",
            config.join_address(conn.ip, conn.port),
            str(conn.uid),
            str(conn.connmgr),
            shown.number(conn.messages_in),
            shown.number(conn.messages_out),
            shown.size(conn.bytes_in),
            shown.size(conn.bytes_out),
            shown.size(conn.pending),
            str(conn.subs),
            shown.duration(max(0, now_ns - conn.active_ns) / 1e9),
            shown.duration(max(0, now_ns - conn.since_ns) / 1e9),
        )
        for conn in listed
    ]
    print("\n".join([*shown.table(head, rows, left=2), _footer(len(listed), total, "connection")]))


def _print_subs(listed: list[dict[str, Any]], total: int) -> None:
    head = ("subject", "queue", "name", "address", "id", "connmgr", "messages")
    rows = [
        (
            shown.clean(sub["subject"]),
            shown.clean(sub["queue"]) or "-",
            shown.clean(sub["name"]) or "-",
            config.join_address(sub["ip"], sub["port"]) if sub["ip"] else "-",
            str(sub["id"]),
            str(sub["connmgr"]),
            shown.number(sub["messages"]) if sub["queue"] else "-",
        )
        for sub in listed
    ]
    print(
        "\n".join([*shown.table(head, rows, left=4), _footer(len(listed), total, "subscription")])
    )


def _footer(listed: int, total: int, what: str) -> str:
    plural = what if total == 1 else f"{what}s"
    return f"{total} {plural}" + (f", {listed} shown (--limit)" if listed < total else "")
