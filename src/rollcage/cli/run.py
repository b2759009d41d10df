"""`rollcage run`, `watch` and `abort`: run a rollout, follow one, stop one. Heavy parts are imported when used."""

from __future__ import annotations

from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.codes import HELP
from rollcage.cli.options import JSON, OTLP, REQUIRE, ROLLOUT, Derived, all_of, seconds
from rollcage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollcage.cli.interrupts import Interrupts
    from rollcage.cli.output import Output, Style
    from rollcage.cli.screen import View
    from rollcage.events import Entry
    from rollcage.results.fold import Rollout
    from rollcage.settings import Settings
    from rollcage.store import Store
    from rollcage.tasks import TaskFile


@click.command(epilog=HELP, cls=Derived)
@click.argument("task", required=False, metavar="[TASK]", type=click.Path())
@all_of(REQUIRE, JSON)
@click.option("--build", "build_image", is_flag=True, help="Build the image of a task folder first, if it is missing.")
@click.option("--follow", is_flag=True, help="With --json: every event as one line, as it happens.")
@OTLP
def run(task: str | None, as_json: bool, follow: bool, build_image: bool, require: float | None, **options: Any) -> int:
    """Run one rollout and show it as it happens.

    The task comes from a file, from --instruction, or from both: options win over the file, and --setup and --verify
    add to it. Ctrl-C aborts cleanly; a second one leaves at once. A task that brings its own solution runs against the
    scripted model unless an endpoint is named. With -n it is a group: a line for each rollout that has ended, then
    what they come to.

    \b
    Examples:
      rollcage run examples/paginate.toml
      rollcage run TASK.toml --endpoint vllm --require 1
      rollcage run TASK.toml -e vllm -n 8 --min-usable 6 --group-id step-1
      rollcage run tasks/fix-the-build --build --agent oracle
      rollcage run -i "Write hello.py" --verify "python3 hello.py" -e openai --json | jq .reward
    """
    if follow and not as_json:
        raise click.UsageError("--follow goes with --json (the view without --json is live anyway)")
    import anyio

    from rollcage.cli.group import group_size, run_group
    from rollcage.cli.output import environment
    from rollcage.cli.request import typed_task
    from rollcage.cli.text import clean

    settings = environment().sending_traces(options.pop("otlp"), options.pop("otlp_content"))
    size = group_size(options)
    if size and follow:
        raise click.UsageError("--follow is for one rollout, and -n makes a group")
    file = typed_task(task, options)
    for notice in file.notices:
        click.echo(f"rollcage: {clean(notice)}", err=True)
    if build_image:
        from rollcage.cli.task_images import build_missing

        anyio.run(build_missing, settings, [file])
    _check_images(settings, file)
    if size:
        return anyio.run(run_group, settings, file, size, as_json, require, backend_options={"use_uvloop": True})
    style: Style = "lines" if follow else "json" if as_json else "view"
    return anyio.run(run_file, settings, file, style, require, backend_options={"use_uvloop": True})


def _check_images(settings: Settings, file: TaskFile) -> None:
    """A task folder names images that nobody typed: say which folder wants one that is not here."""
    from rollcage.tasks import SourcedTask
    from rollcage.tasks.harbor import is_folder_task
    from rollcage.wiring import provider

    if is_folder_task(file.path):
        task = SourcedTask(id=file.task.id, where=str(file.path), file=file)
        if why := task.why_not(provider(settings).images.has):
            raise UsageError(f"{file.path}: {why}")


@click.command(epilog=HELP)
@ROLLOUT
@all_of(REQUIRE, JSON)
def watch(rollout_id: str, require: float | None, as_json: bool) -> int:
    """Follow a rollout live.

    It may run in any process. Ctrl-C leaves; the rollout goes on. With --json: every event as one line.

    \b
    Example:
      rollcage watch 0a1b
    """
    import anyio

    from rollcage.cli.output import environment

    style: Style = "lines" if as_json else "view"
    return anyio.run(_watch, environment(), rollout_id, style, require, backend_options={"use_uvloop": True})


@click.command()
@ROLLOUT
@click.option("--reason", default="", help="Kept in the log.")
@click.option(
    "--wait",
    "wait_s",
    type=seconds,
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="How long to wait for its end.",
)
@JSON
def abort(rollout_id: str, reason: str, wait_s: float, as_json: bool) -> int:
    """Stop a rollout and wait for its end.

    It may run in any process.

    \b
    Example:
      rollcage abort 0a1b --reason "wrong model"
    """
    import anyio

    from rollcage.cli.output import environment

    how = (reason, wait_s, as_json)
    return anyio.run(_abort, environment(), rollout_id, how, backend_options={"use_uvloop": True})


