"""`rollcage eval`, `report` and `compare`: whole task sets, what they came to, and two of them side by side."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.codes import EVAL_HELP
from rollcage.cli.completion import batches, named
from rollcage.cli.options import JSON, OTLP, RAY, REPLICAS, REQUIRE, Derived, all_of, seconds

if TYPE_CHECKING:
    from rollcage.api.planning import Evaluation
    from rollcage.cli.batch_screen import BatchScreen
    from rollcage.cluster import Cluster
    from rollcage.evaluation.batches import BatchReport, BatchView
    from rollcage.settings import Settings

FORMAT = click.option(
    "--format", "style", type=click.Choice(["markdown", "json", "csv"]), default="markdown", help="How it is written."
)
OUT = click.option("-o", "--output", metavar="FILE", help="Write it to this file: .md, .json, .csv or .html.")


@click.command("eval", epilog=EVAL_HELP, cls=Derived, made_by="eval_options")
@click.argument("sources", nargs=-1, metavar="SOURCE...", type=click.Path())
@click.option("-m", "--model", "models", multiple=True, metavar="MODEL", help="The model. May be repeated.")
@click.option(
    "--agent",
    "agents",
    multiple=True,
    metavar="NAME",
    help="Which agent works; else the task's own.",
    shell_complete=named,
)
@click.option("-n", "samples", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Samples of each.")
@click.option(
    "--at-once", type=click.IntRange(1, 100_000), show_default="8, or all places of --ray", help="Rollouts at a time."
)
@click.option("--name", default="", help="Names the batch; else a name is made of what is asked.")
@click.option("--resume", metavar="NAME", default="", help="Go on with this batch.", shell_complete=batches)
@click.option(
    "--retry",
    type=click.Choice(["broken", "infrastructure"]),
    help="Run again what broke: all of it, or what infrastructure is to blame for.",
)
@click.option("--accept-changes", is_flag=True, help="Tasks or options changed: run again what changed.")
@click.option(
    "--max-tokens", type=click.IntRange(0), default=0, help="Begin no rollout after this many generated tokens."
)
@click.option("--max-time", type=seconds, metavar="SECONDS", help="Stop everything after so long.")
@click.option("--budget", type=click.FloatRange(0), help="Begin no rollout once this much is spent (prices.toml).")
@click.option(
    "--patience",
    type=seconds,
    metavar="SECONDS",
    default=600.0,
    help="How long to wait for a model that does not answer.",
)
@click.option("--build", "build_image", is_flag=True, help="Build the images of task folders first, where missing.")
@all_of(REQUIRE, OUT, REPLICAS, RAY, OTLP, JSON)
def evaluate(
    sources: tuple[str, ...], resume: str, as_json: bool, output: str | None, build_image: bool, **options: Any
) -> int:
    """Run whole task sets, on one model or several.

    Every task x model x agent is run -n times.
    SOURCE is a task file, a folder of them, or a dataset. MODEL is scripted, vllm, openai/gpt-4o-mini, or an address
    with a model: http://host/v1#model. Ctrl-C and crashes lose nothing: the same command goes on with what is missing.

    \b
    Examples:
      rollcage eval examples -m scripted -n 4
      rollcage eval tasks/ -m vllm -m openai/gpt-4o-mini -n 8 --at-once 16 --name nightly --require 0.8
      rollcage eval --resume nightly --retry infrastructure
      rollcage eval tasks/ -m vllm -n 64 --ray auto
    """
    if bool(sources) == bool(resume):
        raise click.UsageError("name task sources, or a batch to --resume")
    import anyio

    from rollcage.api.planning import Evaluation, prices_in
    from rollcage.cli.nodes import cluster_of
    from rollcage.cli.output import environment
    from rollcage.runner.batch import BatchLimits
    from rollcage.wiring import AT_ONCE, MANY

    settings = environment().sending_traces(options.pop("otlp"), options.pop("otlp_content"))
    settings = settings.with_replicas(options.pop("endpoint_replicas"))
    require, cluster = options.pop("require"), cluster_of(options)
    _check_output(output)
    own = {name: options.pop(name) for name in ("models", "agents", "samples", "name", "retry", "accept_changes")}
    prices, budget = prices_in(settings.prices_path), options.pop("budget")
    limits = BatchLimits(
        at_once=options.pop("at_once") or (MANY if cluster else AT_ONCE),
        max_tokens=options.pop("max_tokens"),
        max_time_s=options.pop("max_time"),
        patience_s=options.pop("patience"),
        budget=budget,
        prices=prices,
        retry=own["retry"] or "",
    )
    asked = Evaluation(
        sources=sources,
        models=own["models"],
        agents=own["agents"],
        n=own["samples"],
        name=own["name"] or resume,
        arguments={name: value for name, value in options.items() if value not in (None, (), {})},
        limits=limits,
        accept_changes=own["accept_changes"],
    )
    if build_image:
        from rollcage.cli.task_images import build_missing
        from rollcage.tasks import open_source

        anyio.run(build_missing, settings, [task.file for name in sources for task in open_source(name) if task.file])
    how = (bool(resume), as_json, output, require, cluster)
    return anyio.run(_evaluate, settings, asked, how, backend_options={"use_uvloop": True})


@click.command()
@click.argument("name", required=False, shell_complete=batches)
@all_of(FORMAT, OUT, JSON)
def report(name: str | None, style: str, output: str | None, as_json: bool) -> int:
    """Show what a batch came to.

    Without a name, list the batches.
    CSV has one line per rollout.

    \b
    Examples:
      rollcage report
      rollcage report nightly
      rollcage report nightly --format csv > nightly.csv
    """
    import anyio

    from rollcage.cli.output import environment

    _check_output(output)
    style = "json" if as_json else style
    return anyio.run(_report if name else _list, environment(), name or "", style, output)


@click.command()
@click.argument("first", shell_complete=batches)
@click.argument("second", shell_complete=batches)
@all_of(FORMAT, JSON)
def compare(first: str, second: str, style: str, as_json: bool) -> int:
    """Compare two batches, paired by task.

    The difference is second less first, with a 95% interval; flipped tasks are listed.

    \b
    Example:
      rollcage compare nightly-mon nightly-tue
    """
    import anyio

    from rollcage.cli.output import environment

    return anyio.run(_compare, environment(), first, second, "json" if as_json else style)


def _check_output(output: str | None) -> None:
    if output and not output.endswith((".md", ".json", ".csv", ".html")):
        raise click.UsageError("-o FILE ends in .md, .json, .csv or .html")


How = tuple[bool, bool, "str | None", "float | None", "Cluster | None"]
"""Whether to resume, whether to write JSON, where to write the report, what is required, and who runs it."""


async def _evaluate(settings: Settings, asked: Evaluation, how: How) -> int:
    import anyio

    from rollcage.cli.batch_screen import BatchScreen
    from rollcage.cli.interrupts import Interrupts, cancelling

    screen = BatchScreen(settings, quiet=how[1])
    interrupts = Interrupts(screen)
    code = codes.INTERRUPTED
    with anyio.CancelScope() as everything:
        interrupts.stop = cancelling(everything)
        async with anyio.create_task_group() as tasks:
            await tasks.start(interrupts.listen)
            code = await _run(settings, asked, how, screen)
            tasks.cancel_scope.cancel()
    if everything.cancelled_caught:
        if screen.view:
            name = screen.view.plan.name
            if not how[1]:
                screen.finish(screen.view.report(running=not screen.mine, prices=dict(asked.limits.prices)))
            if screen.mine:
                screen.note(
                    f"interrupted; nothing is lost: the same command, or rollcage eval --resume {name}, goes on"
                )
            else:
                screen.note("left: another process runs it")
        return interrupts.code or codes.INTERRUPTED
    return code


async def _run(settings: Settings, asked: Evaluation, how: How, screen: BatchScreen) -> int:
    from rollcage.api.evaluate import Batch, open_batch, resumed
    from rollcage.cli.output import write_json
    from rollcage.errors import StoreError, UsageError
    from rollcage.evaluation.batches import NO_MODEL_LABEL
    from rollcage.runner.batch import is_running
    from rollcage.store import Store
    from rollcage.wiring import opened_runner

    resume, as_json, output, require, cluster = how
    limits = asked.limits
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store.open(settings.log_path))
        if resume:
            asked = await resumed(asked.name, store, limits, accept_changes=asked.accept_changes, more=asked.arguments)
        unpriced = [model for model in asked.models if model not in {*limits.prices, "scripted", NO_MODEL_LABEL}]
        if limits.budget is not None and unpriced:
            raise UsageError(
                f"{unpriced[0]} has no price", argument="budget", remedy=f"say what it costs in {settings.prices_path}"
            )
        runner = await stack.enter_async_context(
            opened_runner(settings, store, at_once=limits.at_once, cluster=cluster)
        )
        view, work = await stack.enter_async_context(open_batch(asked, settings, store, runner))
        screen.begin(view)
        with screen.running():
            try:
                view = await work(screen.show)
            except* StoreError:
                resume_it = f"rollcage eval --resume {view.plan.name}"
                screen.note(f"stopped; nothing is lost: {resume_it} goes on once the log can be written")
                raise
            await screen.show(view, screen.mine)
        batch = Batch(view, running=is_running(store, view.plan.name), prices=limits.prices)
    if as_json:
        write_json(batch.report)
    else:
        screen.finish(batch.report)
    if output:
        _write(output, view, batch.report)
    return exit_code(batch.report, require)


def exit_code(found: BatchReport, require: float | None) -> int:
    """Whether everything was scored, and whether it was enough."""
    if not found.all_scored:
        return codes.BROKEN
    if require is not None and any(each.mean is None or each.mean < require for each in found.models):
        return codes.BELOW
    return codes.OK


def _write(path: str, view: BatchView, found: BatchReport) -> None:
    from pathlib import Path

    from rollcage.evaluation.reports import csv_of_rows, html, markdown

    text = {
        ".md": lambda: markdown(found),
        ".json": lambda: found.model_dump_json(indent=1) + "\n",
        ".csv": lambda: csv_of_rows(view.current),
        ".html": lambda: f"<!doctype html><meta charset=utf-8><title>{found.name}</title>{html(found)}",
    }[Path(path).suffix]()
    Path(path).write_text(text, encoding="utf-8")


async def _report(settings: Settings, name: str, style: str, output: str | None) -> int:
    from rollcage.api.planning import prices_in
    from rollcage.cli.output import write_json
    from rollcage.evaluation.reports import csv_of_rows, markdown
    from rollcage.runner.batch import batch_view, is_running
    from rollcage.wiring import opened_log

    async with opened_log(settings) as store:
        view = await batch_view(store, name)
        found = view.report(running=is_running(store, name), prices=prices_in(settings.prices_path))
    if output:
        _write(output, view, found)
    elif style == "json":
        write_json(found)
    else:
        _out(markdown(found) if style == "markdown" else csv_of_rows(view.current))
    return codes.OK


async def _list(settings: Settings, name: str, style: str, output: str | None) -> int:
    from rollcage.cli.output import program, write_json
    from rollcage.runner.batch import batch_view, is_running
    from rollcage.store.batches import batch_names
    from rollcage.wiring import opened_log

    rows = []
    if settings.log_path.exists():
        async with opened_log(settings) as store:
            for each, _ in await batch_names(store):
                rows.append((await batch_view(store, each)).report(running=is_running(store, each)))
    if style == "json":
        write_json([row.model_dump(mode="json", exclude={"tasks", "broken"}) for row in rows])
    elif not rows:
        print(f"no batches yet in {settings.home}; try: {program()} eval examples -m scripted")
    for row in rows if style != "json" else ():
        mean = "-" if row.overall.mean is None else f"{row.overall.mean:.3f}"
        _out(f"{row.name:<40} {row.status:<12} {row.overall.done:>6}/{row.size:<6} mean {mean}\n")
    return codes.OK


async def _compare(settings: Settings, first: str, second: str, style: str) -> int:
    from rollcage.cli.output import write_json
    from rollcage.evaluation.comparison import compare as compare_views
    from rollcage.evaluation.reports import compared, csv_of_comparison
    from rollcage.runner.batch import batch_view
    from rollcage.wiring import opened_log

    async with opened_log(settings) as store:
        found = compare_views(await batch_view(store, first), await batch_view(store, second))
    if style == "json":
        write_json(found)
    else:
        _out(compared(found) if style == "markdown" else csv_of_comparison(found))
    return codes.OK


def _out(text: str) -> None:
    from rollcage.cli.text import clean

    sys.stdout.write(clean(text))
    sys.stdout.flush()
