"""Entries of the log in its file: the SQL that adds them, packed, and reads them back. No threads here."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import zstandard
from pydantic import ValidationError

from rollcage.errors import StoreError, UnknownRollout
from rollcage.events import EVENT, Entry, Event, Queued, TurnEnded
from rollcage.store.packed import LEVEL, Packed, compressed, packed_body
from rollcage.store.packing import Blob, Codec, Damaged, LongTexts, unpack
from rollcage.store.summaries import check_claims, summarise
from rollcage.store.upcast import VERSION, upcast

BATCH = 500
"""Blobs asked for in one statement."""
KNOWN = 50_000
"""Names of stored blobs that a writer remembers."""


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
