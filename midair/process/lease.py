"""Leases: at most one process at a time acts in a role.

A lease is a SysV semaphore of value 1, taken with SEM_UNDO. Facts relied on:
- when a process dies, by whatever means, the kernel undoes what it did with SEM_UNDO, so
  the value goes back to 1 and one waiter wakes up at once: no time-outs, no heartbeats;
- undo lists are not inherited by fork(), so a child never holds its parent's lease; they stay over
  exec(), so a process that becomes another program still holds its own;
- a semaphore's creation and the setting of its value are two calls. Both are done under
  a file lock; a creator that died between them has left value 0 and an operation time
  of 0, which a semaphore that somebody holds cannot have;
- the pid kept with a semaphore is that of the last process that changed it, so while the
  value is 0 it is the holder;
- a holder that is stopped (SIGSTOP, a debugger) still holds it: nobody takes over before it
  is dead. Only someone who sets the value by force can change that, and then the pid is
  another one.

`sysv_ipc` creates, reads and removes semaphores, but its builds need not have timed
waits, so the operation itself is libc's semtimedop().
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Container

import sysv_ipc

from midair import names
from midair.errors import MidairError, PermissionsError, ResourceError
from midair.exits import Exit
from midair.process import trust
from midair.process.runtime import Runtime

IPC_NOWAIT = 0o4000
SEM_UNDO = 0x1000
WAIT_S = 0.2  # how long signals and the watchdog may have to wait for their turn


class _Operation(ctypes.Structure):
    _fields_ = (
        ("sem_num", ctypes.c_ushort),
        ("sem_op", ctypes.c_short),
        ("sem_flg", ctypes.c_short),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


class Lease:
    """The right to act in a role. It ends with the process, or by `release`."""

    def __init__(self, runtime: Runtime, role: str, index: int | None = None) -> None:
        self.runtime = runtime
        self.called = names.component(role, index)
        self.key = names.lease_key(runtime.owner_uid, runtime.instance, role, index)
        self.held = False
        self._semaphore = self._open()

    def acquire(
        self,
        on_wait: Callable[[], None] = lambda: None,
        on_turn: Callable[[], bool] = lambda: True,
        wait_s: float = WAIT_S,
    ) -> bool:
        """Takes the lease, waiting as long as someone else has it.

        `on_wait` is called once, when it turns out that there is something to wait for.
        `on_turn` is called before each wait of `wait_s`; it keeps the watchdog content and
        returns False to give up (then so does this). The wait ends at once when the holder
        dies, however long it may be.
        """
        if self.try_acquire():
            return True
        on_wait()
        while not self.held and on_turn():
            self.held = self._operate(-1, SEM_UNDO, wait_s)
        return self.held

    def try_acquire(self) -> bool:
        """Takes the lease if nobody has it."""
        self.held = self.held or self._operate(-1, SEM_UNDO | IPC_NOWAIT, None)
        return self.held

    def resume(self) -> bool:
        """Takes up what this process had before it called exec(), which leaves it alone."""
        self.held = self.held or self.is_ours()
        return self.held

    def release(self) -> None:
        """Gives the lease back while staying alive."""
        if self.held and self._operate(1, SEM_UNDO | IPC_NOWAIT, None):
            self.held = False

    def holder_pid(self) -> int | None:
        """Who has the lease now, or None."""
        with contextlib.suppress(sysv_ipc.ExistentialError):
            if self._semaphore.value == 0:
                return int(self._semaphore.last_pid)
        return None

    def is_ours(self) -> bool:
        """Whether this process holds the lease, asked of the kernel: two cheap calls."""
        return self.holder_pid() == os.getpid()

    @property
    def _described(self) -> str:
        return _described(self.called, self.runtime, self.key)

    def _open(self) -> sysv_ipc.Semaphore:
        with self.runtime.lock("lease"):
            try:
                semaphore = sysv_ipc.Semaphore(self.key)
                uids = (self.runtime.owner_uid, os.geteuid())
                trust.check_semaphore(self._described, semaphore, uids)
                if semaphore.value == 0 and semaphore.o_time == 0:
                    semaphore.value = 1
                return semaphore
            except sysv_ipc.ExistentialError:
                pass
            except (sysv_ipc.PermissionsError, PermissionError):
                raise PermissionsError(f"{self._described} belongs to another user") from None
            try:
                made = sysv_ipc.Semaphore(self.key, sysv_ipc.IPC_CREX, mode=0o600, initial_value=1)
                if os.geteuid() == 0:  # who mends the instance of somebody else
                    made.uid = self.runtime.owner_uid
                return made
            except OSError as error:
                raise ResourceError(
                    f"no semaphore for the lease of {self.called}: {error}; "
                    "see kernel.sem (sysctl) and ipcs -s"
                ) from None

    def _operate(self, change: int, flags: int, timeout_s: float | None) -> bool:
        """One semtimedop(). False: it would have to wait (longer), or a signal came."""
        operation = _Operation(0, change, flags)
        limit = None
        if timeout_s is not None:
            seconds = int(timeout_s)
            limit = ctypes.byref(_Timespec(seconds, int((timeout_s - seconds) * 1e9)))
        done = _libc.semtimedop(
            ctypes.c_int(self._semaphore.id),
            ctypes.byref(operation),
            ctypes.c_size_t(1),
            limit,
        )
        if done == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EINTR):
            return False
        if code in (errno.EIDRM, errno.EINVAL):
            raise MidairError(
                f"the lease of {self.called} was removed: instance "
                f"{self.runtime.instance!r} has ended",
                Exit.NOT_RUNNING,
            )
        raise OSError(code, f"semtimedop: {os.strerror(code)}")


def check(
    place: Runtime, role: str, index: int | None = None, members: Container[int] = ()
) -> None:
    """PermissionsError if there is a semaphore for a lease that none of the members has made."""
    key = names.lease_key(place.owner_uid, place.instance, role, index)
    described = _described(names.component(role, index), place, key)
    try:
        trust.check_semaphore(described, sysv_ipc.Semaphore(key), members)
    except sysv_ipc.ExistentialError:
        return
    except (sysv_ipc.PermissionsError, PermissionError):
        raise PermissionsError(f"{described} belongs to another user") from None


def _described(called: str, place: Runtime, key: int) -> str:
    return f"the lease of {called} of instance {place.instance!r} (ipcs -s: {key:#010x})"


def remove(
    uid: int, instance: str, role: str, index: int | None = None, members: Container[int] = ()
) -> bool:
    """Removes the semaphore of a lease; True if there was one.

    `members`: who else than its owner may have made it.
    """
    try:
        semaphore = sysv_ipc.Semaphore(names.lease_key(uid, instance, role, index))
        if semaphore.cuid not in (uid, os.geteuid()) and semaphore.cuid not in members:
            return False
        semaphore.remove()
    except (sysv_ipc.ExistentialError, sysv_ipc.PermissionsError):
        return False
    return True


def exists(
    uid: int, instance: str, role: str, index: int | None = None, members: Container[int] = ()
) -> bool:
    """Whether there is a semaphore for a lease, held or not, that `remove` would remove."""
    try:
        semaphore = sysv_ipc.Semaphore(names.lease_key(uid, instance, role, index))
        return semaphore.cuid in (uid, os.geteuid()) or semaphore.cuid in members
    except (sysv_ipc.ExistentialError, sysv_ipc.PermissionsError):
        return False
