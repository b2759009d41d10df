"""`rollcage audit`: is a task sound before anyone trains on it? Heavy parts are imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON, reward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollcage.cli.screen import Screen
    from rollcage.events import Rollout
    from rollcage.runner import Runner
    from rollcage.settings import Settings
    from rollcage.tasks import TaskFile
    from rollcage.tasks.audit import AuditReport, Probe, Probed
    from rollcage.types import Job

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
@click.option("--strict", is_flag=True, help="Advice makes the audit fail, too: shared trust, no reference solution.")
@JSON
def audit(
    tasks: tuple[str, ...],
    repeat: int,
    floor: float,
    at_once: int,
    sandbox: str | None,
    only: tuple[str, ...],
    strict: bool,
    as_json: bool,
) -> int:
    """Say whether tasks are sound before anyone trains on them.

    Each is tried as an honest and as a hostile agent would. Doing nothing must earn nothing, the reference solution
    everything and always, broken work a reward that is low and never none, and none of a library of cheats anything. No
    model is asked. Every try is a rollout in your log, in the group `audit:TASK`. Exit code 1: there are problems.

    \b
    Examples:
      rollcage audit examples/paginate.toml
      rollcage audit tasks/*.toml --json | jq '.tasks[] | select(.findings != [])'
    """
    import anyio

    from rollcage.cli.output import environment
    from rollcage.jobs import task_file

    paths = [path for name in tasks for path in _paths(name)]
    files = [task_file(path, {"sandbox": sandbox}) for path in paths]
    options = AuditOptions(repeat, floor, at_once, strict, frozenset(only))
    return anyio.run(_audit, environment(), files, options, as_json, backend_options={"use_uvloop": True})


def _paths(name: str) -> list[str]:
    """The tasks in a folder of them; else what is named itself."""
    from pathlib import Path

    from rollcage.tasks import open_source
    from rollcage.tasks.harbor import is_folder_task

    if not Path(name).is_dir() or is_folder_task(Path(name)):
        return [name]
    return [task.where for task in open_source(name)]


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


async def _audit(settings: Settings, files: Sequence[TaskFile], options: AuditOptions, as_json: bool) -> int:
    import sys

    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen
    from rollcage.store import Store
    from rollcage.wiring import opened_runner

    console, aside = screen(settings), screen(settings, file=sys.stderr)

    async def work() -> int:
        reports: list[AuditReport] = []
        async with (
            Store.open(settings.log_path) as store,
            opened_runner(settings, store, at_once=options.at_once) as runner,
        ):
            for file in files:
                reports.append(await audited(runner, file, options, _progress(aside, file)))
                if not as_json:
                    show(console, reports[-1])
        failed = any(report.findings if options.strict else report.problems for report in reports)
        if as_json:
            tasks = [{**report.model_dump(mode="json"), "ok": not report.problems} for report in reports]
            write_json({"ok": not failed, "tasks": tasks})
        return codes.BROKEN if failed else codes.OK

    return await stoppable(work)


def _progress(aside: Screen, file: TaskFile) -> Callable[[int, int, str], None]:
    """Tells on stderr how far the audit of one task is: one line that changes, or one line where nobody watches."""

    def tell(done: int, of: int, name: str) -> None:
        line = f"audit {file.task.id}: {done} of {of}"
        if aside.is_terminal and not aside.is_dumb_terminal:
            aside.out(f"\r\x1b[2K{line}  {name}" if done < of else "\r\x1b[2K", end="", highlight=False)
        elif done == of:
            aside.out(line, highlight=False)

    return tell


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


def show(console: Screen, report: AuditReport) -> None:
    """The report for people: a table of what was tried, then what is wrong and what to do about it."""
    from rich.console import RenderableType
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from rollcage.cli.screen import marks_for
    from rollcage.cli.text import one_line, reward_text

    marks = marks_for(console)
    wrong = {finding.probe for finding in report.problems}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", width=1)
    table.add_column("tried", no_wrap=True)
    table.add_column("reward", justify="right")
    table.add_column("what")
    for each in report.probes:
        bad = each.probe.name in wrong or (each.probe.kind == "reference" and "reference" in wrong)
        mark = Text(marks.bad, style="red") if bad else Text(marks.good, style="green")
        earned = "none" if each.reward is None else reward_text(each.reward)
        what = Text(each.probe.what, style="dim")
        table.add_row(mark, each.probe.name, Text(earned, style="red" if bad else ""), what)
    count = len(report.problems)
    verdict = (f"{count} problem{'s' * (count > 1)}", "bold red") if count else ("sound", "bold green")
    head = Text.assemble((one_line(report.task_id or report.path, 80), "bold"), "  ", verdict)
    head.append(f"  trust: {report.trust or 'none'}", style="dim")
    lines: list[RenderableType] = [head, Padding(table, (0, 0, 0, 2), expand=False)]
    if report.proxied_fits is not None:
        fits = 'fit these tests: say `isolation = "proxied"`' if report.proxied_fits else "do not fit these tests"
        lines.append(Text(f"  proxied checks {fits}", style="dim"))
    for finding in report.findings:
        style = "red" if finding.level == "problem" else "yellow"
        words = Text.assemble((f"{finding.kind}: ", style), one_line(finding.what, 600))
        where = f"  (rollcage show {finding.rollout_id})" if finding.rollout_id else ""
        lines.append(Padding(words, (0, 0, 0, 2)))
        lines.append(Padding(Text(f"{finding.remedy}{where}", style="dim"), (0, 0, 0, 4)))
    console.put([*lines, Text("")])
