"""The arguments that name the model: one declaration for rollouts, task files and the command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, SecretStr

from rollcage.schema.option import Option
from rollcage.types import Value

KINDS: dict[str, JsonValue] = {
    "scripted": "no model: answers come from the task's own script",
    "local": "whatever ROLLCAGE_BASE_URL, ROLLCAGE_API_KEY and ROLLCAGE_MODEL name",
    "vllm": "a vLLM server (VLLM_URL)",
    "openai": "OpenAI (OPENAI_API_KEY)",
    "hf_router": "the Hugging Face router (HF_ROUTER_API_KEY)",
    "custom": "an address given in full: base_url, api_key and model",
}
"""Every kind of endpoint there is."""


class EndpointArguments(Value):
    """Who should think, and how it samples: both published shapes, every field optional."""

    endpoint: Annotated[str, Option("-e", metavar="KIND")] = Field(
        default="", title="Model", json_schema_extra={"x-choices": KINDS}
    )
    """Where the model is: `vllm`, `openai`, `hf_router`, `local`, `scripted`, or `custom` with `base_url`."""
    base_url: Annotated[str, Option(metavar="URL")] = Field(default="", title="Address")
    """The model's address; wins over the shorthand's. `/v1` is added where it is missing. The server's own keys are
    never sent to it."""
    api_key: Annotated[SecretStr, Option(metavar="KEY", more="Better set as a variable, where ps cannot see it.")] = (
        Field(default=SecretStr(""), title="Key")
    )
    """The model's key. It never enters the box, and is never stored or logged."""
    model: Annotated[
        str, Option("-m", metavar="NAME", more="Alone, all in one: openai/gpt-4o-mini, vllm, http://host/v1#model.")
    ] = Field(default="", title="Model name")
    """The model's name at that address."""
    model_key: Annotated[str, Option(metavar="KEY")] = ""
    """Older shape: `vllm://<repo>` (needs `vllm_url`) or `hf-router://<repo>:<provider>` (needs `hf_token`)."""
    vllm_url: Annotated[str, Option(metavar="URL")] = ""
    """The address that goes with a `model_key` of `vllm://...`."""
    hf_token: Annotated[SecretStr, Option(metavar="TOKEN")] = SecretStr("")
    """The key that goes with a `model_key` of `hf-router://...`. Never stored or logged."""
    thinking: Annotated[bool | None, Option()] = None
    """Whether the chat template may think; not given: the endpoint's own default, and no with `model_key`."""
    disable_thinking: bool | None = None
    """True: the chat template is told not to think; false: it is told nothing; not given: the endpoint's own
    default."""
    temperature: Annotated[float | None, Option()] = Field(default=None, ge=0, le=100, title="Temperature")
    """Sampling temperature."""
    seed: Annotated[int | None, Option()] = Field(default=None, ge=-(2**63), lt=2**63)
    """Sampling seed."""
    top_logprobs: Annotated[int, Option()] = Field(default=5, ge=0, le=20)
    """Alternatives asked for per token."""
    history: Annotated[Literal["as_sent", "exact"], Option()] = "as_sent"
    """`exact`: prompts begin with the ids of earlier turns as they were sampled; on vLLM from 0.32 on, and SGLang."""
    keep_reasoning: Annotated[bool, Option()] = True
    """With `history = "exact"`: false starts anew where the model's template leaves old reasoning out."""

    @property
    def names_something(self) -> bool:
        """Whether the caller says anything about who should think."""
        secrets = self.api_key.get_secret_value() or self.hf_token.get_secret_value()
        return bool(self.endpoint or self.base_url or self.model or self.model_key or self.vllm_url or secrets)
