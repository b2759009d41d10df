"""Writes rows to a file and reads them back: JSON lines, or parquet where `pyarrow` is installed.

An export is written beside its name and takes it when it is whole. What an interrupted one has written is kept, rollout
by rollout, and the next one under the same name goes on from there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from rollcage.errors import SetupError, UsageError
from rollcage.trajectory.export.columns import Format, as_columns, as_row, encoding, schema, table
from rollcage.trajectory.sequence import Sequence
from rollcage.types import JsonObject

PORTION = 1 << 20
"""Tokens, about, that are in memory before a portion of parquet is written."""


class Export(Protocol):
    """A file in the making."""

    done: set[str]
    """The rollouts that an interrupted export had written."""

    def add(self, rollout_id: str, rows: list[JsonObject]) -> None:
        """All rows of one rollout."""

    def finish(self) -> None:
        """Everything is in it."""


@contextmanager
def open_export(path: Path | None, format: Format) -> Iterator[Export]:
    """A file for rows of this format; None writes JSON lines to standard output. Whole when the block ends well."""
    if path is None:
        yield _JsonLines(sys.stdout.buffer)
        return
    if path.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"{path}: the name must end in .jsonl or .parquet", argument="output")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder", remedy="make it first", argument="output")
    partial = path.with_name(f"{path.name}.{format}.partial")
    if path.suffix == ".jsonl":
        with _resumed(partial) as (file, done):
            lines = _JsonLines(file)
            lines.done = done
            yield lines
            lines.finish()
        partial.replace(path)
    else:
        portions = _Portions(partial, format)
        yield portions
        portions.finish()
        portions.join(path)


def load(path: str | Path) -> list[Any]:
    """What `rollcage export` wrote: `Sequence`s of format `sequences`, dictionaries of the others."""
    path = Path(path)
    if path.suffix == ".parquet":
        parquet = _parquet()
        file = parquet.ParquetFile(path)
        with file:
            format = (file.schema_arrow.metadata or {}).get(b"rollcage_format", b"").decode()
            if not format:
                raise UsageError(f"{path}: no file that rollcage export wrote")
            rows = [as_row(format, row) for batch in file.iter_batches() for row in batch.to_pylist()]
    else:
        with path.open("rb") as lines:
            rows = [json.loads(line) for line in lines]
        format = "sequences" if rows and {"loss_mask", "prompt_length"} <= rows[0].keys() else ""
    return [Sequence.model_validate(row) for row in rows] if format == "sequences" else rows


class _JsonLines:
    """JSON lines. The rows of a rollout are written at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.done: set[str] = set()

    def add(self, rollout_id: str, rows: list[JsonObject]) -> None:
        self._file.write(b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows))
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()


@contextmanager
def _resumed(partial: Path) -> Iterator[tuple[IO[bytes], set[str]]]:
    """What is there of an interrupted export, but for its last rollout, which may be half of one."""
    ids: list[str] = []
    starts: list[int] = []
    with partial.open("a+b") as file:
        file.seek(0)
        at = 0
        for line in file:
            name = json.loads(line).get("rollout_id", "") if line.endswith(b"\n") else ""
            if not ids or ids[-1] != name:
                ids.append(name)
                starts.append(at)
            at += len(line)
        if ids:
            file.truncate(starts[-1])
        file.seek(0, 2)
        yield file, set(ids[:-1])


class _Portions:
    """Parquet: whole files of some rollouts each, which are joined at the end."""

    def __init__(self, folder: Path, format: Format) -> None:
        self._parquet, self._folder, self._format = _parquet(), folder, format
        folder.mkdir(exist_ok=True, parents=True)
        for half in folder.glob("*.tmp"):
            half.unlink()
        self._files = sorted(folder.glob("*.parquet"))
        self._rows: list[JsonObject] = []
        self._size = 0
        self.done = {
            name
            for file in self._files
            for name in self._parquet.read_table(file, columns=["rollout_id"])[0].to_pylist()
        }

    def add(self, rollout_id: str, rows: list[JsonObject]) -> None:
        self._rows += [as_columns(self._format, row) for row in rows]
        self._size += sum(len(value) for row in rows for value in row.values() if isinstance(value, tuple | list))
        if self._size >= PORTION:
            self.finish()

    def finish(self) -> None:
        """Write the portion that is in memory."""
        if not self._rows:
            return
        file = self._folder / f"{len(self._files):06}.parquet"
        half = file.with_suffix(".tmp")
        self._parquet.write_table(table(self._format, self._rows), half, **encoding(self._format))
        half.replace(file)
        self._files.append(file)
        self._rows, self._size = [], 0

    def join(self, path: Path) -> None:
        """One file of all portions, in their order."""
        whole = self._folder / "whole.tmp"
        if len(self._files) == 1:
            whole = self._files[0]
        else:
            self._joined(whole)
        whole.replace(path)
        shutil.rmtree(self._folder)

    def _joined(self, whole: Path) -> None:
        with self._parquet.ParquetWriter(whole, schema(self._format), **encoding(self._format)) as writer:
            for file in self._files:
                writer.write_table(self._parquet.read_table(file, schema=schema(self._format)))


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SetupError(
            "parquet needs pyarrow", remedy="pip install 'rollcage[export]', or export to .jsonl"
        ) from error
    return pyarrow.parquet
