"""The log's file: its schema, how it is opened, and the SQL that adds to it and reads from it. No threads here."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import zstandard
from pydantic import ValidationError

from rollcage.errors import LogDamaged, RollcageError, StoreError, UnknownRollout
from rollcage.events import EVENT, Entry, Event, Queued, TurnEnded
from rollcage.store.packed import LEVEL, Packed, compressed, packed_body
from rollcage.store.packing import Blob, Codec, Damaged, LongTexts, unpack
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


class Prepared(NamedTuple):
    """An append that is ready to be made."""

    rollout_id: str
    time: float
    given: Event | Packed
    packed: Packed
    """Of its content only what is not stored yet."""


class Inserter:
    """Adds entries over one connection. Blobs once seen need not be looked for again, until the log is pruned."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.last_id = 0
        """The id of the newest entry added here."""
        self._known: dict[bytes, None] = {}
        self._prunes = self._count_prunes()
        self._seen = 0
        """What SQLite says of changes by others, when they were last looked for."""
        self._last: dict[str, tuple[int, str]] = {}
        """Number and kind of the last entry of rollouts that this connection has added to, while nobody else writes."""
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._texts = LongTexts()

    def prepared(self, rollout_id: str, given: Event | Packed, when: float) -> Prepared:
        """Pack an event, unless it comes so, and compress what the file does not have yet. Needs no lock."""
        if isinstance(given, Packed):
            fresh = {digest: content for digest, content in given.blobs.items() if digest not in self._known}
            return Prepared(rollout_id, when, given, given._replace(blobs=fresh))
        body, blobs = packed_body(given, self._texts)
        unknown = [digest for digest in blobs if digest not in self._known]
        stored = set(_select(self.connection, "SELECT digest, 0, 0 FROM blobs WHERE digest", unknown))
        self._remember(stored)
        fresh = compressed(self._compressor, {digest: blobs[digest] for digest in unknown if digest not in stored})
        sampled = len(given.turn.tokens) if isinstance(given, TurnEnded) else 0
        return Prepared(rollout_id, when, given, Packed(given, sampled, body, fresh))

    def still_known(self) -> bool:
        """Within a transaction: whether what was prepared may be inserted. Not where the log was pruned since."""
        seen = self.connection.execute("PRAGMA data_version").fetchone()[0]
        if seen == self._seen:
            return True  # nobody else has written anything
        self._seen = seen
        self._last.clear()
        prunes = self._count_prunes()
        if prunes == self._prunes:
            return True
        self._prunes = prunes
        self._known.clear()
        return False

    def _count_prunes(self) -> int:
        return int(self.connection.execute("SELECT coalesce(max(id), 0) FROM prunes").fetchone()[0])

    def insert(self, item: Prepared) -> Entry:
        """Add it within the transaction at hand; StoreError, with nothing written, where the log's rules forbid it."""
        event, _, body, blobs = item.packed
        last = self._last.get(item.rollout_id)
        if last is None:
            last = self.connection.execute(
                "SELECT seq, kind FROM entries WHERE rollout_id = ? ORDER BY seq DESC LIMIT 1", (item.rollout_id,)
            ).fetchone()
        _check(item.rollout_id, event, None if last is None else last[1])
        check_claims(self.connection, item.rollout_id, event)
        seq = 1 if last is None else last[0] + 1
        if blobs:
            self.connection.executemany(
                "INSERT OR IGNORE INTO blobs (digest, codec, data) VALUES (?, ?, ?)",
                [(digest, codec, data) for digest, (codec, data) in blobs.items()],
            )
        cursor = self.connection.execute(
            "INSERT INTO entries (rollout_id, seq, time, kind, body, version) VALUES (?, ?, ?, ?, ?, ?)",
            (item.rollout_id, seq, item.time, event.kind, body.decode(), VERSION),
        )
        self.last_id = cursor.lastrowid or 0
        entry = Entry.model_construct(rollout_id=item.rollout_id, seq=seq, time=item.time, event=event)
        summarise(self.connection, entry, item.packed.sampled)
        if event.kind == "ended":
            self._last.pop(item.rollout_id, None)  # hardly anything follows
        else:
            if len(self._last) >= KNOWN:
                self._last.clear()
            self._last[item.rollout_id] = (seq, event.kind)
        return entry

    def forget(self) -> None:
        """A transaction was rolled back: what was added in it is not there."""
        self._last.clear()

    def remember(self, items: Iterable[Prepared]) -> None:
        """These are committed: their blobs are in the file for good."""
        for item in items:
            self._remember(item.packed.blobs)

    def _remember(self, digests: Iterable[bytes]) -> None:
        self._known.update(dict.fromkeys(digests))
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]


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
        return {digest: opened_blob(digest, codec, data, decompressor) for digest, (codec, data) in found.items()}

    bodies = unpack((row[4].encode() for row in rows), fetch)
    return [_entry(row, body) for row, body in zip(rows, bodies, strict=True)]


def opened_blob(digest: bytes, codec: int, data: bytes, decompressor: zstandard.ZstdDecompressor | None = None) -> Blob:
    """The content of a blob; Damaged where it is not what its name says."""
    try:
        blob = Blob(Codec(codec), (decompressor or zstandard.ZstdDecompressor()).decompress(data))
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
