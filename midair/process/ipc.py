"""POSIX shared-memory segments and message queues: opening, making, removing.

Facts relied on:
- a segment is a sparse file in /dev/shm: its size costs nothing until it is written, and
  writing past what the file system has left is a SIGBUS, so the room is checked before;
- the bytes of all queues of a user, full or not, count against RLIMIT_MSGQUEUE of the
  process that makes one (819200 by default); exceeding it is EMFILE;
- a descriptor of a queue can be polled, and its O_NONBLOCK belongs to the open file
  description like a socket's;
- there need not be a file system to list queues in, so their names must be known;
- names can be taken by others before us: trust.py says what is done about it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import posix_ipc

from midair import names
from midair.errors import (
    LayoutError,
    MidairError,
    MissingError,
    PermissionsError,
    ResourceError,
)
from midair.process import lease, trust
from midair.process.runtime import Runtime

SHM = names.SHM
QUEUE_DEPTHS = (10, 8, 6, 4, 2)  # tried in turn when the user's queue bytes run out
MAGIC = 0x3152494144494D  # SEGMENT_MAGIC
_HEADER = struct.Struct("<QIIQQ24s")
# What the kernel counts for one message beside its bytes (a pointer and a tree node).
QUEUE_MESSAGE_OVERHEAD = 64


@dataclass(frozen=True)
class Queue:
    """An open, non-blocking queue: what it is, not what was asked for."""

    name: str
    fd: int
    depth: int
    message_bytes: int

    def waiting(self) -> int:
        """How many messages lie in it."""
        opened = posix_ipc.MessageQueue(self.name)
        try:
            return int(opened.current_messages)
        finally:
            opened.close()

    def close(self) -> None:
        os.close(self.fd)


def open_segment(
    name: str,
    size: int,
    *,
    create: bool,
    mode: int = 0o600,
    gid: int | None = None,
    room: int | None = None,
) -> int:
    """A descriptor of the segment. `create`: make it, zeroed, if it is not there.

    `room`: bytes of it that /dev/shm must have left; None: all of them.

    A segment of another size is an error that names it: it was made by another version
    or with another configuration, and the processes that have mapped it rely on its size.
    """
    if not create:
        return _existing_segment(name, size)
    with Runtime.create(names.instance_of(name)).lock("segments"):
        try:
            return _existing_segment(name, size, mode, gid)
        except MissingError:
            pass
        check_space(size if room is None else room, name)
        made = _shared_memory(name, posix_ipc.O_CREX, mode)
        try:
            _share(made, mode, gid)
            os.ftruncate(made, size)  # last: size 0 means that its creator died before
        except BaseException:
            os.close(made)
            posix_ipc.unlink_shared_memory(name)
            raise
        return made


def open_existing(name: str, flags: int) -> int:
    """A descriptor of a segment that is there, of whatever size. MissingError: it is not.

    PermissionsError: it is not of this instance.
    """
    place = Runtime.open(names.instance_of(name))
    try:
        fd = os.open(SHM / name[1:], flags | trust.OPEN_FLAGS)
    except FileNotFoundError:
        raise MissingError(f"segment {name} does not exist") from None
    except PermissionError:
        raise PermissionsError(f"segment {name} belongs to another user") from None
    except OSError as error:  # a symbolic link, a socket
        raise PermissionsError(
            f"segment {name} is not a regular file ({error.strerror}): not used"
        ) from None
    try:
        place.check_found(f"segment {name}", names.noun_of(name), fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass(frozen=True)
class Header:
    """The first bytes of a segment (struct segment_header): the same in every layout."""

    kind: int
    layout: int
    fingerprint: int
    bytes: int
    release: str  # empty: of a release before 0.2
    size: int  # of the whole segment, as the kernel has it


def segment_header(name: str) -> Header | None:
    """Read, not mapped. None: it is not there, or was not finished by its creator.

    LayoutError: it begins with something else.
    """
    try:
        fd = open_existing(name, os.O_RDONLY)
    except MissingError:
        return None
    try:
        data = os.pread(fd, _HEADER.size, 0)
        actual = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if len(data) < _HEADER.size:
        return None
    magic, kind, layout, fingerprint, size, release = _HEADER.unpack(data)
    if magic == 0:
        return None
    if magic != MAGIC:
        raise damaged(name)
    text = release.partition(b"\0")[0].decode(errors="replace")
    return Header(kind, layout, fingerprint, size, text, actual)


def damaged(name: str) -> LayoutError:
    """For a header that no version of Midair writes."""
    return LayoutError(
        f"the header of segment {name} is damaged; see `midair fsck`, or remove all of the "
        "instance: `midair down`, or `midair fsck --repair --remove`"
    )


def releases(place: Runtime) -> set[str]:
    """Which releases made the segments that an instance needs to recover."""
    found = set()
    for noun, each in names.SEGMENTS.items():
        if noun in names.STATISTICS:
            continue
        for index in range(names.CONNMGRS_MAX) if each else (None,):
            with contextlib.suppress(PermissionsError, LayoutError):
                if header := segment_header(place.segment(noun, index)):
                    found.add(header.release)
    return found


def used_bytes(place: Runtime) -> int:
    """Memory of the segments that an instance needs to recover, of whatever user they are."""
    used = 0
    for noun in names.SEGMENTS:
        if noun not in names.STATISTICS:
            for path in SHM.glob(f"{place.prefix}.{noun}*"):
                with contextlib.suppress(FileNotFoundError):
                    used += path.lstat().st_blocks * 512
    return used


def check_space(size: int, what: str) -> None:
    """Refuses `size` bytes of shared memory when /dev/shm could not hold them."""
    about = os.statvfs(SHM)
    free = about.f_bavail * about.f_frsize
    if size > free:
        raise ResourceError(
            f"{what}: needs {size} bytes of shared memory, {SHM} has {free} free; "
            f"make it larger (mount -o remount,size=...; docker: --shm-size) or lower "
            "connmgr.arena_bytes and connmgr.output_bytes"
        )


def open_queue(
    name: str,
    *,
    depth: int = 10,
    message_bytes: int = 8192,
    mode: int = 0o600,
    gid: int | None = None,
) -> Queue:
    """Opens the queue for reading and writing, without blocking; makes it when missing.

    When the user's queue bytes do not suffice, a shorter queue is made: it works, with
    more waiting under load. Its depth is in the result.
    """
    with Runtime.create(names.instance_of(name)).lock("queues"):
        try:
            queue = existing_queue(name)
            _share_again(queue.fd, os.fstat(queue.fd), mode, gid)
        except MissingError:
            queue = _make_queue(name, depth, message_bytes, mode, gid)
    if queue.message_bytes != message_bytes:
        queue.close()
        raise LayoutError(
            f"queue {name} has messages of {queue.message_bytes} bytes, {message_bytes} are needed"
        )
    return queue


def existing_queue(name: str) -> Queue:
    """A queue that is there. MissingError: it is not. PermissionsError: not of this instance."""
    place = Runtime.open(names.instance_of(name))
    queue = _queue(name)
    try:
        place.check_found(f"queue {name}", names.noun_of(name), queue.fd)
    except BaseException:
        queue.close()
        raise
    return queue


def remove_all(instance: str, uid: int | None = None, keep_roles: Container[str] = ()) -> list[str]:
    """Removes every segment, queue and lease of an instance; returns what there was.

    What other users have put under its names stays. `uid`: owner of the instance, if it is not the
    caller. `keep_roles`: whose leases stay.
    """
    uid = os.geteuid() if uid is None else uid
    members = _members(instance, uid)
    removed = []
    for prefix in _prefixes(instance, uid):
        for path in _segments(prefix, members):
            with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
                posix_ipc.unlink_shared_memory("/" + path)
                removed.append(f"segment /{path}")
        for name in _queues(prefix, members):
            with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
                posix_ipc.unlink_message_queue(name)
                removed.append(f"queue {name}")
    for role in names.ROLES:
        if role in keep_roles:
            continue
        for index in range(names.CONNMGRS_MAX if role == names.CONNMGR else 1):
            if lease.remove(uid, instance, role, index, members):
                removed.append(f"lease {names.component(role, index)}")
    return removed


def remove_segment(name: str) -> None:
    """Removes a segment, if it is there. Who has it mapped keeps it."""
    with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        posix_ipc.unlink_shared_memory(name)


def segment_exists(name: str) -> bool:
    return (SHM / name[1:]).exists()


def remove_queue(name: str) -> None:
    """Removes a queue, if it is there. Who has it open keeps it."""
    with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        posix_ipc.unlink_message_queue(name)


def remove_connmgr(place: Runtime, index: int) -> None:
    """Removes the segments, queues and the lease of one connection manager."""
    for noun, each in names.SEGMENTS.items():
        if each:
            remove_segment(place.segment(noun, index))
    for noun in names.QUEUES:
        remove_queue(place.queue(noun, index))
    lease.remove(place.owner_uid, place.instance, names.CONNMGR, index, place.members())


def leftovers(instance: str, uid: int | None = None) -> list[str]:
    """What `remove_all` would find, without touching it."""
    uid = os.geteuid() if uid is None else uid
    members = _members(instance, uid)
    found = []
    for prefix in _prefixes(instance, uid):
        found += [f"segment /{path}" for path in _segments(prefix, members)]
        found += [f"queue {name}" for name in _queues(prefix, members)]
    for role in names.ROLES:
        for index in range(names.CONNMGRS_MAX if role == names.CONNMGR else 1):
            if lease.exists(uid, instance, role, index, members):
                found.append(f"lease {names.component(role, index)}")
    return found


def check_names(place: Runtime) -> None:
    """PermissionsError if somebody else has something under a name of the instance."""
    members = place.members()
    for path in sorted(SHM.glob(f"{place.prefix}.*")):
        with contextlib.suppress(MissingError):
            os.close(open_existing(f"/{path.name}", os.O_RDONLY))
    for noun in names.QUEUES:
        for index in range(names.CONNMGRS_MAX):
            with contextlib.suppress(MissingError):
                existing_queue(place.queue(noun, index)).close()
    for role in names.ROLES:
        for index in range(names.CONNMGRS_MAX if role == names.CONNMGR else 1):
            lease.check(place, role, index if role == names.CONNMGR else None, members)


def _prefixes(instance: str, uid: int) -> tuple[str, str]:
    """Of today's names, and of those of 0.1."""
    return names.prefix(instance, uid), names.prefix(instance, None)


