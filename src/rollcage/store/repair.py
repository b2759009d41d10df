"""Saves what is readable of a damaged log: every rollout up to its first entry that cannot be read.

The damaged file is kept beside the new one. No threads here.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollcage.errors import LogDamaged, StoreError
from rollcage.events import Ended, Event, Queued
from rollcage.store.entries import Inserter, entries, opened_blob
from rollcage.store.packing import Damaged, references
from rollcage.store.sqlite import MIGRATIONS, closing, connect, connect_reader, explaining, migrate, transaction
from rollcage.store.summaries import summarise
from rollcage.types import Outcome, Value

STEP = 64
"""Rows that are read together; where that fails, one by one."""
LOST = "the log was damaged, and the rest of this rollout could not be read"

Row = tuple[Any, ...]


class Repaired(Value):
    """What could be saved."""

    rollouts: int
    """Those that are whole."""
    cut: tuple[str, ...] = ()
    """Those that were cut where their log could not be read; they say so in their error."""
    lost: tuple[str, ...] = ()
    """Those whose first entry could not be read: they are gone."""
    entries: int = 0
    """Saved."""
    damaged: str = ""
    """Where the damaged file is now."""


def check_whole(log: Path, *, seconds: float = 5) -> None:
    """Look through a log for as long as that; LogDamaged where something is found."""
    until = time.monotonic() + seconds
    with explaining(log, "read"), closing(connect_reader(log)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > until, 10_000)
        try:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            return
    if found != "ok":
        said = " ".join(found.split())[:300]
        raise LogDamaged(f"{log}: it is damaged ({said})", remedy="save what is readable: rollcage doctor --repair")


def repair(log: Path) -> Repaired:
    """Put a log of all that is readable in the place of a damaged one. Nobody may have it open."""
    new = log.with_name(f"{log.name}-repaired")
    new.unlink(missing_ok=True)
    with explaining(new, "write"), closing(connect(new)) as writing:
        new.chmod(0o600)
        migrate(writing, new, MIGRATIONS)
        try:
            with closing(connect(log, read_only=True)) as reading:
                saved = _saved(reading, writing)
        except sqlite3.DatabaseError as error:
            raise LogDamaged(f"nothing of {log} can be read ({error}): restore it from a backup") from error
    aside = log.with_name(f"{log.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    with explaining(log, "replace"):
        for ending in ("-wal", "-shm"):
            if (beside := log.with_name(log.name + ending)).exists():
                beside.rename(aside.with_name(aside.name + ending))
        log.rename(aside)
        new.rename(log)
    return saved.model_copy(update={"damaged": str(aside)})


def _saved(reading: sqlite3.Connection, writing: sqlite3.Connection) -> Repaired:
    blobs = {row[0]: row[1:] for row in _rows(reading, "blobs", "digest, codec, data")}
    ended: dict[str, int] = dict(_rows(reading, "rollouts", "id, ended_at IS NOT NULL"))
    found: dict[str, list[Row]] = {}
    for row in _rows(reading, "entries", "rollout_id, seq, time, kind, body, version"):
        found.setdefault(row[0], []).append(row)
    whole, cut, lost, count = 0, [], sorted(ended.keys() - found.keys()), 0
    for rollout_id, rows in found.items():
        rows.sort(key=lambda row: row[1])
        good = _readable(writing, rows, blobs)
        if not good:
            lost.append(rollout_id)
            continue
        count += len(good)
        # A rollout without an end may simply be open; not one that was known to have ended.
        if len(good) < len(rows) or (ended.get(rollout_id) and good[-1][3] != "ended"):
            cut.append(rollout_id)
            _end(writing, rollout_id)
        else:
            whole += 1
    return Repaired(rollouts=whole, cut=tuple(cut), lost=tuple(lost), entries=count)


def _readable(writing: sqlite3.Connection, rows: list[Row], blobs: dict[bytes, Row]) -> list[Row]:
    """Write the entries up to the first that is missing, or that needs content which is."""
    good: list[Row] = []
    for row in rows:
        if row[1] != len(good) + 1:
            break
        try:
            with transaction(writing):
                for digest, (codec, data) in _content(row[4], blobs).items():
                    insert = "INSERT OR IGNORE INTO blobs (digest, codec, data) VALUES (?, ?, ?)"
                    writing.execute(insert, (digest, codec, data))
                insert = "INSERT INTO entries (rollout_id, seq, time, kind, body, version) VALUES (?, ?, ?, ?, ?, ?)"
                writing.execute(insert, row)
                (entry,) = entries(writing, "rollout_id = ? AND seq = ?", row[:2])
                if not good and not isinstance(entry.event, Queued):
                    raise Damaged("the first entry is no beginning")
                summarise(writing, entry)
        except (Damaged, StoreError, ValueError, sqlite3.IntegrityError):
            break
        good.append(row)
    return good


def _content(body: str, blobs: dict[bytes, Row]) -> dict[bytes, Row]:
    """The blobs that a body needs; Damaged where one is not there, or not what it was."""
    found: dict[bytes, Row] = {}
    wanted = references(body.encode())
    while wanted:
        digest = wanted.pop()
        if digest not in blobs:
            raise Damaged(f"blob {digest.hex()} is missing")
        blob = opened_blob(digest, *blobs[digest])
        found[digest] = blobs[digest]
        wanted |= references(blob.raw) - found.keys()
    return found


def _end(writing: sqlite3.Connection, rollout_id: str) -> None:
    over: Event = Ended(outcome=Outcome.CRASHED, error=f"crashed: {LOST}", error_code="log_damaged")
    inserter = Inserter(writing)
    with transaction(writing):
        inserter.insert(inserter.prepared(rollout_id, over, time.time()))


def _rows(reading: sqlite3.Connection, table: str, columns: str) -> Iterator[Row]:
    """Every row of a table that can be read, by its number: an index may be what is damaged."""
    last = _last(reading, table)
    at = 1
    while at <= last:
        sql = f"SELECT {columns} FROM {table} WHERE rowid BETWEEN ? AND ?"  # noqa: S608
        try:
            yield from reading.execute(sql, (at, at + STEP - 1)).fetchall()
        except sqlite3.DatabaseError:
            for number in range(at, at + STEP):
                try:
                    yield from reading.execute(sql, (number, number)).fetchall()
                except sqlite3.DatabaseError:
                    continue
        at += STEP


def _last(reading: sqlite3.Connection, table: str) -> int:
    """The number of the last row; where the end cannot be read, more than there can be of rows in the file."""
    try:
        return reading.execute(f"SELECT coalesce(max(rowid), 0) FROM {table}").fetchone()[0] or 0  # noqa: S608
    except sqlite3.DatabaseError:
        pages, size = (reading.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return int(pages * size // 32)
