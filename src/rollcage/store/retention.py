"""What the log takes on the disk, and how it is made smaller: prune rollouts, sweep what nobody refers to, vacuum.

A log may be pruned while servers write to it. Entries go a few rollouts at a time; then content that no entry refers
to any more. Every step counts up `prunes`, by which writers see that content they remember may be gone. No threads
here: callers run these functions in one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import zstandard

from rollcage.errors import UsageError
from rollcage.events import Queued, WorkStored
from rollcage.store.entries import entries
from rollcage.store.packing import Codec, references
from rollcage.store.sqlite import closing, connect, connect_reader, explaining, transaction
from rollcage.types import Value

CHUNK = 50
"""Rollouts that are removed in one transaction: writers wait that long."""
YOUNG_S = 3600.0
"""Archives younger than this stay: the rollout that made one may not have logged it yet."""


class Prune(Value):
    """Which rollouts go. Those that are open or pinned never do; a rollout goes where any of these says so."""

    older_than_s: float | None = None
    """Those that ended longer ago than this."""
    group: str = ""
    """Those of one group or batch."""
    max_bytes: int | None = None
    """The oldest, until the log takes no more than this."""


class Pruned(Value):
    """What pruning came to, or would come to."""

    rollouts: tuple[str, ...] = ()
    """Those that went, oldest first."""
    entries: int = 0
    """Of their logs."""
    blobs: int = 0
    """Pieces of content that nobody refers to any more."""
    work_files: int = 0
    """Archives of agents' work."""
    work_bytes: int = 0
    """What these took."""
    tree_files: int = 0
    """Archives of tasks' files."""
    tree_bytes: int = 0
    """What these took."""
    kept_pinned: int = 0
    """Rollouts that would have gone, had they not been pinned."""


class LogSize(Value):
    """What a log takes on the disk."""

    bytes: int
    """The file and its write-ahead log."""
    free_bytes: int
    """Of these, what `rollcage vacuum` gives back to the disk."""
    rollouts: int
    """How many there are."""
    work_bytes: int
    """The kept archives of agents' work beside it."""
    work_files: int
    """How many these are."""


def size_of(log: Path, work: Path) -> LogSize:
    """What the log and the archives beside it take."""
    with explaining(log, "read"), closing(connect_reader(log)) as connection:
        rollouts = connection.execute("SELECT count(*) FROM rollouts").fetchone()[0]
        free, page = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
    sizes = [path.stat().st_size for path in _archives(work)]
    return LogSize(
        bytes=file_bytes(log), free_bytes=free * page, rollouts=rollouts, work_bytes=sum(sizes), work_files=len(sizes)
    )


def file_bytes(log: Path) -> int:
    """The log's file and its write-ahead log."""
    total = 0
    for path in (log, log.with_name(f"{log.name}-wal")):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def pin(log: Path, rollout_ids: Sequence[str], *, keep: bool = True) -> None:
    """Keep these whatever is pruned; or keep them no longer."""
    rows = [(each, time.time()) for each in rollout_ids]
    with explaining(log, "write"), closing(connect(log)) as connection, transaction(connection):
        connection.executemany("DELETE FROM pins WHERE rollout_id = ?", [row[:1] for row in rows])
        if keep:
            connection.executemany("INSERT INTO pins (rollout_id, time) VALUES (?, ?)", rows)


def pinned(log: Path) -> list[str]:
    """Those that stay whatever is pruned."""
    with explaining(log, "read"), closing(connect_reader(log)) as connection:
        return [row[0] for row in connection.execute("SELECT rollout_id FROM pins ORDER BY time")]


