"""The parameters of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMIT = 1024
_CALLBACK = re.compile(r"[A-Za-z_$][\w$.]{0,127}", re.ASCII)


class BadQueryError(Exception):
    """A parameter that cannot be used: its text is the answer."""


@dataclass(frozen=True)
class Page:
    """offset= and limit= of a request."""

    offset: int
    limit: int

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Page:
        offset, limit = integer(query, "offset", 0), integer(query, "limit", LIMIT)
        return cls(offset, limit or LIMIT)

    def cut(self, found: list[Any]) -> list[Any]:
        return found[self.offset : self.offset + self.limit]


def integer(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18:
        raise BadQueryError(f"{name}={text}: a number from 0 on is allowed")
    return int(text)


def callback(query: Mapping[str, str]) -> str:
    """The function that a page wants the answer to be given to (JSONP), or nothing."""
    name = query.get("callback", "")
    if name and not _CALLBACK.fullmatch(name):
        raise BadQueryError("callback: the name of a function is allowed")
    return name