def _members(instance: str, uid: int) -> set[int]:
    """Whose things are the instance's, if that owner has it."""
    with contextlib.suppress(MidairError):
        place = Runtime.open(instance)
        if place.owner_uid == uid:
            return place.members()
    return {uid}


def _segments(prefix: str, members: Container[int]) -> list[str]:
    """File names of those that one of the members has made."""
    found = []
    for path in sorted(SHM.glob(f"{prefix}.*")):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid in members:
                found.append(path.name)
    return found


def _queues(prefix: str, members: Container[int]) -> Iterator[str]:
    """Names of those that one of the members has made."""
    for noun in names.QUEUES:
        for index in range(names.CONNMGRS_MAX):
            name = names.queue(prefix, noun, index)
            with contextlib.suppress(MissingError, PermissionsError):
                queue = _queue(name)
                made_by = os.fstat(queue.fd).st_uid
                queue.close()
                if made_by in members:
                    yield name


def _shared_memory(name: str, flags: int, mode: int = 0) -> int:
    try:
        return int(posix_ipc.SharedMemory(name, flags, mode=mode).fd)
    except posix_ipc.ExistentialError:
        raise MissingError(f"segment {name} does not exist") from None
    except posix_ipc.PermissionsError:
        raise PermissionsError(f"segment {name} belongs to another user") from None


