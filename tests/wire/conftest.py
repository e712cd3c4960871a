"""The server that the clients of this room talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.instance import Instance, elsewhere, start
from tests.support.server import Server


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"{n}connmgr")
def midair(request: pytest.FixtureRequest) -> Iterator[Instance]:
    """With one connmgr, where decisions of the router are repeated, and with two, where none is."""
    if given := elsewhere():
        yield given
        return
    instance = start(request.node.nodeid, "", "--connmgrs", str(request.param))
    yield instance
    instance.stop()


@pytest.fixture
def server(midair: Instance) -> Server:
    return Server(midair.host, midair.port)
