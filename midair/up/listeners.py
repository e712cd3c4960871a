"""The listening sockets of an instance. `midair up` makes them, the components use them.

They outlive every component: while one is away its clients wait in the backlog.
"""

from __future__ import annotations

import errno
import os
import socket

from midair import config, names
from midair.errors import MidairError
from midair.exits import Exit
from midair.process.runtime import Runtime

CLIENT_BACKLOG = 4096
PEER_BACKLOG = 128


def open_client(address: str, choose: str = "--port, server.listen") -> socket.socket:
    """A TCP listener at "host:port"; port 0 takes a free one. `choose`: what to change."""
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
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(resolved)
        sock.listen(CLIENT_BACKLOG)
    except OSError as error:
        sock.close()
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = f"the port is in use by another program; choose another ({choose})"
        raise MidairError(f"cannot listen on {address}: {why}", Exit.CANNOT_LISTEN) from None
    sock.setblocking(False)
    return sock


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
    sock = socket.socket(socket.AF_UNIX, kind)
    path = runtime.socket(name)
    sock.bind(path)
    os.chmod(path, mode)
    if mode & 0o060:
        os.chown(path, -1, runtime.path.stat().st_gid)
    if kind != socket.SOCK_DGRAM:
        sock.listen(PEER_BACKLOG)
    sock.setblocking(False)
    return sock
