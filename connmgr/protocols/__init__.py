"""What a connmgr decides for each wire protocol: greetings, and who a client says it is.

The bytes of frames are C's (native/src/protocol/). A protocol that has something for Python to
decide has a module of its name here, with a class `Protocol`; one that has nothing needs none.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any


class RefusedError(Exception):
    """What a client says about itself is not accepted: it is told the text."""


@dataclass(frozen=True)
class Client:
    """A client that has said who it is."""

    options: int  # of the data plane
    name: str
    lang: str
    version: str
    ipc_name: str  # TYPE.INSTANCE it can be addressed by, perhaps @ORGANISATION, or empty


@dataclass(frozen=True)
class Server:
    """What a greeting may tell about this server."""

    instance: str
    name: str
    version: str
    listen: str  # host:port
    max_payload: int
    lame_duck: bool = False  # it is going to end


class Protocol:
    """One that greets nobody, and in which a client says nothing about itself."""

    def greeting(self, server: Server) -> bytes:
        """What a client gets first, with places for its number and address, or nothing."""
        return b""

    def connect(self, data: bytes, options: int) -> Client:
        """The client that says this about itself; what it leaves out stays as it was."""
        raise RefusedError("not understood")


def find(name: str) -> Protocol:
    """The one of that name."""
    module = f"{__name__}.{name}"
    if importlib.util.find_spec(module) is None:
        return Protocol()
    made: Any = importlib.import_module(module).Protocol()
    assert isinstance(made, Protocol)
    return made
