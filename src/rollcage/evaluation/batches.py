"""What a batch is: tasks x models x agents x samples; its plan, and what its rows come to. Pure."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple

from pydantic import Field

from rollcage.evaluation.rows import BatchEntry, BatchRow, Price, RowTable
from rollcage.evaluation.statistics import Statistics, Tally, statistics_of
from rollcage.types import BatchPlace, Blame, JsonObject, Standing, Value

Status = Literal["new", "running", "paused", "interrupted", "stopped", "cancelled", "done"]
"""Where a batch is: `interrupted` by a signal or a crash, `stopped` by a limit or a full disk."""

NO_MODEL_LABEL = "none"
"""Stands where a model would be named, for agents that ask none."""


class TaskRef(Value):
    """A task of a batch."""

    id: str
    """Its name, one of a kind in the batch."""
    digest: str
    """Of all that it says."""


class BatchPlan(Value):
    """What a batch is to run, as it was asked for. No secret is in it."""

    name: str
    """Names it from now on."""
    sources: tuple[str, ...] = ()
    """Where its tasks come from."""
    models: tuple[str, ...] = (NO_MODEL_LABEL,)
    """The model, as it was named."""
    agents: tuple[str, ...] = ("",)
    """Which agents work; empty text: the one that each task names."""
    n: int = Field(default=1, ge=1, le=10_000)
    """Samples of each combination."""
    tasks: tuple[TaskRef, ...] = ()
    """What there is to do."""
    skipped: dict[str, str] = {}
    """Tasks that cannot be run here, and why."""
    arguments: JsonObject = {}
    """Arguments of a rollout that hold for all of them."""

    @property
    def size(self) -> int:
        """How many rollouts it is."""
        return len(self.tasks) * len(self.models) * len(self.agents) * self.n

    def cells(self) -> Iterator[Cell]:
        """Every combination. The first sample of everything comes first, so that early numbers are of everything."""
        for sample in range(1, self.n + 1):
            for task in self.tasks:
                for model in self.models:
                    for agent in self.agents:
                        yield Cell(task, model, agent, sample)

    def changes(self, other: BatchPlan) -> list[str]:
        """What another plan under this name would change, a line each."""
        was, now = ({task.id: task.digest for task in plan.tasks} for plan in (self, other))
        lines = [f"task {name}: {was[name]} -> {now[name]}" for name in was if name in now and now[name] != was[name]]
        lines += [f"task {name}: is gone" for name in was if name not in now]
        lines += [f"task {name}: is new" for name in now if name not in was]
        for field in ("models", "agents", "n", "arguments"):
            if (before := getattr(self, field)) != (after := getattr(other, field)):
                lines.append(f"{field}: {_shown(before)} -> {_shown(after)}")
        return lines


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Cell(NamedTuple):
    """One combination of a batch."""

    task: TaskRef
    model: str
    agent: str
    sample: int

    @property
    def group(self) -> str:
        """Names it and the other samples of the same; another one for a task that says something else."""
        said = "\0".join((self.task.id, self.task.digest, self.model, self.agent))
        return blake2b(said.encode(), digest_size=8).hexdigest()

    @property
    def key(self) -> str:
        """Names it within its batch."""
        return f"{self.group}.{self.sample}"

    def place(self, name: str, agent: str, attempt: int) -> BatchPlace:
        """What the log says of its rollout."""
        return BatchPlace(
            name=name,
            cell=self.key,
            task=self.task.id,
            digest=self.task.digest,
            model=self.model,
            agent=agent,
            sample=self.sample,
            attempt=attempt,
        )


class Broken(Value):
    """A rollout without a reward."""

    rollout_id: str
    task: str
    model: str
    sample: int
    blame: Blame | None
    error: str

    @classmethod
    def of(cls, row: BatchRow) -> Broken:
        """What is told of it."""
        names = ("rollout_id", "task", "model", "sample", "blame")
        return cls(**{name: getattr(row, name) for name in names}, error=row.error or "")


class BatchReport(Value):
    """A batch as a whole."""

    name: str
    status: Status
    """`running`, `paused` (a model is away), `interrupted`, `stopped` (a limit, the disk), `cancelled` or `done`."""
    why: str = ""
    """Why it is not running, in words."""
    created_at: float = 0.0
    size: int = 0
    """Rollouts in all."""
    n: int = 1
    """Samples of each combination."""
    overall: Statistics
    models: tuple[Statistics, ...] = ()
    """By model and agent."""
    tasks: tuple[Statistics, ...] = ()
    """By task, model and agent."""
    broken: tuple[Broken, ...] = ()
    """The first hundred of those without a reward, with the reason."""
    skipped: dict[str, str] = {}
    """Tasks that cannot be run here, and why."""
    cost: float | None = None
    """In the currency of the price list; None where a model has no price."""
    eta_s: float | None = None
    """About so much longer; None where nothing can be said."""

    @property
    def all_scored(self) -> bool:
        """Whether every rollout has ended with something that counts, or had nothing to verify."""
        return not self.skipped and self.overall.scored + self.overall.unscored == self.size


MOST_BROKEN = 100


class BatchView:
    """A batch as its log tells it: the plan, what happened, and the latest rollout of each cell."""

    def __init__(self, entries: Sequence[BatchEntry], rows: Iterable[BatchRow]) -> None:
        """`entries`: all there are; `rows`: every attempt, oldest first."""
        self.created_at = entries[0].time
        self.plan = BatchPlan.model_validate(entries[0].body)
        self.status: Status = "new"
        self.why = ""
        self.skipped: dict[str, str] = {}
        self.paused: dict[str, str] = {}
        """Models that are away, and what was heard last."""
        self.began_at = 0.0
        self._rows = RowTable()
        self.spent: dict[str, tuple[int, int]] = {}
        """Tokens by model: of prompts, and generated. Of every attempt: what broke was paid for, too."""
        self._ended = array("q")
        self._ended_since = 0
        """Rollouts that ended since this run of it began."""
        self._counted: dict[str, tuple[Tally, Statistics, tuple[Broken, ...]]] = {}
        for entry in entries:
            self.apply(entry)
        for row in rows:
            self.add(row)

    def apply(self, entry: BatchEntry) -> None:
        """One more thing that happened."""
        body = entry.body
        match entry.kind:
            case "planned":
                self.plan = BatchPlan.model_validate(body)
                self.skipped = dict(self.plan.skipped)
                self.__dict__.pop("_groups", None)
                self._counted.clear()
            case "began":
                self.status, self.why, self.began_at, self.paused = "running", "", entry.time, {}
                self.skipped = dict(self.plan.skipped)
                self._ended_since = 0
            case "skipped":
                self.skipped[body["task"]] = body["why"]
            case "paused":
                self.paused[body["model"]] = body["why"]
            case "back":
                self.paused.pop(body["model"], None)
            case "interrupted" | "stopped" | "cancelled" | "done":
                self.status, self.why, self.paused = entry.kind, body.get("why", ""), {}

    def add(self, row: BatchRow) -> None:
        """A rollout as it is now."""
        before = self._rows.get(row.cell)
        if before is not None and row.attempt < before.attempt:
            return
        position = self._rows.put(row)
        known = before if before is not None and before.rollout_id == row.rollout_id else None
        for each, sign in ((known, -1), (row, 1)):
            if each is not None:
                prompt, said = self.spent.get(each.model, (0, 0))
                self.spent[each.model] = (prompt + sign * each.prompt_tokens, said + sign * each.tokens)
        was_open = known is None or known.ended_at is None
        if row.ended_at is not None and was_open:
            self._ended.append(position)
            self._ended_since += row.ended_at >= self.began_at
        self._counted.pop(row.cell.rpartition(".")[0], None)

    def attempts(self, cell: Cell) -> int:
        """How often it was begun."""
        row = self._rows.get(cell.key)
        return row.attempt if row else 0

    @property
    def ended(self) -> int:
        """How many rollouts were heard to have ended."""
        return len(self._ended)

    def ended_after(self, number: int) -> list[BatchRow]:
        """Those that were heard to have ended after so many others, unless they are run again."""
        rows = map(self._rows.at, self._ended[number:])
        return [row for row in rows if row.ended_at is not None]

    @property
    def tokens(self) -> int:
        """Generated in all, by every attempt."""
        return sum(said for _, said in self.spent.values())

    def cost(self, prices: Mapping[str, Price]) -> float | None:
        """What it cost so far; None where a model without a price has used tokens."""
        known = [model for model, spent in self.spent.items() if any(spent) and model != "scripted"]
        if not prices or any(model not in prices for model in known):
            return None
        return sum(prices[model].of(*spent) for model, spent in self.spent.items() if model in prices)

    @cached_property
    def _groups(self) -> dict[str, Cell]:
        """The first sample of everything that the plan has."""
        return {cell.group: cell for cell in self.plan.model_copy(update={"n": 1}).cells()}

    def _count(self, group: str) -> tuple[Tally, Statistics, tuple[Broken, ...]]:
        """What the rollouts of one task, model and agent came to; counted anew only where one of them changed."""
        if group not in self._counted:
            found = (self._rows.get(f"{group}.{sample}") for sample in range(1, self.plan.n + 1))
            rows = [row for row in found if row is not None and not row.interrupted]  # cut short: no result
            tally, (task, model, agent, _) = Tally.of(rows), self._groups[group]
            names = {"task": task.id, "model": model, "agent": agent}
            stats = statistics_of([(task.id, tally)], k=self.plan.n, total=self.plan.n, rewards=True, **names)
            broken = tuple(Broken.of(row) for row in rows if row.standing is Standing.BROKEN)
            self._counted[group] = (tally, stats, broken)
        return self._counted[group]

    def _planned(self) -> Iterator[tuple[Cell, BatchRow | None]]:
        """Every cell of the plan with its latest rollout."""
        for sample in range(1, self.plan.n + 1):
            for group, cell in self._groups.items():
                yield cell._replace(sample=sample), self._rows.get(f"{group}.{sample}")

    @property
    def current(self) -> list[BatchRow]:
        """The latest rollout of each cell that the plan has."""
        return [row for _, row in self._planned() if row is not None]

    def counts(self, row: BatchRow) -> bool:
        """Whether it is the latest of a cell that the plan has."""
        return row.cell.rpartition(".")[0] in self._groups and self._rows.get(row.cell) == row

    def missing(self, retry: str = "") -> list[Cell]:
        """Cells without a result; `retry`: also those that are `broken`, or so by `infrastructure`."""
        return [cell for cell, row in self._planned() if self._is_missing(row, retry)]

    def _is_missing(self, row: BatchRow | None, retry: str) -> bool:
        if row is None or row.interrupted:
            return True
        if row.standing is not Standing.BROKEN or not retry:
            return False
        return retry == "broken" or row.blame is Blame.INFRASTRUCTURE

    def report(self, *, running: bool = False, prices: dict[str, Price] | None = None) -> BatchReport:
        """What it came to so far. `running`: whether some process is at it."""
        plan = self.plan
        counted = {group: self._count(group) for group in self._groups}
        pairs: dict[tuple[str, str], list[tuple[str, Tally]]] = {}
        for tally, stats, _ in counted.values():
            pairs.setdefault((stats.model, stats.agent), []).append((stats.task, tally))
        total = len(plan.tasks) * plan.n
        gone = not running and self.status in ("new", "running")
        status, why = ("interrupted", "the process that ran it is gone") if gone else (self.status, self.why)
        if running and self.paused:
            status, why = "paused", "; ".join(f"{model}: {said}" for model, said in self.paused.items())
        return BatchReport(
            name=plan.name,
            status=status,
            why=why,
            created_at=self.created_at,
            size=plan.size,
            n=plan.n,
            overall=statistics_of((each for mine in pairs.values() for each in mine), k=plan.n, total=plan.size),
            models=tuple(
                statistics_of(mine, k=plan.n, total=total, model=model, agent=agent)
                for (model, agent), mine in pairs.items()
            ),
            tasks=tuple(stats for _, stats, _ in counted.values()),
            broken=tuple(islice((each for _, _, broken in counted.values() for each in broken), MOST_BROKEN)),
            skipped=dict(self.skipped),
            cost=self.cost(prices or {}),
            eta_s=self._eta() if running else None,
        )

    def _eta(self) -> float | None:
        """What is left at the pace since this run of it began."""
        ended = self._ended_since
        left = self.plan.size - sum(tally.ended for tally, _, _ in self._counted.values())
        return max(0.0, time.time() - self.began_at) / ended * left if ended and left else None
