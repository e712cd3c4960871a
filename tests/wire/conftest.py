"""The server that the clients of this room talk to."""

from __future__ import annotations

import os

import pytest

from tests.support.server import Server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    elsewhere = os.environ.get("MIDAIR_TEST_SERVER")
    if elsewhere:
        host, _, port = elsewhere.rpartition(":")
        return Server(host, int(port))
    instance = request.getfixturevalue("midair")
    return Server(instance.host, instance.port)
