"""How a process asks another one that it started: lines of JSON, on stdin and stdout.

Both are of the same release. If they are not after all, each line has "v", the version of what is
said: a newer one is an error, and is not guessed at.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from midair.errors import MidairError
from midair.version import __version__

VERSION = 1


def line(said: dict[str, Any]) -> str:
    """A question or an answer as it is written."""
    return json.dumps({**said, "v": VERSION}) + "\n"


def parse(text: str | bytes) -> dict[str, Any]:
    """The question or the answer in a line."""
    said: dict[str, Any] = json.loads(text)
    if (version := said.pop("v", 0)) > VERSION:
        raise MidairError(
            f"asked or answered in version {version}; midair {__version__} understands up to "
            f"{VERSION}"
        )
    return said


def say(**answer: Any) -> None:
    print(line(answer), end="", flush=True)


class Questions:
    """Lines on stdin. Its end means that the process that started us has gone."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self._text = b""

    def read(self) -> list[dict[str, Any]]:
        with contextlib.suppress(BlockingIOError):
            got = os.read(0, 65536)
            if not got:
                raise SystemExit(0)
            self._text += got
        *lines, self._text = self._text.split(b"\n")
        return [parse(text) for text in lines]
