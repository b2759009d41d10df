"""A batch while it runs: a table that stays in place on a terminal, one plain line per rollout elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollcage.cli.screen import screen
from rollcage.cli.standing import style_of
from rollcage.cli.text import one_line, reward_text, seconds_of
from rollcage.evaluation.batches import BatchReport, BatchView
from rollcage.evaluation.reports import cells, headings, who
from rollcage.evaluation.rows import BatchRow
from rollcage.settings import Settings

MOST_TASKS = 500
"""Batches with more lines than this show their models alone while they run."""
GAP = 2
NAME = 16
"""So much of a task's or a model's name is shown at any width."""
GO_FIRST = ("time", "tokens", "pass@1", "running", "95%", "broken")
"""Columns that a narrow terminal does without, in this order."""


class BatchScreen:
    """Shows one batch."""

    def __init__(self, settings: Settings, *, quiet: bool) -> None:
        """`quiet`: standard output belongs to a document."""
        self._console = screen(settings, file=sys.stderr if quiet else sys.stdout)
        self._quiet = quiet
        self._live: Live | None = None
        self._told: set[str] = set()
        self._cells: set[str] = set()
        """Cells that have a result: one that is run again counts once."""
        self._seen = 0
        self._away: dict[str, str] = {}
        """Models that were told to be away, and why."""
        self.view: BatchView | None = None
        self.mine = True
        """Whether this process runs it, as far as is known."""

    def begin(self, view: BatchView) -> None:
        """The batch is known; what ended before is not told again."""
        done = [row for row in view.current if row.outcome is not None and not row.interrupted]
        self._told = {row.rollout_id for row in done}
        self._cells = {row.cell for row in done}
        self.view, self._seen = view, view.ended
        before = f", {len(done)} of them done before" if done else ""
        self._line(Text(f"batch {one_line(view.plan.name, 100)}: {view.plan.size} rollouts{before}"))
        for task, why in view.skipped.items():
            self._line(Text(f"! cannot run {one_line(task, 80)}: {one_line(why, 300)}", style="yellow"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the table in place while the block lasts, where there is a terminal."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            yield
            return
        self._live = Live(console=self._console, transient=True, auto_refresh=False, redirect_stderr=False)
        try:
            with self._live:
                yield
        finally:
            self._live = None

    async def show(self, view: BatchView, mine: bool) -> None:
        """The batch as it is now; `mine`: whether this process runs it."""
        fresh = view.ended_after(self._seen if view is self.view else 0)
        self.view, self._seen = view, view.ended
        was_mine, self.mine = self.mine, mine
        if self._live is not None:
            self._live.update(self._table(view.report(running=True), mine), refresh=True)
            return
        if was_mine and not mine:
            self.note("another process runs it; this one follows")
        for row in fresh:
            if row.rollout_id not in self._told and view.counts(row) and not row.interrupted:
                self._told.add(row.rollout_id)
                self._cells.add(row.cell)
                self._line(self._row(row, len(self._cells), view.plan.size))
        if view.status == "running":
            self._tell_away(view.paused)

    def finish(self, report: BatchReport) -> None:
        """What it came to."""
        self._console.put([Text(""), self._table(report, mine=True, whole=True)])
        for task, why in report.skipped.items():
            self._line(Text(f"! not run: {one_line(task, 80)}: {one_line(why, 300)}", style="yellow"))
        for each in report.broken:
            told = (
                f"{each.rollout_id}  {one_line(each.task, 40)}  {each.blame or 'nobody'}: {one_line(each.error, 200)}"
            )
            self._line(Text(f"  broken {told}", style="magenta"))

    def note(self, message: str) -> None:
        """Something that is not in the log."""
        self._line(Text(f"! {message}", style="yellow"))

    def leave(self) -> None:
        """Give the terminal back at once."""
        if self._live is not None:
            self._live.stop()

    def _line(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _tell_away(self, paused: Mapping[str, str]) -> None:
        """Who reads lines is told of a model that went away, and once more when it is back."""
        for model, why in paused.items():
            if model not in self._away:
                self.note(f"paused: {one_line(model, 100)} is asked until it is back: {one_line(why, 300)}")
        for model in self._away:
            if model not in paused:
                self.note(f"goes on: {one_line(model, 100)} is back")
        self._away = dict(paused)

    def _row(self, row: BatchRow, number: int, size: int) -> Text:
        earned = "no reward" if row.reward is None else f"reward {reward_text(row.reward)}"
        text = Text(f"[{number}/{size}] {one_line(row.task, 60)}  {one_line(row.model, 60)}  #{row.sample}  ")
        text.append(f"{row.outcome.value if row.outcome else ''}  {earned}", style=style_of(row.outcome, row.reward))
        text.append(f"  {row.tokens:,} tokens  {seconds_of(row.seconds or 0.0)}  {row.rollout_id}")
        if row.error:
            text.append(f"  {one_line(row.error, 200)}")
        return text

    def _table(self, report: BatchReport, mine: bool, *, whole: bool = False) -> RenderableType:
        overall = report.overall
        queued = report.size - overall.done - overall.running
        words = f"{one_line(report.name, 60)}  {report.status}  {overall.done} done, {overall.running} running, "
        words += f"{queued} {'not run' if queued and whole else 'queued'}, {overall.broken} broken"
        if report.eta_s is not None and not whole:
            words += f"  about {seconds_of(report.eta_s)} left"
        if report.cost is not None:
            words += f"  cost {report.cost:.4f}"
        if not mine:
            words += "  (another process runs it)"
        lines: list[RenderableType] = [Text(words, style="bold")]
        if report.why:
            lines.append(Text(f"! {one_line(report.why, 300)}", style="yellow"))
        room = MOST_TASKS if whole else max(0, self._console.height - len(report.models) - 6)
        shown = report.tasks if len(report.tasks) <= room else [each for each in report.tasks if each.running][:room]
        titles = ["task", "model", *headings(report.n)]
        rows = [[one_line(each.task, 40), one_line(who(each), 40), *cells(each)] for each in shown]
        rows += [["all", one_line(who(each), 40), *cells(each)] for each in report.models]
        if not whole:
            place = titles.index("done") + 1
            for row, each in zip(rows, (*shown, *report.models), strict=True):
                row.insert(place, str(each.running))
            titles.insert(place, "running")
        table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
        fitting = _fitting(titles, rows, self._console.width)
        for at, width in fitting.items():
            table.add_column(titles[at], justify="left" if at < 2 else "right", no_wrap=True, width=width)
        for number, row in enumerate(rows):
            if number == len(shown) < len(report.tasks):
                table.add_row(Text(f"{len(report.tasks) - len(shown)} more", style="dim"))
            table.add_row(*(row[at] for at in fitting), style="bold" if number >= len(shown) else "")
        return Group(*lines, table)


def _fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """The columns that there is room for, and how wide: names are cut short before numbers go; no number is cut."""
    whole = [max(cell_len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    need = {at: min(each, NAME) if at < 2 else each for at, each in enumerate(whole)}
    for at in (titles.index(name) for name in GO_FIRST if name in titles):
        if sum(need.values()) + GAP * len(need) > width:
            del need[at]
    for at in (0, 1):  # what is left is for names
        need[at] = max(1, min(whole[at], need[at] + width - sum(need.values()) - GAP * len(need)))
    return need
