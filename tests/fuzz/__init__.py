"""Fuzzers of what arrives on sockets: see README.md beside this file."""


def name_of(pid: int) -> str:
    """What the instance of a fuzzing process is called."""
    return f"fuzz-{pid}"
