"""Midair: the command, the configuration, the keeper and the shared vocabulary."""

from midair.version import __version__

__all__ = ["__version__"]
