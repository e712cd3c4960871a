"""The control socket of `midair up`: what `midair status`, `down` and `upgrade` talk to.

One JSON object each way, each one SEQPACKET message: {"op": "status"} is answered with
the report, {"op": "down"} with the manager's pid before it ends everything, {"op": "trace",
"want": true} when a tracer is being started (false: ended). An upgrade is
answered with an object for each thing that happens, the last of which has "done" or "error".

Each object has "v", the version of what is written here: 0 if it is not there, as in release 0.1.
Keys may be added without a new version, and those that are not known are left alone. A request of a
newer version is answered with "error"; an answer of a newer version is an error of the command.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

from midair import names
from midair.errors import MidairError, NotRunningError
from midair.exits import Exit
from midair.process import trust
from midair.process.runtime import Runtime
from midair.version import __version__

VERSION = 1
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
            if "error" in answer:
                raise MidairError(answer["error"])
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
            trust.check_peer(sock, runtime.socket(names.CONTROL_SOCKET))
            sock.send(json.dumps({**request, "v": VERSION}).encode())
            while data := sock.recv(MESSAGE_BYTES_MAX):
                answer: dict[str, Any] = json.loads(data)
                if (version := answer.pop("v", 0)) > VERSION:
                    raise MidairError(
                        f"the manager of instance {runtime.instance!r} is of a newer release, and "
                        f"answers in version {version}; midair {__version__} understands up to "
                        f"{VERSION}: use the midair of that release"
                    )
                yield answer
        except (FileNotFoundError, ConnectionError):
            return


def read(sock: socket.socket) -> dict[str, Any]:
    """In the manager: what is asked for; without "op" when the connection is of no use.

    A request of a newer version is answered here, and of no use either.
    """
    try:
        request = json.loads(sock.recv(MESSAGE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(request, dict):
        return {}
    version = request.get("v", 0)
    if not isinstance(version, int) or version > VERSION:
        said = f"this manager ({__version__}) understands requests up to version {VERSION}, not "
        said += f"{version}: use the midair of its release"
        answer(sock, {"error": said, "code": int(Exit.FAILED)})
        return {}
    return request


def answer(sock: socket.socket, report: dict[str, Any]) -> None:
    """In the manager: sends an answer. A client that has gone is no concern."""
    try:
        text = json.dumps({**report, "v": VERSION})
        sock.send(text.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return
