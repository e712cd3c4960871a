"""Under which uids the keeper holds the listening sockets of an instance.

The manager opens them and gives a copy of each to the keeper; the dispatcher and the connmgrs give
theirs to a new keeper, too. So each is in two processes at least, beside the manager: when that
dies, the next one asks the keeper for them, and clients that wait in a backlog stay there.
"""

from __future__ import annotations

from midair import names

# From here on uids are not those of clients, and are used again and again: first come the guard's
# (native/src/dispatcher/guard.h), then these.
REUSED_UIDS = 1 << 63
_BASE = REUSED_UIDS + 2**32
_EACH = 2**8  # of one name
_NAMES = (names.FD_CLIENT, names.FD_HANDOFF, names.FD_KEEPER, names.FD_MONITOR)
UIDS = range(_BASE, _BASE + len(_NAMES) * _EACH)  # all there can be


def uid(fd_name: str, at: int = 0) -> int:
    """Of the socket that is passed on as `fd_name`; `at`: which one of them."""
    return _BASE + _NAMES.index(fd_name) * _EACH + at
