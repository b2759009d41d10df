"""How an audit is shown: all tries of a task, or one line for each of many and a summary."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcage.cli.screen import Screen
    from rollcage.tasks.audit import AuditReport


class ReportPrinter:
    """Reports as they come in: shown at once by a line, or in their order with all details."""

    def __init__(self, console: Screen | None, *, details: bool) -> None:
        """`console`: None where nothing is shown."""
        self._console, self._details = console, details
        self._reports: dict[int, AuditReport] = {}
        self._next = 0

    def put(self, number: int, report: AuditReport) -> None:
        """One more, of the task with that number."""
        self._reports[number] = report
        if self._console is None:
            return
        if not self._details:
            show_line(self._console, report)
        while self._details and self._next in self._reports:
            show(self._console, self._reports[self._next])
            self._next += 1

    def end(self) -> list[AuditReport]:
        """All of them, in order; a summary is shown where there are several."""
        reports = [self._reports[number] for number in sorted(self._reports)]
        if self._console is not None and len(reports) > 1:
            self._console.out(summary(reports), highlight=False)
        return reports


def summary(reports: list[AuditReport]) -> str:
    """Many tasks in one line."""
    kinds = Counter(kind for report in reports for kind in {finding.kind for finding in report.problems})
    sound = sum(not report.problems for report in reports)
    unread = kinds.pop("cannot_run", 0)
    parts = [f"{len(reports)} tasks: {sound} sound"]
    if broken := len(reports) - sound - unread:
        parts.append(f"{broken} with problems ({', '.join(f'{kind} {count}' for kind, count in kinds.most_common())})")
    if unread:
        parts.append(f"{unread} cannot run")
    return ", ".join(parts)


def show_line(console: Screen, report: AuditReport) -> None:
    """A task in one line."""
    from rich.text import Text

    from rollcage.cli.screen import marks_for
    from rollcage.cli.text import one_line, reward_text

    marks = marks_for(console)
    earned = {each.probe.name: each.reward for each in report.probes}
    words = {name: "none" if value is None else reward_text(value) for name, value in earned.items()}
    said = [f"{name} {words[name]}" for name in ("nothing", "reference") if name in words]
    kinds = Counter(finding.kind for finding in report.problems)
    if "cannot_run" in kinds:
        said = [f"cannot run: {report.findings[0].what}"]
    else:
        said += [f"{kind} {count}" if count > 1 else kind for kind, count in kinds.items()] or ["sound"]
        said.append(f"trust {report.trust or 'none'}")
    mark = Text(marks.bad, style="red") if report.problems else Text(marks.good, style="green")
    name = one_line(report.task_id or report.path, 60)
    console.put([Text.assemble(mark, " ", (f"{name:<32}", "bold"), "  ", one_line("  ".join(said), 300))])


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
