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
    ROOT,
    Instance,
    elsewhere,
    leaks_of,
    names_given,
    new_name,
    processes_of,
    start,
    told_of_names,
)
from tests.support.janitor import Janitor

JANITOR = pytest.StashKey[Janitor]()
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


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts a background job with SIGINT ignored, and a process passes that on to those it
    starts: a test that ends one of them by SIGINT would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        config.stash[JANITOR] = Janitor(BASE, ROOT)
    told_of_names.append(config.stash[JANITOR].tell)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[JANITOR].end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test with its fixtures, and what comes down after the last test of a module."""
    janitor = item.config.stash[JANITOR]
    janitor.tell("begin", item.nodeid, str(limit_of(item)))
    try:
        return (yield)
    finally:
        janitor.tell("end")


def limit_of(item: pytest.Item) -> float:
    """The time limit of a test, in seconds; each has one."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        option = item.config.getoption("timeout")
        limit = float(item.config.getini("timeout") if option is None else option)
    else:
        limit = float(marker.kwargs.get("timeout", marker.args[0] if marker.args else 0))
    if limit <= 0:
        raise pytest.UsageError(f"{item.nodeid} has no time limit")
    return limit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit of slow tests, unless they have one of their own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
        limit_of(item)


def pytest_report_header() -> str:
    try:
        import native
    except ImportError as error:
        return f"native: not built ({error})"
    return f"native: {native.path}"
