"""rollcage in TRL: `rollout_func` for `GRPOTrainer`, `session_factory` for `HarnessRolloutWorker`.

Both run each rollout as `rollcage.run` would: the arguments are the same. TRL is the caller's to install.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Any, Unpack

from rollcage.api.background import BackgroundRunner, PendingRollout, RunningRollout
from rollcage.api.run import Work
from rollcage.errors import UsageError
from rollcage.gateway.pause import Running as Calls
from rollcage.results.fold import Rollout
from rollcage.schema.arguments import RolloutArguments
from rollcage.settings import Settings
from rollcage.trajectory import Sequence, sequences
from rollcage.trajectory.row import Keep, Row, row_of
from rollcage.types import JsonObject, Outcome, Value

if TYPE_CHECKING:
    from openenv.core.harness import Message, TrainingTrace, VerifyResult

log = logging.getLogger("rollcage.trl")

TaskOf = Callable[[Any], Work]
"""What a dataset's prompt stands for: called once per group of rollouts."""
PLAIN: Mapping[str, float | int] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling whose logprobs are those of what was sampled from, whatever the agent asks for."""


def instruction_of(prompt: Any) -> str:
    """A prompt as an instruction: the text itself, or what the user says last in a list of messages."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt if isinstance(prompt, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
    raise UsageError(f"{type(prompt).__name__}: no text and no messages with a user's in them", argument="prompt")


def reward(*_: Any, env_reward: list[float | None], **__: Any) -> list[float | None]:
    """For `reward_funcs`: what each rollout earned; None where it was not scored, which TRL leaves out."""
    return env_reward


class StepReport(Value):
    """What one call of a `rollout_func` brought, and what it left out."""

    step: int
    """The trainer's step."""
    rollouts: int
    """Rollouts that were run: one per prompt."""
    unscored: int = 0
    """Those without a reward: masked, and no part of any baseline. Where the agent is to blame, it is 0 instead."""
    blame: dict[str, int] = {}
    """Whose fault that was."""
    untrained: int = 0
    """Those with a reward but no token to train: masked, and part of the baseline."""
    truncated: int = 0
    """Rows in which an answer was cut."""
    dropped_sequences: int = 0
    """Sequences beside the one that a row can hold."""
    dropped_tokens: int = 0
    """Sampled tokens that are not trained for that reason, or because the row was too long."""
    trained_tokens: int = 0
    """Sampled tokens that are."""
    mean_reward: float | None = None
    """Of those that were scored."""
    seconds: float
    """How long it took."""


