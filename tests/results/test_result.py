"""The shape published clients read: exactly these names, and lists that never disagree."""

from __future__ import annotations

import json

import pytest

from rollcage.agent_events import AgentOutput
from rollcage.events import (
    AgentEmitted,
    AgentEnded,
    BoxOpened,
    CommandEnded,
    Ended,
    Entry,
    Event,
    FilesCollected,
    Queued,
    Scored,
    StageEnded,
    TurnEnded,
)
from rollcage.results.fold import Rollout
from rollcage.results.result import ProxyTurn, RolloutResult, proxy_turn, result_of
from rollcage.schema.views import traced
from rollcage.server.compact import compact_turn
from rollcage.types import CommandResult, Endpoint, Job, Outcome, Reward, Stage, Task, Token, Turn

RESULT = (
    "task_id rollout_id sandbox_id reward agent_exit_code exit_code wall_s mode setup_results verify_results "
    "proxy_turns files files_extra workdir_files agent_log_tail proxy_log_tail install_log_tail verifier_stdout "
    "verifier_stderr "
    "test_exit_code error error_code outcome timings"
).split()
OURS = [
    "files_extra_why",
    "patch",
    "reward_parts",
    "patch_truncated",
    "group_id",
    "policy_version",
    "metadata",
    "suspicions",
    "instruction",
    "model",
    "agent",
    "agent_version",
    "sampling",
    *"trust blame verdicts reverifies work_kept".split(),
    "agent_stderr_tail",
]
"""What rollcage says beyond the published shape."""
TURN = (
    "turn purpose session_id parent_session_id finish_reason prompt_token_ids completion_tokens completion_token_ids "
    "per_token_logps request message usage latency_s ttft_s timestamp upstream_status upstream_error trainable "
    "untrainable_reason recorded replaces policy_version sampling"
).split()


def rollout(*events: Event, task: Task | None = None) -> Rollout:
    task = task or Task(id="t1", instruction="x", verify=("a", "b"))
    first = Queued(job=Job(task=task, model=Endpoint(base_url="http://h/v1", model="m")))
    return Rollout.fold(
        Entry(rollout_id="r1", seq=n, time=10.0 + n, event=event) for n, event in enumerate([first, *events], 1)
    )


def command(stage: Stage, text: str, code: int = 0) -> CommandEnded:
    result = CommandResult(command=text, exit_code=code, stdout=f"{text} out", stderr=f"{text} err", seconds=0.5)
    return CommandEnded(stage=stage, result=result)


def turn(*tokens: Token) -> TurnEnded:
    return TurnEnded(
        turn=Turn(
            index=3,
            session="s",
            parent_session="p",
            request={"model": "m"},
            message={"role": "assistant"},
            prompt_ids=(1, 2),
            tokens=tokens,
            finish_reason="stop",
            usage={"prompt_tokens": 2},
            status=200,
            started_at=5.0,
            first_token_s=0.1,
            seconds=0.4,
            trainable=all(token.id is not None and token.logprob is not None for token in tokens),
        )
    )


def test_the_names_are_exactly_those_of_the_contract() -> None:
    result = result_of(rollout(turn(Token("a", 1, -0.1)), command(Stage.SETUP, "s"), command(Stage.VERIFY, "v")))
    document = result.model_dump(mode="json")
    assert list(document) == RESULT + OURS
    assert list(document["proxy_turns"][0]) == TURN
    for rows in (document["setup_results"], document["verify_results"]):
        assert list(rows[0]) == ["cmd", "exit_code", "stdout", "stderr", "duration_s"]


def test_everything_a_rollout_has_is_in_its_result() -> None:
    result = result_of(
        rollout(
            BoxOpened(sandbox_id="box", backend="local", notes=("no cgroups",)),
            command(Stage.SETUP, "s"),
            StageEnded(stage=Stage.SETUP, seconds=0.5),
            turn(Token("a", 1, -0.1), Token("b", 2, -0.2)),
            AgentEmitted(raw={"type": "text"}),
            AgentEnded(exit_code=7, error="e", log_tail="tail"),
            FilesCollected(files={"f": "text"}, extra=("g",)),
            command(Stage.VERIFY, "a", 1),
            command(Stage.VERIFY, "b"),
            Scored(reward=Reward(total=0.5)),
            Ended(outcome=Outcome.AGENT_FAILED, error="agent_failed: e", error_code="agent_failed"),
        )
    )
    assert (result.task_id, result.rollout_id, result.sandbox_id, result.reward) == ("t1", "r1", "box", 0.5)
    assert (result.agent_exit_code, result.exit_code, result.agent_log_tail) == (7, 7, '{"type": "text"}\n')
    assert result.agent_stderr_tail == "tail"
    assert result.files == result.workdir_files == {"/home/user/workdir/f": "text"}
    assert result.files_extra == ["/home/user/workdir/g"]
    assert [row.exit_code for row in result.verify_results] == [1, 0]
    assert (result.setup_results[0].cmd, result.setup_results[0].duration_s) == ("s", 0.5)
    assert (result.outcome, result.error_code, result.error) == ("agent_failed", "agent_failed", "agent_failed: e")
    assert result.wall_s == result.timings["total"] == 11 and result.timings["setup"] == 0.5
    assert result.install_log_tail == "no cgroups"
    [one] = result.proxy_turns
    assert (one.turn, one.session_id, one.parent_session_id, one.purpose) == (3, "s", "p", "agent")
    assert (one.completion_tokens, one.completion_token_ids, one.per_token_logps) == (["a", "b"], [1, 2], [-0.1, -0.2])
    assert (one.prompt_token_ids, one.latency_s, one.ttft_s, one.timestamp) == ([1, 2], 0.4, 0.1, 5.0)
    assert RolloutResult.model_validate_json(result.model_dump_json()) == result


