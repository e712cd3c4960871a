"""midair-monitor: what it says is true, has the shapes tools expect, and nobody needs it.

Method: real instances and an HTTP client; shapes are compared with those of a real nats-server;
counters are compared with what the clients of the test did.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from midair import config
from native.stats import CLOSE_REASONS, REFUSALS
from tests.support import natsserver
from tests.support.instance import PATIENCE_S, Instance, cli, eventually, start
from tests.support.live import Client, nobody_notices
from tests.support.look import await_conn, get, get_json, metrics, monitor_of, named

pytestmark = pytest.mark.skipif(
    "MIDAIR_TEST_SERVER" in os.environ, reason="is about instances that the tests start"
)
Make = Callable[..., Instance]
WATCHED = ("--monitor", "0")

# What nats-top and prometheus-nats-exporter read.
VARZ = [
    "server_id",
    "server_name",
    "version",
    "host",
    "port",
    "max_connections",
    "ping_interval",
    "ping_max",
    "max_control_line",
    "max_payload",
    "max_pending",
    "write_deadline",
    "start",
    "now",
    "uptime",
    "mem",
    "cores",
    "cpu",
    "connections",
    "total_connections",
    "routes",
    "remotes",
    "leafnodes",
    "in_msgs",
    "out_msgs",
    "in_bytes",
    "out_bytes",
    "slow_consumers",
    "subscriptions",
    "http_req_stats",
    "config_load_time",
    "auth_timeout",
    "tls_timeout",
    "gomaxprocs",
    "jetstream",
]
CONNZ = ["server_id", "now", "num_connections", "total", "offset", "limit", "connections"]
CONN = [
    "cid",
    "kind",
    "type",
    "ip",
    "port",
    "start",
    "last_activity",
    "rtt",
    "uptime",
    "idle",
    "pending_bytes",
    "in_msgs",
    "out_msgs",
    "in_bytes",
    "out_bytes",
    "subscriptions",
    "name",
    "lang",
    "version",
    "subscriptions_list",
]
SUBSZ = [
    "server_id",
    "now",
    "num_subscriptions",
    "num_cache",
    "num_inserts",
    "num_removes",
    "num_matches",
    "cache_hit_rate",
    "max_fanout",
    "avg_fanout",
    "total",
    "offset",
    "limit",
    "subscriptions_list",
]
SUB = ["account", "subject", "sid", "msgs", "cid"]


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, str]]:
    """A real nats-server, and where it is monitored."""
    with natsserver.nats_server(tmp_path_factory.mktemp("ports")) as found:
        yield found


@pytest.fixture(scope="module")
def watched(request: pytest.FixtureRequest) -> Iterator[Instance]:
    instance = start(request.node.nodeid, "", *WATCHED)
    yield instance
    instance.stop()


def shape(value: Any) -> str:
    """The JSON type."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else type(value).__name__


def same_shape(ours: dict[str, Any], theirs: dict[str, Any], keys: list[str]) -> None:
    for key in keys:
        assert key in theirs, f"nats-server has no {key}: the test is wrong"
        assert key in ours, key
        assert shape(ours[key]) == shape(theirs[key]), key


def test_the_shapes_are_those_of_nats_server(
    make_midair: Make, nats_server: tuple[Instance, str]
) -> None:
    instance = make_midair(connmgrs=1, options=WATCHED)
    them, there = nats_server
    here = monitor_of(instance)
    with named(instance, "a client", "a.b") as one, named(them, "a client", "a.b") as other:
        for client in (one, other):
            client.send(b"PUB a.b 2\r\nhi\r\n")
            client.ping_behind_messages(1)
        await_conn(instance, "a client", messages_out=1)
        same_shape(get_json(f"{here}/varz"), get_json(f"{there}/varz"), VARZ)
        ours, theirs = get_json(f"{here}/connz?subs=1"), get_json(f"{there}/connz?subs=1")
        same_shape(ours, theirs, CONNZ)
        same_shape(ours["connections"][0], theirs["connections"][0], CONN)
        assert ours["connections"][0]["subscriptions_list"] == ["a.b"]
        ours, theirs = get_json(f"{here}/subsz?subs=1"), get_json(f"{there}/subsz?subs=1")
        same_shape(ours, theirs, SUBSZ)
        same_shape(ours["subscriptions_list"][0], theirs["subscriptions_list"][0], SUB)
    assert get_json(f"{here}/healthz") == get_json(f"{there}/healthz") == {"status": "ok"}


