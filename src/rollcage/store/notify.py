"""Tells followers of the log that there is something new, from any process, without looking at the disk in between.

Every process that has the log open keeps a small file beside it open for writing, the wake file. Whoever has committed
opens and closes that file once; the kernel tells the watchers (inotify, `IN_CLOSE_WRITE`). The log's own files would
not do: SQLite writes them before a commit is visible, and makes it visible through shared memory, which inotify does
not see. A process that is killed after its commit wakes them all the same: the kernel closes its files.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import sqlite3
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from rollcage.errors import RollcageError, StoreError
from rollcage.store.sqlite import connect, explained

IN_ATTRIB = 0x4
IN_CLOSE_WRITE = 0x8
IN_Q_OVERFLOW = 0x4000
HEADER = struct.Struct("iIII")


class CommitNotifier:
    """The file whose closing wakes the watchers of a log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.path = log.with_name(log.name + "-wake")
        self.fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def notify(self) -> None:
        """Wake everybody. Changes nothing on the disk."""
        try:
            os.close(self._open())
        except OSError:
            # No file descriptor is left, say. A new time stamp needs none, and wakes them as well.
            with suppress(OSError):
                os.utime(self.fd)

    def close(self) -> None:
        """Give the file back; this notifies a last time."""
        os.close(self.fd)


class Inotify:
    """The kernel's word that somebody notified."""

    def __init__(self, notifier: CommitNotifier) -> None:
        self._name = notifier.path.name.encode()
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise _watch_error(notifier.path.parent, ctypes.get_errno())
        # The folder, not the file: a wake file that somebody deleted and the next one made anew still counts.
        if libc.inotify_add_watch(self.fd, os.fsencode(notifier.path.parent), IN_CLOSE_WRITE | IN_ATTRIB) < 0:
            code = ctypes.get_errno()
            os.close(self.fd)
            raise _watch_error(notifier.path.parent, code)

    def has_news(self) -> bool:
        """Whether, since the last call, somebody notified (or so much happened that the kernel lost count)."""
        notified = False
        with suppress(BlockingIOError):
            while data := os.read(self.fd, 64 << 10):
                at = 0
                while at < len(data):
                    _, mask, _, size = HEADER.unpack_from(data, at)
                    at += HEADER.size + size
                    notified |= bool(mask & IN_Q_OVERFLOW) or data[at - size : at].rstrip(b"\0") == self._name
        return notified

    def close(self) -> None:
        """Stop listening."""
        os.close(self.fd)


def _watch_error(folder: Path, code: int) -> StoreError:
    remedy = os.strerror(code)
    if code == errno.EMFILE:
        # The kernel has one word for two limits; only one of them stands in the way of other files too.
        try:
            os.close(os.dup(2))
            remedy = "this user has no inotify instance left: `sysctl -w fs.inotify.max_user_instances=1024`"
        except OSError:
            remedy = "this process has too many open files: raise `ulimit -n`"
    elif code == errno.ENOSPC:
        remedy = "this user has no inotify watch left: `sysctl -w fs.inotify.max_user_watches=524288`"
    return StoreError(f"cannot watch {folder} for news: {remedy}")


class Subscription:
    """What one follower waits for. Used on the event loop only."""

    def __init__(self, rollout_id: str | None = None, kind: str | None = None) -> None:
        self.rollout_id = rollout_id
        self.kind = kind
        self.ids: list[int] = []
        """Database ids of the new entries, oldest first."""
        self._news = asyncio.Event()
        self._error: RollcageError | None = None

    def tell(self, ids: Iterable[int], error: RollcageError | None = None) -> None:
        """There are new entries, or there never will be."""
        self.ids.extend(ids)
        self._error = error or self._error
        self._news.set()

    def take(self) -> list[int]:
        """The ids told since the last call."""
        ids, self.ids = self.ids, []
        self._news.clear()
        return ids

    async def wait(self) -> None:
        """Until something was told since the last `take`; raises what keeps the watch from working."""
        await self._news.wait()
        if self._error is not None:
            raise self._error


class Watch:
    """One thread that waits to be notified, looks once what is new, and tells the followers whom it concerns."""

    def __init__(self, path: Path, notifier: CommitNotifier, seen: int) -> None:
        self._path = path
        self._seen = seen
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        # Weak, because a follower may be made and dropped without ever being started.
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self._inotify = Inotify(notifier)
        self._own_news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rollcage-watch", daemon=True)
        self._thread.start()

    def add(self, subscription: Subscription) -> None:
        """Tell this one from now on."""
        with self._lock:
            self._subscriptions.add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Tell it no more."""
        with self._lock:
            self._subscriptions.discard(subscription)

    def notify(self) -> None:
        """Something was committed by this process. From any thread."""
        os.eventfd_write(self._own_news, 1)

    def close(self) -> None:
        """End the thread and tell the followers that it is over. Blocks for a moment."""
        self._closing = True
        self.notify()
        self._thread.join()
        self._inotify.close()
        os.close(self._own_news)

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        poll = select.poll()
        poll.register(self._inotify.fd, select.POLLIN)
        poll.register(self._own_news, select.POLLIN)
        news = True
        while not self._closing:
            if news:
                try:
                    connection = connection or connect(self._path, read_only=True)
                    self._look(connection)
                except sqlite3.Error as error:
                    self._tell_all(explained(error, self._path, "follow"))
            poll.poll()
            news = self._inotify.has_news()
            with suppress(BlockingIOError):
                news |= bool(os.eventfd_read(self._own_news))
        if connection is not None:
            connection.close()
        self._tell_all(StoreError(f"cannot follow {self._path} any longer: it was closed"))

    def _look(self, connection: sqlite3.Connection) -> None:
        rows = connection.execute("SELECT id, rollout_id, kind FROM entries WHERE id > ? ORDER BY id", (self._seen,))
        fresh = rows.fetchall()
        if not fresh:
            return
        self._seen = fresh[-1][0]
        by_rollout: dict[str, list[int]] = {}
        by_kind: dict[str, list[int]] = {}
        for number, rollout_id, kind in fresh:
            by_rollout.setdefault(rollout_id, []).append(number)
            by_kind.setdefault(kind, []).append(number)
        with self._lock:
            told = [
                (one, ids)
                for one in self._subscriptions
                if (ids := by_kind.get(one.kind or "") if one.kind else by_rollout.get(one.rollout_id or ""))
            ]
        if told:
            self._tell(told, None)

    def _tell_all(self, error: RollcageError) -> None:
        with self._lock:
            everyone: list[tuple[Subscription, list[int]]] = [(one, []) for one in self._subscriptions]
        self._tell(everyone, error)

    def _tell(self, told: list[tuple[Subscription, list[int]]], error: RollcageError | None) -> None:
        def tell() -> None:
            for one, ids in told:
                one.tell(ids, error)

        # The loop is gone only where the process is on its way out.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell)
