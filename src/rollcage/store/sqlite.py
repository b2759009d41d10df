"""The log's file: its schema, how it is opened, and the SQL that adds to it and reads from it. No threads here."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from pydantic import ValidationError

from rollcage.errors import RollcageError, StoreError, UnknownRollout
from rollcage.events import EVENT, Entry, Event, Queued, TurnEnded
from rollcage.json_safe import json_safe
from rollcage.store.packing import Blob, Codec, Damaged, pack, unpack
from rollcage.store.summaries import check_claims, summarise
from rollcage.store.upcast import VERSION, upcast

BUSY_S = 30.0
"""How long a writer waits for the other processes' turns."""
BATCH = 500
"""Blobs asked for in one statement."""
KNOWN = 50_000
"""Names of stored blobs that a writer remembers."""

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
)
"""What leads from each schema version to the next; the version is `PRAGMA user_version`. Never edit one, add one.

The version of an entry's event is another thing (`upcast`).
"""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection that any one thread at a time may use, in autocommit mode."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def ids_like(path: Path, prefix: str, limit: int) -> list[tuple[str, str]]:
    """Ids that begin so, with their tasks, newest first; none where there is no log. For shells: it changes nothing."""
    if not path.exists():
        return []
    sql = "SELECT id, task_id FROM rollouts WHERE substr(id, 1, ?) = ? ORDER BY created_at DESC LIMIT ?"
    try:
        with closing(connect(path, read_only=True)) as connection:
            return connection.execute(sql, (len(prefix), prefix, limit)).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def prepare(path: Path, wake_fd: int, migrations: Sequence[str]) -> int:
    """Make the file or bring it to the newest schema; the id of its last entry. One process at a time."""
    fcntl.flock(wake_fd, fcntl.LOCK_EX)
    try:
        # Only a new file may be opened here: closing it again drops every lock SQLite holds on it in this process.
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with closing(connect(path)) as connection:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise StoreError(f"cannot open {path}: its file system has no shared memory: use one on a local disk")
            _migrate(connection, path, migrations)
            return last_id(connection)
    finally:
        fcntl.flock(wake_fd, fcntl.LOCK_UN)


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
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


def explained(error: Exception, path: Path, doing: str) -> RollcageError:
    """The same trouble in one line that names the file and the remedy."""
    if isinstance(error, RollcageError):
        return error
    name = str(getattr(error, "sqlite_errorname", ""))
    said = " ".join(str(error).split())[:300]
    remedies = {
        "SQLITE_FULL": "the disk is full: free some space, or use another state directory",
        "SQLITE_READONLY": "it is read-only: make it writable for this user, or use another state directory",
        "SQLITE_CORRUPT": f"it is damaged ({said}): move it away, or save what is left with `sqlite3 {path} .recover`",
        "SQLITE_NOTADB": "it is no rollcage log: move it away, or use another state directory",
        "SQLITE_BUSY": f"another process has kept it locked for {BUSY_S:.0f} s: end that process",
        "SQLITE_CANTOPEN": "it cannot be opened: check that its folder exists and that this user may write there",
        "SQLITE_IOERR": f"the disk refused ({name}): check its free space, its quota and its health",
    }
    for start, remedy in remedies.items():
        if name.startswith(start):
            return StoreError(f"cannot {doing} {path}: {remedy}")
    if isinstance(error, Damaged):
        return StoreError(f"cannot {doing} {path}: it is damaged ({said}): restore it from a copy")
    if isinstance(error, OSError):
        return StoreError(f"cannot {doing} {path}: {error.strerror}: check that this user may write there")
    return StoreError(f"cannot {doing} {path}: {said or type(error).__name__}")


class Prepared(NamedTuple):
    """An event ready to be written."""

    rollout_id: str
    time: float
    event: Event
    body: bytes
    blobs: dict[bytes, tuple[Codec, bytes]]
    """Those that are not stored yet, compressed."""


