"""A real nats-server for tests that compare with it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.peers import NatsServer
from midair import config
from tests.support.instance import PATIENCE_S, Instance, eventually

_STATUS = re.compile(rb"(HMSG \S+ \S+) \d+ \d+(\||\r\n)NATS/1\.0 503\r\nNats-Subject: \S+\r\n")


def without_subject(said: bytes) -> bytes:
    """A 503 as nats-server said it before 2.12, which added the subject that nobody listens to."""
    return _STATUS.sub(rb"\1 16 16\2NATS/1.0 503\r\n", said)


@contextlib.contextmanager
def nats_server(where: Path) -> Iterator[tuple[Instance, str]]:
    """One that runs, and where it is monitored. `where`: an empty directory."""
    program = NatsServer.program()
    command = [program, "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "--ports_file_dir", str(where)]
    with (where / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            path = eventually(lambda: next(iter(where.glob("*.ports")), None), "nats-server is up")
            said = eventually(lambda: _ports(path), "its ports")
            host, port = config.split_address(said["nats"][0].removeprefix("nats://"))
            yield Instance(host, port), said["monitoring"][0]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _ports(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text())
    except ValueError:
        return {}
    return said if said.get("nats") and said.get("monitoring") else {}
