"""What `midair up` does when it gets a signal. As nats-server does, where that has the same."""

from __future__ import annotations

import signal
import socket
from enum import Enum
from types import FrameType


class Wish(Enum):
    END = "end"  # asked twice: at once
    RELOAD = "reload"
    REOPEN_LOG = "reopen the log"
    LAME_DUCK = "lame duck"
    NOTHING = "nothing"  # a process has died: every turn looks for that


WISHES = {
    signal.SIGTERM: Wish.END,
    signal.SIGINT: Wish.END,
    signal.SIGHUP: Wish.RELOAD,
    signal.SIGUSR1: Wish.REOPEN_LOG,
    signal.SIGUSR2: Wish.LAME_DUCK,
    signal.SIGCHLD: Wish.NOTHING,
}


# They wait while nobody could take note of them (succession.py).
SIGNALS = tuple(number for number, wish in WISHES.items() if wish is not Wish.NOTHING)


class Signals:
    """Takes note of signals; `reader` is readable when there is one."""

    def __init__(self) -> None:
        self._noted: list[Wish] = []
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in WISHES:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # those that came over exec()

    def take(self) -> list[Wish]:
        """What is wished for since the last time, each in its turn."""
        noted, self._noted = self._noted, []
        return [wish for wish in noted if wish is not Wish.NOTHING]

    def unheard(self) -> list[int]:
        """Those that nobody has taken yet: they go to the release that this one becomes."""
        numbers = {wish: number for number, wish in WISHES.items()}
        return [int(numbers[wish]) for wish in self.take()]

    def drain(self) -> None:
        self.reader.recv(4096)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(WISHES[signal.Signals(number)])
