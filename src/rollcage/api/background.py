"""A runner on a thread of its own: for trainers, which are synchronous, and stop what they started from any thread."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from rollcage.api.run import Work, arun, arun_group, open_runner, read
from rollcage.errors import UnknownGroup
from rollcage.gateway.pause import Running as Calls
from rollcage.results.fold import Rollout
from rollcage.settings import Settings
from rollcage.tasks import TaskFile

T = TypeVar("T")


@dataclass(frozen=True)
class PendingRollout:
    """One rollout that somebody wants."""

    task: Work
    """An instruction, a task, or the path of a task file."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those of `RolloutRequest`, by name."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request to the model, whatever the agent asks for."""


class RunningRollout(Generic[T]):
    """A rollout that was started, or a group of them."""

    def __init__(self, background: BackgroundRunner, work: Future[T | None], scope: anyio.CancelScope) -> None:
        self._background, self.future, self._scope = background, work, scope

    def wait(self, timeout_s: float | None = None) -> T | None:
        """The rollout, once it has ended; None where it was aborted here. TimeoutError, UsageError."""
        try:
            return self.future.result(timeout_s)
        except CancelledError:
            return None

    def ended(self) -> T:
        """The rollout, once it has ended; RuntimeError where it was aborted here."""
        found = self.wait()
        if found is None:
            raise RuntimeError("the rollout was aborted")
        return found

    def abort(self) -> None:
        """Stop it, and wait until nothing of it is left."""
        if not self.future.done():
            self._background.call(self._scope.cancel)
            self.wait()


class BackgroundRunner:
    """Opened when it is first used; closed by `close`, or with the process."""

    def __init__(self, *, at_once: int = 8, settings: Settings | None = None) -> None:
        """`at_once`: how many rollouts run at a time."""
        self._at_once, self._settings = at_once, settings
        self._lock = threading.Lock()
        self._stack: ExitStack | None = None

    def start(self, wanted: PendingRollout) -> RunningRollout[Rollout]:
        """Begin one rollout."""
        self._open()
        work, scope = self._portal.start_task(self._one, wanted)
        return RunningRollout(self, work, scope)

    def start_group(self, wanted: PendingRollout, n: int, min_usable: int = 0) -> RunningRollout[list[Rollout]]:
        """Begin n rollouts of one task, in one request (see `arun_group`)."""
        self._open()
        work, scope = self._portal.start_task(self._group, wanted, n, min_usable)
        return RunningRollout(self, work, scope)

    def run_groups(self, wanted: Sequence[tuple[PendingRollout, int]], *, min_usable: int = 0) -> list[Rollout]:
        """Run groups of so many rollouts each to their ends; all rollouts, in this order. The first group that makes
        no sense stops all others. `min_usable`: in each group.
        """
        running: list[RunningRollout[list[Rollout]]] = []
        try:
            running += (self.start_group(each, n, min(min_usable, n)) for each, n in wanted)
            wait([each.future for each in running], return_when=FIRST_EXCEPTION)
            for each in running:
                if each.future.done():
                    each.future.result()
            return [rollout for each in running for rollout in each.ended()]
        except BaseException:
            for each in running:
                each.abort()
            raise

    def has_group(self, group_id: str) -> bool:
        """Whether the log has rollouts of that group."""
        self._open()
        try:
            self.call(self._runner.groups.get, group_id)
        except UnknownGroup:
            return False
        return True

    @contextmanager
    def paused(self, policy_version: str = "", *, running: Calls = "finish") -> Iterator[None]:
        """No model call runs inside the block; those that want to begin wait. Afterwards they go on, stamped with
        `policy_version`. `running`: those that run before it `finish`, or are `cut`.
        """
        self._open()
        gateway = self._runner.gateway
        self.call(partial(gateway.pause, running))
        try:
            yield
        except BaseException:
            self.call(gateway.resume)
            raise
        self.call(gateway.resume, policy_version)

    def call(self, function: Any, *args: Any) -> Any:
        """Run a function on the runner's loop."""
        return self._portal.call(function, *args)

    def close(self) -> None:
        """Stop what still runs."""
        with self._lock:
            stack, self._stack = self._stack, None
        if stack is not None:
            atexit.unregister(self.close)
            stack.close()

    def _open(self) -> None:
        with self._lock:
            if self._stack is not None:
                return
            settings = self._settings = self._settings or Settings.from_environ()
            with ExitStack() as stack:
                options = {"use_uvloop": True}
                self._portal = stack.enter_context(start_blocking_portal(backend_options=options, name="rollcage"))
                opening = open_runner(settings=settings, at_once=self._at_once)
                self._runner = stack.enter_context(self._portal.wrap_async_context_manager(opening))
                self._stack = stack.pop_all()
            atexit.register(self.close)

    async def _one(self, wanted: PendingRollout, *, task_status: TaskStatus[anyio.CancelScope]) -> Rollout | None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            return await arun(_file(wanted), runner=self._runner, settings=self._settings, **wanted.arguments)
        return None

    async def _group(
        self, wanted: PendingRollout, n: int, min_usable: int, *, task_status: TaskStatus[anyio.CancelScope]
    ) -> list[Rollout] | None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            more = {"runner": self._runner, "settings": self._settings, **wanted.arguments}
            return await arun_group(_file(wanted), n, min_usable=min_usable, **more)
        return None


def _file(wanted: PendingRollout) -> TaskFile:
    """The task, with the fields that every request gets."""
    file = read(wanted.task)
    body = {**file.endpoint.extra_body, **wanted.extra_body}
    return file.model_copy(update={"endpoint": file.endpoint.model_copy(update={"extra_body": body})})
