"""NATS: INFO, and what CONNECT says about a client."""

from __future__ import annotations

import json
import re
from typing import Any

from connmgr import protocols
from connmgr.protocols import Client, RefusedError, Server
from midair.version import NATS_LEVEL
from native import connmgr as native

PROTO = 1  # the server may send INFO again

# The flags of CONNECT: the option of the data plane, and whether it is the opposite.
_FLAGS = {
    "verbose": (native.VERBOSE, False),
    "pedantic": (native.PEDANTIC, False),
    "echo": (native.NO_ECHO, True),
    "headers": (native.HEADERS, False),
    "no_responders": (native.NO_RESPONDERS, False),
}
_TEXTS = ("name", "lang", "version")

# A client that calls itself like this tells its type and instance, by which it is addressed and the
# only one so called, and perhaps its organisation. Any other name is just a name.
_IPC_NAME = re.compile(r"ipc:([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+(?:@[A-Za-z0-9_-]+)?)")


def greeting(server: Server) -> bytes:
    """INFO, with places for what differs from client to client."""
    host, _, port = server.listen.rpartition(":")
    info = {
        "server_id": f"MIDAIR-{server.instance}",
        "server_name": server.name,
        "version": NATS_LEVEL,
        "midair": server.version,
        "proto": PROTO,
        "host": host.strip("[]"),
        "port": int(port),
        "headers": True,
        "max_payload": server.max_payload,
    }
    if server.lame_duck:
        info["ldm"] = True
    head = json.dumps(info, separators=(",", ":")).encode()[:-1]
    client = b',"client_id":%b,"client_ip":"%b"} \r\n' % (native.CLIENT_ID, native.CLIENT_IP)
    text = b"INFO " + head + client
    if len(text) >= native.GREETING_MAX:
        raise ValueError(f"INFO of {len(text)} bytes, at most {native.GREETING_MAX - 1} fit")
    return text


def connect(data: bytes, options: int) -> Client:
    """The client described by the JSON of a CONNECT; what it leaves out stays as it was."""
    try:
        said: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError("Parser Error") from None
    if not isinstance(said, dict):
        raise RefusedError("Parser Error")
    # In any case, as Go reads JSON; of two that differ in case only the later one holds.
    said = {key.casefold(): value for key, value in said.items() if value is not None}
    for key, (option, inverted) in _FLAGS.items():
        if (value := said.get(key)) is None:
            continue
        if not isinstance(value, bool):
            raise RefusedError("Parser Error")
        options = options | option if value != inverted else options & ~option
    texts = {key: said.get(key) or "" for key in _TEXTS}
    if not all(isinstance(text, str) for text in texts.values()):
        raise RefusedError("Parser Error")
    protocol = said.get("protocol", 0)
    if not isinstance(protocol, int) or isinstance(protocol, bool):
        raise RefusedError("Parser Error")
    if protocol not in (0, 1):
        raise RefusedError("invalid client protocol")
    options = options | native.GREET_AGAIN if protocol else options & ~native.GREET_AGAIN
    if options & native.NO_RESPONDERS and not options & native.HEADERS:
        raise RefusedError("no responders requires headers support")
    ipc_name = _ipc_name(texts["name"])
    return Client(options, texts["name"], texts["lang"], texts["version"], ipc_name)


def _ipc_name(name: str) -> str:
    said = _IPC_NAME.fullmatch(name)
    return said[1] if said and len(said[1]) < native.NAME_MAX else ""


class Protocol(protocols.Protocol):
    """As the connmgr uses it."""

    def greeting(self, server: Server) -> bytes:
        return greeting(server)

    def connect(self, data: bytes, options: int) -> Client:
        return connect(data, options)
