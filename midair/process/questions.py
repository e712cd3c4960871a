"""How a process asks another one that it started: lines of JSON, on stdin and stdout."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


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
        return [json.loads(line) for line in lines]
