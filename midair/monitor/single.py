"""What nats-server says about clusters, accounts and JetStream, of a server that has one account.

/routez, /gatewayz, /leafz, /accountz, /accstatz and /jsz in its shapes, so that exporters and
dashboards that ask for them find what they would find at a nats-server without these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midair.monitor.query import BadQueryError

ACCOUNT = "$G"


def routez() -> dict[str, Any]:
    return {"num_routes": 0, "routes": []}


def gatewayz() -> dict[str, Any]:
    return {"outbound_gateways": {}, "inbound_gateways": {}}


def leafz() -> dict[str, Any]:
    return {"leafnodes": 0, "leafs": []}


def accountz(
    query: Mapping[str, str], varz: Mapping[str, Any], sublist: Mapping[str, Any]
) -> dict[str, Any]:
    """The one account. `varz`: of the instance; `sublist`: the figures of its subscriptions."""
    said: dict[str, Any] = {"system_account": ""}
    if not (wanted := query.get("acc", "")):
        return {**said, "accounts": [ACCOUNT]}
    if wanted != ACCOUNT:
        raise BadQueryError(f"Account {wanted} does not exist")
    return {
        **said,
        "account_detail": {
            "account_name": ACCOUNT,
            "update_time": varz["config_load_time"],
            "expired": False,
            "complete": True,
            "jetstream_enabled": False,
            "leafnode_connections": 0,
            "client_connections": varz["connections"],
            "subscriptions": varz["subscriptions"],
            "name_tag": ACCOUNT,
            "sublist_stats": dict(sublist),
        },
    }


def _traffic(messages: int, size: int) -> dict[str, Any]:
    """All of it is clients'."""
    nothing = {"msgs": 0, "bytes": 0}
    others = {"gateways": nothing, "routes": nothing, "leafs": nothing}
    return {"msgs": messages, "bytes": size, **others}


def accstatz(query: Mapping[str, str], varz: Mapping[str, Any]) -> dict[str, Any]:
    """What the instance has counted is its account's. Without connections only if asked for."""
    found = {
        "acc": ACCOUNT,
        "name": ACCOUNT,
        "conns": varz["connections"],
        "leafnodes": 0,
        "total_conns": varz["connections"],
        "num_subscriptions": varz["subscriptions"],
        "sent": _traffic(varz["out_msgs"], varz["out_bytes"]),
        "received": _traffic(varz["in_msgs"], varz["in_bytes"]),
        "slow_consumers": varz["slow_consumers"],
    }
    unused = query.get("unused", "") in ("1", "true")
    return {"account_statz": [found] if varz["connections"] or unused else []}


def jsz(head: Mapping[str, Any]) -> dict[str, Any]:
    """`head`: who says it, and when; it stands in the middle."""
    return {
        "memory": 0,
        "storage": 0,
        "reserved_memory": 0,
        "reserved_storage": 0,
        "accounts": 0,
        "ha_assets": 0,
        "api": {"level": 0, "total": 0, "errors": 0},
        **head,
        "disabled": True,
        "config": {"max_memory": 0, "max_storage": 0},
        "streams": 0,
        "consumers": 0,
        "messages": 0,
        "bytes": 0,
        "total": 0,
    }
