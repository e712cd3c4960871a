"""Fixtures of all tests: instances of Midair, each with a name of its own, and a leak check.

Whatever the tests start is ended and removed at the end of the session, and the session fails if
there was anything left to remove. Each worker of pytest-xdist is such a session, with names and a
directory of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator

import pytest

from midair.process import ipc
from midair.process.runtime import Runtime
from tests.support.instance import (
    BASE,
    Instance,
    elsewhere,
    leaks_of,
    names_given,
    new_name,
    processes_of,
    start,
)

SLOW_S = 1500  # time limit of a slow test; that of the others is in pyproject.toml


@pytest.fixture(scope="module")
def midair(request: pytest.FixtureRequest) -> Iterator[Instance]:
    """An instance for the tests of one module."""
    if given := elsewhere():
        yield given
        return
    instance = start(request.node.nodeid)
    yield instance
    instance.stop()


@pytest.fixture
def make_midair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Instance]]:
    """Makes instances: `make_midair(config="...toml...", connmgrs=2)`; ended after the test."""
    made: list[Instance] = []

    def make(
        config: str = "", connmgrs: int | None = None, name: str = "", options: tuple[str, ...] = ()
    ) -> Instance:
        if given := elsewhere():
            return given
        if connmgrs is not None:
            options = (*options, "--connmgrs", str(connmgrs))
        made.append(start(request.node.nodeid, config, *options, name=name))
        return made[-1]

    yield make
    for instance in made:
        instance.stop()


@pytest.fixture
def instance_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a test that makes segments, queues or leases itself; removed afterwards."""
    name = new_name(request.node.nodeid)
    yield name
    ipc.remove_all(name)
    shutil.rmtree(BASE / name, ignore_errors=True)


@pytest.fixture
def place(instance_name: str) -> Runtime:
    """A runtime directory for a test that makes segments itself; removed afterwards."""
    return Runtime.create(instance_name)


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the session if an instance has left anything, after removing it."""
    yield
    leaks = []
    for name, owner in names_given.items():
        found = leaks_of(name)
        for pid in processes_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ipc.remove_all(name)
        leaks += [f"{owner}: instance {name} left {what}" for what in found]
    assert not leaks, "\n".join(leaks)


def pytest_configure() -> None:
    """A shell starts a background job with SIGINT ignored, and a process passes that on to those it
    starts: a test that ends one of them by SIGINT would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit of slow tests, unless they have one of their own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_report_header() -> str:
    try:
        import native
    except ImportError as error:
        return f"native: not built ({error})"
    return f"native: {native.path}"
