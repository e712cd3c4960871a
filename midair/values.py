"""What a value of the configuration may be: a type with its limits, and what is said otherwise.

msgspec converts and checks. A Meta beside a type has the limits, what is allowed in words, and, if
people may write the value in more than one way, a function that turns what they wrote into what
msgspec checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
Prepare = Callable[[Any], Any]
SHOWN_MAX = 100  # characters of a wrong value that a message repeats


def integer(low: int, high: int) -> Meta:
    return Meta(ge=low, le=high, description=f"an integer from {low} to {high} is allowed")


def number(low: float, high: float) -> Meta:
    return Meta(ge=low, le=high, description=f"a number from {low:g} to {high:g} is allowed")


def size(low: int, high: int) -> Meta:
    """Bytes: a number, or a text with a unit."""
    allowed = f'{low} to {high} bytes are allowed, as an integer or like "64KiB", "256MB"'
    return Meta(ge=low, le=high, description=allowed, extra={"prepare": _bytes})


def text(pattern: str, allowed: str) -> Meta:
    return Meta(pattern=rf"^(?:{pattern})\Z", description=allowed)


def prepared(prepare: Prepare) -> Meta:
    """What `prepare` makes of a value; its ValueError says what is allowed instead."""
    return Meta(extra={"prepare": prepare})


def either(allowed: str) -> Meta:
    """For a union, whose parts have limits of their own."""
    return Meta(description=allowed)


def read(hint: Any, value: Any) -> Any:
    """The value as the type has it. ValueError: one line that says what is allowed."""
    extra = meta(hint).extra or {}
    ready = extra["prepare"](value) if "prepare" in extra else value
    try:
        return msgspec.convert(ready, hint)
    except (msgspec.ValidationError, RecursionError):
        raise ValueError(f"{shown(value)}: {_allowed(hint)}") from None


def meta(hint: Any) -> Meta:
    """What stands beside a type."""
    found = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((item for item in found if isinstance(item, Meta)), Meta())


def choices(hint: Any) -> tuple[str, ...]:
    """The texts of a Literal."""
    return get_args(hint) if get_origin(hint) is Literal else ()


def shown(value: Any) -> str:
    """As it stands in the file, if that is not too long."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # thousands of digits, or tables in tables
        text = "this"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def _allowed(hint: Any) -> str:
    if found := meta(hint).description:
        return found
    if among := choices(hint):
        return f"one of {', '.join(among)} is allowed"
    return {bool: "true or false is allowed", str: "a string is allowed"}[hint]


def _bytes(value: Any) -> Any:
    """A number of bytes for a text like "64KiB"; anything else as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,20})[ \t]*([A-Za-z]*)", value.strip())
    if not match or match.group(2).upper() not in _UNITS:
        return value
    return int(match.group(1)) * _UNITS[match.group(2).upper()]
