"""What the files of a task folder in Harbor's format say: text, YAML, Dockerfiles, and the lines of fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from pydantic import ValidationError

from rollcage.errors import TaskError
from rollcage.tasks.files import text_of

HOME = "/root"
"""Where commands are where a Dockerfile names no folder; its engine would be in `/`, which is no folder to work in."""
_CANARY = re.compile(r"\s*(<!--.*\bcanary\b.*-->|#.*\bcanary\b.*)\s*", re.IGNORECASE)
_RUNNERS = re.compile(r"\$\{(T_BENCH|HOST|ENV|MAIN|CONTEXT|TEST|CPUS|MEMORY)[A-Z_]*\}")
"""In compose files: what the programs that these formats come from fill in themselves."""
_COMPOSED = frozenset(("image", "environment", "container_name", "init", "tty", "stdin_open", "platform"))


class Dockerfile(NamedTuple):
    """What a Dockerfile says of those who work in its image."""

    workdir: str = HOME
    """The last WORKDIR."""
    user: str = ""
    """The last USER; empty is root."""
    notice: str = ""
    """What of it cannot be told from the file alone."""


class ComposeService(NamedTuple):
    """What a compose file says of one service."""

    image: str = ""
    """Its name; empty where the file does not say."""
    env: dict[str, str] = {}
    ignored: tuple[str, ...] = ()
    """What else it says, that no box has."""


def folder_text(path: Path, folder: Path) -> str:
    """The text of a file of the folder's: a link out of it would show the agent a file of this machine."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"{path}: is a link that leads out of {folder}")
    return text_of(path, str(path)).removeprefix("\ufeff")


def dockerfile_of(text: str) -> Dockerfile:
    """The last WORKDIR and USER, with the variables that the file itself sets."""
    found, names = Dockerfile(notice="names no WORKDIR"), dict[str, str]()
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        kind, rest = instruction.upper(), rest.strip()
        if kind in ("ENV", "ARG"):
            names |= _set(rest, names)
        elif kind == "FROM":
            found = Dockerfile(notice="names no WORKDIR")
        elif kind in ("WORKDIR", "USER"):
            said = _filled(rest, names)
            if "$" in said:
                found = found._replace(notice=f"{kind} {rest}: its variable is not set there")
            elif kind == "USER":
                found = found._replace(user=said.partition(":")[0])
            else:
                place = said.rstrip("/") if said.startswith("/") else f"{found.workdir}/{said}"
                found = found._replace(workdir=place or HOME, notice="" if place else "has the WORKDIR /")
    return found


def _set(text: str, names: dict[str, str]) -> dict[str, str]:
    """What `A=1 B=2`, or the older `A 1`, sets."""
    try:
        words = shlex.split(text)
    except ValueError:
        return {}
    if words and "=" not in words[0]:
        return {words[0]: _filled(" ".join(words[1:]), names)} if words[1:] else {}
    pairs = (word.partition("=") for word in words)
    return {name: _filled(value, names) for name, equals, value in pairs if equals}


def _filled(text: str, names: dict[str, str]) -> str:
    return Template(text.strip("\"'")).safe_substitute(names)


def strip_canary(text: str) -> str:
    """An instruction without the lines at its start that mark a public task: they are not for the agent."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0])):
        lines.pop(0)
    return "\n".join(lines)


def services_of(path: Path, text: str) -> dict[str, ComposeService]:
    """The services of a compose file, by name."""
    services = yaml_of(path, text).get("services")
    return {str(name): _service(said) for name, said in services.items()} if isinstance(services, dict) else {}


def _service(said: object) -> ComposeService:
    said = said if isinstance(said, dict) else {}
    image, given = str(said.get("image") or ""), said.get("environment") or {}
    pairs = given.items() if isinstance(given, dict) else [str(each).partition("=")[::2] for each in given]
    env = {str(name): "" if value is None else str(value) for name, value in pairs}
    return ComposeService(
        image="" if "$" in image else image,
        env={name: value for name, value in env.items() if not _RUNNERS.search(value)},
        ignored=tuple(str(name) for name, value in said.items() if not _is_usual(str(name), value)),
    )


def _is_usual(name: str, value: object) -> bool:
    """Whether a box is the same without it: which folder is built, a command that only waits, folders of logs."""
    if name == "build":
        build = value if isinstance(value, dict) else {}
        return build.keys() <= {"context", "dockerfile"} and build.get("dockerfile", "Dockerfile") == "Dockerfile"
    if name == "command":
        return "sleep" in str(value) or "tail" in str(value)
    if name == "volumes":
        return isinstance(value, list) and all(_RUNNERS.search(str(each)) for each in value)
    return name in _COMPOSED


def megabytes(text: str | None) -> int | None:
    """`4G` in megabytes."""
    found = re.match(r"\s*([0-9.]+)\s*([KMGT])", text or "", re.IGNORECASE)
    if found is None:
        return None
    return int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}[found[2].upper()])


def yaml_of(path: Path, text: str) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        yaml = import_module("yaml")  # it has no types of its own
    except ImportError as error:
        raise TaskError(f"{path}: reading YAML needs PyYAML: pip install 'rollcage[harbor]'") from error
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise TaskError(f"{path}: is no valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise TaskError(f"{path}: must hold one mapping")
    return data


def complaints(place: Path, error: ValidationError, text: str = "", *, under: str = "") -> str:
    """What a validation found, a line each, with the line of the file. `under`: the table that it stands in there."""
    lines = []
    for each in error.errors(include_url=False):
        said = str(each.get("ctx", {}).get("error", each["msg"]))
        line = line_of(text, [*filter(None, [under]), *(str(part) for part in each["loc"])])
        lines.append(f"{place}{f':{line}' if line else ''}: {'.'.join(map(str, each['loc']))}: {said}")
    return "\n".join(lines)


def line_of(text: str, path: Sequence[str]) -> int:
    """The line of a TOML file that says what a path of keys names, or the nearest table above it; 0 where none does."""
    wanted = [part for part in path if not part.isdigit()]
    table: list[str] = []
    best, found = 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            table = [part.strip(" \"'") for part in head[1].split(".")]
            key: list[str] = []
        elif pair := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            key = [part.strip("\"'") for part in pair[1].split(".")]
        else:
            continue
        said = [*table, *key]
        if len(said) > best and said == wanted[: len(said)]:
            best, found = len(said), number
    return found
