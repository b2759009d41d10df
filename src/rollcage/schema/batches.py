"""What callers of a server ask a batch for: tasks as arguments, models in a word, samples, limits."""

from __future__ import annotations

from pydantic import Field, SecretStr

from rollcage.schema.request import RolloutRequest
from rollcage.types import Value


class BatchRequest(Value):
    """Every task x model x agent, n times. The same request again goes on with what is missing."""

    tasks: tuple[RolloutRequest, ...] = Field(min_length=1, max_length=10_000)
    """The tasks, each as the arguments of a rollout; `task_id` names it in the batch. They name no model."""
    models: tuple[str, ...] = Field(default=(), max_length=100)
    """The models, each in one word: `vllm`, `openai/gpt-4o-mini`, `http://host/v1#model`."""
    agents: tuple[str, ...] = Field(default=(), max_length=100)
    """Which agents work; none: the one that each task names."""
    n: int = Field(default=1, ge=1, le=10_000)
    """Samples of each combination."""
    name: str = Field(default="", max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$|^$")
    """Names the batch; none: one is made of what is asked."""
    api_key: SecretStr = SecretStr("")
    """The models' key. It never enters a box, and is never stored or logged."""
    at_once: int = Field(default=8, ge=1, le=1024)
    """Rollouts at the same time; the server's own limit holds, too."""
    max_tokens: int = Field(default=0, ge=0)
    """No rollout is begun once so many tokens were generated; 0: no limit."""
    max_time_s: float | None = Field(default=None, gt=0)
    """After so long everything is stopped."""
