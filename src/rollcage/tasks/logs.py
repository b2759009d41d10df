"""Reads test logs outside of any box, by named parsers, and grades them as the `swebench` package does.

All of a log may have been written by code under test: one that contradicts itself is not graded, and all that reads it
takes a time that grows with its length and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from rollcage.errors import UsageError

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""Between them is what the tests printed."""
EXIT_CODE = ">>>>> Test Exit Code"
"""After them, how the test command ended."""
BROKEN = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
"""Such a log says nothing of any test."""
_STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
_COUNT = re.compile(r"\[\d+\]")
_CODE = re.compile(rf"^{re.escape(EXIT_CODE)}:\s*(-?\d+)", re.MULTILINE)

Statuses = dict[str, str]
"""`PASSED`, `FAILED`, `SKIPPED`, `ERROR` or `XFAIL`, by the names of tests."""


class NotGraded(Exception):
    """The log does not tell what the tests did; the message says why."""


def _summary(log: str, name: Callable[[str], str] = str) -> Statuses:
    """pytest's short summary (`-rA`): a status, then a test."""
    found: Statuses = {}
    for line in log.split("\n"):
        if not line.startswith(_STATUSES):
            continue
        words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
        if len(words) > 1 and not _counts_skipped(words):
            found[name(words[1])] = words[0]
    return found


def _counts_skipped(words: Sequence[str]) -> bool:
    """`SKIPPED [3] path:line: why` tells of three tests and names none."""
    return words[0] == "SKIPPED" and bool(_COUNT.fullmatch(words[1]))


def _short_paths(test: str) -> str:
    """A parameter that is a path differs between machines: its last part counts."""
    main, begun, rest = test.partition("[")
    option, ended, _ = rest.rpartition("]")
    if not (begun and ended):
        return test
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = f"/{option.rpartition('/')[2]}"
    return f"{main}[{option}]"


def _options(log: str) -> Statuses:
    return _summary(log, _short_paths)


def _without_file(log: str) -> Statuses:
    return _summary(log, lambda test: ".".join(test.split("::")[1:]) or test)


def _buttons(log: str) -> Statuses:
    return _summary(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def _either_end(log: str) -> Statuses:
    """pytest with colours, and names with spaces; the status first (`-rA`), or last (`-v`)."""
    found: Statuses = {}
    for raw in log.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[(\d+)m", "", raw))
        if line.startswith(_STATUSES):
            words = (line.split(" - ", 1)[0] if line.startswith("FAILED") else line).split()
            if len(words) > 1 and not _counts_skipped(words):
                found[" ".join(words[1:])] = words[0]
        elif line.endswith(_STATUSES) and len(words := line.split()) > 1:
            found[" ".join(words[:-1])] = words[-1]
    return found


def _verbose(log: str) -> Statuses:
    """pytest with `-v`: a test, then `PASSED`; failures by the summary."""
    found: Statuses = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            found[words[1]] = "FAILED"
        elif " PASSED " in line:
            if words[1] == "PASSED":
                found[words[0]] = "PASSED"
        elif line.startswith("PASSED"):
            found[words[1]] = "PASSED"
    return found


def _sympy(log: str) -> Statuses:
    found: Statuses = {}
    for line in log.split("\n"):
        # Between its first and its last space, `file.py:test`. Expressions take the square of a hostile line's length.
        file, named, test = line.partition(" ")[2].rpartition(" ")[0].rpartition(".py:")
        if named:
            found[f"{file}.py:{test}"] = "FAILED"
    for line in map(str.strip, log.split("\n")):
        end = line.rpartition(" ")[2]
        if line.startswith("test_") and " " in line and end in ("E", "F", "ok"):
            found[line.split()[0]] = {"E": "ERROR", "F": "FAILED", "ok": "PASSED"}[end]
    return found


_UNITTEST_ENDS = {" ... ok": "PASSED", " ... OK": "PASSED", " ...  OK": "PASSED"}
_UNITTEST_BAD = {" ... FAIL": "FAILED", " ... ERROR": "ERROR"}


def _django(log: str) -> Statuses:
    """unittest's verbose lines, `test (module.Case) ... ok`; what a test printed may stand between the two."""
    found: Statuses = {}
    last: str | None = None
    for line in map(str.strip, log.split("\n")):
        if "--version is equivalent to version" in line:
            found["--version is equivalent to version"] = "PASSED"
        if " ... " in line:
            last = line.split(" ... ")[0]
        for end, status in _UNITTEST_ENDS.items():
            if line.endswith(end):
                if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    line = line.split("...", 1)[1].strip()  # a migration's line runs into the test's
                found[line.removesuffix(end)] = status
                break
        if " ... skipped" in line:
            found[line.split(" ... skipped")[0]] = "SKIPPED"
        for end, status in _UNITTEST_BAD.items():
            if line.endswith(end):
                found[line.split(end)[0]] = status
        for begin, status in (("FAIL:", "FAILED"), ("ERROR:", "ERROR")):
            if line.startswith(begin) and len(line.split()) > 1:
                found[line.split()[1]] = status
        if line.startswith("ok") and last is not None:
            found[last] = "PASSED"
    return found


PARSERS: dict[str, Callable[[str], Statuses]] = {
    "pytest": _summary,
    "pytest_options": _options,
    "pytest_v2": _either_end,
    "django": _django,
    "seaborn": _verbose,
    "sympy": _sympy,
    "matplotlib": _buttons,
    "r2e": _without_file,
    **dict.fromkeys(("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"), _summary),
    **dict.fromkeys(("pydicom", "requests", "pylint"), _options),
    **dict.fromkeys(("astropy", "scikit", "sphinx"), _either_end),
}
"""By their names; `parse_log_` before one is allowed, as records have it."""


def parser_named(name: str) -> Callable[[str], Statuses]:
    """The parser of that name; UsageError where nobody knows it."""
    found = PARSERS.get(name.removeprefix("parse_log_"))
    if found is None:
        raise UsageError(f"there is no log parser {name!r}", argument="checks", remedy=f"one of {', '.join(PARSERS)}")
    return found


def statuses_of(log: str, parser: str) -> Statuses:
    """What a log says of each test; NotGraded where it says nothing, or contradicts itself."""
    parse = parser_named(parser)
    if said := next((word for word in BROKEN if word in log), None):
        raise NotGraded(f"the log says {said!r}")
    for marker in (START, END):
        if (times := log.count(marker)) != 1:
            raise NotGraded(f"the log has {times} times {marker!r}, not once")
    found = parse(log.split(START)[1].split(END)[0]) or parse(log)
    if not found:
        raise NotGraded("the log tells of no test")
    codes = _CODE.findall(log)
    if len(codes) > 1:
        raise NotGraded("the log has several exit codes")
    if codes and int(codes[0]) and not {"FAILED", "ERROR"} & set(found.values()):
        raise NotGraded(f"the tests ended with exit code {codes[0]}, and the log tells of no failure")
    return found


def outcomes_of(found: Statuses, expect: Sequence[str], maintain: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
    """Each test that counts, whether it passed, and what the log says of it. Of `maintain` one may be skipped."""
    for test in (*expect, *maintain):
        status = found.get(_reported(test, found), "not reported")
        yield test, status in ("PASSED", "XFAIL") or (status == "SKIPPED" and test in maintain), status


def _reported(test: str, found: Statuses) -> str:
    """The name in the log. Public records cut some names off in the middle of a parameter."""
    if test not in found and test.count("[") > test.count("]"):
        names = [name for name in found if name.startswith(test)]
        if len({found[name] in ("PASSED", "XFAIL") for name in names}) == 1:
            return names[0]
    return test
