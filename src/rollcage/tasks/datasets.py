"""Sources of tasks that others publish: Harbor registries, and rows of Hugging Face datasets with a mapping of columns.
Both lie on disk: nothing is fetched here."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollcage.errors import TaskError, UsageError
from rollcage.tasks.files import TaskFile, load, task_of, text_of
from rollcage.tasks.sources import SourcedTask, lines_of, object_of, sourced, unique_ids
from rollcage.tasks.swe import is_record, task_of_record

ROWS = (".parquet", ".arrow")
"""Files of rows that need pyarrow."""
_LARGEST = 64 << 20
_INTO = ("files", "tests")
"""Tables of a task that a column may give one file of."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class _Dataset(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    version: str = ""
    tasks: list[_Entry]


class RegistrySource:
    """A Harbor registry file: its tasks in folders beside it, or in git checkouts there, `REPO` or `REPO@COMMIT`."""

    def __init__(self, path: Path, wanted: str = "") -> None:
        """`wanted`: one dataset of it, as `NAME` or `NAME@VERSION`; empty: all."""
        self._path, self._wanted = path, wanted
        self.name = f"{path}#{wanted}" if wanted else str(path)
        self._datasets = _datasets(path)
        known = [f"{each.name}@{each.version}" if each.version else each.name for each in self._datasets]
        if wanted and not any(wanted in (each.name, label) for each, label in zip(self._datasets, known, strict=True)):
            raise UsageError(f"{path}: has no dataset {wanted!r}", remedy=f"known: {', '.join(known)}")

    def __iter__(self) -> Iterator[SourcedTask]:
        return unique_ids(self._tasks())

    def _tasks(self) -> Iterator[SourcedTask]:
        for dataset in self._datasets:
            if self._wanted in ("", dataset.name, f"{dataset.name}@{dataset.version}"):
                for entry in dataset.tasks:
                    where = f"{self._path}#{dataset.name}:{entry.name}"
                    yield sourced(entry.name, where, partial(self._read, entry))

    def _read(self, entry: _Entry) -> TaskFile:
        top = self._path.parent
        if entry.git_url:
            top = self._checkout(entry.git_url, entry.git_commit_id or "")
        folder = top / entry.path
        if not folder.resolve().is_relative_to(top.resolve()):
            raise TaskError(f"{self._path}: {entry.name}: its path {entry.path!r} leads out of {top}")
        if not folder.is_dir():
            raise TaskError(f"{self._path}: {entry.name}: there is no folder {folder}")
        return load(folder)

    def _checkout(self, url: str, commit: str) -> Path:
        repo = re.split(r"[/:]", url.rstrip("/").removesuffix(".git"))[-1]
        places = [self._path.parent / f"{repo}@{commit}", self._path.parent / repo, Path(url)]
        found = next((each for each in places if each.is_dir() and repo not in ("", ".", "..")), None)
        if found is None:
            raise TaskError(f"{self._path}: {url} is not checked out beside it: git clone {url} {places[1]}")
        at = head_of(found)
        if at and re.fullmatch(r"[0-9a-f]{7,40}", commit) and not at.startswith(commit):
            raise TaskError(f"{found}: is at {at[:12]}, and {self._path} wants {commit[:12]}: git checkout {commit}")
        return found


def is_registry(path: Path) -> bool:
    """Whether a JSON file is a registry: a list, where a task is an object."""
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip()[:1] == b"["
    except OSError:
        return False


def head_of(checkout: Path) -> str:
    """The commit that a git checkout is at; empty where it cannot be told. No git is run: what is there is not ours."""
    git = checkout / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if ".." not in name and (git / name).is_file():
            return (git / name).read_text().strip()
        lines = (git / "packed-refs").read_text().splitlines()
        return next((line.split(" ")[0] for line in lines if line.endswith(f" {name}")), "")
    except (OSError, UnicodeDecodeError):
        return ""


def _datasets(path: Path) -> list[_Dataset]:
    if path.stat().st_size > _LARGEST:
        raise UsageError(f"{path}: is larger than {_LARGEST >> 20} MB")
    try:
        return [_Dataset.model_validate(each) for each in json.loads(path.read_bytes())]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            f"{path}: is no registry: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            remedy="a registry is a list of datasets, each with a name and its tasks (name, path, git_url)",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no valid JSON: {error}") from error


