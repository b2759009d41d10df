"""Copies of a log while others write to it: a backup of all of it, or whole rollouts from one log into another.

A copy is a state folder: the log, and the archives of agents' work beside it. No threads here.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollcage.errors import StoreError, UnknownRollout, UsageError
from rollcage.events import Entry, WorkStored
from rollcage.store.entries import entries, opened_blob
from rollcage.store.packing import references
from rollcage.store.sqlite import MIGRATIONS, closing, connect, connect_reader, explaining, migrate, transaction
from rollcage.store.summaries import summarise
from rollcage.types import Value

LOG, WORK = "rollouts.db", "work"


class Copied(Value):
    """What was copied."""

    rollouts: tuple[str, ...] = ()
    """Those that are in the target now and were not before."""
    present: tuple[str, ...] = ()
    """Those that were there already, the same."""
    open: tuple[str, ...] = ()
    """Those that have not ended, and were left."""
    work_files: int = 0
    """Archives of agents' work."""


def backup(log: Path, work: Path, folder: Path) -> Copied:
    """All of a log as it is at this moment, into a new state folder. Nobody waits for it."""
    target = folder / LOG
    if target.exists():
        raise UsageError(f"{target} is there already", argument="FOLDER", remedy="name a new folder")
    with explaining(target, "write"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_name(f"{LOG}-new")
        part.unlink(missing_ok=True)
        with explaining(log, "read"), closing(connect_reader(log)) as connection:
            _snapshot(connection, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        with closing(connect_reader(part)) as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM rollouts ORDER BY rowid")]
            names = _archives_of(connection, ids)
        files = _copy_work(work, folder / WORK, names)
        part.replace(target)
    return Copied(rollouts=tuple(ids), work_files=files)


def copy_rollouts(source: Path, target: Path, rollout_ids: Sequence[str] | None = None) -> Copied:
    """Whole rollouts that have ended, from the log of one state folder into that of another, which is there.

    `rollout_ids`: None means all. What is there already is left as it is; an id with another log is an error.
    """
    with tempfile.TemporaryDirectory() as scratch:
        here = newest_schema(source / LOG, Path(scratch))
        with closing(connect_reader(here)) as reading, closing(connect(target / LOG)) as writing:
            with explaining(here, "read"):
                ended = dict(reading.execute("SELECT id, ended_at IS NOT NULL FROM rollouts ORDER BY rowid"))
                if missing := [each for each in rollout_ids or () if each not in ended]:
                    raise UnknownRollout(f"no rollout {missing[0]} in {source / LOG}")
            wanted = [each for each in ended if rollout_ids is None or each in rollout_ids]
            copied: dict[str, list[str]] = {"new": [], "present": [], "open": []}
            with explaining(target / LOG, "write"):
                _copy_batches(reading, writing, wanted)
                for each in wanted:
                    copied[_copy(reading, writing, each) if ended[each] else "open"].append(each)
                files = _copy_work(source / WORK, target / WORK, _archives_of(reading, copied["new"]))
    return Copied(
        rollouts=tuple(copied["new"]), present=tuple(copied["present"]), open=tuple(copied["open"]), work_files=files
    )


def _snapshot(connection: sqlite3.Connection, target: Path) -> None:
    """All of a log in one step, as it is when that begins."""
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(target)) as copy:
        connection.backup(copy)


def newest_schema(log: Path, scratch: Path) -> Path:
    """The log itself, or a copy of it that was brought to today's schema."""
    with explaining(log, "read"):
        if not log.exists():
            raise UsageError(f"there is no {log}", argument="FOLDER", remedy="name a state folder, such as a backup")
        with closing(connect_reader(log)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == len(MIGRATIONS):
                return log
            copy = scratch / LOG
            _snapshot(connection, copy)
        with closing(connect(copy)) as connection:
            migrate(connection, log, MIGRATIONS)
        return copy


def _copy(reading: sqlite3.Connection, writing: sqlite3.Connection, rollout_id: str) -> str:
    sql = "SELECT seq, time, kind, body, version FROM entries WHERE rollout_id = ? ORDER BY seq"
    rows = reading.execute(sql, (rollout_id,)).fetchall()
    with transaction(writing):
        if there := writing.execute(sql, (rollout_id,)).fetchall():
            if there != rows:
                raise StoreError(f"rollout {rollout_id} is in the target already, with another log: prune it there")
            return "present"
        for digest, codec, data in _content(reading, [row[3] for row in rows]):
            writing.execute("INSERT OR IGNORE INTO blobs (digest, codec, data) VALUES (?, ?, ?)", (digest, codec, data))
        insert = "INSERT INTO entries (rollout_id, seq, time, kind, body, version) VALUES (?, ?, ?, ?, ?, ?)"
        writing.executemany(insert, [(rollout_id, *row) for row in rows])
        for entry in entries(writing, "rollout_id = ? ORDER BY seq", (rollout_id,)):
            summarise(writing, _without_key(writing, entry))
    return "new"


def _copy_batches(reading: sqlite3.Connection, writing: sqlite3.Connection, rollout_ids: Sequence[str]) -> None:
    """What happened to the batches of these rollouts as wholes; StoreError where another batch has such a name."""
    of = dict(reading.execute("SELECT id, batch FROM rollouts WHERE batch != ''"))
    sql = "SELECT batch, caller, time, kind, body FROM batch_entries WHERE batch = ? ORDER BY id"
    with transaction(writing):
        for name in dict.fromkeys(of[each] for each in rollout_ids if each in of):
            rows, there = (one.execute(sql, (name,)).fetchall() for one in (reading, writing))
            both = min(len(rows), len(there))
            if rows[:both] != there[:both]:
                raise StoreError(
                    f"there is another batch {name} in the target already: prune it there (--group {name})"
                )
            insert = "INSERT INTO batch_entries (batch, caller, time, kind, body) VALUES (?, ?, ?, ?, ?)"
            writing.executemany(insert, rows[both:])


def _without_key(writing: sqlite3.Connection, entry: Entry) -> Entry:
    """The entry; its idempotency key left out of the table where another rollout of this log has it."""
    key = getattr(entry.event, "idempotency_key", "")
    sql = "SELECT 1 FROM rollouts WHERE caller = ? AND idempotency_key = ?"
    if not key or not writing.execute(sql, (entry.event.caller, key)).fetchone():  # type: ignore[union-attr]
        return entry
    return entry.model_copy(update={"event": entry.event.model_copy(update={"idempotency_key": ""})})


def _content(reading: sqlite3.Connection, bodies: Sequence[str]) -> list[tuple[bytes, int, bytes]]:
    """All blobs that these bodies need, over any number of steps."""
    found: dict[bytes, tuple[bytes, int, bytes]] = {}
    wanted = set().union(*(references(body.encode()) for body in bodies)) if bodies else set()
    while wanted:
        following: set[bytes] = set()
        for digest in wanted:
            row = reading.execute("SELECT digest, codec, data FROM blobs WHERE digest = ?", (digest,)).fetchone()
            if row is not None:
                found[digest] = row
                following |= references(opened_blob(*row).raw)
        wanted = following - found.keys()
    return list(found.values())


def _archives_of(connection: sqlite3.Connection, rollout_ids: Sequence[str]) -> list[str]:
    chosen = set(rollout_ids)
    return [
        entry.event.digest
        for entry in entries(connection, "kind = 'work_stored'", ())
        if entry.rollout_id in chosen and isinstance(entry.event, WorkStored) and entry.event.digest
    ]


def _copy_work(source: Path, target: Path, names: Sequence[str]) -> int:
    """Archives by their names: linked where that goes, since they never change; what is gone is left out."""
    copied = 0
    for name in dict.fromkeys(names):
        here, there = (folder / name[:2] / f"{name}.tar.zst" for folder in (source, target))
        if not here.exists() or there.exists():
            continue
        there.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            try:
                os.link(here, there)
            except OSError:
                part = there.with_name(f"{there.name}.part")
                shutil.copyfile(here, part)
                part.replace(there)
            copied += 1
    return copied
