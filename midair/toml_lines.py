"""Where in a TOML text a key is written: the standard parser does not say.

The text is known to be valid TOML (it has been parsed), so a small scan is enough: it
tracks table headers, reads the (dotted) key at the start of each statement, and walks
over the value so that the inside of a string or a list is not taken for a key. A key
inside an inline table is reported at the line of the key that holds the table.
"""

from __future__ import annotations

import re

DEPTH = 3  # of the paths that are told apart: a table, a key, and what is inside it
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Lines:
    """Finds the line of a key path."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._lines: dict[tuple[str, ...], int] = {}
        self._scan()

    def find(self, *path: str) -> int:
        """Line (from 1) of a key, or of the nearest thing around it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return 1

    def _scan(self) -> None:
        text, table = self._text, ()  # type: str, tuple[str, ...]
        while self._at < len(text):
            char = text[self._at]
            line = text.count("\n", 0, self._at) + 1
            if char in " \t\n":
                self._at += 1
            elif char == "#":
                self._skip_comment()
            elif char == "[":
                self._at += 2 if text.startswith("[[", self._at) else 1
                table = self._key("]")
                self._note(table, line)
                self._at += 2 if text.startswith("]]", self._at) else 1
            else:
                self._note(table + self._key("="), line)
                self._at += 1
                self._skip_value()

    def _note(self, path: tuple[str, ...], line: int) -> None:
        path = path[:DEPTH]
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)
        self._lines[path] = line

    def _key(self, end: str) -> tuple[str, ...]:
        """Reads a dotted key up to, not including, `end`."""
        parts: list[str] = []
        while self._at < len(self._text) and self._text[self._at] != end:
            char = self._text[self._at]
            bare = _BARE.match(self._text, self._at)
            if char in "\"'":
                start = self._at
                self._skip_string()
                parts.append(self._text[start + 1 : self._at - 1])
            elif bare:
                parts.append(bare.group())
                self._at = bare.end()
            else:
                self._at += 1
        return tuple(parts)

    def _skip_value(self) -> None:
        depth = 0
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "\"'":
                self._skip_string()
                continue
            if char == "#":
                self._skip_comment()
                continue
            if char == "\n" and depth == 0:
                return
            depth += (char in "[{") - (char in "]}")
            self._at += 1

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _skip_string(self) -> None:
        quote = self._text[self._at]
        many = quote * 3
        ending = many if self._text.startswith(many, self._at) else quote
        self._at += len(ending)
        while self._at < len(self._text) and not self._text.startswith(ending, self._at):
            self._at += 2 if quote == '"' and self._text[self._at] == "\\" else 1
        self._at += len(ending)
        # A multi-line string may end with up to two quotes of its own before the three.
        while len(ending) == 3 and self._text.startswith(quote, self._at):
            self._at += 1
