"""Ends a container and removes what it leaves, when its standard input ends.

That is when the test says so, and also when the test is killed, by whatever means: then its
end of the pipe is closed by the kernel. Arguments: the pid of the container's first process,
the mount point, the cgroups.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

PATIENCE_S = 30.0


def main(first: int, base: str, cgroups: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pidfd = os.pidfd_open(first)
    print("guarding", flush=True)
    while os.read(0, 512):
        pass
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [], PATIENCE_S)  # readable: gone, with all in its namespaces
    deadline = time.monotonic() + PATIENCE_S
    for path in cgroups:
        while not remove_cgroup(path):
            if time.monotonic() > deadline:
                raise SystemExit(f"{path}: still in use")
            time.sleep(0.02)
    os.rmdir(base)  # fails if anything is in it, or mounted on it


def remove_cgroup(path: str) -> bool:
    """Removes a cgroup and those below it; False: the kernel is not done with one of them."""
    try:
        for below, _, _ in os.walk(path, topdown=False):
            os.rmdir(below)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
