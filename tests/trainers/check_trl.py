"""Run in the trainers' environment by test_trainers.py: TRL's own worker on real rollouts."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

import rollcage.trl
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import Outcome, ScriptedCall, ScriptedTurn, Task

VOCABULARY = 1 << 15
DONE = ScriptedTurn(text="All done.")


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))


def task_of(prompt: Any) -> Task:
    """What a prompt stands for. In a module, so that a spawned worker finds it."""
    name = rollcage.trl.instruction_of(prompt)
    script = {
        "right": (bash("echo right > answer.txt"), DONE),
        "unscored": (DONE,),
        "slow": (ScriptedTurn(text="Later.", delay_s=3600),),
    }[name]
    return Task(instruction=name, solution=script, verify=() if name == "unscored" else ("grep -qx right answer.txt",))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{place}": place for place in range(VOCABULARY)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "t0")))
    made.pad_token = made.eos_token = "t1"
    return made


def rollouts() -> list[Any]:
    async def read() -> list[Any]:
        async with Store.open(Settings.from_environ().log_path) as store:
            return [await store.rollout(each.id) for each in await store.list(limit=1000)]

    return anyio.run(read)


@pytest.fixture
def worker(monkeypatch):
    """TRL wants an importable vLLM, which only its own sampling would use."""
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)

    def make(factory, *names: str) -> HarnessRolloutWorker:
        processing = tokenizer()
        processing.response_template = {}
        prompts = [[{"role": "user", "content": name}] for name in names]
        return HarnessRolloutWorker(
            harness_session_factory=factory, model_name="policy", dataset=Dataset.from_dict({"prompt": prompts}),
            reward_funcs=[], processing_class=processing, eos_token_ids=[1], num_generations=2, max_inflight_tasks=2,
        )  # fmt: skip

    return make


def test_the_worker_runs_on_rollcage_sessions_and_leaves_nothing_when_it_is_stopped(worker) -> None:
    already = {each.id for each in rollouts()}
    factory = rollcage.trl.session_factory(task_of, agent="mini", endpoint="scripted")
    PartialState()  # as a trainer does, which makes the worker: without it TRL cannot write its log
    running = worker(factory, "right", "slow")
    running.start()
    try:
        samples = [running.rollout_buffer.get(timeout=600) for _ in range(2)]
        running.check_health(600)
    finally:
        running.stop()
    assert {sample.group_id for sample in samples} == {0}
    for sample in samples:
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert 0 < sample.completion_mask.sum() < len(sample.input_ids)
        assert (sample.old_log_probs[sample.completion_mask == 0] == 0).all()
    mine = [each for each in rollouts() if each.id not in already]
    right = [each for each in mine if each.job.task.instruction == "right"]
    assert len(right) == 2, "each one is one row"
    assert [each.reward for each in right] == [1.0, 1.0]
    assert not any("seed" in turn.request for each in right for turn in each.turns), "the group is no sampling seed"
    assert {each.outcome for each in mine if each not in right} <= {Outcome.ABORTED, Outcome.CRASHED}
    assert not any(each.outcome is None for each in mine)
