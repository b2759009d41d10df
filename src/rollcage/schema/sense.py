"""What no argument may hold, whatever its kind: found before anything starts, and said of the argument it came in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from pydantic import BaseModel, SecretStr

from rollcage.types import HOME

WITH_CONTENTS = frozenset(("upload_files", "tests", "metadata", "solution", "checks"))
"""Arguments that hold what is written as it is; everything else goes to a program, which cannot be told a NUL."""
EACH_SAYS_SOMETHING = frozenset(("setup", "verify", "setup_hosts", "verify_hosts", "enabled_tools", "disabled_tools"))
"""Lists whose entries are commands or names."""


def problem_of(argument: str, value: object) -> str:
    """What is wrong with the text in an argument, in words; empty where nothing is."""
    for text in _texts(value):
        if not _whole(text):
            return "holds half a character (a lone surrogate), which no file and no program can be given"
        if "\0" in text and argument not in WITH_CONTENTS:
            return "holds a NUL character, which no program can be given"
    if argument in EACH_SAYS_SOMETHING and isinstance(value, list | tuple):
        blank = [str(place) for place, text in enumerate(value, 1) if isinstance(text, str) and not text.strip()]
        if blank:
            return f"entry {blank[0]} is empty"
    if argument in ("setup_hosts", "verify_hosts") and isinstance(value, list | tuple):
        wrong = next((host for host in value if isinstance(host, str) and not is_host(host)), None)
        return f"{wrong!r} is no host name; give names, or *.suffix" if wrong is not None else ""
    if argument == "test_script" and isinstance(value, str) and value and not value.strip():
        return "is empty"
    return ""


def is_host(text: str) -> bool:
    """Whether it can be a host's name, `*.suffix` or an address, and not a URL or everything."""
    return bool(text) and "/" not in text and text != "*" and not any(letter.isspace() for letter in text)


def clash_of(paths: Mapping[str, object], folder: str) -> str:
    """Two files of one argument that cannot both be; empty where there are none.

    `folder`: where relative paths begin; it is there before the files are.
    """
    found: dict[PurePosixPath, str] = {}
    for path in paths:
        pure = PurePosixPath(folder, path)
        if pure in found:
            return f"{found[pure]!r} and {path!r} are the same file"
        found[pure] = path
    for pure, path in found.items():
        if PurePosixPath(folder).is_relative_to(pure) or PurePosixPath(HOME).is_relative_to(pure):
            return f"{path!r} is a folder, and cannot be a file"
        above = next((found[parent] for parent in pure.parents if parent in found), None)
        if above is not None:
            return f"{above!r} cannot be a file and the folder of {path!r}"
    return ""


def _texts(value: object) -> Iterator[str]:
    """Every text in a value. Not by recursion: callers nest as deep as they like."""
    left: list[object] = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case SecretStr() as secret:
                yield secret.get_secret_value()
            case BaseModel() as model:
                left += dict(model).values()
            case Mapping() as table:
                left += [*table.keys(), *table.values()]
            case list() | tuple() as items:
                left += items


def _whole(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
