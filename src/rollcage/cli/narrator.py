"""Tells a rollout as it happens: entries of the log in, lines for a person out. Pure; knows no terminal."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from rollcage.agent_events import (
    AgentEvent,
    AgentFileEdit,
    AgentReasoning,
    AgentReportedError,
    AgentText,
    AgentToolCall,
)
from rollcage.cli.standing import style_of
from rollcage.cli.text import clip, one_line, reward_text, seconds_of, some_lines
from rollcage.events import (
    AbortRequested,
    AgentEmitted,
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    CommandStarted,
    Ended,
    Entry,
    EnvironmentOpened,
    FilesCollected,
    Progress,
    Queued,
    Scored,
    StageEnded,
    StageStarted,
    Suspicion,
    ToolCalled,
    TurnEnded,
)
from rollcage.types import CommandResult, Job, Outcome, Stage, Turn

if TYPE_CHECKING:
    from rollcage.gateway.live import Delta

SCRIPTED = "SCRIPTED: no model is running; every answer comes from the task's own script"
"""Said wherever the output of the scripted model is shown."""

GOOD, BAD, WARN, DIM, STRONG, ACCENT = "green", "red", "yellow", "dim", "bold", "cyan"


class Marks(NamedTuple):
    """The signs the lines are drawn with."""

    stage: str
    bar: str
    foot: str
    good: str
    bad: str
    tool: str
    turn: str
    arrow: str
    dot: str
    end: str
    block: str
    spinner: str


FANCY = Marks("●", "│", "╰─", "✓", "✗", "▸", "○", "→", "·", "◆", "━", "dots")
PLAIN = Marks("*", "|", "`-", "ok", "FAILED", ">", "o", "->", "-", "=", "=", "line")
"""For terminals that cannot show the fancy ones."""


class Narrator:
    """Turns each entry of one rollout into the lines that tell it, and keeps what the status line needs."""

    def __init__(self, marks: Marks = FANCY, width: int = 100, hint: str = "") -> None:
        self.marks = marks
        self.width = max(40, width)
        self.hint = hint
        self.stage = Stage.QUEUED
        self.stage_started = 0.0
        self.command = ""
        self.turns = 0
        self.sampled = 0
        self.ended = False
        self._home = ""
        self._speech: dict[int, tuple[str, int]] = {}

    def tell(self, entry: Entry) -> list[Text]:
        """The lines for one entry; often none."""
        match entry.event:
            case Queued(job=job):
                self.stage_started = entry.time
                self._home = job.task.workdir + "/"
                return self._opening(entry.rollout_id, job)
            case StageStarted(stage=stage):
                self.stage, self.stage_started = stage, entry.time
                return [Text.assemble((self.marks.stage, ACCENT), " ", (stage.value, STRONG))]
            case StageEnded(seconds=seconds):
                self.command = ""
                return [Text(f"{self.marks.foot} {seconds_of(seconds)}", style=DIM)]
            case CommandStarted(command=command):
                self.command = one_line(command)
                return []
            case CommandEnded(stage=stage, result=result):
                self.command = ""
                return self._command(stage, result)
            case TurnEnded(turn=turn):
                self.turns += 1
                self.sampled += completion_tokens(turn)
                return [self._turn(turn)]
            case AgentEmitted(event=event):
                return self._agent(event)
            case Ended():
                # How it ended is the first line of the summary that follows.
                self.ended, self.stage = True, Stage.ENDED
                return []
            case event:
                return self._remark(event)

    def hear(self, delta: Delta) -> None:
        """The end of what the model is saying at this moment, for the status line."""
        words, _ = self._speech.pop(delta.turn, ("", 0))
        if not delta.ended:
            said = delta.reasoning + delta.content + delta.calls
            self._speech[delta.turn] = ((words + said)[-200:], delta.tokens)

    def status(self, now: float) -> Text:
        """The line under all others: what is going on at this moment."""
        dot = f" {self.marks.dot} "
        text = Text.assemble((self.stage.value, STRONG), " ", (seconds_of(max(0.0, now - self.stage_started)), ACCENT))
        if self.command:
            text.append(dot + clip(self.command, max(10, self.width - 50)))
        if self.turns:
            text.append(
                dot + counted(self.turns, "turn") + dot + f"{counted(self.sampled, 'token')} sampled", style=DIM
            )
        for words, tokens in list(self._speech.values())[-1:]:
            text.append(f"{dot}{counted(tokens, 'token')} so far: ", style=DIM)
            text.append(one_line(words)[-max(10, self.width - 70) :])
        if self.hint:
            text.append(dot + self.hint, style=DIM)
        return text

    def _opening(self, rollout_id: str, job: Job) -> list[Text]:
        lines = [
            Text.assemble(("rollcage", STRONG), f" {self.marks.dot} ", (one_line(job.task.id or "task", 80), ACCENT)),
            Text(f"  {one_line(job.task.instruction, self.width - 4)}"),
            Text(
                f"  {one_line(job.agent.name, 40)} {self.marks.arrow} {one_line(job.model.model, 80)} "
                f"({one_line(job.model.kind, 40)}) {self.marks.dot} rollout {one_line(rollout_id, 80)}",
                style=DIM,
            ),
        ]
        if job.model.kind == "scripted":
            lines.append(Text(f"  {SCRIPTED}", style=f"{STRONG} {WARN}"))
        return [*lines, Text("")]

    def _remark(self, event: object) -> list[Text]:
        match event:
            case Progress(message=message):
                return [self._line(Text(one_line(message, 200), style=DIM))]
            case BoxOpened(sandbox_id=box, backend=backend, fresh=fresh, notes=notes):
                what = "fresh box for verification" if fresh else "box"
                first = self._line(Text(f"{what} {one_line(box, 60)} {self.marks.dot} {one_line(backend, 30)}"))
                return [first, *(self._line(Text(f"! {one_line(note)}", style=WARN)) for note in notes)]
            case AgentStarted(agent=agent, version=version):
                return [self._line(Text(f"{one_line(agent, 40)} {one_line(version, 40)} is at work", style=DIM))]
            case AgentEnded(timed_out=True):
                return [self._line(Text("! its time is up: the agent and all it started were killed", style=WARN))]
            case AgentEnded(exit_code=code, error=error) if code != 0:
                why = f": {one_line(error, 400)}" if error else ""
                return [self._line(Text(f"{self.marks.bad} the agent ended with exit code {code}{why}", style=BAD))]
            case Suspicion(what=what, paths=paths):
                shown = ", ".join(one_line(path, 60) for path in paths[:3])
                more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
                return [self._line(Text(f"! {one_line(what, 200)}: {shown}{more}", style=WARN))]
            case FilesCollected(files=files, extra=extra):
                left = f", {len(extra)} not kept" if extra else ""
                return [self._line(Text(f"{counted(len(files), 'file')} collected{left}", style=DIM))]
            case EnvironmentOpened(name=name, instance_id=instance, tools=tools):
                what = f"{one_line(name, 60)} {one_line(instance, 60)}".strip()
                return [self._line(Text(f"environment {what} {self.marks.dot} {counted(len(tools), 'tool')}"))]
            case ToolCalled(name=name, failed=True, error=error, answer=answer):
                why = one_line(error or answer, 300)
                return [self._line(Text(f"! {one_line(name, 60)} failed: {why}", style=WARN), indent=2)]
            case Scored(reward=reward):
                return [self._line(Text.assemble("reward ", (reward_text(reward.total), _colour(reward.total))))]
            case AbortRequested(reason=reason):
                why = f": {one_line(reason, 200)}" if reason else ""
                return [self._line(Text(f"! abort requested{why}", style=WARN))]
            case _:
                return []

    def _command(self, stage: Stage, result: CommandResult) -> list[Text]:
        passed = result.exit_code == 0
        mark = (self.marks.good, GOOD) if passed else (self.marks.bad, BAD)
        how = "" if passed else "  time ran out" if result.timed_out else f"  exit {result.exit_code}"
        lines = [self._line(Text.assemble(mark, f" {one_line(result.command)}", (how, BAD)), seconds=result.seconds)]
        if not passed:
            rows = [row for row in (result.stderr.strip() or result.stdout.strip()).split("\n") if row.strip()][-4:]
            lines += [self._line(Text(one_line(row), style=DIM), indent=4) for row in rows]
        return lines

    def _turn(self, turn: Turn) -> Text:
        text = Text.assemble((f"{self.marks.turn} turn {turn.index + 1}", STRONG))
        if turn.purpose.value != "agent":
            text.append(f" ({turn.purpose.value})", style=DIM)
        text.append(
            f"  {prompt_tokens(turn):,} {self.marks.arrow} {counted(completion_tokens(turn), 'token')}", style=DIM
        )
        if turn.error:
            text.append(f"  {one_line(turn.error, 300)}", style=BAD)
        elif turn.finish_reason and turn.finish_reason not in ("stop", "tool_calls"):
            text.append(f"  {one_line(turn.finish_reason, 40)}", style=WARN)
        return self._line(text, seconds=turn.seconds)

    def _agent(self, event: AgentEvent) -> list[Text]:
        match event:
            case AgentText(role="assistant", final=True, text=text):
                return self._words(text)
            case AgentReasoning(final=True, text=text):
                return self._words(text, DIM + " italic")
            case AgentToolCall(ended=True):
                return self._tool(event)
            case AgentFileEdit(path=path, change=change):
                return [self._line(self._call(change, path), indent=2), *self._edit(event)]
            case AgentReportedError(text=text, name=name):
                why = one_line(text or name or "unknown error", 400)
                return [self._line(Text(f"{self.marks.bad} {why}", style=BAD), indent=2)]
            case _:
                return []

    def _words(self, text: str, style: str = "") -> list[Text]:
        rows = some_lines(text.strip(), 10, 2)
        wrapped = [part for row in rows for part in textwrap.wrap(row, self.width - 8) or [""]][:30]
        return [self._line(Text(row, style=style), indent=4) for row in wrapped]

    def _tool(self, call: AgentToolCall) -> list[Text]:
        text = self._call(call.name or "?", call.title or (json.dumps(call.arguments) if call.arguments else ""))
        if call.status == "error":
            text.append("  refused", style=BAD)
        elif call.exit_code:
            text.append(f"  exit {call.exit_code}", style=WARN)
        lines = [self._line(text, indent=2), *(line for edit in call.edits for line in self._edit(edit))]
        # The answer to a read or an edit repeats what the file says; the path is enough.
        output = call.error or ("" if call.kind == "read" or call.edits else call.result)
        return lines + [self._line(Text(row, style=DIM), indent=4) for row in some_lines(output, 2, 4)]

    def _call(self, name: str, asked: str) -> Text:
        asked = one_line(asked.removeprefix(self._home))
        return Text.assemble((f"{self.marks.tool} ", ACCENT), (one_line(name, 30), f"{STRONG} {ACCENT}"), f" {asked}")

    def _edit(self, edit: AgentFileEdit) -> list[Text]:
        if edit.diff and not (edit.removed or edit.added):
            return [self._line(Text(row, style=DIM), indent=4) for row in some_lines(edit.diff, 6)]
        return [
            self._line(Text(sign + row, style=style), indent=4)
            for body, sign, style in ((edit.removed, "- ", BAD), (edit.added, "+ ", GOOD))
            for row in some_lines(body, 6)
        ]

    def _line(self, body: Text, *, indent: int = 1, seconds: float | None = None) -> Text:
        """One line hung on the bar, cut to the width, with a duration at its right end."""
        right = seconds_of(seconds) if seconds is not None else ""
        room = self.width - 1 - indent - (len(right) + 2 if right else 0)
        body.truncate(room, overflow="ellipsis", pad=bool(right))
        line = Text.assemble((self.marks.bar, DIM), " " * indent, body)
        if right:
            line.append(f"  {right}", style=DIM)
        return line


def counted(count: int, noun: str) -> str:
    """`1 turn`, `2 turns`, `1,024 tokens`."""
    return f"{count:,} " + (noun if count == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s")


def prompt_tokens(turn: Turn) -> int:
    """How long the prompt was, by the engine's count or by its ids."""
    return _whole(turn.usage.get("prompt_tokens")) or len(turn.prompt_ids)


def completion_tokens(turn: Turn) -> int:
    """How much was sampled, by the captured tokens or by the engine's count."""
    return len(turn.tokens) or _whole(turn.usage.get("completion_tokens"))


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _colour(total: float) -> str:
    return f"{STRONG} {style_of(Outcome.FINISHED, total)}"