def load(server: Instance) -> list[Client]:
    """The same on every server: with headers and without, to nobody, to groups, to several."""
    hello = b'CONNECT {"verbose":false,"headers":true,"no_responders":true,"name":"%s"}\r\n'
    one, two = Client(server), Client(server)
    one.send(hello % b"one" + b"SUB a.* 1\r\nSUB b q 22\r\nSUB in 3\r\n")
    one.ping()
    two.send(hello % b"two" + b"SUB a.x 7\r\n")
    two.ping()
    one.send(b"HPUB a.x 12 14\r\nNATS/1.0\r\n\r\nhi\r\n" + b"PUB a.y 5\r\nhello\r\n" * 30)
    one.send(b"PUB b r 5\r\nhello\r\nPUB none in 3\r\nabc\r\n" + b"PUB a.x 0\r\n\r\n")
    one.ping_behind_messages(1 + 30 + 1 + 1 + 1)
    two.ping_behind_messages(2)
    return [one, two]


@pytest.mark.parametrize("connmgrs", [1, 2])
def test_the_same_load_shows_the_same_numbers(
    make_midair: Make, tmp_path: Path, connmgrs: int
) -> None:
    instance = make_midair(connmgrs=connmgrs, options=WATCHED)
    with natsserver.nats_server(tmp_path) as (them, there):
        here = monitor_of(instance)
        clients = load(instance) + load(them)
        await_conn(instance, "one", messages_in=34, messages_out=33)
        await_conn(instance, "two", messages_out=2)
        counted = ("in_msgs", "out_msgs", "in_bytes", "out_bytes", "connections", "slow_consumers")
        ours, theirs = get_json(f"{here}/varz"), get_json(f"{there}/varz")
        assert [ours[key] for key in counted] == [theirs[key] for key in counted]
        ours, theirs = (get_json(f"{it}/connz?subs=detail&sort=cid") for it in (here, there))
        rows = ("name", "in_msgs", "out_msgs", "in_bytes", "out_bytes", "subscriptions", "kind")
        for mine, other in zip(ours["connections"], theirs["connections"], strict=True):
            assert [mine[key] for key in rows] == [other[key] for key in rows]
            assert re.fullmatch(r"[0-9.]+(µs|ms|s)", mine["rtt"])
            assert called(mine) == called(other)
        (ours,), (theirs,) = (get_json(f"{it}/accstatz")["account_statz"] for it in (here, there))
        assert list(ours) == list(theirs)
        del ours["num_subscriptions"], theirs["num_subscriptions"]  # it has some of its own
        assert ours == theirs
        assert get_json(f"{here}/subsz")["max_fanout"] == get_json(f"{there}/subsz")["max_fanout"]
        for client in clients:
            client.close()


def called(row: dict[str, Any]) -> set[tuple[str, ...]]:
    found = row["subscriptions_list_detail"]
    return {(it["subject"], it.get("qgroup", ""), it["sid"]) for it in found}


NAMED = {"server_id", "server_name", "now"}  # what differs between any two servers


@pytest.mark.parametrize("path", ["routez", "gatewayz", "leafz", "jsz", "jsz?accounts=1"])
def test_what_it_has_nothing_of_is_said_as_nats_server_says_it(
    watched: Instance, nats_server: tuple[Instance, str], path: str
) -> None:
    ours, theirs = get_json(f"{monitor_of(watched)}/{path}"), get_json(f"{nats_server[1]}/{path}")
    assert list(ours) == list(theirs)
    assert {key: it for key, it in ours.items() if key not in NAMED} == {
        key: it for key, it in theirs.items() if key not in NAMED
    }


def test_the_one_account(watched: Instance, nats_server: tuple[Instance, str]) -> None:
    here, there = monitor_of(watched), nats_server[1]
    assert get_json(f"{here}/accountz")["accounts"] == ["$G"]
    for path in ("accountz", "accstatz", "accstatz?unused=1"):
        ours, theirs = get_json(f"{here}/{path}"), get_json(f"{there}/{path}")
        same_shape(ours, theirs, list(theirs))
    ours, theirs = (get_json(f"{it}/accountz?acc=$G")["account_detail"] for it in (here, there))
    same_shape(ours, theirs, [key for key in theirs if key != "imports"])
    same_shape(ours["sublist_stats"], theirs["sublist_stats"], list(theirs["sublist_stats"]))
    said = [get(f"{it}/accountz?acc=nope") for it in (here, there)]
    assert [(status, body.strip()) for status, _, body in said] == [
        (400, "Account nope does not exist")
    ] * 2


