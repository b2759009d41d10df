"""Reads a task from a TOML or JSON file, and says about a bad one what is wrong, where, and what was probably meant."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import ValidationError

from rollcage.endpoints import EndpointRequest
from rollcage.errors import TaskError, UsageError
from rollcage.tasks.expected import expected_of
from rollcage.tasks.problems import BESIDE, FOLDERS, REFERENCES, SECRETS, nearest, problems_of
from rollcage.tasks.trees import tree_of
from rollcage.types import AgentSpec, Identifier, JsonObject, Metadata, SandboxSpec, Task, Value

EXAMPLES = Path(__file__).parents[1] / "examples"
"""The tasks that come with rollcage."""
SIZE_LIMIT = 16 << 20
"""No task file, and no file one brings along, is larger than this."""


class TaskFile(Value):
    """What a task file says: the task, and whatever it asks for beside it."""

    path: Path
    """Where it was read from."""
    task: Task
    """What to do and how to judge it."""
    agent: AgentSpec = AgentSpec()
    """Its `[agent]` table."""
    sandbox: SandboxSpec = SandboxSpec()
    """Its `[sandbox]` table."""
    endpoint: EndpointRequest = EndpointRequest()
    """Its `[endpoint]` table."""
    environment: str = ""
    """The remote environment it is about."""
    mode: Literal["transparent_proxy", "black_box"] = "transparent_proxy"
    """Whether the agent's calls are recorded."""
    group_id: Identifier = ""
    """Given beside the file, as the next two: the rollouts it belongs with."""
    policy_version: Identifier = ""
    """The weights that are sampled."""
    metadata: Metadata = {}
    """The caller's own JSON."""
    notices: tuple[str, ...] = ()
    """What of the task is not as its author may expect."""


_NO_TEXT = "name its folder, for what is no text"
ALIASES = {"model": "endpoint", "check": "checks"}
"""Other spellings of a top-level key."""


def load_task(path: Path | str) -> Task:
    """The task in this file, where nothing else it says matters."""
    return load(path).task


def load(path: Path | str) -> TaskFile:
    """Read a task file; TaskError with one line per problem where it cannot be used."""
    path = Path(path)
    if path.is_dir():
        # Not at the top: it reads its files by what is here.
        from rollcage.tasks.harbor import load_folder

        return load_folder(path)
    return task_of(_parsed(path, text_of(path, str(path))), path, str(path), name=path.stem)


def task_of(data: JsonObject, path: Path, where: str, *, name: str = "") -> TaskFile:
    """The task in what a file at `path` says. `where` begins every complaint; `name`: its id where it gives none."""
    reader = _TableReader(path)
    fields = reader.fields(data)
    try:
        file = TaskFile.model_validate({"path": path, **fields})
        expected_of(file.task)
    except ValidationError as error:
        reader.problems += problems_of(error)
    except UsageError as error:
        reader.problems.append(str(error))
    if reader.problems:
        raise TaskError("\n".join(f"{where}: {problem}" for problem in dict.fromkeys(reader.problems)))
    if file.task.id:
        return file
    return file.model_copy(update={"task": file.task.model_copy(update={"id": name})})


def text_of(path: Path, name: str, *, remedy: str = "") -> str:
    """The text of a file; TaskError, which calls it `name`, where it has none. `remedy`: for one that is no text."""
    try:
        if path.is_dir():
            raise TaskError(f"{name}: is a folder", remedy="name a file")
        if path.exists() and not path.is_file():
            raise TaskError(f"{name}: is not a regular file")
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
        if len(data) > SIZE_LIMIT:
            raise TaskError(f"{name}: is larger than {SIZE_LIMIT >> 20} MB")
        return data.decode("utf-8")
    except FileNotFoundError as error:
        near = nearest(path.name, _siblings(path), 0.8)
        hint = f"; did you mean {path.with_name(near)}?" if near else ""
        raise TaskError(f"{name}: no such file{hint}", remedy=bundled(path)) from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{name}: is not UTF-8 text (byte {error.start})", remedy=remedy) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TaskError(f"{name}: cannot be read: {reason}") from error


def bundled(path: Path) -> str:
    """A remedy where a path of `examples/` is not there: pages name it so, and only a checkout has it."""
    place = EXAMPLES.joinpath(*path.parts[1:])
    return f"it comes with rollcage: {place}" if path.parts[:1] == ("examples",) and place.exists() else ""


def _siblings(path: Path) -> list[str]:
    try:
        return [other.name for other in path.parent.iterdir()]
    except OSError:
        return []


