"""Crash points: a process that was told to kills itself with SIGKILL at a named place.

For tests. $MIDAIR_CRASH names a file with lines `COMPONENT POINT PASSES MARKER` (COMPONENT may be
`connmgr/*`: the one that comes there first). A component reads it when it starts, takes the first
line that names it and whose file MARKER is there, and at the given pass of the point removes that
file and dies. The file is there once, so the successor lives (or takes the next line), and so does
a process that was armed with an earlier one.
Points in C exist only in a build made with `native/build.py --crash-points`; those in Python
are in POINTS and MIGRATION_POINTS below.
"""

from __future__ import annotations

import os
import signal

# Name -> role. The comment says what has just happened there.
POINTS = {
    "dispatcher.accepted": "dispatcher",  # accepted, known to nobody else
    "dispatcher.assigned": "dispatcher",  # has a slot and a uid, the keeper has no copy
    "dispatcher.held": "dispatcher",  # the keeper has a copy, the connmgr was not told
    "dispatcher.sent": "dispatcher",  # handed over, our copy not closed
    "keeper.received": "keeper",  # copies received, not recorded
    "keeper.dropped": "keeper",  # copies dropped
    "connmgr.received": "connmgr",  # sockets received, none adopted
    "connmgr.closed": "connmgr",  # connection closed, keeper not told
}

# The same of a conversion (standstill.py, native/migrate.py): they come up in an upgrade only.
MIGRATION_POINTS = (
    "migrate.standing",  # it has the role, and waits for the other parts
    "migrate.decided",  # nothing goes back any more; nothing is converted
    "migrate.finished",  # a step that was committed is finished in the old segment
    "migrate.built",  # the new segment lies beside the old one
    "migrate.renamed",  # it has taken its place
)

_armed: tuple[str, str] | None = None
_left = 0


def arm(component: str) -> None:
    """Reads what $MIDAIR_CRASH says about this component (`router`, `connmgr/0`)."""
    global _armed, _left
    path = os.environ.get("MIDAIR_CRASH")
    if not path:
        return
    try:
        with open(path) as file:
            lines = [line.split() for line in file]
    except OSError:
        return
    ours = (component, component.split("/")[0] + "/*")
    found = [words[1:] for words in lines if len(words) == 4 and words[0] in ours]
    found = [words for words in found if os.path.exists(words[2])]
    if not found:
        return
    point, passes, marker = found[0]
    if point in POINTS or point in MIGRATION_POINTS:
        _armed, _left = (point, marker), int(passes)
        return
    from native import crash as native_crash

    if not native_crash.arm(point, int(passes), marker):
        raise ValueError(f"{path}: there is no crash point {point!r} in this build")


def here(point: str) -> None:
    """A crash point. Costs a comparison when nothing is armed."""
    global _armed, _left
    if _armed is None or _armed[0] != point:
        return
    _left -= 1
    if _left > 0:
        return
    path, _armed = _armed[1], None
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
