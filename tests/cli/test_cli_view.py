"""What people see: the live view, the summary and the lists."""

from __future__ import annotations

import io
import re

import pytest
from rich.text import Text

from rollcage.cli.narrator import FANCY, SCRIPTED, Narrator
from rollcage.cli.screen import View, screen
from rollcage.cli.summary import summary_of, turn_details
from rollcage.cli.text import reward_text, seconds_of
from rollcage.events import AbortRequested, AgentEnded, CommandEnded, Ended
from rollcage.results.fold import Rollout
from rollcage.settings import Settings
from rollcage.types import Outcome, Stage
from support.stories import LOG, command, log_of, rollout_log, shown, told

SETTINGS = Settings.from_environ({"ROLLCAGE_HOME": "/nowhere"})


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
    for log, is_said in ((scripted, True), (real, False)):
        rollout = Rollout.fold(log)
        for text in (told(log), shown(summary_of(rollout, FANCY, LOG)), shown(turn_details(rollout, FANCY))):
            assert (SCRIPTED in text) is is_said


def test_the_summary_has_reward_turns_files_times_and_the_next_commands() -> None:
    text = shown(summary_of(Rollout.fold(rollout_log()), FANCY, LOG))
    for pattern in (
        r"◆ finished   reward 0\.5 · shared   2 turns · 4 tokens sampled",
        r"1 +1,200 +2 +-0\.375 +stop +250 ms +✓",
        r"2 +1,200 +2 +-0\.375 +length +250 ms +no: ids are missing",
        r"all +2,400 +4 +500 ms +1 of 2",
        r"changed +a\.py",
        r"same +b\.py",
        r"\n +c\.py  1 line",
        r"not kept: big\.bin",
        r"agent +1 min 01 s +━+",
        r"/nowhere/rollouts\.db",
        r"rollcage show 0a1b2c3d --turns",
    ):
        assert re.search(pattern, text), pattern
    assert not any(line.endswith(" ") for line in text.split("\n"))


def test_a_file_that_only_the_agent_can_have_made_is_called_new() -> None:
    log = [entry for entry in rollout_log() if not isinstance(entry.event, CommandEnded)]
    assert re.search(r"new +c\.py", shown(summary_of(Rollout.fold(log), FANCY, LOG)))


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
