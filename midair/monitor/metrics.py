"""/metrics: everything that is counted, as families of prometheus_client.

A collector looks at the instance when it is asked, so there is nothing to keep up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

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
    "midair_info": "1; its labels say what runs.",
    "midair_healthy": "1 if every component is at work, as /healthz says.",
    "midair_shared_memory_bytes": "Shared memory that is really used.",
    "midair_pending_bytes": "Bytes that wait to be written to clients.",
    "midair_pending_bytes_max": "Bytes that wait for the client that most wait for.",
    "midair_busy_connections": "Connections that sent messages lately.",
    "midair_fairness": "Jain's index over the message rates of the busy connections.",
    "midair_component_generation": "How often the component has been started.",
    "midair_component_start_time_seconds": "When the process started, since the epoch.",
    "midair_component_cpu_seconds_total": "CPU time the process has used.",
    "midair_component_memory_bytes": "Memory of the process, without what is shared.",
    "midair_component_last_away_seconds": "How long nobody was at work after the last death.",
    "midair_component_last_recovery_seconds": "How long the last recovery took.",
    "midair_component_last_upgrade_pause_seconds": "How long nobody was at work in the last "
    "upgrade.",
    "midair_connections_closed_total": "Connections that ended, by reason.",
    "midair_frames_refused_total": "Frames answered with -ERR, by error.",
    "midair_connmgr_messages_in_total": "Messages received from clients.",
    "midair_connmgr_messages_out_total": "Messages delivered to clients.",
    "midair_connmgr_payload_in_total": "Bytes of headers and bodies received from clients.",
    "midair_connmgr_payload_out_total": "Bytes of headers and bodies of messages for clients.",
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
    "midair_connmgr_subscriptions": "Slots of subscriptions in use.",
    "midair_connmgr_subscriptions_max": "Slots of subscriptions.",
    "midair_connmgr_refs_waiting": "Batches of references that wait for room in the queue.",
    "midair_connmgr_refs_queued": "Batches in the queue to the router.",
    "midair_connmgr_orders_queued": "Batches in the queue from the router.",
    "midair_connmgr_reading_stopped": "1 while no client is read: the arena or the ring is full.",
    "midair_connmgr_turns_total": "Turns of the loop.",
    "midair_connmgr_order_batches_total": "Batches received from the router.",
    "midair_connmgr_throttled_total": "Times a connection was not read: over its rate.",
    "midair_connmgr_held_total": "Times a connection was not read because a consumer was crowded.",
    "midair_connmgr_dropped_total": "Messages left out for slow consumers (drop-newest).",
    "midair_connmgr_found_words": "Words of a committed step that the last start finished.",
    "midair_connmgr_found_input": "Bytes read and not recorded, found by the last start.",
    "midair_connmgr_found_output": "Bytes written and not recorded, found by the last start.",
    "midair_connmgr_found_batches": "Batches left to do or to send, found by the last start.",
    "midair_connmgr_refs_depth": "Batches that the queue to the router holds.",
    "midair_connmgr_orders_depth": "Batches that the queue from the router holds.",
    "midair_router_messages_total": "Messages routed.",
    "midair_router_deliveries_total": "Recipients found for them.",
    "midair_router_no_recipients_total": "Messages dropped because nobody had subscribed.",
    "midair_router_no_responders_total": "Requests answered with 503: nobody had subscribed.",
    "midair_router_refused_total": "Subscriptions refused: the index or its text is full.",
    "midair_router_blocked_total": "Times references waited for room in a ring of orders.",
    "midair_router_orders_waiting": "Batches of orders that wait for room in the queue.",
    "midair_router_subscriptions": "Subscriptions.",
    "midair_router_turns_total": "Turns of the loop.",
    "midair_router_batches_total": "Batches of references received.",
    "midair_router_subscribed_total": "Subscriptions added.",
    "midair_router_unsubscribed_total": "Subscriptions removed.",
    "midair_router_sessions_opened_total": "Connections the router was told of.",
    "midair_router_sessions_closed_total": "Connections whose end the router was told of.",
    "midair_router_statuses_total": "Status messages the router wrote.",
    "midair_router_mode_requests_total": "Requests in a mode.",
    "midair_router_mode_replies_total": "Replies in a mode.",
    "midair_router_mode_late_total": "Replies in a mode that came too late.",
    "midair_router_mode_expired_total": "Requests in a mode that nobody answered in time.",
    "midair_router_mode_gone_total": "Requests in a mode whose answerer has gone.",
    "midair_router_mode_refused_total": "Requests in a mode that were refused.",
    "midair_router_names_refused_total": "Clients refused because their name was taken.",
    "midair_router_found_words": "Words of a committed step that the last start finished.",
    "midair_router_found_batches": "Batches left to do or to send, found by the last start.",
    "midair_router_lists_total": "Messages with more recipients than are ordered at once.",
    "midair_router_set_aside_total": "References set aside: they would have held up others.",
    "midair_router_work_total": "Work that is counted, in units of about 20 ns.",
    "midair_router_subjects": "Subjects in the index.",
    "midair_router_subjects_max": "Subjects the index can hold.",
    "midair_router_subjects_cached": "Subjects whose recipients are cached.",
    "midair_router_requests": "Requests and sessions of modes that are open.",
    "midair_router_requests_max": "Requests and sessions that can be open.",
    "midair_router_legs": "Recipients that are to answer requests.",
    "midair_router_legs_max": "Recipients that can be waited for.",
    "midair_router_matches": "Lookups since this process began.",
    "midair_router_fanout_max": "The most recipients of a message since this process began.",
    "midair_router_builds": "Lookups since this process began that were not in the cache.",
    "midair_dispatcher_accepted_total": "Connections accepted.",
    "midair_dispatcher_refused_total": "Connections refused: the maximum was reached.",
    "midair_dispatcher_descriptors_out_total": "Times accepting rested: out of descriptors.",
    "midair_dispatcher_connections_max": "Connections there can be.",
    "midair_dispatcher_backlog": "Connections accepted and not handed on yet.",
}


@dataclass(frozen=True)
class Seen:
    """What one scrape shows."""

    instance: str
    now: Snapshot
    rates: Rates
    log: Iterable[dict[str, Any]]  # the event log
    healthy: bool


class Exporter(Collector):
    """Makes the page; `look` is called once for each."""

    def __init__(self, look: Callable[[], Seen]) -> None:
        self._look = look
        # Not the default registry: it would add what the library counts about this process.
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """Everything, in the text format of Prometheus."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """The registry asks for names at the start: what there is depends on the instance."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from families(self._look()).values()


