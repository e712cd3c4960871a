"""An instance for each module of these tests, with one connmgr and with two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.instance import Instance, start


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def connmgrs(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, connmgrs: int) -> Iterator[Instance]:
    instance = start(request.node.nodeid, "", "--connmgrs", str(connmgrs))
    yield instance
    assert instance.stop() == 0
    assert " died" not in instance.stderr()