def _existing_segment(name: str, size: int, mode: int = 0o600, gid: int | None = None) -> int:
    fd = open_existing(name, os.O_RDWR)
    about = os.fstat(fd)
    if about.st_size == size:
        _share_again(fd, about, mode, gid)
        return fd
    os.close(fd)
    if about.st_size == 0:  # its creator died before it was given a size: nobody has used it
        posix_ipc.unlink_shared_memory(name)
        raise MissingError(f"segment {name} does not exist")
    raise LayoutError(
        f"segment {name} has {about.st_size} bytes, {size} are configured: "
        "end the instance (midair down) before changing sizes"
    )


def _share(fd: int, mode: int, gid: int | None) -> None:
    """Gives a new segment or queue its mode, whatever the umask, and its group."""
    if gid is not None:
        os.fchown(fd, -1, gid)  # first: with its mode it is open to the group it has then
    os.fchmod(fd, mode)


def _share_again(fd: int, about: os.stat_result, mode: int, gid: int | None) -> None:
    """What its creator, killed before that, may not have done."""
    if gid is not None and about.st_uid == os.geteuid():
        _share(fd, mode, gid)


def _queue(name: str, flags: int = 0, **options: Any) -> Queue:
    try:
        opened = posix_ipc.MessageQueue(name, flags, **options)
    except posix_ipc.ExistentialError:
        raise MissingError(f"queue {name} does not exist") from None
    except posix_ipc.PermissionsError:
        raise PermissionsError(f"queue {name} belongs to another user") from None
    try:
        fd = os.dup(opened.mqd)
        os.set_blocking(fd, False)
        return Queue(name, fd, opened.max_messages, opened.max_message_size)
    finally:
        opened.close()


