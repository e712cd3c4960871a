"""The listening sockets of an instance. `midair up` makes them, the components use them.

They outlive every component, and the manager (sockets.py): while one is away its clients wait in
the backlog. A TCP socket is bound at once and listens when it can be served (`listen`): until then
connecting to it is refused.

Facts relied on: all copies of a socket begin to listen when one does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midair import config, names
from midair.errors import MidairError
from midair.exits import Exit
from midair.process.runtime import Runtime

CLIENT_BACKLOG = 4096
PEER_BACKLOG = 128
CHOOSE = "--port, server.listen"  # what to change about an address that is in use

Owner = tuple[str, int | None]  # the role and index of a component


@dataclass
class Listening:
    """A listening socket of a component."""

    fd_name: str  # what it is called when it is passed on
    uid: int  # under which the keeper has a copy
    owner: Owner
    open: Callable[[], socket.socket]  # binds it
    sock: socket.socket | None = None


def by_ipv4(addresses: Sequence[str]) -> set[int]:
    """TCP ports that a listener of IPv4 takes: one at `[::]` leaves them to it."""
    split = [config.split_address(address) for address in addresses]
    return {port for host, port in split if ":" not in host and port}


def open_client(address: str, choose: str = CHOOSE, both: bool = True) -> socket.socket:
    """A TCP socket bound to "host:port"; port 0 takes a free one. `choose`: what to change.

    `both`: at `[::]` it takes clients of both families.
    """
    host, port = config.split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host looks like that
        why = getattr(error, "strerror", None) or "this is no name of a host"
        raise MidairError(f"cannot listen on {address}: {why}", Exit.CANNOT_LISTEN) from None
    family, kind, protocol, _, resolved = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            every = resolved[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not (every and both))
        sock.bind(resolved)
    except OSError as error:
        sock.close()
        raise _cannot(address, error, choose) from None
    sock.setblocking(False)
    return sock


def listen(sock: socket.socket) -> None:
    """Clients may connect from now on. It may listen already."""
    try:
        sock.listen(CLIENT_BACKLOG)
    except OSError as error:  # two that were bound, and did not listen, may have the same address
        raise _cannot(address_of(sock), error, CHOOSE) from None


def _cannot(address: str, error: OSError, choose: str) -> MidairError:
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        why = f"the port is in use by another program; choose another ({choose})"
    return MidairError(f"cannot listen on {address}: {why}", Exit.CANNOT_LISTEN)


def open_peer(runtime: Runtime, name: str) -> socket.socket:
    """A SEQPACKET listener in the runtime directory, for this user only."""
    return _bound(runtime, name, socket.SOCK_SEQPACKET, 0o600)


def open_notify(runtime: Runtime, shared: bool) -> socket.socket:
    """The datagram socket components report to, with the sender's pid on each message."""
    sock = _bound(runtime, names.NOTIFY_SOCKET, socket.SOCK_DGRAM, 0o660 if shared else 0o600)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return sock


def address_of(sock: socket.socket) -> str:
    """The "host:port" a TCP listener has really got."""
    host, port = sock.getsockname()[:2]
    return config.join_address(host, port)


def _bound(runtime: Runtime, name: str, kind: socket.SocketKind, mode: int) -> socket.socket:
    """In the place of one that a manager before us may have left."""
    sock = socket.socket(socket.AF_UNIX, kind)
    path = runtime.socket(name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock.bind(path)
    os.chmod(path, mode)
    if mode & 0o060:
        os.chown(path, -1, runtime.path.stat().st_gid)
    if kind != socket.SOCK_DGRAM:
        sock.listen(PEER_BACKLOG)
    sock.setblocking(False)
    return sock
