"""/healthz, /varz, /connz, /subsz and others in the shapes nats-server gives them.

The keys are those of nats-server's monitoring, so that nats-top, exporters and dashboards work.
What there is no such thing of here (clusters, accounts, JetStream) is left out, or 0 where tools
count on the key (single.py). Bytes are those of headers and payloads, as nats-server counts them;
those of the streams have names of their own. What is ours alone is under "midair".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from midair import config, names, shown
from midair.config import Config
from midair.monitor import gather, single
from midair.monitor.gather import Rates, Snapshot, Sources
from midair.monitor.query import BadQueryError, Page, integer
from midair.monitor.single import ACCOUNT
from midair.process import events
from midair.process.runtime import Runtime
from midair.version import NATS_LEVEL, __version__
from native.census import Sub
from native.stats import CLOSE_REASONS, Conn

CPU_S = 0.5  # CPU use is measured over this at least
EVENTS_SHOWN = 32

# sort= of /connz -> (what it sorts by, whether the largest comes first).
SORTS: dict[str, tuple[Callable[[Conn], Any], bool]] = {
    "cid": (lambda it: it.uid, False),
    "start": (lambda it: it.since_ns, False),
    "subs": (lambda it: it.subs, True),
    "pending": (lambda it: it.pending, True),
    "msgs_to": (lambda it: it.messages_out, True),
    "msgs_from": (lambda it: it.messages_in, True),
    "bytes_to": (lambda it: it.payload_out, True),
    "bytes_from": (lambda it: it.payload_in, True),
    "last": (lambda it: it.active_ns, True),
    "idle": (lambda it: it.active_ns, False),
    "uptime": (lambda it: it.since_ns, False),
}


class Nats:
    """Answers, from what the instance shows."""

    def __init__(self, runtime: Runtime, conf: Config) -> None:
        self.runtime = runtime
        self.conf = conf
        self.sources = Sources(runtime)
        self.requests: dict[str, int] = {}
        self._server_id = f"MIDAIR-{runtime.instance}"
        self._before = self.sources.look()
        self._rates = Rates(self._before, self._before)

    def look(self) -> Snapshot:
        """A fresh look; rates are taken over CPU_S at least."""
        now = self.sources.look()
        if now.at - self._before.at >= CPU_S:
            self._rates = Rates(self._before, now)
            self._before = now
        return now

    @property
    def rates(self) -> Rates:
        """Between the last two looks that were far enough apart."""
        return self._rates

    def healthz(self) -> tuple[int, dict[str, Any]]:
        """(status code, answer)."""
        wrong = gather.away(self.sources.look(with_conns=False), self.conf.connmgrs)
        if not wrong:
            return 200, {"status": "ok"}
        return 503, {"status": "unavailable", "status_code": 503, "error": "; ".join(wrong)}

    def varz(self) -> dict[str, Any]:
        now, conf = self.look(), self.conf
        host, port = config.split_address(conf.listen)
        http_host, http_port = config.split_address(conf.monitor.listen or "127.0.0.1:0")
        began = min((state.started_at for state in now.states), default=now.wall)
        began_ns = int(began * 1e9)
        memory = sum(used.memory for used in now.usage.values()) + now.shared_bytes
        cpu = sum(self.rates.cpu_percent(pid) for pid in now.usage)
        slow = now.closed()
        slow_consumers = sum(
            count for name, count in zip(CLOSE_REASONS, slow, strict=False) if "slow" in name
        )
        cores = len(os.sched_getaffinity(0))
        return {
            "server_id": self._server_id,
            "server_name": conf.server.name,
            "version": NATS_LEVEL,
            "proto": 1,
            "host": host,
            "port": port,
            "max_connections": conf.limits.max_connections,
            "max_subscriptions": conf.subscriptions_each,
            "ping_interval": int(conf.limits.ping_interval_s * 1e9),
            "ping_max": conf.limits.ping_max,
            "http_host": http_host,
            "http_port": http_port,
            "http_base_path": "",
            "https_port": 0,
            "auth_timeout": 0,
            "max_control_line": conf.limits.max_control_line,
            "max_payload": conf.limits.max_payload,
            "max_pending": conf.limits.max_pending,
            "cluster": {},
            "gateway": {},
            "leaf": {},
            "mqtt": {},
            "websocket": {},
            "jetstream": {},
            "tls_timeout": 0,
            "write_deadline": int(conf.limits.write_deadline_s * 1e9),
            "start": shown.moment(began_ns),
            "now": shown.moment(time.time_ns()),
            "uptime": shown.go_duration(now.wall - began),
            "mem": memory,
            "cores": cores,
            "gomaxprocs": cores,
            "cpu": round(cpu, 1),
            "connections": now.gauge("connections"),
            "total_connections": now.router("sessions_opened"),
            "routes": 0,
            "remotes": 0,
            "leafnodes": 0,
            "in_msgs": now.total("messages_in"),
            "out_msgs": now.total("messages_out"),
            "in_bytes": now.total("payload_in"),
            "out_bytes": now.total("payload_out"),
            "slow_consumers": slow_consumers,
            "subscriptions": now.router("subscriptions"),
            "http_req_stats": dict(self.requests),
            "config_load_time": shown.moment(began_ns),
            "system_account": "",
            "slow_consumer_stats": {
                "clients": slow_consumers,
                "routes": 0,
                "gateways": 0,
                "leafs": 0,
            },
            "midair": self._ours(now),
        }

    def connz(self, query: Mapping[str, str]) -> dict[str, Any]:
        now, page = self.look(), Page.of(query)
        sort = query.get("sort") or "cid"
        if sort not in SORTS:
            raise BadQueryError(f"sort={sort}: one of {', '.join(SORTS)}")
        cid = integer(query, "cid", 0)
        found = [it for it in now.conns.values() if not cid or it.uid == cid]
        if query.get("state", "open") == "closed":  # those are counted, not kept
            found = []
        if "filter_subject" in query:
            wanted = {sub.uid for sub in self.sources.subs(query["filter_subject"])}
            found = [it for it in found if it.uid in wanted]
        key, largest_first = SORTS[sort]
        found.sort(key=key, reverse=largest_first)
        listed = page.cut(found)
        rows = [_conn(conn, now.wall) for conn in listed]
        if _wanted(query, "subs"):
            self._add_subs(rows, query["subs"] == "detail")
        return {
            **self._head(),
            "num_connections": len(rows),
            "total": len(found),
            "offset": page.offset,
            "limit": page.limit,
            "connections": rows,
        }

    def subsz(self, query: Mapping[str, str]) -> dict[str, Any]:
        page = Page.of(query)
        answer: dict[str, Any] = {**self._head(), **self._sublist(), "total": 0}
        answer |= {"offset": page.offset, "limit": page.limit}
        if _wanted(query, "subs") or "test" in query:
            found = list(self.sources.subs(test=query.get("test", "")))
            answer["total"] = len(found)
            answer["subscriptions_list"] = [_sub(sub) for sub in page.cut(found)]
        return answer

    def routez(self) -> dict[str, Any]:
        server, now = self._head().items()
        return dict([server, ("server_name", self.varz()["server_name"]), now]) | single.routez()

    def gatewayz(self) -> dict[str, Any]:
        return {**self._head(), **single.gatewayz()}

    def leafz(self) -> dict[str, Any]:
        return {**self._head(), **single.leafz()}

    def accountz(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {**self._head(), **single.accountz(query, self.varz(), self._sublist())}

    def accstatz(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {**self._head(), **single.accstatz(query, self.varz())}

    def jsz(self) -> dict[str, Any]:
        return single.jsz(self._head())

    def _head(self) -> dict[str, Any]:
        return {"server_id": self._server_id, "now": shown.moment(time.time_ns())}

    def _sublist(self) -> dict[str, Any]:
        """The figures of all subscriptions."""
        now = self.look()
        messages, deliveries = now.router("messages"), now.router("deliveries")
        matches, builds = now.router("matches"), now.router("builds")
        return {
            "num_subscriptions": now.router("subscriptions"),
            "num_cache": now.router("subjects_cached"),
            "num_inserts": now.router("subscribed"),
            "num_removes": now.router("unsubscribed"),
            "num_matches": messages,
            "cache_hit_rate": round(max(0.0, 1 - builds / matches), 6) if matches else 0,
            "max_fanout": now.router("fanout_max"),
            "avg_fanout": round(deliveries / messages, 6) if messages else 0,
        }

    def _add_subs(self, rows: list[dict[str, Any]], detail: bool) -> None:
        by_cid: dict[int, dict[str, Any]] = {row["cid"]: row for row in rows}
        name = "subscriptions_list_detail" if detail else "subscriptions_list"
        for sub in self.sources.subs(uid=rows[0]["cid"] if len(rows) == 1 else 0):
            row = by_cid.get(sub.uid)
            if row is None:
                continue
            row.setdefault(name, []).append(_sub(sub) if detail else sub.subject)

    def _ours(self, now: Snapshot) -> dict[str, Any]:
        """What nats-server has no key for."""
        fairness = self.rates.fairness()
        components = []
        for state in now.states:
            called = names.component(state.role, state.index)
            used = now.usage.get(state.pid)
            counts = now.counts.get(called)
            components.append(
                {
                    "component": called,
                    "pid": state.pid,
                    "version": state.version,
                    "state": state.state,
                    "generation": state.generation,
                    "uptime_s": round(state.uptime_s, 3),
                    "cpu_percent": round(self.rates.cpu_percent(state.pid), 1),
                    "memory_bytes": 0 if used is None else used.memory,
                    "gauges": {} if counts is None else counts.gauges,
                }
            )
        reasons = zip(CLOSE_REASONS[1:], now.closed()[1:], strict=False)
        return {
            "instance": self.runtime.instance,
            "version": __version__,
            "in_stream_bytes": now.total("bytes_in"),
            "out_stream_bytes": now.total("bytes_out"),
            "components": components,
            "shared_memory_bytes": now.shared_bytes,
            "fairness": None if fairness is None else round(fairness, 6),
            "busy_connections": len(self.rates.busy()),
            "closed": dict(reasons),
            "unreadable": self.sources.problems,
            "events": [it for it in self.sources.events() if it.get("kind") != events.ACTIVE][
                -EVENTS_SHOWN:
            ],
        }


def _wanted(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "0") not in ("0", "false", "")


def _sub(sub: Sub) -> dict[str, Any]:
    """One subscription. What a client calls it is not known of one that an older release made."""
    return {
        "account": ACCOUNT,
        "subject": sub.subject,
        **({"qgroup": sub.queue} if sub.queue else {}),
        "sid": sub.sid,
        "msgs": sub.routed,
        **({"max": sub.max} if sub.max else {}),
        "cid": sub.uid,
    }


def _conn(conn: Conn, wall: float) -> dict[str, Any]:
    return {
        "cid": conn.uid,
        "kind": "Client",
        "type": "nats",
        "ip": conn.ip,
        "port": conn.port,
        "start": shown.moment(conn.since_ns),
        "last_activity": shown.moment(conn.active_ns),
        **({"rtt": shown.go_microseconds(conn.rtt_us)} if conn.rtt_us else {}),
        "uptime": shown.go_duration(wall - conn.since_ns / 1e9),
        "idle": shown.go_duration(wall - conn.active_ns / 1e9),
        "pending_bytes": conn.pending,
        "in_msgs": conn.messages_in,
        "out_msgs": conn.messages_out,
        "in_bytes": conn.payload_in,
        "out_bytes": conn.payload_out,
        "subscriptions": conn.subs,
        **({"name": conn.name} if conn.name else {}),
        **({"lang": conn.lang} if conn.lang else {}),
        **({"version": conn.version} if conn.version else {}),
        "connmgr": conn.connmgr,
        "in_stream_bytes": conn.bytes_in,
        "out_stream_bytes": conn.bytes_out,
    }
