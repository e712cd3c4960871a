"""What the tests of the monitor and of its commands share."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.support.instance import PATIENCE_S, Instance, cli, eventually
from tests.support.live import Client


def monitor_of(instance: Instance) -> str:
    """http://host:port of the monitor, from the line of `midair up`."""
    found = re.search(r"monitor: (http://\S+)/", instance.line)
    assert found, instance.line
    return found.group(1)


def get(url: str) -> tuple[int, str, str]:
    """(status, content type, body) of a request."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def get_json(url: str) -> dict[str, Any]:
    status, kind, body = get(url)
    assert (status, kind) == (200, "application/json"), body
    said: dict[str, Any] = json.loads(body)
    return said


def metrics(instance: Instance) -> dict[str, float]:
    """Sample -> value; labels are part of the sample's name, as they are printed."""
    status, kind, body = get(f"{monitor_of(instance)}/metrics")
    assert status == 200
    assert kind.startswith("text/plain; version=0.0.4")
    found = {}
    for line in body.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            assert sample not in found, sample
            found[sample] = float(value)
    return found


def listed(instance: Instance, *args: str) -> Any:
    """What `midair conns|subs ... --json` prints."""
    command, *rest = args
    done = cli(command, "--name", instance.name, "--json", *rest)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def named(instance: Instance, name: str, *subscriptions: str) -> Iterator[Client]:
    """A client that has said its name, and subscribed; `subject queue` for queue groups."""
    with Client(instance) as client:
        hello = json.dumps({"verbose": False, "name": name, "lang": "test", "version": "1.2"})
        lines = [f"CONNECT {hello}"]
        lines += [f"SUB {text} {at}" for at, text in enumerate(subscriptions)]
        client.send("".join(f"{line}\r\n" for line in lines).encode())
        client.ping()
        yield client


def await_conn(instance: Instance, name: str, **wanted: Any) -> dict[str, Any]:
    """The connection of that name, once it has these figures."""

    def look() -> Any:
        for conn in listed(instance, "conns", "--limit", "0"):
            if conn["name"] == name and all(conn[key] == it for key, it in wanted.items()):
                return conn
        return None

    conn: dict[str, Any] = eventually(look, f"{name} has {wanted}")
    return conn
