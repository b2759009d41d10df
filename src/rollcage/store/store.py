"""The log on disk: one SQLite file to which every rollout's events are appended, and from which everything is read.

One thread writes. Appends that arrive while it waits for the disk are committed together, so that many rollouts share
one sync. Reads run in a few other threads, each with a connection of its own; they never wait for the writer.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread

from rollcage.errors import StoreError, UnknownRollout, UsageError
from rollcage.events import Ended, Entry, Event
from rollcage.results.fold import Rollout, Verdict
from rollcage.store.entries import entries, rebuild
from rollcage.store.notify import CommitNotifier, Subscription, Watch
from rollcage.store.packed import Packed
from rollcage.store.sqlite import MIGRATIONS, check_frozen, closing, connect, explaining, prepare, transaction
from rollcage.store.summaries import Query, Summary
from rollcage.store.upcast import with_former
from rollcage.store.writer import Result, Writer

READERS = 4
"""Reads that run at once."""
PAGE = 200
"""Entries a follower gets at once while it catches up."""

T = TypeVar("T")
Entries = list[Entry]
Results = list[Result]
Summaries = list[Summary]
Members = list[tuple[Summary, int | None]]
COLUMNS = ", ".join(Summary.model_fields)


class Store:
    """The log of all rollouts in one file, shared by all processes that have it open."""

    def __init__(self, path: Path, notifier: CommitNotifier | None, last_id: int) -> None:
        """Use `Store.open`. `notifier`: None where the log is only read."""
        self.path = path
        self._notifier = notifier
        self._last_id = last_id
        self._watch: Watch | None = None
        self._limiter = CapacityLimiter(READERS)
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._writer = Writer(path, self._committed) if notifier else None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path, *, migrations: Sequence[str] = MIGRATIONS, read_only: bool = False
    ) -> AsyncIterator[Store]:
        """The log at `path`; made, with its folders, where it is not there, and brought to the newest schema.

        `read_only`: nothing on the disk is touched, so that it works on a disk that cannot be written.
        """
        with CancelScope(shield=True):
            notifier, last_id = await to_thread.run_sync(_opened, path, migrations, read_only)
            store = cls(notifier.log if notifier else path, notifier, last_id)
        try:
            yield store
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(store._close)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        for connection in self._idle:
            connection.close()
        if self._notifier is not None:
            self._notifier.close()

    def _committed(self, last_id: int) -> None:
        """Called in the writer's thread."""
        self._last_id = last_id
        if self._notifier is not None:
            self._notifier.notify()
        if self._watch is not None:
            self._watch.notify()

    async def append(self, rollout_id: str, event: Event | Packed) -> Entry:
        """Add an event to a rollout's log; it is on the disk when this returns.

        A rollout starts with `Queued`; nothing follows `Ended`. Where the caller is cancelled while it waits, the
        event is in the log or it is not, but never in part.
        """
        return await self._writing().append(rollout_id, event)

    async def append_all(self, events: Sequence[tuple[str, Event]]) -> Results:
        """As `append`, for events of many rollouts in few commits: the entry of each, or why it was refused."""
        return await self._writing().append_all(events)

    @property
    def read_only(self) -> bool:
        """Whether nothing can be added."""
        return self._writer is None

    def _writing(self) -> Writer:
        if self._writer is None:
            raise StoreError(f"cannot write {self.path}: it was opened to be read only")
        return self._writer

    async def check_writable(self) -> None:
        """Write to the disk what is of no interest; StoreError where that fails."""

        def work() -> None:
            with closing(connect(self.path, busy_s=1)) as connection, transaction(connection):
                connection.execute("INSERT OR REPLACE INTO probe (id, time) VALUES (1, ?)", (time.time(),))

        await to_thread.run_sync(_explaining, self.path, "write", work, limiter=self._limiter)

    async def read(
        self,
        rollout_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        kinds: Sequence[str] = (),
        newest: bool = False,
    ) -> Entries:
        """A rollout's entries with a seq above `after`, oldest first; none where there is no such rollout.

        `kinds`: only these kinds of event; none named means all. `newest`: where there are more than `limit`, the last
        ones and not the first. What entries have in common is shared between them: treat it as frozen.
        """
        kinds = with_former(kinds)
        picked = f"AND kind IN ({','.join('?' * len(kinds))}) " if kinds else ""
        where = f"rollout_id = ? AND seq > ? {picked}ORDER BY seq {'DESC ' if newest else ''}LIMIT ?"
        found = await self._entries(where, (rollout_id, after, *kinds, _sql_limit(limit)))
        return found[::-1] if newest else found

    async def read_all(self, rollout_ids: Sequence[str], kind: str) -> Entries:
        """The entries of one kind of many rollouts, in few trips to the disk."""
        found: Entries = []
        for at in range(0, len(rollout_ids), PAGE):
            some = rollout_ids[at : at + PAGE]
            where = f"rollout_id IN ({','.join('?' * len(some))}) AND kind = ? ORDER BY id"
            found += await self._entries(where, (*some, kind))
        return found

    async def follow(self, rollout_id: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """A rollout's entries above `after`, then each new one as it comes from any process; over after `Ended`."""
        subscription = Subscription(rollout_id=rollout_id)
        if not self.read_only:
            self._watching().add(subscription)
        last, kind = await self._last(rollout_id)
        if kind == "ended" and last <= after:
            return
        while True:
            subscription.take()
            page = await self.read(rollout_id, after=after, limit=PAGE)
            for entry in page:
                yield entry
                after = entry.seq
                if isinstance(entry.event, Ended):
                    return
            if not page and self.read_only:
                return
            if not page:
                await subscription.wait()

    def follow_kind(self, kind: str) -> AsyncGenerator[Entry, None]:
        """Entries of one kind, of any rollout, from any process, that are appended after this call.

        The first follower of all may also get some that other processes appended since this log was opened here.
        """
        return self._follow_kind(self.watch_kind(kind))

    async def _follow_kind(self, subscription: Subscription) -> AsyncGenerator[Entry, None]:
        while True:
            await subscription.wait()
            ids = subscription.take()
            for at in range(0, len(ids), PAGE):
                some = ids[at : at + PAGE]
                where = f"id IN ({','.join('?' * len(some))}) ORDER BY id"
                for entry in await self._entries(where, some):
                    yield entry

    async def rollout(self, rollout_id: str) -> Rollout:
        """The state of a rollout, folded from its whole log."""
        log = await self.read(rollout_id)
        if not log:
            raise UnknownRollout(f"no rollout {rollout_id} in {self.path}")
        rollout = Rollout.fold(log)
        return rollout.model_copy(update={"verdicts": await self.verdicts(rollout)})

    async def verdicts(self, rollout: Rollout) -> tuple[Verdict, ...]:
        """What judging a rollout's stored work again came to: out of the logs of those who did."""
        which = "reverifies = ? AND reverifies != '' AND ended_at IS NOT NULL"
        sql = f"SELECT id FROM rollouts WHERE {which} ORDER BY rowid"  # noqa: S608
        rows = await self._query(lambda connection: connection.execute(sql, (rollout.id,)).fetchall())
        logs = [await self.read(row[0], kinds=("queued", "scored", "ended")) for row in rows]
        return tuple(Verdict.of(Rollout.fold(log), rollout.job.task) for log in logs)

    async def list(self, *, limit: int = 50, before: float | None = None, open_only: bool = False) -> Summaries:
        """The newest rollouts first; `before` (a `created_at`) gets the next page, `open_only` those not ended."""
        where = "created_at < ?" + (" AND ended_at IS NULL" if open_only else "")
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE {where} ORDER BY created_at DESC, rowid DESC LIMIT ?"  # noqa: S608
        values = (float("inf") if before is None else before, _sql_limit(limit))
        rows = await self._query(lambda connection: connection.execute(sql, values).fetchall())
        return [_summary(row) for row in rows]

    async def summary(self, rollout_id: str) -> Summary:
        """One rollout's row; far cheaper than its log."""
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE id = ?"  # noqa: S608
        row = await self._query(lambda connection: connection.execute(sql, (rollout_id,)).fetchone())
        if row is None:
            raise UnknownRollout(f"no rollout {rollout_id} in {self.path}")
        return _summary(row)

    async def started(self, caller: str, idempotency_key: str) -> str | None:
        """The rollout that this caller started under this key, if there is one."""
        sql = "SELECT id FROM rollouts WHERE caller = ? AND idempotency_key = ? AND idempotency_key != ''"
        row = await self._query(lambda connection: connection.execute(sql, (caller, idempotency_key)).fetchone())
        return None if row is None else str(row[0])

    async def page(self, query: Query, *, before: int | None = None, limit: int = 50) -> tuple[Summaries, int | None]:
        """Rollouts that match, newest first, and the `before` of the next page; None where this was the last."""
        where, values = query.sql()
        most = (1 << 63) - 1 if before is None else before
        sql = f"SELECT {COLUMNS}, rowid FROM rollouts WHERE {where} AND rowid < ? ORDER BY rowid DESC LIMIT ?"  # noqa: S608
        given = (*values, most, _sql_limit(limit + 1))
        rows = await self._query(lambda connection: connection.execute(sql, given).fetchall())
        more = int(rows[limit - 1][-1]) if len(rows) > limit > 0 else None
        return [_summary(row[:-1]) for row in rows[:limit]], more

    async def groups(self, group_ids: Sequence[str], caller: str | None = None) -> Members:
        """The rollouts of these groups in the order of their starts, each with the id of its last entry once it has
        ended: ids grow from one end to the next, whichever process logs it. `caller`: those of one key.
        """
        which = f"group_id IN ({','.join('?' * len(group_ids))}) AND group_id != '' AND reverifies = ''"
        own = "" if caller is None else " AND caller = ?"
        last = "(SELECT id FROM entries WHERE rollout_id = rollouts.id ORDER BY seq DESC LIMIT 1)"
        sql = (
            f"SELECT {COLUMNS}, CASE WHEN ended_at IS NOT NULL THEN {last} END FROM rollouts"  # noqa: S608
            f" WHERE {which}{own} ORDER BY rowid"
        )
        values = (*group_ids, *(() if caller is None else (caller,)))
        rows = await self._query(lambda connection: connection.execute(sql, values).fetchall())
        return [(_summary(row[:-1]), row[-1]) for row in rows]

    def watch_kind(self, kind: str) -> Subscription:
        """Told of each entry of one kind, of any rollout, from any process, that is appended after this call."""
        subscription = Subscription(kind=kind)
        self._watching().add(subscription)
        return subscription

    async def find(self, prefix: str) -> str:
        """The one rollout whose id is, or starts with, `prefix`."""
        sql = "SELECT id FROM rollouts WHERE id >= ? AND substr(id, 1, ?) = ? ORDER BY id LIMIT 6"
        rows = await self._query(lambda connection: connection.execute(sql, (prefix, len(prefix), prefix)).fetchall())
        ids = [row[0] for row in rows]
        if not ids:
            raise UnknownRollout(f"no rollout {prefix} in {self.path}")
        if len(ids) > 1 and ids[0] != prefix:
            names = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
            raise UsageError(f"{prefix!r} could be any of {names}: give more of the id")
        return str(ids[0])

    async def rebuild(self) -> None:
        """Make the table behind `list` anew from the log, should it ever be doubted."""
        await self.change(rebuild)

    async def change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do something rare to the file in one transaction, beside the writer; durable when it returns."""

        def changing() -> T:
            with closing(connect(self.path)) as connection, transaction(connection):
                return work(connection)

        done = await to_thread.run_sync(_explaining, self.path, "write", changing, limiter=self._limiter)
        if self._notifier is not None:
            self._notifier.notify()
        return done

    async def ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """What some other part of the store reads."""
        return await self._query(question)

    async def _entries(self, where: str, values: Sequence[object]) -> Entries:
        return await self._query(lambda connection: entries(connection, where, values))

    async def last(self, rollout_id: str) -> tuple[int, bool]:
        """The seq of a rollout's newest entry, and whether it is the last there will be."""
        seq, kind = await self._last(rollout_id)
        return seq, kind == "ended"

    async def _last(self, rollout_id: str) -> tuple[int, str]:
        sql = "SELECT seq, kind FROM entries WHERE rollout_id = ? ORDER BY seq DESC LIMIT 1"
        row = await self._query(lambda connection: connection.execute(sql, (rollout_id,)).fetchone())
        if row is None:
            raise UnknownRollout(f"no rollout {rollout_id} in {self.path}")
        return int(row[0]), str(row[1])

    def _watching(self) -> Watch:
        if self._closed:
            raise StoreError(f"{self.path} was closed")
        if self._notifier is None:
            raise StoreError(f"cannot follow {self.path}: it was opened to be read only")
        if self._watch is None:
            self._watch = Watch(self.path, self._notifier, self._last_id)
        return self._watch

    async def _query(self, question: Callable[[sqlite3.Connection], T]) -> T:
        def work() -> T:
            if self._closed:
                raise StoreError(f"{self.path} was closed")
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = connect(self.path, read_only=True, frozen=self.read_only)
            try:
                answer = question(connection)
            except BaseException:
                connection.close()
                raise
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
            return answer

        return await to_thread.run_sync(_explaining, self.path, "read", work, limiter=self._limiter)


def _summary(row: Sequence[Any]) -> Summary:
    return Summary(**dict(zip(Summary.model_fields, row, strict=True)))


def _opened(path: Path, migrations: Sequence[str], read_only: bool) -> tuple[CommitNotifier | None, int]:
    def work() -> tuple[CommitNotifier | None, int]:
        if read_only:
            return None, check_frozen(path, migrations)
        _make_folder(path.parent)
        notifier = CommitNotifier(path.absolute())
        try:
            return notifier, prepare(notifier.log, notifier.fd, migrations)
        except BaseException:
            notifier.close()
            raise

    return _explaining(path, "open", work)


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Without this, a crash of the machine could forget the folder together with all that was synced in it.
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _explaining(path: Path, doing: str, work: Callable[[], T]) -> T:
    with explaining(path, doing):
        return work()


def _sql_limit(limit: int | None) -> int:
    if limit is not None and limit < 0:
        raise UsageError(f"limit {limit} must not be negative")
    return -1 if limit is None else limit
