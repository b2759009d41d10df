"""The log's file: its schema, how it is opened and changed, and what its troubles are called. No threads here."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from rollcage.errors import LogDamaged, RollcageError, StoreError
from rollcage.store.packing import Damaged

BUSY_S = 30.0
"""How long a writer waits for the other processes' turns."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE entries (
        id INTEGER PRIMARY KEY,
        rollout_id TEXT NOT NULL,
        seq INTEGER NOT NULL,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        UNIQUE (rollout_id, seq)
    ) STRICT;
    CREATE TABLE blobs (
        digest BLOB NOT NULL UNIQUE,
        codec INTEGER NOT NULL,
        data BLOB NOT NULL
    ) STRICT;
    CREATE TABLE rollouts (
        id TEXT NOT NULL PRIMARY KEY,
        task_id TEXT NOT NULL,
        instruction TEXT NOT NULL,
        agent TEXT NOT NULL,
        model TEXT NOT NULL,
        owner TEXT NOT NULL,
        created_at REAL NOT NULL,
        stage TEXT NOT NULL DEFAULT 'queued',
        outcome TEXT,
        reward REAL,
        turns INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,
        ended_at REAL,
        error TEXT
    ) STRICT;
    CREATE INDEX rollouts_by_time ON rollouts (created_at);
    CREATE INDEX rollouts_open ON rollouts (created_at) WHERE ended_at IS NULL;
    CREATE TRIGGER entries_stay BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END;
    CREATE TRIGGER entries_keep BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
    CREATE TRIGGER blobs_stay BEFORE DELETE ON blobs BEGIN SELECT RAISE(ABORT, 'blobs are never deleted'); END;
    CREATE TRIGGER blobs_keep BEFORE UPDATE ON blobs BEGIN SELECT RAISE(ABORT, 'blobs are never changed'); END;
    """,
    """
    ALTER TABLE rollouts ADD COLUMN caller TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN idempotency_key TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN resumable INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN session TEXT NOT NULL DEFAULT '';
    CREATE UNIQUE INDEX rollouts_by_key ON rollouts (caller, idempotency_key) WHERE idempotency_key != '';
    CREATE INDEX rollouts_by_caller ON rollouts (caller);
    """,
    """
    ALTER TABLE entries ADD COLUMN version INTEGER NOT NULL DEFAULT 1;
    UPDATE rollouts SET outcome = 'finished' WHERE outcome = 'succeeded';
    """,
    """
    ALTER TABLE rollouts ADD COLUMN reverifies TEXT NOT NULL DEFAULT '';
    CREATE INDEX rollouts_by_reverified ON rollouts (reverifies) WHERE reverifies != '';
    """,
    """
    CREATE TABLE pins (rollout_id TEXT NOT NULL PRIMARY KEY, time REAL NOT NULL) STRICT;
    CREATE TABLE prunes (id INTEGER PRIMARY KEY, time REAL NOT NULL) STRICT;
    CREATE TABLE probe (id INTEGER PRIMARY KEY, time REAL NOT NULL) STRICT;
    """,
    """
    ALTER TABLE rollouts ADD COLUMN group_id TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN group_index INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN group_size INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN min_usable INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN policy_version TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN trainable_tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN blame TEXT;
    CREATE INDEX rollouts_by_group ON rollouts (group_id) WHERE group_id != '';
    """,
    """
    CREATE TABLE batch_entries (
        id INTEGER PRIMARY KEY,
        batch TEXT NOT NULL,
        caller TEXT NOT NULL,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX batch_entries_by_batch ON batch_entries (batch);
    CREATE TRIGGER batch_entries_stay BEFORE DELETE ON batch_entries
        BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END;
    CREATE TRIGGER batch_entries_keep BEFORE UPDATE ON batch_entries
        BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
    ALTER TABLE rollouts ADD COLUMN batch TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN cell TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN sample INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN batch_model TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN batch_task TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN prompt_tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE rollouts ADD COLUMN origin TEXT NOT NULL DEFAULT '';
    ALTER TABLE rollouts ADD COLUMN origin_how TEXT NOT NULL DEFAULT '';
    CREATE INDEX rollouts_by_batch ON rollouts (batch) WHERE batch != '';
    CREATE INDEX rollouts_by_origin ON rollouts (origin) WHERE origin != '';
    """,
)
"""What leads from each schema version to the next; the version is `PRAGMA user_version`. Never edit one, add one.

The version of an entry's event is another thing (`upcast`).
"""


def connect(path: Path, *, read_only: bool = False, frozen: bool = False, busy_s: float = BUSY_S) -> sqlite3.Connection:
    """A connection that any one thread at a time may use, in autocommit mode.

    `frozen`: of a log that this process cannot write, and that nobody writes.
    """
    name: str | Path = f"file:{quote(str(path.absolute()))}?{_frozen_mode(path)}" if frozen else path
    connection = sqlite3.connect(name, timeout=busy_s, isolation_level=None, check_same_thread=False, uri=frozen)
    try:
        if frozen:
            connection.execute("PRAGMA query_only = ON")
            return connection
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, to a log that this user may not even be able to write."""
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return connect(path, read_only=True, frozen=not writable)


def _frozen_mode(path: Path) -> str:
    """Without a write-ahead log, SQLite must be told not to look for one: it would want to make it."""
    wal = path.with_name(f"{path.name}-wal")
    return "mode=ro" if wal.exists() and wal.stat().st_size else "immutable=1"


def ids_like(path: Path, prefix: str, limit: int) -> list[tuple[str, str]]:
    """Ids that begin so, with their tasks, newest first; none where there is no log. For shells: it changes nothing."""
    sql = "SELECT id, task_id FROM rollouts WHERE substr(id, 1, ?) = ? ORDER BY created_at DESC LIMIT ?"
    return _like(path, sql, prefix, limit)


def batches_like(path: Path, prefix: str, limit: int) -> list[tuple[str, str]]:
    """The same of names of batches."""
    where = "substr(batch, 1, ?) = ? GROUP BY batch ORDER BY min(id) DESC LIMIT ?"
    return _like(path, f"SELECT batch, '' FROM batch_entries WHERE {where}", prefix, limit)  # noqa: S608


def _like(path: Path, sql: str, prefix: str, limit: int) -> list[tuple[str, str]]:
    if not path.exists():
        return []
    try:
        with closing(connect(path, read_only=True)) as connection:
            return connection.execute(sql, (len(prefix), prefix, limit)).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def prepare(path: Path, wake_fd: int, migrations: Sequence[str]) -> int:
    """Make the file or bring it to the newest schema; the id of its last entry. One process at a time."""
    fcntl.flock(wake_fd, fcntl.LOCK_EX)
    try:
        if not path.exists():
            _create(path, migrations)
        _check_not_empty(path)
        with closing(connect(path)) as connection:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise StoreError(f"cannot open {path}: its file system has no shared memory: use one on a local disk")
            migrate(connection, path, migrations)
            return last_id(connection)
    finally:
        fcntl.flock(wake_fd, fcntl.LOCK_UN)


def _create(path: Path, migrations: Sequence[str]) -> None:
    """Make a new log under another name first: under its own it is there whole or not at all."""
    new = path.with_name(f"{path.name}-new")
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    with closing(connect(new)) as connection:
        migrate(connection, path, migrations)
    new.replace(path)


def _check_not_empty(path: Path) -> None:
    wal = path.with_name(f"{path.name}-wal")
    if path.stat().st_size == 0 and not (wal.exists() and wal.stat().st_size):
        raise LogDamaged(
            f"cannot open {path}: it is empty, and a log never is: restore it from a backup, or remove it to begin anew"
        )


def check_frozen(path: Path, migrations: Sequence[str]) -> int:
    """Look at a log that cannot be written; the id of its last entry."""
    _check_not_empty(path)
    with closing(connect(path, frozen=True)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != len(migrations):
            raise StoreError(
                f"{path} is read-only and has schema version {version}, not {len(migrations)}: copy it to a writable "
                "folder, or use the rollcage that wrote it"
            )
        return last_id(connection)


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    """Bring a log to the newest schema; `path` is what errors call it."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise StoreError(
            f"{path} has schema version {version} and this rollcage knows only {len(migrations)}: "
            "upgrade rollcage, or use another state directory"
        )
    for number in range(version, len(migrations)):
        with transaction(connection):
            for statement in _statements(migrations[number]):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")


def _statements(script: str) -> Iterator[str]:
    """A script's statements one by one, because `executescript` would commit in between."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextmanager
def closing(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """The connection, closed at the end of the block."""
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing of it, durable at its end; other processes wait meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def explaining(path: Path, doing: str) -> Iterator[None]:
    """Trouble with the file comes out as one line that names it and the remedy."""
    try:
        yield
    except (sqlite3.Error, OSError, Damaged) as error:
        raise explained(error, path, doing) from error


def explained(error: Exception, path: Path, doing: str) -> RollcageError:
    """The same trouble in one line that names the file and the remedy."""
    if isinstance(error, RollcageError):
        return error
    name = str(getattr(error, "sqlite_errorname", ""))
    said = " ".join(str(error).split())[:300]
    remedies = {
        "SQLITE_FULL": "the disk is full: free some space, or use another state directory",
        "SQLITE_READONLY": "it is read-only: make it writable for this user, or use another state directory",
        "SQLITE_CORRUPT": f"it is damaged ({said}): move it away, or save what is readable: rollcage doctor --repair",
        "SQLITE_NOTADB": "it is no rollcage log: move it away, or use another state directory",
        "SQLITE_BUSY": f"another process has kept it locked for {BUSY_S:.0f} s: end that process",
        "SQLITE_CANTOPEN": "it cannot be opened: check that its folder exists and that this user may write there",
        "SQLITE_IOERR": f"the disk refused ({name}): check its free space, its quota and its health",
    }
    for start, remedy in remedies.items():
        if name.startswith(start):
            kind = LogDamaged if start in ("SQLITE_CORRUPT", "SQLITE_NOTADB") else StoreError
            return kind(f"cannot {doing} {path}: {remedy}")
    if isinstance(error, Damaged):
        remedy = "restore it from a copy, or save what is readable: rollcage doctor --repair"
        return LogDamaged(f"cannot {doing} {path}: it is damaged ({said}): {remedy}")
    if isinstance(error, OSError):
        return StoreError(f"cannot {doing} {path}: {error.strerror}: check that this user may write there")
    return StoreError(f"cannot {doing} {path}: {said or type(error).__name__}")


def last_id(connection: sqlite3.Connection) -> int:
    """The id of the newest entry of all; 0 where there is none."""
    newest: int | None = connection.execute("SELECT max(id) FROM entries").fetchone()[0]
    return newest or 0
