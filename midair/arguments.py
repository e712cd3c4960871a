"""Kinds of values that commands take: what argparse calls a type."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number in a range; without `high` as large as you like."""
    allowed = f"{low} or more" if high is None else f"{low} to {high}"

    def integer(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(allowed)
        return value

    return integer


def number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{low:g} to {high:g}")
        return value

    return number


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """What `read` makes of the text; its ValueError says what is allowed."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


positive = integer(1)
port = integer(0, 65535)  # 0: any free one


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError("more than 0")
    return value
