"""Numbers, times and tables as people read them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from datetime import UTC, datetime


def number(value: float) -> str:
    """12, 3.4k, 5.6M: at most six characters."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            if not unit:
                return f"{value:.0f}"
            return f"{value:.1f}{unit}" if value < 100 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def size(value: float) -> str:
    """Bytes, by powers of 1024."""
    for unit in ("B", "K", "M", "G"):
        if abs(value) < 1024:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def clean(text: str) -> str:
    """What a client calls itself, without what would move the cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)


def moment(ns: int) -> str:
    """RFC 3339 with nanoseconds, as NATS's tools expect it."""
    whole = datetime.fromtimestamp(ns // 10**9, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{ns % 10**9:09}Z"


def go_duration(seconds: float) -> str:
    """1d2h3m4s, as nats-server writes an uptime."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("m", 60)):
        if left >= length or parts:
            parts.append(f"{left // length}{unit}")
            left %= length
    return "".join(parts) + f"{left}s"


def go_microseconds(microseconds: int) -> str:
    """A short time as Go writes it: 250µs, 1.5ms, 2.25s."""
    for unit, length in (("s", 1_000_000), ("ms", 1000)):
        if microseconds >= length:
            return f"{microseconds / length:.6f}".rstrip("0").rstrip(".") + unit
    return f"{microseconds}µs"


def columns(lines: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Lines whose cells stand below each other: texts in the columns `left`, numbers elsewhere."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table; the first `left` columns are texts, the others numbers."""
    return columns([head, *rows], range(left))
