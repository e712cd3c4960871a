"""What Python may call of C, read off the headers that C itself includes.

A declaration marked `API` in native/src/**/*.h is one that Python uses; nothing is declared a
second time for cffi. Of a header with such a mark these are taken, in the order of inclusion:

    API function       its prototype; of a `static inline` one what stands before the body
    API struct X {}    its fields, but for those cffi cannot name (atomics, structs without API)
    API enum X {}      its constants
    API typedef        as it stands; what is atomic can only be pointed to
    #define N value    every integer constant, and those of base/limits.h

`python native/declarations.py OUT.c [OUT.d]` writes the glue of `native._midair`, and what it was
made from.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

SRC = Path(__file__).resolve().parent / "src"

_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
_DEFINE = re.compile(r"^#define ([A-Z][A-Z0-9_]*) +([^\n]+)$", re.M)
_MARKED = re.compile(r"^API\s+(?=\S)", re.M)
_FIELD = re.compile(r"\s*([^;]+);")
_KNOWN = re.compile(r"(const |unsigned )*(u?int\d+_t|int|char|void|size_t|double)\b")


def headers() -> list[Path]:
    """Headers with something for Python, each behind those it includes."""
    found: list[Path] = []
    seen: set[Path] = set()

    def visit(path: Path) -> None:
        if path in seen:
            return
        seen.add(path)
        text = path.read_text()
        for name in _INCLUDE.findall(text):
            visit(SRC / name)
        if _MARKED.search(text) or path.name == "limits.h":
            found.append(path)

    for path in sorted(SRC.rglob("*.h")):
        visit(path)
    return found


def _constants(text: str) -> list[str]:
    values = {name: value for name, value in _DEFINE.findall(text) if '"' not in value}
    return [f"#define {name} ..." for name in values]


def _array(match: re.Match[str]) -> str:
    return match[0] if match[1].isdigit() or not match[1] else "[...]"


def _can_be_named(field: str, public: set[str]) -> bool:
    """Whether cffi knows the type of the field. `public`: the structs and types with a mark."""
    kind = re.match(r"(?:const )?(?:struct )?(\w+)", field)
    pointed = re.match(r"(const )?struct \w+ \*", field)
    return bool(_KNOWN.match(field) or pointed or (kind and kind[1] in public))


def _struct(head: str, body: str, public: set[str]) -> str:
    """The struct with the fields that can be named; the compiler knows about the others."""
    fields = [field for field in _FIELD.findall(body) if _can_be_named(field, public)]
    fields = [re.sub(r"\[([^\]]*)\]", _array, field) for field in fields]
    return head + " {\n    " + ";\n    ".join([*fields, "..."]) + ";\n};"


def _enum(head: str, body: str) -> str:
    names = re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)", body)
    return head + " { " + ", ".join([*names, "..."]) + " };"


def _declaration(text: str, public: set[str]) -> str:
    """What begins at a mark."""
    end = re.search(r"[;{]", text)
    if end is None:
        raise ValueError(f"API marks nothing: {text[:60]!r}")
    head = " ".join(text[: end.start()].split())
    if end[0] == "{" and "(" not in head:
        body = text[end.end() : text.index("};", end.end())]
        if head.startswith("struct "):
            return _struct(head, body, public)
        return _enum(head, body)
    head = head.removeprefix("static inline ")
    head = re.sub(r"^typedef _Atomic \w+ ", "typedef void ", head)  # only ever pointed to
    return re.sub(r"\[[^\]]*\]", "[]", head) + ";"


def declarations() -> str:
    """Everything cffi is told."""
    texts = [_COMMENT.sub("", path.read_text()) for path in headers()]
    structs, types = (
        {name for text in texts for name in re.findall(mark, text, re.M)}
        for mark in (r"^API struct (\w+) \{", r"^API typedef [^;]*?(\w+);")
    )
    said = ["typedef int mqd_t;", "typedef int pid_t;"]
    for text in texts:
        said += _constants(text)
        said += [_declaration(text[m.end() :], structs | types) for m in _MARKED.finditer(text)]
    opaque = {name for line in said for name in re.findall(r"struct (\w+)", line)} - structs
    return "\n".join([*(f"struct {name};" for name in sorted(opaque)), *said]) + "\n"


def make() -> FFI:
    """An FFI that knows the declarations; its module includes the headers themselves."""
    ffi = FFI()
    ffi.cdef(declarations())
    includes = "\n".join(f'#include "{path.relative_to(SRC)}"' for path in headers())
    ffi.set_source("native._midair", includes)
    return ffi


def main(out: str, depends: str | None = None) -> None:
    make().emit_c_code(out)
    if depends:
        sources = " ".join(str(path) for path in sorted(SRC.rglob("*.h")))
        Path(depends).write_text(f"{Path(out).name}: {sources}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