async def run_file(settings: Settings, task: TaskFile, style: Style, require: float | None = None) -> int:
    """Run one rollout and show it; the exit code."""
    import anyio

    from rollcage.cli.interrupts import Interrupts, cancelling
    from rollcage.cli.output import Output
    from rollcage.cli.standing import exit_code
    from rollcage.types import Outcome

    output = Output(settings, style, hint="Ctrl-C aborts")
    interrupts = Interrupts(output)
    with anyio.CancelScope() as everything:
        interrupts.stop = cancelling(everything)
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
    return exit_code(rollout, require)


async def _rollout(settings: Settings, task: TaskFile, output: Output, interrupts: Interrupts) -> Rollout:
    """Start one rollout and show it to its end."""
    import anyio

    from rollcage.cli.interrupts import nothing
    from rollcage.cli.prepare import prepare
    from rollcage.jobs import job_of, opened_model
    from rollcage.store import Store
    from rollcage.wiring import opened_runner

    # The endpoint comes first: where it makes no sense, nothing has been started or written.
    async with (
        opened_model(task, settings) as endpoint,
        Store.open(settings.log_path) as store,
        opened_runner(settings, store, narrated=True) as runner,
    ):
        job = job_of(task, endpoint)
        if job.sandbox.backend == "local":
            # A rollout does it too, but without a word: the first download takes a while.
            await prepare(settings, job.agent.name)
        rollout_id = await runner.start(job)

        async def abort() -> None:
            await runner.abort(rollout_id, "Ctrl-C")

        interrupts.stop = abort
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_show, store, rollout_id, output, interrupts)
            # A log that cannot be written any more ends this wait, though the rollout's log never ends.
            rollout = await runner.wait(rollout_id)
        interrupts.stop = nothing
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
    """Show the rollout's entries as they come; meanwhile the view shows the model's answer as it is generated.

    A rollout whose process dies is ended here, so that nobody waits for it.
    """
    import anyio

    from rollcage.events import AgentStarted, Queued, Requeued
    from rollcage.runner import end_if_owner_dies

    with output.view.running() if output.view else nullcontext():
        async with anyio.create_task_group() as tasks, aclosing(store.follow(rollout_id)) as entries:
            owner = ""
            tasks.start_soon(end_if_owner_dies, store, rollout_id)
            async for entry in entries:
                if isinstance(entry.event, Queued | Requeued):
                    owner = entry.event.owner
                elif isinstance(entry.event, AgentStarted) and output.view:
                    tasks.start_soon(_show_deltas, store, owner, rollout_id, output.view)
                await show(entry)
            tasks.cancel_scope.cancel()


async def _show_deltas(store: Store, owner: str, rollout_id: str, view: View) -> None:
    from rollcage.runner import Owners
    from rollcage.runner.live import subscribe

    async for delta in subscribe(Owners.beside(store).socket(owner), rollout_id):
        view.narrator.hear(delta)


async def _watch(settings: Settings, prefix: str, style: Style, require: float | None) -> int:
    from rollcage.cli.output import Output
    from rollcage.cli.standing import exit_code
    from rollcage.wiring import opened_log

    output = Output(settings, style, hint="Ctrl-C leaves, the rollout goes on")
    async with opened_log(settings) as store:
        rollout_id = await store.find(prefix)

        async def show(entry: Entry) -> None:
            output.show(entry)

        await _follow(store, rollout_id, output, show)
        rollout = await store.rollout(rollout_id)
    output.finish(rollout)
    return exit_code(rollout, require)


async def _abort(settings: Settings, prefix: str, how: tuple[str, float, bool]) -> int:
    import anyio

    from rollcage.cli.output import write_json
    from rollcage.errors import SetupError
    from rollcage.events import AbortRequested
    from rollcage.results.result import result_of
    from rollcage.runner import end_if_owner_dies
    from rollcage.wiring import opened_log

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
                    tasks.start_soon(end_if_owner_dies, store, rollout_id)
                    async for _ in entries:
                        pass
                    tasks.cancel_scope.cancel()
            rollout = await store.rollout(rollout_id)
    if not rollout.ended:
        raise SetupError(
            f"{rollout_id} had not ended {wait_s:g} s after it was asked to",
            remedy="give it more --wait, or end the process that runs it: the next rollcage command closes its log",
        )
    if as_json:
        write_json(result_of(rollout))
    else:
        outcome = rollout.outcome.value if rollout.outcome else ""
        print(f"{rollout_id} had ended already: {outcome}" if already else f"{rollout_id} ended: {outcome}")
    return codes.OK