def prune(log: Path, work: Path, what: Prune, *, trees: Path | None = None, dry_run: bool = False) -> Pruned:
    """Remove rollouts, whole, with their archives; see `Prune`. What was interrupted is completed by the next one.

    `trees`: where archives of tasks' files are; those that no rollout needs go.
    """
    if what == Prune():
        raise UsageError("nothing says which rollouts go", remedy="give --older-than, --group or --max-size")
    with explaining(log, "prune"), closing(connect(log)) as connection:
        chosen, kept = _chosen(connection, what)
        if dry_run:
            return Pruned(rollouts=tuple(chosen), kept_pinned=kept)
        removed = 0
        for at in range(0, len(chosen), CHUNK):
            removed += _remove(connection, chosen[at : at + CHUNK])
        blobs = _sweep(connection)
        files, taken = _sweep_archives(work, lambda: _works(connection))
        brought, bytes_brought = _sweep_archives(trees, lambda: _trees(connection)) if trees else (0, 0)
    return Pruned(
        rollouts=tuple(chosen),
        entries=removed,
        blobs=blobs,
        work_files=files,
        work_bytes=taken,
        tree_files=brought,
        tree_bytes=bytes_brought,
        kept_pinned=kept,
    )


def vacuum(log: Path) -> tuple[int, int]:
    """Give unused space back to the disk; the size before and after. Writers wait meanwhile."""
    with explaining(log, "vacuum"), closing(connect(log)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = file_bytes(log)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return before, file_bytes(log)


def _chosen(connection: sqlite3.Connection, what: Prune) -> tuple[list[str], int]:
    """Those that go, oldest first, and how many only their pin keeps."""
    sql = "SELECT id, ended_at, id IN (SELECT rollout_id FROM pins) FROM rollouts WHERE ended_at IS NOT NULL"
    ended = connection.execute(f"{sql} ORDER BY ended_at, rowid").fetchall()
    gone = set()
    if what.older_than_s is not None:
        before = time.time() - what.older_than_s
        gone |= {row[0] for row in ended if row[1] < before}
    if what.group:
        gone |= _of_group(connection, [row[0] for row in ended], what.group)
    if what.max_bytes is not None:
        gone |= _oldest_beyond(connection, [row[0] for row in ended if not row[2] and row[0] not in gone], gone, what)
    chosen = [row[0] for row in ended if row[0] in gone and not row[2]]
    return chosen, sum(1 for row in ended if row[0] in gone and row[2])


def _of_group(connection: sqlite3.Connection, ids: Sequence[str], group: str) -> set[str]:
    """Those whose job belongs to this group, or to a batch of this name."""
    found = set()
    for at in range(0, len(ids), 500):
        some = ids[at : at + 500]
        where = f"rollout_id IN ({','.join('?' * len(some))}) AND kind = 'queued'"
        for entry in entries(connection, where, some):
            job = entry.event.job  # type: ignore[union-attr]
            if group == job.group_id:
                found.add(entry.rollout_id)
    return found | {row[0] for row in connection.execute("SELECT id FROM rollouts WHERE batch = ?", (group,))}


def _oldest_beyond(connection: sqlite3.Connection, oldest: Sequence[str], gone: set[str], what: Prune) -> set[str]:
    """The oldest whose removal brings the log to the size that is wanted.

    Content goes with the newest rollout that refers to it, so it counts for that one.
    """
    page = connection.execute("PRAGMA page_size").fetchone()[0]
    count, free = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
    too_much = (count - free) * page - (what.max_bytes or 0)
    if too_much <= 0:
        return set()
    order = "SELECT id FROM rollouts ORDER BY coalesce(ended_at, 1e300) DESC, rowid DESC"
    marked: set[bytes] = set()
    sizes = {each: _mark(connection, "rollout_id = ?", (each,), marked) for (each,) in connection.execute(order)}
    # Pages and indexes take more than the data in them, in the same proportion everywhere.
    scale = (count - free) * page / max(1, sum(sizes.values()))
    too_much -= round(scale * sum(sizes.get(each, 0) for each in gone))
    chosen = set()
    for each in oldest:
        if too_much <= 0:
            break
        chosen.add(each)
        too_much -= round(scale * sizes[each])
    return chosen


def _mark(connection: sqlite3.Connection, where: str, values: Sequence[object], marked: set[bytes]) -> int:
    """Add the content that these entries refer to, over any number of steps; the bytes of it all that are new."""
    size, fresh = 0, set()
    for (body,) in connection.execute(f"SELECT body FROM entries WHERE {where}", values):  # noqa: S608
        size += len(body)
        fresh |= references(body.encode())
    decompressor = zstandard.ZstdDecompressor()
    fresh -= marked
    while fresh:
        marked |= fresh
        following: set[bytes] = set()
        for digest in fresh:
            row = connection.execute("SELECT codec, data FROM blobs WHERE digest = ?", (digest,)).fetchone()
            if row is not None:
                size += len(row[1])
                if row[0] == Codec.JSON:
                    following |= references(decompressor.decompress(row[1]))
        fresh = following - marked
    return size


def _remove(connection: sqlite3.Connection, rollout_ids: Sequence[str]) -> int:
    marks = ",".join("?" * len(rollout_ids))
    with _unguarded(connection):
        batches = f"SELECT DISTINCT batch FROM rollouts WHERE id IN ({marks}) AND batch != ''"  # noqa: S608
        names = connection.execute(batches, rollout_ids).fetchall()
        removed = connection.execute(f"DELETE FROM entries WHERE rollout_id IN ({marks})", rollout_ids).rowcount  # noqa: S608
        connection.execute(f"DELETE FROM rollouts WHERE id IN ({marks})", rollout_ids)  # noqa: S608
        # A batch goes with the last of its rollouts.
        gone = "DELETE FROM batch_entries WHERE batch = ?1 AND NOT EXISTS (SELECT 1 FROM rollouts WHERE batch = ?1)"
        connection.executemany(gone, names)
    return int(removed)


def _sweep(connection: sqlite3.Connection) -> int:
    """Remove the content that no entry refers to. Looked for while others write; what they added meanwhile is seen."""
    marked: set[bytes] = set()
    seen = connection.execute("SELECT coalesce(max(id), 0) FROM entries").fetchone()[0]
    _mark(connection, "id <= ?", (seen,), marked)
    with _unguarded(connection):
        _mark(connection, "id > ?", (seen,), marked)
        stored = [row for row in connection.execute("SELECT rowid, digest FROM blobs") if row[1] not in marked]
        connection.executemany("DELETE FROM blobs WHERE rowid = ?", [(row[0],) for row in stored])
    return len(stored)


@contextmanager
def _unguarded(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction in which things may be deleted: the triggers that forbid it are gone until its end."""
    with transaction(connection):
        guards = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        yield
        for _, sql in guards:
            connection.execute(sql)
        connection.execute("INSERT INTO prunes (time) VALUES (?)", (time.time(),))


def _works(connection: sqlite3.Connection) -> set[str]:
    found = entries(connection, "kind = 'work_stored'", ())
    return {entry.event.digest for entry in found if isinstance(entry.event, WorkStored)}


def _trees(connection: sqlite3.Connection) -> set[str]:
    found = (entry.event for entry in entries(connection, "kind = 'queued'", ()))
    return {tree.digest for event in found if isinstance(event, Queued) for tree in event.job.task.all_trees}


def _sweep_archives(work: Path, needed: Callable[[], set[str]]) -> tuple[int, int]:
    """Remove the archives that no rollout refers to, and what an interrupted one left."""
    files = taken = 0
    now = time.time()
    paths = _archives(work)
    kept = needed() if paths else set()
    for path in paths:
        with suppress(OSError):
            stat = path.stat()
            if path.name.partition(".")[0] not in kept and now - stat.st_mtime > YOUNG_S:
                path.unlink()
                files, taken = files + 1, taken + stat.st_size
    for folder in work.glob("??"):
        with suppress(OSError):
            folder.rmdir()
    return files, taken


def _archives(work: Path) -> list[Path]:
    return [*work.glob("??/*.tar.zst"), *work.glob("*.part")]
