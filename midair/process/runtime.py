"""The runtime directory of an instance: sockets, locks, generations, who is running.

Where it is: $MIDAIR_RUNTIME_DIR/<instance>; under systemd $RUNTIME_DIRECTORY; for root
/run/midair/<instance>; else $XDG_RUNTIME_DIR/midair/<instance>; else
/tmp/midair-<uid>/<instance>. It belongs to the user of the instance, who is the owner of all
that the instance has (names.py), and is closed to others, except that it is opened to one group
when the router runs as a user of its own (sticky, so that the router can add files but not replace
those of others).

Who belongs to an instance: its owner and, if the directory is open to a group, whoever has files in
it. What others have put under a name of the instance is not used (trust.py).

Nothing in here is needed to recover: it is gone after a reboot, like the segments.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import psutil

from midair import names
from midair.errors import MidairError, MissingError, PermissionsError
from midair.exits import Exit
from midair.process import trust

STARTING = "starting"
STANDBY = "standby"
ACTIVE = "active"
STATES = (STARTING, STANDBY, ACTIVE)

# sun_path holds 108 bytes with its NUL; the longest socket name is "connmgr-31.sock".
_PATH_BYTES_MAX = 107 - len("/connmgr-31.sock")


@dataclass(frozen=True)
class Origin:
    """Where a process comes from: what a manager has to know that did not start it."""

    pid: int
    start_ticks: int
    managed: bool  # it was started by `midair up`, not by systemd or by hand
    python: str  # the interpreter it runs
    root: str  # the directory its packages are in
    stderr: str  # the pipe in the runtime directory that it writes its log to; empty: elsewhere
    config: str = ""  # the file with its configuration
    ports: int = 0  # router and connmgrs: how many it knows; 0: it does not say
    doing: str = ""  # beside its work, in words


@dataclass(frozen=True)
class State:
    """What a component says about itself. One file for each process, replaced atomically."""

    role: str
    index: int | None
    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat: tells a process from a later one
    version: str
    state: str
    generation: int
    started_at: float  # seconds since the epoch
    origin: Origin | None = None  # in a file of its own: release 0.1 takes no more keys here

    @property
    def managed(self) -> bool:
        """Whether it belongs to `midair up`, also when that is gone."""
        return self.origin is not None and self.origin.managed

    @property
    def ports(self) -> int:
        return 0 if self.origin is None else self.origin.ports

    @property
    def doing(self) -> str:
        return "" if self.origin is None else self.origin.doing

    @property
    def uptime_s(self) -> float:
        return max(0.0, time.time() - self.started_at)


def locate(instance: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the runtime directory of an instance is, whether or not it exists."""
    names.check_instance(instance)
    if base := environ.get("MIDAIR_RUNTIME_DIR"):
        path = Path(base).absolute() / instance
    elif under := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        path = Path(under) if Path(under).name == instance else Path(under) / instance
    elif os.geteuid() == 0:
        path = Path("/run/midair") / instance
    elif xdg := environ.get("XDG_RUNTIME_DIR"):
        path = Path(xdg) / "midair" / instance
    else:
        path = Path(f"/tmp/midair-{os.geteuid()}") / instance
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise MidairError(
            f"{path}: too long for the sockets in it ({_PATH_BYTES_MAX} bytes at most); "
            "set MIDAIR_RUNTIME_DIR to a shorter path",
            Exit.USAGE,
        )
    return path


def others(instance: str) -> list[str]:
    """Names of the instances that run beside this one, as far as this user may see them."""
    found = []
    above = locate(instance).parent
    with contextlib.suppress(OSError):
        for path in above.iterdir():
            with contextlib.suppress(OSError, MidairError):
                if path.name != instance and re.fullmatch(names.INSTANCE, path.name):
                    about = _check(path, ours=os.geteuid() != 0)
                    if Runtime(path.name, path, about).states():
                        found.append(path.name)
    return sorted(found)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process.

    Not psutil's create_time(): it is a time of day, which is another one once the clock was set.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so count the fields after the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


