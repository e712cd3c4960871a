"""What is found under a name of ours is used only if its owner, its mode and its type are right.

Names can be guessed, and /dev/shm, queues and semaphores are open to every user of the machine:
another user may have put something there before us. It is never used, and never removed: one line
says what it is, and the exit code is NO_PERMISSION.

Facts relied on:
- the owner of a segment or queue is who made it: only root can give a file away;
- its group is one its owner belonged to: who is not in a group cannot give a file to it;
- the descriptor of a queue can be asked by fstat() like that of a file;
- the creator kept with a SysV semaphore (cuid) cannot be changed by anybody, its owner can;
- SO_PEERCRED of a connected socket names who called connect(), or who called listen().

So that nothing changes between the look and the use, it is opened first and then looked at, by its
descriptor.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from collections.abc import Container
from typing import Protocol

from midair.errors import PermissionsError

_UCRED = struct.Struct("3i")
_log = logging.getLogger("midair")
# Added to every open() of something that another user may have put there: a FIFO is not waited
# for, a symbolic link not followed.
OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Semaphore(Protocol):
    """What the kernel says of one (sysv_ipc)."""

    cuid: int
    uid: int
    mode: int


def check_file(
    what: str, about: os.stat_result, uids: Container[int], gid: int | None = None
) -> None:
    """PermissionsError unless it is a file of one of these users that is closed to others.

    `gid`: a group that it may be open to.
    """
    if not stat.S_ISREG(about.st_mode):
        raise PermissionsError(f"{what} is not a regular file: not used")
    if about.st_nlink > 1:
        raise PermissionsError(f"{what} has {about.st_nlink} names (hard links): not used")
    if about.st_uid not in uids:
        raise PermissionsError(f"{what} belongs to another user (uid {about.st_uid}): not used")
    open_to = 0o077 if gid is None or about.st_gid != gid else 0o007
    if about.st_mode & open_to:
        mode = stat.S_IMODE(about.st_mode)
        raise PermissionsError(f"{what} is open to others (mode {mode:04o}): not used")


def check_semaphore(what: str, found: Semaphore, uids: Container[int]) -> None:
    """The same for a semaphore: its creator counts, and whom it has been given to.

    Root may have made it for somebody else, who mended the instance of another user.
    """
    strangers = [uid for uid in (found.cuid or found.uid, found.uid) if uid not in uids]
    if strangers:
        raise PermissionsError(f"{what} belongs to another user (uid {strangers[0]}): not used")
    if found.mode & 0o077:
        mode = found.mode & 0o777
        raise PermissionsError(f"{what} is open to others (mode {mode:04o}): not used")


def check_peer(sock: socket.socket, path: str) -> None:
    """PermissionsError unless the owner of the directory that `path` lies in, or root, is there.

    Of a connection to or from a socket of that path. Root: a service manager listens for services
    of other users. A socket that lies nowhere has whoever was given it at its other end.
    """
    if not path.startswith("/"):
        return
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid = _UCRED.unpack(data)[1]
    if uid not in (os.stat(os.path.dirname(path)).st_uid, 0):
        raise PermissionsError(f"{path}: a process of another user (uid {uid}) is there: not used")


def is_welcome(sock: socket.socket, listener: socket.socket) -> bool:
    """Of an accepted connection; one that is not is closed, and the log says whose it was."""
    try:
        check_peer(sock, listener.getsockname())
    except PermissionsError as error:
        _log.warning("%s", error)
        sock.close()
        return False
    return True
