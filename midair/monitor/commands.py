"""The commands `midair top`, `midair conns` and `midair subs` on the command line.

Only what they are called with is here, so that the other commands do not load the rest.
"""

from __future__ import annotations

import argparse
from typing import Any

from midair import names
from midair.arguments import checked, integer, number, positive

CONN_SORTS = (
    "id",
    "name",
    "ip",
    "messages-in",
    "messages-out",
    "messages",
    "bytes-in",
    "bytes-out",
    "bytes",
    "pending",
    "subs",
    "idle",
    "age",
)
SUB_SORTS = ("subject", "queue", "id", "name", "messages")
LIMIT = 100


def add_commands(commands: Any) -> None:
    """Adds them to a parser's subcommands."""
    it = commands.add_parser(
        "top",
        help="watch an instance: components, rates, connections, recoveries",
        description="One page about a running instance, drawn again and again; q or Ctrl-C ends "
        "it. Without a terminal it is printed once.",
    )
    _add_instance(it)
    it.add_argument("--once", action="store_true", help="print one page and end")
    it.add_argument(
        "--interval", type=number(0.1, 3600), default=1.0, metavar="S", help="seconds (default: 1)"
    )
    it.set_defaults(run=_top)

    it = commands.add_parser("conns", help="list connections")
    it.add_argument("--subject", metavar="PATTERN", help="with a subscription that it covers")
    it.add_argument(
        "--min-pending",
        type=checked(_bytes),
        default=0,
        metavar="BYTES",
        help="at least that many bytes wait",
    )
    _add_filters(it, CONN_SORTS, "id")
    it.set_defaults(run=_conns, command="conns")

    it = commands.add_parser("subs", help="list subscriptions")
    it.add_argument(
        "subject", metavar="PATTERN", nargs="?", help="those whose subject it covers: orders.>"
    )
    it.add_argument("--test", metavar="SUBJECT", help="those that would get this subject")
    it.add_argument("--queue", metavar="GLOB", help="of queue groups called like this")
    _add_filters(it, SUB_SORTS, "subject")
    it.set_defaults(run=_subs, command="subs")


def _add_filters(it: argparse.ArgumentParser, sorts: tuple[str, ...], default: str) -> None:
    _add_instance(it)
    it.add_argument("--id", type=positive, metavar="N", help="of this connection")
    it.add_argument("--client", metavar="GLOB", help="of clients that call themselves like this")
    it.add_argument("--ip", metavar="GLOB", help="of addresses like this: 10.0.*")
    it.add_argument(
        "--connmgr",
        type=integer(0, names.CONNMGRS_MAX - 1),
        metavar="N",
        help="of this connection manager",
    )
    it.add_argument("--sort", choices=sorts, default=default, help=f"default: {default}")
    it.add_argument("--reverse", action="store_true", help="the other way round")
    it.add_argument(
        "--limit", type=integer(0), default=LIMIT, metavar="N", help=f"default: {LIMIT}; 0: all"
    )
    it.add_argument("--json", action="store_true", help="for programs")


def _add_instance(it: argparse.ArgumentParser) -> None:
    it.add_argument("--name", metavar="INSTANCE", default="midair", help="default: midair")


def _top(args: argparse.Namespace) -> int:
    from midair.monitor import top

    return top.run(args)


def _conns(args: argparse.Namespace) -> int:
    from midair.monitor import listing

    return listing.run_conns(args)


def _subs(args: argparse.Namespace) -> int:
    from midair.monitor import listing

    return listing.run_subs(args)


def _bytes(text: str) -> int:
    from midair import config

    return config.bytes_of(text)
