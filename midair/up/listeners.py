"""The listening sockets of an instance. `midair up` makes them, the components use them.

They outlive every component: while one is away its clients wait in the backlog.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from midair import config, names
from midair.errors import MidairError
from midair.exits import Exit
from midair.process.runtime import Runtime

CLIENT_BACKLOG = 4096
PEER_BACKLOG = 128


def open_clients(addresses: Sequence[str]) -> list[socket.socket]:
    """Listeners for clients. `[::]` takes both families, unless another one takes IPv4 there."""
    split = [config.split_address(address) for address in addresses]
    by_ipv4 = {port for host, port in split if ":" not in host and port}
    return [
        open_client(address, both=port not in by_ipv4)
        for address, (_, port) in zip(addresses, split, strict=True)
    ]


def open_client(
    address: str, choose: str = "--port, server.listen", both: bool = True
) -> socket.socket:
    """A TCP listener at "host:port"; port 0 takes a free one. `choose`: what to change.

    `both`: at `[::]` it takes clients of both families.
    """
    host, port = config.split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise MidairError(
            f"cannot listen on {address}: {error.strerror}", Exit.CANNOT_LISTEN
        ) from None
    family, kind, protocol, _, resolved = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            every = resolved[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not (every and both))
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
