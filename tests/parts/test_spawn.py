"""Starting a process: what cannot be started ends in the child, and nowhere else."""

from __future__ import annotations

import os

import pytest

from midair.process import spawn


@pytest.mark.parametrize(
    "program", ["/nowhere/python", "/nowhere/\ud800", "/nowhere/\0", "relative", ""]
)
def test_a_program_that_cannot_be_started_ends_the_child(program: str) -> None:
    """The child is a copy of the manager: an exception that left it would end all parts."""
    reader, writer = os.pipe()
    parent = os.getpid()
    try:
        child = spawn.spawn([program, "-m", "router.main"], {}, [], writer)
    finally:
        if os.getpid() != parent:  # it came back: this is the child, in the middle of the tests
            os._exit(99)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 127
    with open(reader, "rb") as said:
        assert said.read().startswith(b"cannot start ")
