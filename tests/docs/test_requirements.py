"""docs/requirements.md: every number once, and every test it names is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.test_docs import DOCS, read, rows
from tests.support.instance import ROOT

PAGE = DOCS / "requirements.md"
NUMBERS = [f"003-{n}" for n in range(1, 83)]
STATES = ("works", "differently", "not done")
TESTS = ROOT / "tests"
ROWS = {row[0]: row for row in rows(read(PAGE))}


def docstrings() -> str:
    """What every test says of itself."""
    found = []
    for path in TESTS.glob("**/*.py"):
        tree = ast.parse(read(path))
        for node in [tree, *ast.walk(tree)]:
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def test_every_number_has_one_row() -> None:
    assert [row[0] for row in rows(read(PAGE))] == NUMBERS
    assert {row[2] for row in ROWS.values()} == set(STATES)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_named_is_there(number: str) -> None:
    """What works names a test, or a test names it; what does not says why."""
    _, _, state, shown = ROWS[number]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
    for file, name in named:
        text = read(TESTS / file)
        assert re.search(rf"^\s*(async )?(def|class) {name}\b", text, re.M), f"{file}: no {name}"
    if state == "works":
        cited = re.search(rf"\b{number}\b", docstrings())
        assert named or cited, f"{number} works, and no test shows it"
    else:
        assert len(shown) > len("no links yet") - 1
