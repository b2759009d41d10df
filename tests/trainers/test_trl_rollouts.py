"""What `rollcage.trl` hands to TRL, from real rollouts; TRL itself runs it in `check_trl.py`."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from openenv.core.harness import TrainableSession

import rollcage
from rollcage.errors import UsageError
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.trl import RolloutFunc, SessionFactory, instruction_of, reward, rollout_func, session_factory
from rollcage.types import Outcome, ScriptedCall, ScriptedTurn, Task

EOS = 99
DONE = ScriptedTurn(text="All done.")
FAULTY = ScriptedTurn(text="Cut.", cut_after=1)


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))


def task_of(prompt: Any) -> Task:
    """What each prompt of these tests stands for."""
    name = instruction_of(prompt)
    verify = () if name == "unscored" else ("grep -qx right answer.txt",)
    if name == "forged":
        verify = ("bash ./answer.txt; false",)
    script = {
        "right": (bash("echo right > answer.txt"), DONE),
        "wrong": (bash("echo wrong > answer.txt"), DONE),
        "forged": (bash("echo 'echo 1 > $REWARD_FILE' > answer.txt"), DONE),
        "unscored": (DONE,),
        "mute": (ScriptedTurn(text="no", status=400),),
        "slow": (ScriptedTurn(text="Later.", delay_s=3600),),
    }[name]
    return Task(instruction=name, solution=script, verify=verify)


def trainer(step: int = 3) -> Any:
    """As much of a GRPOTrainer as a rollout function looks at."""
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step),
        args=SimpleNamespace(temperature=0.7),
        processing_class=SimpleNamespace(eos_token_id=EOS),
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environ({}, home=str(tmp_path / "home"))


@pytest.fixture
def rollouts(settings: Settings) -> Iterator[RolloutFunc]:
    with rollout_func(task_of, settings=settings, agent="mini", endpoint="scripted", seed=5) as made:
        yield made


def test_there_is_one_row_per_prompt_in_their_order(rollouts: RolloutFunc) -> None:
    rows = rollouts(["right", "right", "wrong", "unscored", "mute"], trainer())
    assert rows["env_reward"] == reward([], [], env_reward=rows["env_reward"]) == [1.0, 1.0, 0.0, None, 0.0]
    assert {len(column) for column in rows.values()} == {5}
    for place, rollout in enumerate(rollouts.rollouts[:3]):
        (merged,) = rollcage.sequences(rollout)
        assert rows["prompt_ids"][place] + rows["completion_ids"][place] == [*merged.input_ids]
        assert rows["env_mask"][place] == [*merged.loss_mask[merged.prompt_length :]]
        assert rows["logprobs"][place] == [*merged.logprobs[merged.prompt_length :]]
        assert 0 < sum(rows["env_mask"][place]) < len(rows["env_mask"][place]), "what the tool said is masked"
    assert rows["completion_ids"][3:] == [[EOS], [EOS]]
    assert rows["env_mask"][3:] == [[0], [0]]
    (report,) = rollouts.steps
    assert (report.step, report.rollouts, report.unscored, report.untrained) == (3, 5, 1, 1)
    assert (report.mean_reward, report.dropped_tokens) == (0.5, 0)


def test_an_agent_that_keeps_its_work_from_being_judged_escapes_no_zero(rollouts: RolloutFunc) -> None:
    rows = rollouts(["forged", "unscored"], trainer())
    forged, unscored = rollouts.rollouts
    assert (forged.reward, forged.blame, forged.training_reward) == (None, "agent", 0.0)
    assert (unscored.blame, unscored.training_reward) == (None, None)
    assert rows["env_reward"] == [0.0, None]
    assert sum(rows["env_mask"][0]) > 0, "it is trained on, too"
    (report,) = rollouts.steps
    assert (report.unscored, report.mean_reward) == (1, 0.0)


def test_a_group_has_one_id_and_each_rollout_a_seed_of_its_own(rollouts: RolloutFunc) -> None:
    rollouts(["right", "right", "wrong"], trainer())
    first = rollouts.rollouts
    rollouts(["right"], trainer(step=4))
    assert [each.job.group_id for each in first] == ["grpo-0-0", "grpo-0-0", "grpo-0-1"]
    assert [each.job.policy_version for each in [*first, *rollouts.rollouts]] == ["3", "3", "3", "4"]
    requests = [each.turns[0].request for each in [*first, *rollouts.rollouts]]
    assert len({request["seed"] for request in requests}) == 4
    assert {(request["temperature"], request["top_p"], request["top_k"]) for request in requests} == {(0.7, 1.0, -1)}


def test_what_makes_no_sense_is_said_and_stops_the_others(rollouts: RolloutFunc, settings: Settings) -> None:
    def some(prompt: str) -> Any:
        return "no-such-file.toml" if prompt == "missing" else task_of(prompt)

    with (
        rollout_func(some, settings=settings, agent="mini", endpoint="scripted") as broken,
        pytest.raises(rollcage.RollcageError, match="no-such-file"),
    ):
        broken(["slow", "missing"], trainer())
    assert outcomes(settings) == [Outcome.ABORTED]
    with pytest.raises(UsageError, match="no text"):
        rollouts([{"role": "user"}], trainer())


def outcomes(settings: Settings) -> list[Outcome | None]:
    async def read() -> list[Outcome | None]:
        async with Store.open(settings.log_path) as store:
            return [each.outcome for each in await store.list(limit=100)]

    return anyio.run(read)


@pytest.fixture
def sessions(settings: Settings) -> Iterator[SessionFactory]:
    maker = session_factory(task_of, settings=settings, agent="mini", endpoint="scripted")
    sampling = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    made = pickle.loads(pickle.dumps(maker))(sampling=sampling)
    yield made
    made.close()


def test_a_session_is_one_rollout_with_one_merged_trace(sessions: SessionFactory) -> None:
    prompt = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "right"}]
    made = [sessions.create(prompt, seed=7, episode_id=f"e{place}") for place in range(2)]
    for session in made:
        assert isinstance(session, TrainableSession)
        assert session.wait_for_completion() == 0
        (turn,) = session.fetch_training_trace().turns
        assert len(turn.metadata["turns"]) == 2, "both turns are one row"
        assert sum(turn.loss_mask) < len(turn.completion_token_ids)
        assert turn.request["temperature"] == 0.5
        assert "seed" not in turn.request, "the group's number is not the model's seed"
        assert session.verify([]).env_reward == 1.0
        session.close()


def test_close_from_another_thread_aborts_and_leaves_nothing(sessions: SessionFactory, settings: Settings) -> None:
    session = sessions.create("slow", seed=1)
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(session.wait_for_completion()))
    waiting.start()
    session.close()
    waiting.join()
    assert codes == [1]
    assert session.fetch_training_trace().turns == []
    assert session.verify([]).env_reward is None
    assert outcomes(settings) == [Outcome.ABORTED]


async def test_a_call_that_is_cancelled_aborts_its_rollout(settings: Settings) -> None:
    async with rollcage.open_runner(settings=settings) as runner:
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                await rollcage.arun(task_of("slow"), runner=runner, settings=settings, agent="mini")

            tasks.start_soon(run)
            while not runner.open_ids:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert runner.open_ids == []
