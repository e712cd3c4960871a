"""Kinds of values that several commands take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return value


def port(text: str) -> int:
    """0: any free one."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError("0 to 65535")
    return value