def _parsed(path: Path, text: str) -> JsonObject:
    try:
        if path.suffix == ".json":
            data = json.loads(text, object_pairs_hook=unique)
        elif path.suffix == ".toml":
            data = tomllib.loads(text)
        else:
            raise TaskError(f"{path}: a task file ends in .toml or .json", remedy="rollcage eval takes sets of tasks")
    except (ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper()
        raise TaskError(f"{path}: is no valid {kind}: {str(error) or 'nested too deeply'}") from error
    if not isinstance(data, dict):
        raise TaskError(f"{path}: must hold one object, with the task's fields as its keys")
    return data


def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object of JSON; ValueError where a key appears twice."""
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return data


class _TableReader:
    """Turns what the file says into the fields of a `TaskFile`, collecting problems on the way."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self.problems: list[str] = []

    def fields(self, data: JsonObject) -> JsonObject:
        self.problems += [f"{where}: {what}" for where, what in _odd_values(data)]
        data = self._renamed(data)
        beside = {name: data.pop(name) for name in BESIDE if name in data}
        if isinstance(beside.get("endpoint"), str):
            beside["endpoint"] = {"endpoint": beside["endpoint"]}
        endpoint = beside.get("endpoint")
        if isinstance(endpoint, dict):
            for name in sorted(SECRETS & endpoint.keys()):
                self.problems.append(
                    f"endpoint.{name}: a key does not belong in a task file; give --{name.replace('_', '-')} or set "
                    "the endpoint's variable (VLLM_API_KEY, OPENAI_API_KEY, HF_ROUTER_API_KEY, ROLLCAGE_API_KEY)"
                )
                del endpoint[name]
        for key, field in REFERENCES.items():
            if key in data:
                self._refer(data, key, field)
        for key in FOLDERS.keys() & data.keys():
            data[FOLDERS[key]] = self._tree(key, data.pop(key))
        for table in ("files", "tests"):
            if isinstance(data.get(table), dict):
                folders = {name: of for name, of in data[table].items() if table == "files" and self._is_folder(of)}
                if folders:
                    data["trees"] = {name: self._tree(f"files.{name}", of["from"]) for name, of in folders.items()}
                staged = {name: of for name, of in data[table].items() if name not in folders}
                data[table] = {name: self._staged(f"{table}.{name}", name, of) for name, of in staged.items()}
        if "instruction" not in data:
            self.problems.append("instruction: is missing; say what the agent should do (or give instruction_file)")
            data["instruction"] = "-"
        return {**beside, "task": data}

    def _renamed(self, data: JsonObject) -> JsonObject:
        renamed: JsonObject = {}
        for name, value in data.items():
            target = ALIASES.get(name, name)
            if target in renamed:
                self.problems.append(f"{name}: says the same as another key; keep one of them")
            renamed[target] = value
        return renamed

    def _refer(self, data: JsonObject, key: str, field: str) -> None:
        value = data.pop(key)
        if field in data:
            self.problems.append(f"{key}: there is {field} already; keep one of the two")
        elif not isinstance(value, str):
            self.problems.append(f"{key}: must be the name of a file")
            data[field] = "-"
        else:
            data[field] = self._from(key, value)

    def _staged(self, where: str, name: str, value: Any) -> Any:
        pure = PurePosixPath(name)
        if not name.strip() or name.endswith("/") or ".." in pure.parts or not name.isprintable():
            self.problems.append(f"{where}: {name!r} is no path of a file in the box")
        if not isinstance(value, dict):
            return value
        if set(value) != {"from"} or not isinstance(value["from"], str):
            self.problems.append(f'{where}: must be text or {{ from = "relative path" }}')
            return ""
        return self._from(where, value["from"])

    def _is_folder(self, value: Any) -> bool:
        named = isinstance(value, dict) and value.keys() == {"from"} and isinstance(value["from"], str)
        return named and (self._folder / value["from"]).is_dir()

    def _tree(self, where: str, name: object) -> Any:
        """A folder beside the task file, with whatever lies in it."""
        try:
            if not isinstance(name, str):
                raise TaskError("must be the name of a folder")
            target = (self._folder / name).resolve()
            if not target.is_relative_to(self._folder.resolve()):
                raise TaskError(
                    f"{name!r} leads out of the task's folder", remedy="use a path relative to the task file"
                )
            if target == self._folder.resolve():
                raise TaskError(f"{name!r} is a folder that holds the task itself", remedy="name one below it")
            if not target.is_dir():
                raise TaskError(f"{name!r} is no folder")
            return tree_of(target)
        except TaskError as error:
            self.problems.append(f"{where}: {error}")
            return {"digest": ""}

    def _from(self, where: str, name: str) -> str:
        """The text of a file that lies beside the task file or below it, and nowhere else."""
        try:
            folder = self._folder.resolve()
            target = (folder / name).resolve()
            if Path(name).is_absolute() or not target.is_relative_to(folder):
                raise TaskError(
                    f"{name!r} leads out of the task's folder", remedy="use a path relative to the task file"
                )
            remedy = "give {tests_folder}, a folder, for what is no text" if where.startswith("tests.") else _NO_TEXT
            return text_of(target, repr(name), remedy=remedy)
        except TaskError as error:
            self.problems.append(f"{where}: {error}")
        except (OSError, ValueError, RuntimeError) as error:
            self.problems.append(f"{where}: {name!r} cannot be read: {error}")
        return "-"


def _odd_values(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """What TOML can say and a log cannot keep: dates, and numbers that JSON has not."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _odd_values(item, (*path, str(name)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _odd_values(item, (*path, str(position)))
    elif isinstance(value, float) and not math.isfinite(value):
        yield ".".join(path), f"{value} is no usable number"
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield ".".join(path), "dates and times must be written as text, in quotes"