def test_the_tail_of_the_agents_log_is_whole_json_lines_of_a_bounded_length() -> None:
    said = [AgentEmitted(raw={"n": n, "text": "x" * 300}) for n in range(200)]
    lines = [json.loads(line) for line in result_of(rollout(*said)).agent_log_tail.splitlines()]
    assert 20 < len(lines) < 30 and [line["n"] for line in lines] == list(range(200 - len(lines), 200))
    long = result_of(rollout(AgentEmitted(raw={"text": "x" * 100_000}))).agent_log_tail
    assert len(long) == 8000 and long.endswith('x"}\n')
    plain = result_of(rollout(AgentEmitted(event=AgentOutput(stream="stdout", text="hi")))).agent_log_tail
    assert json.loads(plain)["text"] == "hi", "an agent without events of its own"


def test_a_rollout_that_was_not_scored_has_null_and_not_zero() -> None:
    scored = Scored(reward=Reward(total=0.0))
    failed = Ended(outcome=Outcome.VERIFY_FAILED, error="verify_failed: x", error_code="bad_reward")
    assert result_of(rollout(scored, failed)).reward is None
    assert result_of(rollout(scored, Ended(outcome=Outcome.FINISHED))).reward == 0.0
    assert result_of(rollout()).outcome is None


@pytest.mark.parametrize(
    ("tokens", "ids", "logprobs"),
    [
        ((), [], []),
        ((Token("a", 1, -0.5), Token("b", 2, -0.5)), [1, 2], [-0.5, -0.5]),
        ((Token("a", 1, -0.5), Token("b", None, -0.5)), [], []),
        ((Token("a", 1, None), Token("b", 2, -0.5)), [], []),
    ],
)
def test_the_completion_lists_are_whole_or_empty(
    tokens: tuple[Token, ...], ids: list[int], logprobs: list[float]
) -> None:
    [one] = result_of(rollout(turn(*tokens))).proxy_turns
    assert (one.completion_tokens, one.completion_token_ids) == ([token.text for token in tokens], ids)
    assert one.per_token_logps == logprobs
    assert isinstance(one, ProxyTurn)


def test_half_a_record_is_never_handed_out_as_if_it_were_whole() -> None:
    """llama.cpp told 5 ids of an answer of 11 tokens: they fit each other, and are not the answer."""
    whole = turn(*[Token("x", id_, -0.5) for id_ in range(5)]).turn
    reason = "5 tokens captured, but the engine counted 11"
    half = whole.model_copy(update={"trainable": False, "untrainable_reason": reason})
    for row in (proxy_turn(half), traced(half)):
        assert (row.trainable, row.untrainable_reason) == (False, reason)
        assert row.prompt_token_ids == row.completion_token_ids == row.per_token_logps == []
    assert traced(half).loss_mask == []
    assert proxy_turn(whole).completion_token_ids == traced(whole).completion_token_ids == [0, 1, 2, 3, 4]


def test_every_turn_says_what_it_replaces_whose_weights_it_asked_and_how_they_sampled() -> None:
    request = {"model": "m", "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": None, "messages": []}
    update = {"request": request, "replaces": 2, "policy_version": "step-7"}
    made = turn(Token("a", 1, -0.5)).turn.model_copy(update=update)
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs_mode": "engine_default"}
    for row in (proxy_turn(made), traced(made)):
        assert (row.replaces, row.policy_version, row.sampling) == (2, "step-7", wanted)
    seen = compact_turn(made)
    assert (seen["replaces"], seen["policy_version"], seen["sampling"]) == (2, "step-7", wanted)


def test_a_test_script_has_its_own_fields_in_the_older_shape() -> None:
    task = Task(instruction="x", verify=("a",), test_script="exit 3")
    script = command(Stage.VERIFY, "bash /home/user/tests/test.sh", 3)
    result = result_of(rollout(command(Stage.VERIFY, "a"), script, task=task))
    assert [row.cmd for row in result.verify_results] == ["a"] and result.test_exit_code == 3
    assert result.verifier_stdout.endswith("out") and result.verifier_stderr.endswith("err")
    assert result_of(rollout(command(Stage.VERIFY, "a"), task=task)).test_exit_code is None


def test_no_key_is_in_it() -> None:
    model = Endpoint.model_validate({"base_url": "http://h/v1", "model": "m", "key": "sk-hidden"})
    entry = Entry(rollout_id="r", seq=1, time=1, event=Queued(job=Job(task=Task(instruction="x"), model=model)))
    assert "sk-hidden" not in result_of(Rollout.fold([entry])).model_dump_json()
