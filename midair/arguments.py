"""Kinds of values that commands take: what argparse calls a type."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number in a range; without `high` as large as you like."""
    allowed = f"{low} or more" if high is None else f"{low} to {high}"

    def integer(text: str) -> int:
        value = int(text) if re.fullmatch("-?[0-9]{1,20}", text) else None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{_cut(text)}: {allowed}")
        return value

    return integer


def number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = _float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{_cut(text)}: {low:g} to {high:g}")
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
    value = _float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{_cut(text)}: more than 0, and 86400 at most")
    return value


def _float(text: str) -> float:
    """NaN for what is no number, which is in no range."""
    is_one = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]{1,3})?", text)
    return float(text) if is_one and len(text) <= 40 else math.nan


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
