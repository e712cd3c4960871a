"""Lame duck: an instance that is going to end lets its clients leave one after the other.

Who begins it writes the file `lame-duck.json` into the runtime directory; the parts look for it
once a second. So it goes on whoever dies meanwhile, and works under systemd, too. From then on
nobody is accepted. Clients that can be told so are told, and for `grace_s` they may leave by
themselves; after that the connection managers end the connections that are left, spread evenly
over the time up to `lame_duck_s`.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass

import msgspec

from midair.config import Config
from midair.process.runtime import Runtime

NAME = "lame-duck.json"
LOOK_S = 0.25


@dataclass(frozen=True)
class LameDuck:
    """When it began, and how long it takes. On the monotonic clock, which all parts share."""

    began_s: float
    grace_s: float
    duration_s: float

    @property
    def left_s(self) -> float:
        return self.began_s + self.duration_s - time.monotonic()

    def due(self, clients: int, tick_s: float) -> int:
        """How many of so many clients have to leave now, if the next look is in `tick_s`."""
        if time.monotonic() < self.began_s + self.grace_s:
            return 0
        looks = max(1, math.floor(max(0.0, self.left_s) / tick_s))
        return math.ceil(clients / looks)


def begin(runtime: Runtime, conf: Config) -> LameDuck:
    """Makes the instance a lame duck, if it is none; how long it has."""
    found = read(runtime)
    if found is not None:
        return found
    server = conf.server
    grace_s = min(server.lame_duck_grace_s, server.lame_duck_s)
    made = LameDuck(time.monotonic(), grace_s, server.lame_duck_s)
    runtime.write(NAME, json.dumps(asdict(made)))
    return made


def read(runtime: Runtime) -> LameDuck | None:
    """None: the instance is none."""
    try:
        return msgspec.json.decode(runtime.read_own(NAME), type=LameDuck)
    except (OSError, msgspec.MsgspecError):
        return None


class Look:
    """Looks now and then whether the instance is a lame duck."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._found: LameDuck | None = None
        self._next = 0.0

    def __call__(self) -> LameDuck | None:
        now = time.monotonic()
        if self._found is None and now >= self._next:
            self._next = now + LOOK_S
            self._found = read(self._runtime)
        return self._found
