"""The two halves of systemd's service protocol that a component needs, and `midair up` speaks.

Facts relied on: descriptors passed to a service start at 3 and are counted by LISTEN_FDS;
LISTEN_PID says whom they are for (an environment is inherited, so a grandchild would
otherwise take them for its own); LISTEN_FDNAMES has one name for each, separated by
colons. Notifications are datagrams to NOTIFY_SOCKET; a leading '@' means an abstract
socket. WATCHDOG_USEC is how often WATCHDOG=1 has to arrive, WATCHDOG_PID for whom.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

FIRST_FD = 3


def listen_fds(environ: Mapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """(name, descriptor) of every listening socket passed to this process, in order."""
    try:
        if int(environ.get("LISTEN_PID", "")) != os.getpid():
            return []
        count = int(environ.get("LISTEN_FDS", ""))
    except ValueError:
        return []
    given = environ.get("LISTEN_FDNAMES", "")
    fdnames = given.split(":") if given else []
    result = []
    for at in range(count):
        fd = FIRST_FD + at
        os.set_inheritable(fd, False)
        result.append((fdnames[at] if at < len(fdnames) else "unknown", fd))
    return result


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds within which WATCHDOG=1 is expected, or None."""
    try:
        if int(environ.get("WATCHDOG_PID", os.getpid())) != os.getpid():
            return None
        usec = int(environ.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return usec / 1e6 if usec > 0 else None


class Notifier:
    """Sends notifications to the service manager; silent when there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self.address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self.address:
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )

    def send(self, **fields: str | int) -> None:
        """One datagram of NAME=value lines. A manager that is away or busy is no error."""
        if self._socket is None:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        try:
            self._socket.sendto(text.encode(), self.address)
        except OSError:
            return

    def close(self) -> None:
        """Only tests need it: a process takes the socket with it when it dies."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
