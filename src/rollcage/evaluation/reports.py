"""A batch, and two compared, as Markdown, CSV and HTML. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from html import escape

from rollcage.evaluation.batches import BatchReport
from rollcage.evaluation.comparison import Comparison, MeanDifference, ModelChange
from rollcage.evaluation.rows import BatchRow
from rollcage.evaluation.statistics import Statistics

COLUMNS = ("mean", "95%", "pass@1", "pass@k", "done", "broken", "tokens", "time")
"""What every table of a batch says."""


def number(value: float | None, digits: int = 3) -> str:
    """A number as tables show it; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(low: float | None, high: float | None) -> str:
    """An interval as tables show it."""
    return "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def cells(of: Statistics) -> list[str]:
    """The `COLUMNS` of one line, as `headings` names them."""
    return [
        number(of.mean),
        interval(of.low, of.high),
        number(of.pass_at_1),
        *([number(of.pass_at_k)] if of.k > 1 else []),
        f"{of.done}/{of.total}",
        str(of.broken),
        f"{of.tokens:,}",
        "-" if of.seconds is None else f"{of.seconds:.1f} s",
    ]


def headings(k: int) -> list[str]:
    """The same as titles; of one sample each there is but one pass@k."""
    return [f"pass@{k}" if name == "pass@k" else name for name in COLUMNS if k > 1 or name != "pass@k"]


def signed(value: float | None) -> str:
    """A difference as tables show it."""
    return "-" if value is None else f"{value:+.3f}"


def change(of: MeanDifference) -> tuple[str, str]:
    """A difference and its interval, as tables show them."""
    return signed(of.difference), interval(of.low, of.high)


def who(of: Statistics | ModelChange) -> str:
    """The model, and the agent where one was named."""
    return f"{of.model} ({of.agent})" if of.agent else of.model


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    return [line(titles), "|" + "---|" * len(titles), *map(line, rows)]


def markdown(report: BatchReport) -> str:
    """A batch: by model, by task, what broke, what could not be run."""
    k = report.n
    lines = [f"# {report.name}", "", _headline(report), ""]
    lines += _grid(["model", *headings(k)], ([who(each), *cells(each)] for each in report.models))
    by_task = ([each.task, who(each), *cells(each)] for each in report.tasks)
    lines += ["", *_grid(["task", "model", *headings(k)], by_task)]
    if report.broken:
        lines += ["", "Without a reward:", ""]
        titles = ["rollout", "task", "model", "sample", "blame", "error"]
        lines += _grid(
            titles,
            (
                [each.rollout_id, each.task, each.model, str(each.sample), each.blame or "-", each.error]
                for each in report.broken
            ),
        )
    if report.skipped:
        lines += ["", "Cannot be run here:", "", *_grid(["task", "why"], report.skipped.items())]
    return "\n".join(lines) + "\n"


def _headline(report: BatchReport) -> str:
    overall = report.overall
    words = (
        f"{report.status}: {overall.done} of {report.size} rollouts, {overall.scored} scored, {overall.broken} broken"
    )
    if report.cost is not None:
        words += f", cost {report.cost:.4f}"
    return f"{words} ({report.why})" if report.why else words


def compared(found: Comparison) -> str:
    """Two batches side by side, as Markdown."""
    lines = [f"# {found.second} against {found.first}", ""]
    if found.difference is None:
        lines.append("They share no task that counts in both.")
    else:
        span = "" if found.low is None else f", 95% {interval(found.low, found.high)}"
        lines.append(
            f"{found.tasks} task{'s' * (found.tasks != 1)}: {number(found.before)} -> {number(found.after)}, "
            f"difference {signed(found.difference)}{span} (paired by task)"
        )
        if all(each.before == each.after for each in found.by_task):
            lines.append("No task differs.")
        elif found.low is None or found.high is None:
            alike = "All tasks differ by the same: that" if found.tasks > 1 else "One task"
            lines.append(f"{alike} is too little to tell how sure this is.")
        elif found.low <= 0 <= found.high:
            lines.append("The interval holds 0: this difference may be chance.")
    lines += [
        "",
        *_grid(
            ["per rollout", found.first, found.second],
            [
                ["tokens", *(f"{value:.0f}" for value in found.tokens)],
                ["time", *("-" if value is None else f"{value:.1f} s" for value in found.seconds)],
            ],
        ),
    ]
    if found.by_model:
        models = (
            [who(each), number(each.before), number(each.after), *change(each), str(each.tasks)]
            for each in found.by_model
        )
        lines += ["", *_grid(["model", found.first, found.second, "difference", "95%", "tasks"], models)]
    flipped = [each for each in found.by_task if each.flipped]
    if flipped:
        rows = ([each.task, each.flipped, number(each.before), number(each.after)] for each in flipped)
        lines += ["", "Flipped:", "", *_grid(["task", "", found.first, found.second], rows)]
    for words, names in (
        (f"Only in {found.first}", found.only_first),
        (f"Only in {found.second}", found.only_second),
        ("Not the same task in both", found.changed),
    ):
        if names:
            lines += ["", f"{words}: {', '.join(names)}"]
    return "\n".join(lines) + "\n"


def csv_of_rows(rows: Iterable[BatchRow]) -> str:
    """One line per rollout."""
    dicts = [row.to_dict() for row in rows]
    return _csv(list(dicts[0]) if dicts else list(BatchRow._fields), [list(each.values()) for each in dicts])


def csv_of_comparison(found: Comparison) -> str:
    """One line per task."""
    rows = [[each.task, each.before, each.after, each.after - each.before, each.flipped] for each in found.by_task]
    return _csv(["task", found.first, found.second, "difference", "flipped"], rows)


def _csv(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(rows)
    return out.getvalue()


def html(report: BatchReport) -> str:
    """For notebooks."""

    def line(values: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values) + "</tr>"

    rows = "".join(line([who(each), *cells(each)], "td") for each in report.models)
    rows += "".join(line([f"{each.task}: {who(each)}", *cells(each)], "td") for each in report.tasks[:200])
    head = line(["", *headings(report.n)], "th")
    return f"<p><b>{escape(report.name)}</b> {escape(_headline(report))}</p><table>{head}{rows}</table>"
