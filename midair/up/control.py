"""The control socket of `midair up`: what `midair status`, `down` and `upgrade` talk to.

One JSON object each way, each one SEQPACKET message: {"op": "status"} is answered with
the report, {"op": "down"} with the manager's pid before it ends everything, {"op": "trace",
"want": true} when a tracer is being started (false: ended). An upgrade is
answered with an object for each thing that happens, the last of which has "done" or "error".
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

from midair import names
from midair.errors import NotRunningError
from midair.process.runtime import Runtime

STATUS = "status"
DOWN = "down"
UPGRADE = "upgrade"
TRACE = "trace"
MESSAGE_BYTES_MAX = 65536
TIMEOUT_S = 10.0


def ask(runtime: Runtime, op: str) -> dict[str, Any]:
    """Asks the manager of a running instance. NotRunningError: there is none."""
    try:
        for answer in follow(runtime, {"op": op}, TIMEOUT_S):
            return answer
    except TimeoutError:
        raise NotRunningError(
            f"the manager of instance {runtime.instance!r} does not answer"
        ) from None
    raise NotRunningError(f"instance {runtime.instance!r} has no manager (midair up)")


def follow(runtime: Runtime, request: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """Every answer to a request, until the manager has no more, or there is no manager.

    TimeoutError: none came for `timeout_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(runtime.socket(names.CONTROL_SOCKET))
            sock.send(json.dumps(request).encode())
            while answer := sock.recv(MESSAGE_BYTES_MAX):
                yield json.loads(answer)
        except (FileNotFoundError, ConnectionError):
            return


def read(sock: socket.socket) -> dict[str, Any]:
    """In the manager: what is asked for; without "op" when the connection is of no use."""
    try:
        request = json.loads(sock.recv(MESSAGE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    return request if isinstance(request, dict) else {}


def answer(sock: socket.socket, report: dict[str, Any]) -> None:
    """In the manager: sends an answer. A client that has gone is no concern."""
    try:
        sock.send(json.dumps(report).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return
