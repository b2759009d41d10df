"""The row that stands for each rollout in the log's table of rollouts: kept up to date as entries are added."""

from __future__ import annotations

import sqlite3

from rollcage.errors import AlreadyStarted, StoreError
from rollcage.events import AgentEmitted, Ended, Entry, Event, Queued, Requeued, Scored, StageStarted, TurnEnded
from rollcage.types import POLICY, GroupPlace


def check_claims(connection: sqlite3.Connection, rollout_id: str, event: Event) -> None:
    """What only one may have: a caller's idempotency key, and the rollout of a dead process."""
    if isinstance(event, Queued) and event.idempotency_key:
        sql = "SELECT id FROM rollouts WHERE caller = ? AND idempotency_key = ?"
        names = (_storable(event.caller), _storable(event.idempotency_key))
        if first := connection.execute(sql, names).fetchone():
            raise AlreadyStarted(first[0])
    elif isinstance(event, Requeued):
        sql = "SELECT owner FROM rollouts WHERE id = ? AND stage IN ('queued', 'provision', 'setup')"
        owner = connection.execute(sql, (rollout_id,)).fetchone()
        if owner is None or owner[0] != event.previous:
            raise StoreError(f"rollout {rollout_id} was taken over by another process, or its agent has begun")


def summarise(connection: sqlite3.Connection, entry: Entry, sampled: int | None = None) -> None:
    """Bring the rollout's row in `rollouts` up to date with one more entry.

    `sampled`: how many tokens a turn has, where the entry has not got them.
    """
    event, key = entry.event, entry.rollout_id
    match event:
        case Queued(job=job, owner=owner, caller=caller):
            place = event.group or GroupPlace()
            more = (event.idempotency_key, event.reverifies, job.group_id, job.policy_version)
            texts = (key, job.task.id, job.task.instruction[:200], job.agent.name, job.model.model, owner, caller)
            connection.execute(
                "INSERT INTO rollouts (id, task_id, instruction, agent, model, owner, caller, idempotency_key,"
                " reverifies, group_id, policy_version, resumable, created_at, group_index, group_size, min_usable)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *map(_storable, (*texts, *more)),
                    event.resumable,
                    entry.time,
                    place.index,
                    place.size,
                    place.min_usable,
                ),
            )
            if cell := event.batch:
                names = map(_storable, (cell.name, cell.cell, cell.model, cell.task))
                connection.execute(
                    "UPDATE rollouts SET batch = ?, cell = ?, batch_model = ?, batch_task = ?, sample = ?, attempt = ?"
                    " WHERE id = ?",
                    (*names, cell.sample, cell.attempt, key),
                )
            if origin := event.origin:
                sql = "UPDATE rollouts SET origin = ?, origin_how = ? WHERE id = ?"
                connection.execute(sql, (_storable(origin.rollout_id), origin.how, key))
        case Requeued(owner=owner):
            connection.execute("UPDATE rollouts SET owner = ?, stage = 'queued' WHERE id = ?", (_storable(owner), key))
        case AgentEmitted(event=emitted):
            if session := emitted.session[:200]:
                # Subagents have sessions too; the agent's own is the first to speak.
                sql = "UPDATE rollouts SET session = ? WHERE id = ? AND session = ''"
                connection.execute(sql, (_storable(session), key))
        case StageStarted(stage=stage):
            connection.execute("UPDATE rollouts SET stage = ? WHERE id = ?", (stage.value, key))
        case TurnEnded(turn=turn):
            counted = turn.usage.get("completion_tokens")
            sampled = len(turn.tokens) if sampled is None else sampled
            tokens = sampled or (counted if isinstance(counted, int) and 0 <= counted < 1 << 40 else 0)
            trainable = sampled if turn.trainable and turn.purpose in POLICY else 0
            asked = turn.usage.get("prompt_tokens")
            prompt = asked if isinstance(asked, int) and 0 <= asked < 1 << 40 else len(turn.prompt_ids)
            connection.execute(
                "UPDATE rollouts SET turns = turns + 1, tokens = tokens + ?, trainable_tokens = trainable_tokens + ?,"
                " policy_version = CASE WHEN turns THEN policy_version ELSE ? END, prompt_tokens = prompt_tokens + ?"
                " WHERE id = ?",
                (tokens, trainable, _storable(turn.policy_version), prompt, key),
            )
        case Scored(reward=reward):
            connection.execute("UPDATE rollouts SET reward = ? WHERE id = ?", (reward.total, key))
        case Ended(outcome=outcome, error=error, blame=blame, seconds=seconds):
            # As long after its start as it took: the clock on the wall may have been set meanwhile.
            connection.execute(
                "UPDATE rollouts SET stage = 'ended', outcome = ?1, error = ?3,"
                " ended_at = created_at + max(0, coalesce(?7, ?2 - created_at)),"
                " reward = CASE WHEN ?4 THEN reward END,"
                " blame = CASE WHEN ?4 AND reward IS NOT NULL THEN NULL ELSE ?5 END WHERE id = ?6",
                (
                    *(outcome.value, entry.time, error and _storable(error), outcome.scored),
                    *(blame and blame.value, key, seconds),
                ),
            )


def _storable(text: str) -> str:
    """The text as SQLite can hold it: without halves of characters."""
    return text.encode("utf-8", "replace").decode()
