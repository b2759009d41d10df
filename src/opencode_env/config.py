"""How one rollout of the harness primitive is configured."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from rollcage.types import AgentSpec, Endpoint, Sampling

Provider = Literal["openai_compatible", "openai", "anthropic"]
"""The kinds of model endpoints that the published environment names."""

_PREFIXES = frozenset("intercepted openai anthropic openai_compatible openai-compatible vllm local".split())
"""What may stand before the slash of `model` and is no part of the model's own name."""
_PACKAGES = {
    "openai_compatible": "@ai-sdk/openai-compatible",
    "openai": "@ai-sdk/openai",
    "anthropic": "@ai-sdk/anthropic",
}
_NEVER_OFFERED = frozenset(("question",))
"""Tools that no agent has here: nobody would answer."""


class OpenCodeConfig(BaseModel):
    """Which model, which tools, how long. The published names."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    provider: Provider = "openai_compatible"
    """Kept for the name: the agent always speaks to the gateway, which speaks to `base_url` as OpenAI does."""
    base_url: str
    """The model's address; `/v1` is added where it lacks it."""
    api_key: str = "intercepted"
    """The real key. It stays in this process and never enters a box."""
    model: str = "intercepted/model"
    """The model's name there, with or without a provider before the slash."""
    request_timeout_ms: int = 600_000
    """Accepted; a call to the model may take as long as the agent's budget."""
    opencode_version: str = "latest"
    """Accepted; boxes come with the version that rollcage pins."""
    disabled_tools: list[str] = Field(default_factory=lambda: ["webfetch", "question"])
    """Tools that are not offered to the model."""
    enabled_tools: list[str] | None = None
    """Only these are offered; `disabled_tools` then says nothing."""
    system_prompt: str | None = None
    """Replaces the agent's own system prompt."""
    extra_opencode_json: dict[str, Any] = Field(default_factory=dict)
    """Merged into the agent's configuration, last."""
    run_format: Literal["default", "json"] = "json"
    """Accepted; the trace is JSON lines."""
    agent_timeout_s: float = 900.0
    """The agent's wall-clock budget."""
    extra_env: dict[str, str] = Field(default_factory=dict)
    """Further environment of the agent."""
    extra_setup_shell: str | None = None
    """Bash that is run before the task's own setup."""
    disable_thinking: bool = False
    """Ask the chat template not to think."""
    max_tokens_cap: int | None = None
    """Ceiling on the tokens of one answer."""
    proxy_max_tokens_cap: int | None = 16384
    """The same, where `max_tokens_cap` is not set."""
    proxy_top_logprobs: int = 5
    """Alternatives asked for per token."""
    proxy_disable_thinking: bool = False
    """The same as `disable_thinking`."""
    sandbox_home: str = "/home/user"
    """Home is the same in every box; another one is refused."""

    @property
    def cap(self) -> int:
        """The ceiling on the tokens of one answer; 0 means none."""
        return self.max_tokens_cap or self.proxy_max_tokens_cap or 0

    def endpoint(self) -> Endpoint:
        """The model."""
        first, _, rest = self.model.partition("/")
        thinking = False if self.disable_thinking or self.proxy_disable_thinking else None
        base = self.base_url.rstrip("/")
        return Endpoint(
            base_url=base if base.endswith("/v1") else f"{base}/v1",
            model=rest if rest and first in _PREFIXES else self.model,
            key=SecretStr(self.api_key),
            sampling=Sampling(top_logprobs=self.proxy_top_logprobs, thinking=thinking),
        )

    def agent(self, driver: str) -> AgentSpec:
        """The agent."""
        disabled = () if self.enabled_tools is not None else tuple(set(self.disabled_tools) - _NEVER_OFFERED)
        return AgentSpec(
            driver=driver,
            system_prompt=self.system_prompt or "",
            enabled_tools=None if self.enabled_tools is None else tuple(self.enabled_tools),
            disabled_tools=tuple(sorted(disabled)),
            config=self.extra_opencode_json,
            env=self.extra_env,
        )


def provider_npm_package(provider: Provider) -> str:
    """The AI SDK package of a provider. Here the agent always uses the first of them, to speak to the gateway."""
    return _PACKAGES[provider]
