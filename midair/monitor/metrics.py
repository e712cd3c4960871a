"""/metrics: everything that is counted, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from midair import names
from midair.monitor.gather import Rates, Snapshot
from midair.process import events
from midair.version import __version__
from native.stats import CLOSE_REASONS, REFUSALS, Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Totals that say what the last start found, not what has happened since.
FOUND = "found_"
# Array in the totals -> (metric, label, names of its elements).
ARRAYS = {
    "closed": ("midair_connections_closed_total", "reason", CLOSE_REASONS),
    "refused": ("midair_frames_refused_total", "error", REFUSALS),
}
HELP = {
    "midair_connections_closed_total": "Connections that ended, by reason.",
    "midair_frames_refused_total": "Frames answered with -ERR, by error.",
    "midair_connmgr_messages_in_total": "Messages received from clients.",
    "midair_connmgr_messages_out_total": "Messages delivered to clients.",
    "midair_connmgr_bytes_in_total": "Bytes received from clients, protocol lines included.",
    "midair_connmgr_bytes_out_total": "Bytes written to clients, protocol lines included.",
    "midair_connmgr_recvs_total": "Reads of client sockets.",
    "midair_connmgr_sends_total": "Writes to client sockets.",
    "midair_connmgr_stalls_total": "Times a connection was not read because there was no room.",
    "midair_connmgr_compacted_total": "Unfinished frames moved together to free arena chunks.",
    "midair_connmgr_repeated_total": "Messages delivered as the router had decided before.",
    "midair_connmgr_connections": "Clients served now.",
    "midair_connmgr_arena_chunks": "Chunks for bodies.",
    "midair_connmgr_arena_free": "Chunks for bodies that are free.",
    "midair_connmgr_output_blocks": "Blocks for copied output.",
    "midair_connmgr_output_free": "Blocks for copied output that are free.",
    "midair_connmgr_refs_waiting": "Batches of references that wait for room in the queue.",
    "midair_connmgr_refs_queued": "Batches in the queue to the router.",
    "midair_connmgr_orders_queued": "Batches in the queue from the router.",
    "midair_connmgr_reading_stopped": "1 while no client is read: the arena or the ring is full.",
    "midair_router_messages_total": "Messages routed.",
    "midair_router_deliveries_total": "Recipients found for them.",
    "midair_router_no_recipients_total": "Messages dropped because nobody had subscribed.",
    "midair_router_no_responders_total": "Requests answered with 503: nobody had subscribed.",
    "midair_router_refused_total": "Subscriptions refused: the index or its text is full.",
    "midair_router_blocked_total": "Times references waited for room in a ring of orders.",
    "midair_router_orders_waiting": "Batches of orders that wait for room in the queue.",
    "midair_router_subscriptions": "Subscriptions.",
    "midair_dispatcher_accepted_total": "Connections accepted.",
    "midair_dispatcher_refused_total": "Connections refused: the maximum was reached.",
    "midair_dispatcher_descriptors_out_total": "Times accepting rested: out of descriptors.",
    "midair_dispatcher_backlog": "Connections accepted and not handed on yet.",
}


class Exposition:
    """The text, family by family."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[str, list[str]]] = {}

    def add(self, name: str, value: float, labels: Mapping[str, Any] | None = None) -> None:
        """One sample. A name that ends with _total is a counter."""
        kind = "counter" if name.endswith("_total") else "gauge"
        _, samples = self._families.setdefault(name, (kind, []))
        pairs = ",".join(f'{key}="{_escaped(str(it))}"' for key, it in (labels or {}).items())
        shown = int(value) if float(value).is_integer() else value
        samples.append(f"{name}{{{pairs}}} {shown}" if pairs else f"{name} {shown}")

    def text(self) -> str:
        lines = []
        for name, (kind, samples) in self._families.items():
            if name in HELP:
                lines.append(f"# HELP {name} {HELP[name]}")
            lines += [f"# TYPE {name} {kind}", *samples]
        return "\n".join(lines) + "\n"


def render(
    instance: str, now: Snapshot, rates: Rates, log: Iterable[dict[str, Any]], healthy: bool
) -> str:
    """The whole page."""
    page = Exposition()
    page.add("midair_info", 1, {"instance": instance, "version": __version__})
    page.add("midair_healthy", int(healthy))
    page.add("midair_shared_memory_bytes", now.shared_bytes)
    pending = [conn.pending for conn in now.conns.values()]
    page.add("midair_pending_bytes", sum(pending))
    page.add("midair_pending_bytes_max", max(pending, default=0))
    page.add("midair_busy_connections", len(rates.busy()))
    fairness = rates.fairness()
    if fairness is not None:
        page.add("midair_fairness", round(fairness, 6))
    for counts in now.counts.values():
        _add_counts(page, counts)
    for state in now.states:
        labels = {"component": names.component(state.role, state.index), "state": state.state}
        page.add("midair_component_generation", state.generation, labels)
        page.add("midair_component_start_time_seconds", round(state.started_at, 3), labels)
        used = now.usage.get(state.pid)
        if used is not None:
            page.add("midair_component_cpu_seconds_total", used.cpu_s, labels)
            page.add("midair_component_memory_bytes", used.memory, labels)
    _add_events(page, log)
    return page.text()


def _add_counts(page: Exposition, counts: Counts) -> None:
    labels = {} if counts.index is None else {"connmgr": counts.index}
    for name, value in counts.totals.items():
        if isinstance(value, list):
            metric, label, elements = ARRAYS[name]
            for element, count in zip(elements, value, strict=True):
                if element:
                    page.add(metric, count, {**labels, label: element})
        elif name.startswith(FOUND):
            page.add(f"midair_{counts.role}_{name}", value, labels)
        else:
            page.add(f"midair_{counts.role}_{name}_total", value, labels)
    for name, value in counts.gauges.items():
        if isinstance(value, list):
            for index, waiting in enumerate(value):
                page.add(f"midair_{counts.role}_{name}", waiting, {"connmgr": index})
        else:
            page.add(f"midair_{counts.role}_{name}", value, labels)


def _add_events(page: Exposition, log: Iterable[dict[str, Any]]) -> None:
    """The last of each kind that says how long something took, per component."""
    last: dict[tuple[str, str], float] = {}
    wanted = {
        events.BACK: ("midair_component_last_away_seconds", "away_ms"),
        events.RECOVERED: ("midair_component_last_recovery_seconds", "took_ms"),
        events.UPGRADED: ("midair_component_last_upgrade_pause_seconds", "pause_ms"),
    }
    for event in log:
        if (kind := event.get("kind")) in wanted:
            metric, key = wanted[kind]
            value = event["details"].get(key)
            if isinstance(value, int | float):
                last[metric, str(event.get("component"))] = value / 1e3
    for (metric, component), seconds in sorted(last.items()):
        page.add(metric, round(seconds, 6), {"component": component})


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
