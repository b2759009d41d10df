"""Run in the trainers' environment by test_trainers.py: TRL's own trainer and worker on real rollouts."""

from __future__ import annotations

import functools
import itertools
import os
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

import anyio
import psutil
import pytest
import torch
from accelerate import PartialState
from anyio.from_thread import start_blocking_portal
from datasets import Dataset
from openenv.core.harness import VerifyResult
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

import rollcage.trl
from opencode_env import LocalSandboxBackend, OpenCodeConfig, OpenCodeSessionFactory, OpenCodeTask, SandboxHandle
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.store import Store
from rollcage.types import Outcome, ScriptedCall, ScriptedTurn, Task

VOCABULARY = 1 << 15
DONE = ScriptedTurn(text="All done.")


def bash(command: str, **more: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command, **more}),))


def task_of(prompt: Any) -> Task:
    """What a prompt stands for. In a module, so that a spawned worker finds it."""
    name = rollcage.trl.instruction_of(prompt)
    script = {
        "right": (bash("echo right > answer.txt"), DONE),
        "unscored": (DONE,),
        "mute": (ScriptedTurn(text="no", status=400),),
        "slow": (ScriptedTurn(text="Later.", delay_s=3600),),
    }[name]
    return Task(instruction=name, solution=script, verify=() if name == "unscored" else ("grep -qx right answer.txt",))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{place}": place for place in range(VOCABULARY)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "t0")))
    made.pad_token = made.eos_token = f"t{default_tokenizer().eos}"
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


def opencode_verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
    assert task.instruction == "Write it."
    return VerifyResult(env_reward=float(sandbox.exec("grep -qx right workdir/answer.txt").exit_code == 0), done=True)


def own_processes() -> set[psutil.Process]:
    """Those that were started below this test, however far: they have its variables."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("ROLLCAGE_HOME") == os.environ["ROLLCAGE_HOME"]:
                found.add(process)
    return found


def test_the_worker_runs_on_the_published_names_and_leaves_nothing(worker) -> None:
    PartialState()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ScriptedModel()) as model:
        resource_tracker.ensure_running()  # multiprocessing's own, which stays
        already = own_processes()
        endpoint = model.endpoint((bash("echo right > answer.txt", description="Write it."), DONE))
        key = endpoint.key.get_secret_value()
        config = OpenCodeConfig(base_url=endpoint.base_url, api_key=key, model=f"intercepted/{endpoint.model}")
        factory = functools.partial(
            OpenCodeSessionFactory, config=config, sandbox_backend=LocalSandboxBackend(), mode="transparent_proxy",
            verifier=opencode_verifier,
        )  # fmt: skip
        running = worker(factory, "Write it.")
        running.start()
        try:
            samples = [running.rollout_buffer.get(timeout=600) for _ in range(2)]
            running.check_health(600)
            assert own_processes() - already
        finally:
            running.stop()
        asked = [each.body for each in model.requests(endpoint)]
        _, left = psutil.wait_procs(own_processes() - already, timeout=60)
    assert not left
    for sample in samples:
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert 0 < sample.completion_mask.sum() < len(sample.input_ids), "both turns are in one row"
        assert (sample.metrics["reward"], sample.advantage) == (1.0, 0.0), "both of the group were right"
    assert {(each["temperature"], each["top_p"], "seed" in each) for each in asked} == {(1.0, 1.0, False)}


def test_grpo_trains_on_the_rows_and_leaves_out_what_was_not_scored(tmp_path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=6, num_generations=2, temperature=1.0,
        learning_rate=1e-3, use_cpu=True, bf16=False, save_strategy="no", report_to=[], shuffle_dataset=False,
        logging_steps=1, mask_truncated_completions=True,
    )  # fmt: skip
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    learner = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8192, **small))
    before = [parameter.detach().clone() for parameter in learner.parameters()]
    rows: list[tuple[list[str], dict[str, list[Any]]]] = []
    # Half of a group earns more than the other: else there would be nothing to learn.
    bonus = itertools.cycle([0.5, 0.0])

    def reward(env_reward, **_) -> list[float | None]:
        return [None if each is None else each + next(bonus) for each in env_reward]

    with rollcage.trl.rollout_func(task_of, agent="mini", endpoint="scripted") as made:

        def kept(prompts, trainer):
            rows.append((prompts, made(prompts, trainer)))
            return rows[-1][1]

        trainer = GRPOTrainer(
            model=learner, args=config, reward_funcs=reward, processing_class=tokenizer(), rollout_func=kept,
            train_dataset=Dataset.from_dict({"prompt": ["right", "unscored", "mute"] * 2}),
        )  # fmt: skip
        trainer.train()
    assert any((old != new).any() for old, new in zip(before, learner.parameters(), strict=True))
    assert [(report.step, report.rollouts, report.unscored, report.untrained) for report in made.steps] == [
        (0, 6, 2, 2),
        (1, 6, 2, 2),
    ]
    for prompts, columns in rows:
        assert prompts == ["right", "right", "unscored", "unscored", "mute", "mute"], "each is repeated by TRL"
        assert columns["env_reward"] == [1.0, 1.0, None, None, 0.0, 0.0]
        assert [sum(mask) > 0 for mask in columns["env_mask"]] == [True, True, False, False, False, False]
    history = [line for line in trainer.state.log_history if "rewards/reward/mean" in line]
    assert [line["rewards/reward/mean"] for line in history] == [0.75, 0.75], "None is no zero"
