"""Batches in the log: what each was planned to be, what became of it, and the rows of its rollouts."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from sys import intern
from typing import Any, NamedTuple

from rollcage.errors import UsageError
from rollcage.evaluation.rows import BatchEntry, BatchRow
from rollcage.events import Entry
from rollcage.store.entries import entries
from rollcage.store.store import Store
from rollcage.types import Blame, JsonObject, Outcome, Stage

LIGHT = ("queued", "requeued", "stage_started", "scored", "ended")
"""Kinds of event that tell how a batch goes; the others are many, or large."""
AT_ONCE = 1000
"""So many rows are read at once: what is read takes more memory than what is kept of it."""


_COLUMNS = (
    "id, cell, batch_task, batch_model, agent, sample, attempt, stage, outcome, reward, blame,"
    " turns, tokens, prompt_tokens, created_at, ended_at, substr(error, 1, 300)"
)


def _row(values: Sequence[Any]) -> BatchRow:
    row = BatchRow(*values)
    outcome = None if row.outcome is None else Outcome(row.outcome)
    # Thousands of rows have the same few names.
    return row._replace(
        task=intern(row.task),
        model=intern(row.model),
        agent=intern(row.agent),
        stage=Stage(row.stage),
        outcome=outcome,
        blame=Blame(row.blame) if row.blame else None,
    )


async def batch_rows(store: Store, name: str, *, rollout_id: str = "") -> list[BatchRow]:
    """The rollouts of a batch in the order of their starts, every attempt; `rollout_id`: that one alone."""
    where, values = ("batch = ? AND id = ?", (name, rollout_id)) if rollout_id else ("batch = ?", (name,))
    sql = f"SELECT {_COLUMNS} FROM rollouts WHERE {where} AND batch != '' ORDER BY rowid"  # noqa: S608
    return await store.ask(lambda connection: [_row(row) for row in connection.execute(sql, values)])


class BatchChanges(NamedTuple):
    """What became of the rollouts of a batch since somebody looked."""

    rows: list[BatchRow]
    """Those that are new, at most so many at once, and those that were asked for, as they are now."""
    fresh: int
    """How many of them are new; none: there are no more."""
    last: int
    """Give it as `after` the next time."""
    total: int
    """Rollouts of the batch that there are; fewer than were seen where some were pruned."""


async def batch_changes(store: Store, name: str, *, after: int = 0, open_ids: Sequence[str] = ()) -> BatchChanges:
    """The rollouts that began since, and what has become of those that were open then."""
    which = f"(rowid > ? OR id IN ({','.join('?' * len(open_ids))}))"
    where = f"batch = ? AND {which} AND batch != '' ORDER BY rowid LIMIT ?"
    sql = f"SELECT {_COLUMNS}, rowid FROM rollouts WHERE {where}"  # noqa: S608
    count = "SELECT count(*) FROM rollouts WHERE batch = ? AND batch != ''"
    values = (name, after, *open_ids, AT_ONCE + len(open_ids))

    def work(connection: sqlite3.Connection) -> BatchChanges:
        found = connection.execute(sql, values).fetchall()
        fresh = [row[-1] for row in found if row[-1] > after]
        total = connection.execute(count, (name,)).fetchone()[0]
        return BatchChanges([_row(row[:-1]) for row in found], len(fresh), max([after, *fresh]), total)

    return await store.ask(work)


async def batch_log(store: Store, name: str, *, after: int = 0) -> list[BatchEntry]:
    """What happened to a batch as a whole, oldest first; empty where there is no such batch."""
    sql = "SELECT id, time, kind, body FROM batch_entries WHERE batch = ? AND id > ? ORDER BY id"
    rows = await store.ask(lambda connection: connection.execute(sql, (name, after)).fetchall())
    return [BatchEntry(row[0], row[1], row[2], json.loads(row[3])) for row in rows]


async def add_to_batch(store: Store, name: str, kind: str, body: JsonObject | None = None, *, caller: str = "") -> None:
    """Log something of a batch; the first entry of each is `planned`, and nobody else may have that name."""
    text = json.dumps(body or {})

    def work(connection: sqlite3.Connection) -> None:
        first = connection.execute("SELECT caller FROM batch_entries WHERE batch = ? LIMIT 1", (name,)).fetchone()
        if first is None and kind != "planned":
            raise UsageError(f"there is no batch {name!r}", argument="name")
        if first is not None and first[0] != caller:
            raise UsageError(f"there is a batch {name!r} of somebody else", argument="name", remedy="take another name")
        sql = "INSERT INTO batch_entries (batch, caller, time, kind, body) VALUES (?, ?, ?, ?, ?)"
        connection.execute(sql, (name, caller, time.time(), kind, text))

    await store.change(work)


async def batch_names(store: Store, *, caller: str | None = None, limit: int = 100) -> list[tuple[str, float]]:
    """Batches, newest first, and when each was made; `caller`: those of one key."""
    own, values = ("", ()) if caller is None else (" WHERE caller = ?", (caller,))
    sql = f"SELECT batch, min(time) FROM batch_entries{own} GROUP BY batch ORDER BY min(id) DESC LIMIT ?"  # noqa: S608
    return await store.ask(lambda connection: connection.execute(sql, (*values, limit)).fetchall())


async def batch_events(
    store: Store, name: str, *, after: int = 0, limit: int = 200, kinds: Sequence[str] = LIGHT
) -> list[tuple[int, Entry]]:
    """Entries of all rollouts of a batch above a cursor, in the order they were logged, each with its cursor."""
    which = "rollout_id IN (SELECT id FROM rollouts WHERE batch = ? AND batch != '')"
    picked = f" AND kind IN ({','.join('?' * len(kinds))})" if kinds else ""
    where = f"id > ? AND {which}{picked} ORDER BY id LIMIT ?"
    values = (after, name, *kinds, limit)

    def work(connection: sqlite3.Connection) -> list[tuple[int, Entry]]:
        ids = [row[0] for row in connection.execute(f"SELECT id FROM entries WHERE {where}", values)]  # noqa: S608
        return list(zip(ids, entries(connection, where, values), strict=True))

    return await store.ask(work)
