"""Runs, follows and stops rollouts from the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskStatus
from pydantic import ValidationError

from rollcage.assembly import opened_log, opened_runner
from rollcage.cli import codes
from rollcage.cli.output import Output, Style, environment, write_json
from rollcage.cli.request import wanted
from rollcage.endpoints import opened
from rollcage.errors import SetupError, UsageError
from rollcage.events import AbortRequested, AgentStarted, Entry, Queued, Requeued, Rollout
from rollcage.result import result_of
from rollcage.settings import Settings
from rollcage.tasks import TaskFile
from rollcage.tasks.problems import problems_of
from rollcage.types import Job, Outcome

if TYPE_CHECKING:
    from rollcage.cli.screen import View
    from rollcage.runner import Runner
    from rollcage.store import Store


def run(path: str | None, options: Mapping[str, Any], style: Style) -> int:
    """`rollcage run`."""
    settings, task = environment(), wanted(path, options)
    return anyio.run(run_file, settings, task, style, backend_options={"use_uvloop": True})


def watch(prefix: str, as_json: bool) -> int:
    """`rollcage watch`."""
    return anyio.run(
        _watch, environment(), prefix, "lines" if as_json else "view", backend_options={"use_uvloop": True}
    )


def abort(prefix: str, reason: str, wait_s: float, as_json: bool) -> int:
    """`rollcage abort`."""
    return anyio.run(_abort, environment(), prefix, (reason, wait_s, as_json), backend_options={"use_uvloop": True})


async def run_file(settings: Settings, task: TaskFile, style: Style) -> int:
    """Run one rollout and show it; the exit code."""
    output = Output(settings, style, hint="Ctrl-C aborts")
    interrupts = Interrupts(output)
    with anyio.CancelScope() as everything:
        interrupts.stop = _cancelling(everything)
        async with anyio.create_task_group() as tasks:
            await tasks.start(interrupts.listen)
            rollout = await _rollout(settings, task, output, interrupts)
            output.finish(rollout)
            tasks.cancel_scope.cancel()
    if everything.cancelled_caught:
        output.note("interrupted before the rollout began; nothing was left behind")
        return interrupts.code or codes.INTERRUPTED
    if interrupts.code is not None and rollout.outcome is Outcome.ABORTED:
        return interrupts.code
    return _code(rollout)


def _code(rollout: Rollout) -> int:
    if rollout.outcome is Outcome.SUCCEEDED:
        return codes.SUCCEEDED
    not_ready = rollout.error_code in ("model_unreachable", "machine_not_ready", "log_failed")
    return codes.NOT_READY if not_ready else codes.OTHER


async def _rollout(settings: Settings, task: TaskFile, output: Output, interrupts: Interrupts) -> Rollout:
    """Start one rollout and show it to its end."""
    from rollcage.store import Store

    # The endpoint comes first: where it makes no sense, nothing has been started or written.
    async with (
        opened(task.endpoint, settings, task.task) as endpoint,
        Store.open(settings.log_path) as store,
        opened_runner(settings, store) as runner,
    ):
        try:
            job = Job(
                task=task.task,
                model=endpoint,
                agent=task.agent,
                sandbox=task.sandbox,
                environment=task.environment,
                mode=task.mode,
            )
        except ValidationError as error:
            raise UsageError("\n".join(problems_of(error))) from error
        rollout_id = await runner.start(job)
        interrupts.stop = _aborting(runner, rollout_id, "Ctrl-C")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_show, store, rollout_id, output, interrupts)
            # A log that cannot be written any more ends this wait, though the rollout's log never ends.
            rollout = await runner.wait(rollout_id)
        interrupts.stop = _nothing
        if interrupts.reader_left:
            raise BrokenPipeError
        return rollout


async def _show(store: Store, rollout_id: str, output: Output, interrupts: Interrupts) -> None:
    async def show(entry: Entry) -> None:
        if interrupts.reader_left:
            return
        try:
            output.show(entry)
        except BrokenPipeError:
            interrupts.reader_left = True
            await interrupts.stop()

    await _follow(store, rollout_id, output, show)


async def _follow(store: Store, rollout_id: str, output: Output, show: Callable[[Entry], Awaitable[None]]) -> None:
    """Show the rollout's entries as they come; meanwhile the view hears what the model is saying.

    A rollout whose process dies is ended here, so that nobody waits for it.
    """
    from rollcage.runner import bury

    with output.view.running() if output.view else nullcontext():
        async with anyio.create_task_group() as tasks, aclosing(store.follow(rollout_id)) as entries:
            owner = ""
            tasks.start_soon(bury, store, rollout_id)
            async for entry in entries:
                if isinstance(entry.event, Queued | Requeued):
                    owner = entry.event.owner
                elif isinstance(entry.event, AgentStarted) and output.view:
                    tasks.start_soon(_hear, store, owner, rollout_id, output.view)
                await show(entry)
            tasks.cancel_scope.cancel()


async def _hear(store: Store, owner: str, rollout_id: str, view: View) -> None:
    from rollcage.live import heard
    from rollcage.runner import Owners

    async for delta in heard(Owners.beside(store).socket(owner), rollout_id):
        view.narrator.hear(delta)


async def _watch(settings: Settings, prefix: str, style: Style) -> int:
    output = Output(settings, style, hint="Ctrl-C leaves, the rollout goes on")
    async with opened_log(settings) as store:
        rollout_id = await store.find(prefix)

        async def tell(entry: Entry) -> None:
            output.show(entry)

        await _follow(store, rollout_id, output, tell)
        rollout = await store.rollout(rollout_id)
    output.finish(rollout)
    return _code(rollout)


async def _abort(settings: Settings, prefix: str, how: tuple[str, float, bool]) -> int:
    from rollcage.runner import bury

    reason, wait_s, as_json = how
    async with opened_log(settings) as store:
        rollout_id = await store.find(prefix)
        rollout = await store.rollout(rollout_id)
        already = rollout.ended
        if not already:
            await store.append(rollout_id, AbortRequested(reason=reason or "rollcage abort"))
            with anyio.move_on_after(wait_s):
                follow = store.follow(rollout_id, after=rollout.last_seq)
                async with anyio.create_task_group() as tasks, aclosing(follow) as entries:
                    tasks.start_soon(bury, store, rollout_id)
                    async for _ in entries:
                        pass
                    tasks.cancel_scope.cancel()
            rollout = await store.rollout(rollout_id)
    if not rollout.ended:
        raise SetupError(
            f"{rollout_id} had not ended {wait_s:g} s after it was asked to; give it more --wait, or end the process "
            "that runs it: the next rollcage command then closes its log"
        )
    if as_json:
        write_json(result_of(rollout))
    else:
        outcome = rollout.outcome.value if rollout.outcome else ""
        print(f"{rollout_id} had ended already: {outcome}" if already else f"{rollout_id} ended: {outcome}")
    return codes.SUCCEEDED


class Interrupts:
    """Ctrl-C and its kin: the first one stops what runs, cleanly; the second leaves at once."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.code: int | None = None
        """The exit code that tells of the signal, once one came."""
        self.reader_left = False
        """Whoever read our output went away."""
        self.stop: Callable[[], Awaitable[None]] = _nothing
        """How to stop what runs at the moment."""

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """Wait for signals until cancelled."""
        # What our parent chose to ignore (nohup, background jobs) stays ignored.
        numbers = [
            n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
        ]
        with anyio.open_signal_receiver(*numbers) as signals:
            task_status.started()
            async for number in signals:
                if self.code is not None:
                    self._output.leave()
                    os._exit(self.code)
                self.code = 128 + number
                self._output.note("stopping; once more leaves at once")
                await self.stop()


async def _nothing() -> None:
    pass


def _cancelling(scope: anyio.CancelScope) -> Callable[[], Awaitable[None]]:
    async def stop() -> None:
        scope.cancel()

    return stop


def _aborting(runner: Runner, rollout_id: str, reason: str) -> Callable[[], Awaitable[None]]:
    async def stop() -> None:
        await runner.abort(rollout_id, reason)

    return stop
