"""Expected failures. Each carries the exit code its program ends with (see exits.py)."""

from __future__ import annotations

from midair.exits import Exit


class MidairError(Exception):
    """A failure with a one-line explanation meant for the person at the terminal."""

    code: Exit = Exit.FAILED

    def __init__(self, message: str, code: Exit | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(MidairError):
    """The configuration file says something it cannot; the message names file and line."""

    code = Exit.BAD_CONFIG


class ResourceError(MidairError):
    """The kernel, or a limit, does not give what is needed; the message says which."""

    code = Exit.NO_RESOURCES


class LayoutError(MidairError):
    """A segment has a layout this version does not know."""

    code = Exit.LAYOUT_MISMATCH


class MissingError(MidairError):
    """A segment or a socket of another component is not there (yet)."""

    code = Exit.NOT_RUNNING


class PermissionsError(MidairError):
    """Something of that name belongs to another user."""

    code = Exit.NO_PERMISSION


class NotRunningError(MidairError):
    """No instance of that name, or nobody listens at that address."""

    code = Exit.NOT_RUNNING