class Inserter:
    """Adds entries over one connection. Blobs are never deleted, so those once seen need not be looked for again."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.last_id = 0
        """The id of the newest entry added here."""
        self._known: dict[bytes, None] = {}
        self._compressor = zstandard.ZstdCompressor(level=1)

    def prepared(self, rollout_id: str, event: Event, when: float) -> Prepared:
        """Pack an event and compress what the file does not have yet. Needs no lock."""
        try:
            body, blobs = pack(_plain(event))
        except (ValueError, TypeError, RecursionError):
            # Models and agents can write what no JSON tool will carry; it must not cost them the rollout.
            try:
                body, blobs = pack(json_safe(event))
            except (ValueError, TypeError, RecursionError) as error:
                said = " ".join(str(error).split())[:300]
                raise StoreError(f"cannot log `{event.kind}` of rollout {rollout_id}: {said}") from error
        unknown = [digest for digest in blobs if digest not in self._known]
        stored = set(_select(self.connection, "SELECT digest, 0, 0 FROM blobs WHERE digest", unknown))
        self._remember(stored)
        fresh = {
            digest: (blobs[digest].codec, self._compressor.compress(blobs[digest].raw))
            for digest in unknown
            if digest not in stored
        }
        return Prepared(rollout_id, when, event, body, fresh)

    def insert(self, item: Prepared) -> Entry:
        """Add it within the transaction at hand; StoreError, with nothing written, where the log's rules forbid it."""
        last = self.connection.execute(
            "SELECT seq, kind FROM entries WHERE rollout_id = ? ORDER BY seq DESC LIMIT 1", (item.rollout_id,)
        ).fetchone()
        _check(item.rollout_id, item.event, None if last is None else last[1])
        check_claims(self.connection, item.rollout_id, item.event)
        seq = 1 if last is None else last[0] + 1
        self.connection.executemany(
            "INSERT OR IGNORE INTO blobs (digest, codec, data) VALUES (?, ?, ?)",
            [(digest, int(codec), data) for digest, (codec, data) in item.blobs.items()],
        )
        cursor = self.connection.execute(
            "INSERT INTO entries (rollout_id, seq, time, kind, body, version) VALUES (?, ?, ?, ?, ?, ?)",
            (item.rollout_id, seq, item.time, item.event.kind, item.body.decode(), VERSION),
        )
        self.last_id = cursor.lastrowid or 0
        entry = Entry.model_construct(rollout_id=item.rollout_id, seq=seq, time=item.time, event=item.event)
        summarise(self.connection, entry)
        return entry

    def remember(self, items: Iterable[Prepared]) -> None:
        """These are committed: their blobs are in the file for good."""
        for item in items:
            self._remember(item.blobs)

    def _remember(self, digests: Iterable[bytes]) -> None:
        self._known.update(dict.fromkeys(digests))
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]


def _plain(event: Event) -> dict[str, Any]:
    """The event as what JSON knows. Tokens go as they are: the packer takes tuples for lists, and they are many."""
    if not isinstance(event, TurnEnded):
        return event.model_dump(mode="json")
    plain = event.model_dump(mode="json", exclude={"turn": {"tokens"}})
    plain["turn"]["tokens"] = event.turn.tokens
    return plain


def _check(rollout_id: str, event: Event, last_kind: str | None) -> None:
    if last_kind is None and not isinstance(event, Queued):
        raise UnknownRollout(f"no rollout {rollout_id} in the log: its first event must be `queued`")
    if last_kind == "ended":
        raise StoreError(f"rollout {rollout_id} has ended: nothing can be added to its log")
    if last_kind is not None and isinstance(event, Queued):
        raise StoreError(f"rollout {rollout_id} is already in the log: use a new id")


def rebuild(connection: sqlite3.Connection) -> None:
    """Make `rollouts` anew from the log, which is the only truth. Runs within a transaction."""
    connection.execute("DELETE FROM rollouts")
    last = 0
    while ids := [row[0] for row in connection.execute("SELECT id FROM entries WHERE id > ? LIMIT 200", (last,))]:
        for entry in entries(connection, "id > ? AND id <= ? ORDER BY id", (last, ids[-1])):
            summarise(connection, entry)
        last = ids[-1]


def last_id(connection: sqlite3.Connection) -> int:
    """The id of the newest entry of all; 0 where there is none."""
    newest: int | None = connection.execute("SELECT max(id) FROM entries").fetchone()[0]
    return newest or 0


def entries(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[Entry]:
    """The entries that some SQL condition picks, put together again."""
    sql = f"SELECT rollout_id, seq, time, version, body FROM entries WHERE {where}"  # noqa: S608
    rows = connection.execute(sql, values).fetchall()
    decompressor = zstandard.ZstdDecompressor()

    def fetch(digests: Sequence[bytes]) -> Mapping[bytes, Blob]:
        found = _select(connection, "SELECT digest, codec, data FROM blobs WHERE digest", digests)
        return {digest: _opened(digest, codec, data, decompressor) for digest, (codec, data) in found.items()}

    bodies = unpack((row[4].encode() for row in rows), fetch)
    return [_entry(row, body) for row, body in zip(rows, bodies, strict=True)]


def _opened(digest: bytes, codec: int, data: bytes, decompressor: zstandard.ZstdDecompressor) -> Blob:
    try:
        blob = Blob(Codec(codec), decompressor.decompress(data))
    except (zstandard.ZstdError, ValueError) as error:
        raise Damaged(f"blob {digest.hex()}: {error}") from error
    if blob.digest != digest:
        raise Damaged(f"blob {digest.hex()} is not what its name says")
    return blob


def _entry(row: Sequence[Any], body: dict[str, Any]) -> Entry:
    rollout_id, seq, when, version, _ = row
    try:
        event = EVENT.validate_python(upcast(body, version))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise StoreError(
            f"cannot read entry {seq} of rollout {rollout_id}: {problem['msg']}; was it written by a newer rollcage?"
        ) from error
    return Entry.model_construct(rollout_id=rollout_id, seq=seq, time=when, event=event)


def _select(connection: sqlite3.Connection, start: str, digests: Sequence[bytes]) -> dict[bytes, tuple[Any, Any]]:
    """Rows by digest, many at a time."""
    found: dict[bytes, tuple[Any, Any]] = {}
    for at in range(0, len(digests), BATCH):
        some = digests[at : at + BATCH]
        marks = ",".join("?" * len(some))
        for digest, *rest in connection.execute(f"{start} IN ({marks})", some):
            found[digest] = (rest[0], rest[1])
    return found
