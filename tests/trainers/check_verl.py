"""Run in the trainers' environment by test_trainers.py: verl's own worker code on real rollouts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from check_trl import task_of, tokenizer
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, _agent_loop_registry

from rollcage.verl import RollcageAgentLoop

ARGUMENTS = {"agent": "mini", "endpoint": "scripted"}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def task(row: Any):
    """What a row of the dataset stands for."""
    return task_of(row["raw_prompt"])


def config(prompt_length: int = 4096, response_length: int = 4096):
    rollout = {"prompt_length": prompt_length, "response_length": response_length}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {"path": "policy"}}, "data": {}})


def loop(whole=None, **more: Any) -> RollcageAgentLoop:
    whole = whole or config()
    return RollcageAgentLoop(
        trainer_config=DictConfigWrap(whole), server_manager=None, tokenizer=tokenizer(), processor=None,
        dataset_cls=None, data_config=DictConfigWrap(whole.data), task="check_verl.task", arguments=ARGUMENTS, **more,
    )  # fmt: skip


def run(made: RollcageAgentLoop, name: str):
    prompt = [{"role": "user", "content": name}]
    return asyncio.run(made.run(SAMPLING, raw_prompt=prompt, uid="group-1"))


def test_it_is_registered_and_its_output_is_verls_own() -> None:
    assert _agent_loop_registry["rollcage"]["_target_"] == "rollcage.verl.RollcageAgentLoop"
    output = run(loop(), "right")
    assert output.reward_score == 1.0
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert 0 < sum(output.response_mask) < len(output.response_mask)
    row = output.as_dict()
    assert row["rm_scores"][-1] == 1.0
    assert output.extra_fields["dropped_tokens"] == 0


def test_verls_worker_pads_it() -> None:
    whole = config()
    worker = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.rollout_config, worker.tokenizer, worker.processor = whole.actor_rollout_ref.rollout, tokenizer(), None
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    worker.mm_processor_kwargs = {}
    output = run(loop(whole), "right")
    trained, prompt = sum(output.response_mask), len(output.prompt_ids)
    padded = asyncio.run(worker._agent_loop_postprocess(output, False, raw_prompt="right"))
    assert padded.response_mask.sum() == trained
    assert padded.attention_mask.sum() == prompt + len(output.response_ids)


def test_what_does_not_fit_is_cut_at_an_answer_or_refused() -> None:
    whole = run(loop(), "right")
    least = whole.response_mask.index(0)
    output = run(loop(config(response_length=len(whole.response_ids) - 1)), "right")
    assert output.response_ids == whole.response_ids[:least], "the last whole answer that fits"
    assert output.extra_fields["truncated"] and output.extra_fields["dropped_tokens"] > 0
    with pytest.raises(Exception, match="prompt_length"):
        run(loop(config(prompt_length=8)), "right")


def test_what_was_not_scored_is_no_zero() -> None:
    with pytest.raises(RuntimeError, match="not scored, 2 times"):
        run(loop(attempts=2), "unscored")
    output = run(loop(attempts=1, unscored_reward=-1.0), "unscored")
    assert (output.reward_score, output.response_mask, output.extra_fields["scored"]) == (-1.0, [0], False)
    output.as_dict()