def _make_queue(name: str, depth: int, message_bytes: int, mode: int, gid: int | None) -> Queue:
    for tried in (depth, *(less for less in QUEUE_DEPTHS if less < depth)):
        try:
            queue = _queue(
                name,
                posix_ipc.O_CREX,
                mode=mode,
                max_messages=tried,
                max_message_size=message_bytes,
            )
        except ValueError:  # EINVAL: above fs.mqueue.msg_max or msgsize_max
            if tried > QUEUE_DEPTHS[0]:
                continue
            raise ResourceError(
                f"queue {name}: {tried} messages of {message_bytes} bytes are above the "
                "kernel's limits (fs.mqueue.msg_max, fs.mqueue.msgsize_max)"
            ) from None
        except OSError as error:
            if error.errno not in (None, 0, 24):
                raise ResourceError(f"queue {name}: {error}") from None
            continue  # EMFILE, which posix_ipc passes on without its number
        _share(queue.fd, mode, gid)
        return queue
    raise ResourceError(_no_queue_bytes(name, message_bytes))


def _no_queue_bytes(name: str, message_bytes: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MSGQUEUE)[0]
    each = 2 * QUEUE_DEPTHS[0] * (message_bytes + QUEUE_MESSAGE_OVERHEAD)
    return (
        f"queue {name}: this user's limit of {limit} bytes of message queues "
        f"(RLIMIT_MSGQUEUE) is used up: it is enough for {limit // each} connection managers "
        "in all instances together; end another instance, lower connmgr.count, or raise it "
        "(systemd: LimitMSGQUEUE=, shell: ulimit -q)"
    )


def queue_mode(gid: int | None) -> int:
    """Mode of what the router shares with the others: its own user has the group."""
    return stat.S_IRUSR | stat.S_IWUSR | (0 if gid is None else stat.S_IRGRP | stat.S_IWGRP)
