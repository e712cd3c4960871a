"""The walks of docs/architecture.md: every function is in the file named, every count is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS: dict[str, str] = dict(re.findall(r"^### ([^\n]+)\n\n```walk\n(.*?)\n```", PAGE, re.M | re.S))


def stays(walk: str) -> list[tuple[str, list[str]]]:
    """(file, functions) of each line."""
    lines = [line.partition(": ") for line in walk.splitlines()]
    return [(file, functions.split(" > ")) for file, _, functions in lines]


def source(file: str) -> str:
    here = ROOT / file if file.endswith(".py") else ROOT / "native" / "src" / file
    return here.read_text(encoding="utf-8")


def test_there_are_walks() -> None:
    assert {"PUB, the router is asked", "SUB", "CONNECT, from accept"} <= set(WALKS)


@pytest.mark.parametrize("name", WALKS)
def test_every_function_is_where_the_walk_says(name: str) -> None:
    for file, functions in stays(WALKS[name]):
        text = source(file)
        for function in functions:
            made = rf"^\s*(?:async )?def {function}\(" if file.endswith(".py") else None
            assert re.search(made or rf"^(?!\s)[^;\n]*\b{function}\(", text, re.M), (file, function)


@pytest.mark.parametrize("name", WALKS)
def test_the_counts_are_those_of_the_walk(name: str) -> None:
    row = re.search(rf"^\| {re.escape(name)} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", PAGE, re.M)
    assert row is not None
    walk = stays(WALKS[name])
    files = [file for file, _ in walk]
    returns = sum(file in files[:at] for at, file in enumerate(files))
    hops = sum(len(functions) for _, functions in walk)
    assert [int(it) for it in row.groups()] == [hops, len(set(files)), len(files) - 1, returns]
