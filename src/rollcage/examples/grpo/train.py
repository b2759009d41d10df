"""GRPO on two CPU cores with real parts: SmolLM2-135M on vLLM, boxes and verifiers by rollcage, updates by TRL.

    make train-demo                                  builds what is missing and runs this
    python train.py --engine FOLDER --out FOLDER     FOLDER: what scripts/vllm.sh made

Rollouts of a teacher are exported (`rollcage export --format sft`) and learned, so that the model speaks. Then GRPO: a
group of rollouts per question, an update, the new weights pushed into the running engine. Each step checks that the
captured logprobs are those of the trainer's own forward pass.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from engine import Engine
from plot import plot
from tasks import COMMANDS, HELD_OUT, MOST_TOKENS, TRAINING, questions, task, teacher
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

import rollcage
import rollcage.trl

SFT_ROWS, SFT_BATCH, SFT_LR, SFT_LAYERS = 80, 8, 3e-4, 10
RL_LR, RL_LAYERS = 3e-5, 8


def collect(wanted: list[rollcage.Task], n: int = 1, at_once: int = 16, **arguments) -> list[rollcage.Rollout]:
    """Run these tasks, each as a group of n rollouts."""

    async def work() -> list[rollcage.Rollout]:
        async with rollcage.open_runner(at_once=at_once) as runner:
            each = (rollcage.arun_group(task, n, runner=runner, agent="shell", **arguments) for task in wanted)
            return [rollout for group in await asyncio.gather(*each) for rollout in group]

    return asyncio.run(work())


def train_only(model, layers: int) -> list[torch.nn.Parameter]:
    """Freeze all but the last layers; those that learn."""
    model.requires_grad_(False)
    chosen = [parameter for layer in model.model.layers[-layers:] for parameter in layer.parameters()]
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def warm_start(model, path: Path, steps: int, rng: random.Random) -> list[float]:
    """Learn the exported rows: loss on what the teacher said only; the loss of each step."""
    rows = rollcage.load(path)
    optimizer = torch.optim.AdamW(train_only(model, SFT_LAYERS), lr=SFT_LR, weight_decay=0.0)
    losses, order = [], []
    for step in range(steps):
        if len(order) < SFT_BATCH:
            order = rng.sample(rows, len(rows))
        batch, order = order[:SFT_BATCH], order[SFT_BATCH:]
        width = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([[*row["input_ids"], *[0] * (width - len(row["input_ids"]))] for row in batch])
        labels = torch.tensor([[*row["labels"], *[-100] * (width - len(row["labels"]))] for row in batch])
        for group in optimizer.param_groups:
            group["lr"] = SFT_LR * (1 - step / steps)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def disagreement(model, rollouts: list[rollcage.Rollout]) -> float:
    """How far the captured logprobs are from the trainer's own forward pass, at most, over one rollout of each task."""
    worst = 0.0
    for rollout in {each.job.task.id: each for each in rollouts}.values():
        for sequence in rollcage.sequences(rollout):
            inputs, targets, mask, captured = (torch.tensor([column]) for column in sequence.shifted())
            scores = torch.log_softmax(model(input_ids=inputs).logits.float(), -1)
            own = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            worst = max(worst, ((own - captured).abs() * mask).max().item())
    return worst


def tally(rollouts: list[rollcage.Rollout]) -> dict:
    """What came of them: mean reward, how many wrote an answer at all, how many were right."""
    rewards = [each.reward for each in rollouts if each.reward is not None]
    kinds = {kind: [each.reward == 1 for each in rollouts if each.job.task.id == kind] for kind in COMMANDS}
    return {
        "rollouts": len(rollouts),
        "unscored": len(rollouts) - len(rewards),
        "mean_reward": sum(rewards) / max(1, len(rewards)),
        "answered": sum(reward > 0 for reward in rewards),
        "right": sum(reward == 1 for reward in rewards),
        "right_by_kind": {kind: f"{sum(right)}/{len(right)}" for kind, right in kinds.items()},
    }


class Push(TrainerCallback):
    """After each update: the new weights go into the engine, and the step is written down."""

    def __init__(self, engine: Engine, rollouts: rollcage.trl.RolloutFunc, steps: list[dict], out: Path) -> None:
        self.engine, self.rollouts, self.steps, self.out = engine, rollouts, steps, out

    def on_step_begin(self, args, state, control, **_) -> None:
        self.began = time.monotonic()

    def on_optimizer_step(self, args, state, control, model=None, **_) -> None:
        report, made = self.rollouts.steps[-1], self.rollouts.rollouts
        versions = {turn.policy_version for each in made for turn in each.turns}
        assert versions == {str(state.global_step)}, versions
        updated = time.monotonic()
        with self.rollouts.paused(policy_version=str(state.global_step + 1)):
            synced = self.engine.push(model)
        self.steps.append({
            "step": state.global_step + 1, **tally(made), "trained_tokens": report.trained_tokens,
            "dropped_tokens": report.dropped_tokens, "logprob_error": self.rollouts.error,
            "rollout_s": report.seconds, "sync_s": synced,
            "update_s": updated - self.began - report.seconds - self.rollouts.checking_s,
        })  # fmt: skip
        (self.out / "steps.json").write_text(json.dumps(self.steps, indent=1))
        line = self.steps[-1]
        print(
            f"step {line['step']:2}  reward {line['mean_reward']:.2f}  answered {line['answered']}/{line['rollouts']}  "
            f"right {line['right']}  rollout {line['rollout_s']:.0f} s  update {line['update_s']:.0f} s  "
            f"sync {line['sync_s']:.1f} s  logprobs within {line['logprob_error']:.0e}",
            flush=True,
        )


