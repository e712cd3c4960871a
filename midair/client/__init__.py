"""Clients of Midair in Python (`api`), and the commands that are clients (`commands`).

`from midair.client import connect`: the names of `api` are found here, and imported when one of
them is asked for: most commands do without the library behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midair.client.api import (
        Client,
        ExpiredError,
        Fanout,
        Gone,
        GoneError,
        NameTakenError,
        NoRespondersError,
        Presence,
        RefusedError,
        ReplyLostError,
        Request,
        RequestError,
        Session,
        SessionEndedError,
        address,
        connect,
        everyone,
    )

__all__ = [
    "Client",
    "ExpiredError",
    "Fanout",
    "Gone",
    "GoneError",
    "NameTakenError",
    "NoRespondersError",
    "Presence",
    "RefusedError",
    "ReplyLostError",
    "Request",
    "RequestError",
    "Session",
    "SessionEndedError",
    "address",
    "connect",
    "everyone",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from midair.client import api

    return getattr(api, name)
