"""The one thread of a process that writes to the log: appends that arrive together are committed together."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from rollcage.errors import RollcageError, StoreError
from rollcage.events import Entry, Event
from rollcage.store.entries import Inserter, Prepared
from rollcage.store.packed import Packed
from rollcage.store.sqlite import connect, explained, transaction

TOGETHER = 256
"""Most appends that are committed together."""

PACE_S = 0.001
"""From one commit to the next at least: what comes meanwhile shares it. An append after a rest waits for nothing."""

Result = Entry | RollcageError


class Request(NamedTuple):
    """An append that waits for the writer."""

    rollout_id: str
    event: Event | Packed
    time: float
    future: asyncio.Future[Entry]


class Writer:
    """Takes appends from the event loop and answers when they are on the disk."""

    def __init__(self, path: Path, committed: Callable[[int], None]) -> None:
        """`committed` gets the id of the newest entry after each commit, in the writer's thread."""
        self._path = path
        self._committed = committed
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._inserter: Inserter | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollcage-writer", daemon=True)
        self._thread.start()

    async def append(self, rollout_id: str, event: Event | Packed) -> Entry:
        """Add an event to a rollout's log."""
        if self._closed:
            raise StoreError(f"cannot write {self._path}: it was closed")
        return await self._put(rollout_id, event)

    async def append_all(self, events: Sequence[tuple[str, Event]]) -> list[Result]:
        """Add many, in this order, in as few commits as can be; what became of each."""
        if self._closed:
            raise StoreError(f"cannot write {self._path}: it was closed")
        results = await asyncio.gather(*(self._put(*each) for each in events), return_exceptions=True)
        for result in results:
            if not isinstance(result, Entry | RollcageError):
                raise result
        return cast("list[Result]", results)

    def _put(self, rollout_id: str, event: Event | Packed) -> asyncio.Future[Entry]:
        future: asyncio.Future[Entry] = self._loop.create_future()
        self._queue.put(Request(rollout_id, event, time.time(), future))
        return future

    def close(self) -> None:
        """Write what is waiting, and end."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        last = False
        before = 0.0
        while not last:
            batch = [self._queue.get()]
            if (early := before + PACE_S - time.monotonic()) > 0 and batch[0] is not None:
                time.sleep(early)
            before = time.monotonic()
            with suppress(queue.Empty):
                while batch[-1] is not None and len(batch) < TOGETHER:
                    batch.append(self._queue.get_nowait())
            last = batch[-1] is None
            requests = [request for request in batch if request is not None]
            if requests:
                results = self._results(requests)
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(_settle, requests, results)
        self._reset()

    def _results(self, requests: Sequence[Request]) -> list[Result]:
        results: dict[int, Result] = {}
        items: dict[int, Prepared] = {}
        for number, request in enumerate(requests):
            try:
                items[number] = self._ready().prepared(request.rollout_id, request.event, request.time)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one event must not touch the others
                results[number] = self._failure(error)
        try:
            written = self._write(items)
        except Exception as error:  # noqa: BLE001 - the callers get it; this thread must live
            written = {number: self._failure(error) for number in items}
            if len(items) > 1:
                # One of them may be too large for the disk, and the others not.
                written = {number: self._write_alone(number, item) for number, item in items.items()}
        results |= written
        return [results[number] for number in range(len(requests))]

    def _write_alone(self, number: int, item: Prepared) -> Result:
        try:
            return self._write({number: item})[number]
        except Exception as error:  # noqa: BLE001 - as above
            return self._failure(error)

    def _write(self, items: dict[int, Prepared]) -> dict[int, Result]:
        results: dict[int, Result] = {}
        inserter = self._ready()
        try:
            with transaction(inserter.connection):
                if not inserter.still_known():
                    items = {n: inserter.prepared(each.rollout_id, each.given, each.time) for n, each in items.items()}
                for number, item in items.items():
                    try:
                        results[number] = inserter.insert(item)
                    except StoreError as error:
                        results[number] = error
        except BaseException:
            inserter.forget()
            raise
        done = [item for number, item in items.items() if isinstance(results[number], Entry)]
        if done:
            inserter.remember(done)
            self._committed(inserter.last_id)
        return results

    def _ready(self) -> Inserter:
        if self._inserter is None:
            self._inserter = Inserter(connect(self._path))
        return self._inserter

    def _failure(self, error: Exception) -> RollcageError:
        if not isinstance(error, RollcageError):
            # A connection that has seen the disk fail may remember wrong things about it.
            self._reset()
        return explained(error, self._path, "write")

    def _reset(self) -> None:
        inserter, self._inserter = self._inserter, None
        if inserter is not None:
            with suppress(sqlite3.Error):
                inserter.connection.close()


def _settle(requests: Sequence[Request], results: Sequence[Result]) -> None:
    for request, result in zip(requests, results, strict=True):
        if request.future.done():
            continue
        if isinstance(result, Entry):
            request.future.set_result(result)
        else:
            request.future.set_exception(result)
