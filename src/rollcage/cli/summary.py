"""What a rollout came to, on one screen: reward, turns, checks, files, timings, and what to try next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollcage.cli.narrator import (
    ACCENT,
    BAD,
    DIM,
    GOOD,
    SCRIPTED,
    STRONG,
    WARN,
    Marks,
    completion_tokens,
    counted,
    prompt_tokens,
)
from rollcage.cli.standing import style_of
from rollcage.cli.text import clean, clip, one_line, reward_text, seconds_of
from rollcage.events import Entry
from rollcage.results.fold import Rollout
from rollcage.types import CommandResult, Outcome, Stage, Turn

if TYPE_CHECKING:
    from rollcage.store import Summary

FILES_SHOWN = 12
COMMANDS_SHOWN = 12
GAP = 2
"""Blanks between the columns of a table."""
ALWAYS = ("rollout", "reward", "state")
"""Columns of the list that are shown at any width."""


def headline(rollout: Rollout, marks: Marks) -> Iterator[Text]:
    """How it ended, in a line or two."""
    yield Text("")
    yield _verdict(rollout, marks)
    if rollout.error:
        scored = rollout.outcome is not None and rollout.outcome.scored
        yield Text(f"  {one_line(rollout.error, 1000)}", style=WARN if scored else BAD)
    yield from _scripted(rollout)


def summary_of(
    rollout: Rollout, marks: Marks, log_path: Path, *, brief: bool = False, program: str = "rollcage"
) -> Iterator[RenderableType]:
    """The summary of one rollout; `brief` leaves out what the live view has shown, `program` is how to call us."""
    yield from headline(rollout, marks)
    for title, body in (
        ("task", None if brief else _asked(rollout)),
        ("turns", turns_table(rollout.turns, marks) if rollout.turns else None),
        ("setup", _commands(rollout.setup, marks) if rollout.setup and not brief else None),
        ("verify", _commands(rollout.verify, marks) if rollout.verify and not brief else None),
        ("suspicions", _suspicions(rollout) if rollout.suspicions and not brief else None),
        ("judged again", _verdicts(rollout, marks) if rollout.verdicts else None),
        ("files", _files(rollout) if rollout.files or rollout.files_extra else None),
        ("time", _timings(rollout, marks) if rollout.timings else None),
        ("log", _where(rollout, log_path, program)),
    ):
        if body is not None:
            yield Text("")
            yield Text(title, style=STRONG)
            yield Padding(body, (0, 0, 0, 2), expand=False)


def turns_table(turns: Sequence[Turn], marks: Marks) -> Table:
    """One row per model call, and their sums."""
    table = _grid(("turn", "left"), ("prompt", "right"), ("sampled", "right"), ("mean logprob", "right"))
    table.add_column("finish")
    table.add_column("time", justify="right")
    table.add_column("trainable", overflow="fold")
    for turn in turns:
        table.add_row(
            str(turn.index + 1) + ("" if turn.purpose.value == "agent" else f" {turn.purpose.value}"),
            f"{prompt_tokens(turn):,}",
            f"{completion_tokens(turn):,}",
            _mean_logprob(turn),
            Text(one_line(turn.error or turn.finish_reason or "cut", 60), style=BAD if turn.error else ""),
            seconds_of(turn.seconds),
            Text(marks.good, style=GOOD)
            if turn.trainable
            else Text(f"no: {one_line(turn.untrainable_reason or 'unknown reason', 80)}", style=WARN),
        )
    if len(turns) > 1:
        table.add_section()
        total = (f"{sum(map(prompt_tokens, turns)):,}", f"{sum(map(completion_tokens, turns)):,}")
        trainable = sum(turn.trainable for turn in turns)
        seconds = seconds_of(sum(turn.seconds for turn in turns))
        table.add_row("all", *total, "", "", seconds, f"{trainable} of {len(turns)}", style=DIM)
    return table


def turn_details(rollout: Rollout, marks: Marks) -> Iterator[RenderableType]:
    """What the model answered in each turn, whole."""
    yield from _scripted(rollout)
    yield turns_table(rollout.turns, marks)
    yield Text("")
    for turn in rollout.turns:
        sizes = f"{prompt_tokens(turn):,} {marks.arrow} {counted(completion_tokens(turn), 'token')}"
        head = Text.assemble((f"{marks.turn} turn {turn.index + 1}", STRONG), (f"  {sizes}  ", DIM))
        head.append(one_line(turn.error or turn.finish_reason or "cut", 200), style=BAD if turn.error else DIM)
        yield head
        for name, style in (("reasoning_content", DIM), ("content", "")):
            words = turn.message.get(name)
            if isinstance(words, str) and words.strip():
                yield Padding(Text(clean(words.strip()), style=style), (0, 0, 0, 4))
        calls = turn.message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                text = Text.assemble((f"{marks.tool} {one_line(str(function.get('name')), 60)} ", ACCENT))
                text.append(clean(str(function.get("arguments"))))
                yield Padding(text, (0, 0, 0, 4))
        yield Text("")


def prompt_details(turn: Turn, marks: Marks) -> Iterator[RenderableType]:
    """What the model saw in a turn: every message, the names of its tools, and what else was asked."""
    told = {name: value for name, value in turn.request.items() if name not in ("messages", "tools")}
    head = Text.assemble((f"{marks.turn} turn {turn.index + 1}", STRONG), (f"  {prompt_tokens(turn):,} tokens", DIM))
    yield head.append(f"  {one_line(json.dumps(told, ensure_ascii=False), 2000)}", style=DIM)
    tools = turn.request.get("tools")
    names = [_named(each) for each in tools] if isinstance(tools, list) else []
    if names:
        yield Text.assemble(("tools ", DIM), (one_line(", ".join(names), 2000), ACCENT))
    messages = turn.request.get("messages")
    for message in messages if isinstance(messages, list) else []:
        said = dict(message) if isinstance(message, dict) else {"content": message}
        yield Text("")
        yield Text(one_line(str(said.pop("role", "message")), 40), style=STRONG)
        content = said.pop("content", None)
        if isinstance(content, list):
            texts = [each.get("text") if isinstance(each, dict) else None for each in content]
            content = "\n".join(
                str(text) if text is not None else json.dumps(each) for text, each in zip(texts, content, strict=True)
            )
        if content:
            yield Padding(Text(clean(str(content))), (0, 0, 0, 4))
        for name, value in said.items():
            if value:
                words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield Padding(Text.assemble((f"{one_line(name, 40)} ", DIM), clean(words)), (0, 0, 0, 4))


def _named(tool: object) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    return str(function.get("name")) if isinstance(function, dict) else str(function)


def event_lines(entries: Iterable[Entry]) -> Iterator[Text]:
    """One line per entry of the log."""
    start: float | None = None
    for entry in entries:
        start = entry.time if start is None else start
        body = entry.event.model_dump(mode="json", exclude={"kind"})
        shown = ", ".join(f"{name}={json.dumps(value)[:400]}" for name, value in body.items())
        head = Text.assemble((f"{entry.seq:>5} ", DIM), (f"{entry.time - start:>9.3f} s  ", DIM))
        head.append(f"{entry.event.kind:<16} ", style=ACCENT)
        yield head.append(one_line(shown, 2000))


def list_table(rows: Sequence[Summary], now: float, width: int = 110) -> Table:
    """One row per rollout, newest first, in as many columns as `width` has room for: id, reward and state always."""
    cells = {
        "rollout": [Text(one_line(row.id, 40)) for row in rows],
        "reward": [Text(reward_text(row.reward) if row.reward is not None else "-", style=_style(row)) for row in rows],
        "state": [Text(row.outcome.value if row.outcome else row.stage.value, style=_style(row)) for row in rows],
        "task": [Text(_task_cell(row)) for row in rows],
        "turns": [Text(str(row.turns)) for row in rows],
        "started": [Text(f"{seconds_of(max(0.0, now - row.created_at))} ago") for row in rows],
        "tokens": [Text(f"{row.tokens:,}") for row in rows],
        "model": [Text(one_line(row.model, 40)) for row in rows],
    }
    widths = {name: max(len(name), *(cell.cell_len for cell in column)) for name, column in cells.items()}
    # The rightmost columns go first; then ids are cut to a prefix, which every command takes; the reward stays whole.
    names = list(cells)
    while len(names) > len(ALWAYS) and _width(names, widths) > width:
        names.pop()
    for name, least in (("rollout", 8), ("state", 1), ("rollout", 1)):
        over = max(0, _width(names, widths) - width)
        widths[name] = max(least, widths[name] - over)
    table = _grid()
    for name in names:
        justify: Literal["left", "right"] = "right" if name in ("reward", "turns", "tokens") else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="crop", width=widths[name])
    for row in zip(*(cells[name] for name in names), strict=True):
        table.add_row(*row)
    return table


def _task_cell(row: Summary) -> str:
    name = one_line(row.task_id or row.instruction, 32)
    return f"{one_line(name, 18)} (again {row.reverifies[:8]})" if row.reverifies else name


def _width(names: Sequence[str], widths: Mapping[str, int]) -> int:
    return sum(widths[name] + GAP for name in names) - GAP


def _style(row: Summary) -> str:
    return style_of(row.outcome, row.reward)


def _scripted(rollout: Rollout) -> Iterator[Text]:
    if rollout.job.model.kind == "scripted":
        yield Text(f"  {SCRIPTED}", style=f"{STRONG} {WARN}")


def _verdict(rollout: Rollout, marks: Marks) -> Text:
    total = rollout.reward
    style = style_of(rollout.outcome, total)
    state = rollout.outcome.value if rollout.outcome else f"running: {rollout.stage.value}"
    text = Text.assemble((f"{marks.end} {state}", f"{STRONG} {style}"), "   ")
    if total is not None:
        text.append(f"reward {reward_text(total)}", style=f"{STRONG} {style}")
        text.append(f" {marks.dot} {rollout.trust}", style=DIM if rollout.trust == "isolated" else WARN)
        text.append(_parts_text(rollout), style=DIM)
    else:
        unscored = rollout.outcome is Outcome.FINISHED
        why = "no reward: nothing to verify" if unscored else "no reward" if rollout.ended else "no reward yet"
        why += f" {marks.dot} blame: {rollout.blame.value}" if rollout.blame else ""
        text.append(why, style=STRONG)
    sampled = sum(map(completion_tokens, rollout.turns))
    text.append(f"   {counted(len(rollout.turns), 'turn')} {marks.dot} {counted(sampled, 'token')} sampled", style=DIM)
    if total_s := rollout.timings.get("total"):
        text.append(f" {marks.dot} {seconds_of(total_s)}", style=DIM)
    return text


def _parts_text(rollout: Rollout) -> str:
    parts = rollout.reward_parts
    if rollout.score and rollout.score.source == "checks":
        return f" ({sum(value == 1 for value in parts.values())} of {counted(len(parts), 'test')})"
    if len(parts) < 2:
        return ""
    mean = "mean of " if rollout.score and rollout.score.notice else ""
    shown = ", ".join(f"{one_line(name, 30)} {reward_text(value)}" for name, value in list(parts.items())[:6])
    return f" ({mean}{shown})"


def _asked(rollout: Rollout) -> Table:
    """Which task, who worked and who thought, and what was to be done."""
    job = rollout.job
    table = _grid()
    table.add_column(no_wrap=True, style=DIM)
    table.add_column(overflow="fold")
    rows = {
        "id": one_line(job.task.id, 200),
        "agent": one_line(job.agent.name, 200),
        "model": one_line(
            job.model.model if job.model.kind == "scripted" else f"{job.model.model} ({job.model.kind})", 200
        ),
        "group": one_line(job.group_id, 200),
        "instruction": clip(clean(job.task.instruction.strip()), 2000),
    }
    for name, value in rows.items():
        if value.strip(" ()"):
            table.add_row(name, Text(value))
    table.show_header = False
    return table


def _commands(results: Sequence[CommandResult], marks: Marks) -> Group:
    lines = []
    for result in results[:COMMANDS_SHOWN]:
        passed = result.exit_code == 0
        text = Text.assemble((marks.good, GOOD) if passed else (marks.bad, BAD), f" {one_line(result.command, 200)}")
        how = "" if passed else ", time ran out" if result.timed_out else f", exit {result.exit_code}"
        text.append(f"  {seconds_of(result.seconds)}{how}", style=DIM if passed else BAD)
        lines.append(text)
    if len(results) > COMMANDS_SHOWN:
        lines.append(Text(f"and {len(results) - COMMANDS_SHOWN} more", style=DIM))
    return Group(*lines)


def _suspicions(rollout: Rollout) -> Group:
    return Group(
        *(
            Text(f"! {one_line(n.what, 200)}: {', '.join(one_line(path, 80) for path in n.paths)}", style=WARN)
            for n in rollout.suspicions
        )
    )


def _verdicts(rollout: Rollout, marks: Marks) -> Group:
    lines = []
    for verdict in rollout.verdicts:
        total = verdict.reward.total if verdict.reward else None
        text = Text(reward_text(total) if total is not None else "no reward", style=style_of(verdict.outcome, total))
        by = f"changed: {', '.join(verdict.changed)}" if verdict.changed else "the same verifier"
        trust = f" {marks.dot} {verdict.reward.trust}" if verdict.reward else ""
        lines.append(text.append(f"{trust}  {by}  {one_line(verdict.rollout_id, 40)}", style=DIM))
        if verdict.error:
            lines.append(Text(f"  {one_line(verdict.error, 1000)}", style=BAD))
    return Group(*lines)


def _files(rollout: Rollout) -> Group:
    staged = {name: text for name, text in rollout.job.task.files.items() if not name.startswith("/")}
    lines = []
    # What is not among the task's files may have come from setup or the image as well as from the agent.
    fresh = ("", DIM) if rollout.setup or rollout.job.sandbox.template else ("new", GOOD)
    for name, text in sorted(rollout.files.items())[:FILES_SHOWN]:
        what, style = fresh if name not in staged else ("same", DIM) if staged[name] == text else ("changed", WARN)
        count = counted(len(text.splitlines()), "line")
        lines.append(Text.assemble((f"{what:<8}", style), one_line(name, 100), (f"  {count}", DIM)))
    if len(rollout.files) > FILES_SHOWN:
        lines.append(Text(f"and {len(rollout.files) - FILES_SHOWN} more", style=DIM))
    if rollout.files_extra:
        shown = ", ".join(one_line(name, 60) for name in rollout.files_extra[:4])
        lines.append(Text(f"not kept: {clip(shown, 200)} ({len(rollout.files_extra)} in all)", style=DIM))
    return Group(*lines)


def _timings(rollout: Rollout, marks: Marks) -> Table:
    table = Table.grid(padding=(0, 2))
    total = max(rollout.timings.get("total", 0.0), sum(rollout.timings.get(stage.value, 0.0) for stage in Stage), 1e-9)
    for stage in Stage:
        if (seconds := rollout.timings.get(stage.value)) is not None:
            bar = marks.block * max(1, round(40 * seconds / total))
            table.add_row(stage.value, Text(seconds_of(seconds), justify="right"), Text(bar, style=ACCENT))
    if "total" in rollout.timings:
        table.add_row(
            Text("total", style=DIM), Text(seconds_of(rollout.timings["total"]), justify="right", style=DIM), ""
        )
    return table


def _where(rollout: Rollout, log_path: Path, program: str) -> Group:
    name = one_line(rollout.id, 80)
    rows = [
        ("what the model answered", "--turns"),
        ("every event", "--events"),
        ("what it changed", "--patch"),
        ("for programs", "--json"),
    ]
    return Group(
        Text(f"{log_path} has all {counted(rollout.last_seq, 'entry')} of {name}"),
        *(Text.assemble((f"{program} show {name} {flag:<10}", ACCENT), (what, DIM)) for what, flag in rows),
    )


def _mean_logprob(turn: Turn) -> str:
    known = [token.logprob for token in turn.tokens if token.logprob is not None]
    return f"{sum(known) / len(known):.3f}" if known else "-"


def _grid(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style=DIM, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    return table