def grpo(model, tokenizer, engine: Engine, options: argparse.Namespace, endpoint: dict) -> list[dict]:
    """The RL run: what happened in each step."""
    train_only(model, RL_LAYERS)
    asked = questions(TRAINING)
    config = GRPOConfig(
        output_dir=str(options.out / "trainer"), max_steps=options.steps, seed=options.seed,
        per_device_train_batch_size=len(COMMANDS) * options.group, num_generations=options.group,
        temperature=1.0, beta=0.0, learning_rate=RL_LR, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=1.0, scale_rewards="batch", shuffle_dataset=False, max_completion_length=MOST_TOKENS,
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    steps: list[dict] = []
    with rollcage.trl.rollout_func(task, at_once=16, agent="shell", seed=options.seed, **endpoint) as rollouts:

        def checked(prompts, trainer):
            rows = rollouts(prompts, trainer)
            started = time.monotonic()
            rollouts.error = disagreement(trainer.model, rollouts.rollouts)
            rollouts.checking_s = time.monotonic() - started
            return rows

        trainer = GRPOTrainer(
            model=model, args=config, processing_class=tokenizer, reward_funcs=rollcage.trl.reward,
            train_dataset=Dataset.from_dict({"prompt": asked * (1 + options.steps * len(COMMANDS) // len(asked))}),
            rollout_func=checked, callbacks=[Push(engine, rollouts, steps, options.out)],
        )  # fmt: skip
        trainer.train()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True, help="what scripts/vllm.sh made")
    parser.add_argument("--out", type=Path, required=True, help="where everything goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--group", type=int, default=6, help="rollouts per question")
    parser.add_argument("--sft-steps", type=int, default=20)
    parser.add_argument("--evaluate", type=int, default=48, help="held-out rollouts, before and after")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["ROLLCAGE_HOME"] = str(options.out.resolve() / "home")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    rng, clock, began = random.Random(options.seed), {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal began
        clock[name] = time.monotonic() - began
        began = time.monotonic()
        print(f"{name}: {clock[name]:.0f} s", flush=True)

    with Engine(options.engine, options.out.resolve()) as engine:
        tokenizer = AutoTokenizer.from_pretrained(engine.model)
        model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
        engine.ready()
        endpoint = {"endpoint": "custom", "base_url": engine.url, "api_key": "none", "model": "policy"}
        lap("start")
        # As many of each kind: what the teacher favours, the policy does, and RL would have to undo it.
        asked = (questions(TRAINING) * SFT_ROWS)[:SFT_ROWS]
        said = [teacher(rng, each) for each in asked]
        ids = [tokenizer.encode(each, add_special_tokens=False) for each in said]
        lessons = [task(*each[:1], said=each[1], ids=each[2]) for each in zip(asked, said, ids, strict=True)]
        taught = collect(lessons, policy_version="teacher", **endpoint)
        rows = options.out / "teacher.jsonl"
        export = [sys.executable, "-m", "rollcage", "export", "--format", "sft", "-o", str(rows)]
        subprocess.run([*export, *(each.id for each in taught)], check=True)
        lap("teacher")
        losses = warm_start(model, rows, options.sft_steps, rng)
        model.zero_grad()
        engine.push(model)
        lap("warm start")
        held, each = questions(HELD_OUT), max(1, options.evaluate // len(questions(HELD_OUT)))
        before = collect([task(question) for question in held], each, temperature=1.0, **endpoint)
        lap("evaluation before")
        steps = grpo(model, tokenizer, engine, options, endpoint)
        lap("training")
        after = collect([task(question) for question in held], each, temperature=1.0, **endpoint)
        lap("evaluation after")
    plot({f"seed {options.seed}": steps}, options.out / "reward.png")
    few = min(4, len(steps))
    mean = [sum(step["mean_reward"] for step in part) / few for part in (steps[:few], steps[-few:])]
    summary = {
        "seed": options.seed, "teacher": tally(taught), "sft_loss": [losses[0], losses[-1]] if losses else [],
        "held_out_before": tally(before), "held_out_after": tally(after), f"first_{few}": mean[0],
        f"last_{few}": mean[1], "logprob_error": max(step["logprob_error"] for step in steps), "seconds": clock,
        "per_step": {name: sum(step[name] for step in steps) / len(steps) for name in
                     ("rollout_s", "update_s", "sync_s")},
        "cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg(),
    }  # fmt: skip
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