class ColumnMapping(BaseModel):
    """A file that says how rows become tasks."""

    model_config = ConfigDict(extra="forbid")

    rows: str = Field(min_length=1)
    """The files of rows: a pattern, relative to this file (`data/train-*.parquet`)."""
    columns: dict[str, str] = {}
    """`{key of a task: column}`; `files.NAME` and `tests.NAME` put a column's text into a file."""
    task: dict[str, Any] = {}
    """What holds for every row, as in a task file."""


class RowsSource:
    """Rows of files, each a task: as they are, or by a mapping of columns."""

    def __init__(self, path: Path, mapping: ColumnMapping | None = None) -> None:
        """Without a mapping: `path` is a file of rows, or a folder of them."""
        self._path, self._mapping = path, mapping
        self.name = str(path)
        if mapping:
            self._files = sorted(path.parent.glob(mapping.rows))
        else:
            self._files = saved_dataset(path) if path.is_dir() else [path]
        if mapping and not self._files:
            raise UsageError(f"{path}: rows: no file matches {mapping.rows!r}")

    def __iter__(self) -> Iterator[SourcedTask]:
        return unique_ids(self._tasks())

    def _tasks(self) -> Iterator[SourcedTask]:
        for file in self._files:
            for number, row in rows_of(file):
                where, name = f"{file}:{number}", f"{file.stem}-{number}"
                yield sourced(name, where, partial(self._read, row, where, name))

    def _read(self, row: Mapping[str, Any] | TaskError, where: str, name: str) -> TaskFile:
        if isinstance(row, TaskError):
            raise row
        if self._mapping is None:
            data = {key: value for key, value in row.items() if value is not None}
            return (task_of_record if is_record(data) else task_of)(data, self._path, where, name=name)
        data = dict(self._mapping.task)
        for key, column in self._mapping.columns.items():
            if column not in row:
                known = ", ".join(row)
                raise TaskError(f"{where}: there is no column {column!r}, which {self._path} names; there are: {known}")
            if (value := row[column]) is None:
                continue
            table, _, inner = key.partition(".")
            if inner and table in _INTO:
                data[table] = {**data.get(table, {}), inner: value if isinstance(value, str) else json.dumps(value)}
            else:
                data[key] = value
        return task_of(data, self._path, where, name=name)


def mapping_of(path: Path) -> ColumnMapping | None:
    """The mapping in a TOML file; None where it is a task. UsageError where it is a mapping and wrong."""
    if path.suffix != ".toml" or not path.is_file():
        return None
    try:
        data = tomllib.loads(text_of(path, str(path)))
    except (TaskError, tomllib.TOMLDecodeError):
        return None  # whoever reads it as a task says what is wrong
    if "rows" not in data:
        return None
    try:
        return ColumnMapping.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def rows_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | TaskError]]:
    """The rows of a file, with their numbers; one that is broken comes as what is wrong with it."""
    if path.suffix not in ROWS:
        for number, line in lines_of(path):
            try:
                yield number, object_of(line, f"{path}:{number}")
            except TaskError as error:
                yield number, error
        return
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        ipc = import_module("pyarrow.ipc")
    except ImportError as error:
        raise UsageError(f"{path}: reading it needs pyarrow: pip install 'rollcage[export]'") from error
    number = 0
    try:
        with path.open("rb") as file:
            is_parquet = path.suffix == ".parquet"
            for batch in parquet.ParquetFile(file).iter_batches(256) if is_parquet else ipc.open_stream(file):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, arrow.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read after row {number}: {' '.join(str(error).split())[:200]}") from error


def is_rows(path: Path) -> bool:
    """Whether this is a file of rows that is no text."""
    return path.suffix in ROWS and path.is_file()


def saved_dataset(folder: Path) -> list[Path]:
    """The files of a dataset that was saved to disk (`save_to_disk`), or cloned (`data/*.parquet`); none: it is no such
    folder."""
    if (folder / "dataset_info.json").is_file():
        return sorted(folder.glob("*.arrow"))
    return sorted(folder.glob("data/*.parquet")) or sorted(folder.glob("*.parquet"))