class RolloutFunc:
    """What `GRPOTrainer(rollout_func=...)` takes. A context manager: its end stops what still runs."""

    def __init__(
        self,
        task: TaskOf,
        arguments: JsonObject,
        *,
        runner: BackgroundRunner,
        keep: Keep,
        most: int | None,
        min_usable: int,
    ) -> None:
        """Made by `rollout_func`."""
        self._task, self._arguments, self._runner, self._keep, self._most = task, arguments, runner, keep, most
        self._min_usable = min_usable
        self._calls = 0
        self.steps: list[StepReport] = []
        """One per call."""
        self.rollouts: list[Rollout] = []
        """Those of the last call, in the order of its prompts."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Exactly one row per prompt, in their order."""
        started = time.monotonic()
        step, eos = trainer.state.global_step, _eos(trainer.processing_class)
        wanted = self._wanted(prompts, step, trainer.args)
        self.rollouts = self._runner.run_groups(wanted, min_usable=self._min_usable)
        merged = [sequences(rollout) for rollout in self.rollouts]
        rows = [row_of(each, keep=self._keep, most=self._most) for each in merged]
        report = _report(step, self.rollouts, rows, time.monotonic() - started)
        self.steps.append(report)
        if report.unscored or report.untrained or report.dropped_tokens:
            log.warning("step %d: %s", step, report.model_dump_json(exclude_defaults=True))
        return _columns(self.rollouts, rows, eos)

    def paused(self, policy_version: str = "", *, running: Calls = "finish") -> AbstractContextManager[None]:
        """Around a weight sync: no model call runs inside the block, and those after it are stamped `policy_version`.

        `running`: calls that run before it `finish`, or are `cut`.
        """
        return self._runner.paused(policy_version, running=running)

    def _wanted(self, prompts: list[Any], step: int, args: Any) -> list[tuple[PendingRollout, int]]:
        """The groups: equal prompts beside each other are the generations of one."""
        temperature = self._arguments.get("temperature")
        given = {
            "policy_version": str(step),
            **self._arguments,
            "temperature": args.temperature if temperature is None else temperature,
        }
        name = self._arguments.get("group_id", "grpo")
        while self._runner.has_group(f"{name}-{self._calls}-0"):
            self._calls += 1  # an earlier run's, in the same log
        wanted: list[tuple[PendingRollout, int]] = []
        for place, (prompt, same) in enumerate(groupby(prompts)):
            own: JsonObject = {"group_id": f"{name}-{self._calls}-{place}"}
            if (seed := self._arguments.get("seed")) is not None:
                own["seed"] = derived_seed(seed, self._calls, place)
            wanted.append((PendingRollout(self._task(prompt), {**given, **own}, PLAIN), len(list(same))))
        self._calls += 1
        return wanted

    def close(self) -> None:
        """Stop what still runs."""
        self._runner.close()

    def __enter__(self) -> RolloutFunc:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def rollout_func(
    task: TaskOf = instruction_of,
    *,
    at_once: int = 8,
    sequence: Keep = "longest",
    max_completion_tokens: int | None = None,
    min_usable: int = 0,
    settings: Settings | None = None,
    **arguments: Unpack[RolloutArguments],
) -> RolloutFunc:
    """Rollouts for TRL's `GRPOTrainer`: `GRPOTrainer(..., rollout_func=rollout_func(...), reward_funcs=reward)`.

    The generations of a prompt are one group of rollouts, started in one request. `RolloutFunc.paused` goes around a
    weight sync.

    `task`: what a prompt of the dataset stands for; its text is the instruction by default. `at_once`: rollouts at a
    time. `sequence`: which sequence of a rollout becomes its row where there are several: the `longest`, or the `last`.
    `max_completion_tokens`: longer rows end with the last answer that fits; TRL itself cuts nothing. `min_usable`: when
    so many rollouts of a group are scored and have tokens to train, its others are stopped, and their rows masked.
    `arguments`: those of `rollcage.run`. The temperature is the trainer's unless it is given, and sampling is plain
    otherwise. Of a `seed`, each rollout gets one of its own.

    A rollout without a reward becomes a masked row with reward None; one without a token to train, a masked row with
    its reward. `steps` counts both, and all that was dropped.
    """
    runner = BackgroundRunner(at_once=at_once, settings=settings)
    return RolloutFunc(
        task, dict(arguments), runner=runner, keep=sequence, most=max_completion_tokens, min_usable=min_usable
    )


def derived_seed(*parts: object) -> int:
    """A sampling seed that is the same for the same parts, and another for others."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def _eos(processing: Any) -> int:
    eos = getattr(getattr(processing, "tokenizer", processing), "eos_token_id", None)
    if not isinstance(eos, int):
        raise UsageError("the trainer's tokenizer has no end-of-text token", argument="processing_class")
    return eos


def _columns(rollouts: list[Rollout], rows: list[Row], eos: int) -> dict[str, list[Any]]:
    """What TRL reads."""
    filled = [
        row if row.trained_tokens and rollout.training_reward is not None else row.masked(eos)
        for rollout, row in zip(rollouts, rows, strict=True)
    ]
    return {
        "prompt_ids": [[*row.prompt_ids] for row in filled],
        "completion_ids": [[*row.response_ids] for row in filled],
        "logprobs": [[*row.response_logprobs] for row in filled],
        "env_mask": [[*row.response_mask] for row in filled],
        "env_reward": [rollout.training_reward for rollout in rollouts],
        "rollout_id": [rollout.id for rollout in rollouts],
        "outcome": [rollout.outcome.value if rollout.outcome else None for rollout in rollouts],
        "truncated": [row.truncated for row in rows],
    }


def _report(step: int, rollouts: list[Rollout], rows: list[Row], seconds: float) -> StepReport:
    counted = [(rollout.training_reward, row) for rollout, row in zip(rollouts, rows, strict=True)]
    scored = [(reward, row) for reward, row in counted if reward is not None]
    unscored = [rollout for rollout in rollouts if rollout.training_reward is None]
    rewards = [reward for reward, _ in scored]
    return StepReport(
        step=step,
        rollouts=len(rollouts),
        unscored=len(unscored),
        blame=dict(Counter(rollout.blame or "nobody" for rollout in unscored)),
        untrained=sum(not row.trained_tokens for _, row in scored),
        truncated=sum(row.truncated for row in rows),
        dropped_sequences=sum(row.dropped_sequences for row in rows),
        dropped_tokens=sum(row.dropped_tokens for row in rows),
        trained_tokens=sum(row.trained_tokens for _, row in scored),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        seconds=seconds,
    )


@dataclass(frozen=True)
class SessionFactoryMaker:
    """What `session_factory` gives: picklable; called by TRL in its worker's process."""

    task: TaskOf
    at_once: int
    settings: Settings | None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, sampling: Mapping[str, Any] | None = None) -> SessionFactory:
        """A factory; `sampling`: what each request to the model must say of it."""
        return SessionFactory(self, {**PLAIN, **(sampling or {})})