@pytest.mark.parametrize("path", ["varz", "connz", "subsz", "healthz", "jsz", "routez"])
def test_a_page_may_name_a_function(watched: Instance, path: str) -> None:
    """As nats-server 2.9 did; 2.15 answers as if nothing was asked for."""
    status, kind, body = get(f"{monitor_of(watched)}/{path}?callback=page.show")
    assert (status, kind) == (200, "application/javascript")
    assert body.startswith("page.show({")
    assert body.endswith("})")
    status, _, body = get(f"{monitor_of(watched)}/{path}?callback=alert(1)//")
    assert (status, body) == (400, "callback: the name of a function is allowed\n")


def test_what_is_counted_is_what_happened(make_midair: Make) -> None:
    instance = make_midair(connmgrs=2, options=WATCHED)
    url = monitor_of(instance)
    sent = 250
    with named(instance, "to", "x.*", "x.> group") as to, named(instance, "from") as sender:
        sender.send(b"PUB x.y 5\r\nhello\r\n" * sent)
        sender.ping()
        to.ping_behind_messages(2 * sent)
        await_conn(instance, "from", messages_in=sent, messages_out=0, subs=0)
        row = await_conn(instance, "to", messages_out=2 * sent, messages_in=0, pending=0, subs=2)
        assert row["ip"] == "127.0.0.1"
        assert (row["lang"], row["version"]) == ("test", "1.2")
        varz = get_json(f"{url}/varz")
        assert (varz["in_msgs"], varz["out_msgs"]) == (sent, 2 * sent)
        assert (varz["connections"], varz["total_connections"]) == (2, 2)
        assert varz["subscriptions"] == 2
        assert (varz["in_bytes"], varz["out_bytes"]) == (sent * 5, 2 * sent * 5)
        assert varz["midair"]["in_stream_bytes"] > sent * 18
        assert {it["component"] for it in varz["midair"]["components"]} == set(
            instance.components()
        )
        connz = get_json(f"{url}/connz?sort=msgs_to&limit=1")
        assert [it["name"] for it in connz["connections"]] == ["to"]
        assert (connz["num_connections"], connz["total"], connz["limit"]) == (1, 2, 1)
        assert [it["name"] for it in get_json(f"{url}/connz?offset=1&sort=cid")["connections"]] == [
            "from"
        ]
        one = get_json(f"{url}/connz?cid={row['id']}&subs=detail")["connections"]
        assert {
            (it["subject"], it.get("qgroup")) for it in one[0]["subscriptions_list_detail"]
        } == {
            ("x.*", None),
            ("x.>", "group"),
        }
        subsz = get_json(f"{url}/subsz?subs=1&limit=1")
        assert (subsz["num_subscriptions"], subsz["total"]) == (2, 2)
        assert len(subsz["subscriptions_list"]) == 1
        assert subsz["num_matches"] == sent
        assert subsz["avg_fanout"] == 2
        assert get_json(f"{url}/subsz?test=y.x")["subscriptions_list"] == []
        eventually(  # the dispatcher tells once a second
            lambda: metrics(instance)["midair_dispatcher_accepted_total"] == 2, "two were accepted"
        )
        samples = metrics(instance)
        for name, count in (("messages_in", sent), ("messages_out", 2 * sent)):
            total = sum(samples[f'midair_connmgr_{name}_total{{connmgr="{n}"}}'] for n in (0, 1))
            assert total == count
        assert samples["midair_router_deliveries_total"] == 2 * sent
        assert samples["midair_healthy"] == 1


def closed(instance: Instance) -> dict[str, float]:
    """Connections that ended and frames that were refused, by name; what is 0 is left out."""
    samples = metrics(instance)
    found = {}
    for family, label, elements in (
        ("connections_closed", "reason", CLOSE_REASONS[1:]),
        ("frames_refused", "error", REFUSALS[1:]),
    ):
        for name in elements:
            sample = f'midair_{family}_total{{connmgr="0",{label}="{name}"}}'
            if samples[sample]:
                found[name] = samples[sample]
    return found


