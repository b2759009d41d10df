"""Where many tasks come from: one `TaskSource` for a file, a folder, a JSON lines file (and, in `datasets`, for
what others publish). Nothing runs here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from rollcage.errors import TaskError, UsageError
from rollcage.tasks.files import SIZE_LIMIT, TaskFile, bundled, load, task_of, unique
from rollcage.tasks.harbor import is_folder_task
from rollcage.tasks.harbor_images import NAME as HARBOR
from rollcage.tasks.swe import is_record, task_of_record
from rollcage.types import SandboxSpec, Value

SUFFIXES = (".toml", ".json")
"""What task files end in."""
_NOTHING = "no such file or folder"


class SourcedTask(Value):
    """One task of a source: read, or with the reason why it cannot be."""

    id: str
    """Its name, which is unique in its source."""
    digest: str = ""
    """SHA-256 of all that the task says and brings along: the same task has the same, wherever it lies."""
    where: str
    """The file, and the line in it where it has many."""
    file: TaskFile | None = None
    """The task with what it asks for beside it; None where it cannot be read."""
    problem: str = ""
    """Why it cannot be read, or cannot be run anywhere; empty where nothing is wrong with it."""

    @property
    def verifier(self) -> str:
        """What judges it: `checks`, `script`, `commands`, `remote`, or `none`."""
        if self.file is None:
            return "none"
        task = self.file.task
        judged = (task, *(step.task for step in task.steps))
        kinds = {
            "checks": any(each.checks for each in judged),
            "script": any(each.test_script for each in judged),
            "commands": any(each.verify for each in judged),
            "remote": bool(task.verifier or self.file.environment),
        }
        return "+".join(kind for kind, there in kinds.items() if there) or "none"

    @property
    def size(self) -> int:
        """Bytes of the files that it brings along."""
        if self.file is None:
            return 0
        task = self.file.task
        texts = (*task.files.values(), *task.tests.values(), task.test_script)
        return sum(len(text.encode()) for text in texts) + sum(tree.size for tree in task.all_trees)

    @property
    def images(self) -> tuple[str, ...]:
        """The images that its boxes are made of, the agent's first."""
        if self.file is None:
            return ()
        boxes = (self.file.sandbox.template, *(box.template for box in self.file.task.verifier_boxes))
        return tuple(dict.fromkeys(filter(None, boxes)))

    def why_not(self, has_image: Callable[[str], bool]) -> str:
        """Why it cannot run on a machine that has these images; empty where it can."""
        if self.file is None or self.problem:
            return self.problem or "it cannot be read"
        for template in self.images if self.file.sandbox.backend == SandboxSpec().backend else ():
            if not has_image(template):
                how = f"rollcage image import {template} SAVED.tar"
                if template.startswith(f"{HARBOR}-"):
                    how = f"run with --build, or first: rollcage image build {self.where}"
                return f"there is no image {template!r} here; {how}"
        return ""


class TaskSource(Protocol):
    """Gives tasks, in an order that stays the same. Reading one task of many that is broken breaks none of the others:
    it comes as a `SourcedTask` with a problem."""

    @property
    def name(self) -> str:
        """As its user named it."""

    def __iter__(self) -> Iterator[SourcedTask]:
        """The tasks, each read when its turn comes."""


class FileSource:
    """One task file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def __iter__(self) -> Iterator[SourcedTask]:
        yield sourced(self._path.stem, str(self._path), lambda: load(self._path))


class FolderSource:
    """A folder of tasks: every task file in it, and every folder in it that is a task in Harbor's format."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = str(folder)

    def __iter__(self) -> Iterator[SourcedTask]:
        found = [path for path in self._folder.iterdir() if _is_task(path)]
        return unique_ids(task for path in sorted(found) for task in FileSource(path))


