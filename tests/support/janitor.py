"""What ends a session of tests that cannot end itself, and removes what it leaves.

pytest-timeout ends a test that waits: it interrupts Python. It cannot interrupt C, and nothing
removes what a session leaves that was killed. So each session has this process beside it, which is
told through a pipe what the session makes and which test runs for how long. It aborts a session
whose test is far past its time limit (Python's fault handler then says where it hangs), and when
the session is gone, however that came about, it ends every process that descends from it and
removes all that its instances have.

    python -m tests.support.janitor PID DIRECTORY GRACE_S
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SESSION = "MIDAIR_TEST_SESSION"  # in the environment of all that descend from a session
GRACE_S = 60.0  # what a test may take beyond its limit, to fail and to clean up


class Janitor:
    """The session's end of it."""

    def __init__(self, directory: Path, place: Path) -> None:
        os.environ[SESSION] = f"{os.getpid()}-{time.monotonic_ns()}"
        grace = os.environ.get("MIDAIR_TEST_GRACE_S", str(GRACE_S))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), str(directory), grace],
            stdin=subprocess.PIPE,
            cwd=place,
            start_new_session=True,  # Ctrl-C is for the tests
        )

    def tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(("\t".join(words) + "\n").encode())
            self._process.stdin.flush()

    def end(self) -> None:
        """There is nothing left to do for it."""
        self.tell("over")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def watch(pid: int, directory: Path, grace_s: float) -> None:
    names: list[str] = []
    running, until = "", float("inf")
    pending = b""
    os.set_blocking(0, False)
    while True:
        ready, _, _ = select.select([0], [], [], max(0.0, min(60.0, until - time.monotonic())))
        data = os.read(0, 65536) if ready else None
        if data == b"":
            break
        *lines, pending = (pending + (data or b"")).split(b"\n")
        for line in lines:
            what, *words = line.decode(errors="replace").split("\t")
            if what == "name":
                names.append(words[0])
            elif what == "begin":
                running, until = words[0], time.monotonic() + float(words[1]) + grace_s
            elif what == "end":
                running, until = "", float("inf")
            elif what == "over":
                return end_descendants()
        if time.monotonic() > until:
            print(f"\n{running}: hangs beyond its time limit: the session is ended", flush=True)
            until = float("inf")
            os.kill(pid, signal.SIGABRT)
    clean(names, directory)


def clean(names: list[str], directory: Path) -> None:
    """The session died without a word."""
    from midair.process import ipc

    end_descendants()
    removed = [what for name in names for what in ipc.remove_all(name)]
    shutil.rmtree(directory, ignore_errors=True)
    if removed:
        print(f"the session has died: removed {len(removed)} things it had left", flush=True)


def end_descendants() -> None:
    """All that a session has started and that is still there, whoever its parent is by now."""
    mark = f"{SESSION}={os.environ[SESSION]}".encode()
    for _ in range(3):  # one that dies may have started another
        found = 0
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if pid != os.getpid() and mark in environment.split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    found += 1
        if not found:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    os.dup2(2, 1)
    watch(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
