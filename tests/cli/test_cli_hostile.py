"""Text of unknown origin on its way to a terminal: agents, models and files say what they like; it obeys only us."""

from __future__ import annotations

import io
import itertools
import re
from typing import Any

import pytest

from rollcage.cli.narrator import FANCY
from rollcage.cli.screen import Screen, View
from rollcage.cli.summary import event_lines, list_table, summary_of, turn_details
from rollcage.cli.text import clean, one_line
from rollcage.events import (
    AbortRequested,
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandStarted,
    Ended,
    Entry,
    Event,
    FilesCollected,
    Progress,
    Queued,
    Scored,
    StageStarted,
    Suspicion,
    TurnEnded,
)
from rollcage.results.fold import Rollout
from rollcage.store import Summary
from rollcage.types import AgentSpec, Endpoint, Job, Outcome, Reward, Stage, Task
from support.opencode_events import opencode
from support.stories import LOG, command, log_of, rollout_log, shown, told, tool, turn, words

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
        Progress(stage=Stage.PROVISION, message=evil),
        BoxOpened(sandbox_id=evil, backend=evil, notes=(evil,)),
        CommandStarted(stage=Stage.SETUP, command=evil),
        *command(Stage.SETUP, evil, 1, evil),
        AgentStarted(agent=evil, version=evil),
        *(opencode(item) for item in data),
        TurnEnded(turn=broken),
        TurnEnded(turn=speaking),
        AgentEnded(exit_code=1, error=evil, log_tail=evil),
        Suspicion(what=evil, paths=(evil,)),
        FilesCollected(files={evil: evil}, extra=(evil,)),
        Scored(reward=Reward(total=1, parts={evil: 1.0, "b": 0.0})),
        AbortRequested(reason=evil),
        Ended(outcome=Outcome.FINISHED, error=evil, error_code=evil),
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
            *turn_details(rollout, FANCY),
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
    told(log_of([rollout_log()[0].event, opencode(data)]))


def test_endless_output_is_cut() -> None:
    long = "x" * 100_000 + "\n" + "\n".join(["row"] * 100_000)
    lines = told(log_of([rollout_log()[0].event, tool("bash", {"command": long}, long), words(long)])).split("\n")
    assert len(lines) < 60 and max(map(len, lines)) <= 110


def test_cleaning_keeps_what_people_write() -> None:
    ordinary = "naïve Σ 漢字 🏴\u200d☠️ tab\tend"
    assert clean(ordinary) == ordinary.replace("\t", "    ")
    assert one_line("a\n\n  b\r\nc") == "a b c"
    assert all(not FORBIDDEN.search(clean("".join(some))) for some in itertools.permutations(HOSTILE[:4], 2))