class LinesSource:
    """A JSON lines file: each line is what a task file in JSON says, with an `id` of its own, or a SWE record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def __iter__(self) -> Iterator[SourcedTask]:
        return unique_ids(self._tasks())

    def _tasks(self) -> Iterator[SourcedTask]:
        for number, line in lines_of(self._path):
            where, name = f"{self._path}:{number}", f"{self._path.stem}-{number}"

            def read(line: str = line, where: str = where, name: str = name) -> TaskFile:
                data = object_of(line, where)
                return (task_of_record if is_record(data) else task_of)(data, self._path, where, name=name)

            yield sourced(name, where, read)


def open_source(name: str | Path) -> TaskSource:
    """The source of that name; UsageError where there is none. It is looked at, and no task of it read yet."""
    path = Path(name)
    try:
        if found := _source(path):
            return found
        what = "no task file (.toml or .json) and no task folder in this folder" if path.is_dir() else _NOTHING
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise UsageError(
        f"{name}: {what}",
        remedy=bundled(path)
        or "name a task file or folder, a folder of them, a .jsonl, .parquet or .arrow file of tasks, "
        "a TOML file that maps columns, or a registry.json",
    )


def _source(path: Path) -> TaskSource | None:
    from rollcage.tasks.datasets import RegistrySource, RowsSource, is_registry, is_rows, mapping_of, saved_dataset

    if path.is_dir():
        if is_folder_task(path):
            return FileSource(path)
        if saved_dataset(path):
            return RowsSource(path)
        return FolderSource(path) if any(_is_task(each) for each in path.iterdir()) else None
    file, _, wanted = str(path).partition("#")
    if file.endswith(".json") and Path(file).is_file() and is_registry(Path(file)):
        return RegistrySource(Path(file), wanted)
    if path.suffix == ".jsonl" and path.is_file():
        return LinesSource(path)
    if is_rows(path):
        return RowsSource(path)
    if mapping := mapping_of(path):
        return RowsSource(path, mapping)
    return FileSource(path) if path.is_file() or path.suffix in SUFFIXES else None


def _is_task(path: Path) -> bool:
    from rollcage.tasks.datasets import is_registry

    if path.suffix in SUFFIXES and path.is_file():
        return path.suffix != ".json" or not is_registry(path)
    return is_folder_task(path)


def sourced(name: str, where: str, read: Callable[[], TaskFile]) -> SourcedTask:
    """What reading gives, or why it gives nothing. `name`: what it is called as long as it cannot be read."""
    try:
        file = read()
    except TaskError as error:
        return SourcedTask(id=name, where=where, problem=str(error))
    return SourcedTask(id=file.task.id, where=where, file=file, digest=digest_of(file))


def unique_ids(tasks: Iterable[SourcedTask]) -> Iterator[SourcedTask]:
    """The same; of several with one id, all but the first are told apart by a number."""
    seen: set[str] = set()
    for task in tasks:
        name, number = task.id, 2
        while name in seen:
            name, number = f"{task.id}#{number}", number + 1
        seen.add(name)
        yield task if name == task.id else task.model_copy(update={"id": name})


def digest_of(file: TaskFile) -> str:
    """SHA-256 of everything that a task file says, but for where it lies."""
    said = file.model_dump(mode="json", exclude={"path", "notices", "group_id", "policy_version", "metadata"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that say something, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(SIZE_LIMIT + 1), b""), 1):
                if len(line) > SIZE_LIMIT:
                    raise TaskError(f"{path}:{number}: the line is larger than {SIZE_LIMIT >> 20} MB")
                if text := line.decode("utf-8", "surrogateescape").strip():
                    yield number, text
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error


def object_of(line: str, where: str) -> dict[str, object]:
    """The JSON object in a line; TaskError where it holds something else."""
    try:
        data = json.loads(line.encode("utf-8", "strict"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: is no valid JSON: {str(error) or 'nested too deeply'}") from error
    if not isinstance(data, dict):
        raise TaskError(f"{where}: must hold one object, with the task's fields as its keys")
    return data
