"""The exit codes of every Midair program: one table, so that a number in a log has one meaning.

The service manager reads them too: a code in FATAL says that starting the same program
again cannot help, so `midair up` stops at once instead of using up the restart limit.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Why a program ended. Values above 64 follow sysexits.h where it has a name for it."""

    OK = 0
    FAILED = 1  # something the command was asked to do did not work out
    USAGE = 2  # wrong command line
    NOT_RUNNING = 3  # no instance of that name, or nobody listens there
    ALREADY_RUNNING = 4  # an instance of that name is at work
    TIMEOUT = 5  # no answer in the time allowed
    LAYOUT_MISMATCH = 65  # shared memory of another version: never guessed at
    CANNOT_LISTEN = 69  # address in use, or not ours
    SOFTWARE = 70  # a broken invariant: a bug in Midair
    NO_RESOURCES = 71  # queues, shared memory or descriptors ran out
    RESTART_LIMIT = 75  # a component kept dying
    NO_PERMISSION = 77  # belongs to another user
    BAD_CONFIG = 78


FATAL = frozenset(
    {
        Exit.USAGE,
        Exit.ALREADY_RUNNING,
        Exit.LAYOUT_MISMATCH,
        Exit.CANNOT_LISTEN,
        Exit.NO_RESOURCES,
        Exit.NO_PERMISSION,
        Exit.BAD_CONFIG,
    }
)


def describe(code: int) -> str:
    """An exit code, or a negative signal number as subprocess has it, in words."""
    if code < 0:
        import signal

        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    try:
        return f"exit {code} ({Exit(code).name})"
    except ValueError:
        return f"exit {code}"
