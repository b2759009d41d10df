"""Follows batches in the log: a batch that was looked at before is brought up to date, and not read anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from rollcage.errors import UnknownBatch
from rollcage.evaluation.batches import BatchView
from rollcage.store import Store
from rollcage.store.batches import batch_changes, batch_log

T = TypeVar("T")
KEPT = 16
"""Batches that are kept at hand, those looked at last."""


@dataclass
class _Followed:
    view: BatchView
    last_entry: int
    last_row: int = 0
    seen: int = 0
    open: set[str] = field(default_factory=set)


class BatchFollower:
    """Batches as the log has them now."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, _Followed] = OrderedDict()
        self._lock = anyio.Lock()

    async def ask(self, names: Sequence[str], work: Callable[..., T]) -> T:
        """What `work` makes of these batches, in a thread; UnknownBatch where there is none of a name.

        Nothing changes them meanwhile; it must not keep them.
        """
        async with self._lock:
            views = [await self._view(name) for name in names]
            return await anyio.to_thread.run_sync(lambda: work(*views))

    async def _view(self, name: str) -> BatchView:
        found = self._known.pop(name, None)
        if found is None or not await self._refresh(name, found):
            found = await self._read(name)
        self._known[name] = found
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found.view

    async def _read(self, name: str) -> _Followed:
        entries = await batch_log(self._store, name)
        if not entries:
            raise UnknownBatch(f"there is no batch {name!r} in {self._store.path}; rollcage eval makes one")
        found = _Followed(BatchView(entries, ()), entries[-1].id)
        await self._refresh(name, found)
        return found

    async def _refresh(self, name: str, known: _Followed) -> bool:
        """Whether it could be brought up to date; not where rollouts of it were pruned."""
        asked: Sequence[str] = sorted(known.open)
        for entry in await batch_log(self._store, name, after=known.last_entry):
            known.last_entry = entry.id
            known.view.apply(entry)
        while True:
            changes = await batch_changes(self._store, name, after=known.last_row, open_ids=asked)
            for row in changes.rows:
                known.view.add(row)
                (known.open.discard if row.ended_at is not None else known.open.add)(row.rollout_id)
            known.seen, known.last_row, asked = known.seen + changes.fresh, changes.last, ()
            if not changes.fresh:
                return changes.total == known.seen
