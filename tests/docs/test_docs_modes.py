"""docs/modes.md: every example runs as printed and says what the page says it says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.instance import PATIENCE_S, ROOT, Instance

PAGE = ROOT / "docs" / "modes.md"
EXAMPLES = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```\n\n```text\n(.*?)```",
    PAGE.read_text(),
    re.M | re.S,
)
MODES = [
    *("Broadcast", "Several topics", "Semaphore", "Session", "Fanout", "ipc", "Kinds"),
    "Deadlines",
]


def test_every_mode_has_an_example() -> None:
    assert [title for title, *_ in EXAMPLES] == MODES


@pytest.mark.parametrize(("title", "code", "output"), EXAMPLES, ids=MODES)
def test_example(midair: Instance, title: str, code: str, output: str) -> None:
    here = code.replace("connect()", f"connect({midair.address!r})")
    here = here.replace("connect(type", f"connect({midair.address!r}, type")
    done = subprocess.run(
        [sys.executable, "-c", here],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_limits_and_statuses_are_those_of_the_sources() -> None:
    page = PAGE.read_text()
    sources = "".join(path.read_text() for path in (ROOT / "native" / "src").rglob("*.[ch]"))
    for name in (
        "MODE_REQUESTS_MAX",
        "MODES_REQUESTS_EACH",
        "MODE_LEGS_MAX",
        "MODES_ANSWERS_EACH",
        "MODES_FANOUT_MAX",
        "MODE_TOPICS_MAX",
        "MODE_TOPICS_BYTES",
        "MODES_WATCHERS_MAX",
    ):
        found = re.search(rf"#define {name} (\d+)u", sources)
        assert found, name
        assert f" {found[1]} |" in page, name
    statuses = re.findall(r"\[STATUS_\w+\] = \{(\d+), \"([^\"]+)\"\}", sources)
    assert len(statuses) >= 10
    for code, text in statuses:
        assert f"| `{code} {text}` |" in page, text
    for value in re.findall(r"\{\"([a-z-]+)\", MODE_\w+\}", sources):
        assert f"`Midair-Mode: {value}`" in page, value
