"""Run in the trainers' environment by test_trainers.py: TRL's own trainer and worker on real rollouts."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
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


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8192, **small))


def rollouts() -> list[Any]:
    async def read() -> list[Any]:
        async with Store.open(Settings.from_environ().log_path) as store:
            return [await store.rollout(each.id) for each in await store.list(limit=1000)]

    return anyio.run(read)


def test_grpo_trains_on_rows_and_leaves_out_what_was_not_scored(tmp_path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2, temperature=1.0,
        learning_rate=1e-3, use_cpu=True, bf16=False, save_strategy="no", report_to=[], shuffle_dataset=False,
        logging_steps=1, mask_truncated_completions=True,
    )  # fmt: skip
    # Half of a group earns more than the other: else there would be nothing to learn.
    bonus = iter([0.0, 1.0, 0.0, 0.0] * 2)

    def reward(env_reward, **_):
        return [None if each is None else each + next(bonus) for each in env_reward]

    learner, rows = model(), []
    with rollcage.trl.rollout_func(task_of, agent="mini", endpoint="scripted") as made:

        def kept(prompts, trainer):
            rows.append((prompts, made(prompts, trainer)))
            return rows[-1][1]

        trainer = GRPOTrainer(
            model=learner, args=config, reward_funcs=reward, processing_class=tokenizer(), rollout_func=kept,
            train_dataset=Dataset.from_dict({"prompt": ["right", "unscored"] * 2}),
        )  # fmt: skip
        before = [parameter.detach().clone() for parameter in learner.parameters()]
        trainer.train()
    assert any((old != new).any() for old, new in zip(before, learner.parameters(), strict=True))
    assert [report.step for report in made.steps] == [0, 1]
    for prompts, columns in rows:
        assert prompts == ["right", "right", "unscored", "unscored"]
        assert columns["env_reward"] == [1.0, 1.0, None, None]
        assert [sum(mask) > 0 for mask in columns["env_mask"]] == [True, True, False, False]
    history = [line for line in trainer.state.log_history if "rewards/reward/mean" in line]
    assert [line["rewards/reward/mean"] for line in history] == [1.5, 1.5], "None is no zero"
    assert all(line["grad_norm"] > 0 for line in history)


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


def opencode_factory(sampling=None):
    """The published names, as a spawned worker makes them."""
    from anyio.from_thread import start_blocking_portal
    from openenv.core.harness import VerifyResult

    from opencode_env import OpenCodeConfig, OpenCodeSessionFactory
    from opencode_env.sandbox import LocalSandboxBackend
    from rollcage.simulators import ScriptedModel

    portal = start_blocking_portal().__enter__()
    model = portal.wrap_async_context_manager(ScriptedModel()).__enter__()
    endpoint = model.endpoint((bash("echo right > answer.txt"), DONE))
    config = OpenCodeConfig(
        base_url=endpoint.base_url, api_key=endpoint.key.get_secret_value(), model=f"intercepted/{endpoint.model}"
    )

    def verifier(sandbox, task):
        return VerifyResult(env_reward=float("right" in sandbox.read_text("/home/user/workdir/answer.txt")), done=True)

    make = functools.partial(OpenCodeSessionFactory, mode="transparent_proxy", verifier=verifier)
    return make(config=config, sandbox_backend=LocalSandboxBackend(), sampling=sampling)


def test_the_worker_runs_on_the_published_names(worker) -> None:
    running = worker(opencode_factory, "Write it.")
    running.start()
    try:
        samples = [running.rollout_buffer.get(timeout=600) for _ in range(2)]
    finally:
        running.stop()
    for sample in samples:
        assert 0 < sample.completion_mask.sum() < len(sample.input_ids)
        assert sample.advantage == 0.0, "both were right"
