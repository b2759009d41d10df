"""A runner on a thread of its own: for trainers, which are synchronous, and stop what they started from any thread."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from rollcage.api.run import Work, arun, open_runner, read
from rollcage.events import Rollout
from rollcage.settings import Settings


@dataclass(frozen=True)
class Wanted:
    """One rollout that somebody wants."""

    task: Work
    """An instruction, a task, or the path of a task file."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those of `RolloutRequest`, by name."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request to the model, whatever the agent asks for."""


class RunningRollout:
    """A rollout that was started."""

    def __init__(self, background: BackgroundRunner, work: Future[Rollout | None], scope: anyio.CancelScope) -> None:
        self._background, self.future, self._scope = background, work, scope

    def wait(self, timeout_s: float | None = None) -> Rollout | None:
        """The rollout, once it has ended; None where it was aborted here. TimeoutError, UsageError."""
        try:
            return self.future.result(timeout_s)
        except CancelledError:
            return None

    def ended(self) -> Rollout:
        """The rollout, once it has ended; RuntimeError where it was aborted here."""
        rollout = self.wait()
        if rollout is None:
            raise RuntimeError("the rollout was aborted")
        return rollout

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

    def start(self, wanted: Wanted) -> RunningRollout:
        """Begin one rollout."""
        self._open()
        work, scope = self._portal.start_task(self._work, wanted)
        return RunningRollout(self, work, scope)

    def run(self, wanted: Sequence[Wanted]) -> list[Rollout]:
        """Run them all to their ends, in this order. The first that makes no sense stops all others."""
        running: list[RunningRollout] = []
        try:
            running += map(self.start, wanted)
            wait([each.future for each in running], return_when=FIRST_EXCEPTION)
            for each in running:
                if each.future.done():
                    each.future.result()
            return [each.ended() for each in running]
        except BaseException:
            for each in running:
                each.abort()
            raise

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

    async def _work(self, wanted: Wanted, *, task_status: TaskStatus[anyio.CancelScope]) -> Rollout | None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            file = read(wanted.task)
            if wanted.extra_body:
                body = {**file.endpoint.extra_body, **wanted.extra_body}
                endpoint = file.endpoint.model_copy(update={"extra_body": body})
                file = file.model_copy(update={"endpoint": endpoint})
            return await arun(file, runner=self._runner, settings=self._settings, **wanted.arguments)
        return None