class Families(dict[str, Metric]):
    """Name of a sample -> its family, in the order in which they came."""

    def add(self, name: str, value: float, labels: Mapping[str, Any] | None = None) -> None:
        """One sample. A name that ends with _total is a counter."""
        if name not in self:
            kind = "counter" if name.endswith("_total") else "gauge"
            # The library takes the name of a counter without its ending, and adds it again.
            self[name] = Metric(name.removesuffix("_total"), HELP.get(name, ""), kind)
        texts = {key: str(it) for key, it in (labels or {}).items()}
        self[name].add_sample(name, texts, value)


def families(seen: Seen) -> Families:
    """Every family with its samples."""
    page, now = Families(), seen.now
    page.add("midair_info", 1, {"instance": seen.instance, "version": __version__})
    page.add("midair_healthy", int(seen.healthy))
    page.add("midair_shared_memory_bytes", now.shared_bytes)
    pending = [conn.pending for conn in now.conns.values()]
    page.add("midair_pending_bytes", sum(pending))
    page.add("midair_pending_bytes_max", max(pending, default=0))
    page.add("midair_busy_connections", len(seen.rates.busy()))
    fairness = seen.rates.fairness()
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
    _add_events(page, seen.log)
    return page


def _add_counts(page: Families, counts: Counts) -> None:
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


def _add_events(page: Families, log: Iterable[dict[str, Any]]) -> None:
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
