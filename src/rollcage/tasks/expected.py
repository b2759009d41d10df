"""Which tests a check expects: those that it names, else those that stand in its files, read and not run."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from rollcage.errors import UsageError
from rollcage.tasks.logs import parser_named
from rollcage.types import TESTS_DIR, Check, Task, resolve_box_path

READ_LIMIT = 1 << 20
"""No file is read for tests that is longer."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Expected(NamedTuple):
    """A check, and the tests that count."""

    check: Check
    ids: tuple[str, ...]
    """As the framework reports them."""

    def part(self, test: str) -> str:
        """The name of a test in `reward.parts`."""
        return f"{self.check.name}: {test}" if self.check.name and self.check.kind != "command" else test


def expected_of(task: Task) -> list[Expected]:
    """The tests that each check of a task expects; UsageError where that cannot be told, or two have the same name."""
    for check in task.checks:
        _refuse_agents_program(check, task)
    found = [Expected(check, expected(check, task.tests)) for check in task.checks]
    parts = Counter(each.part(test) for each in found for test in each.ids)
    if twice := next((part for part, times in parts.items() if times > 1), None):
        raise UsageError(f"the test {twice!r} is expected twice", argument="checks", remedy="give each check a name")
    return found


def _refuse_agents_program(check: Check, task: Task) -> None:
    """A proxied check runs its interpreter in the judge: it must not be the agent's to change.

    Not even where it is put back before: code under test writes to the workdir while it is judged.
    """
    program = PurePosixPath(os.path.normpath(check.interpreter))
    if check.isolation == "proxied" and any(program.is_relative_to(folder) for folder in (task.workdir, *task.keep)):
        raise UsageError(
            f"a proxied check runs {check.interpreter} in the judge, where the agent can change it",
            argument="checks",
            remedy="install it in setup outside the workdir",
        )


def expected(check: Check, tests: Mapping[str, str]) -> tuple[str, ...]:
    """The tests that one check expects."""
    if check.kind == "command":
        return (check.name or check.command.strip(),)
    if check.kind == "log":
        parser_named(check.parser)
        return tuple(dict.fromkeys((*check.expect, *check.maintain)))
    if check.expect:
        return check.expect
    ids = [each for path, text in _selected(check, tests) for each in _written_in(check.kind, path, text)]
    if not ids:
        where = f"{check.path!r} of `tests`" if check.path else "`tests`"
        raise UsageError(f"no {check.kind} tests stand in {where}", argument="checks", remedy="list them in `expect`")
    return tuple(dict.fromkeys(ids))


def tests_below(tests: Mapping[str, str]) -> dict[str, str]:
    """A task's tests by their paths relative to `$TESTS_DIR`."""
    placed = {PurePosixPath(resolve_box_path(path, TESTS_DIR)): text for path, text in tests.items()}
    return {str(path.relative_to(TESTS_DIR)): text for path, text in placed.items() if path.is_relative_to(TESTS_DIR)}


def _selected(check: Check, tests: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for path, text in sorted(tests_below(tests).items()):
        name = PurePosixPath(path).name
        named = path == str(PurePosixPath(check.path))
        below = not check.path or PurePosixPath(path).is_relative_to(check.path)
        if named or (below and name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))):
            yield path, text


def _written_in(kind: str, path: str, text: str) -> Iterator[str]:
    if len(text) > READ_LIMIT:
        what = f"{path} of `tests` is too long to look for tests in it"
        raise UsageError(what, argument="checks", remedy="list them in `expect`")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path} of `tests` is no Python: {error}", argument="checks") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    module = path.removesuffix(".py").replace("/", ".")
    if kind == "pytest":
        yield from (f"{path}::{name}" for name in _tests_in(tree.body))
    for name, node in classes.items():
        cases = _descends(node, classes, "TestCase")
        if cases or (kind == "pytest" and name.startswith("Test")):
            for method in dict.fromkeys(_methods(node, classes)):
                yield f"{path}::{name}::{method}" if kind == "pytest" else f"{module}.{name}.{method}"


def _tests_in(body: Sequence[ast.stmt]) -> Iterator[str]:
    return (node.name for node in body if isinstance(node, _Function) and node.name.startswith("test"))


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]


def _descends(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], ancestor: str, depth: int = 20) -> bool:
    return depth > 0 and any(
        base.endswith(ancestor) or (base in classes and _descends(classes[base], classes, ancestor, depth - 1))
        for base in _bases(node)
    )


def _methods(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], depth: int = 20) -> Iterator[str]:
    """Its own tests and those of the classes above it in the same file."""
    for base in _bases(node):
        if base in classes and depth:
            yield from _methods(classes[base], classes, depth - 1)
    yield from _tests_in(node.body)
