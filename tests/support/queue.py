"""A queue between processes, for tests of the pieces that use one."""

from __future__ import annotations

import contextlib
import os

import posix_ipc

from midair.process import ipc
from native import lib
from tests.support.instance import eventually


class Queue:
    """A queue that is gone with its descriptor. As deep as the kernel's default, 10, unless other
    instances of this user leave less."""

    def __init__(self) -> None:
        self.queue = eventually(self._make, "there is room for a queue (RLIMIT_MSGQUEUE)")
        self.queue.unlink()
        self.fd = int(self.queue.mqd)
        self.depth = int(self.queue.max_messages)
        os.set_blocking(self.fd, False)

    def _make(self) -> posix_ipc.MessageQueue | None:
        for depth in ipc.QUEUE_DEPTHS:
            with contextlib.suppress(OSError):
                return posix_ipc.MessageQueue(
                    None, posix_ipc.O_CREX, max_messages=depth, max_message_size=lib.BATCH_BYTES
                )
        return None

    @property
    def length(self) -> int:
        return int(self.queue.current_messages)

    def empty(self) -> None:
        while self.length:
            self.queue.receive()
