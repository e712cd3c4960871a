"""The pages say what the code says: whatever can be compared is compared.

Method: commands of the README are run against a real instance and their output is compared,
modulo addresses, process ids and times. Tables are read back and compared with their source.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from midair import config, values
from midair.cli import parser
from midair.exits import FATAL, Exit
from tests.support.instance import PATIENCE_S, ROOT, Instance, cli
from tests.support.reload import reload

README = ROOT / "README.md"
RULES = ROOT / "native" / "README.md"
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
PAGES = [
    README,
    RULES,
    *(
        DOCS / f"{name}.md"
        for name in (
            "architecture",
            "operations",
            "configuration",
            "monitoring",
            "performance",
            "pressure",
            "traces",
        )
    ),
    *DECISIONS,
]
PACKAGES = ("midair", "router", "dispatcher", "connmgr", "native", "bench")
C_FILES = sorted((ROOT / "native" / "src").rglob("*.[ch]"), key=lambda path: path.name)
TEST_FILES = sorted((ROOT / "tests").glob("**/test_*.py"))
Make = Callable[..., Instance]


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def section(path: Path, title: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,6}} |\Z)", read(path), re.M | re.S)
    assert found, f"{by_name(path)}: no section {title!r}"
    return found.group(2)


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without the heads."""
    result = []
    lines = text.splitlines()
    for at, line in enumerate(lines):
        is_head = at + 1 < len(lines) and lines[at + 1].startswith("| ---")
        if line.startswith("|") and not line.startswith("| ---") and not is_head:
            result.append([cell.strip() for cell in line.strip("|").split("|")])
    return result