def test_every_end_is_counted_by_its_name(make_midair: Make) -> None:
    text = "[limits]\nmax_payload = 1000\nmax_subscriptions = 2\nping_interval_s = 600\n"
    instance = make_midair(config=text, connmgrs=1, options=WATCHED)
    wanted: dict[str, float] = {}
    for reason, error, line in (
        ("protocol", "unknown_op", b"NONSENSE\r\n"),
        ("protocol", "payload", b"PUB a 1001\r\n"),
        ("subscriptions", "", b"SUB a 1\r\nSUB b 2\r\nSUB c 3\r\n"),
        ("client", "", b""),
        ("client", "subject", b"SUB a..b 1\r\n"),
    ):
        with named(instance, "about to end") as client:
            if line:
                client.send(line)
                client.read_error(closes=reason != "client")
        for name in (reason, error):
            if name:
                wanted[name] = wanted.get(name, 0) + 1
        eventually(lambda: closed(instance) == wanted, f"counted: {wanted}, not {closed(instance)}")
    assert get_json(f"{monitor_of(instance)}/varz")["midair"]["closed"]["subscriptions"] == 1


def test_slow_and_refused_clients_are_counted(make_midair: Make) -> None:
    text = '[limits]\nmax_connections = 2\nmax_pending = "64KiB"\n'
    instance = make_midair(config=text, connmgrs=1, options=WATCHED)
    with named(instance, "slow", "big") as slow, named(instance, "sender") as sender:
        third = instance.connect()
        assert b"maximum connections exceeded" in third.recv(4096)
        third.close()
        body = bytes(500_000)
        # It does not read: the sockets take a few MB, then it is too slow.
        for _ in range(40):
            sender.send(b"PUB big %d\r\n%s\r\n" % (len(body), body))
        sender.ping()
        eventually(lambda: closed(instance).get("slow_bytes"), "a slow consumer")
        assert slow is not sender
    eventually(lambda: metrics(instance)["midair_dispatcher_refused_total"] == 1, "the third")
    assert get_json(f"{monitor_of(instance)}/varz")["slow_consumers"] == 1


def test_counts_survive_the_death_of_who_counts(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1, options=WATCHED)
    with named(instance, "stays", "s") as client:
        client.send(b"PUB s 2\r\nhi\r\n" * 10)
        client.ping_behind_messages(10)
        before = await_conn(instance, "stays", messages_in=10, messages_out=10)
        for victim in ("connmgr/0", "router", "dispatcher"):
            killed = instance.pid(victim)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: instance.components()[victim]["generation"] == 2, f"{victim} back")  # noqa: B023
        client.send(b"PUB s 2\r\nhi\r\n" * 5)
        client.ping_behind_messages(5)
        after = await_conn(instance, "stays", messages_in=15, messages_out=15)
        assert after["id"] == before["id"]
        assert (after["lang"], after["port"]) == ("test", before["port"])
        assert after["bytes_in"] > before["bytes_in"]
        eventually(lambda: metrics(instance)["midair_router_messages_total"] == 15, "routed 15")
        assert metrics(instance)["midair_dispatcher_accepted_total"] == 1
        assert closed(instance) == {}
    samples = metrics(instance)
    for victim in ("connmgr/0", "router", "dispatcher"):
        assert samples[f'midair_component_last_away_seconds{{component="{victim}"}}'] > 0
    assert samples['midair_component_last_recovery_seconds{component="router"}'] > 0


def test_killed_under_load_it_comes_back_and_nobody_notices(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1, options=WATCHED)
    before = instance.components()
    with nobody_notices(instance, connections=10):
        for generation in (2, 3):
            os.kill(instance.pid("monitor"), signal.SIGKILL)
            eventually(
                lambda: (
                    (row := instance.components()["monitor"])["generation"] == generation  # noqa: B023
                    and row["state"] == "active"
                ),
                "the monitor is back",
            )
            assert get_json(f"{monitor_of(instance)}/healthz") == {"status": "ok"}
    after = instance.components()
    for called, row in before.items():
        if called != "monitor":
            assert after[called]["pid"] == row["pid"], called


