"""`rollcage audit`: is a task sound before anyone trains on it? Heavy parts are imported when used."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON, reward
from rollcage.errors import TaskError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollcage.results.fold import Rollout
    from rollcage.runner import Runner
    from rollcage.settings import Settings
    from rollcage.tasks import SourcedTask, TaskFile
    from rollcage.tasks.audit import AuditReport, Probe, Probed
    from rollcage.types import Job

_UNFINISHED = ("aborted", "crashed", "internal_error")
"""Tries that say nothing of the task: they are made again."""
LEAST_VERIFY_S = 60.0
"""A hostile try gets at least so much time to be verified; otherwise a few times what the reference took."""


@click.command()
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...", type=click.Path())
@click.option(
    "--repeat", "-k", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of the reference."
)
@click.option("--floor", type=reward, default=0.0, show_default=True, help="What doing nothing may earn.")
@click.option("--at-once", type=click.IntRange(1, 256), default=4, show_default=True, help="Rollouts at a time.")
@click.option("--sandbox", metavar="NAME", help="The kind of box, instead of the task's.")
@click.option("--only", multiple=True, metavar="NAME", help="Try only this broken work or cheat; may be repeated.")
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(),
    help="Add each report as a line of JSON; what it has is not tried again.",
)
@click.option("--build", "build_image", is_flag=True, help="Build the images of task folders first, where missing.")
@click.option("--details", is_flag=True, help="All tries of each task, also where a source has many.")
@click.option("--strict", is_flag=True, help="Advice makes the audit fail, too: shared trust, no reference solution.")
@JSON
def audit(
    tasks: tuple[str, ...],
    repeat: int,
    floor: float,
    at_once: int,
    sandbox: str | None,
    only: tuple[str, ...],
    report: str | None,
    build_image: bool,
    details: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """Say whether tasks are sound before anyone trains on them.

    Each is tried as an honest and as a hostile agent would. Doing nothing must earn nothing, the reference solution
    everything and always, broken work a reward that is low and never none, and none of a library of cheats anything. No
    model is asked. Every try is a rollout in your log, in the group `audit:TASK`. Exit code 1: there are problems.

    A task is a file, a Harbor folder, or a source of many (as `rollcage tasks ls` reads them): then each is one line,
    and a summary comes at the end. With --report an audit that was stopped goes on where it was.

    \b
    Examples:
      rollcage audit examples/paginate.toml
      rollcage audit tasks/*.toml --json | jq '.tasks[] | select(.findings != [])'
      rollcage audit DATASET.jsonl --report audit.jsonl --at-once 16
    """
    import anyio

    from rollcage.cli.output import environment
    from rollcage.tasks import open_source

    sources = [[*open_source(name)] for name in tasks]
    for source in sources:
        if len(source) == 1 and source[0].file is None:
            raise TaskError(source[0].problem)
    found = [task for source in sources for task in source]
    if build_image:
        from rollcage.cli.task_images import build_missing

        anyio.run(build_missing, environment(), [task.file for task in found if task.file])
    options = AuditOptions(repeat, floor, at_once, strict, frozenset(only), sandbox)
    screen = AuditScreen(details or all(len(source) == 1 for source in sources), as_json)
    kept = Path(report) if report else None
    return anyio.run(_audit, environment(), found, options, screen, kept, backend_options={"use_uvloop": True})


class AuditOptions(NamedTuple):
    """How an audit is made."""

    repeat: int = 3
    """How often the reference solution runs."""
    floor: float = 0.0
    """What doing nothing may earn."""
    at_once: int = 4
    strict: bool = False
    """Whether advice makes it fail, too."""
    only: frozenset[str] = frozenset()
    """Only these of the broken works and cheats; none named means all."""
    sandbox: str | None = None
    """The kind of box, instead of the task's."""

    def key(self, digest: str) -> str:
        """What a report is of: the same task, tried in the same way, need not be tried again."""
        tried = [digest, self.repeat, self.floor, sorted(self.only), self.sandbox]
        return hashlib.sha256(json.dumps(tried).encode()).hexdigest()[:24]


class AuditScreen(NamedTuple):
    """How an audit is shown."""

    details: bool
    as_json: bool


async def _audit(
    settings: Settings, tasks: Sequence[SourcedTask], options: AuditOptions, how: AuditScreen, kept: Path | None
) -> int:
    import sys

    import anyio

    from rollcage.cli.audit_report import ReportPrinter
    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import progress, screen
    from rollcage.store import Store
    from rollcage.wiring import opened_runner, provider

    shown = ReportPrinter(None if how.as_json else screen(settings), details=how.details)
    aside = screen(settings, file=sys.stderr)
    images = provider(settings).images
    files = [_prepared(task, options, images.has) for task in tasks]
    before = _read_reports(kept)

    async def work() -> int:
        async with (
            Store.open(settings.log_path) as store,
            opened_runner(settings, store, at_once=options.at_once) as runner,
            anyio.create_task_group() as group,
        ):
            places = anyio.Semaphore(options.at_once)

            async def one(number: int, task: SourcedTask, file: TaskFile) -> None:
                async with places:
                    key = options.key(task.digest)
                    report = before.get(key)
                    if report is None:
                        report = await audited(runner, file, options, progress(aside, f"audit {file.task.id}"))
                        _keep(kept, key, report)
                    shown.put(number, report)

            for number, (task, file) in enumerate(zip(tasks, files, strict=True)):
                if isinstance(file, str):
                    shown.put(number, unreadable(task, file))
                else:
                    group.start_soon(one, number, task, file)
        reports = shown.end()
        failed = any(report.findings if options.strict else report.problems for report in reports)
        if how.as_json:
            tasks_found = [{**report.model_dump(mode="json"), "ok": not report.problems} for report in reports]
            write_json({"ok": not failed, "tasks": tasks_found})
        return codes.BROKEN if failed else codes.OK

    return await stoppable(work)


def _prepared(task: SourcedTask, options: AuditOptions, has_image: Callable[[str], bool]) -> TaskFile | str:
    """The task as it is tried, or why it cannot be."""
    from rollcage.jobs import with_arguments

    why = task.why_not(has_image)
    if task.file is None or why:
        return why
    try:
        return with_arguments(task.file, {"sandbox": options.sandbox})
    except UsageError as error:
        return str(error)


def unreadable(task: SourcedTask, why: str) -> AuditReport:
    """A task that was not tried at all."""
    from rollcage.tasks.audit import AuditFinding, AuditReport

    finding = AuditFinding(kind="cannot_run", what=why, remedy="mend the task, or leave it out")
    return AuditReport(task_id=task.id, path=task.where, findings=(finding,))


def _read_reports(kept: Path | None) -> dict[str, AuditReport]:
    """What an earlier audit found, by what it is of; a line that was cut short is not there."""
    from pydantic import ValidationError

    from rollcage.tasks.audit import AuditReport

    found: dict[str, AuditReport] = {}
    for line in kept.read_text().splitlines() if kept and kept.exists() else ():
        with suppress(ValueError, KeyError, TypeError, ValidationError):
            data = json.loads(line)
            found[data["key"]] = AuditReport.model_validate(data["report"])
    return found


def _keep(kept: Path | None, key: str, report: AuditReport) -> None:
    if kept is None or any(probe.outcome in _UNFINISHED for probe in report.probes):
        return
    whole = not kept.exists() or kept.read_bytes()[-1:] in (b"", b"\n")
    with kept.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps({"key": key, "report": report.model_dump(mode="json")}) + "\n")


async def audited(
    runner: Runner, file: TaskFile, options: AuditOptions, tell: Callable[[int, int, str], None] = lambda *told: None
) -> AuditReport:
    """Try everything on one task; `tell` hears how many tries are done."""
    import anyio

    from rollcage.agents.oracle import has_solution
    from rollcage.tasks.audit import AuditReport, findings_of, first_probes, hostile_probes, proxied_fits
    from rollcage.tasks.cheats import targets_of

    probed: list[Probed] = []
    patches: dict[str, str | None] = {}
    verify_s = 0.0

    async def all_of(probes: Sequence[Probe], file: TaskFile, of: int) -> None:
        async def one(probe: Probe) -> None:
            nonlocal verify_s
            rollout = await runner.wait(await runner.start(_job(file, probe)))
            if probe.kind == "reference":
                verify_s = max(verify_s, rollout.timings.get("verify", 0.0))
            patches[probe.name] = rollout.patch
            probed.append(_probed(probe, rollout))
            tell(len(probed), of, probe.name)

        async with anyio.create_task_group() as tasks:
            for probe in probes:
                tasks.start_soon(one, probe)

    first = first_probes(file.task, options.repeat, reference=has_solution(file.task))
    await all_of(first, file, len(first) + 20)
    targets = targets_of(patches.get("reference")) or sorted(file.task.files)
    hostile = hostile_probes(file.task, [path for path in targets if not path.startswith("/")])
    hostile = [probe for probe in hostile if not options.only or probe.name in options.only]
    await all_of(hostile, _quicker(file, 4 * verify_s), len(first) + len(hostile))
    order = [probe.name for probe in (*first, *hostile)]
    probed.sort(key=lambda each: order.index(each.probe.name))
    best = next((each for each in probed if each.probe.kind == "reference"), probed[0])
    return AuditReport(
        task_id=file.task.id,
        path=str(file.path),
        trust=best.trust,
        proxied_fits=proxied_fits(probed),
        probes=tuple(probed),
        findings=tuple(findings_of(probed, floor=options.floor)),
    )


def _quicker(file: TaskFile, seconds: float) -> TaskFile:
    """The task with less time for its verifier: what hangs must not hold up the audit."""
    limits = file.task.limits
    verify_s = min(limits.verify_timeout_s, max(LEAST_VERIFY_S, seconds))
    task = file.task.model_copy(update={"limits": limits.model_copy(update={"verify_timeout_s": verify_s})})
    return file.model_copy(update={"task": task})


def _job(file: TaskFile, probe: Probe) -> Job:
    from rollcage.tasks.audit import task_proxied
    from rollcage.types import NO_MODEL, AgentSpec, Job

    agent = {"nothing": "nop", "reference": "oracle", "proxied": "oracle"}.get(probe.kind, "shell")
    task = file.task if agent != "shell" else file.task.model_copy(update={"instruction": probe.script})
    if probe.kind == "proxied":
        task = task_proxied(task)
    return Job(
        task=task,
        model=NO_MODEL,
        agent=AgentSpec(name=agent),
        sandbox=file.sandbox,
        group_id=f"audit:{file.task.id}"[:200],
        metadata={"audit": probe.name},
    )


def _probed(probe: Probe, rollout: Rollout) -> Probed:
    from rollcage.tasks.audit import Probed
    from rollcage.types import Outcome

    return Probed(
        probe=probe,
        reward=rollout.reward,
        trust=rollout.trust,
        outcome=rollout.outcome or Outcome.INTERNAL_ERROR,
        error=rollout.error,
        blame=rollout.blame,
        suspicions=tuple(dict.fromkeys(each.code for each in rollout.suspicions if each.code)),
        rollout_id=rollout.id,
        seconds=rollout.timings.get("total", 0.0),
    )
