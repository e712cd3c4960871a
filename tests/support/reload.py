"""`midair reload` of an instance that a test has started."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from tests.support.instance import BASE, Instance, cli

RELOAD_S_MAX = 120.0


def write(instance: Instance, text: str) -> None:
    """Another text in the configuration file of an instance."""
    (BASE / f"{instance.name}.toml").write_text(text)


def reload(instance: Instance, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Has the instance read that text."""
    write(instance, text)
    done = cli("reload", "--name", instance.name, *options, timeout=RELOAD_S_MAX)
    print(done.stdout, done.stderr, end="")
    return done


def reloaded(instance: Instance, text: str) -> list[str]:
    """The same, which has to work: the last lines, about the keys.

    Something else may be under way that nobody has asked for.
    """
    deadline = time.monotonic() + RELOAD_S_MAX
    while "is under way" in (done := reload(instance, text)).stderr:
        assert time.monotonic() < deadline, done.stderr
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stderr}\n{instance.stderr()[-3000:]}"
    return [line for line in done.stdout.splitlines() if " ... " not in line]


def events(instance: Instance, kind: str) -> list[dict[str, Any]]:
    lines = (instance.runtime_path / "events.jsonl").read_text().splitlines()
    return [it for it in map(json.loads, lines) if it["kind"] == kind]
