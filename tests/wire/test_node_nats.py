"""Midair with the Node client `nats`: tests/wire/node/essentials.mjs, check by check."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.server import Server

NODE = Path(__file__).parent / "node"
SCRIPT = NODE / "essentials.mjs"
CHECKS = re.findall(r"^  async (\w+)\(\) \{$", SCRIPT.read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="Node is not installed")


@pytest.fixture(scope="session")
def installed() -> None:
    """node_modules as package-lock.json says, made once."""
    if not (NODE / "node_modules" / "nats").is_dir():
        subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"], cwd=NODE, check=True, capture_output=True
        )


def test_essentials(server: Server, installed: None) -> None:
    ran = subprocess.run(
        ["node", str(SCRIPT), server.host, str(server.port)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {r["name"]: r.get("error", "ok") for r in results} == dict.fromkeys(CHECKS, "ok")
    assert len(CHECKS) >= 12
