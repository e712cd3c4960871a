"""What clients that check a server raise."""

from __future__ import annotations


class BrokenPromise(Exception):
    """Midair did something it promises not to do."""
