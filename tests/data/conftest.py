"""Instances of 1, 2 and 4 connection managers, and a check after each test that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.instance import Instance, start
from tests.support.net import ARENA_BYTES, CONFIG, Net
from tests.support.stream import Inside

CONNMGRS = [1, 2, pytest.param(4, marks=pytest.mark.alone)]


@pytest.fixture(scope="module", params=CONNMGRS, ids=lambda n: f"{n}connmgr")
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Instance, Inside]]:
    connmgrs: int = request.param
    instance = start(request.node.nodeid, CONFIG, "--connmgrs", str(connmgrs))
    inside = Inside(instance.name, connmgrs, ARENA_BYTES)
    yield instance, inside
    inside.table.close()
    restarted = [row for row in instance.status()["components"] if row["restarts"]]
    assert instance.stop() == 0
    assert restarted == []
    assert not [line for line in instance.stderr().splitlines() if " info: " not in line]


@pytest.fixture
def net(running: tuple[Instance, Inside]) -> Iterator[Net]:
    net = Net(*running)
    yield net
    net.finish()
