"""rollcage in verl: `RollcageAgentLoop`, named in an agent loop config as `_target_: rollcage.verl.RollcageAgentLoop`.

    - name: rollcage
      _target_: rollcage.verl.RollcageAgentLoop
      task: my_project.tasks.task_of          # optional: a row of the dataset -> a task
      arguments: {agent: mini, history: exact}

To import it needs verl, which is the caller's to install.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from rollcage.api.background import BackgroundRunner, PendingRollout
from rollcage.api.run import Work
from rollcage.errors import UsageError
from rollcage.results.fold import Rollout
from rollcage.trajectory import sequences
from rollcage.trajectory.row import Keep, Row, row_of
from rollcage.trl import PLAIN, instruction_of
from rollcage.types import JsonObject

log = logging.getLogger("rollcage.verl")

_lock = threading.Lock()
_runners: dict[int, BackgroundRunner] = {}
"""verl makes one loop object per rollout: those of a process share a runner."""


class RollcageAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is no dependency
    """Runs each row of the dataset as one rollout, and hands it back as one row."""

    def __init__(
        self,
        *args: Any,
        task: str = "",
        arguments: Mapping[str, Any] | None = None,
        at_once: int = 64,
        sequence: Keep = "longest",
        attempts: int = 3,
        unscored_reward: float | None = None,
        **kwargs: Any,
    ) -> None:
        """`task`: where to import a function from that makes a task of a row; else the last user message of
        `raw_prompt` is the instruction. `arguments`: those of `rollcage.run`; without an endpoint, each rollout is
        sent to the replica that verl's load balancer names. `sequence`: which becomes the row where there are several.

        verl has no word for a rollout that was not scored. It is run again, `attempts` times in all, and then raises,
        unless `unscored_reward` says what to put there; such a row is masked.
        """
        super().__init__(*args, **kwargs)
        self._task, self._arguments = _imported(task) if task else None, dict(arguments or {})
        self._at_once, self._sequence = at_once, sequence
        self._attempts, self._unscored = max(1, attempts), unscored_reward

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """One rollout, to its end. Cancelled, it aborts."""
        most_prompt, most = self.rollout_config.prompt_length, self.rollout_config.response_length
        rollout = await self._rollout(sampling_params, row)
        found = row_of(sequences(rollout), keep=self._sequence, most=most)
        if len(found.prompt_ids) > most_prompt:
            raise UsageError(
                f"the prompt has {len(found.prompt_ids)} tokens, and rollout.prompt_length is {most_prompt}",
                remedy="raise it: a prompt that is cut is not what the model saw",
            )
        return self._output(rollout, found)

    async def _rollout(self, sampling: Mapping[str, Any], row: Mapping[str, Any]) -> Rollout:
        for attempt in range(self._attempts):
            rollout = await self._once(sampling, row)
            if rollout.training_reward is not None:
                return rollout
            log.warning("rollout %s was not scored (%s), attempt %d", rollout.id, rollout.error, attempt + 1)
        if self._unscored is None:
            raise RuntimeError(
                f"rollout {rollout.id} was not scored, {self._attempts} times: {rollout.error}; "
                "give unscored_reward to go on without it"
            )
        return rollout

    async def _once(self, sampling: Mapping[str, Any], row: Mapping[str, Any]) -> Rollout:
        work = self._task(row) if self._task else instruction_of(_plain(row["raw_prompt"]))
        arguments = {"temperature": sampling.get("temperature"), "group_id": str(_plain(row.get("uid", "")))}
        arguments |= self._arguments
        if self._arguments.get("endpoint") or self._arguments.get("base_url"):
            return await self._work(work, arguments, sampling)
        request = uuid4().hex
        address, _ = await self.server_manager._acquire_server(request)
        try:
            own = {"base_url": f"http://{address}", "api_key": "none", "model": self._served()}
            return await self._work(work, {**own, **arguments, "endpoint": "custom"}, sampling)
        finally:
            self.server_manager._release_server(address, request)

    async def _work(self, work: Work, arguments: JsonObject, sampling: Mapping[str, Any]) -> Rollout:
        pinned = {name: sampling.get(name, value) for name, value in PLAIN.items()}
        running = _runner(self._at_once).start(PendingRollout(work, arguments, pinned))
        try:
            rollout = await asyncio.wrap_future(running.future)
        except asyncio.CancelledError:
            await asyncio.to_thread(running.abort)
            raise
        if rollout is None:
            raise RuntimeError("the rollout was aborted")
        return rollout

    def _served(self) -> str:
        return str(self.config.actor_rollout_ref.model.path)

    def _output(self, rollout: Rollout, row: Row) -> AgentLoopOutput:
        if not row.trained_tokens or rollout.training_reward is None:
            row = row.masked(self.tokenizer.eos_token_id)
        return AgentLoopOutput(
            prompt_ids=[*row.prompt_ids],
            response_ids=[*row.response_ids],
            response_mask=[*row.response_mask],
            response_logprobs=[*row.response_logprobs],
            reward_score=self._unscored if rollout.training_reward is None else rollout.training_reward,
            num_turns=2 * len(row.turns),
            metrics=AgentLoopMetrics(generate_sequences=sum(turn.seconds for turn in rollout.turns)),
            extra_fields={
                "rollout_id": rollout.id,
                "outcome": rollout.outcome.value if rollout.outcome else None,
                "scored": rollout.training_reward is not None,
                "truncated": row.truncated,
                "dropped_sequences": row.dropped_sequences,
                "dropped_tokens": row.dropped_tokens,
            },
        )


register("rollcage")(RollcageAgentLoop)


def _runner(at_once: int) -> BackgroundRunner:
    with _lock:
        return _runners.setdefault(at_once, BackgroundRunner(at_once=at_once))


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{path}: {error}", argument="task", remedy="give module.function") from error


def _plain(value: Any) -> Any:
    """A value of verl's object arrays as Python has it."""
    return cast("Any", value).tolist() if hasattr(value, "tolist") else value