class Runtime:
    """One instance's runtime directory, known to exist and to be right."""

    def __init__(self, instance: str, path: Path, about: os.stat_result) -> None:
        self.instance = instance
        self.path = path
        self.owner_uid = about.st_uid
        # The group that the instance is open to.
        self.gid = about.st_gid if about.st_mode & stat.S_IWGRP else None

    @classmethod
    def open(cls, instance: str) -> Runtime:
        """The directory of an instance that has been started. MissingError if there is none."""
        path = locate(instance)
        try:
            return cls(instance, path, _check(path, ours=os.geteuid() != 0))
        except FileNotFoundError:
            raise MissingError(f"no instance {instance!r} is running (no {path})") from None
        except OSError as error:
            raise _unusable(path, error) from None

    @classmethod
    def create(cls, instance: str, gid: int | None = None) -> Runtime:
        """Opens the directory, making it when it is not there. `gid`: open it to a group."""
        path = locate(instance)
        try:
            if path.parent.name in ("midair", f"midair-{os.geteuid()}"):
                shared = path.parent == Path("/run/midair")
                with contextlib.suppress(FileExistsError):
                    path.parent.mkdir(mode=0o755 if shared else 0o700)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.parent.name == f"midair-{os.geteuid()}":
                _check(path.parent, ours=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            about = _check(path, ours=True)
            if about.st_uid == os.geteuid():
                if gid is not None:
                    os.chown(path, -1, gid)
                    path.chmod(0o1770)
                elif about.st_mode & 0o077 and not about.st_mode & stat.S_IWGRP:
                    path.chmod(0o700)  # somebody else may have made it for us, as systemd does
                about = _check(path, ours=True)
        except OSError as error:
            raise _unusable(path, error) from None
        return cls(instance, path, about)

    # Names, and who may have made what is found under them

    @cached_property
    def prefix(self) -> str:
        """What the names of its segments and queues begin with.

        An instance that was started by 0.1 keeps the names that 0.1 gave: there are primary
        segments of its owner under them. Those of other users do not count.
        """
        old = names.prefix(self.instance, None)
        for noun, index in ((names.CONNTABLE, None), (names.ARENA, 0), (names.JOURNAL, 0)):
            with contextlib.suppress(OSError, PermissionsError):
                about = (names.SHM / names.segment(old, noun, index)[1:]).lstat()
                trust.check_file("", about, (self.owner_uid,))
                return old
        return names.prefix(self.instance, self.owner_uid)

    def segment(self, noun: str, index: int | None = None) -> str:
        return names.segment(self.prefix, noun, index)

    def queue(self, noun: str, index: int) -> str:
        return names.queue(self.prefix, noun, index)

    def members(self) -> set[int]:
        """Users that belong to the instance."""
        found = {self.owner_uid}
        if self.gid is not None:
            with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found.add(entry.stat(follow_symlinks=False).st_uid)
        return found

    def check_found(self, what: str, noun: str, fd: int) -> os.stat_result:
        """Of an open segment or queue; PermissionsError unless one of the instance made it."""
        about = os.fstat(fd)
        if noun in names.PRIVATE:
            trust.check_file(what, about, (self.owner_uid,))
        else:
            trust.check_file(what, about, self.members(), self.gid)
        return about

    def socket(self, name: str) -> str:
        """Path of a socket, as a string because that is what bind() and connect() take."""
        return str(self.path / name)

    def remove(self) -> None:
        """Removes the directory with all that is in it, and its parent when that is empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.parent.name in ("midair", f"midair-{os.geteuid()}"):
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()

    # Files

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Holds `<name>.lock`. The kernel lets go of it when the holder dies."""
        fd = self.open_shared(f"{name}.lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def write(self, name: str, text: str, mode: int = 0o640) -> Path:
        """Replaces a file atomically: a reader sees the old text or the new, never half."""
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=self.path)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
                os.fchmod(file.fileno(), mode)
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), -1, self.path.stat().st_gid)
            os.rename(temporary, self.path / name)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        return self.path / name

    def read(self, name: str) -> bytes:
        """What is in a file. FileNotFoundError: it is not there, or is no file."""
        return self._read(name)[0]

    def read_own(self, name: str) -> bytes:
        """The same of a file that only the owner of the instance, or root, writes.

        In a directory that is open to a group, another user may have put one there.
        """
        text, uid = self._read(name)
        if uid not in (self.owner_uid, 0):
            raise FileNotFoundError(errno.ENOENT, "a file of another user", name)
        return text

    def _read(self, name: str) -> tuple[bytes, int]:
        """What is in a file, and whose it is."""
        fd = os.open(self.path / name, os.O_RDONLY | trust.OPEN_FLAGS)
        with os.fdopen(fd, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
            return file.read(), about.st_uid

    def link(self, name: str, target: str) -> None:
        """Makes `name` stand for another file of the directory, or for another one than before."""
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.rename(self.path / name)

    def life(self, role: str, index: int) -> int:
        """How often one of that number has ended for good, modulo 256 (rule R8 of routing.h)."""
        try:
            return int(self.read_own(f"{_stem(role, index)}.life")) % 256
        except (FileNotFoundError, ValueError):
            return 0

    def end_life(self, role: str, index: int) -> None:
        """It has ended for good: what its number stands for next is another one."""
        self.write(f"{_stem(role, index)}.life", f"{(self.life(role, index) + 1) % 256}\n")

    def next_generation(self, role: str, index: int | None = None) -> int:
        """1 for the first start of a role in the life of the instance, then one more each."""
        name = f"{_stem(role, index)}.generation"
        with self.lock(name):
            try:
                last = int(self.read(name))
            except (FileNotFoundError, ValueError):
                last = 0
            self.write(name, f"{last + 1}\n")
        return last + 1

    def has_started(self, role: str, index: int | None = None) -> bool:
        """Whether a role was ever acted in, in the life of the instance."""
        return (self.path / f"{_stem(role, index)}.generation").exists()

    def write_state(self, state: State) -> None:
        """Says what this component is doing; removes what dead ones of its role left."""
        stem = _stem(state.role, state.index)
        self.write(f"{stem}.{state.pid}.state", _text(state))
        for path in [*self.path.glob(f"{stem}.*.state"), *self.path.glob(f"{stem}.*.next")]:
            if self._read_state(path.name) is None:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    path.unlink()
                    path.with_suffix(".origin").unlink(missing_ok=True)

    def write_origin(self, role: str, index: int | None, origin: Origin) -> None:
        """Says where this process comes from, once, before it says what it does."""
        self.write(f"{_stem(role, index)}.{origin.pid}.origin", json.dumps(asdict(origin)))

    def prepare_state(self, state: State) -> None:
        """Writes a state that the process is not in yet, for `enter_state`."""
        stem = _stem(state.role, state.index)
        self.write(f"{stem}.{state.pid}.next", _text(state))

    def enter_state(self, role: str, index: int | None, pid: int) -> None:
        """The prepared state is the one it is in now: one call, for who is in a hurry."""
        stem = self.path / f"{_stem(role, index)}.{pid}"
        os.rename(f"{stem}.next", f"{stem}.state")

    def states(self) -> list[State]:
        """Every component that is alive, in a stable order."""
        found = [self._read_state(path.name) for path in self.path.glob("*.state")]
        order = {role: at for at, role in enumerate(names.ROLES)}
        return sorted(
            (state for state in found if state is not None),
            key=lambda s: (order.get(s.role, len(order)), s.index or 0, s.generation),
        )

    def _read_state(self, name: str) -> State | None:
        """The state in a file, or None when its process is not alive any more.

        None, too, if it was not that process, or the owner of the instance, that has written it:
        a manager that takes over starts what is written there.
        """
        try:
            text, uid = self._read(name)
            # Keys of another version are left out.
            state = msgspec.json.decode(text, type=State)
            if not self._may_say(uid, state):
                return None
        except (OSError, ValueError, RecursionError, psutil.Error):
            return None
        if start_ticks(state.pid) != state.start_ticks:
            return None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            name = name.removesuffix(".state").removesuffix(".next") + ".origin"
            text, origin_uid = self._read(name)
            origin = msgspec.json.decode(text, type=Origin)
            if origin_uid == uid and origin.start_ticks == state.start_ticks:
                return replace(state, origin=origin)
        return state

    def _may_say(self, uid: int, state: State) -> bool:
        """Whether that user may say this about a process."""
        if uid == self.owner_uid:
            return True
        return state.role in names.OTHER_USERS and psutil.Process(state.pid).uids().effective == uid

    def open_shared(self, name: str, flags: int = 0) -> int:
        """A descriptor of a file that every component may write; made if it is not there."""
        # Not O_CREAT on a file that may exist: in a sticky directory the kernel refuses
        # that for files of another user (fs.protected_regular), even to root.
        path = self.path / name
        flags |= os.O_RDWR | trust.OPEN_FLAGS
        while True:
            try:
                return self._checked(path, os.open(path, flags))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise _unusable(path, error) from None
            try:
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            except FileNotFoundError:
                raise MissingError(
                    f"instance {self.instance!r} has ended (no {self.path})"
                ) from None
            except OSError as error:
                raise _unusable(path, error) from None
            self._share(fd)
            return fd

    def _checked(self, path: Path, fd: int) -> int:
        try:
            about = os.fstat(fd)
            trust.check_file(str(path), about, {os.geteuid(), *self.members()}, self.gid)
            if self.gid is not None and about.st_uid == os.geteuid():
                self._share(fd)  # its creator may have died before it did
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _share(self, fd: int) -> None:
        if self.gid is not None:
            with contextlib.suppress(PermissionError):
                os.fchown(fd, -1, self.gid)
            os.fchmod(fd, 0o660)


def _stem(role: str, index: int | None) -> str:
    return role if index is None else f"{role}-{index}"


def _text(state: State) -> str:
    return json.dumps({key: value for key, value in vars(state).items() if key != "origin"})


def _check(path: Path, ours: bool) -> os.stat_result:
    """Refuses a directory that someone else could have prepared for us.

    `ours`: it has to be ours, or one that its owner has opened to a group of ours, for a component
    that runs as a user of its own. Else (root looks at an instance) it may be anybody's. In no case
    can everybody write to it, or put another one in its place.
    """
    above = path.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise PermissionsError(f"{path.parent} can be written by everybody: not used")
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise PermissionsError(f"{path} is not a directory: not used")
    if about.st_mode & stat.S_IWOTH:
        raise PermissionsError(f"{path} can be written by everybody: not used")
    if about.st_mode & stat.S_IWGRP and not about.st_mode & stat.S_ISVTX:
        raise PermissionsError(f"{path} can be written by its group and is not sticky: not used")
    groups = {os.getegid(), *os.getgroups()}
    shared = about.st_mode & stat.S_IWGRP and about.st_gid in groups
    if ours and about.st_uid != os.geteuid() and (not shared or os.geteuid() == 0):
        raise PermissionsError(f"{path} belongs to another user (uid {about.st_uid}): not used")
    return about


def _unusable(path: Path, error: OSError) -> MidairError:
    """In one line; the code says whether it is a matter of permissions."""
    said = f"cannot use {path}: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS, errno.ENXIO):
        return PermissionsError(said)
    return MidairError(f"{said}; MIDAIR_RUNTIME_DIR says where runtime directories are")