def code(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


# ---- commands ------------------------------------------------------------------------------


@dataclasses.dataclass
class Said:
    """A command of a console block and what follows it."""

    command: str
    output: list[str]


def consoles(path: Path) -> list[list[Said]]:
    blocks = []
    for text in re.findall(r"^```console\n(.*?)^```", read(path), re.M | re.S):
        said: list[Said] = []
        for line in text.splitlines():
            if line.startswith("$ "):
                said.append(Said(line[2:], []))
            else:
                said[-1].output.append(line)
        blocks.append(said)
    return blocks


def words(command: str, instance: Instance) -> list[str]:
    """The arguments of a `.venv/bin/midair` command, turned to that instance."""
    program, *args = shlex.split(command)
    assert program == ".venv/bin/midair"
    if args[0] in ("status", "down"):
        return [*args, "--name", instance.name]
    return [*args, "--server", instance.address]


def plain(text: str, instance: Instance) -> list[str]:
    """Lines with what differs from run to run replaced by what the README has."""
    text = text.replace(f" --server {instance.address}", "").replace(f" --name {instance.name}", "")
    text = text.replace(instance.address, "127.0.0.1:4222").replace(instance.name, "midair")
    return [re.sub(r"\s+", " ", blur(line)) for line in text.splitlines()]


def blur(line: str) -> str:
    """A row of the status table without process id and uptime."""
    return re.sub(r"^(\w+(?:/\d+)?\s+)\d+(\s.*\s)\d+\.\d+s(\s+\d+)$", r"\1PID\2TIME\3", line)


@pytest.fixture
def instance(make_midair: Make) -> Instance:
    made = make_midair(connmgrs=1)
    if made.process is None:
        pytest.skip("a server that somebody else runs")
    return made


def test_the_first_session_goes_as_the_readme_says(instance: Instance) -> None:
    start, listen, use = consoles(README)
    (make_run,), (sub,) = start, listen
    assert make_run.command == "make run"
    assert plain(instance.line, instance) == plain("\n".join(make_run.output), instance)

    subscriber = subprocess.Popen(
        [sys.executable, "-m", "midair", *words(sub.command, instance), "--count", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with subscriber:
        try:
            assert subscriber.stdout is not None
            heard = subscriber.stdout.readline()
            for said in use:
                done = cli(*words(said.command, instance))
                assert done.returncode == 0, done.stderr
                expected = plain("\n".join(said.output), instance)
                assert plain(done.stdout, instance) == expected, said.command
                if "down" in said.command:
                    continue
                assert done.stderr == ""
            heard += subscriber.communicate(timeout=PATIENCE_S)[0]
        finally:
            subscriber.kill()
    assert heard.splitlines() == sub.output


def test_a_configuration_is_checked_as_the_page_says(tmp_path: Path) -> None:
    page = DOCS / "configuration.md"
    (said,), _reload = consoles(page)
    example = re.search(r"^```toml\n(.*?)^```", read(page), re.M | re.S)
    assert example
    (tmp_path / "example.toml").write_text(example.group(1))
    done = cli("check-config", str(tmp_path / "example.toml"))
    assert done.stdout.replace(f"{tmp_path}/", "").splitlines() == said.output
    assert said.command == "midair check-config example.toml"


def test_a_reload_goes_as_the_page_says(make_midair: Make) -> None:
    _check, (said,) = consoles(DOCS / "configuration.md")
    midair = make_midair("[connmgr]\ncount = 2\n")
    changed = '[connmgr]\ncount = 2\n[limits]\nmax_pending = "32MiB"\n'
    done = reload(midair, f"{changed}[manager]\nrestart_limit = 7\n")
    assert said.command == "midair reload"
    pause = r"active in \d+\.\d ms"
    expected = [re.sub(pause, "active", line) for line in said.output]
    assert [re.sub(pause, "active", line) for line in done.stdout.splitlines()] == expected


def subcommands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in of._actions:
        if isinstance(action.choices, dict):
            return action.choices
    return {}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_commands_and_options_exist(page: Path) -> None:
    """Every `midair ...` and `make ...`, in a sentence, a table or a block."""
    commands = subcommands(parser())
    shown = code(read(page)) + [said.command for block in consoles(page) for said in block]
    for command in shown:
        if found := re.match(r"(?:\.venv/bin/)?midair ([a-z][\w-]*)(.*)", command):
            assert found.group(1) in commands, command
            it, rest = commands[found.group(1)], found.group(2).split()
            while rest and rest[0] in subcommands(it):
                it = subcommands(it)[rest.pop(0)]
            known = it._option_string_actions
            for option in re.findall(r"(?<!\S)--[a-z-]+", found.group(2)):
                assert option in known, command
        elif found := re.match(r"make ([a-z-]+)", command):
            assert found.group(1) in make_targets(), command


def make_targets() -> set[str]:
    found = re.search(r"^\.PHONY: (.*)$", read(ROOT / "Makefile"), re.M)
    assert found
    return set(found.group(1).split())


def test_the_readme_has_every_target_the_makefile_presents() -> None:
    presented = set(re.findall(r"^# make ([a-z-]+)", read(ROOT / "Makefile"), re.M))
    shown = {name for row in rows(section(README, "Make targets")) for name in code(row[0])}
    assert {f"make {name}" for name in presented} <= shown


# ---- names ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def functions() -> set[str]:
    """Every function of the C part and every function or method of the Python part."""
    found: set[str] = set()
    for path in C_FILES:
        found |= set(re.findall(r"^(?:API )?[a-z_][\w \t*]*?\b(\w+)\(", read(path), re.M))
    for package in PACKAGES:
        for path in (ROOT / package).glob("**/*.py"):
            found |= set(re.findall(r"^\s*(?:async )?def (\w+)\(", read(path), re.M))
    return found


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_functions_and_files_exist(page: Path, functions: set[str]) -> None:
    text = read(page)
    for name in code(text):
        if call := re.fullmatch(r"(\w+)\(\)", name):
            # Those of other people's libraries are no function of ours, and need no check.
            assert call.group(1) in functions | {"flush"}, name
        elif re.fullmatch(r"[\w./-]+\.(?:c|h|py|md)", name) and "<" not in name:
            assert (ROOT / name).exists() or (page.parent / name).exists(), name
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", read(there), re.M)
            assert anchor in {head.lower().replace(" ", "-") for head in heads}, target


def test_keys_named_anywhere_exist() -> None:
    tables = {table.name: table for table in dataclasses.fields(config.Config)}
    for page in PAGES:
        for name in code(read(page)):
            table, _, key = name.partition(".")
            if table in tables and re.fullmatch(r"[a-z]\w+", key) and key not in ("py", "main"):
                known = config.types(type(getattr(config.Config(), table)))
                assert key in known, name


# ---- the rules of shared memory --------------------------------------------------------------


def rules() -> dict[str, str]:
    """Number -> the one file whose head comment has the rule."""
    found: dict[str, str] = {}
    for path in C_FILES:
        head = read(path).split("*/", 1)[0]
        for name in re.findall(r"^ \*   ([A-Z][1-9]\d?)  \S", head, re.M):
            assert name not in found, f"{name} is in {found[name]} and in {path.name}"
            found[name] = str(path.relative_to(RULES.parent))
    return found


def cited(text: str) -> set[str]:
    """Numbers of rules, ranges spelt out."""
    prefixes = "".join(sorted({name[0] for name in rules()}))
    found = set(re.findall(rf"\b[{prefixes}][1-9]\d?\b", text))
    for prefix, low, high in re.findall(rf"\b([{prefixes}])(\d+) to \1(\d+)\b", text):
        found |= {f"{prefix}{number}" for number in range(int(low), int(high) + 1)}
    return found


def test_rules_are_numbered_without_gaps() -> None:
    numbers: dict[str, list[int]] = {}
    for name in rules():
        numbers.setdefault(name[0], []).append(int(name[1:]))
    assert set(numbers) == set("SLAPJRBFTM")
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())


@pytest.mark.parametrize("path", [*C_FILES, *TEST_FILES], ids=by_name)
def test_rules_cited_exist(path: Path) -> None:
    if path != Path(__file__):
        assert cited(read(path)) <= set(rules())


def test_the_page_says_where_each_rule_is() -> None:
    table = {row[0]: re.findall(r"\]\((.*)\)", row[2])[0] for row in rows(section(RULES, "Rules"))}
    assert {name[0]: path for name, path in rules().items()} == table


def test_every_rule_names_the_test_that_shows_it() -> None:
    """Or says that there is none. What is named exists, down to the rules of a state machine."""
    table = rows(section(RULES, "Which test shows which rule"))
    assert sorted(row[0] for row in table) == sorted(rules())
    for rule, shown in table:
        named = code(shown)
        assert named or shown == "none yet", rule
        for name in named:
            file, _, function = name.partition("::")
            if function:
                source = read(ROOT / "tests" / file)
                assert re.search(rf"^(?:def|class) {function}\b", source, re.M), (rule, name)
            else:
                assert re.search(rf"^    def {name}\(", source, re.M), (rule, name)


def test_rules_that_tests_claim_to_show_name_those_tests() -> None:
    shown = {row[0]: row[1] for row in rows(section(RULES, "Which test shows which rule"))}
    for path in TEST_FILES:
        if path == Path(__file__):
            continue
        for rule in cited(read(path)):
            name = path.relative_to(ROOT / "tests")
            assert f"`{name}::" in shown[rule], f"{by_name(path)} cites {rule}"


def test_commit_points_are_those_of_the_sources() -> None:
    sources = {path.name: read(path) for path in C_FILES}
    named = {
        name
        for file, text in sources.items()
        if file != "crash_points.h"  # also the points between two commits
        for name in re.findall(r'"([a-z_]+\.[a-z_]+)"', re.sub(r"#include.*", "", text))
    }
    table = rows(section(RULES, "Commit points"))
    assert {code(row[0])[0] for row in table} == named
    for name, where, before, after in table:
        function, file = where.split(" in ")
        assert f'"{code(name)[0]}"' in sources[file], name
        assert f"{code(function)[0][:-1]}" in sources[file], function
        assert before
        assert after


def test_words_of_the_owner_table_exist() -> None:
    text = "\n".join(read(path) for path in C_FILES if path.suffix == ".h")
    table = rows(section(RULES, "Segments, queues and who may write them"))
    names = [name for row in table if len(row) == 4 for name in code(row[0])]
    assert len(names) > 20
    for name in names:
        for part in name.split("."):
            assert re.search(rf"\b{part}\b", text), name


# ---- tables --------------------------------------------------------------------------------


def test_configuration_has_every_key_with_its_default_and_range() -> None:
    page = DOCS / "configuration.md"
    for table in dataclasses.fields(config.Config):
        fields = config.types(type(getattr(config.Config(), table.name)))
        found = {code(row[0])[0]: row[1:] for row in rows(section(page, f"[{table.name}]"))}
        assert list(found) == list(fields)
        for key, (default, allowed, meaning) in found.items():
            text = f"[{table.name}]\n{key} = "
            assert config.parse(text + code(default)[0]) == config.Config(), (key, default)
            assert meaning
            meta = values.meta(fields[key])
            if meta.ge is not None:
                ends = code(allowed)
                assert allowed == f"`{ends[0]}` to `{ends[1]}`", key
                for end, limit in zip(ends, (meta.ge, meta.le), strict=True):
                    read_back = config.parse(text + end)
                    assert getattr(getattr(read_back, table.name), key) == limit, (key, end)
            elif choices := values.choices(fields[key]):
                assert tuple(code(allowed)) == choices


def test_tables_of_the_configuration_are_all_there() -> None:
    titles = re.findall(r"^## \[(\w+)\]$", read(DOCS / "configuration.md"), re.M)
    assert titles == [table.name for table in dataclasses.fields(config.Config)]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_examples_of_configuration_are_allowed(page: Path) -> None:
    for text in re.findall(r"^```toml\n(.*?)^```", read(page), re.M | re.S):
        assert config.parse(text) != config.Config()


def test_exit_codes() -> None:
    table = rows(section(DOCS / "operations.md", "Exit codes"))
    assert [(int(row[0]), row[1]) for row in table] == [(item.value, item.name) for item in Exit]
    assert {row[1] for row in table if row[3] == "no"} == {item.name for item in FATAL}
    assert {row[3] for row in table} == {"yes", "no"}
    assert all(row[2] for row in table)


def test_decisions_are_numbered_and_complete() -> None:
    assert [path.name[:4] for path in DECISIONS] == [
        f"{number:04}" for number in range(1, len(DECISIONS) + 1)
    ]
    for path in DECISIONS:
        parts = re.findall(r"^\*\*(\w+)\.\*\* ", read(path), re.M)
        assert parts == ["Context", "Decision", "Reason", "Consequence"], path.name
        assert read(path).startswith(f"# {path.name[:4]}: ")


def test_every_package_is_installed() -> None:
    """The tests run in the tree, where a package that was left out is found all the same."""
    project = tomllib.loads(read(ROOT / "pyproject.toml"))
    listed = project["tool"]["setuptools"]["packages"]
    tops = {name.partition(".")[0] for name in listed}
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in tops
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(there)