def session_factory(
    task: TaskOf = instruction_of,
    *,
    at_once: int = 8,
    settings: Settings | None = None,
    **arguments: Unpack[RolloutArguments],
) -> SessionFactoryMaker:
    """For `HarnessRolloutWorker(harness_session_factory=...)`: each session is one rollout.

    `task`: what a prompt of the dataset stands for; a function of a module, as it goes to another process.
    `arguments`: those of `rollcage.run`.
    """
    return SessionFactoryMaker(task, at_once, settings, dict(arguments))


class SessionFactory:
    """Starts sessions, all on one runner."""

    def __init__(self, maker: SessionFactoryMaker, sampling: JsonObject) -> None:
        """Made by a `SessionFactoryMaker`."""
        temperature = sampling.pop("temperature", None)
        self._task, self._extra_body = maker.task, sampling
        self._arguments = {**maker.arguments, **({} if temperature is None else {"temperature": temperature})}
        self._runner = BackgroundRunner(at_once=maker.at_once, settings=maker.settings)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Session:
        """A session whose rollout runs already.

        `seed`: the group that trainers run, and nothing of the model's: equal prompts would give equal samples.
        """
        arguments = dict(self._arguments)
        if seed is not None:
            arguments["group_id"] = str(seed)
        if arguments.get("seed") is not None:
            arguments["seed"] = derived_seed(arguments["seed"], seed, episode_id)
        if episode_id:
            arguments["metadata"] = {**(arguments.get("metadata") or {}), "episode_id": episode_id}
        return Session(self._runner.start(PendingRollout(self._task(task), arguments, self._extra_body)), task)

    def close(self) -> None:
        """Stop what still runs."""
        self._runner.close()


class Session:
    """One rollout, as OpenEnv's harness names it: a `TrainableSession`. Its verifier is the rollout's own."""

    def __init__(self, running: RunningRollout[Rollout], prompt: Any) -> None:
        """Made by a factory."""
        self._running, self._prompt = running, prompt

    def initial_messages(self) -> list[Message]:
        """The instruction."""
        return [{"role": "user", "content": instruction_of(self._prompt)}]

    def list_tools(self) -> list[Any]:
        """None: the agent has tools of its own."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Always an error: the agent calls its own tools."""
        raise UsageError(f"{name}: the agent runs a tool loop of its own", argument="name")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """0 where the agent ended by itself, else 1. TimeoutError where its time was up, or `timeout_s` is."""
        rollout = self._running.wait(timeout_s)
        if rollout is not None and rollout.outcome is Outcome.AGENT_TIMEOUT:
            raise TimeoutError(rollout.error)
        return int(rollout is None or rollout.outcome is not Outcome.FINISHED)

    def fetch_training_trace(self) -> TrainingTrace:
        """The rollout's sequences, each as one merged turn: TRL makes one row of each, and forks nothing itself."""
        from openenv.core.harness import TrainingTrace

        rollout = self._running.wait()
        found = sequences(rollout) if rollout is not None else []
        return TrainingTrace.from_entries([_entry(rollout, each) for each in found if rollout and each.trained_tokens])

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """What the rollout earned, 0 where the agent kept it from being judged; None where it was not scored."""
        from openenv.core.harness import VerifyResult

        rollout = self._running.wait()
        parts = dict(rollout.reward_parts) if rollout is not None else {}
        return VerifyResult(env_reward=rollout.training_reward if rollout else None, done=True, metrics=parts)

    def close(self) -> None:
        """Abort the rollout where it still runs; nothing of it is left then. From any thread."""
        self._running.abort()


def _entry(rollout: Rollout, sequence: Sequence) -> JsonObject:
    row = sequence.split()
    last = next(turn for turn in rollout.turns if turn.index == sequence.turns[-1])
    choice = {"index": 0, "message": last.message, "finish_reason": last.finish_reason}
    return {
        "prompt_token_ids": [*row.prompt_ids],
        "completion_token_ids": [*row.response_ids],
        "per_token_logps": [*row.response_logprobs],
        "loss_mask": [*sequence.loss_mask],
        "request": last.request,
        "response": {"choices": [choice], "usage": last.usage},
        "metadata": {
            "node_id": f"sequence-{sequence.index}",
            "rollout_id": rollout.id,
            "session": sequence.session,
            "turns": [*sequence.turns],
            "policy_versions": [*sequence.policy_versions],
        },
    }
