"""What people see: the live view, the summary and the lists, also when the text in them is hostile."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from rollcage.cli.narrator import FANCY, SCRIPTED, Narrator
from rollcage.cli.said import saying_of
from rollcage.cli.screen import Screen, View, screen
from rollcage.cli.summary import event_lines, list_table, summary_of, turn_details, turns_table
from rollcage.cli.text import clean, one_line, reward_text, seconds_of
from rollcage.events import (
    AbortRequested,
    AgentEnded,
    AgentSaid,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    CommandStarted,
    Ended,
    Entry,
    Event,
    FilesCollected,
    Noticed,
    Queued,
    Rollout,
    Scored,
    StageEnded,
    StageStarted,
    TurnEnded,
)
from rollcage.settings import Settings
from rollcage.store import Summary
from rollcage.types import AgentSpec, CommandResult, Endpoint, Job, Outcome, Reward, Stage, Task, Token, Turn

SETTINGS = Settings.from_environ({"ROLLCAGE_HOME": "/nowhere"})
LOG = Path("/nowhere/rollouts.db")

HOSTILE = [
    "\x1b[2J\x1b[H",
    "\x1b]0;owned\x07",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x9b31m",
    "\x90q\x9c",
    "a\rb\x08\x08c",
    "\u202eevil\u2066",
    "\u2028\u2029",
    "\x00\x7f\u0085",
    "\ud800",
    "\U000e0041",
    "[bold red]markup[/bold red]",
    "[/]",
    "[link=http://evil]x[/link]",
    ":skull:",
]


def log_of(events: Sequence[Event]) -> list[Entry]:
    return [Entry(rollout_id="0a1b2c3d", seq=n, time=100 + n / 10, event=e) for n, e in enumerate(events, 1)]


def turn(index: int, text: str = "hi", **fields: Any) -> Turn:
    values = {
        "index": index,
        "request": {},
        "message": {"role": "assistant", "content": text},
        "tokens": (Token("h", 1, -0.5), Token("i", 2, -0.25)),
        "prompt_ids": tuple(range(1200)),
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1200, "completion_tokens": 2},
        "status": 200,
        "trainable": True,
        "seconds": 0.25,
        **fields,
    }
    return Turn.model_validate(values)


def tool(
    name: str, asked: dict[str, Any], output: str = "", code: int | None = None, status: str = "completed"
) -> Event:
    state = {"status": status, "input": asked, "output": output, "error": output, "metadata": {"exit": code}}
    return AgentSaid(data={"type": "tool_use", "part": {"type": "tool", "tool": name, "state": state}})


def words(text: str, kind: str = "text") -> Event:
    return AgentSaid(data={"type": kind, "part": {"type": kind, "text": text}})


def command(stage: Stage, text: str, code: int = 0, stderr: str = "", timed_out: bool = False) -> list[Event]:
    result = CommandResult(command=text, exit_code=code, stderr=stderr, seconds=0.012, timed_out=timed_out)
    return [CommandStarted(stage=stage, command=text), CommandEnded(stage=stage, result=result)]


def rollout_log(kind: str = "scripted") -> list[Entry]:
    task = Task(id="t1", instruction="Make it so.\nPlease.", files={"a.py": "1\n", "b.py": "2\n"})
    job = Job(task=task, model=Endpoint(base_url="http://h/v1", model="m1", kind=kind))
    edit = {"filePath": "/home/user/workdir/a.py", "oldString": "one", "newString": "two"}
    return log_of(
        [
            Queued(job=job, owner="o"),
            StageStarted(stage=Stage.PROVISION),
            BoxOpened(sandbox_id="box-1", backend="local", notes=("memory is not limited here",)),
            StageEnded(stage=Stage.PROVISION, seconds=0.02),
            StageStarted(stage=Stage.SETUP),
            *command(Stage.SETUP, "git init"),
            StageEnded(stage=Stage.SETUP, seconds=0.1),
            StageStarted(stage=Stage.AGENT),
            AgentStarted(agent="opencode", version="1.0"),
            TurnEnded(turn=turn(0)),
            words("I think so.", "reasoning"),
            words("I will fix it."),
            tool("bash", {"command": "make"}, "\n".join(f"row {n}" for n in range(20)), code=2),
            tool("edit", edit),
            TurnEnded(turn=turn(1, trainable=False, untrainable_reason="ids are missing", finish_reason="length")),
            AgentEnded(exit_code=0),
            StageEnded(stage=Stage.AGENT, seconds=61),
            StageStarted(stage=Stage.VERIFY),
            Noticed(what="changed outside the workdir", paths=("/home/user/.bashrc",)),
            FilesCollected(files={"a.py": "two\n", "b.py": "2\n", "c.py": "3\n"}, extra=("big.bin",)),
            *command(Stage.VERIFY, "pytest", 1, "E\nassert 1 == 2"),
            Scored(reward=Reward(total=0.5)),
            StageEnded(stage=Stage.VERIFY, seconds=0.5),
            Ended(outcome=Outcome.SUCCEEDED),
        ]
    )


def shown(pieces: Any, **options: Any) -> str:
    out = io.StringIO()
    screen_options: dict[str, Any] = {"width": 110, "markup": False, "highlight": False, "emoji": False, **options}
    Screen(file=out, **screen_options).put(pieces)
    return out.getvalue()


def told(entries: Sequence[Entry]) -> str:
    narrator = Narrator(FANCY, 100)
    return "\n".join(line.plain for entry in entries for line in narrator.tell(entry))


def test_the_view_tells_the_stages_in_order_with_their_times() -> None:
    text = told(rollout_log())
    assert [line for line in text.split("\n") if line.startswith("●")] == [
        "● provision",
        "● setup",
        "● agent",
        "● verify",
    ]
    assert [line for line in text.split("\n") if line.startswith("╰─")] == [
        "╰─ 20 ms",
        "╰─ 100 ms",
        "╰─ 1 min 01 s",
        "╰─ 500 ms",
    ]


def test_the_view_tells_commands_tools_words_and_turns() -> None:
    text = told(rollout_log())
    for part in (
        "rollcage · t1",
        "Make it so. Please.",
        "✓ git init",
        "○ turn 1  1,200 → 2 tokens",
        "I will fix it.",
        "▸ bash make  exit 2",
        "row 0\n",
        "… 14 more lines",
        "row 19\n",
        "▸ edit a.py",
        "- one",
        "+ two",
        "○ turn 2  1,200 → 2 tokens  length",
        "! changed outside the workdir: /home/user/.bashrc",
        "✗ pytest  exit 1",
        "assert 1 == 2",
        "reward 0.5",
    ):
        assert part in text, part


def test_a_scripted_model_is_called_scripted_wherever_its_output_is_shown() -> None:
    scripted, real = rollout_log(), rollout_log("vllm")
    assert SCRIPTED in told(scripted) and SCRIPTED in shown(summary_of(Rollout.fold(scripted), FANCY, LOG))
    assert SCRIPTED not in told(real) + shown(summary_of(Rollout.fold(real), FANCY, LOG))


def test_the_summary_has_reward_turns_files_times_and_the_next_commands() -> None:
    text = shown(summary_of(Rollout.fold(rollout_log()), FANCY, LOG))
    for pattern in (
        r"◆ succeeded   reward 0\.5   2 turns · 4 tokens sampled",
        r"1 +1,200 +2 +-0\.375 +stop +250 ms +✓",
        r"2 +1,200 +2 +-0\.375 +length +250 ms +no: ids are missing",
        r"all +2,400 +4 +500 ms +1 of 2",
        r"changed +a\.py",
        r"same +b\.py",
        r"new +c\.py",
        r"not kept: big\.bin",
        r"agent +1 min 01 s +━+",
        r"/nowhere/rollouts\.db",
        r"rollcage show 0a1b2c3d --turns",
    ):
        assert re.search(pattern, text), pattern
    assert not any(line.endswith(" ") for line in text.split("\n"))


def test_a_rollout_that_was_not_scored_says_so_and_why() -> None:
    failed = Ended(outcome=Outcome.SETUP_FAILED, error="setup_failed: it broke", error_code="setup_failed")
    text = shown(summary_of(Rollout.fold(log_of([rollout_log()[0].event, failed])), FANCY, LOG))
    assert "◆ setup_failed   no reward" in text and "setup_failed: it broke" in text and "reward 0" not in text


def test_a_rollout_that_still_runs_can_be_summed_up() -> None:
    assert "running: agent   no reward yet" in shown(summary_of(Rollout.fold(rollout_log()[:12]), FANCY, LOG))


def test_an_agent_that_ran_out_of_time_and_one_that_failed_are_told() -> None:
    head = rollout_log()[0].event
    assert "its time is up" in told(log_of([head, AgentEnded(exit_code=None, timed_out=True)]))
    assert "exit code 3: it broke" in told(log_of([head, AgentEnded(exit_code=3, error="it broke")]))
    assert "abort requested: enough" in told(log_of([head, AbortRequested(reason="enough")]))
    assert "time ran out" in told(log_of([head, *command(Stage.SETUP, "sleep 9", 124, timed_out=True)]))


def test_the_status_line_says_what_is_going_on() -> None:
    narrator = Narrator(FANCY, 100, "Ctrl-C aborts")
    entries = rollout_log()
    for entry in entries[:6]:
        narrator.tell(entry)
    assert narrator.status(entries[5].time + 2).plain.startswith("setup 2.1 s · git init")
    for entry in entries[6:12]:
        narrator.tell(entry)
    assert "1 turn · 2 tokens sampled · Ctrl-C aborts" in narrator.status(110).plain


def hostile_log(evil: str) -> list[Entry]:
    task = Task.model_construct(**{**Task(instruction="x").__dict__, "id": evil, "instruction": evil})
    model = Endpoint(base_url="http://h/v1", model=evil, kind=evil)
    job = Job.model_construct(task=task, model=model, agent=AgentSpec(name=evil), mode="black_box")
    broken = turn(1, evil, error=evil, finish_reason=evil, trainable=False, untrainable_reason=evil)
    calls = [{"function": {"name": evil, "arguments": evil}}, evil, {"function": evil}]
    speaking = turn(2, evil, message={"content": evil, "reasoning_content": evil, "tool_calls": calls})
    data = [
        {"type": "tool_use", "part": {"tool": evil, "state": {"input": {evil: evil}, "output": evil}}},
        {"type": "tool_use", "part": {"tool": "edit", "state": {"input": {"filePath": evil, "newString": evil}}}},
        {"type": "tool_use", "part": {"tool": "bash", "state": {"status": "error", "error": evil}}},
        {"type": "error", "error": {"name": evil}},
        {"type": "text", "part": {"text": evil}},
        {"type": "reasoning", "part": {"text": evil}},
    ]
    events: list[Event] = [
        Queued.model_construct(job=job, owner=evil),
        StageStarted(stage=Stage.AGENT),
        BoxOpened(sandbox_id=evil, backend=evil, notes=(evil,)),
        CommandStarted(stage=Stage.SETUP, command=evil),
        *command(Stage.SETUP, evil, 1, evil),
        AgentStarted(agent=evil, version=evil),
        *(AgentSaid(data=item) for item in data),
        TurnEnded(turn=broken),
        TurnEnded(turn=speaking),
        AgentEnded(exit_code=1, error=evil, log_tail=evil),
        Noticed(what=evil, paths=(evil,)),
        FilesCollected(files={evil: evil}, extra=(evil,)),
        Scored(reward=Reward(total=1, parts={evil: 1.0, "b": 0.0})),
        AbortRequested(reason=evil),
        Ended(outcome=Outcome.SUCCEEDED, error=evil, error_code=evil),
    ]
    return [
        Entry.model_construct(rollout_id=evil, seq=n, time=float(n), event=event) for n, event in enumerate(events, 1)
    ]


FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize("evil", HOSTILE, ids=ascii)
def test_nothing_hostile_reaches_the_terminal(evil: str) -> None:
    entries = hostile_log(evil)
    rollout = Rollout.fold(entries)
    row = Summary(
        **dict.fromkeys(("id", "task_id", "instruction", "agent", "model", "owner", "error"), evil),
        created_at=0,
        stage=Stage.AGENT,
        outcome=None,
        reward=None,
        turns=0,
        tokens=0,
        ended_at=None,
    )
    text = io.StringIO()
    view = View(Screen(file=text, width=110, markup=False, highlight=False, emoji=False))
    for entry in entries:
        view.show(entry)
        view.console.print(view.narrator.status(entry.time))
    everything = text.getvalue() + shown(
        [
            *summary_of(rollout, FANCY, LOG),
            turns_table(rollout.turns, FANCY),
            *turn_details(rollout.turns, FANCY),
            list_table([row], 9.0),
        ]
    )
    everything += "".join(line.plain for line in event_lines(e for e in entries if "\ud800" not in evil))
    assert not FORBIDDEN.search(everything), repr(FORBIDDEN.search(everything))
    if evil.startswith(("[", ":")):
        assert evil in everything


@pytest.mark.parametrize("evil", HOSTILE[:12], ids=ascii)
def test_on_a_terminal_only_our_own_codes_are_written(evil: str) -> None:
    out = io.StringIO()
    console = Screen(
        file=out, width=110, markup=False, highlight=False, emoji=False, force_terminal=True, color_system="truecolor"
    )
    view = View(console)
    for entry in hostile_log(evil):
        view.show(entry)
    console.put(summary_of(Rollout.fold(hostile_log(evil)), FANCY, LOG))
    ours = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert not FORBIDDEN.search(ours), repr(ours)
    styles = set(re.findall(r"\x1b\[([0-9;]*)m", out.getvalue()))
    assert styles <= {"0", "1", "2", "31", "32", "33", "36", "1;31", "1;32", "1;33", "1;36", "2;3"}, styles


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": None},
        {"type": "text"},
        {"type": "text", "part": []},
        {"type": "text", "part": {"text": {"a": 1}}},
        {"type": "tool_use", "part": {"state": 3}},
        {
            "type": "tool_use",
            "part": {"tool": ["x"], "state": {"input": "y", "output": [1], "metadata": {"exit": "1"}}},
        },
        {"type": "tool_use", "part": {"tool": "edit", "state": {"input": {"oldString": 1, "newString": None}}}},
        {"type": "error", "error": "x"},
        {"type": "error", "error": {"data": {"message": ["x"]}}},
    ],
)
def test_an_agents_events_of_any_shape_are_borne(data: dict[str, Any]) -> None:
    saying_of(data)
    told(log_of([rollout_log()[0].event, AgentSaid(data=data)]))


def test_endless_output_is_cut() -> None:
    long = "x" * 100_000 + "\n" + "\n".join(["row"] * 100_000)
    lines = told(log_of([rollout_log()[0].event, tool("bash", {"command": long}, long), words(long)])).split("\n")
    assert len(lines) < 60 and max(map(len, lines)) <= 110


def test_without_a_terminal_there_are_plain_lines_and_no_codes() -> None:
    out = io.StringIO()
    view = View(screen(SETTINGS, file=out))
    with view.running():
        for entry in rollout_log():
            view.show(entry)
        view.note("stopping")
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text and "● agent" in text and "! stopping" in text


def test_a_terminal_that_knows_only_ascii_gets_only_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    view = View(screen(SETTINGS, file=out))
    for entry in rollout_log():
        view.show(entry)
    view.console.put(summary_of(Rollout.fold(rollout_log()), view.narrator.marks, LOG))
    out.flush()
    assert b"ok git init" in raw.getvalue()


def test_a_reader_who_goes_away_is_reported_to_the_caller() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    view = View(screen(SETTINGS, file=Gone()))
    with pytest.raises(BrokenPipeError):
        view.line(Text("x"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 ms"), (0.0234, "23 ms"), (0.996, "1.0 s"), (59.9, "59.9 s"), (61, "1 min 01 s"), (7260, "2 h 01 min")],
)
def test_durations_are_said_as_people_say_them(value: float, text: str) -> None:
    assert seconds_of(value) == text


@pytest.mark.parametrize(
    ("total", "text"), [(1, "1.0"), (0, "0.0"), (0.5, "0.5"), (5 / 6, "0.8333"), (-2, "-2.0"), (1e-9, "1e-09")]
)
def test_rewards_are_never_rounded_to_something_they_are_not(total: float, text: str) -> None:
    assert reward_text(total) == text


def test_cleaning_keeps_what_people_write() -> None:
    ordinary = "naïve Σ 漢字 🏴\u200d☠️ tab\tend"
    assert clean(ordinary) == ordinary.replace("\t", "    ")
    assert one_line("a\n\n  b\r\nc") == "a b c"
    assert all(not FORBIDDEN.search(clean("".join(some))) for some in itertools.permutations(HOSTILE[:4], 2))
