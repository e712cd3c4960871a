"""The control socket of `midair up`: what `midair status`, `down` and `upgrade` talk to.

One JSON object each way, each one SEQPACKET message: {"op": "status"} is answered with
the report, {"op": "down"} with the manager's pid before it ends everything (with "lame_duck":
before its clients leave), {"op": "trace", "want": true} when a tracer is being started (false:
ended). An upgrade and a reload ({"op": "reload", "dry_run": false}) are answered with an object for
each thing that happens, the last of which has "done" or "error".

Each object has "v", the version of what is written here: 0 if it is not there, as in release 0.1.
Keys may be added without a new version, and those that are not known are left alone. A request of a
newer version is answered with "error"; an answer of a newer version is an error of the command.

Whatever a connection sends, or does not send, is its own loss: it is closed (`Desk`).
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator
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
RELOAD = "reload"
TRACE = "trace"
MESSAGE_BYTES_MAX = 65536
TIMEOUT_S = 10.0
WAITING_MAX = 64  # connections that have not said yet what they want; more push out the oldest
BUSY_S = 0.01  # until a full backlog is tried again

Serve = Callable[[socket.socket, dict[str, Any]], None]


def ask(runtime: Runtime, op: str, **more: Any) -> dict[str, Any]:
    """Asks the manager of a running instance. NotRunningError: there is none."""
    try:
        for answer in follow(runtime, {"op": op, **more}, TIMEOUT_S):
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
            _connect(sock, runtime.socket(names.CONTROL_SOCKET), timeout_s)
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


def _connect(sock: socket.socket, path: str, timeout_s: float) -> None:
    """Of a local socket, connecting does not wait while too many others do."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(BUSY_S)


class Desk:
    """In the manager: connections to the control socket until they have said what they want.

    `serve` gets a connection and its request, and closes it sooner or later.
    """

    def __init__(
        self, selector: selectors.BaseSelector, listener: socket.socket, serve: Serve
    ) -> None:
        self._selector = selector
        self._serve = serve
        self._waiting: dict[socket.socket, float] = {}  # since when; the oldest first
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def turn(self) -> None:
        """Closes those that have said nothing for too long."""
        for sock, since in list(self._waiting.items()):
            if time.monotonic() < since + TIMEOUT_S:
                return
            self._take(sock).close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(WAITING_MAX):
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if not trust.is_welcome(sock, listener):
                continue
            sock.setblocking(False)
            while len(self._waiting) >= WAITING_MAX:
                self._take(next(iter(self._waiting))).close()
            self._waiting[sock] = time.monotonic()
            self._selector.register(sock, selectors.EVENT_READ, self._read)

    def _read(self, sock: socket.socket) -> None:
        request = read(self._take(sock))
        if request:
            self._serve(sock, request)
        else:
            sock.close()

    def _take(self, sock: socket.socket) -> socket.socket:
        self._selector.unregister(sock)
        del self._waiting[sock]
        return sock


def read(sock: socket.socket) -> dict[str, Any]:
    """In the manager: what is asked for; nothing when the connection is of no use.

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
        said += f"{str(version)[:20]}: use the midair of its release"
        answer(sock, {"error": said, "code": int(Exit.FAILED)})
        return {}
    return request


def answer(sock: socket.socket, report: dict[str, Any]) -> None:
    """In the manager: sends an answer. A client that has gone is no concern."""
    with contextlib.suppress(OSError):
        text = json.dumps({**report, "v": VERSION})
        sock.send(text.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
