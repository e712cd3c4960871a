"""Tables of fixed size: that one is nearly full, or full, is said once, in the log and the events.

It is said again only after there was room meanwhile, so a table that stays full, or is full again
and again, does not fill the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from midair.process import events

ROOM, NEARLY, FULL = range(3)
NEARLY_FROM = 0.75  # of a table in use
ROOM_BELOW = 0.5


class Tables:
    """What one process has said about its tables."""

    def __init__(self, log: logging.Logger, event: Callable[..., None]) -> None:
        self._log = log
        self._event = event
        self._said: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def look(self, table: str, used: int, most: int, key: str, refused: int = 0) -> None:
        """`key`: what makes it larger. `refused`: how often it had no room, since ever."""
        before = self._refused.setdefault(table, refused)
        self._refused[table] = refused
        now = ROOM
        if used >= most or refused > before:
            now = FULL
        elif used >= NEARLY_FROM * most:
            now = NEARLY
        said = self._said.get(table, ROOM)
        if now > said:
            self._said[table] = now
            how = "full" if now == FULL else "nearly full"
            self._log.warning("%s: %s (%d of %d in use; %s)", table, how, used, most, key)
            self._event(events.TABLE, table=table, full=now == FULL, used=used, most=most)
        elif now == ROOM and used < ROOM_BELOW * most:
            self._said[table] = ROOM