def test_however_often_it_dies_the_instance_goes_on(make_midair: Make) -> None:
    text = "[manager]\nrestart_limit = 2\nrestart_window_s = 60\n"
    instance = make_midair(config=text, connmgrs=1, options=WATCHED)
    for _ in range(3):
        row = eventually(
            lambda: (it := instance.components()["monitor"])["state"] == "active" and it,
            "the monitor is at work",
        )
        os.kill(row["pid"], signal.SIGKILL)
        # Not the old state: it has noticed.
        eventually(lambda: instance.components()["monitor"]["pid"] != row["pid"], "it died")  # noqa: B023
        with Client(instance) as client:
            client.ping()
    assert "monitor died 2 times in 60 s" in instance.stderr()
    assert instance.process is not None
    assert instance.process.poll() is None
    eventually(lambda: get(f"{monitor_of(instance)}/healthz")[0] == 200, "it is tried again")


def test_a_component_that_is_away_makes_it_unhealthy(make_midair: Make) -> None:
    instance = make_midair(config="[manager]\nwatchdog_s = 120\n", connmgrs=1, options=WATCHED)
    url = f"{monitor_of(instance)}/healthz"
    pid = instance.pid("dispatcher")
    os.kill(pid, signal.SIGSTOP)
    try:
        _, _, body = eventually(
            lambda: (it := get(url))[0] == 503 and it, "the dispatcher is missed"
        )
        assert "dispatcher has said nothing" in json.loads(body)["error"]
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: get(url)[0] == 200, "healthy again")


def test_there_is_none_unless_asked_for(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1)
    assert "monitor" not in instance.components()
    assert "monitor" not in instance.line


def test_a_port_that_is_taken_is_said_in_one_line(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1, options=WATCHED)
    port = monitor_of(instance).rpartition(":")[2]
    done = cli("up", "--name", f"{instance.name}-2", "--port", "0", "--monitor", port)
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert "--monitor" in done.stderr
    assert cli("up", "--monitor", "nowhere").returncode == 2


def talk(url: str, data: bytes) -> bytes:
    """Everything that is answered to some bytes."""
    with socket.create_connection(config.split_address(url.removeprefix("http://"))) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(data)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return answer


def test_http_is_spoken_with_care(make_midair: Make) -> None:
    instance = make_midair(connmgrs=1, options=WATCHED)
    url = monitor_of(instance)
    assert get(f"{url}/nothing")[0] == 404
    assert get(f"{url}/")[0] == 200
    for query in ("limit=x", "offset=-1", "sort=beauty", "cid=1.5"):
        status, _, body = get(f"{url}/connz?{query}")
        assert (status, body.count("\n")) == (400, 1)
    end = b"HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert talk(url, b"POST /varz " + end).startswith(b"HTTP/1.1 405 ")
    head, _, body_of_head = talk(url, b"HEAD /varz " + end).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body_of_head == b""
    assert talk(url, b"\x00\x01\x02\r\n\r\n").startswith(b"HTTP/1.0 400 ")
    assert talk(url, b"GET /" + b"x" * 100_000).startswith(b"HTTP/1.0 431 ")
    twice = talk(url, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz " + end)
    assert twice.count(b'{\n  "status": "ok"\n}') == 2
    # Who says nothing keeps nobody waiting.
    address = config.split_address(url.removeprefix("http://"))
    silent = [socket.create_connection(address) for _ in range(20)]
    assert get(f"{url}/healthz")[0] == 200
    for sock in silent:
        sock.close()


def families(instance: Instance) -> set[str]:
    """Every metric as `name type labels`, from a parser that is not ours."""
    _, _, body = get(f"{monitor_of(instance)}/metrics")
    found = set()
    for family in text_string_to_metric_families(body):
        assert family.documentation, family.name
        for sample in family.samples:
            found.add(f"{sample.name} {family.type} {','.join(sample.labels)}".rstrip())
    return found


def test_metrics_keep_their_names_types_and_labels(make_midair: Make) -> None:
    """Dashboards and alerts are written against them: a metric is added or removed on purpose."""
    instance = make_midair(connmgrs=2, options=WATCHED)
    listed = Path(__file__).with_name("metrics.txt").read_text()
    wanted = {line for line in listed.splitlines() if not line.startswith("#")}
    eventually(lambda: families(instance) >= wanted, "every component has published its figures")
    assert families(instance) == wanted
